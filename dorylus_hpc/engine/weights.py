"""Weights where they are owned: sum the partial gradients, step, publish."""

from __future__ import annotations

import time

import numpy as np

from dorylus_hpc.comm.weights import WeightServer
from dorylus_hpc.nn.optim import Optimizer
from dorylus_hpc.nn.params import FlatLayout


class WeightShard:
    """The latest version of all weights, and the optimizer state of those owned here.

    Parameters
    ----------
    layout
        The flat vector and its owners.
    owner
        Which of the owners this is.
    optimizer
        Applied elementwise, so the cut into owners changes no bit.
    initial
        Flat start weights: version 0. Not changed.

    Attributes
    ----------
    version
        Number of updates applied.
    flat
        The weights of that version; after `apply` the segments of other owners are to be filled in.
    """

    def __init__(self, layout: FlatLayout, owner: int, optimizer: Optimizer, initial: np.ndarray) -> None:
        self.version = 0
        self.flat = initial.copy()
        self._optimizer = optimizer
        self._segment = layout.segments[owner]
        views = layout.views(self.flat)
        self._owned = [
            (spec, start - self._segment[0], views[spec.name].reshape(-1))
            for spec, start, tensor_owner in zip(layout.specs, layout.offsets, layout.owners, strict=True)
            if tensor_owner == owner
        ]
        self._state = {spec.name: optimizer.init(spec.size, initial.dtype) for spec, _, _ in self._owned}
        self._sum = np.zeros(self._segment[1] - self._segment[0], initial.dtype)

    def apply(self, partials: np.ndarray) -> None:
        """Apply one update.

        Parameters
        ----------
        partials : ndarray, (n_parts, segment)
            A partial gradient a part; they are added in this order, whatever order they came in.
        """
        self._sum[...] = 0
        for partial in partials:
            np.add(self._sum, partial, out=self._sum)
        self.version += 1
        for spec, start, parameter in self._owned:
            gradient = self._sum[start : start + spec.size]
            self._optimizer.step(
                parameter, gradient, self._state[spec.name], self.version, weight_decay=spec.decay
            )


class WeightService:
    """A rank that owns weights: its shard, served over MPI.

    A parameter server does nothing else; a graph server that also owns weights calls `begin_epoch`
    before its own pull and `end_epoch` after its own pushes. Neither order can block: whatever is
    begun runs in the background until it is ended.

    Parameters
    ----------
    shard
        The weights.
    transport
        Their way to the graph servers and the other owners.

    Attributes
    ----------
    update_seconds : float
        Time spent in updates.
    """

    def __init__(self, shard: WeightShard, transport: WeightServer) -> None:
        self.update_seconds = 0.0
        self._shard, self._transport = shard, transport

    def begin_epoch(self, epoch: int) -> None:
        """Offer the weights that an epoch starts from, and expect its partial gradients."""
        self._transport.expect(epoch)
        self._transport.offer(epoch - 1, self._shard.flat)

    def end_epoch(self, epoch: int) -> None:
        """Wait for all partial gradients of an epoch, update, and publish the new version."""
        partials = self._transport.collect()
        start = time.perf_counter()
        self._shard.apply(partials)
        self.update_seconds += time.perf_counter() - start
        self._transport.publish(epoch, self._shard.flat)

    def begin_last(self, epochs: int) -> None:
        """Offer the final weights."""
        self._transport.offer(epochs, self._shard.flat)

    def end_last(self) -> None:
        """Wait until everybody has them."""
        self._transport.collect()

    def serve(self, epochs: int) -> None:
        """Do all of it: the whole life of a parameter server."""
        for epoch in range(1, epochs + 1):
            self.begin_epoch(epoch)
            self.end_epoch(epoch)
        self.begin_last(epochs)
        self.end_last()
