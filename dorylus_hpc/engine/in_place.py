"""The aggregate of the features in the memory of the features, where no epoch reads these.

Rows are read by others until all is gathered, so nothing can be put in place row by row. Columns are
independent: a few of them are copied from all rows, gathered, and put back where they were. ::

    X  | a | b | c |  ->  copy a  ->  M of a  ->  | M a | b | c |  ->  copy b  ->  ...

So it takes the memory of the features and of two narrow matrices, and not that of the features twice.
Sums are made column by column whatever the width: the bits are those of a gather of all columns at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock

import numpy as np

from cython_kernels.layout import LINE, empty
from dorylus_hpc.engine.executor import Executor, lane_name
from dorylus_hpc.engine.wiring import GHOSTS
from dorylus_hpc.nn.operands import DenseFeatures, PartOperands
from dorylus_hpc.nn.program import Stage, Task
from dorylus_hpc.report.trace import Tracer

LINES = 2  # cache lines of columns at a time: each pass reads all edges, each line takes memory

Rows = tuple[int, int]


def aggregate_in_place(
    executor: Executor,
    part: PartOperands,
    stage: Stage,
    name: str,
    intervals: Sequence[Rows],
    tracer: Tracer,
) -> tuple[np.ndarray, float]:
    """Put what a stage makes of a part's features in their place, and give back the rows of ghosts.

    Parameters
    ----------
    executor
        Runs no other tasks meanwhile.
    part
        Its dense features, and those of its ghosts, are there. They are used up.
    stage
        Gathers the features; each column of what it makes depends on the same column of the features alone.
    name
        The row tensor that the stage makes.
    intervals
        Of the part's own rows.
    tracer
        Takes the work on each interval.

    Returns
    -------
    made : ndarray, (n_own, f_in)
        The row tensor.
    seconds
        Of work, summed over threads.
    """
    features = part.features
    assert isinstance(features, DenseFeatures)
    x, n_own = features.x, part.n_own
    n_columns = min(max(1, LINES * LINE // x.itemsize), x.shape[1])
    copies, sums = _Strip(len(x), n_columns, x.dtype), _Strip(n_own, n_columns, x.dtype)
    ghosts = [(n_own, len(x))] if len(x) > n_own else []
    threads = _Threads(executor, tracer, stage.layer, part.index, intervals)
    made: slice | None = None
    for first in range(0, x.shape[1], n_columns):
        columns = slice(first, min(first + n_columns, x.shape[1]))
        threads.run(partial(_move, x, sums, made, copies, columns), intervals)
        threads.run(partial(_move, x, sums, None, copies, columns), ghosts)
        here = replace(part, features=DenseFeatures(copies.of(columns), features.gids))
        threads.run(partial(_gather, stage, here, {name: sums.of(columns)}), intervals)
        made = columns
    if made is not None:
        threads.run(partial(_move, x, sums, made, copies, None), intervals)
    return features.give_up(n_own), threads.seconds


class _Strip:
    """Room for some columns of a matrix, beside each other."""

    def __init__(self, n_rows: int, n_columns: int, dtype: np.dtype) -> None:
        self._n_rows, self._memory = n_rows, empty((n_rows * n_columns,), dtype)

    def of(self, columns: slice) -> np.ndarray:
        """Return the array for these columns."""
        width = columns.stop - columns.start
        return self._memory[: self._n_rows * width].reshape(self._n_rows, width)


class _Threads:
    """Runs work on rows of a part, and takes note of it."""

    def __init__(
        self, executor: Executor, tracer: Tracer, layer: int, part: int, intervals: Sequence[Rows]
    ) -> None:
        self.seconds = 0.0
        self._executor, self._tracer, self._place = executor, tracer, (layer, part)
        self._numbers = {rows: number for number, rows in enumerate(intervals)}
        self._lock = Lock()

    def run(self, work: Callable[[Rows], None], pieces: Sequence[Rows]) -> None:
        """Return when all pieces are done."""
        for rows in pieces:
            self._executor.start(rows, partial(self._run, work, rows))
        for _ in pieces:
            self._executor.wait(None)

    def _run(self, work: Callable[[Rows], None], rows: Rows) -> None:
        begin = time.perf_counter()
        work(rows)
        end = time.perf_counter()
        layer, part = self._place
        self._tracer.task(
            "GA", begin, end, self._tracer.lane(lane_name()), epoch=0, layer=layer, part=part,
            interval=self._numbers.get(rows, GHOSTS),
        )  # fmt: skip
        with self._lock:
            self.seconds += end - begin


def _move(
    x: np.ndarray, sums: _Strip, made: slice | None, copies: _Strip, columns: slice | None, rows: Rows
) -> None:
    """Put columns that were made in their place, and copy the next ones."""
    first, last = rows
    if made is not None:
        x[first:last, made] = sums.of(made)[first:last]
    if columns is not None:
        copies.of(columns)[first:last] = x[first:last, columns]


def _gather(stage: Stage, part: PartOperands, tensors: dict[str, np.ndarray], rows: Rows) -> None:
    assert stage.run is not None
    stage.run(Task(part, rows, tensors, {}, {}, {}, epoch=0, training=False, n_labelled=1))
