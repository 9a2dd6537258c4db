"""GIN, the graph isomorphism network, as a stage program.

Layer l computes ``Z_l = relu(S_l U_l + a_l) W_l + b_l`` with ``S_l = (1 + e_l) D_l + A D_l``: the sum of a
vertex's in-neighbours (weighted by the edges' weights) and of itself, through a perceptron of two layers. D_1
are the (dropped-out) features and D_{l+1} = dropout(relu(Z_l)); the last layer's Z are the logits. The number
e_l is learned, or stays 0. Inside of the perceptron there is no normalisation; a norm of hidden layers comes
behind it, before ReLU, as in other models.

The first product of the perceptron may come before the sum, which gives the same result:

    transform-first   Y = D U             then   R = relu((1 + e) Y + A Y + a)    gathers columns of R
    aggregate-first   M = (1 + e) D + A D then   R = relu(M U + a)                gathers columns of D

With e fixed the vertex itself is part of the gather, and M_1 never changes if the features do not. With e
learned only A X is constant: layer 1 is then ``R = relu((1 + e) X U + M U + a)`` with M = A X.

Row tensors of layer l: those of `layers.OrderedLayer`, and ``R{l}`` and ``dR{l}`` inside of the perceptron.

Reference: Xu, Hu, Leskovec and Jegelka, How powerful are graph neural networks?, ICLR 2019, equation 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cython_kernels import bias_relu_dropout, relu_dropout_backward
from dorylus_hpc.nn.layers import NO_DROPOUT, Choices, OrderedLayer, assemble, choose_orders, plan_layers
from dorylus_hpc.nn.params import ParamSpec
from dorylus_hpc.nn.program import Pass, Program, RowTensor, Stage, Task, gradient_of
from lambda_pkg.dense import add_self, apply_vertex, apply_vertex_backward, bias_gradient, self_gradient
from lambda_pkg.ops import Op


def gin_program(
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
    inner: int,
    learns_epsilon: bool = True,
    choices: Choices | None = None,
    norm: str = "none",
    residual: bool = False,
    jumping: str = "none",
) -> Program:
    """Declare a GIN.

    Parameters
    ----------
    n_features, hidden, n_classes, sparse_features, dropout, input_dropout, weight_decay, decay_scope, seed
        As for `gcn_program`.
    inner
        Columns inside of each perceptron.
    learns_epsilon
        False: epsilon stays 0, and the edges' aggregate has the vertex itself in it.
    choices
        What of the plan was chosen beforehand.
    norm, residual, jumping
        As for `dorylus_hpc.nn.layers.plan_layers`.

    Returns
    -------
    Program
    """
    widths = [n_features, *hidden, n_classes]
    planned = plan_layers(
        widths,
        dropout=dropout,
        input_dropout=input_dropout,
        weight_decay=weight_decay,
        decay_scope=decay_scope,
        seed=seed,
        norm=norm,
        residual=residual,
        jumping=jumping,
    )
    orders = choose_orders(
        [(layer["f_in"], inner) for layer in planned],
        sparse_features=sparse_features,
        input_dropout=input_dropout,
        choices=choices,
    )
    layers = [
        _Layer(**layer, **order, inner=inner, learns=learns_epsilon)
        for layer, order in zip(planned, orders, strict=True)
    ]
    return assemble(layers, sparse_features=sparse_features)


@dataclass(frozen=True, kw_only=True)
class _Layer(OrderedLayer):
    """A layer of a GIN."""

    inner: int
    learns: bool

    @property
    def takes_only_aggregate(self) -> bool:
        return not self.learns

    def params(self) -> list[ParamSpec]:
        i = self.index
        made = [
            ParamSpec(f"U{i}", i, (self.f_in, self.inner), self.decay),
            ParamSpec(f"a{i}", i, (self.inner,)),
            ParamSpec(f"W{i}", i, (self.inner, self.f_out), self.decay, draw=1),
            *self.end_params(),
        ]
        return [*made, ParamSpec(f"e{i}", i, (1,))] if self.learns else made

    def tensors(self) -> list[RowTensor]:
        i = self.index
        return [
            *self.output_tensors("in" if self.sends_output else None),
            RowTensor(f"dH{i}", self.f_out, trains_only=True),
            RowTensor(f"R{i}", self.inner),
            RowTensor(f"dR{i}", self.inner, None if self.aggregate_first else "out", trains_only=True),
            *self.aggregate_tensors(self.inner),
        ]

    @property
    def splits(self) -> bool:
        """The vertex itself stays out of M."""
        return self.learns and self.first and self.aggregate_first

    def forward(self) -> list[Stage]:
        i = self.index
        stages = self.begin_stages()
        if self.aggregate_first:
            stages += self.gather_input_stages()
            if self.splits:
                stages.append(
                    Stage("AV", i, self.transform_split, on_server=True, reads=(f"M{i}",), makes=(f"R{i}",))
                )
                stages.append(Stage("AV", i, self.finish, ops=self.finish_ops))
            else:
                stages.append(Stage("AV", i, self.transform_aggregate, ops=self.transform_aggregate_ops))
        else:
            if self.first:
                stages.append(
                    Stage("AV", i, self.transform_input, covers_ghosts=True, on_server=True, makes=(f"Y{i}",))
                )
            else:
                stages.append(Stage("AV", i, self.transform_input, ops=self.transform_input_ops))
                stages.append(Stage("SC", i, tensor=f"Y{i}"))
            stages.append(Stage("GA", i, self.gather_transformed, tensor=f"Y{i}", makes=(f"R{i}",)))
            if self.learns:
                stages.append(Stage("AV", i, self.add_transformed, ops=self.add_transformed_ops))
            stages.append(Stage("AV", i, self.finish, ops=self.finish_ops))
        return [*stages, *self.end_stages()]

    def backward(self) -> list[Stage]:
        i = self.index
        stages = [
            *self.begin_backward_stages(),
            Stage("dAV", i, self.finish_backward, ops=self.finish_backward_ops),
        ]
        if self.splits:
            reads = (f"dR{i}", f"M{i}")
            makes = (gradient_of(f"U{i}"), gradient_of(f"e{i}"))
            split = Stage("dAV", i, self.transform_split_backward, on_server=True, reads=reads, makes=makes)
            return [*stages, split, *self.end_backward_stages()]
        if self.aggregate_first:
            stages.append(
                Stage("dAV", i, self.transform_aggregate_backward, ops=self.transform_aggregate_backward_ops)
            )
            if not self.first:
                adds_to = (self.d_h_in,) if self.learns else ()
                stages += [
                    Stage("dSC", i, tensor=f"dM{i}"),
                    Stage(
                        "dGA",
                        i,
                        self.gather_input_backward,
                        tensor=f"dM{i}",
                        reads=adds_to,
                        makes=(self.d_h_in,),
                    ),
                ]
            return [*stages, *self.end_backward_stages()]
        if self.learns:
            stages.append(Stage("dAV", i, self.epsilon_backward, ops=self.epsilon_backward_ops))
        stages += [
            Stage("dSC", i, tensor=f"dR{i}"),
            Stage("dGA", i, self.gather_transformed_backward, tensor=f"dR{i}", makes=(f"dY{i}",)),
        ]
        if self.learns:
            stages.append(Stage("dAV", i, self.add_gradient, ops=self.add_gradient_ops))
        if self.first:
            d_y, d_u = (f"dY{i}",), (gradient_of(f"U{i}"),)
            backward = Stage("dAV", i, self.features_backward, on_server=True, reads=d_y, makes=d_u)
            return [*stages, backward, *self.end_backward_stages()]
        return [
            *stages,
            Stage("dAV", i, self.transform_input_backward, ops=self.transform_input_backward_ops),
        ]

    # Forward.

    def transform_split(self, task: Task) -> None:
        i, r = self.index, task.block(f"R{self.index}")
        u, e = task.weights[f"U{i}"], task.weights[f"e{i}"]
        task.part.features.times(task.rows, self.dropped_features(task), u, task.tensors[f"R{i}"])
        np.multiply(r, 1 + e, out=r)
        apply_vertex(task.block(f"M{i}"), u, out=r, accumulate=True)

    def transform_aggregate(self, task: Task) -> None:
        i, m = self.index, task.block(f"M{self.index}")
        if self.learns:
            add_self(m, task.block(self.h_in), task.weights[f"e{i}"], out=m)
        apply_vertex(m, task.weights[f"U{i}"], out=task.block(f"R{i}"))
        self.finish(task)

    def transform_input(self, task: Task) -> None:
        u, y = task.weights[f"U{self.index}"], task.tensors[f"Y{self.index}"]
        if self.first:
            task.part.features.times(task.rows, self.dropped_features(task), u, y)
        else:
            apply_vertex(task.block(self.h_in), u, out=task.block(f"Y{self.index}"))

    def gather_transformed(self, task: Task) -> None:
        y, r = task.sources[f"Y{self.index}"], task.tensors[f"R{self.index}"]
        task.part.in_edges.aggregate(y, r, task.rows)

    def add_transformed(self, task: Task) -> None:
        i, r = self.index, task.block(f"R{self.index}")
        add_self(r, task.block(f"Y{i}"), task.weights[f"e{i}"], out=r)

    def finish(self, task: Task) -> None:
        # The rest of the perceptron.
        i, r = self.index, task.block(f"R{self.index}")
        bias_relu_dropout(r, task.weights[f"a{i}"], None, 0.0, seed=0, epoch=0, layer=0, out=r)
        apply_vertex(r, task.weights[f"W{i}"], out=task.block(self.z))
        self.activate(task)

    # Backward.

    def finish_backward(self, task: Task) -> None:
        i = self.index
        r, d_r = task.block(f"R{i}"), task.block(f"dR{i}")
        w, d_w = task.weights[f"W{i}"], task.gradients[f"W{i}"]
        apply_vertex_backward(r, w, task.block(f"dH{i}"), d_w=d_w, d_h=d_r)
        relu_dropout_backward(d_r, r, 0.0, out=d_r)
        bias_gradient(d_r, out=task.gradients[f"a{i}"])

    def transform_split_backward(self, task: Task) -> None:
        i, start, stop = self.index, *task.rows
        d_u, u, d_r = task.gradients[f"U{i}"], task.weights[f"U{i}"], task.tensors[f"dR{i}"]
        task.part.features.weight_gradient(task.rows, self.dropped_features(task), d_r, d_u)
        self_gradient(d_u, u, out=task.gradients[f"e{i}"])
        np.multiply(d_u, 1 + task.weights[f"e{i}"], out=d_u)
        np.add(d_u, task.block(f"M{i}").T @ d_r[start:stop], out=d_u)

    def transform_aggregate_backward(self, task: Task) -> None:
        i = self.index
        d_m = None if self.first else task.block(f"dM{i}")
        apply_vertex_backward(
            task.block(f"M{i}"),
            task.weights[f"U{i}"],
            task.block(f"dR{i}"),
            need_d_h=not self.first,
            d_w=task.gradients[f"U{i}"],
            d_h=d_m,
        )
        if self.learns and d_m is not None:
            self_gradient(d_m, task.block(self.h_in), out=task.gradients[f"e{i}"])
            np.multiply(d_m, 1 + task.weights[f"e{i}"], out=task.block(self.d_h_in))

    def gather_input_backward(self, task: Task) -> None:
        d_m, d_h = task.sources[f"dM{self.index}"], task.tensors[self.d_h_in]
        task.part.out_edges.aggregate(d_m, d_h, task.rows, accumulate=self.learns)

    def epsilon_backward(self, task: Task) -> None:
        i = self.index
        self_gradient(task.block(f"dR{i}"), task.block(f"Y{i}"), out=task.gradients[f"e{i}"])

    def gather_transformed_backward(self, task: Task) -> None:
        d_r, d_y = task.sources[f"dR{self.index}"], task.tensors[f"dY{self.index}"]
        task.part.out_edges.aggregate(d_r, d_y, task.rows)

    def add_gradient(self, task: Task) -> None:
        i, d_y = self.index, task.block(f"dY{self.index}")
        add_self(d_y, task.block(f"dR{i}"), task.weights[f"e{i}"], out=d_y)

    def features_backward(self, task: Task) -> None:
        d_y, d_u = task.tensors[f"dY{self.index}"], task.gradients[f"U{self.index}"]
        task.part.features.weight_gradient(task.rows, self.dropped_features(task), d_y, d_u)

    def transform_input_backward(self, task: Task) -> None:
        i = self.index
        apply_vertex_backward(
            task.block(self.h_in),
            task.weights[f"U{i}"],
            task.block(f"dY{i}"),
            d_w=task.gradients[f"U{i}"],
            d_h=task.block(self.d_h_in),
        )

    # The same for a worker elsewhere.

    def transform_aggregate_ops(self, way: Pass) -> list[Op]:
        i = self.index
        ops: list[Op] = []
        if self.learns:
            ops.append(("add_self", {}, [f"M{i}", self.h_in, f"e{i}"], [f"M{i}"]))
        return [*ops, ("apply_vertex", {}, [f"M{i}", f"U{i}"], [f"R{i}"]), *self.finish_ops(way)]

    def transform_input_ops(self, _: Pass) -> list[Op]:
        i = self.index
        return [("apply_vertex", {}, [self.h_in, f"U{i}"], [f"Y{i}"])]

    def add_transformed_ops(self, _: Pass) -> list[Op]:
        i = self.index
        return [("add_self", {}, [f"R{i}", f"Y{i}", f"e{i}"], [f"R{i}"])]

    def finish_ops(self, way: Pass) -> list[Op]:
        i, r = self.index, f"R{self.index}"
        return [
            ("bias_relu_dropout", NO_DROPOUT, [r, f"a{i}", "gids"], [r]),
            ("apply_vertex", {}, [r, f"W{i}"], [self.z]),
            *self.activate_ops(way),
        ]

    def finish_backward_ops(self, _: Pass) -> list[Op]:
        i, d_r = self.index, f"dR{self.index}"
        return [
            ("apply_vertex_backward", {}, [f"R{i}", f"W{i}", f"dH{i}"], [gradient_of(f"W{i}"), d_r]),
            ("relu_dropout_backward", {"p": 0.0}, [d_r, f"R{i}"], [d_r]),
            ("bias_gradient", {}, [d_r], [gradient_of(f"a{i}")]),
        ]

    def transform_aggregate_backward_ops(self, _: Pass) -> list[Op]:
        i, d_u, d_m = self.index, gradient_of(f"U{self.index}"), f"dM{self.index}"
        makes = [d_u] if self.first else [d_u, d_m]
        ops: list[Op] = [("apply_vertex_backward", {}, [f"M{i}", f"U{i}", f"dR{i}"], makes)]
        if self.learns and not self.first:
            ops.append(("self_gradient", {}, [d_m, self.h_in], [gradient_of(f"e{i}")]))
            ops.append(("scale_self", {}, [d_m, f"e{i}"], [self.d_h_in]))
        return ops

    def epsilon_backward_ops(self, _: Pass) -> list[Op]:
        i = self.index
        return [("self_gradient", {}, [f"dR{i}", f"Y{i}"], [gradient_of(f"e{i}")])]

    def add_gradient_ops(self, _: Pass) -> list[Op]:
        i, d_y = self.index, f"dY{self.index}"
        return [("add_self", {}, [d_y, f"dR{i}", f"e{i}"], [d_y])]

    def transform_input_backward_ops(self, _: Pass) -> list[Op]:
        i = self.index
        makes = [gradient_of(f"U{i}"), self.d_h_in]
        return [("apply_vertex_backward", {}, [self.h_in, f"U{i}", f"dY{i}"], makes)]
