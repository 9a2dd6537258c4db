"""The row tensors of the hosted parts: what tasks write, and what gathers read.

In exact modes these are the same arrays. In the asynchronous mode an interval may write rows of the next
epoch while others still gather those of this one: it writes into arrays of its own, and its rows are
copied to the shared ones when no gather reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from dorylus_hpc.engine.pages import Room
from dorylus_hpc.nn.layers import FEATURES
from dorylus_hpc.nn.operands import DenseFeatures, PartOperands
from dorylus_hpc.nn.program import INPUT, Ghosts, Program, RowTensor

Arrays = dict[int, dict[str, np.ndarray]]  # by part and name


class RowTensors:
    """Row tensors of one line.

    Attributes
    ----------
    own
        Where tasks write, by part and name.
    shared
        Where gathers read, by part and name.
    """

    def __init__(self, own: Arrays, shared: Arrays) -> None:
        self.own, self.shared = own, shared

    def show(self, part: int, name: str, rows: tuple[int, int]) -> None:
        """Copy rows from where they were written to where they are read."""
        self.shared[part][name][rows[0] : rows[1]] = self.own[part][name][rows[0] : rows[1]]

    def replace_input(self, part: int, name: str, array: np.ndarray) -> None:
        """Have a row tensor of a part in place of its features."""
        for arrays in (self.own[part], self.shared[part]):
            arrays[name] = array
            arrays.pop(INPUT, None)

    def unite(self) -> None:
        """Write from now on where gathers read."""
        for part, arrays in self.shared.items():
            self.own[part].update(arrays)


def allocate(
    program: Program,
    parts: Mapping[int, PartOperands],
    dtype: np.dtype,
    *,
    trains: bool,
    apart: Iterable[str] = (),
    without: Collection[str] = (),
    constants: RowTensors | None = None,
    intervals: int = 0,
    collected: Mapping[tuple[int, Ghosts], int] | None = None,
) -> RowTensors:
    """Make the row tensors of the hosted parts, zero; dense features are one of them as they are.

    Parameters
    ----------
    program
        Which there are.
    parts
        The hosted parts.
    dtype
        Of all arithmetic.
    trains
        False leaves out those that only a backward needs.
    apart
        Tensors that are written apart from where they are read.
    without
        Tensors to leave out.
    constants
        Take tensors that never change from these.
    intervals
        Of all parts of the graph: rows of tensors of sums, which the hosted parts share.
    collected
        By hosted part and direction: rows of tensors that collect what edges read.
    """
    shared: Arrays = {}
    sums = {
        name: _zeros((intervals, tensor.width), np.dtype(tensor.dtype or dtype))
        for name, tensor in program.tensors.items()
        if tensor.sums and (trains or not tensor.trains_only)
    }
    for index, part in parts.items():
        shared[index] = {}
        for name, tensor in program.tensors.items():
            if name in without or (tensor.trains_only and not trains):
                continue
            if tensor.sums:
                shared[index][name] = sums[name]
            elif tensor.collects:
                rows = (collected or {})[index, tensor.collects]
                shared[index][name] = _zeros((rows, tensor.width), np.dtype(tensor.dtype or dtype))
            elif tensor.constant and constants is not None:
                shared[index][name] = constants.shared[index][name]
            else:
                shared[index][name] = _zeros(
                    (_n_rows(part, tensor), tensor.width), np.dtype(tensor.dtype or dtype)
                )
        if isinstance(part.features, DenseFeatures):
            shared[index][INPUT] = part.features.x
        if trains and program.drops_input:
            shared[index][FEATURES] = part.features.buffer()
    own = {
        index: {**arrays, **{name: _zeros(arrays[name].shape, arrays[name].dtype) for name in apart}}
        for index, arrays in shared.items()
    }
    return RowTensors(own, shared)


def _n_rows(part: PartOperands, tensor: RowTensor) -> int:
    return part.n_own + {None: 0, "in": part.n_in_ghosts, "out": part.n_out_ghosts}[tensor.ghosts]


def _zeros(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Make zeros that begin at a cache line, so that vectors of the kernels do not straddle two.

    They take memory only once an epoch writes them: the set-up has its own arrays meanwhile.
    """
    return Room(shape, dtype).array
