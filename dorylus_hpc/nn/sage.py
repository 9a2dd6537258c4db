"""GraphSAGE as a stage program.

Layer l computes ``Z_l = D_l Ws_l + agg(D_l) Wn_l + b_l``, with D_1 the (dropped-out) features and D_{l+1} =
dropout(relu(Z_l)), rows of relu(Z_l) divided by their norm before the dropout if wanted. The last layer's Z
are the logits. What agg takes from the sources of a vertex's in-edges, the vertex itself not among them:

    mean    their mean, weighted by the edges' weights; zero without in-edges
    gcn     the mean of them and of the vertex itself (whose weight is 1). There is one matrix W instead of
            two: the layer is that of `gcn` with other scales
    max     the largest value of each column of P = relu(D Wp + bp), whatever the edges' weights

For the mean there are two orders, as for a GCN:

    transform-first   Y = D Wn       then   Z = D Ws + mean(Y) + b     gathers and sends f_out columns
    aggregate-first   M = mean(D)    then   Z = D Ws + M Wn + b        gathers and sends f_in columns

The gradient of the mean is a gather too, over the out-edges: dY_u = sum over u's destinations v of dZ_v / d_v
with d_v the in-degree of v, which each part knows of its ghosts.

Row tensors of layer l are those of `layers.OrderedLayer`.

References: Hamilton, Ying and Leskovec, Inductive representation learning on large graphs, NeurIPS 2017,
algorithm 1 and equations 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cython_kernels import bias_relu_dropout, pack_max, relu_dropout_backward
from dorylus_hpc.nn.gcn import gcn_program
from dorylus_hpc.nn.layers import (
    NO_DROPOUT,
    Choices,
    Layer,
    OrderedLayer,
    assemble,
    choose_orders,
    plan_layers,
)
from dorylus_hpc.nn.params import ParamSpec
from dorylus_hpc.nn.program import Pass, Program, RowTensor, Stage, Task, gradient_of, load_stages
from lambda_pkg.dense import apply_vertex, apply_vertex_backward, bias_gradient
from lambda_pkg.ops import Op


def sage_program(
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
    aggregator: str = "mean",
    pool: int = 0,
    l2_normalise: bool = False,
    choices: Choices | None = None,
    norm: str = "none",
    residual: bool = False,
    jumping: str = "none",
) -> Program:
    """Declare a GraphSAGE.

    Parameters
    ----------
    n_features, hidden, n_classes, sparse_features, dropout, input_dropout, weight_decay, decay_scope, seed
        As for `gcn_program`.
    aggregator
        ``mean``, ``gcn`` or ``max``; the edges must have the scales of it.
    pool
        Columns of P, for ``max``.
    l2_normalise
        Rows of hidden layers have Euclidean norm 1.
    choices
        What of the plan was chosen beforehand.
    norm, residual, jumping
        As for `dorylus_hpc.nn.layers.plan_layers`.

    Returns
    -------
    Program
    """
    if aggregator == "gcn":
        return gcn_program(
            n_features=n_features,
            hidden=hidden,
            n_classes=n_classes,
            sparse_features=sparse_features,
            dropout=dropout,
            input_dropout=input_dropout,
            weight_decay=weight_decay,
            decay_scope=decay_scope,
            seed=seed,
            l2_normalise=l2_normalise,
            choices=choices,
            norm=norm,
            residual=residual,
            jumping=jumping,
            scales_sources=False,
        )
    widths = [n_features, *hidden, n_classes]
    planned = plan_layers(
        widths,
        dropout=dropout,
        input_dropout=input_dropout,
        weight_decay=weight_decay,
        decay_scope=decay_scope,
        seed=seed,
        l2_normalise=l2_normalise,
        norm=norm,
        residual=residual,
        jumping=jumping,
    )
    if aggregator == "max":
        return assemble([_MaxLayer(**layer, pool=pool) for layer in planned], sparse_features=sparse_features)
    orders = choose_orders(
        [(layer["f_in"], layer["f_out"]) for layer in planned],
        sparse_features=sparse_features,
        input_dropout=input_dropout,
        choices=choices,
    )
    layers = [_MeanLayer(**layer, **order) for layer, order in zip(planned, orders, strict=True)]
    return assemble(layers, sparse_features=sparse_features)


@dataclass(frozen=True, kw_only=True)
class _SageLayer(Layer):
    """What the products of a layer have in common: ``Z = D Ws + M Wn``, and back."""

    @property
    def wants_d_m(self) -> bool:
        """The backward goes on from M."""
        return True

    def product_params(self, columns: int) -> list[ParamSpec]:
        i, f_out = self.index, self.f_out
        return [
            ParamSpec(f"Ws{i}", i, (self.f_in, f_out), self.decay),
            ParamSpec(f"Wn{i}", i, (columns, f_out), self.decay, draw=1),
            *self.end_params(),
        ]

    def product_stages(self) -> list[Stage]:
        i = self.index
        if not self.first:
            return [Stage("AV", i, self.transform_both, ops=self.transform_both_ops)]
        return [
            Stage("AV", i, self.transform_features, on_server=True, makes=(self.z,)),
            Stage("AV", i, self.add_aggregate, ops=self.add_aggregate_ops),
        ]

    def transform_features(self, task: Task) -> None:
        x, w = self.dropped_features(task), task.weights[f"Ws{self.index}"]
        task.part.features.times(task.rows, x, w, task.tensors[self.z])

    def add_aggregate(self, task: Task) -> None:
        m, w = task.block(f"M{self.index}"), task.weights[f"Wn{self.index}"]
        apply_vertex(m, w, out=task.block(self.z), accumulate=True)
        self.activate(task)

    def transform_both(self, task: Task) -> None:
        w = task.weights[f"Ws{self.index}"]
        apply_vertex(task.block(self.h_in), w, out=task.block(self.z))
        self.add_aggregate(task)

    def aggregate_backward(self, task: Task) -> None:
        i, d_z = self.index, task.block(f"dH{self.index}")
        apply_vertex_backward(
            task.block(f"M{i}"),
            task.weights[f"Wn{i}"],
            d_z,
            need_d_h=self.wants_d_m,
            d_w=task.gradients[f"Wn{i}"],
            d_h=task.block(f"dM{i}") if self.wants_d_m else None,
        )
        if not self.first:
            h, w = task.block(self.h_in), task.weights[f"Ws{i}"]
            apply_vertex_backward(h, w, d_z, need_d_h=False, d_w=task.gradients[f"Ws{i}"])

    def add_own_gradient(self, task: Task) -> None:
        d_z, w = task.block(f"dH{self.index}"), task.weights[f"Ws{self.index}"]
        apply_vertex(d_z, w.T, out=task.block(self.d_h_in), accumulate=True)

    def _own(self, task: Task, name: str) -> np.ndarray:
        """Return a tensor without the rows of ghosts."""
        return task.tensors[name][: task.part.n_own]

    def add_aggregate_ops(self, way: Pass) -> list[Op]:
        i, z = self.index, self.z
        return [("add_product", {}, [z, f"M{i}", f"Wn{i}"], [z]), *self.activate_ops(way)]

    def transform_both_ops(self, way: Pass) -> list[Op]:
        i = self.index
        own: Op = ("apply_vertex", {}, [self.h_in, f"Ws{i}"], [self.z])
        return [own, *self.add_aggregate_ops(way)]

    def aggregate_backward_ops(self, _: Pass) -> list[Op]:
        i = self.index
        d_s, d_n, d_z = gradient_of(f"Ws{i}"), gradient_of(f"Wn{i}"), f"dH{i}"
        makes = [d_n, f"dM{i}"] if self.wants_d_m else [d_n]
        ops: list[Op] = [("apply_vertex_backward", {}, [f"M{i}", f"Wn{i}", d_z], makes)]
        if not self.first:
            ops.append(("apply_vertex_backward", {}, [self.h_in, f"Ws{i}", d_z], [d_s]))
        return ops

    def add_own_gradient_ops(self, _: Pass) -> list[Op]:
        i, d_h = self.index, self.d_h_in
        return [("add_product", {"transposed": True}, [d_h, f"dH{i}", f"Ws{i}"], [d_h])]


@dataclass(frozen=True, kw_only=True)
class _MeanLayer(OrderedLayer, _SageLayer):
    """A layer of the mean aggregator."""

    @property
    def wants_d_m(self) -> bool:
        return not self.first

    def params(self) -> list[ParamSpec]:
        return self.product_params(self.f_in)

    def tensors(self) -> list[RowTensor]:
        ghosts = None if self.aggregate_first else "out"
        return [
            *self.output_tensors("in" if self.sends_output else None),
            RowTensor(f"dH{self.index}", self.f_out, ghosts, trains_only=True),  # type: ignore[arg-type]
            *self.aggregate_tensors(self.f_out),
        ]

    def forward(self) -> list[Stage]:
        i = self.index
        stages = self.begin_stages()
        if self.aggregate_first:
            stages += [*self.gather_input_stages(), *self.product_stages()]
        else:
            if self.first:
                stages.append(
                    Stage(
                        "AV", i, self.transform_sources, covers_ghosts=True, on_server=True, makes=(f"Y{i}",)
                    )
                )
            else:
                stages.append(Stage("AV", i, self.transform_sources, ops=self.transform_sources_ops))
                stages.append(Stage("SC", i, tensor=f"Y{i}"))
            stages.append(Stage("GA", i, self.gather_transformed, tensor=f"Y{i}", makes=(self.z,)))
            if self.first:
                stages.append(
                    Stage("AV", i, self.add_features, on_server=True, reads=(self.z,), makes=(self.z,))
                )
                stages += self.activate_stages()
            else:
                stages.append(Stage("AV", i, self.add_own, ops=self.add_own_ops))
        return [*stages, *self.end_stages()]

    def backward(self) -> list[Stage]:
        i = self.index
        stages = self.begin_backward_stages()
        if self.aggregate_first:
            stages.append(Stage("dAV", i, self.aggregate_backward, ops=self.aggregate_backward_ops))
            if self.first:
                d_z, d_w = (f"dH{i}",), (gradient_of(f"Ws{i}"),)
                stages.append(Stage("dAV", i, self.features_backward, on_server=True, reads=d_z, makes=d_w))
            else:
                stages += [
                    Stage("dSC", i, tensor=f"dM{i}"),
                    Stage("dGA", i, self.gather_input_backward, tensor=f"dM{i}", makes=(self.d_h_in,)),
                    Stage("dAV", i, self.add_own_gradient, ops=self.add_own_gradient_ops),
                ]
            return [*stages, *self.end_backward_stages()]
        stages += [
            Stage("dSC", i, tensor=f"dH{i}"),
            Stage("dGA", i, self.gather_transformed_backward, tensor=f"dH{i}", makes=(f"dY{i}",)),
        ]
        if self.first:
            reads, makes = (f"dH{i}", f"dY{i}"), (gradient_of(f"Ws{i}"), gradient_of(f"Wn{i}"))
            last = Stage("dAV", i, self.features_backward, on_server=True, reads=reads, makes=makes)
            return [*stages, last, *self.end_backward_stages()]
        return [*stages, Stage("dAV", i, self.own_backward, ops=self.own_backward_ops)]

    # Forward.

    def add_features(self, task: Task) -> None:
        x, w = self.dropped_features(task), task.weights[f"Ws{self.index}"]
        task.part.features.times(task.rows, x, w, task.tensors[self.z], accumulate=True)

    def transform_sources(self, task: Task) -> None:
        w, y = task.weights[f"Wn{self.index}"], task.tensors[f"Y{self.index}"]
        if self.first:
            task.part.features.times(task.rows, self.dropped_features(task), w, y)
        else:
            apply_vertex(task.block(self.h_in), w, out=task.block(f"Y{self.index}"))

    def gather_transformed(self, task: Task) -> None:
        y, z = task.sources[f"Y{self.index}"], task.tensors[self.z]
        task.part.in_edges.aggregate(y, z, task.rows)

    def add_own(self, task: Task) -> None:
        h, w = task.block(self.h_in), task.weights[f"Ws{self.index}"]
        apply_vertex(h, w, out=task.block(self.z), accumulate=True)
        self.activate(task)

    # Backward.

    def gather_input_backward(self, task: Task) -> None:
        d_m, d_h = task.sources[f"dM{self.index}"], task.tensors[self.d_h_in]
        task.part.out_edges.aggregate(d_m, d_h, task.rows)

    def gather_transformed_backward(self, task: Task) -> None:
        d_z, d_y = task.sources[f"dH{self.index}"], task.tensors[f"dY{self.index}"]
        task.part.out_edges.aggregate(d_z, d_y, task.rows)

    def own_backward(self, task: Task) -> None:
        i = self.index
        apply_vertex_backward(
            task.block(self.h_in),
            task.weights[f"Wn{i}"],
            task.block(f"dY{i}"),
            d_w=task.gradients[f"Wn{i}"],
            d_h=task.block(self.d_h_in),
        )
        apply_vertex_backward(
            task.block(self.h_in),
            task.weights[f"Ws{i}"],
            task.block(f"dH{i}"),
            d_w=task.gradients[f"Ws{i}"],
            d_h=task.block(self.d_h_in),
            accumulate=True,
        )

    def features_backward(self, task: Task) -> None:
        features, x, i = task.part.features, self.dropped_features(task), self.index
        d_z = self._own(task, f"dH{i}")
        features.weight_gradient(task.rows, x, d_z, task.gradients[f"Ws{i}"])
        if not self.aggregate_first:
            features.weight_gradient(task.rows, x, task.tensors[f"dY{i}"], task.gradients[f"Wn{i}"])

    # The same for a worker elsewhere.

    def transform_sources_ops(self, _: Pass) -> list[Op]:
        i = self.index
        return [("apply_vertex", {}, [self.h_in, f"Wn{i}"], [f"Y{i}"])]

    def add_own_ops(self, way: Pass) -> list[Op]:
        i, z = self.index, self.z
        return [("add_product", {}, [z, self.h_in, f"Ws{i}"], [z]), *self.activate_ops(way)]

    def own_backward_ops(self, _: Pass) -> list[Op]:
        i = self.index
        d_s, d_n, h, d_h = gradient_of(f"Ws{i}"), gradient_of(f"Wn{i}"), self.h_in, self.d_h_in
        return [
            ("apply_vertex_backward", {}, [h, f"Wn{i}", f"dY{i}"], [d_n, d_h]),
            ("add_gradient", {}, [d_h, h, f"Ws{i}", f"dH{i}"], [d_h, d_s]),
        ]


@dataclass(frozen=True, kw_only=True)
class _MaxLayer(_SageLayer):
    """A layer of the max aggregator.

    It has P in ``P{l}``, the maximum in ``M{l}``, the local row that each value of it came from in ``J{l}``,
    and in ``Q{l}`` dM beside the ids of these rows (`cython_kernels.max_pull`), from which a vertex gathers
    the gradients of what its destinations took from it: no scatter here either. Of equal values that of the
    lowest vertex id is taken.
    """

    pool: int

    def params(self) -> list[ParamSpec]:
        i, pool = self.index, self.pool
        return [
            ParamSpec(f"Wp{i}", i, (self.f_in, pool), self.decay, draw=2),
            ParamSpec(f"bp{i}", i, (pool,)),
            *self.product_params(pool),
        ]

    def tensors(self) -> list[RowTensor]:
        i, pool = self.index, self.pool
        return [
            *self.output_tensors(None),
            RowTensor(f"dH{i}", self.f_out, trains_only=True),
            RowTensor(f"P{i}", pool, "in"),
            RowTensor(f"dP{i}", pool, trains_only=True),
            RowTensor(f"M{i}", pool),
            RowTensor(f"dM{i}", pool, trains_only=True),
            RowTensor(f"J{i}", pool, trains_only=True, dtype="int32"),
            RowTensor(f"Q{i}", 2 * pool, "out", trains_only=True),
        ]

    def setup(self) -> tuple[Stage, ...]:
        return load_stages()

    def forward(self) -> list[Stage]:
        i = self.index
        stages = self.begin_stages()
        if self.first:
            stages.append(
                Stage("AV", i, self.pool_input, covers_ghosts=True, on_server=True, makes=(f"P{i}",))
            )
        else:
            stages.append(Stage("AV", i, self.pool_input, ops=self.pool_input_ops))
            stages.append(Stage("SC", i, tensor=f"P{i}"))
        makes = (f"M{i}", f"J{i}")
        stages.append(Stage("GA", i, self.gather_maximum, tensor=f"P{i}", makes=makes))
        return [*stages, *self.product_stages(), *self.end_stages()]

    def backward(self) -> list[Stage]:
        i = self.index
        stages = [
            *self.begin_backward_stages(),
            Stage("dAV", i, self.aggregate_backward, ops=self.aggregate_backward_ops),
            Stage("dAV", i, self.pack_gradient, on_server=True, reads=(f"dM{i}", f"J{i}"), makes=(f"Q{i}",)),
            Stage("dSC", i, tensor=f"Q{i}"),
            Stage("dGA", i, self.gather_gradient, tensor=f"Q{i}", makes=(f"dP{i}",)),
            Stage("dAV", i, self.pool_backward, ops=self.pool_backward_ops),
        ]
        if self.first:
            reads, makes = (f"dH{i}", f"dP{i}"), (gradient_of(f"Ws{i}"), gradient_of(f"Wp{i}"))
            last = Stage("dAV", i, self.features_backward, on_server=True, reads=reads, makes=makes)
            return [*stages, last, *self.end_backward_stages()]
        return [*stages, Stage("dAV", i, self.add_own_gradient, ops=self.add_own_gradient_ops)]

    # Forward.

    def pool_input(self, task: Task) -> None:
        i, w, p = self.index, task.weights[f"Wp{self.index}"], task.block(f"P{self.index}")
        if self.first:
            task.part.features.times(task.rows, self.dropped_features(task), w, task.tensors[f"P{i}"])
        else:
            apply_vertex(task.block(self.h_in), w, out=p)
        bias_relu_dropout(p, task.weights[f"bp{i}"], None, 0.0, seed=0, epoch=0, layer=0, out=p)

    def gather_maximum(self, task: Task) -> None:
        i = self.index
        source = task.tensors[f"J{i}"] if task.training else None
        task.part.in_edges.maximum(task.sources[f"P{i}"], task.tensors[f"M{i}"], task.rows, source)

    # Backward.

    def pack_gradient(self, task: Task) -> None:
        i, ids = self.index, task.part.features.gids  # of own vertices, and of the ghosts of in-edges
        j, d_m, q = (task.tensors[f"{name}{i}"] for name in ("J", "dM", "Q"))
        pack_max(j, d_m, ids, q, rows=task.rows, validate=False)

    def gather_gradient(self, task: Task) -> None:
        i = self.index
        task.part.out_edges.pull(task.sources[f"Q{i}"], task.part.gids, task.tensors[f"dP{i}"], task.rows)

    def pool_backward(self, task: Task) -> None:
        i, d_p = self.index, task.block(f"dP{self.index}")
        relu_dropout_backward(d_p, task.block(f"P{i}"), 0.0, out=d_p)
        bias_gradient(d_p, out=task.gradients[f"bp{i}"])
        if not self.first:
            h, w, d_w = task.block(self.h_in), task.weights[f"Wp{i}"], task.gradients[f"Wp{i}"]
            apply_vertex_backward(h, w, d_p, d_w=d_w, d_h=task.block(self.d_h_in))

    def features_backward(self, task: Task) -> None:
        features, x, i = task.part.features, self.dropped_features(task), self.index
        features.weight_gradient(task.rows, x, task.tensors[f"dP{i}"], task.gradients[f"Wp{i}"])
        features.weight_gradient(task.rows, x, task.tensors[f"dH{i}"], task.gradients[f"Ws{i}"])

    # The same for a worker elsewhere.

    def pool_input_ops(self, _: Pass) -> list[Op]:
        i, p = self.index, f"P{self.index}"
        return [
            ("apply_vertex", {}, [self.h_in, f"Wp{i}"], [p]),
            ("bias_relu_dropout", NO_DROPOUT, [p, f"bp{i}", "gids"], [p]),
        ]

    def pool_backward_ops(self, _: Pass) -> list[Op]:
        i, d_p = self.index, f"dP{self.index}"
        ops: list[Op] = [
            ("relu_dropout_backward", {"p": 0.0}, [d_p, f"P{i}"], [d_p]),
            ("bias_gradient", {}, [d_p], [gradient_of(f"bp{i}")]),
        ]
        if not self.first:
            makes = [gradient_of(f"Wp{i}"), self.d_h_in]
            ops.append(("apply_vertex_backward", {}, [self.h_in, f"Wp{i}", d_p], makes))
        return ops
