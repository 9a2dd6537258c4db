"""Runs a model's program on the parts of one graph server.

The runner owns what an epoch writes: the row tensors of every hosted part, and one partial gradient a
(part, interval). All of it is allocated before the first epoch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from threading import Lock

import numpy as np

from cython_kernels.layout import empty
from dorylus_hpc.comm.blocks import BlockExchange, Channel, cut_plan
from dorylus_hpc.engine.executor import Executor
from dorylus_hpc.engine.intervals import cut_intervals
from dorylus_hpc.engine.loading import LoadedGraph
from dorylus_hpc.engine.pipeline import Pipeline
from dorylus_hpc.engine.schedule import Mode
from dorylus_hpc.engine.wiring import wire
from dorylus_hpc.graph.data import TEST, TRAIN, UNLABELLED, VALIDATION
from dorylus_hpc.nn.gcn import FEATURES
from dorylus_hpc.nn.operands import PartOperands
from dorylus_hpc.nn.params import FlatLayout
from dorylus_hpc.nn.program import Program, RowTensor, Stage, Task

SETS = (TRAIN, VALIDATION, TEST)


class Runner:
    """Forward, backward and evaluation of the hosted parts.

    Parameters
    ----------
    graph
        The hosted parts and their exchanges.
    program
        The model.
    layout
        Where each weight tensor lies.
    executor
        Threads to run on.
    dtype
        Of all arithmetic.
    mode
        ``nopipe`` or ``pipe``.
    intervals
        Intervals a part, at least 1; a part of fewer vertices gets fewer.
    n_labelled
        Labelled training vertices of the whole graph.
    trains
        False leaves out all that only a backward needs.

    Attributes
    ----------
    seconds : dict
        Time spent by kind of stage, summed over tasks, and in ``wait``.
    sent_bytes : int
        Bytes of ghost rows sent so far for training.
    intervals : dict
        The (start, stop) intervals of each hosted part.
    """

    def __init__(
        self,
        graph: LoadedGraph,
        program: Program,
        layout: FlatLayout,
        executor: Executor,
        *,
        dtype: np.dtype,
        mode: Mode = "pipe",
        intervals: int = 1,
        n_labelled: int = 1,
        trains: bool = True,
    ) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.sent_bytes = 0
        self._graph, self._program, self._executor = graph, program, executor
        self._parts = {part.index: part for part in graph.parts}
        self._n_labelled = n_labelled
        self._dtype = dtype
        self._mode = mode
        self.intervals = {
            part.index: cut_intervals(part.in_edges.indptr, intervals) or ((0, 0),) for part in graph.parts
        }
        self._tensors = {part.index: self._allocate(part, trains) for part in graph.parts}
        slots = {index: len(cut) if trains else 0 for index, cut in self.intervals.items()}
        self._partials = {index: np.zeros((count, layout.size), dtype) for index, count in slots.items()}
        self._slots = {
            index: [layout.views(row) for row in partials] for index, partials in self._partials.items()
        }
        self.gradients = {index: np.zeros(layout.size, dtype) for index in slots} if trains else {}
        self._losses: dict[tuple[int, int], float] = {}
        self._lock = Lock()  # of the two above, which tasks write
        comm = graph.halo_in.comm
        cuts = {part: cut for rank in comm.allgather(self.intervals) for part, cut in rank.items()}
        plans = {"in": cut_plan(graph.halo_in.plan, cuts), "out": cut_plan(graph.halo_out.plan, cuts)}
        self._wiring = wire(program, self._parts, self.intervals, plans)  # type: ignore[arg-type]
        channels = [Channel(table.name, plans[table.direction]) for table in self._wiring.tables]
        counts = [len(cut) for _, cut in sorted(cuts.items())]
        self._exchange = BlockExchange(comm, channels, counts, self._tensors)
        self._pipeline = Pipeline(self._wiring, self._exchange, executor)
        self._pass("setup", {}, epoch=0, training=False)

    def _allocate(self, part: PartOperands, trains: bool) -> dict[str, np.ndarray]:
        def rows(tensor: RowTensor) -> int:
            ghosts = {None: 0, "in": part.n_in_ghosts, "out": part.n_out_ghosts}
            return part.n_own + ghosts[tensor.ghosts]

        tensors = {
            name: _zeros((rows(tensor), tensor.width), self._dtype)
            for name, tensor in self._program.tensors.items()
            if trains or not tensor.trains_only
        }
        if trains and self._program.drops_input:
            tensors[FEATURES] = part.features.buffer()
        return tensors

    def train(self, weights: dict[str, np.ndarray], epoch: int) -> np.ndarray:
        """Run forward and backward of an epoch. Collective over graph servers.

        Parameters
        ----------
        weights
            By name; not changed.
        epoch
            From 1.

        Returns
        -------
        ndarray, (hosted parts,), float64
            Sum of the loss over each part's training vertices. The parts' partial gradients are in
            `gradients`, by part, valid until the next call.
        """
        self._losses.clear()
        before = self._pipeline.sent_bytes
        self._pass("train", weights, epoch=epoch, training=True)
        self.sent_bytes += self._pipeline.sent_bytes - before
        losses = dict.fromkeys(self._parts, 0.0)
        for part, interval in sorted(self._losses):  # always in the same order
            losses[part] += self._losses[part, interval]
        for index, total in self.gradients.items():
            total[...] = 0
            for gradient in self._partials[index]:
                np.add(total, gradient, out=total)
        return np.array(list(losses.values()))

    def evaluate(self, weights: dict[str, np.ndarray]) -> None:
        """Run a forward without dropout: the logits are then those of `weights`. Collective."""
        start, seconds = time.perf_counter(), self.seconds.copy()
        self._pass("evaluate", weights, epoch=0, training=False)
        self.seconds = seconds
        self.seconds["eval"] += time.perf_counter() - start

    def close(self) -> None:
        """Give back what MPI keeps for this runner, after a whole run. Collective."""
        self._exchange.close()

    def logits(self, part: int) -> np.ndarray:
        """Return the output rows of a hosted part's own vertices, as the last pass left them."""
        return self._tensors[part][self._program.logits][: self._parts[part].n_own]

    def correct(self) -> np.ndarray:
        """Count right answers in the logits that the last pass left.

        Returns
        -------
        ndarray, (hosted parts, 3), float64
            Correctly classified training, validation and test vertices.
        """
        counts = np.zeros((len(self._parts), len(SETS)))
        for row, part in enumerate(self._parts.values()):
            if part.n_own == 0:
                continue
            right = (self.logits(part.index).argmax(axis=1) == part.labels) & (part.labels != UNLABELLED)
            for column, member in enumerate(SETS):
                counts[row, column] = np.count_nonzero(right & (part.split == member))
        return counts

    def _pass(self, kind: str, weights: dict[str, np.ndarray], *, epoch: int, training: bool) -> None:
        """Run one pass over all units. Collective."""
        before = dict(self._pipeline.seconds)
        self._pipeline.run(self._mode, kind, partial(self._task, kind, weights, epoch, training))
        for name, seconds in self._pipeline.seconds.items():
            self.seconds[name] += seconds - before[name]

    def _task(
        self, kind: str, weights: dict[str, np.ndarray], epoch: int, training: bool, unit: int, group: int
    ) -> Callable[[], None]:
        """Make the task of a unit and a group of stages."""
        place = self._wiring.topology.units[unit]
        task = Task(
            part=self._parts[place.part],
            rows=self._wiring.rows[unit],
            tensors=self._tensors[place.part],
            weights=weights,
            gradients=self._slots[place.part][place.interval] if training and place.interval >= 0 else {},
            epoch=epoch,
            training=training,
            n_labelled=self._n_labelled,
        )
        return partial(self._run, self._wiring.stages[kind][group], task, (place.part, place.interval))

    def _run(self, stages: tuple[Stage, ...], task: Task, place: tuple[int, int]) -> None:
        """Run stages one after the other, on a thread of the executor."""
        spent = []
        for stage in stages:
            start = time.perf_counter()
            assert stage.run is not None
            stage.run(task)
            spent.append((stage.kind, time.perf_counter() - start))
        with self._lock:
            for kind, seconds in spent:
                self.seconds[kind] += seconds
            if task.loss:
                self._losses[place] = task.loss


def _zeros(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Make zeros that begin at a cache line, so that vectors of the kernels do not straddle two."""
    array = empty(shape, dtype)
    array[...] = 0
    return array
