"""Runs a model's program on the parts of one graph server.

The runner owns what an epoch writes: the row tensors of every hosted part, and one partial gradient a
(part, interval). All of it is allocated before the first epoch, and while features are still read; the set-up
then takes each interval as its rows come. It makes the tasks; a `Loop` runs them on
two *lines*: training, and evaluation, which has row tensors of its own where both go on at once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate
from threading import Lock

import numpy as np

from dorylus_hpc.comm.blocks import BlockExchange, Channel, cut_plan, sums_plan
from dorylus_hpc.comm.failure import together
from dorylus_hpc.engine.dense_tasks import DenseTasks, Offload
from dorylus_hpc.engine.executor import CPU, Delayed, Executor, lane_name
from dorylus_hpc.engine.in_place import aggregate_in_place
from dorylus_hpc.engine.intervals import cut_intervals
from dorylus_hpc.engine.loading import LoadedGraph
from dorylus_hpc.engine.pipeline import Line, Loop, Work
from dorylus_hpc.engine.rows import RowTensors, allocate
from dorylus_hpc.engine.schedule import Action, Mode, Round, Schedule, Unit
from dorylus_hpc.engine.scratch import Scratch, short_lived
from dorylus_hpc.engine.wiring import KINDS, wire
from dorylus_hpc.graph.data import TEST, TRAIN, VALIDATION
from dorylus_hpc.nn.objective import Objective
from dorylus_hpc.nn.operands import slice_edges
from dorylus_hpc.nn.params import FlatLayout
from dorylus_hpc.nn.program import INPUT, Program, Stage, Task, load_stages, names_of
from dorylus_hpc.report.trace import Tracer
from dorylus_hpc.serverless.tasks import DenseTask
from lambda_pkg.dense import tally, tally_width

SETS = (TRAIN, VALIDATION, TEST)
DENSE = "dense"
AHEAD = 1  # tasks given to the cores before a worker is free, so that none waits for the loop


@dataclass(frozen=True)
class Experiment:
    """Delays added on purpose, to see what a mode makes of them.

    Attributes
    ----------
    dense_delay
        Seconds before every dense task, as if its worker were far away. They are then tasks of their own.
    straggler
        How many times as long some tasks of the last graph server take.
    straggling
        Share of its tasks that do.
    """

    dense_delay: float = 0.0
    straggler: float = 1.0
    straggling: float = 0.25

    def factor(self, epoch: int, unit: int, group: int) -> float:
        """Return how many times as long a task takes; drawn from its name alone."""
        if self.straggler == 1.0:
            return 1.0
        draw = np.random.default_rng([epoch, unit + 1, group]).random()
        return self.straggler if draw < self.straggling else 1.0


@dataclass(frozen=True, eq=False)
class Results:
    """What the last stage of a round found on a part.

    Attributes
    ----------
    loss
        Sum over its training vertices, added in the order of its intervals.
    tally : ndarray, (sets, columns), int64, or None
        Right and wrong answers of the training, validation and test vertices (`lambda_pkg.dense.tally`);
        None where they were not counted.
    scores : ndarray, (labelled vertices in a set,), float64
        How much rather class 1 than class 0, of the vertices of each set and class, one after the other;
        empty where nobody wants them.
    """

    loss: float
    tally: np.ndarray | None = None
    scores: np.ndarray = field(default_factory=lambda: np.empty(0))


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
        Threads to run on; it must have workers called ``dense`` if the experiment delays dense tasks.
    dtype
        Of all arithmetic.
    mode
        ``nopipe``, ``pipe`` or ``async``.
    intervals
        Intervals a part, at least 1; a part of fewer vertices gets fewer.
    n_labelled
        What the sum of the loss is divided by (`Objective.divisor`): as a rule the labelled training vertices
        of the whole graph.
    objective
        The loss.
    scores
        Whether to collect the scores of two classes with the answers.
    trains
        False leaves out all that only a backward needs.
    evaluates_beside
        Evaluations go on beside the training, on row tensors of their own.
    keeps_logits
        `logits` is asked for after evaluations.
    offload
        How dense tasks go to the executor's remote ``dense``; None: they run here.
    experiment
        Delays.
    saves_memory
        Features that no epoch reads make way for their aggregate: the graph then has none any more. Row
        tensors that a task makes and uses up have memory for the tasks that run.
    tracer
        Takes what happens.

    Raises
    ------
    AgreedError
        The features that were loaded are damaged or not finite, on any rank. Collective, as is making one.

    Attributes
    ----------
    training, evaluation : Line
    loop : Loop
        Runs both.
    tensors : RowTensors
        Of the training line.
    seconds : dict
        Time spent by kind of stage, summed over tasks; evaluations in ``eval`` alone.
    intervals : dict
        The (start, stop) intervals of each hosted part.
    gradients : dict
        By part: the sum that `add_gradients` made.
    counts_training, counts_evaluation : bool
        Whether the training forward, and that of evaluations, counts right and wrong answers.
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
        n_labelled: float = 1,
        objective: Objective | None = None,
        scores: bool = False,
        trains: bool = True,
        evaluates_beside: bool = False,
        keeps_logits: bool = True,
        offload: Offload | None = None,
        experiment: Experiment | None = None,
        saves_memory: bool = True,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer or Tracer(time.perf_counter(), limit=0)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._program, self._executor, self._mode = program, executor, mode
        self._parts = {part.index: part for part in graph.parts}
        self._n_labelled, self._objective, self._scores = n_labelled, objective or Objective(), scores
        width = tally_width(program.tensors[program.logits].width, several=self._objective.several)
        self._tally_shape = (len(SETS), width)
        self._experiment = experiment or Experiment()
        self._far = _Numbers()
        self.intervals = {
            part.index: cut_intervals(part.in_edges.indptr, intervals) or ((0, 0),) for part in graph.parts
        }
        slots = {index: len(cut) if trains else 0 for index, cut in self.intervals.items()}
        self._partials = {index: np.zeros((count, layout.size), dtype) for index, count in slots.items()}
        self._slots = {
            index: [layout.views(row) for row in partials] for index, partials in self._partials.items()
        }
        self.gradients = {index: np.zeros(layout.size, dtype) for index in slots} if trains else {}
        self._results: defaultdict[tuple[bool, int, int], dict[int, _Found]] = defaultdict(dict)
        self._lock = Lock()  # of the results and the seconds, which tasks write
        comm = graph.halo_in.comm
        cuts = {part: cut for rank in comm.allgather(self.intervals) for part, cut in rank.items()}
        plans = {"in": cut_plan(graph.halo_in.plan, cuts), "out": cut_plan(graph.halo_out.plan, cuts)}
        if program.reduces:
            hosts = {part: graph.placement.host(part) for part in cuts}
            plans["all"] = sums_plan(hosts, comm.Get_rank(), cuts)
        counts = [len(cut) for _, cut in sorted(cuts.items())]
        self._slices = {
            (index, way): slice_edges(part.in_edges if way == "in" else part.out_edges, self.intervals[index])
            for way in {one.collects for one in program.tensors.values() if one.collects}
            for index, part in self._parts.items()
        }
        collected = {key: cut[-1].place[1] for key, cut in self._slices.items()}
        self._first_number = dict(zip(sorted(cuts), accumulate([0, *counts]), strict=False))
        # Features that no epoch reads are not gathered row by row, but where they are, once all are there.
        self._replaced = program.replaces_input if saves_memory else ""
        self._wiring = wire(
            replace(program, setup=load_stages()) if self._replaced else program,
            self._parts,
            self.intervals,
            plans,  # type: ignore[arg-type]
            peers=[rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()],
            dense=DENSE if self._experiment.dense_delay or offload else CPU,
            fuse=offload is None or offload.fuse,
        )
        self._dense = (
            DenseTasks(
                program,
                self._wiring.stages,
                offload,
                self._tally_shape,
                self._objective,
                keeps_logits=scores,
            )
            if offload
            else None
        )

        def line(tensors: RowTensors, *, first: bool) -> Line:
            channels = [Channel(table.name, plans[table.direction]) for table in self._wiring.tables]
            exchange = BlockExchange(comm, channels, counts, tensors.own, tensors.shared)
            return Line(self._wiring, exchange, first=first)

        self._last_forward = {
            kind: max(
                (
                    place
                    for place, stages in enumerate(groups)
                    if any(stage.kind in ("GA", "AV") for stage in stages)
                ),
                default=-1,
            )
            if kind != "setup"
            else -1
            for kind, groups in self._wiring.stages.items()
        }
        apart = {table.name for table in self._wiring.tables} - {INPUT} if mode == "async" else set()
        beside = evaluates_beside or mode == "async"
        self._scratch = self._plan_scratch(dtype, keeps_logits, offload) if saves_memory else Scratch()
        lent = {kind: self._scratch.names(kind) for kind in KINDS}
        only_trained = {name for name, tensor in program.tensors.items() if tensor.trains_only}
        here = (
            lent["evaluate"]
            if not trains
            else lent["train"]
            if beside
            else lent["train"] & (lent["evaluate"] | only_trained)
        )
        self.tensors = allocate(
            program, self._parts, dtype, trains=trains, apart=apart, without={*here, self._replaced},
            intervals=sum(counts), collected=collected,
        )  # fmt: skip
        without = {*lent["evaluate"], self._replaced}
        self._evaluated = (
            allocate(
                program,
                self._parts,
                dtype,
                trains=False,
                without=without,
                constants=self.tensors,
                collected=collected,
            )  # fmt: skip
            if beside
            else self.tensors
        )
        self.training = line(self.tensors, first=True)
        self.evaluation = line(self._evaluated, first=False)
        self.loop = Loop(executor, [self.training, self.evaluation], self._tracer)
        self.counts_training, self.counts_evaluation = False, True
        self._straggles = comm.Get_rank() == comm.Get_size() - 1
        graph.loader.hand_over()
        self.training.exchange.begin_setup()
        self._run_alone("setup", {}, epoch=0)
        together(comm, graph.loader.finish)  # only now is it known whether the features were the right ones
        self.training.exchange.end_setup()
        if self._replaced:
            self._replace_features()
        self.seconds["LD"] += graph.loader.seconds
        self.loop.seconds["SC"] = self.seconds["SC"] = 0.0  # as bytes: what is told of messages is of epochs

    def _plan_scratch(self, dtype: np.dtype, keeps_logits: bool, offload: Offload | None) -> Scratch:
        """Return memory for what tasks make and use up; none where the system does not allow it."""
        logits, plan = self._program.logits, {}
        for kind in ("train", "evaluate"):
            groups = self._wiring.stages[kind]
            keeps = {self._last_forward[kind]: [logits], -1: [logits] if keeps_logits else []}
            if offload is not None:  # what travels is a row tensor
                keeps[-1] += [
                    name
                    for group, stages in zip(self._wiring.groups[kind], groups, strict=True)
                    if group.resource == DENSE
                    for stage in stages
                    for name in names_of(stage)
                ]
            plan[kind] = short_lived(self._program, groups, keeps=keeps)
        n_own = max((part.n_own for part in self._parts.values()), default=0)
        try:
            return Scratch(self._program.tensors, plan, dtype, n_own, self._executor.threads)
        except OSError:
            return Scratch()

    def _replace_features(self) -> None:
        """Aggregate the features where they are."""
        gather = self._program.setup[-1]
        for index, part in self._parts.items():
            made, seconds = aggregate_in_place(
                self._executor, part, gather, self._replaced, self.intervals[index], self._tracer
            )
            self.seconds[gather.kind] += seconds
            for tensors in (self.tensors, self._evaluated):
                tensors.replace_input(index, self._replaced, made)

    # One round at a time, with given weights.

    def train(self, weights: dict[str, np.ndarray], epoch: int) -> np.ndarray:
        """Run forward and backward of one epoch alone, in an exact mode. Collective over graph servers.

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
        results = self._run_alone("train", weights, epoch=epoch)
        for part in self.gradients:
            self.add_gradients(part)
        return np.array([results[part].loss for part in self._parts])

    def evaluate(self, weights: dict[str, np.ndarray]) -> dict[int, Results]:
        """Run one forward without dropout alone: the logits are then those of `weights`. Collective."""
        return self._run_alone("evaluate", weights, epoch=0)

    def _run_alone(self, kind: str, weights: dict[str, np.ndarray], *, epoch: int) -> dict[int, Results]:
        line = self.evaluation if kind == "evaluate" else self.training
        work = GivenWeights(self, kind, weights, epoch)
        mode: Mode = "pipe" if self._mode == "async" else self._mode
        self.loop.do(line, self.begin(line, kind, mode, [Round(kind, epoch, kind == "train")], work))
        self.loop.run(lambda: line.schedule is not None and line.schedule.finished)
        self.loop.leave()
        return work.results

    # What whoever runs many rounds needs.

    def begin(
        self,
        line: Line,
        kind: str,
        mode: Mode,
        rounds: Sequence[Round],
        work: Work,
        *,
        staleness: int = 0,
    ) -> list[Action]:
        """Start a schedule on a line; its first actions are the loop's to do."""
        schedule = Schedule(
            mode,
            self._wiring.topology,
            self._wiring.tables,
            self._wiring.groups,
            rounds,
            workers={**self._executor.workers, CPU: self._executor.threads + AHEAD},
            staleness=staleness,
            reads=self._wiring.reads,
        )
        return line.begin(schedule, kind, len(rounds), work)

    def task(
        self,
        kind: str,
        unit: int,
        number: int,
        group: int,
        weights: Mapping[str, np.ndarray],
        epoch: int,
        version: str = "",
    ) -> Callable[[], None] | Delayed | DenseTask:
        """Make the task of a unit and a group of stages; equal versions mean equal weights."""
        place = self._wiring.topology.units[unit]
        tensors = self._evaluated if kind == "evaluate" else self.tensors
        training = kind == "train"
        task = Task(
            part=self._parts[place.part],
            rows=self._wiring.rows[unit],
            tensors=tensors.own[place.part],
            sources=tensors.shared[place.part],
            weights=dict(weights),
            gradients=self._slots[place.part][place.interval] if training and place.interval >= 0 else {},
            epoch=epoch,
            training=training,
            n_labelled=self._n_labelled,
            objective=self._objective,
            number=self._first_number[place.part] + place.interval,
            slices={
                way: cut[place.interval] for (part, way), cut in self._slices.items() if part == place.part
            },
        )
        key = (kind == "evaluate", number, place.part, place.interval)
        ends = group == self._last_forward[kind] and place.interval >= 0
        if self._dense is not None and self._wiring.groups[kind][group].resource == DENSE:
            return self._dense.make(
                kind,
                group,
                task,
                priority=(kind == "evaluate", number, group, unit),
                counts=ends and self._counts(evaluates=kind == "evaluate"),
                version=version,
                finish=partial(self._finish, self._wiring.stages[kind][group][0], task, key, ends),
            )
        factor = self._experiment.factor(epoch, unit, group) if self._straggles else 1.0
        far = self._wiring.groups[kind][group].resource == DENSE
        run = partial(
            self._run,
            self._wiring.stages[kind][group],
            task,
            key,
            group=(kind, group),
            far=(self._far.take(), time.perf_counter()) if far else None,
            factor=factor,
            ends=ends,
            sends=self._sends(kind, unit, group),
        )
        return Delayed(run, factor * self._experiment.dense_delay) if far else run

    def _sends(self, kind: str, unit: int, group: int) -> int | None:
        """Return the table whose rows leave this rank when a unit has done a group of stages."""
        table = self._wiring.groups[kind][group].writes
        if table is None or not self._wiring.tables[table].exchanged:
            return None
        return table if self._wiring.topology.sends[self._wiring.tables[table].direction][unit] else None

    def take_results(self, kind: str, number: int, part: int) -> Results:
        """Return what a round found on a part whose intervals have all done it, and forget it."""
        with self._lock:
            found = self._results.pop((kind == "evaluate", number, part))
        ordered = [one for _, one in sorted(found.items())]  # always in the same order
        loss = 0.0
        for one in ordered:
            loss += one.loss
        if not self._counts(evaluates=kind == "evaluate"):
            return Results(loss)
        counts = np.zeros(self._tally_shape, np.int64)
        for one in ordered:
            assert one.tally is not None
            counts += one.tally
        groups = zip(*(one.scores for one in ordered), strict=True)
        pieces = [piece for group in groups for piece in group]
        return Results(loss, counts, np.concatenate(pieces) if pieces else np.empty(0))

    def add_gradients(self, part: int) -> np.ndarray:
        """Add the partial gradients of a part's intervals, always in the same order."""
        total = self.gradients[part]
        total[...] = 0
        for gradient in self._partials[part]:
            np.add(total, gradient, out=total)
        return total

    def gradient(self, part: int, interval: int) -> np.ndarray:
        """Return the flat partial gradient of an interval, valid until it starts another epoch's."""
        return self._partials[part][interval]

    def unit(self, number: int) -> Unit:
        """Return a unit by its number."""
        return self._wiring.topology.units[number]

    def show(self, table: int, unit: int) -> None:
        """Show rows that a unit wrote aside to the gathers of the training."""
        place = self.unit(unit)
        self.tensors.show(place.part, self._wiring.tables[table].name, self._wiring.rows[unit])

    def settle(self) -> None:
        """Drop what an asynchronous schedule that ended early left, and go on exactly. Collective.

        Evaluations and letters go on meanwhile: others may wait for them.
        """
        line, exchange = self.training, self.training.exchange
        self._take_rest(line)
        line.expects = False  # what comes from now on is of the next phase
        if exchange.n_ranks > 1:
            self.loop.run(exchange.meet().Test)
        exchange.forget()
        line.restart()
        line.expects = True
        self.tensors.unite()
        with self._lock:  # evaluations go on beside
            for key in [key for key in self._results if not key[0]]:
                del self._results[key]

    def leave(self) -> None:
        """Take what is still to come, at the end of a run, and wait until all has left. Collective.

        Of an epoch that was stopped, and of the last ones in ``async``, blocks come that nobody here waits
        for; a large one leaves its sender only when it is taken.
        """
        for line in (self.training, self.evaluation):
            line.expects = True
            self._take_rest(line)
        self.loop.leave()

    def _take_rest(self, line: Line) -> None:
        if line.exchange.n_ranks > 1:
            line.exchange.count()
            self.loop.run(line.exchange.has_all)

    @property
    def parts(self) -> tuple[int, ...]:
        """The hosted parts."""
        return tuple(self._parts)

    def close(self) -> None:
        """Give back what MPI keeps for this runner, after a whole run. Collective."""
        self.training.exchange.close()
        self.evaluation.exchange.close()

    def logits(self, part: int) -> np.ndarray:
        """Return the output rows of a hosted part's own vertices, as the last evaluation left them."""
        return self._evaluated.own[part][self._program.logits][: self._parts[part].n_own]

    def _counts(self, *, evaluates: bool) -> bool:
        """Whether a round counts answers."""
        return self.counts_evaluation if evaluates else self.counts_training

    def _found(self, task: Task, counted: np.ndarray | None) -> _Found:
        """Return what the end of an interval's forward found; `counted` already by whoever computed it."""
        evaluates = not task.training
        if not self._counts(evaluates=evaluates):
            return _Found(task.loss)
        rows, part = slice(*task.rows), task.part
        labels, split = part.labels[rows], part.split[rows]
        logits = task.block(self._program.logits)
        if counted is None:
            counted = tally(logits, labels, split, len(SETS))
        return _Found(task.loss, counted, _scores(logits, labels, split) if self._scores else [])

    def _run(
        self,
        stages: tuple[Stage, ...],
        task: Task,
        key: tuple[bool, int, int, int],
        *,
        group: tuple[str, int],
        far: tuple[int, float] | None,
        factor: float,
        ends: bool,
        sends: int | None,
    ) -> None:
        """Run stages one after the other, on a thread of the executor, and pack what is to be sent.

        `far`: the number of the worker far away that is said to do it, and when it was given to that.
        """
        evaluates, number, part, interval = key
        now = time.perf_counter()
        times = [far[1] if far else now]
        with self._scratch.lend(*group, task.rows[0], task.part.n_own) as lent:
            task.tensors = {**task.tensors, **lent}
            for stage in stages:
                assert stage.run is not None
                stage.run(task)
                times.append(time.perf_counter())
            found = self._found(task, None) if ends else None
        if factor > 1.0:
            time.sleep((factor - 1.0) * (time.perf_counter() - now))
        times[-1] = time.perf_counter()
        lane = self._tracer.lane(lane_name() if far is None else f"{DENSE}_{far[0]}")
        if far is not None:
            self._far.free(far[0])
        if sends is not None:
            self._pack(sends, task, key, lane)
        for stage, begin, end in zip(stages, times[:-1], times[1:], strict=True):
            self._tracer.task(
                stage.kind, begin, end, lane, epoch=task.epoch, layer=stage.layer, part=part,
                interval=interval, evaluation=evaluates,
            )  # fmt: skip
        with self._lock:
            for stage, begin, end in zip(stages, times[:-1], times[1:], strict=True):
                self.seconds["eval" if evaluates else stage.kind] += end - begin
            if found is not None:
                self._results[evaluates, number, part][interval] = found

    def _pack(self, number: int, task: Task, key: tuple[bool, int, int, int], lane: int) -> None:
        """Pack an interval's rows of a table for other ranks."""
        evaluates, _, part, interval = key
        table, began = self._wiring.tables[number], time.perf_counter()
        line = self.evaluation if evaluates else self.training
        line.exchange.prepare(number, (part, interval))
        now, kind = time.perf_counter(), table.kind
        self._tracer.task(
            kind, began, now, lane, epoch=task.epoch, layer=table.layer, part=part, interval=interval,
            evaluation=evaluates,
        )  # fmt: skip
        with self._lock:
            self.seconds["eval" if evaluates else kind] += now - began

    def _finish(
        self,
        stage: Stage,
        task: Task,
        key: tuple[bool, int, int, int],
        ends: bool,
        begin: float,
        end: float,
        lane: str,
        loss: float,
        counted: np.ndarray,
    ) -> None:
        """Take note of a group that a worker elsewhere ran; the first stage gives it its name."""
        evaluates, number, part, interval = key
        task.loss = loss
        found = self._found(task, counted) if ends else None
        self._tracer.task(
            stage.kind, begin, end, self._tracer.lane(lane), epoch=task.epoch, layer=stage.layer, part=part,
            interval=interval, evaluation=evaluates,
        )  # fmt: skip
        with self._lock:
            self.seconds["eval" if evaluates else stage.kind] += end - begin
            if found is not None:
                self._results[evaluates, number, part][interval] = found


@dataclass(frozen=True, eq=False)
class _Found:
    """What the end of a forward found on an interval; scores by set and class."""

    loss: float
    tally: np.ndarray | None = None
    scores: Sequence[np.ndarray] = ()


def _scores(logits: np.ndarray, labels: np.ndarray, split: np.ndarray) -> list[np.ndarray]:
    """Return how much rather class 1 than class 0, by set and class.

    The difference of the logits rises with the probability, but two that differ are never rounded to the same
    1. What is not a number comes last.
    """
    two = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        score = two[:, 1] - two[:, 0]
    score[np.isnan(score)] = -np.inf
    return [score[(split == member) & (labels == one)] for member in SETS for one in (0, 1)]


class _Numbers:
    """The smallest numbers that are free, from 0."""

    def __init__(self) -> None:
        self._freed: list[int] = []
        self._next = 0
        self._lock = Lock()

    def take(self) -> int:
        """Take the smallest that is free."""
        with self._lock:
            if self._freed:
                return heappop(self._freed)
            self._next += 1
            return self._next - 1

    def free(self, number: int) -> None:
        """Give one back."""
        with self._lock:
            heappush(self._freed, number)


class GivenWeights:
    """One round with weights that are there."""

    def __init__(self, runner: Runner, kind: str, weights: Mapping[str, np.ndarray], epoch: int) -> None:
        self.results: dict[int, Results] = {}
        self._runner, self._kind, self._weights, self._epoch = runner, kind, weights, epoch

    def task(self, unit: int, number: int, group: int) -> Callable[[], None] | Delayed | DenseTask:
        """Make a task."""
        return self._runner.task(self._kind, unit, number, group, self._weights, self._epoch)

    def bind(self, unit: int, number: int, least: int) -> bool:
        """Weights are always there."""
        return True

    def release(self, unit: int, number: int) -> None:
        """Nobody waits for them."""

    def complete(self, part: int, number: int) -> None:
        """Keep the results."""
        if self._kind != "setup":
            self.results[part] = self._runner.take_results(self._kind, number, part)

    def install(self, table: int, unit: int) -> None:
        """Exact modes write where they read."""

    def progress(self, done: int) -> None:
        """Nobody is told."""
