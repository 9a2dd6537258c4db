"""GCN as a stage program.

Layer l computes ``Z_l = P D_l W_l + b_l`` with P = D^-1/2 (A + I) D^-1/2, D_1 the (dropped-out) features
and D_{l+1} = dropout(relu(Z_l)). Two orders give the same result:

    transform-first   Y = D W   then   Z = P Y + b        gathers and sends f_out columns
    aggregate-first   M = P D   then   Z = M W + b        gathers and sends f_in columns

Row tensors of layer l: ``Y{l}`` or ``M{l}`` (what was just named), ``H{l}`` (D_{l+1}, or the logits of the
last layer), ``dH{l}`` (gradient of H, turned in place into that of Z), ``dY{l}`` or ``dM{l}``.
H > 0 tells both where ReLU let a value pass and where dropout kept it, so no mask is stored.

Layer 1 is special: features of ghosts are static and are received once, in the set-up, so its forward never
exchanges; and without input dropout M_1 = P X is computed once, while the features come.

References: Kipf and Welling, Semi-supervised classification with graph convolutional networks, ICLR
2017, equations 2 and 9; Dorylus (OSDI '21), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cython_kernels import relu_dropout_backward, softmax_cross_entropy
from dorylus_hpc.nn.operands import DropoutKey, activate
from dorylus_hpc.nn.params import ParamSpec
from dorylus_hpc.nn.program import (
    LOSS,
    Pass,
    Program,
    RowTensor,
    Stage,
    Task,
    gradient_of,
    load_stages,
)
from lambda_pkg.dense import apply_vertex, apply_vertex_backward, bias_gradient
from lambda_pkg.ops import Op

FEATURES = "features"  # the features with dropout; absent from a task where they are used as they are


def gcn_program(
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
) -> Program:
    """Declare a GCN.

    Parameters
    ----------
    n_features
        Input width.
    hidden
        Widths of the hidden layers; empty for a single layer.
    n_classes
        Output width.
    sparse_features
        Features are CSR: the first product is then ``X W``, whatever the widths.
    dropout, input_dropout
        Probability of dropping a hidden value, an input value.
    weight_decay
        L2 factor on weight matrices.
    decay_scope
        ``first``: of layer 1 only; ``all``: of every layer.
    seed
        Keys dropout.

    Returns
    -------
    Program
    """
    widths = [n_features, *hidden, n_classes]
    n_layers = len(widths) - 1
    aggregate_first = [
        _aggregate_first(i, widths[i - 1], widths[i], sparse=sparse_features, drops=input_dropout > 0)
        for i in range(1, n_layers + 1)
    ]
    layers = [
        _Layer(
            index=index,
            f_in=widths[index - 1],
            f_out=widths[index],
            last=index == n_layers,
            aggregate_first=aggregate_first[index - 1],
            sends_output=index < n_layers and aggregate_first[index],
            input_key=DropoutKey(input_dropout if index == 1 else dropout, seed, index),
            output_key=DropoutKey(dropout, seed, index + 1),
            decay=weight_decay if decay_scope == "all" or index == 1 else 0.0,
        )
        for index in range(1, n_layers + 1)
    ]
    tensors = [tensor for layer in layers for tensor in layer.tensors()]
    return Program(
        params=tuple(spec for layer in layers for spec in layer.params()),
        tensors={tensor.name: tensor for tensor in tensors},
        setup=() if sparse_features else layers[0].setup(),
        forward=tuple(stage for layer in layers for stage in layer.forward()),
        backward=tuple(stage for layer in reversed(layers) for stage in layer.backward()),
        logits=f"H{n_layers}",
        drops_input=input_dropout > 0,
        orders=tuple("aggregate-first" if layer.aggregate_first else "transform-first" for layer in layers),
        differs_in_evaluation=input_dropout > 0 or (dropout > 0 and n_layers > 1),
    )


def _aggregate_first(index: int, f_in: int, f_out: int, *, sparse: bool, drops: bool) -> bool:
    """Choose the order that gathers and sends fewer columns in forward and backward together."""
    if index > 1:
        return f_in < f_out  # 2 f_in gathered and sent against 2 f_out
    if sparse:
        return False  # P X of sparse X fills in
    if not drops:
        return True  # P X is computed once: nothing is gathered or sent in an epoch
    return f_in <= 3 * f_out  # forward gather alone, against two gathers and the backward's send


@dataclass(frozen=True)
class _Layer:
    """One layer: widths, order, keys. Methods named by stage run on one interval."""

    index: int
    f_in: int
    f_out: int
    last: bool
    aggregate_first: bool
    sends_output: bool  # the next layer gathers H as it is
    input_key: DropoutKey
    output_key: DropoutKey
    decay: float

    @property
    def first(self) -> bool:
        return self.index == 1

    @property
    def constant(self) -> bool:
        """The aggregate of this layer's input never changes."""
        return self.first and self.aggregate_first and not self.input_key.p

    def params(self) -> list[ParamSpec]:
        return [
            ParamSpec(f"W{self.index}", self.index, (self.f_in, self.f_out), self.decay),
            ParamSpec(f"b{self.index}", self.index, (self.f_out,)),
        ]

    def tensors(self) -> list[RowTensor]:
        i, aggregate = self.index, self.aggregate_first
        made = [
            RowTensor(f"H{i}", self.f_out, "in" if self.sends_output else None),
            RowTensor(f"dH{i}", self.f_out, None if aggregate else "out", trains_only=True),
        ]
        if aggregate:
            made.append(RowTensor(f"M{i}", self.f_in, constant=self.constant))
            if not self.first:
                made.append(RowTensor(f"dM{i}", self.f_in, "out", trains_only=True))
        else:
            made += [
                RowTensor(f"Y{i}", self.f_out, "in"),
                RowTensor(f"dY{i}", self.f_out, trains_only=True),
            ]
        return made

    def setup(self) -> tuple[Stage, ...]:
        return load_stages(self.gather_features if self.constant else None)

    def forward(self) -> list[Stage]:
        i = self.index
        stages = []
        if self.first and self.input_key.p:
            stages.append(
                Stage(
                    "AV",
                    i,
                    self.drop_features,
                    covers_ghosts=True,
                    trains_only=True,
                    weightless=True,
                    on_server=True,
                )
            )
        if self.aggregate_first:
            if not self.first:
                stages.append(Stage("SC", i, tensor=f"H{i - 1}"))
            if not self.constant:
                if self.first:
                    stages.append(Stage("GA", i, self.gather_features, tensor=FEATURES))
                else:
                    stages.append(Stage("GA", i, self.gather_input, tensor=f"H{i - 1}"))
            stages.append(Stage("AV", i, self.transform_aggregate, ops=self.transform_aggregate_ops))
        else:
            stages.append(
                Stage("AV", i, self.transform_input, covers_ghosts=True, on_server=True)
                if self.first
                else Stage("AV", i, self.transform_input, ops=self.transform_input_ops)
            )
            if not self.first:
                stages.append(Stage("SC", i, tensor=f"Y{i}"))
            stages.append(Stage("GA", i, self.gather_transformed, tensor=f"Y{i}"))
            stages.append(Stage("AV", i, self.activate, ops=self.activate_ops))
        if self.last:
            stages.append(Stage("AV", i, self.loss, trains_only=True, ops=self.loss_ops))
        return stages

    def backward(self) -> list[Stage]:
        i = self.index
        stages = [Stage("dAV", i, self.output_gradient, ops=self.output_gradient_ops)]
        if self.aggregate_first:
            stages.append(
                Stage("dAV", i, self.transform_aggregate_backward, ops=self.transform_aggregate_backward_ops)
            )
            if not self.first:
                stages += [
                    Stage("dSC", i, tensor=f"dM{i}"),
                    Stage("dGA", i, self.gather_input_backward, tensor=f"dM{i}"),
                ]
        else:
            stages += [
                Stage("dSC", i, tensor=f"dH{i}"),
                Stage("dGA", i, self.gather_transformed_backward, tensor=f"dH{i}"),
                Stage("dAV", i, self.transform_input_backward, on_server=True, reads=(f"dY{i}",))
                if self.first
                else Stage("dAV", i, self.transform_input_backward, ops=self.transform_input_backward_ops),
            ]
        return stages

    # Forward.

    def drop_features(self, task: Task) -> None:
        task.part.features.drop(task.rows, self.input_key, task.epoch, task.tensors[FEATURES])

    def _features(self, task: Task) -> np.ndarray | None:
        """Return the features with dropout, or None where they are used as they are."""
        return task.tensors[FEATURES] if self.input_key.p and task.training else None

    def gather_features(self, task: Task) -> None:
        drops = self.input_key.p and task.training
        x = task.sources[FEATURES] if drops else task.part.features.x  # type: ignore[union-attr]
        task.part.in_edges.aggregate(x, task.tensors[f"M{self.index}"], task.rows)

    def gather_input(self, task: Task) -> None:
        h, m = task.sources[f"H{self.index - 1}"], task.tensors[f"M{self.index}"]
        task.part.in_edges.aggregate(h, m, task.rows)

    def transform_input(self, task: Task) -> None:
        w, y = task.weights[f"W{self.index}"], task.tensors[f"Y{self.index}"]
        if self.first:
            task.part.features.times(task.rows, self._features(task), w, y)
        else:
            apply_vertex(task.block(f"H{self.index - 1}"), w, out=task.block(f"Y{self.index}"))

    def gather_transformed(self, task: Task) -> None:
        y, h = task.sources[f"Y{self.index}"], task.tensors[f"H{self.index}"]
        task.part.in_edges.aggregate(y, h, task.rows)

    def transform_aggregate(self, task: Task) -> None:
        apply_vertex(
            task.block(f"M{self.index}"), task.weights[f"W{self.index}"], out=task.block(f"H{self.index}")
        )
        self.activate(task)

    def activate(self, task: Task) -> None:
        h, bias = task.block(f"H{self.index}"), task.weights[f"b{self.index}"]
        if self.last:
            np.add(h, bias, out=h)
            return
        gids = task.part.gids[slice(*task.rows)]
        activate(
            h,
            bias,
            gids,
            self.output_key,
            epoch=task.epoch,
            training=task.training,
        )

    def loss(self, task: Task) -> None:
        part, rows = task.part, slice(*task.rows)
        task.loss = softmax_cross_entropy(
            task.block(f"H{self.index}"),
            part.labels[rows],
            part.train_mask[rows],
            scale=1.0 / task.n_labelled,
            d_logits=task.block(f"dH{self.index}"),
        )

    # Backward.

    def output_gradient(self, task: Task) -> None:
        """Turn the gradient of this layer's output into that of Z, in place; the bias gradient falls out."""
        d_h = task.block(f"dH{self.index}")
        if not self.last:
            relu_dropout_backward(
                d_h,
                task.block(f"H{self.index}"),
                self.output_key.p,
                out=d_h,
            )
        bias_gradient(d_h, out=task.gradients[f"b{self.index}"])

    def transform_aggregate_backward(self, task: Task) -> None:
        apply_vertex_backward(
            task.block(f"M{self.index}"),
            task.weights[f"W{self.index}"],
            task.block(f"dH{self.index}"),
            need_d_h=not self.first,
            d_w=task.gradients[f"W{self.index}"],
            d_h=None if self.first else task.block(f"dM{self.index}"),
        )

    def gather_input_backward(self, task: Task) -> None:
        d_m, d_h = task.sources[f"dM{self.index}"], task.tensors[f"dH{self.index - 1}"]
        task.part.out_edges.aggregate(d_m, d_h, task.rows)

    def gather_transformed_backward(self, task: Task) -> None:
        d_h, d_y = task.sources[f"dH{self.index}"], task.tensors[f"dY{self.index}"]
        task.part.out_edges.aggregate(d_h, d_y, task.rows)

    def transform_input_backward(self, task: Task) -> None:
        d_w = task.gradients[f"W{self.index}"]
        if self.first:
            d_y = task.tensors[f"dY{self.index}"]
            task.part.features.weight_gradient(task.rows, self._features(task), d_y, d_w)
            return
        apply_vertex_backward(
            task.block(f"H{self.index - 1}"),
            task.weights[f"W{self.index}"],
            task.block(f"dY{self.index}"),
            d_w=d_w,
            d_h=task.block(f"dH{self.index - 1}"),
        )

    # The same for a worker elsewhere.

    def transform_input_ops(self, _: Pass) -> list[Op]:
        i = self.index
        return [("apply_vertex", {}, [f"H{i - 1}", f"W{i}"], [f"Y{i}"])]

    def transform_aggregate_ops(self, way: Pass) -> list[Op]:
        i = self.index
        return [("apply_vertex", {}, [f"M{i}", f"W{i}"], [f"H{i}"]), *self.activate_ops(way)]

    def activate_ops(self, way: Pass) -> list[Op]:
        h, bias = f"H{self.index}", f"b{self.index}"
        if self.last:
            return [("add_bias", {}, [h, bias], [h])]
        key = self.output_key
        dropout = {
            "p": key.p if way.training else 0.0,
            "seed": key.seed,
            "epoch": way.epoch,
            "layer": key.layer,
        }
        return [("bias_relu_dropout", dropout, [h, bias, "gids"], [h])]

    def loss_ops(self, way: Pass) -> list[Op]:
        h = f"H{self.index}"
        scale = {"scale": 1.0 / way.n_labelled}
        return [("softmax_cross_entropy", scale, [h, "labels", "train_mask"], [LOSS, f"d{h}"])]

    def output_gradient_ops(self, _: Pass) -> list[Op]:
        d_h, h = f"dH{self.index}", f"H{self.index}"
        ops: list[Op] = []
        if not self.last:
            ops.append(("relu_dropout_backward", {"p": self.output_key.p}, [d_h, h], [d_h]))
        return [*ops, ("bias_gradient", {}, [d_h], [gradient_of(f"b{self.index}")])]

    def transform_aggregate_backward_ops(self, _: Pass) -> list[Op]:
        i, d_w = self.index, gradient_of(f"W{self.index}")
        makes = [d_w] if self.first else [d_w, f"dM{i}"]
        return [("apply_vertex_backward", {}, [f"M{i}", f"W{i}", f"dH{i}"], makes)]

    def transform_input_backward_ops(self, _: Pass) -> list[Op]:
        i, d_w = self.index, gradient_of(f"W{self.index}")
        return [("apply_vertex_backward", {}, [f"H{i - 1}", f"W{i}", f"dY{i}"], [d_w, f"dH{i - 1}"])]
