"""Makes the dense tasks of intervals, for workers elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from dorylus_hpc.nn.objective import Objective
from dorylus_hpc.nn.offload import TALLY, DenseGroup, plan_offload
from dorylus_hpc.nn.program import LOSS, Pass, Program, Stage, Task, gradient_of
from dorylus_hpc.serverless.tasks import DenseTask
from lambda_pkg.ops import Op, OutputSpec


@dataclass(frozen=True)
class Offload:
    """How dense work is given to workers elsewhere.

    Attributes
    ----------
    fuse
        The last layer's forward and backward are one task.
    rematerialise
        Backward tasks make again what they could read.
    chunk
        Rows that travel and are computed at a time; 0: a whole interval.
    """

    fuse: bool = True
    rematerialise: bool = True
    chunk: int = 0


Finish = Callable[[float, float, str, float, np.ndarray], None]  # begin, end, lane, loss, tally


class DenseTasks:
    """Makes tasks; results go where the stages would have written them.

    An array that comes back where it went out is received aside and copied: an attempt that dies in the
    middle must not spoil what the next one reads.

    Parameters
    ----------
    program
        The model.
    stages
        By kind of pass: the groups.
    offload
        How.
    tally_shape
        Sets in which answers are counted, and the numbers of each.
    objective
        The loss.
    keeps_logits
        Whoever counts answers wants the logits, too.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[str, Sequence[tuple[Stage, ...]]],
        offload: Offload,
        tally_shape: tuple[int, int],
        objective: Objective,
        *,
        keeps_logits: bool = False,
    ) -> None:
        self._program, self._stages, self._offload = program, stages, offload
        self._tally_shape, self._objective, self._keeps_logits = tally_shape, objective, keeps_logits
        self._groups: dict[tuple[str, int, bool], DenseGroup] = {}
        self._ops: dict[tuple[str, int, bool, int], list[Op]] = {}
        self._spare: dict[tuple[tuple[int, ...], np.dtype], list[np.ndarray]] = {}
        self._lock = Lock()  # of the spare arrays

    def make(
        self,
        kind: str,
        group: int,
        task: Task,
        *,
        priority: tuple[int, ...],
        counts: bool,
        version: str,
        finish: Finish,
    ) -> DenseTask:
        """Make the task of a group of dense stages.

        Parameters
        ----------
        kind, group
            Of the pass, and its group.
        task
            The interval.
        priority
            The lowest goes first.
        counts
            Also count right and wrong answers.
        version
            Of the weights: equal only if they are; empty: not known.
        finish
            Takes the times, the lane, the loss and the answers counted.
        """
        plan = self._plan(kind, group, counts=counts)
        inputs = {name: task.block(name) for name in plan.rows}
        for name in plan.attributes:
            inputs[name] = getattr(task.part, name)[task.rows[0] : task.rows[1]]
        rows = frozenset(inputs)
        for name in plan.collected:
            way = self._program.tensors[name].collects
            assert way is not None
            inputs[name] = task.collected(name, way)
        for name in plan.edges:
            inputs[name] = task.edges(name)
        for name in plan.weights:
            inputs[name] = task.weights[name]
        outputs: dict[str, OutputSpec] = {}
        buffers: dict[str, np.ndarray] = {}
        copies: list[tuple[np.ndarray, np.ndarray]] = []

        def output(name: str, buffer: np.ndarray, *, has_rows: bool) -> None:
            if name in inputs:
                spare = self._room(buffer)
                copies.append((buffer, spare))
                buffer = spare
            outputs[name] = OutputSpec(buffer.shape, buffer.dtype.str, has_rows)
            buffers[name] = buffer

        for name in plan.makes:
            output(name, task.block(name), has_rows=True)
        for name in plan.gradients:
            output(gradient_of(name), task.gradients[name], has_rows=False)
        if plan.loss:
            output(LOSS, np.zeros(1), has_rows=False)
        if plan.counts:
            output(TALLY, np.zeros(self._tally_shape, np.int64), has_rows=False)

        def end(begin: float, ended: float, lane: str) -> None:
            for target, source in copies:
                target[...] = source
            self._give_back(source for _, source in copies)
            loss = float(buffers[LOSS][0]) if plan.loss else 0.0
            finish(begin, ended, lane, loss, buffers[TALLY] if plan.counts else _NO_COUNTS)

        return DenseTask(
            kind=plan.name,
            priority=priority,
            program=self._program_of(kind, group, plan, task, counts=counts),
            inputs=inputs,
            rows=rows,
            keys={name: f"{name}@{version}" for name in plan.weights} if version else {},
            outputs=outputs,
            buffers=buffers,
            chunk=0 if plan.edges else self._offload.chunk,  # edges read rows of all chunks
            finish=end,
        )

    def _plan(self, kind: str, group: int, *, counts: bool) -> DenseGroup:
        key = (kind, group, counts)
        if key not in self._groups:
            self._groups[key] = plan_offload(
                self._program,
                self._stages[kind],
                group,
                rematerialise=self._offload.rematerialise,
                counts=counts,
                keep=(self._program.logits,) if kind == "evaluate" or (counts and self._keeps_logits) else (),
            )
        return self._groups[key]

    def _program_of(self, kind: str, group: int, plan: DenseGroup, task: Task, *, counts: bool) -> list[Op]:
        """Return the ops of an epoch, the same object for all its intervals."""
        key = (kind, group, counts, task.epoch)
        if key not in self._ops:
            way = Pass(task.epoch, task.training, task.n_labelled, self._objective)
            while len(self._ops) >= _KEPT_PROGRAMS:
                del self._ops[next(iter(self._ops))]
            self._ops[key] = plan.ops(way, self._tally_shape[0])
        return self._ops[key]

    def _room(self, like: np.ndarray) -> np.ndarray:
        with self._lock:
            spare = self._spare.get((like.shape, like.dtype))
            return spare.pop() if spare else np.empty_like(like)

    def _give_back(self, arrays: Iterable[np.ndarray]) -> None:
        with self._lock:
            for array in arrays:
                self._spare.setdefault((array.shape, array.dtype), []).append(array)


_KEPT_PROGRAMS = 64
_NO_COUNTS = np.zeros(0, np.int64)
