"""Row tensors that a task makes and uses up: they have rows for the tasks that run now, and no others.

What only one group of stages of a pass writes and reads is gone when its task on an interval ends; so is what
every group that reads it makes anew before. ::

    H1 dropped, Y2 = H1 W2 | GA Z2, loss, dZ2 | GA dY2, dH1 = dY2 W2^T, dW2, dZ1, dW1
                             ^^                    ^^^  ^^^                ^^^         nobody else reads these

Stages name rows of whole tensors, and go on doing so: a task is lent an array of all rows of which only those
of its interval are ever touched, and which the system gives memory for these alone (`pages`). It is a window
that is moved over the same memory, so that rows that are used again may still be in the caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cython_kernels.layout import LINE
from dorylus_hpc.engine.pages import Room
from dorylus_hpc.nn.program import Program, RowTensor, Stage, names_of, read_by

Groups = Sequence[tuple[Stage, ...]]

# Kinds of stages that read rows of others from what is gathered alone: in AE and dAE, too, these are rows
# that a gather of the epoch has read.
_OWN_ROWS = ("AV", "dAV", "GA", "dGA", "AE", "dAE")


def short_lived(
    program: Program, groups: Groups, *, keeps: Mapping[int, Sequence[str]] | None = None
) -> tuple[tuple[str, ...], ...]:
    """Find the row tensors that live in groups of stages alone, and not between them.

    Parameters
    ----------
    program
        The model.
    groups
        All groups of a pass, in order.
    keeps
        By group: tensors that are wanted beside what its stages tell; -1: after the pass. Names of
        anything else (weights) mean nothing.

    Returns
    -------
    tuple of tuple of str
        For each group the tensors that only it touches, or that it makes before it reads them, as all others
        do that touch them; in the order of the program. None at all where stages do not tell all that they
        touch.
    """
    if not program.tells_all:
        return tuple(() for _ in groups)
    place: dict[str, set[int]] = {name: set() for name in program.tensors}
    for name, tensor in program.tensors.items():
        if tensor.constant or tensor.sums or tensor.collects or tensor.ghosts is not None:
            place[name].add(-1)
    for number, names in (keeps or {}).items():
        for name in names:
            if name in place:
                place[name].add(number)
    begins: dict[str, set[int]] = {name: set() for name in place}  # groups that make it before they read it
    for number, stages in enumerate(groups):
        touched: set[str] = set()
        for stage in stages:
            if stage.run is not None and stage.ops is None and not stage.makes:
                return tuple(() for _ in groups)
            others = stage.covers_ghosts or stage.kind not in _OWN_ROWS
            names = names_of(stage)
            for name in set(names) - touched - set(read_by(stage)):
                if name in place:
                    begins[name].add(number)
            touched.update(names)
            for name in names:
                if name in place:
                    place[name].add(number)
                    if others or name == stage.tensor:
                        place[name].add(-1)
    return tuple(
        tuple(
            name
            for name, touching in place.items()
            if number in touching and (len(touching) == 1 or touching == begins[name])
        )
        for number in range(len(groups))
    )


@dataclass(frozen=True)
class _Window:
    """Where a tensor's rows are: which piece of the memory of a task, and how it is seen."""

    slot: int
    width: int
    dtype: np.dtype


class Scratch:
    """Lends memory for short-lived row tensors; by default there are none.

    Parameters
    ----------
    tensors
        The program's.
    plan
        By kind of pass: of each group the tensors that only it touches (`short_lived`).
    dtype
        Of all arithmetic.
    n_own
        Own rows of the largest hosted part.
    threads
        Tasks at once; more are possible, and then take memory that the first ones did not.

    Raises
    ------
    OSError
        The system does not give away addresses without memory.
    """

    def __init__(
        self,
        tensors: Mapping[str, RowTensor] | None = None,
        plan: Mapping[str, Sequence[Sequence[str]]] | None = None,
        dtype: npt.DTypeLike = np.float32,
        n_own: int = 0,
        threads: int = 0,
    ) -> None:
        self._plan: dict[tuple[str, int], dict[str, _Window]] = {}
        row_bytes: list[int] = []  # the most of each slot
        for kind, groups in (plan or {}).items():
            for group, names in enumerate(groups):
                lent = [(tensors or {})[name] for name in names]
                kinds = {tensor.name: np.dtype(tensor.dtype or dtype) for tensor in lent}
                sizes = {tensor.name: tensor.width * kinds[tensor.name].itemsize for tensor in lent}
                lent.sort(key=lambda tensor: -sizes[tensor.name])  # those of a slot are about as large
                row_bytes += [0] * (len(lent) - len(row_bytes))
                for slot, tensor in enumerate(lent):
                    row_bytes[slot] = max(row_bytes[slot], sizes[tensor.name])
                if lent:
                    self._plan[kind, group] = {
                        tensor.name: _Window(slot, tensor.width, kinds[tensor.name])
                        for slot, tensor in enumerate(lent)
                    }
        self._begins = [-(-n_own * most // LINE) * LINE for most in row_bytes]
        self._sizes = [begin + n_own * most for begin, most in zip(self._begins, row_bytes, strict=True)]
        self._spare = [self._make() for _ in range(threads if self._plan else 0)]

    def names(self, kind: str) -> frozenset[str]:
        """Return the tensors of a kind of pass that are lent."""
        return frozenset(name for (of, _), windows in self._plan.items() if of == kind for name in windows)

    @contextmanager
    def lend(self, kind: str, group: int, start: int, n_own: int) -> Iterator[dict[str, np.ndarray]]:
        """Lend the tensors of a group to a task.

        Parameters
        ----------
        kind, group
            Of the pass, and its group.
        start
            The first row of the task's interval.
        n_own
            Own rows of its part.

        Yields
        ------
        dict
            By name: an array of `n_own` rows. What is in them is left from others. Only rows of the
            interval may be touched: others would take memory, too.
        """
        windows = self._plan.get((kind, group))
        if not windows:
            yield {}
            return
        try:  # a list: whoever ended last was the last to touch what it gives back
            memory = self._spare.pop()
        except IndexError:
            memory = self._make()
        try:
            yield {name: self._view(memory, one, start, n_own) for name, one in windows.items()}
        finally:
            self._spare.append(memory)

    def _make(self) -> list[np.ndarray]:
        return [Room((size,), np.uint8, sparse=True).array for size in self._sizes]

    def _view(self, memory: Sequence[np.ndarray], window: _Window, start: int, n_own: int) -> np.ndarray:
        """Return an array whose row `start` is always at the same place in memory."""
        row_bytes = window.width * window.dtype.itemsize
        first = self._begins[window.slot] - start * row_bytes
        piece = memory[window.slot][first : first + n_own * row_bytes]
        return piece.view(window.dtype).reshape(n_own, window.width)
