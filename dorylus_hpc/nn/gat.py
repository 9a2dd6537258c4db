"""GAT and GATv2 as stage programs.

Layer l has H heads of D columns. Of the (dropped-out) input D_l each makes products y, from these a score e
for each in-edge u -> v (v itself among its sources), and from the scores weights that add up to 1 at each
target::

    GAT      y = D_l W                     e_uv = LeakyReLU(a_s . y_u + a_t . y_v)
    GATv2    y = D_l W,  r = D_l W_t       e_uv = a . LeakyReLU(y_u + r_v)

    alpha_uv = exp(e_uv) / sum over v's sources of exp(e)        z_v = sum of drop(alpha_uv) y_u

A hidden layer's output are all heads beside each other, D_{l+1} = dropout(elu(z + b)); the last layer's, the
logits, are their mean, plus b. Weights of edges do not count.

Products come before the gather: a gather of the input would have to be done for each head. Scores of edges
(the paper's *apply edge*) are made inside of the gathers, where they are used, forward and backward: from one
number a head and vertex (GATv2: from the products), the maximum and the sum of a target's weights. Nothing is
stored for an edge. What a gather reads of a vertex is packed in one row.

Where edges are a worker's (the paper's placement), a gather only collects the rows that an interval's edges
read, each once, in ``E{l}`` (forward) and ``F{l}`` (backward); AE and dAE, on the worker, do the rest.
The first layer may make products of its own rows alone and exchange them, as all other layers do; or those
of ghosts too, from their features, which never change.

Row tensors of layer l::

    Y{l}     products y, and behind them the scores a_s . y (GATv2: y alone)
    T{l}     scores a_t . y (GATv2: r)
    Z{l}     z, and for the backward what `cython_kernels.attention` saves
    H{l}     D_{l+1}, or the logits
    Q{l}     of a target: dz and what the backward's scores need (GATv2: r too)
    dZ{l}, dY{l}, dS{l} (of the scores as a source), dT{l}, dH{l}: gradients

References: Velickovic et al., Graph attention networks, ICLR 2018, equations 1 to 6; Brody, Alon and
Yahav, How attentive are graph attention networks?, ICLR 2022, equation 7; Dorylus (OSDI '21), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cython_kernels import (
    AttentionSaved,
    AttentionV2Saved,
    attention_targets,
    bias_elu_dropout,
    elu_dropout_backward,
    pack_rows,
)
from dorylus_hpc.nn.layers import Choices, Layer, assemble, exchanges_products, plan_layers
from dorylus_hpc.nn.operands import AttentionKey
from dorylus_hpc.nn.params import ParamSpec
from dorylus_hpc.nn.program import Ghosts, Pass, Program, RowTensor, Stage, Task, gradient_of, load_stages
from lambda_pkg.attention import (
    mean_heads,
    mean_heads_backward,
    packed_weights,
    scores_backward,
    target_scores,
    transform,
)
from lambda_pkg.dense import apply_vertex, apply_vertex_backward, bias_gradient
from lambda_pkg.edges import attend, attend_sources, attend_targets
from lambda_pkg.ops import Op

RECORD, RECORD_V2 = 4, 3  # numbers a head that the backward's scores need of a target


def gat_program(
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
    heads: int,
    output_heads: int = 1,
    slope: float = 0.2,
    attention_dropout: float = 0.0,
    second: bool = False,
    edges_elsewhere: bool = False,
    frugal: bool = False,
    choices: Choices | None = None,
) -> Program:
    """Declare a GAT.

    Parameters
    ----------
    n_features, n_classes, sparse_features, dropout, input_dropout, weight_decay, decay_scope, seed
        As for `gcn_program`.
    hidden
        Columns of each head of the hidden layers; empty for a single layer.
    heads, output_heads
        Of hidden layers, and of the last one.
    slope
        Of LeakyReLU below zero.
    attention_dropout
        Probability of dropping a weight of an edge.
    second
        GATv2.
    edges_elsewhere
        Edges may be a worker's, which gets the rows that they read; not of GATv2, nor with dropout of edges.
    frugal
        Hidden layers keep less for the backward, see `_Layer`; not in the asynchronous mode, and not where
        dense stages or edges are a worker's.
    choices
        What of the plan is chosen beforehand: here only products of ghosts are.

    Returns
    -------
    Program

    Raises
    ------
    ValueError
        Edges can't be a worker's.
    """
    if edges_elsewhere and (second or attention_dropout):
        raise ValueError("edges stay on the server with second=True or attention_dropout")
    planned = plan_layers(
        [n_features, *(heads * columns for columns in hidden), n_classes],
        dropout=dropout,
        input_dropout=input_dropout,
        weight_decay=weight_decay,
        decay_scope=decay_scope,
        seed=seed,
    )
    kind = _SecondLayer if second else _ElsewhereLayer if edges_elsewhere else _Layer
    exchanges = exchanges_products(n_features, sparse=sparse_features, choices=choices)
    layers: list[_Layer] = []
    for layer in planned:
        key = AttentionKey(attention_dropout, seed, layer["index"], slope)
        layers.append(
            kind(
                **layer,
                heads=output_heads if layer["last"] else heads,
                key=key,
                exchanges=exchanges,
                frugal=frugal,
                below=layers[-1] if layers else None,
            )
        )
    return assemble(layers, sparse_features=sparse_features)


@dataclass(frozen=True, kw_only=True)
class _Layer(Layer):
    """A layer of a GAT.

    Attributes
    ----------
    heads
        Of this layer.
    key
        Slope, and dropout of weights.
    exchanges
        Products of ghosts are exchanged in layer 1, too.
    frugal
        Z of a hidden layer, and what is saved of it in a number a head, waits for the backward in rows of Q,
        which are free until then, and H is made again of Z. All are the same numbers as before.
    below
        The layer before.
    """

    heads: int
    key: AttentionKey
    exchanges: bool = False
    frugal: bool = False
    below: _Layer | None = None

    @property
    def drops(self) -> bool:
        return super().drops or self.key.p > 0

    @property
    def columns(self) -> int:
        """Columns of a head."""
        return self.f_out if self.last else self.f_out // self.heads

    @property
    def width(self) -> int:
        """Columns of all heads."""
        return self.heads * self.columns

    @property
    def products(self) -> tuple[str, ...]:
        """What the backward's gather makes, without the number of the layer."""
        return "dY", "dS"

    @property
    def matrices(self) -> tuple[str, ...]:
        """Weights whose gradients come from those of the products."""
        return tuple(f"{name}{self.index}" for name in ("W", "as", "at"))

    @property
    def covered(self) -> Ghosts | None:
        """Ghosts' rows of T: none are ever written, but the stage that makes T runs on ghosts, too."""
        return "in" if self.first and not self.exchanges else None

    @property
    def _saved(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.saved_tensors())

    def params(self) -> list[ParamSpec]:
        i, vector = self.index, (self.heads, self.columns)
        return [
            ParamSpec(f"W{i}", i, (self.f_in, self.width), self.decay),
            ParamSpec(f"as{i}", i, vector, self.decay, draw=1),
            ParamSpec(f"at{i}", i, vector, self.decay, draw=2),
            ParamSpec(f"b{i}", i, (self.f_out,)),
        ]

    def tensors(self) -> list[RowTensor]:
        i, width, heads = self.index, self.width, self.heads
        backward = {"dH": self.f_out, "dZ": width, "dY": width, "dS": heads, "dT": heads}
        return [
            *self.output_tensors(None),
            RowTensor(f"Y{i}", width + heads, "in"),
            RowTensor(f"T{i}", heads, self.covered),
            RowTensor(f"Z{i}", width),
            *(RowTensor(name, columns, trains_only=True) for name, columns in self.saved_tensors()),
            *(RowTensor(f"{name}{i}", columns, trains_only=True) for name, columns in backward.items()),
            RowTensor(f"Q{i}", width + RECORD * heads, "out", trains_only=True),
        ]

    def saved_tensors(self) -> list[tuple[str, int]]:
        """Return names and columns of what the gather leaves to the backward, as `AttentionSaved` has it."""
        widths = {"max": self.heads, "sum": self.heads, "negative": self.width, "weight": self.heads}
        return [(f"Z{self.index}.{name}", columns) for name, columns in widths.items()]

    def setup(self) -> tuple[Stage, ...]:
        return load_stages(ghosts=not self.exchanges)

    def forward(self) -> list[Stage]:
        i, covers = self.index, not self.exchanges
        stages = [replace(stage, covers_ghosts=covers) for stage in self.drop_stages()]
        if self.first:
            made = (f"Y{i}", f"T{i}")
            stages.append(
                Stage("AV", i, self.transform_features, covers_ghosts=covers, on_server=True, makes=made)
            )
        else:
            stages.append(Stage("AV", i, self.transform_input, ops=self.transform_input_ops))
        if self.exchanges or not self.first:
            stages.append(Stage("SC", i, tensor=f"Y{i}"))
        return [
            *stages,
            Stage("GA", i, self.attend, tensor=f"Y{i}", reads=(f"T{i}",), makes=(f"Z{i}", *self._saved)),
            *self._put_by_stages(),
            Stage("AV", i, self.activate, ops=self.activate_ops),
            *self.loss_stages(),
        ]

    def _put_by_stages(self) -> list[Stage]:
        if self.last or not self.frugal:
            return []
        i, reads = self.index, tuple(self._put_by)
        return [
            Stage(
                "AV", i, self.put_by, trains_only=True, weightless=True, on_server=True, reads=reads,
                makes=(f"Q{i}",),
            )
        ]  # fmt: skip

    def take_back_stages(self) -> list[Stage]:
        if self.last or not self.frugal:
            return []
        i, makes = self.index, (*self._put_by, f"H{self.index}")
        return [Stage("dAV", i, self.take_back, on_server=True, reads=(f"Q{i}",), makes=makes)]

    @property
    def _put_by(self) -> dict[str, slice]:
        """Which columns of Q have which tensor: Z, and behind it, where records will be, numbers of heads."""
        found, at = {f"Z{self.index}": slice(0, self.width)}, self.width
        for name, columns in self.saved_tensors():
            if columns == self.heads:
                found[name] = slice(at, at + columns)
                at += columns
        return found

    def backward(self) -> list[Stage]:
        i = self.index
        packed = (f"dZ{i}", f"Z{i}", f"T{i}", *self._saved)
        found = tuple(f"{name}{i}" for name in self.products)
        stages = [
            Stage("dAV", i, self.output_gradient, ops=self.output_gradient_ops),
            Stage("dAE", i, self.pack_gradient, reads=packed, makes=(f"dT{i}", f"Q{i}")),
            Stage("dSC", i, tensor=f"Q{i}"),
            Stage("dGA", i, self.attend_backward, tensor=f"Q{i}", reads=(f"Y{i}",), makes=found),
        ]
        if self.first:
            reads, makes = (f"Y{i}", *found, f"dT{i}"), (f"dY{i}", *map(gradient_of, self.matrices))
            return [
                *stages,
                Stage("dAV", i, self.features_backward, on_server=True, reads=reads, makes=makes),
            ]
        if self.below is not None:
            stages += self.below.take_back_stages()
        return [*stages, Stage("dAV", i, self.transform_backward, ops=self.transform_backward_ops)]

    # Forward.

    def transform_features(self, task: Task) -> None:
        i, (start, stop) = self.index, task.rows
        w = packed_weights(task.weights[f"W{i}"], task.weights[f"as{i}"])
        task.part.features.times(task.rows, self.dropped_features(task), w, task.tensors[f"Y{i}"])
        if stop <= task.part.n_own:  # ghosts are no targets
            score = task.tensors[f"T{i}"][start:stop]
            target_scores(task.block(f"Y{i}"), task.weights[f"at{i}"], out=score)

    def transform_input(self, task: Task) -> None:
        i = self.index
        transform(
            task.block(f"H{i - 1}"),
            *(task.weights[f"{name}{i}"] for name in ("W", "as", "at")),
            packed=task.block(f"Y{i}"),
            score_target=task.block(f"T{i}"),
        )

    def attend(self, task: Task) -> None:
        i = self.index
        y, score, z = task.sources[f"Y{i}"], self.targets(task), task.tensors[f"Z{i}"]
        saved = self.saved(task) if task.training else None
        task.part.in_edges.attend(
            y[:, : self.width], y[:, self.width :], score, z, saved, task.rows, self.key, task.epoch
        )

    def targets(self, task: Task) -> np.ndarray:
        """Return T of the own rows: ghosts are no targets."""
        return task.tensors[f"T{self.index}"][: task.part.n_own]

    def saved(self, task: Task) -> AttentionSaved:
        """Return what the gather leaves to the backward."""
        return AttentionSaved(*(task.tensors[name] for name in self._saved))

    def put_by(self, task: Task) -> None:
        """Keep for the backward what comes of the gather."""
        q = task.block(f"Q{self.index}")
        for name, columns in self._put_by.items():
            q[:, columns] = task.block(name)

    def activate(self, task: Task) -> None:
        i, h, z = self.index, task.block(f"H{self.index}"), task.block(f"Z{self.index}")
        bias = task.weights[f"b{i}"]
        if self.last:
            mean_heads(z, bias, out=h)
            return
        key, gids = self.output_key, task.part.gids[slice(*task.rows)]
        p = key.p if task.training else 0.0
        bias_elu_dropout(z, bias, gids, p, seed=key.seed, epoch=task.epoch, layer=key.layer, out=h)

    # Backward.

    def take_back(self, task: Task) -> None:
        """Take what was put by, and make the output of it again."""
        q = task.block(f"Q{self.index}")
        for name, columns in self._put_by.items():
            task.block(name)[...] = q[:, columns]
        self.activate(task)

    def output_gradient(self, task: Task) -> None:
        i, d_h, d_z = self.index, task.block(f"dH{self.index}"), task.block(f"dZ{self.index}")
        d_b, key = task.gradients[f"b{i}"], self.output_key
        if self.last:
            mean_heads_backward(d_h, self.heads, d_z=d_z, d_bias=d_b)
            return
        elu_dropout_backward(
            d_h, task.block(f"H{i}"), task.part.gids[slice(*task.rows)], key.p,
            seed=key.seed, epoch=task.epoch, layer=key.layer, out=d_z,
        )  # fmt: skip
        bias_gradient(d_z, out=d_b)

    def pack_gradient(self, task: Task) -> None:
        i, q = self.index, task.tensors[f"Q{self.index}"][: task.part.n_own]
        attention_targets(
            task.tensors[f"Z{i}"],
            task.tensors[f"dZ{i}"],
            self.targets(task),
            self.saved(task),
            task.tensors[f"dT{i}"],
            record=self.record(q),
            slope=self.key.slope,
            rows=task.rows,
        )
        task.block(f"Q{i}")[:, : self.width] = task.block(f"dZ{i}")

    def record(self, q: np.ndarray) -> np.ndarray:
        """Return the records in rows of Q: (n, RECORD, H)."""
        return q[:, self.width :].reshape(len(q), RECORD, self.heads)

    def attend_backward(self, task: Task) -> None:
        i, n_own = self.index, task.part.n_own
        y, q = task.tensors[f"Y{i}"][:n_own], task.sources[f"Q{i}"]
        task.part.out_edges.attend_backward(
            y[:, : self.width], y[:, self.width :], self.record(q), q[:, : self.width],
            task.tensors[f"dY{i}"], task.tensors[f"dS{i}"], task.rows, self.key, task.epoch,
        )  # fmt: skip

    def products_backward(self, task: Task) -> None:
        """Make dY whole: the gradient that comes from the scores is added."""
        i, d_y = self.index, task.block(f"dY{self.index}")
        scores_backward(
            task.block(f"Y{i}"),
            task.weights[f"as{i}"],
            task.weights[f"at{i}"],
            d_y,
            task.block(f"dS{i}"),
            task.block(f"dT{i}"),
            out=d_y,
            d_a_source=task.gradients[f"as{i}"],
            d_a_target=task.gradients[f"at{i}"],
        )

    def features_backward(self, task: Task) -> None:
        i, features = self.index, task.part.features
        self.products_backward(task)
        d_y, d_w = task.tensors[f"dY{i}"], task.gradients[f"W{i}"]
        features.weight_gradient(task.rows, self.dropped_features(task), d_y, d_w)

    def transform_backward(self, task: Task) -> None:
        i, h, w = self.index, task.block(f"H{self.index - 1}"), task.weights[f"W{self.index}"]
        self.products_backward(task)
        d_w, d_h = task.gradients[f"W{i}"], task.block(f"dH{i - 1}")
        apply_vertex_backward(h, w, task.block(f"dY{i}"), d_w=d_w, d_h=d_h)

    # The same for a worker elsewhere.

    def transform_input_ops(self, _: Pass) -> list[Op]:
        i = self.index
        return [("attention_transform", {}, [f"H{i - 1}", f"W{i}", f"as{i}", f"at{i}"], [f"Y{i}", f"T{i}"])]

    def activate_ops(self, way: Pass) -> list[Op]:
        h, z, bias = f"H{self.index}", f"Z{self.index}", f"b{self.index}"
        if self.last:
            return [("mean_heads", {}, [z, bias], [h])]
        return [("bias_elu_dropout", self.dropout_parameters(way), [z, bias, "gids"], [h])]

    def output_gradient_ops(self, way: Pass) -> list[Op]:
        i, d_h, d_z, d_b = self.index, f"dH{self.index}", f"dZ{self.index}", gradient_of(f"b{self.index}")
        if self.last:
            return [("mean_heads_backward", {"heads": self.heads}, [d_h], [d_z, d_b])]
        drops = self.dropout_parameters(way)
        return [
            ("elu_dropout_backward", drops, [d_h, f"H{i}", "gids"], [d_z]),
            ("bias_gradient", {}, [d_z], [d_b]),
        ]

    def transform_backward_ops(self, _: Pass) -> list[Op]:
        i = self.index
        reads = [f"{name}{i}" for name in ("W", "as", "at", "Y", "dY", "dS", "dT")]
        makes = [gradient_of(f"{name}{i}") for name in ("W", "as", "at")]
        return [("attention_transform_backward", {}, [f"H{i - 1}", *reads], [*makes, f"dH{i - 1}"])]


@dataclass(frozen=True, kw_only=True)
class _SecondLayer(_Layer):
    """A layer of a GATv2.

    The gradient of r, and of a, is a sum over in-edges: its stage reads what the forward's gather read.
    """

    def params(self) -> list[ParamSpec]:
        i, matrix = self.index, (self.f_in, self.width)
        return [
            ParamSpec(f"W{i}", i, matrix, self.decay),
            ParamSpec(f"Wt{i}", i, matrix, self.decay, draw=1),
            ParamSpec(f"a{i}", i, (self.heads, self.columns), self.decay, draw=2),
            ParamSpec(f"b{i}", i, (self.f_out,)),
        ]

    def tensors(self) -> list[RowTensor]:
        i, width = self.index, self.width
        backward = {"dH": self.f_out, "dZ": width, "dY": width, "dT": width}
        return [
            *self.output_tensors(None),
            RowTensor(f"Y{i}", width, "in"),
            RowTensor(f"T{i}", width, self.covered),
            RowTensor(f"Z{i}", width),
            *(RowTensor(name, columns, trains_only=True) for name, columns in self.saved_tensors()),
            *(RowTensor(f"{name}{i}", columns, trains_only=True) for name, columns in backward.items()),
            RowTensor(f"Q{i}", 2 * width + RECORD_V2 * self.heads, "out", trains_only=True),
        ]

    def saved_tensors(self) -> list[tuple[str, int]]:
        return [(f"Z{self.index}.{name}", self.heads) for name in ("max", "sum")]

    @property
    def products(self) -> tuple[str, ...]:
        return ("dY",)

    @property
    def matrices(self) -> tuple[str, ...]:
        return f"W{self.index}", f"Wt{self.index}"

    def forward(self) -> list[Stage]:
        return [replace(stage, weighted=stage.kind == "GA") for stage in super().forward()]

    def backward(self) -> list[Stage]:
        i, made = self.index, list[Stage]()
        for stage in super().backward():
            if stage.kind == "dAE":
                reads, makes = (*stage.reads, f"Y{i}"), (*stage.makes, gradient_of(f"a{i}"))
                made.append(replace(stage, weighted=True, reads=reads, makes=makes))
            else:
                made.append(replace(stage, weighted=stage.kind == "dGA"))
        return made

    # Forward.

    def transform_features(self, task: Task) -> None:
        i, features, x = self.index, task.part.features, self.dropped_features(task)
        features.times(task.rows, x, task.weights[f"W{i}"], task.tensors[f"Y{i}"])
        if task.rows[1] <= task.part.n_own:  # ghosts are no targets
            features.times(task.rows, x, task.weights[f"Wt{i}"], task.tensors[f"T{i}"])

    def transform_input(self, task: Task) -> None:
        i, h = self.index, task.block(f"H{self.index - 1}")
        apply_vertex(h, task.weights[f"W{i}"], out=task.block(f"Y{i}"))
        apply_vertex(h, task.weights[f"Wt{i}"], out=task.block(f"T{i}"))

    def attend(self, task: Task) -> None:
        i = self.index
        y, r, z = task.sources[f"Y{i}"], self.targets(task), task.tensors[f"Z{i}"]
        task.part.in_edges.attend_v2(
            y, r, task.weights[f"a{i}"], z, self.saved_v2(task) if task.training else None,
            task.rows, self.key, task.epoch,
        )  # fmt: skip

    def saved_v2(self, task: Task) -> AttentionV2Saved:
        """Return what the gather leaves to the backward."""
        return AttentionV2Saved(*(task.tensors[name] for name in self._saved))

    # Backward.

    def pack_gradient(self, task: Task) -> None:
        i, width, n_own = self.index, self.width, task.part.n_own
        task.part.in_edges.attend_v2_targets(
            task.sources[f"Y{i}"],
            self.targets(task),
            task.weights[f"a{i}"],
            task.tensors[f"Z{i}"],
            task.tensors[f"dZ{i}"],
            self.saved_v2(task),
            task.tensors[f"dT{i}"],
            task.gradients[f"a{i}"],
            self.record(task.tensors[f"Q{i}"][:n_own]),
            task.rows,
            self.key,
            task.epoch,
        )
        q = task.block(f"Q{i}")
        q[:, :width] = task.block(f"dZ{i}")
        q[:, width : 2 * width] = task.block(f"T{i}")

    def record(self, q: np.ndarray) -> np.ndarray:
        return q[:, 2 * self.width :].reshape(len(q), RECORD_V2, self.heads)

    def attend_backward(self, task: Task) -> None:
        i, width, q = self.index, self.width, task.sources[f"Q{self.index}"]
        task.part.out_edges.attend_v2_backward(
            task.tensors[f"Y{i}"][: task.part.n_own], q[:, width : 2 * width], task.weights[f"a{i}"],
            self.record(q), q[:, :width], task.tensors[f"dY{i}"], task.rows, self.key, task.epoch,
        )  # fmt: skip

    def features_backward(self, task: Task) -> None:
        i, features, x = self.index, task.part.features, self.dropped_features(task)
        features.weight_gradient(task.rows, x, task.tensors[f"dY{i}"], task.gradients[f"W{i}"])
        features.weight_gradient(task.rows, x, task.tensors[f"dT{i}"], task.gradients[f"Wt{i}"])

    def transform_backward(self, task: Task) -> None:
        i, h, d_h = self.index, task.block(f"H{self.index - 1}"), task.block(f"dH{self.index - 1}")
        for name, d_out, adds in (("W", "dY", False), ("Wt", "dT", True)):
            w, d_w = task.weights[f"{name}{i}"], task.gradients[f"{name}{i}"]
            apply_vertex_backward(h, w, task.block(f"{d_out}{i}"), d_w=d_w, d_h=d_h, accumulate=adds)

    # The same for a worker elsewhere.

    def transform_input_ops(self, _: Pass) -> list[Op]:
        i, h = self.index, f"H{self.index - 1}"
        return [
            ("apply_vertex", {}, [h, f"W{i}"], [f"Y{i}"]),
            ("apply_vertex", {}, [h, f"Wt{i}"], [f"T{i}"]),
        ]

    def transform_backward_ops(self, _: Pass) -> list[Op]:
        i, h, d_h = self.index, f"H{self.index - 1}", f"dH{self.index - 1}"
        return [
            ("apply_vertex_backward", {}, [h, f"W{i}", f"dY{i}"], [gradient_of(f"W{i}"), d_h]),
            ("add_gradient", {}, [d_h, h, f"Wt{i}", f"dT{i}"], [d_h, gradient_of(f"Wt{i}")]),
        ]


@dataclass(frozen=True, kw_only=True)
class _ElsewhereLayer(_Layer):
    """A layer of a GAT whose edges may be a worker's."""

    def tensors(self) -> list[RowTensor]:
        i, width = self.index, self.width
        return [
            *super().tensors(),
            RowTensor(f"E{i}", width + self.heads, collects="in"),
            RowTensor(f"F{i}", width + RECORD * self.heads, trains_only=True, collects="out"),
        ]

    def forward(self) -> list[Stage]:
        i, made = self.index, list[Stage]()
        for stage in super().forward():
            if stage.kind != "GA":
                made.append(stage)
                continue
            made.append(
                Stage("GA", i, self.collect_sources, tensor=f"Y{i}", reads=(f"Y{i}",), makes=(f"E{i}",))
            )
            made.append(Stage("AE", i, self.attend, ops=self.attend_ops))
        return made

    def backward(self) -> list[Stage]:
        i, made = self.index, list[Stage]()
        for stage in super().backward():
            if stage.kind == "dAE":
                made.append(Stage("dAE", i, self.pack_gradient, ops=self.pack_gradient_ops))
            elif stage.kind == "dGA":
                made.append(
                    Stage("dGA", i, self.collect_targets, tensor=f"Q{i}", reads=(f"Q{i}",), makes=(f"F{i}",))
                )
                made.append(Stage("dAE", i, self.attend_backward, ops=self.attend_backward_ops))
            else:
                made.append(stage)
        return made

    def collect_sources(self, task: Task) -> None:
        i, out = self.index, task.collected(f"E{self.index}", "in")
        pack_rows(task.sources[f"Y{i}"], task.slices["in"].sources, out, validate=False)

    def collect_targets(self, task: Task) -> None:
        i, out = self.index, task.collected(f"F{self.index}", "out")
        pack_rows(task.sources[f"Q{i}"], task.slices["out"].sources, out, validate=False)

    # What a worker does, as ops and here.

    def attend(self, task: Task) -> None:
        i, edges = self.index, task.slices["in"]
        packed, score = task.collected(f"E{i}", "in"), task.block(f"T{i}")
        found = attend(packed, edges.indptr, edges.indices, score, slope=self.key.slope)
        for name, array in zip(self._attended(training=task.training), found, strict=False):
            task.block(name)[...] = array

    def attend_ops(self, way: Pass) -> list[Op]:
        i, slope = self.index, {"slope": self.key.slope}
        reads = [f"E{i}", "in.indptr", "in.indices", f"T{i}"]
        return [("attend", slope, reads, self._attended(training=way.training))]

    def _attended(self, *, training: bool) -> list[str]:
        return [f"Z{self.index}", *(self._saved if training else ())]

    def pack_gradient(self, task: Task) -> None:
        reads, makes = self._packed
        z, d_z, *others = map(task.block, reads)
        found = attend_targets(z, d_z, *others, slope=self.key.slope)
        for name, array in zip(makes, found, strict=True):
            task.block(name)[...] = array

    def pack_gradient_ops(self, _: Pass) -> list[Op]:
        reads, makes = self._packed
        return [("attend_targets", {"slope": self.key.slope}, reads, makes)]

    @property
    def _packed(self) -> tuple[list[str], list[str]]:
        i = self.index
        return [f"Z{i}", f"dZ{i}", f"T{i}", *self._saved], [f"dT{i}", f"Q{i}"]

    def attend_backward(self, task: Task) -> None:
        i, edges = self.index, task.slices["out"]
        packed, sources = task.collected(f"F{i}", "out"), task.block(f"Y{i}")
        found = attend_sources(packed, edges.indptr, edges.indices, sources, slope=self.key.slope)
        for name, array in zip((f"dY{i}", f"dS{i}"), found, strict=True):
            task.block(name)[...] = array

    def attend_backward_ops(self, _: Pass) -> list[Op]:
        i, slope = self.index, {"slope": self.key.slope}
        reads = [f"F{i}", "out.indptr", "out.indices", f"Y{i}"]
        return [("attend_sources", slope, reads, [f"dY{i}", f"dS{i}"])]
