"""A model run in one process on a small graph: whether it works at all, and whether its gradients are right.

The graph is directed and has isolated vertices; it is cut into two parts, whose ghosts' rows are copied where
ranks would exchange them, and parts into intervals, one of them without rows. Every row and every gradient is
NaN before a pass, so what is read before it is written is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp

from dorylus_hpc.engine.loading import LoadSettings, edge_operands, part_operands
from dorylus_hpc.engine.wiring import split_by_place
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.partition import Part, build_parts
from dorylus_hpc.graph.readers import from_arrays
from dorylus_hpc.nn.check import describe
from dorylus_hpc.nn.layers import FEATURES
from dorylus_hpc.nn.offload import plan_offload
from dorylus_hpc.nn.operands import DenseFeatures, Features, PartOperands, SparseFeatures, slice_edges
from dorylus_hpc.nn.params import plan_layout
from dorylus_hpc.nn.program import INPUT, LOSS, Pass, Program, Stage, Task, gradient_of
from lambda_pkg.ops import OutputSpec
from lambda_pkg.ops import run as run_ops

VERTICES, ARCS, ISOLATED, PARTS = 30, 110, 4, 2
STEPS = (1e-5, 1e-6, 1e-7)  # of finite differences; a shorter one is tried where a kink may lie in between
_ROUNDING = 8 * float(np.finfo(np.float64).eps)  # of a loss, relative
_FLOOR = 1e-3  # gradients of smaller tensors are compared absolutely: differences have rounding errors

Weights = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TensorCheck:
    """How a weight tensor's gradient compares with finite differences.

    Attributes
    ----------
    name, shape
        Of the tensor.
    error
        Largest difference of an element, relative to the largest element of the tensor's gradient.
    element
        Where that is.
    gradient, difference
        Both values there.
    ok
        The error is within the tolerance.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    element: tuple[int, ...]
    gradient: float
    difference: float
    ok: bool

    def __str__(self) -> str:
        """Return a line about the tensor."""
        place = ", ".join(map(str, self.element))
        line = f"{self.name} {self.shape}: largest error {self.error:.1e} at [{place}]"
        if self.ok:
            return line
        return f"{line}: WRONG: gradient {self.gradient:.9g}, finite difference {self.difference:.9g}"


def small_graph(n_features: int, n_classes: int, *, sparse: bool = False, seed: int = 0) -> GraphData:
    """Make a random directed graph with isolated vertices, and labels for most of its vertices."""
    rng = np.random.default_rng(seed)
    keys = rng.choice(VERTICES * VERTICES, ARCS, replace=False)
    sources, destinations = np.divmod(keys, VERTICES)
    kept = (np.maximum(sources, destinations) < VERTICES - ISOLATED) & (sources != destinations)
    arcs = sources[kept], destinations[kept]
    x: Any = rng.standard_normal((VERTICES, n_features))
    if sparse:
        x = sp.csr_array(np.where(rng.random(x.shape) < 0.5, x, 0.0))
    labels = rng.integers(-1, n_classes, VERTICES)
    labels[::5] = np.arange(len(labels[::5])) % n_classes
    train = np.flatnonzero(labels >= 0)[::2]
    rest = np.setdiff1d(np.flatnonzero(labels >= 0), train)
    return from_arrays(
        sp.coo_array((np.ones(len(arcs[0])), arcs), shape=(VERTICES, VERTICES)),
        x,
        labels,
        train=train,
        validation=rest[::2],
        test=rest[1::2],
        n_classes=n_classes,
    )


def _operands(graph: GraphData, settings: LoadSettings) -> tuple[list[Part], list[PartOperands]]:
    owner = np.arange(graph.n) * 7 % 5 % PARTS
    parts = [part.without_loops() for part in build_parts(graph, owner, parts=PARTS, order="none")]
    operands = []
    for part in parts:
        gids = np.concatenate([part.gid, part.in_edges.ghost_gid[: None if settings.ghost_features else 0]])
        features: Features
        if graph.sparse_features:
            x = sp.csr_array(graph.features[gids])
            features = SparseFeatures(
                x.indptr.astype(np.int64), x.indices.astype(np.int32), x.data.astype(settings.dtype),
                graph.n_features, gids,
            )  # fmt: skip
        else:
            features = DenseFeatures(graph.features[gids].astype(settings.dtype), gids)
        operands.append(part_operands(part, *edge_operands(part, settings), features))
    return parts, operands


class Trial:
    """Passes of a program over a graph in this process.

    Parameters
    ----------
    program
        A complete one.
    aggregate
        What its edges want.
    graph
        From `small_graph`.
    dtype
        Of all arithmetic.
    workers
        Dense stages that may run elsewhere run by their ops, as workers would run them.
    rematerialise
        Workers make again what they could read.
    """

    def __init__(
        self,
        program: Program,
        aggregate: str,
        graph: GraphData,
        *,
        dtype: Any = np.float64,
        workers: bool = False,
        rematerialise: bool = True,
    ) -> None:
        self.program, self.layout = program, plan_layout(program.params, 1)
        self._dtype, self._workers, self._rematerialise = np.dtype(dtype), workers, rematerialise
        settings = LoadSettings(self._dtype, aggregate=aggregate, ghost_features=program.reads_ghost_features)
        self._parts, self._operands = _operands(graph, settings)
        self._n_labelled = int(sum(part.train_mask.sum() for part in self._operands))
        self._slices = {
            (part.index, way): slice_edges(part.in_edges if way == "in" else part.out_edges, cut)
            for part, cut in zip(self._operands, self._intervals(), strict=True)
            for way in {tensor.collects for tensor in program.tensors.values() if tensor.collects}
        }
        self._constants: list[dict[str, np.ndarray]] = [{} for _ in self._parts]
        self._constants = self._allocate(training=True, constant=True)
        self._pass(program.setup_groups(), self._allocate(training=True), {}, training=True)

    def train(self, weights: Weights, epoch: int = 1, *, backward: bool = True) -> tuple[float, np.ndarray]:
        """Return the mean loss and the flat gradient of an epoch, which is NaN without the backward."""
        stages = self.program.training_groups() if backward else self._forward_groups()
        tensors = self._allocate(training=True)
        return self._pass(stages, tensors, weights, epoch=epoch, training=True)

    def evaluate(self, weights: Weights) -> np.ndarray:
        """Return the logits of a forward without dropout, part after part."""
        tensors = self._allocate(training=False)
        self._pass(self.program.evaluation_groups(), tensors, weights, training=False)
        logits = self.program.logits
        rows = [own[logits][: part.n_own] for own, part in zip(tensors, self._parts, strict=True)]
        return np.concatenate(rows)

    def _forward_groups(self) -> tuple[tuple[Stage, ...], ...]:
        groups = (
            tuple(stage for stage in group if not stage.kind.startswith("d"))
            for group in self.program.training_groups()
        )
        return tuple(group for group in groups if group)

    def _allocate(self, *, training: bool, constant: bool = False) -> list[dict[str, np.ndarray]]:
        """Make the row tensors of every part: NaN, and whole numbers 0."""
        made = []
        rows = sum(map(len, self._intervals()))
        sums = {
            tensor.name: np.full((rows, tensor.width), np.nan, tensor.dtype or self._dtype)
            for tensor in self.program.tensors.values()
            if tensor.sums and training
        }
        for part, kept in zip(self._operands, self._constants, strict=True):
            arrays = {**kept, **({} if constant else sums)}
            for tensor in self.program.tensors.values():
                if (
                    tensor.name in arrays
                    or tensor.sums
                    or tensor.constant != constant
                    or (tensor.trains_only and not training)
                ):
                    continue
                if tensor.collects:
                    n_rows = self._slices[part.index, tensor.collects][-1].place[1]
                    arrays[tensor.name] = np.full((n_rows, tensor.width), np.nan, tensor.dtype or self._dtype)
                    continue
                ghosts = {None: 0, "in": part.n_in_ghosts, "out": part.n_out_ghosts}[tensor.ghosts]
                dtype = np.dtype(tensor.dtype or self._dtype)
                fill = np.nan if dtype.kind == "f" else 0
                arrays[tensor.name] = np.full((part.n_own + ghosts, tensor.width), fill, dtype)
            if isinstance(part.features, DenseFeatures):
                arrays[INPUT] = part.features.x
            if training and self.program.drops_input:
                arrays[FEATURES] = part.features.buffer()
            made.append(arrays)
        return made

    def _pass(
        self,
        groups: Sequence[tuple[Stage, ...]],
        tensors: list[dict[str, np.ndarray]],
        weights: Weights,
        *,
        epoch: int = 1,
        training: bool,
    ) -> tuple[float, np.ndarray]:
        slots = [np.full((len(cut), self.layout.size), np.nan, self._dtype) for cut in self._intervals()]
        pieces = [
            piece
            for group in groups
            for piece in (split_by_place(group) if self._workers and group[0].run else (group,))
        ]
        dense = [piece for piece in pieces if piece[0].run]
        ends = max((at for at, piece in enumerate(pieces) if _is_forward(piece)), default=-1)
        loss = 0.0
        for at, stages in enumerate(pieces):
            if stages[0].run is None:
                self._exchange(stages[0], tensors)
                continue
            first = 0
            for part, own, cut, partials in zip(
                self._operands, tensors, self._intervals(), slots, strict=True
            ):
                units = [*enumerate(cut)]
                if stages[0].covers_ghosts and part.n_in_ghosts:
                    units.append((-1, (part.n_own, part.n_own + part.n_in_ghosts)))
                for number, rows in units:
                    gradients = self.layout.views(partials[number]) if training and number >= 0 else {}
                    task = Task(
                        part, rows, own, own, dict(weights), gradients, epoch, training, self._n_labelled,
                        number=first + number,
                        slices={
                            way: slices[number]
                            for (index, way), slices in self._slices.items()
                            if index == part.index
                        },
                    )  # fmt: skip
                    if self._workers and stages[0].ops is not None:
                        self._run_elsewhere(dense, dense.index(stages), task)
                    else:
                        for stage in stages:
                            _run(stage, task)
                    loss += task.loss if at == ends and number >= 0 else 0.0
                first += len(cut)
        return loss / self._n_labelled, np.concatenate(slots).sum(axis=0)

    def _intervals(self) -> list[list[tuple[int, int]]]:
        cuts = []
        for part in self._operands:
            bounds = [0, part.n_own // 3, part.n_own // 3, part.n_own]  # the second one has no rows
            cuts.append(list(pairwise(bounds)))
        return cuts

    def _exchange(self, stage: Stage, tensors: list[dict[str, np.ndarray]]) -> None:
        """Copy the rows of ghosts from whoever owns them."""
        if stage.tensor == INPUT:
            return  # they are there
        for part, own in zip(self._parts, tensors, strict=True):
            edges = part.in_edges if stage.kind == "SC" else part.out_edges
            for place, (owner, row) in enumerate(zip(edges.ghost_part, edges.ghost_lid, strict=True)):
                own[stage.tensor][part.n_own + place] = tensors[owner][stage.tensor][row]

    def _run_elsewhere(self, groups: list[tuple[Stage, ...]], place: int, task: Task) -> None:
        """Run dense stages as a worker would, which gets what it needs and gives what others need."""
        keep = () if task.training else (self.program.logits,)
        plan = plan_offload(self.program, groups, place, rematerialise=self._rematerialise, keep=keep)
        rows = slice(*task.rows)
        inputs = {name: task.block(name) for name in plan.rows}
        inputs |= {name: getattr(task.part, name)[rows] for name in plan.attributes}
        with_rows = frozenset(inputs)
        for name in plan.collected:
            way = self.program.tensors[name].collects
            assert way is not None
            inputs[name] = task.collected(name, way)
        inputs |= {name: task.edges(name) for name in plan.edges}
        inputs |= {name: task.weights[name] for name in plan.weights}
        outputs = {}
        for name in plan.makes:
            block = task.block(name)
            outputs[name] = OutputSpec(block.shape, block.dtype.str, True)
        for name in plan.gradients:
            outputs[gradient_of(name)] = OutputSpec(task.weights[name].shape, self._dtype.str, False)
        if plan.loss:
            outputs[LOSS] = OutputSpec((1,), "<f8", False)
        found = run_ops(
            plan.ops(Pass(task.epoch, task.training, task.n_labelled), 3), inputs, outputs, rows=with_rows
        )
        for name in plan.makes:
            task.block(name)[...] = found[name]
        for name in plan.gradients:
            task.gradients[name][...] = found[gradient_of(name)]
        if plan.loss:
            task.loss = float(found[LOSS][0])


def _run(stage: Stage, task: Task) -> None:
    assert stage.run is not None
    try:
        stage.run(task)
    except Exception as error:
        error.add_note(describe(stage))  # for whoever tells of it
        raise


def _is_forward(stages: tuple[Stage, ...]) -> bool:
    return any(stage.kind in ("GA", "AV") for stage in stages)


def random_weights(program: Program, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw weights of which none is 0, float64, so that products of any width stay of a size.

    What is a running average and starts with 1 is no less than 0.
    """
    rng = np.random.default_rng(seed)
    drawn = {}
    for spec in program.params:
        size = 2 / np.sqrt(spec.shape[0]) if len(spec.shape) == 2 else 1.0
        signs = rng.choice([-1.0, 1.0], spec.shape)
        if spec.average and spec.start:
            signs = np.abs(signs)
        drawn[spec.name] = size * rng.uniform(0.2, 0.9, spec.shape) * signs
    return drawn


def try_program(program: Program, aggregate: str, n_features: int, *, sparse: bool = False) -> None:
    """Run an epoch and an evaluation of a program for so many features on a small graph.

    Raises
    ------
    InputError
        Rows, the loss, or a gradient are not written, or are not finite.
    Exception
        Whatever a stage raises.
    """
    graph = small_graph(n_features, program.tensors[program.logits].width, sparse=sparse)
    weights = random_weights(program)
    trial = Trial(program, aggregate, graph)
    loss, flat = trial.train(weights)
    if not np.isfinite(loss):
        raise InputError(
            f"the loss is {loss} on a small graph: a row tensor is read before a stage writes it, or what a "
            "stage computes is not finite"
        )
    if loss == 0:
        raise InputError("no stage makes the loss: the last forward stages must be those of finish()")
    missing = [name for name, found in trial.layout.views(flat).items() if not np.isfinite(found).all()]
    if missing:
        raise InputError(
            f"the gradient of {missing[0]} is not finite on a small graph: no stage of the backward makes "
            "it, or makes it of something that no stage has written"
        )
    if not np.isfinite(trial.evaluate(weights)).all():
        raise InputError("an evaluation reads a row tensor that only training writes")


def compare_gradients(
    program: Program,
    aggregate: str,
    graph: GraphData,
    *,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> list[TensorCheck]:
    """Compare every weight's gradient, elementwise, with central finite differences, in float64.

    Parameters
    ----------
    program, aggregate, graph
        As for `Trial`. Dropout may be on: masks of an epoch are the same in every pass.
    tolerance
        Largest error of an element, relative to the largest of its tensor.
    seed
        Of the weights.

    Returns
    -------
    list of TensorCheck
        In the order of the program's weights; running averages are none.
    """
    trial = Trial(program, aggregate, graph)
    weights = random_weights(program, seed)
    _, flat = trial.train(weights)
    gradients = trial.layout.views(flat)

    def loss() -> float:
        return trial.train(weights, backward=False)[0]

    size = 1.0 + abs(loss())

    checks = []
    averages = {spec.name for spec in program.params if spec.average}
    for name, weight in weights.items():
        if name in averages:
            continue
        found = np.array([_difference(loss, weight, at, STEPS[0]) for at in np.ndindex(weight.shape)])
        found = found.reshape(weight.shape)
        scale = max(float(np.abs(found).max()), _FLOOR)
        errors = np.abs(gradients[name] - found) / scale
        errors[np.isnan(errors)] = np.inf
        for step in STEPS[1:]:
            for at in zip(*np.nonzero(errors > tolerance), strict=True):
                again = _difference(loss, weight, at, step)
                error = abs(gradients[name][at] - again) / scale
                if error <= tolerance + _ROUNDING * size / (step * scale):
                    found[at], errors[at] = again, min(error, tolerance)
        worst = np.unravel_index(int(errors.argmax()), errors.shape)
        place = tuple(int(one) for one in worst)
        checks.append(
            TensorCheck(
                name, weight.shape, float(errors[place]), place, float(gradients[name][place]),
                float(found[place]), bool(errors[place] <= tolerance),
            )
        )  # fmt: skip
    return checks


def _difference(loss: Callable[[], float], weight: np.ndarray, at: tuple[int, ...], step: float) -> float:
    kept = weight[at]
    weight[at] = kept + step
    above = loss()
    weight[at] = kept - step
    below = loss()
    weight[at] = kept
    return (above - below) / (2 * step)


def compare_workers(
    program: Program, aggregate: str, graph: GraphData, *, tolerance: float = 1e-9, seed: int = 0
) -> str:
    """Compare an epoch whose dense stages run by their ops, as in Lambda, with one by their functions.

    Returns
    -------
    str
        What differs, in words; empty where nothing does.
    """
    weights = random_weights(program, seed)
    trial = Trial(program, aggregate, graph)
    loss, flat = trial.train(weights)
    for rematerialise in (False, True):
        elsewhere = Trial(program, aggregate, graph, workers=True, rematerialise=rematerialise)
        other_loss, other = elsewhere.train(weights)
        if not abs(other_loss - loss) <= tolerance * max(abs(loss), 1.0):
            return f"the loss of workers is {other_loss:.9g}, that of the server {loss:.9g}"
        for name, found in trial.layout.views(flat).items():
            apart = np.abs(trial.layout.views(other)[name] - found)
            if not (apart <= tolerance * max(np.abs(found).max(), 1.0)).all():
                return f"the gradient of {name} that workers make is not that of the server"
        rows = elsewhere.evaluate(weights) - trial.evaluate(weights)
        if not np.abs(rows).max() <= tolerance:
            return "the output of workers is not that of the server"
    return ""
