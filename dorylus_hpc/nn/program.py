"""A model as a program of stages over named row tensors.

A layer is not code that loops over the graph: it *declares* stages, and the engine runs them, interval
by interval, wherever their inputs are ready. What a stage reads and writes are *row tensors*: arrays
with one row a vertex, named, of known width, some followed by the rows of the part's ghosts.

    forward     [AV Y1] | [GA H1, AV Y2] | SC Y2 | [GA Z2, AV loss, dAV dZ2] |
    backward    dSC dZ2 | [dGA dY2, dAV dH1, dZ1] | dSC dZ1 | [dGA dY1, dAV W1]

Between two bars all stages of a vertex interval follow each other at once (they read only the interval's
own rows: this is the planner's *fusion*). A bar stands where the next stage reads neighbours' rows: a
gather (GA, dGA) after a scatter (SC, dSC) has brought the ghosts. A reduction (RD) reads what every interval
of the graph has written of itself, a row each, and so waits for all of them.

A stage keeps nothing: whatever it needs later is a row tensor, and the engine decides how many copies
of it live (one an epoch in the exact modes).

Before the first epoch the features come, too, an interval at a time (`load_stages`):

    setup       [LD X] | SC X | [GA M1]

Reference: Dorylus (OSDI '21), section 3.1, the SAGA-NN model GA, AV, SC, AE, after NeuGraph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dorylus_hpc.nn.objective import Objective
from dorylus_hpc.nn.operands import EdgeSlice, PartOperands
from dorylus_hpc.nn.params import ParamSpec
from lambda_pkg.ops import Op

INPUT = "X"  # the features, own rows and ghosts, as they were loaded; only dense ones are a row tensor

LOSS = "loss"  # the sum over an interval's training vertices
# Of a part, a value a vertex.
ROW_ATTRIBUTES = ("gids", "labels", "train_mask", "split", "scale_in", "scale_out")
EDGE_ATTRIBUTES = ("in.indptr", "in.indices", "out.indptr", "out.indices")  # of an interval's `EdgeSlice`s


def gradient_of(weight: str) -> str:
    """Return the name of a weight tensor's gradient in the ops of a stage."""
    return f"d{weight}"


Kind = Literal["LD", "GA", "AV", "SC", "AE", "RD", "dGA", "dAV", "dSC", "dAE"]
Ghosts = Literal["in", "out"]


@dataclass(frozen=True)
class RowTensor:
    """An array with one row a vertex of a part, or one row an interval of the graph.

    Attributes
    ----------
    name
        Unique within the program.
    width
        Columns.
    ghosts
        Which ghosts' rows follow the own rows: those of the in-edges, of the out-edges, or none.
    trains_only
        Not needed for a forward without a backward.
    constant
        Written once, before the first epoch.
    dtype
        Empty: that of all arithmetic.
    sums
        It has a row for each interval of all parts, in order: of what RD adds up. All hosted parts share it.
    collects
        Not None: its rows are those that gathers over edges of this direction read, interval after interval,
        each once an interval; see `EdgeSlice`.
    """

    name: str
    width: int
    ghosts: Ghosts | None = None
    trains_only: bool = False
    constant: bool = False
    dtype: str = ""
    sums: bool = False
    collects: Ghosts | None = None


@dataclass
class Task:
    """What a stage sees when it runs on one interval of one part.

    Attributes
    ----------
    part
        The part's graph, features, labels and vertex ids in the dtype of the run.
    rows
        (start, stop): the interval, in local rows. For a stage that also covers ghosts it may lie
        among the ghosts.
    tensors
        The part's row tensors, whole, by name: what this interval has written, and where it writes.
    sources
        The same as gathers may read them: rows of all intervals and of ghosts. The same arrays, but in
        the asynchronous mode, where rows are put there when no gather reads.
    weights
        The weight version this interval is bound to, by name.
    gradients
        The interval's own partial gradient of each weight tensor, by name, to be overwritten.
    epoch
        From 1; keys the dropout.
    training
        False in an evaluation: no dropout, no gradient.
    n_labelled
        What the sum of the loss is divided by (`Objective.divisor`): as a rule the number of labelled
        training vertices in the whole graph.
    loss
        Sum of the loss over the interval's training vertices, written by the last forward stage.
    objective
        The loss.
    number
        Of the interval, among those of all parts.
    slices
        The interval's edges by direction, where row tensors collect what they read.
    """

    part: PartOperands
    rows: tuple[int, int]
    tensors: dict[str, np.ndarray]
    sources: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]
    epoch: int
    training: bool
    n_labelled: float
    loss: float = 0.0
    objective: Objective = field(default_factory=Objective)
    number: int = 0
    slices: Mapping[Ghosts, EdgeSlice] = field(default_factory=dict)

    def block(self, name: str) -> np.ndarray:
        """Return the interval's rows of a row tensor."""
        return self.tensors[name][self.rows[0] : self.rows[1]]

    def collected(self, name: str, way: Ghosts) -> np.ndarray:
        """Return what was collected for the interval's edges of a direction."""
        return self.tensors[name][slice(*self.slices[way].place)]

    def edges(self, name: str) -> np.ndarray:
        """Return one of `EDGE_ATTRIBUTES`."""
        way, _, array = name.partition(".")
        return getattr(self.slices[way], array)  # type: ignore[index]


@dataclass(frozen=True)
class Pass:
    """What the ops of a dense stage depend on, beside their arrays.

    Attributes
    ----------
    epoch, training, n_labelled, objective
        As for `Task`.
    """

    epoch: int
    training: bool
    n_labelled: float
    objective: Objective = field(default_factory=Objective)


@dataclass(frozen=True)
class Stage:
    """One step of a layer.

    Attributes
    ----------
    kind
        GA and dGA read neighbours' rows; AV and dAV only the interval's own; AE and dAE, of what belongs to
        edges, also rows that a gather of the same epoch has read; SC and dSC bring the ghosts' rows of
        `tensor`; LD loads the interval's own features, or (with a `tensor`) waits for neighbours' rows; RD
        reads all rows of `tensor`, one of sums.
    layer
        From 1.
    run
        The work on one interval; None for SC and dSC, which the engine does itself.
    tensor
        For SC and dSC: the row tensor whose ghost rows are wanted. For GA and dGA: the one that is gathered,
        empty where it never changes. For LD: the one that is waited for.
    covers_ghosts
        The stage also runs on the rows of ghosts (of in-edges), from inputs that are already here.
    trains_only
        The stage is left out of an evaluation.
    evaluates_only
        The stage is left out of the training.
    weightless
        A dense stage without weights: it need not wait for them.
    weighted
        A stage of another kind that reads weights.
    on_server
        A dense stage that stays where the graph is, even if others run elsewhere: it reads features, which
        are large and never change.
    ops
        The same work as `run` for a worker elsewhere, of a dense stage that is not `on_server`, or of an AE
        or dAE that is to run there. Names are those of row tensors, weights, gradients (`gradient_of`), the
        attributes `ROW_ATTRIBUTES` of the part and `EDGE_ATTRIBUTES` of the interval, and `LOSS`.
    reads
        Row tensors that `run` reads in the interval's own rows, where neither `ops` nor `tensor` tells.
    makes
        Row tensors and gradients that `run` writes, where `ops` does not tell; may be left out.
    """

    kind: Kind
    layer: int
    run: Callable[[Task], None] | None = None
    tensor: str = ""
    covers_ghosts: bool = False
    trains_only: bool = False
    evaluates_only: bool = False
    weightless: bool = False
    weighted: bool = False
    on_server: bool = False
    ops: Callable[[Pass], list[Op]] | None = None
    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """All that the engine needs to know of a model.

    Attributes
    ----------
    params
        Weight tensors.
    tensors
        Row tensors, by name.
    setup
        Stages that run once, before the first epoch, on what never changes.
    forward, backward
        Stages of an epoch, in an order that respects their reads.
    logits
        Name of the row tensor that holds the output.
    drops_input
        True if training uses dropout on the features: the task's ``features`` tensor then holds them
        (the stored values of sparse features), own rows and ghosts.
    orders
        Per layer ``aggregate-first`` or ``transform-first``.
    differs_in_evaluation
        True if training and evaluation behave differently (dropout, batch norm), so that accuracies need
        a forward of their own.
    replaces_input
        Name of a constant row tensor that may take the place of dense features: the last stage of the set-up
        makes it, each of its columns of the same column of the features, and no other stage reads features.
    tells_all
        Stages that have no `ops` tell all row tensors that they read and make.
    """

    params: tuple[ParamSpec, ...]
    tensors: dict[str, RowTensor]
    setup: tuple[Stage, ...]
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    logits: str
    drops_input: bool
    orders: tuple[str, ...]
    differs_in_evaluation: bool
    replaces_input: str = ""
    tells_all: bool = False

    def training_groups(self) -> tuple[tuple[Stage, ...], ...]:
        """Return the fused stages of an epoch, forward and backward."""
        forward = (stage for stage in self.forward if not stage.evaluates_only)
        return fuse((*forward, *self.backward))

    def evaluation_groups(self) -> tuple[tuple[Stage, ...], ...]:
        """Return the fused stages of a forward without dropout, up to the logits."""
        return fuse(stage for stage in self.forward if not stage.trains_only)

    def setup_groups(self) -> tuple[tuple[Stage, ...], ...]:
        """Return the fused stages that run once."""
        return fuse(self.setup)

    @property
    def reduces(self) -> bool:
        """Whether a stage reads sums of all intervals."""
        return any(stage.kind == "RD" for stage in (*self.forward, *self.backward))

    @property
    def reads_ghost_features(self) -> bool:
        """Whether a stage reads features of ghosts, loaded or with dropout."""
        return any(
            stage.covers_ghosts or (stage.run is None and stage.tensor == INPUT)
            for stage in (*self.setup, *self.forward)
        )

    @property
    def gathered(self) -> int:
        """Columns of the widest gather of an epoch, at least 1: a measure of an interval's work."""
        wide = self.params[0].shape[0]  # of the features, which are no row tensor of the program
        read = {stage.tensor for stage in (*self.forward, *self.backward) if stage.kind in ("GA", "dGA")}
        return max((self.tensors[name].width if name in self.tensors else wide for name in read), default=1)

    @property
    def product(self) -> int:
        """Elements of the largest weight matrix."""
        return max((spec.size for spec in self.params if len(spec.shape) == 2), default=0)


def names_of(stage: Stage) -> list[str]:
    """Return all names that a stage reads or makes, as far as it tells; of weights and gradients, too."""
    ops = stage.ops(Pass(epoch=1, training=True, n_labelled=1)) if stage.ops is not None else []
    tensor = [stage.tensor] if stage.tensor else []
    return [*tensor, *stage.reads, *stage.makes, *(name for op in ops for name in (*op[2], *op[3]))]


def read_by(stage: Stage) -> list[str]:
    """Return the names that a stage reads before it makes them, as far as it tells."""
    ops = stage.ops(Pass(epoch=1, training=True, n_labelled=1)) if stage.ops is not None else []
    return [*([stage.tensor] if stage.tensor else []), *stage.reads, *inputs_of(ops)]


def inputs_of(ops: Iterable[Op]) -> list[str]:
    """Return the names that ops read before they make them, in order."""
    made: set[str] = set()
    inputs: dict[str, None] = {}
    for _, _, reads, makes in ops:
        inputs.update(dict.fromkeys(name for name in reads if name not in made))
        made.update(makes)
    return list(inputs)


def load_stages(gather: Callable[[Task], None] | None = None, *, ghosts: bool = True) -> tuple[Stage, ...]:
    """Return the set-up of a model with dense features.

    Parameters
    ----------
    gather
        Gathers features once for all epochs; None: they are only to be there, those of ghosts too.
    ghosts
        False where nothing reads features of ghosts.
    """
    if not ghosts:
        return (Stage("LD", 1, _load),)
    if gather is None:
        last = Stage("LD", 1, lambda task: None, tensor=INPUT)
    else:
        last = Stage("GA", 1, gather, tensor=INPUT)
    return (Stage("LD", 1, _load), Stage("SC", 1, tensor=INPUT), last)


def _load(task: Task) -> None:
    load = task.part.features.load  # type: ignore[union-attr]
    if load is not None:
        load(task.rows)


def fuse(stages: Iterable[Stage]) -> tuple[tuple[Stage, ...], ...]:
    """Group stages that may follow each other at once on an interval.

    Parameters
    ----------
    stages
        In order.

    Returns
    -------
    tuple of tuple of Stage
        A group is one SC or dSC alone, or a run of stages of which only the first may read
        neighbours' rows or sums. Stages that cover ghosts are not mixed with ones that do not.
    """
    groups: list[tuple[Stage, ...]] = []
    for stage in stages:
        reads_others = stage.kind in ("GA", "dGA", "RD")
        exchanges = stage.run is None
        last = groups[-1][-1] if groups else None
        if (
            last is None
            or exchanges
            or reads_others
            or last.run is None
            or last.covers_ghosts != stage.covers_ghosts
        ):
            groups.append((stage,))
        else:
            groups[-1] += (stage,)
    return tuple(groups)
