"""GCN as a stage program.

Layer l computes ``Z_l = P D_l W_l + b_l`` with P = D^-1/2 (A + I) D^-1/2, D_1 the (dropped-out) features
and D_{l+1} = dropout(relu(Z_l)). Two orders give the same result:

    transform-first   Y = D W   then   Z = P Y + b        gathers and sends f_out columns
    aggregate-first   M = P D   then   Z = M W + b        gathers and sends f_in columns

Row tensors of layer l: ``Y{l}`` or ``M{l}`` (what was just named), ``H{l}`` (D_{l+1}, or the logits of the
last layer), ``dH{l}`` (gradient of H, turned in place into that of Z), ``dY{l}`` or ``dM{l}``.
H > 0 tells both where ReLU let a value pass and where dropout kept it, so no mask is stored.

P has a scale for each source of an edge. Rows that are made to be gathered (Y, dM, and H and dH where nobody
else reads them) are multiplied by it once, where they are made, not once an edge: a gather of few columns has
little else to do. Unless edges have weights, sums are the same bits.

Layer 1 is special: features of ghosts are static and are received once, in the set-up, so its forward never
exchanges; and without input dropout M_1 = P X is computed once, while the features come.

References: Kipf and Welling, Semi-supervised classification with graph convolutional networks, ICLR
2017, equations 2 and 9; Dorylus (OSDI '21), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dorylus_hpc.nn.layers import Choices, OrderedLayer, assemble, choose_orders, plan_layers
from dorylus_hpc.nn.operands import multiply, multiply_backward, scale_rows
from dorylus_hpc.nn.params import ParamSpec
from dorylus_hpc.nn.program import Pass, Program, RowTensor, Stage, Task, gradient_of
from lambda_pkg.ops import Op


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
    l2_normalise: bool = False,
    choices: Choices | None = None,
    norm: str = "none",
    residual: bool = False,
    jumping: str = "none",
    scales_sources: bool = True,
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
    l2_normalise
        Rows of hidden layers have Euclidean norm 1.
    choices
        What of the plan was chosen beforehand.
    norm, residual, jumping
        As for `dorylus_hpc.nn.layers.plan_layers`.
    scales_sources
        Edges have a scale for their sources; False: for their destinations alone.

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
        l2_normalise=l2_normalise,
        norm=norm,
        residual=residual,
        jumping=jumping,
    )
    orders = choose_orders(
        [(layer["f_in"], layer["f_out"]) for layer in planned],
        sparse_features=sparse_features,
        input_dropout=input_dropout,
        choices=choices,
    )
    layers = [
        _Layer(**layer, **order, scales_in=scales_sources, scales_out=True)
        for layer, order in zip(planned, orders, strict=True)
    ]
    return assemble(layers, sparse_features=sparse_features)


@dataclass(frozen=True, kw_only=True)
class _Layer(OrderedLayer):
    """A layer of a GCN."""

    @property
    def takes_only_aggregate(self) -> bool:
        return True

    def params(self) -> list[ParamSpec]:
        return [
            ParamSpec(f"W{self.index}", self.index, (self.f_in, self.f_out), self.decay),
            *self.end_params(),
        ]

    def tensors(self) -> list[RowTensor]:
        i, aggregate = self.index, self.aggregate_first
        made = [
            *self.output_tensors("in" if self.sends_output else None),
            RowTensor(f"dH{i}", self.f_out, None if aggregate else "out", trains_only=True),
        ]
        return [*made, *self.aggregate_tensors(self.f_out)]

    def forward(self) -> list[Stage]:
        i = self.index
        stages = self.begin_stages()
        if self.aggregate_first:
            stages += self.gather_input_stages()
            stages.append(Stage("AV", i, self.transform_aggregate, ops=self.transform_aggregate_ops))
        else:
            stages.append(
                Stage("AV", i, self.transform_input, covers_ghosts=True, on_server=True, makes=(f"Y{i}",))
                if self.first
                else Stage("AV", i, self.transform_input, ops=self.transform_input_ops)
            )
            if not self.first:
                stages.append(Stage("SC", i, tensor=f"Y{i}"))
            stages.append(Stage("GA", i, self.gather_transformed, tensor=f"Y{i}", makes=(self.z,)))
            stages += self.activate_stages()
        return [*stages, *self.end_stages()]

    def backward(self) -> list[Stage]:
        i = self.index
        stages = self.begin_backward_stages()
        if self.aggregate_first:
            stages.append(
                Stage("dAV", i, self.transform_aggregate_backward, ops=self.transform_aggregate_backward_ops)
            )
            if not self.first:
                stages += [
                    Stage("dSC", i, tensor=f"dM{i}"),
                    Stage("dGA", i, self.gather_input_backward, tensor=f"dM{i}", makes=(self.d_h_in,)),
                ]
        else:
            stages += [
                Stage("dSC", i, tensor=f"dH{i}"),
                Stage("dGA", i, self.gather_transformed_backward, tensor=f"dH{i}", makes=(f"dY{i}",)),
                Stage(
                    "dAV",
                    i,
                    self.transform_input_backward,
                    on_server=True,
                    reads=(f"dY{i}",),
                    makes=(gradient_of(f"W{i}"),),
                )
                if self.first
                else Stage("dAV", i, self.transform_input_backward, ops=self.transform_input_backward_ops),
            ]
        return [*stages, *self.end_backward_stages()]

    @property
    def scales_gradient(self) -> bool:
        """Whether dH has the scale that its gather wants.

        Not where the layer before adds it to its own, nor where a batch norm's backward is still to come.
        """
        return self.scales_out and not (self.aggregate_first or self.residual or self.batch_norms)

    # Forward.

    def transform_input(self, task: Task) -> None:
        w, y = task.weights[f"W{self.index}"], task.tensors[f"Y{self.index}"]
        if self.first:
            task.part.features.times(task.rows, self.dropped_features(task), w, y)
        else:
            multiply(task.block(self.h_in), w, task.block(f"Y{self.index}"))
        if self.scales_in:
            scale_rows(task.block(f"Y{self.index}"), task.part.scale_in[slice(*task.rows)])

    def gather_transformed(self, task: Task) -> None:
        y, z = task.sources[f"Y{self.index}"], task.tensors[self.z]
        task.part.in_edges.aggregate(y, z, task.rows, scaled=self.scales_in)

    def transform_aggregate(self, task: Task) -> None:
        multiply(task.block(f"M{self.index}"), task.weights[f"W{self.index}"], task.block(self.z))
        self.activate(task)

    # Backward.

    def output_gradient(self, task: Task) -> None:
        super().output_gradient(task)
        if self.scales_gradient:
            scale_rows(task.block(f"dH{self.index}"), task.part.scale_out[slice(*task.rows)])

    def transform_aggregate_backward(self, task: Task) -> None:
        multiply_backward(
            task.block(f"M{self.index}"),
            task.weights[f"W{self.index}"],
            task.block(f"dH{self.index}"),
            task.gradients[f"W{self.index}"],
            None if self.first else task.block(f"dM{self.index}"),
        )
        if self.scales_out and not self.first:
            scale_rows(task.block(f"dM{self.index}"), task.part.scale_out[slice(*task.rows)])

    def gather_input_backward(self, task: Task) -> None:
        d_m, d_h = task.sources[f"dM{self.index}"], task.tensors[self.d_h_in]
        task.part.out_edges.aggregate(d_m, d_h, task.rows, scaled=self.scales_out)

    def gather_transformed_backward(self, task: Task) -> None:
        d_h, d_y = task.sources[f"dH{self.index}"], task.tensors[f"dY{self.index}"]
        task.part.out_edges.aggregate(d_h, d_y, task.rows, scaled=self.scales_gradient)

    def transform_input_backward(self, task: Task) -> None:
        d_w = task.gradients[f"W{self.index}"]
        if self.first:
            d_y = task.tensors[f"dY{self.index}"]
            task.part.features.weight_gradient(task.rows, self.dropped_features(task), d_y, d_w)
            return
        multiply_backward(
            task.block(self.h_in),
            task.weights[f"W{self.index}"],
            task.block(f"dY{self.index}"),
            d_w,
            task.block(self.d_h_in),
        )

    # The same for a worker elsewhere.

    def transform_input_ops(self, _: Pass) -> list[Op]:
        i = self.index
        ops: list[Op] = [("apply_vertex", {}, [self.h_in, f"W{i}"], [f"Y{i}"])]
        return [*ops, ("scale_rows", {}, [f"Y{i}", "scale_in"], [f"Y{i}"])] if self.scales_in else ops

    def transform_aggregate_ops(self, way: Pass) -> list[Op]:
        i = self.index
        return [("apply_vertex", {}, [f"M{i}", f"W{i}"], [self.z]), *self.activate_ops(way)]

    def output_gradient_ops(self, way: Pass) -> list[Op]:
        ops, d_h = super().output_gradient_ops(way), f"dH{self.index}"
        return [*ops, ("scale_rows", {}, [d_h, "scale_out"], [d_h])] if self.scales_gradient else ops

    def transform_aggregate_backward_ops(self, _: Pass) -> list[Op]:
        i, d_w = self.index, gradient_of(f"W{self.index}")
        makes = [d_w] if self.first else [d_w, f"dM{i}"]
        ops: list[Op] = [("apply_vertex_backward", {}, [f"M{i}", f"W{i}", f"dH{i}"], makes)]
        scales = self.scales_out and not self.first
        return [*ops, ("scale_rows", {}, [f"dM{i}", "scale_out"], [f"dM{i}"])] if scales else ops

    def transform_input_backward_ops(self, _: Pass) -> list[Op]:
        i, d_w = self.index, gradient_of(f"W{self.index}")
        return [("apply_vertex_backward", {}, [self.h_in, f"W{i}", f"dY{i}"], [d_w, self.d_h_in])]
