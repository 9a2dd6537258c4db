"""Runs a model's program on the parts of one graph server.

The runner owns what an epoch writes: the row tensors of every hosted part, and one partial gradient a
(part, interval). All of it is allocated before the first epoch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import numpy as np

from dorylus_hpc.engine.executor import Executor
from dorylus_hpc.engine.intervals import cut_intervals
from dorylus_hpc.engine.loading import LoadedGraph
from dorylus_hpc.engine.schedule import Exchange, Span, Wave, nopipe
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
        self.intervals = {part.index: cut_intervals(part.in_edges.indptr, intervals) for part in graph.parts}
        self._ghosts = {part.index: (part.n_own, part.n_own + part.n_in_ghosts) for part in graph.parts}
        self._tensors = {part.index: self._allocate(part, trains) for part in graph.parts}
        slots = {index: len(cut) if trains else 0 for index, cut in self.intervals.items()}
        self._partials = {index: np.zeros((count, layout.size), dtype) for index, count in slots.items()}
        self._slots = {
            index: [layout.views(row) for row in partials] for index, partials in self._partials.items()
        }
        self.gradients = {index: np.zeros(layout.size, dtype) for index in slots} if trains else {}
        self._walk(program.setup_groups(), {}, epoch=0, training=False)

    def _allocate(self, part: PartOperands, trains: bool) -> dict[str, np.ndarray]:
        def rows(tensor: RowTensor) -> int:
            ghosts = {None: 0, "in": part.n_in_ghosts, "out": part.n_out_ghosts}
            return part.n_own + ghosts[tensor.ghosts]

        tensors = {
            name: np.zeros((rows(tensor), tensor.width), self._dtype)
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
        tasks = self._walk(self._program.training_groups(), weights, epoch=epoch, training=True)
        losses = dict.fromkeys(self._parts, 0.0)
        for task in tasks:
            losses[task.part.index] += task.loss
        for index, total in self.gradients.items():
            total[...] = 0
            for gradient in self._partials[index]:
                np.add(total, gradient, out=total)
        return np.array(list(losses.values()))

    def evaluate(self, weights: dict[str, np.ndarray]) -> None:
        """Run a forward without dropout: the logits are then those of `weights`. Collective."""
        start, seconds, sent = time.perf_counter(), self.seconds.copy(), self.sent_bytes
        self._walk(self._program.evaluation_groups(), weights, epoch=0, training=False)
        self.seconds, self.sent_bytes = seconds, sent
        self.seconds["eval"] += time.perf_counter() - start

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

    def _walk(
        self,
        groups: Iterable[tuple[Stage, ...]],
        weights: dict[str, np.ndarray],
        *,
        epoch: int,
        training: bool,
    ) -> list[Task]:
        """Execute one pass; return the tasks of its last wave that computes a loss, by (part, interval)."""
        with_loss: list[Task] = []
        for step in nopipe(groups, self.intervals, self._ghosts):
            if isinstance(step, Exchange):
                self._exchange(step.stage, epoch)
                continue
            tasks = self._run_wave(step, weights, epoch=epoch, training=training)
            with_loss += [task for task in tasks if task.loss]
        return with_loss

    def _run_wave(
        self, wave: Wave, weights: dict[str, np.ndarray], *, epoch: int, training: bool
    ) -> list[Task]:
        tasks = [self._task(span, weights, epoch, training) for span in wave.spans]
        work = [partial(_run_stages, wave.stages, task) for task in tasks]
        for seconds in self._executor.run(work):
            for stage, spent in zip(wave.stages, seconds, strict=True):
                self.seconds[stage.kind] += spent
        return tasks

    def _task(self, span: Span, weights: dict[str, np.ndarray], epoch: int, training: bool) -> Task:
        return Task(
            part=self._parts[span.part],
            rows=span.rows,
            tensors=self._tensors[span.part],
            weights=weights,
            gradients=self._slots[span.part][span.interval] if training and span.interval >= 0 else {},
            epoch=epoch,
            training=training,
            n_labelled=self._n_labelled,
        )

    def _exchange(self, stage: Stage, epoch: int) -> None:
        start = time.perf_counter()
        tensor = self._program.tensors[stage.tensor]
        halo = self._graph.halo_in if tensor.ghosts == "in" else self._graph.halo_out
        arrays = {index: tensors[stage.tensor] for index, tensors in self._tensors.items()}
        waited = halo.begin(arrays, epoch=epoch, layer=stage.layer).end()
        self.sent_bytes += halo.row_bytes(tensor.width, self._dtype.itemsize)
        self.seconds["wait"] += waited
        self.seconds[stage.kind] += time.perf_counter() - start - waited


def _run_stages(stages: tuple[Stage, ...], task: Task) -> list[float]:
    """Run stages one after the other on a task; return the seconds of each."""
    seconds = []
    for stage in stages:
        start = time.perf_counter()
        assert stage.run is not None
        stage.run(task)
        seconds.append(time.perf_counter() - start)
    return seconds
