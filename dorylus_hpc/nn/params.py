"""Weights as one flat vector, cut so that each tensor has one owner.

All tensors of a model live in one flat array. Those of one owner (a parameter server) are neighbours
there, so that a pull, a push to an owner, and a published update are each one contiguous message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dorylus_hpc.nn.init import glorot_uniform

_ALIGN = 16  # elements: every tensor starts on a cache line, whatever the cut


@dataclass(frozen=True)
class ParamSpec:
    """One weight tensor of a model.

    Attributes
    ----------
    name
        Unique within the model, such as ``W1`` or ``b1``.
    layer
        The layer it belongs to, from 1.
    shape
        (f_in, f_out) of a weight matrix, (f_out,) of a bias.
    decay
        L2 weight decay of this tensor.
    draw
        Which of its layer's matrices it is: each has start values of its own.
    start
        What a vector starts with, everywhere.
    average
        Not 0: the tensor is no weight but a running average. What stages give as its gradient is an epoch's
        value, and this its share in the average.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    decay: float = 0.0
    draw: int = 0
    start: float = 0.0
    average: float = 0.0

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class FlatLayout:
    """Where each tensor lies in the flat vector, and who owns it.

    Attributes
    ----------
    specs
        The tensors in the order of the model.
    offsets
        First element of each tensor, in the order of `specs`.
    owners
        Owner of each tensor, in the order of `specs`.
    segments
        (start, stop) of each owner's share of the flat vector; empty where it owns nothing.
    size
        Elements of the flat vector, padding included.
    """

    specs: tuple[ParamSpec, ...]
    offsets: tuple[int, ...]
    owners: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]
    size: int

    def views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return the tensors of a flat vector as views into it, by name."""
        return {
            spec.name: flat[start : start + spec.size].reshape(spec.shape)
            for spec, start in zip(self.specs, self.offsets, strict=True)
        }

    def initial(self, seed: int, dtype: np.dtype) -> np.ndarray:
        """Return the start weights: Glorot for matrices, for vectors what they say, zero by default."""
        flat = np.zeros(self.size, dtype)
        views = self.views(flat)
        for spec in self.specs:
            if len(spec.shape) == 2:
                views[spec.name][...] = glorot_uniform(seed, spec.layer, *spec.shape, dtype, draw=spec.draw)
            else:
                views[spec.name][...] = spec.start
        return flat


def plan_layout(specs: Sequence[ParamSpec], n_owners: int) -> FlatLayout:
    """Share the tensors among owners, largest first, each to the owner with the least so far.

    Parameters
    ----------
    specs
        The tensors of a model.
    n_owners
        Number of owners, at least 1. More owners than tensors leaves some with nothing.

    Returns
    -------
    FlatLayout
        The same on every rank that calls it with the same arguments.
    """
    owners = [0] * len(specs)
    load = [0] * n_owners
    for i in sorted(range(len(specs)), key=lambda i: (-specs[i].size, i)):
        owners[i] = min(range(n_owners), key=lambda owner: (load[owner], owner))
        load[owners[i]] += specs[i].size
    offsets = [0] * len(specs)
    segments = []
    at = 0
    for owner in range(n_owners):
        start = at
        for i, spec in enumerate(specs):
            if owners[i] == owner:
                offsets[i] = at
                at += -(-spec.size // _ALIGN) * _ALIGN
        segments.append((start, at))
    return FlatLayout(tuple(specs), tuple(offsets), tuple(owners), tuple(segments), at)
