"""Reads features on a thread of its own, slice by slice, while the set-up goes on.

At first it reads ahead, part after part. Once intervals are known the schedule asks for the rows of each,
and has them read on the same thread if they are not there yet:

    io_0    LD LD LD LD | LD interval 4 | LD interval 5 | ...
    others  plan, wire  | GA interval 0 | GA interval 1 | ...

Rows that were read may be used at once, although the checksum of the features is known at the end only. What
is wrong with them, a checksum or a value that is not finite, is kept until `FeatureLoader.finish` tells it:
till then nothing may leave the process for good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from dorylus_hpc.engine.executor import IO, Executor, lane_name
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.part_file import StoredFeatures
from dorylus_hpc.report.trace import Tracer

SLICE_BYTES = 8 * 1024 * 1024

Rows = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Target:
    """Where an array of a part's features is to go.

    Attributes
    ----------
    name
        Of the stored array.
    out
        As many rows as are stored, C-contiguous, of the dtype of the run.
    refuses
        What is told of a value that is not finite in that dtype; empty if none is looked for.
    then
        Changes rows in place once they are there, the same whatever slices they come in; or None.
    """

    name: str
    out: np.ndarray
    refuses: str = ""
    then: Callable[[np.ndarray], object] | None = None


@dataclass(eq=False)
class _Reading:
    """How far a part is: rows of its targets, which are read one after the other."""

    part: int
    stored: StoredFeatures
    targets: Sequence[Target]
    target: int = 0
    done: int = 0  # rows of the present target
    failed: str = ""
    refused: str = ""
    finished: bool = False
    staging: np.ndarray = field(default_factory=lambda: np.empty(0))

    @property
    def over(self) -> bool:
        return self.target == len(self.targets)


class FeatureLoader:
    """Reads the features of the hosted parts.

    Parameters
    ----------
    executor
        Reads on its `IO` thread; None: on the thread that calls `finish` or `load`.
    tracer
        Takes the slices that are read ahead.
    """

    def __init__(self, executor: Executor | None, tracer: Tracer) -> None:
        self.seconds = 0.0
        self._executor, self._tracer = executor, tracer
        self._readings: dict[int, _Reading] = {}
        self._ahead: list[Future[None]] = []
        self._reads_ahead = True

    def add(self, part: int, stored: StoredFeatures, targets: Sequence[Target]) -> None:
        """Read a part, too; its targets in the order in which their arrays are stored."""
        assert [target.name for target in targets] == list(stored.arrays)
        reading = self._readings[part] = _Reading(part, stored, targets)
        self._skip_finished(reading)
        if self._executor is None:
            return
        for target in targets:  # a job a slice: jobs that have not begun end with the executor
            count = -(-len(target.out) // _rows_at_once(target.out))
            self._ahead += [self._executor.background(self._read_ahead, IO) for _ in range(count)]

    def hand_over(self) -> None:
        """Read no further ahead than the present slice: `load` says from now on what is wanted first."""
        self._reads_ahead = False

    def load(self, part: int, rows: Rows) -> None:
        """Return once these rows of a part, and all before them, are there.

        It may run on the `IO` thread only, or where nothing else reads.
        """
        reading = self._readings[part]
        while not reading.over and reading.done < rows[1]:
            self._read(reading, rows[1] - reading.done)

    def finish(self) -> None:
        """Return once all rows are there.

        Raises
        ------
        InputError
            Something is wrong with the features: of the first such part, a checksum before a value.
        """
        for job in self._ahead:
            job.result()
        self._ahead = []
        for reading in self._readings.values():
            while not reading.over:
                self._read(reading)
        for reading in self._readings.values():
            if not reading.finished and not reading.failed:
                reading.stored.check()
                reading.finished = True
                reading.staging = np.empty(0)
            if reading.failed or reading.refused:
                raise InputError(reading.failed or reading.refused)

    def _read_ahead(self) -> None:
        """Read the next slice there is."""
        reading = next((one for one in self._readings.values() if not one.over), None)
        if reading is None or not self._reads_ahead:
            return
        begin = time.perf_counter()
        self._read(reading)
        lane = self._tracer.lane(lane_name())
        end = time.perf_counter()
        self.seconds += end - begin
        self._tracer.task("LD", begin, end, lane, part=reading.part)

    def _read(self, reading: _Reading, most: int | None = None) -> None:
        """Read the next slice of a part, of so many rows at most."""
        target = reading.targets[reading.target]
        count = min(len(target.out) - reading.done, _rows_at_once(target.out))
        start, stop = reading.done, reading.done + (count if most is None else min(count, most))
        out = target.out[start:stop]
        try:
            _fetch(reading, target.name, start, out)
        except InputError as error:
            reading.failed, reading.target = str(error), len(reading.targets)
            return
        if target.refuses and not reading.refused and not np.isfinite(out).all():
            reading.refused = target.refuses
        if target.then is not None:
            with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is told later
                target.then(out)
        reading.done = stop
        self._skip_finished(reading)

    @staticmethod
    def _skip_finished(reading: _Reading) -> None:
        """Go on to the next array that has rows left."""
        while not reading.over and reading.done == len(reading.targets[reading.target].out):
            reading.target, reading.done = reading.target + 1, 0


def _fetch(reading: _Reading, name: str, start: int, out: np.ndarray) -> None:
    """Read rows as they are stored, and give them the dtype of the run."""
    dtype = reading.stored.arrays[name].dtype
    if dtype == out.dtype:
        reading.stored.read(name, start, out)
        return
    n_bytes = out.size * dtype.itemsize
    if reading.staging.nbytes < n_bytes:
        reading.staging = np.empty(n_bytes, np.uint8)
    raw = reading.staging[:n_bytes].view(dtype).reshape(out.shape)
    reading.stored.read(name, start, raw)
    with np.errstate(over="ignore"):  # what became infinite is found and told
        np.copyto(out, raw, casting="unsafe")


def _rows_at_once(array: np.ndarray) -> int:
    """Return how many rows of an array make a slice."""
    row_bytes = array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    return max(1, SLICE_BYTES // max(1, row_bytes))
