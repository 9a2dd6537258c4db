"""Layers of one's own, written as a few stages over functions of arrays.

A layer derived from `OwnLayer` says which weights it has, which row tensors and how wide they are, and its
stages, forward and backward. Names are local to the layer: ``Y`` is the row tensor ``Y2`` in layer 2, and
``dY`` its gradient. The layer's output is ``H``. ::

    forward     V = D W, G = D U     products(V="W", G="U")
                Y = f(V, G)          vertices(f, "V G -> Y")
                H = P Y              gather("Y", "H")
                bias, ReLU, loss     *finish()

    backward    dH of Z, db          *finish_backward()
                dY = P^T dH          gather_backward("dH", "dY")
                dV, dG               vertices_backward(f_backward, "V G dY -> dV dG")
                dW, dU, d(D)         *products_backward(V="W", G="U")

`complete` adds what follows from this: the exchange of ghosts' rows before each gather (not before that of
layer 1, if the rows of ghosts can be computed from their features, which every rank has), which ghosts
a row tensor needs, where stages run, and start values for each matrix of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from dorylus_hpc.errors import InputError
from dorylus_hpc.nn import layers as shared
from dorylus_hpc.nn.layers import FEATURES, Layer, plan_layers
from dorylus_hpc.nn.params import ParamSpec
from dorylus_hpc.nn.program import (
    INPUT,
    Ghosts,
    Pass,
    Program,
    RowTensor,
    Stage,
    Task,
    gradient_of,
    load_stages,
    names_of,
)
from lambda_pkg.dense import apply_vertex, apply_vertex_backward
from lambda_pkg.ops import Op

SUMS = ("gcn", "mean", "mean-self", "sum", "sum-self")  # aggregates that a plain gather computes

_ANY = Pass(epoch=1, training=True, n_labelled=1)
_SIGNATURE = re.compile(r"\s*((?:\w+[\s,]*)+)->((?:[\s,]*\w+)+)\s*")


@dataclass(frozen=True)
class _OnBlocks:
    """A function of arrays as the work of a stage: blocks and weights in, blocks and gradients out."""

    function: Callable[..., Any]
    layer: int
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    weights: frozenset[str]
    gradients: frozenset[str]

    def __call__(self, task: Task) -> None:
        made = self.function(
            *(task.weights[name] if name in self.weights else task.block(name) for name in self.reads)
        )
        values = made if isinstance(made, tuple) else (made,)
        if len(values) != len(self.makes):
            raise InputError(f"{self.told} must return {len(self.makes)} arrays, but returned {len(values)}")
        targets = [
            task.gradients[name[1:]] if name in self.gradients else task.block(name) for name in self.makes
        ]
        for name, target, value in zip(self.makes, targets, values, strict=True):
            if np.shape(value) != target.shape:
                raise InputError(f"{self.told}: {name} has shape {target.shape}, got {np.shape(value)}")
        # What is returned may be what was taken, and lie where something else is written first.
        apart = [
            np.array(value) if any(np.may_share_memory(value, other) for other in targets[:number]) else value
            for number, value in enumerate(values)
        ]
        for target, value in zip(targets, apart, strict=True):
            target[...] = value

    @property
    def told(self) -> str:
        """The function, for messages."""
        name = getattr(self.function, "__name__", repr(self.function))
        return f"layer {self.layer}, {name} ({' '.join(self.reads)} -> {' '.join(self.makes)})"


class OwnLayer(Layer):
    """The base class of a layer of one's own.

    A subclass has `aggregate`, `params`, `widths`, `forward` and `backward`; the latter two are made of the
    methods below, or of `Stage` objects. It has no state: several intervals are in flight at once.

    Attributes
    ----------
    aggregate : str
        What `gather` takes from the sources of a vertex's in-edges, a name of `dorylus_hpc.graph.normalise`:
        ``gcn``, ``mean``, ``mean-self``, ``sum`` or ``sum-self``; or ``max`` or ``attention``, of which
        `gather` knows nothing: such a layer calls the kernels in stages of its own.
    index, f_in, f_out, first, last
        See `Layer`.

    Examples
    --------
    See *Models of your own* in the README.
    """

    aggregate: ClassVar[str] = ""

    def widths(self) -> dict[str, int]:
        """Return the columns of each row tensor beside H; a gradient is as wide as what it belongs to."""
        return {}

    @property
    def order(self) -> str:
        """What to tell of the order of its stages."""
        return "own stages"

    # Weights.

    def matrix(self, name: str, f_in: int = 0, f_out: int = 0) -> ParamSpec:
        """Return a matrix of weights, by default (f_in, f_out); it decays and starts as Glorot's."""
        return ParamSpec(
            f"{name}{self.index}", self.index, (f_in or self.f_in, f_out or self.f_out), self.decay
        )

    def bias(self, name: str = "b", width: int = 0) -> ParamSpec:
        """Return a vector of weights, by default (f_out,); it does not decay and starts at 0."""
        return ParamSpec(f"{name}{self.index}", self.index, (width or self.f_out,))

    # Stages of the forward.

    def products(self, **weights: str) -> list[Stage]:
        """Return the products of the layer's input: ``products(V="W")`` is V = D W.

        In layer 1 D are the features, dense or sparse.
        """
        return [self._product(self.named(tensor), self.named(weight)) for tensor, weight in weights.items()]

    def vertices(self, function: Callable[..., Any], names: str) -> Stage:
        """Return a stage that computes, of each vertex, rows from its own rows.

        Parameters
        ----------
        function
            Takes arrays and returns as many as are wanted, as a tuple if there are several. Rows are those of
            some vertices, perhaps of none. It must not change what it is given.
        names
            What it takes and what it makes, such as ``"V b -> Y"``: row tensors of this layer, weights of
            this layer, ``input`` (the output of the layer before). What is made may have been taken, too.
        """
        return self._on_blocks("AV", function, names)

    def gather(self, source: str, target: str, *, adds: bool = False) -> Stage:
        """Return the gather of a row tensor over in-edges: target = P source, or target += P source."""
        return self._gathers("GA", self._gather, source, target, adds=adds)

    def finish(self) -> list[Stage]:
        """Return the end: H plus the bias b, and ReLU and dropout, or (of the last layer) the loss."""
        return [Stage("AV", self.index, self.activate, ops=self.activate_ops), *self.loss_stages()]

    # Stages of the backward.

    def finish_backward(self) -> list[Stage]:
        """Return what turns dH from the gradient of the output into that of H before `finish`; and db."""
        return [Stage("dAV", self.index, self.output_gradient, ops=self.output_gradient_ops)]

    def gather_backward(self, source: str, target: str, *, adds: bool = False) -> Stage:
        """Return the gather over out-edges: target = P^T source, or target += P^T source."""
        return self._gathers("dGA", self._gather_backward, source, target, adds=adds)

    def vertices_backward(self, function: Callable[..., Any], names: str) -> Stage:
        """Return a stage like `vertices` of the backward.

        It may also make gradients of weights: ``"dY V -> dV da"``. They are sums over the rows given.
        ``d_input`` is the gradient of ``input``.
        """
        return self._on_blocks("dAV", function, names)

    def products_backward(self, *, adds: bool = False, **weights: str) -> list[Stage]:
        """Return the gradients of `products`: ``products_backward(V="W")`` makes dW and d_input of dV.

        Parameters
        ----------
        adds
            Something in ``d_input`` is there already, of this layer.
        **weights
            As for `products`; all of them, since the parts of ``d_input`` add up.
        """
        return [
            self._product_backward(self.named(f"d{tensor}"), self.named(weight), adds=adds or number > 0)
            for number, (tensor, weight) in enumerate(weights.items())
        ]

    # What `assemble` asks for.

    def setup(self) -> tuple[Stage, ...]:
        """Have dense features loaded."""
        return load_stages()

    def tensors(self) -> list[RowTensor]:
        """Return H, dH, and those of `widths` and their gradients that a stage names."""
        _check_types(self)
        i, forward = self.index, self.forward()
        widths = {f"H{i}": self.f_out, f"dH{i}": self.f_out}
        evaluated = {name for stage in forward if not stage.trains_only for name in names_of(stage)}
        named = {name for stage in (*forward, *self.backward()) for name in names_of(stage)}
        for name, width in self.widths().items():
            for full in (f"{name}{i}", f"d{name}{i}"):
                if full in named:
                    widths.setdefault(full, width)
        return [
            RowTensor(name, width, trains_only=name not in {*evaluated, f"H{i}"})
            for name, width in widths.items()
        ]

    def named(self, name: str) -> str:
        """Return the name in the program of a name in this layer.

        Raises
        ------
        InputError
            The input of layer 1: features may be sparse, and are only ever multiplied.
        """
        if name not in ("input", "d_input"):
            return f"{name}{self.index}"
        if self.first:
            raise InputError(f"layer 1 has features for its {name}: multiply them first, with products")
        return f"{'d' if name == 'd_input' else ''}H{self.index - 1}"

    def _product(self, tensor: str, weight: str) -> Stage:
        if self.first:
            run = partial(self._multiply_features, tensor, weight)
            return Stage("AV", 1, run, on_server=True, makes=(tensor,))
        h = self.named("input")

        def ops(_: Pass) -> list[Op]:
            return [("apply_vertex", {}, [h, weight], [tensor])]

        return Stage("AV", self.index, partial(self._multiply, tensor, weight), ops=ops)

    def _multiply_features(self, tensor: str, weight: str, task: Task) -> None:
        x, w = self.dropped_features(task), task.weights[weight]
        task.part.features.times(task.rows, x, w, task.tensors[tensor])

    def _multiply(self, tensor: str, weight: str, task: Task) -> None:
        apply_vertex(task.block(self.named("input")), task.weights[weight], out=task.block(tensor))

    def _product_backward(self, d_tensor: str, weight: str, *, adds: bool) -> Stage:
        d_weight = gradient_of(weight)
        if self.first:
            run = partial(self._features_backward, d_tensor, weight)
            return Stage("dAV", 1, run, on_server=True, reads=(d_tensor,), makes=(d_weight,))
        h, d_h = self.named("input"), self.named("d_input")

        def ops(_: Pass) -> list[Op]:
            if adds:
                return [("add_gradient", {}, [d_h, h, weight, d_tensor], [d_h, d_weight])]
            return [("apply_vertex_backward", {}, [h, weight, d_tensor], [d_weight, d_h])]

        return Stage("dAV", self.index, partial(self._multiply_backward, d_tensor, weight, adds), ops=ops)

    def _features_backward(self, d_tensor: str, weight: str, task: Task) -> None:
        d_rows = task.tensors[d_tensor][: task.part.n_own]
        x = self.dropped_features(task)
        task.part.features.weight_gradient(task.rows, x, d_rows, task.gradients[weight])

    def _multiply_backward(self, d_tensor: str, weight: str, adds: bool, task: Task) -> None:
        apply_vertex_backward(
            task.block(self.named("input")),
            task.weights[weight],
            task.block(d_tensor),
            d_w=task.gradients[weight],
            d_h=task.block(self.named("d_input")),
            accumulate=adds,
        )

    def _on_blocks(self, kind: Any, function: Callable[..., Any], names: str) -> Stage:
        found = _SIGNATURE.fullmatch(names)
        if found is None:
            raise InputError(f"layer {self.index}: names must be like 'V b -> Y', got {names!r}")
        reads, makes = (
            tuple(self.named(name) for name in re.findall(r"\w+", side)) for side in found.groups()
        )
        weights = frozenset(spec.name for spec in self.params())
        gradients = frozenset(map(gradient_of, weights)) if kind == "dAV" else frozenset()
        run = _OnBlocks(function, self.index, reads, makes, weights, gradients)
        rows = tuple(name for name in reads if name not in weights)
        return Stage(kind, self.index, run, on_server=True, reads=rows, makes=makes)

    def _gathers(self, kind: Any, run: Callable[..., None], source: str, target: str, *, adds: bool) -> Stage:
        if self.aggregate and self.aggregate not in SUMS:
            raise InputError(
                f"layer {self.index}: gather computes {', '.join(SUMS)}; for {self.aggregate} write a stage "
                f"that calls task.part.in_edges"
            )
        source, target = self.named(source), self.named(target)
        reads = (source, target) if adds else (source,)
        run = partial(run, source, target, adds)
        return Stage(kind, self.index, run, tensor=source, reads=reads, makes=(target,))

    def _gather(self, source: str, target: str, adds: bool, task: Task) -> None:
        x, out = task.sources[source], task.tensors[target]
        task.part.in_edges.aggregate(x, out, task.rows, accumulate=adds)

    def _gather_backward(self, source: str, target: str, adds: bool, task: Task) -> None:
        x, out = task.sources[source], task.tensors[target]
        task.part.out_edges.aggregate(x, out, task.rows, accumulate=adds)


def _check_types(layer: Layer) -> None:
    """Tell of lists in lists, and the like."""
    for method, kind in (("params", ParamSpec), ("forward", Stage), ("backward", Stage)):
        found = getattr(layer, method)()
        if not isinstance(found, list | tuple):
            raise InputError(f"{method}() must return a list, but returned {type(found).__name__}")
        for one in found:
            if not isinstance(one, kind):
                hint = ": put a * before it" if isinstance(one, list | tuple) else ""
                told = f"a list of {kind.__name__}, but a {type(one).__name__} is in it{hint}"
                raise InputError(f"{method}() must return {told}")


def made_by(stage: Stage) -> set[str]:
    """Return the names that a stage makes, as far as it tells."""
    ops = stage.ops(_ANY) if stage.ops is not None else []
    return {*stage.makes, *(name for op in ops for name in op[3])}


def stack(
    layer: type[Layer],
    *,
    n_features: int,
    hidden: Sequence[int],
    n_classes: int,
    sparse_features: bool,
    dropout: float,
    input_dropout: float,
    weight_decay: float,
    decay_scope: str,
    seed: int,
    **more: Any,
) -> Program:
    """Make a program of layers of one class.

    Parameters
    ----------
    layer
        The class.
    n_features, hidden, n_classes, sparse_features, dropout, input_dropout, weight_decay, decay_scope, seed
        As for `dorylus_hpc.nn.gcn.gcn_program`.
    **more
        Further arguments of the class.
    """
    planned = plan_layers(
        [n_features, *hidden, n_classes],
        dropout=dropout,
        input_dropout=input_dropout,
        weight_decay=weight_decay,
        decay_scope=decay_scope,
        seed=seed,
    )
    return assemble([layer(**place, **more) for place in planned], sparse_features=sparse_features)


def assemble(layers: Sequence[Layer], *, sparse_features: bool) -> Program:
    """Make a program of layers, of which some may be one's own, and complete it.

    Parameters
    ----------
    layers
        In order, from `plan_layers`.
    sparse_features
        Features are CSR.

    Raises
    ------
    InputError
        Two row tensors have the same name, or one would need ghosts of both directions.
    """
    program = shared.assemble(layers, sparse_features=sparse_features)
    if isinstance(layers[0], OwnLayer):
        program = replace(program, forward=(*layers[0].drop_stages(), *program.forward))
    return complete(program)


def complete(program: Program) -> Program:
    """Add what follows from a program's stages; what is there already stays.

    * Before layer 1's first gather everything is computed for ghosts, too, if stages tell what they make.
    * Before every other gather the rows of ghosts are exchanged.
    * A dense stage without ops stays on the graph server, wherever others run. One that tells neither what it
      reads nor what it makes is taken to read all row tensors.
    * Row tensors have the ghosts that are exchanged or computed.
    * Matrices of a layer start with different values.
    * Features and row tensors stay where they are: a stage need not tell all that it reads.

    Raises
    ------
    InputError
        A row tensor would need ghosts of both directions.
    """
    forward, backward = (
        tuple(_placed(stage, program) for stage in _with_exchanges(stages))
        for stages in (_covering(program.forward), program.backward)
    )
    ghosts: dict[str, Ghosts] = {}
    for stage in (*forward, *backward):
        names, way = made_by(stage) if stage.covers_ghosts else set(), "in"
        if stage.run is None:
            names, way = {stage.tensor}, "out" if stage.kind == "dSC" else "in"
        for name in names & set(program.tensors):
            if ghosts.setdefault(name, way) != way:  # type: ignore[arg-type]
                raise InputError(f"row tensor {name} is gathered in both directions: copy it into another")
    tensors = {
        name: replace(tensor, ghosts=tensor.ghosts or ghosts.get(name))
        for name, tensor in program.tensors.items()
    }
    params = tuple(_distinct_draws(program.params))
    return replace(
        program,
        forward=forward,
        backward=backward,
        tensors=tensors,
        params=params,
        replaces_input="",
        tells_all=False,
    )


def _covering(forward: Sequence[Stage]) -> Sequence[Stage]:
    """Let layer 1 compute what its first gather reads for ghosts, too."""
    place = next((at for at, stage in enumerate(forward) if stage.kind == "GA"), 0)
    before = forward[:place]
    told = all(
        stage.kind == "AV" and stage.layer == 1 and stage.ops is None and (stage.makes or stage.covers_ghosts)
        for stage in before
    )
    if not (told and before and any(forward[place].tensor in stage.makes for stage in before)):
        return forward
    return [*(replace(stage, covers_ghosts=True, on_server=True) for stage in before), *forward[place:]]


def _with_exchanges(stages: Iterable[Stage]) -> list[Stage]:
    found: list[Stage] = []
    for stage in stages:
        last = found[-1] if found else None
        if stage.kind in ("GA", "dGA") and stage.tensor not in ("", INPUT, FEATURES):
            sent = last is not None and last.run is None and last.tensor == stage.tensor
            covered = last is not None and last.covers_ghosts and stage.kind == "GA"
            if not (sent or covered):
                found.append(Stage("SC" if stage.kind == "GA" else "dSC", stage.layer, tensor=stage.tensor))
        found.append(stage)
    return found


def _placed(stage: Stage, program: Program) -> Stage:
    if stage.run is None or stage.ops is not None or stage.kind == "LD":
        return stage
    told = stage.reads or stage.makes or stage.covers_ghosts
    on_server = stage.on_server or stage.kind in ("AV", "dAV")
    return replace(stage, on_server=on_server, reads=stage.reads if told else tuple(program.tensors))


def _distinct_draws(params: Iterable[ParamSpec]) -> Iterable[ParamSpec]:
    used: set[tuple[int, int]] = set()
    for spec in params:
        draw = spec.draw
        while len(spec.shape) == 2 and (spec.layer, draw) in used:
            draw += 1
        used |= {(spec.layer, draw)} if len(spec.shape) == 2 else set()
        yield replace(spec, draw=draw)
