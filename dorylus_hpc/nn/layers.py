"""What layers of different models share: how they begin, and how they end.

A layer begins with the features, or with the output of the layer before. It ends with a bias, and then with
ReLU and the dropout of the next layer's input, or (the last one) with the loss. Between the two is what makes
a model; see `gcn` for an example.

Row tensors that are named here: ``H{l}`` is the output of layer l as the next layer takes it (after ReLU and
dropout; of the last layer the logits), and ``dH{l}`` the gradient of H, turned in place into that of
``Z = H before bias, ReLU and dropout``. H > 0 tells both where ReLU let a value pass and where dropout kept
it, so no mask is stored.

A hidden layer whose rows are normalised between ReLU and dropout has Z, and then ReLU's result, in ``A{l}``:
the gradient of the norm needs them. One with a layer norm or a batch norm, before ReLU, has in ``A{l}`` what
is normed. A batch norm has no bias before it, which it would take away again. It needs sums over all
vertices: ``B{l}`` and ``dB{l}`` have a row of them for every interval of the graph. In an evaluation it uses
running averages, which are kept among the weights as ``mean{l}`` and ``variance{l}``.

Hidden layers may add their input to Z (a *residual*): as it is, or in layer 1 the product of features and a
matrix, which is in ``E1``. With *jumping knowledge* the last layer's input is ``J``: the inputs of layers 2,
3 ... beside each other, or the largest of them. Both give the ``dH{l}`` of a layer more than one summand; the
others are there when the layer's backward begins, which adds them.

References: Ba, Kiros and Hinton, Layer normalization, 2016, equation 4; Ioffe and Szegedy, Batch
normalization, ICML 2015, algorithms 1 and 2; He et al., Deep residual learning for
image recognition, CVPR 2016, equation 1; Xu et al., Representation learning on graphs with jumping knowledge
networks, ICML 2018, section 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cython_kernels import bias_relu_dropout, dropout, relu_dropout_backward
from dorylus_hpc.errors import InputError
from dorylus_hpc.nn import batch_norm
from dorylus_hpc.nn.operands import DropoutKey, activate, scale_rows
from dorylus_hpc.nn.params import ParamSpec
from dorylus_hpc.nn.program import (
    LOSS,
    Ghosts,
    Pass,
    Program,
    RowTensor,
    Stage,
    Task,
    gradient_of,
    inputs_of,
    load_stages,
)
from lambda_pkg.dense import (
    bias_gradient,
    join_backward,
    join_layers,
    l2_normalise,
    l2_normalise_backward,
    layer_norm,
    layer_norm_backward,
)
from lambda_pkg.ops import Op

NO_DROPOUT = {"p": 0.0, "seed": 0, "epoch": 0, "layer": 0}  # of an op that would drop

FEATURES = "features"  # the features with dropout; absent from a task where they are used as they are


@dataclass(frozen=True)
class Choices:
    """What of the plan of a program is chosen; none of it changes results beyond rounding.

    Attributes
    ----------
    order
        ``auto``, or the order of all layers that have the choice: ``aggregate-first``, ``transform-first``.
    constant_aggregate
        An aggregate of features that never changes is computed once; False: in every epoch.
    ghost_products
        How rows of products of the features come to the ghosts, where products are gathered: ``exchange``d,
        ``compute``d by everybody who reads them, or ``auto``.
    """

    order: str = "auto"
    constant_aggregate: bool = True
    ghost_products: str = "auto"


def gathers_input(
    index: int, f_in: int, f_out: int, *, sparse: bool, drops: bool, choices: Choices | None = None
) -> bool:
    """Choose the order of a layer that can aggregate before its product or after it.

    Parameters
    ----------
    index
        Of the layer, from 1.
    f_in, f_out
        Columns before and after the product.
    sparse, drops
        The features of layer 1 are CSR; are dropped from.
    choices
        What was chosen beforehand. A gather of CSR features is no choice: it would fill in.

    Returns
    -------
    bool
        True if aggregating first gathers and sends fewer columns, in forward and backward together.
    """
    choices = choices or Choices()
    if index == 1 and sparse:
        return False  # P X of sparse X fills in
    if choices.order != "auto":
        return choices.order == "aggregate-first"
    if index > 1:
        return f_in < f_out  # 2 f_in gathered and sent against 2 f_out
    if not drops and choices.constant_aggregate:
        return True  # P X is computed once: nothing is gathered or sent in an epoch
    return f_in <= 3 * f_out  # forward gather alone, against two gathers and the backward's send


# A number of a ghost's product takes 2 f_in operations, at some 40 Gflop/s a thread; exchanged it takes the
# time of its 4 bytes, at about 1 GB/s: a network of 10 Gbit/s, or processes of a machine, packing and placing
# included. (In double precision both take twice as long.) How many ghosts there are, and how wide products
# are, is the same factor of both.
_FLOPS_OF_A_SENT_NUMBER = 4 / 1e9 * 40e9


def exchanges_products(f_in: int, *, sparse: bool, choices: Choices | None = None) -> bool:
    """Choose how a first layer that gathers products of the features has those of ghosts.

    Parameters
    ----------
    f_in
        Columns of the features.
    sparse
        They are CSR: a product takes few operations, how many is not known here.
    choices
        What was chosen beforehand.

    Returns
    -------
    bool
        True if rows of products are exchanged in every epoch; False if features of ghosts are, once, and all
        who read their products compute them.
    """
    choices = choices or Choices()
    if choices.ghost_products != "auto":
        return choices.ghost_products == "exchange"
    return not sparse and 2 * f_in > _FLOPS_OF_A_SENT_NUMBER


@dataclass(frozen=True, kw_only=True)
class Layer(ABC):
    """A layer's place, widths and keys, and its ends. Methods named by a stage run on one interval.

    A model's layer adds `params`, `tensors`, `setup`, `forward` and `backward`, which `assemble` calls.

    Attributes
    ----------
    index
        From 1.
    f_in, f_out
        Columns of input and output.
    last
        Its output are the logits.
    input_key, output_key
        Dropout of its input, and of the next layer's.
    decay
        L2 factor of its weight matrices.
    normalise
        Rows of its output have Euclidean norm 1 (before dropout; but for the last layer).
    norm
        ``layer``: a layer norm before ReLU, ``batch``: a batch norm, but for the last layer; or ``none``.
    residual
        It adds its input to Z; the last layer does not.
    passes_on
        The next layer adds this one's output.
    jump
        What the last layer takes: the output of the layer before (``none``), or of all, ``cat`` or ``max``.
    n_layers
        Of the model.
    """

    index: int
    f_in: int
    f_out: int
    last: bool
    input_key: DropoutKey
    output_key: DropoutKey
    decay: float
    normalise: bool = False
    norm: str = "none"
    residual: bool = False
    passes_on: bool = False
    jump: str = "none"
    n_layers: int = 0

    @property
    def first(self) -> bool:
        """Whether it takes the features."""
        return self.index == 1

    @property
    def drops(self) -> bool:
        """Whether it drops from its input."""
        return self.input_key.p > 0

    @property
    def differs_in_evaluation(self) -> bool:
        """Whether its training differs from an evaluation."""
        return self.drops or self.batch_norms

    @property
    def normalises(self) -> bool:
        """Whether rows of the output are normalised."""
        return self.normalise and not self.last

    @property
    def norms(self) -> bool:
        """Whether there is a layer norm."""
        return self.norm == "layer" and not self.last

    @property
    def batch_norms(self) -> bool:
        """Whether there is a batch norm."""
        return self.norm == "batch" and not self.last

    @property
    def jumps(self) -> bool:
        """Whether the last layer takes more than the output of the layer before."""
        return self.jump != "none" and self.n_layers > 2

    @property
    def z(self) -> str:
        """The row tensor in which `activate` finds Z without the bias."""
        apart = self.normalises or self.norms or self.batch_norms
        return f"A{self.index}" if apart else f"H{self.index}"

    @property
    def h_in(self) -> str:
        """The row tensor of its input; not of layer 1."""
        return "J" if self.last and self.jumps else f"H{self.index - 1}"

    @property
    def d_h_in(self) -> str:
        """The gradient of its input."""
        return f"d{self.h_in}"

    @property
    def gathers_its_input(self) -> bool:
        """Whether neighbours read its input as it is."""
        return False

    @property
    def scales_output(self) -> bool:
        """Whether rows of H have the scale that the gather of the next layer wants."""
        return False

    @property
    def replaces_input(self) -> str:
        """The row tensor that may take the place of the features (`Program.replaces_input`); or empty."""
        return ""

    def end_params(self) -> list[ParamSpec]:
        """Return the bias, the weights of the residual of layer 1, and those of a norm."""
        i = self.index
        made = [] if self.batch_norms else [ParamSpec(f"b{i}", i, (self.f_out,))]
        if self.residual and self.first:
            made.append(ParamSpec("Wr1", 1, (self.f_in, self.f_out), self.decay, draw=3))
        if self.norms or self.batch_norms:
            made.append(ParamSpec(f"g{i}", i, (self.f_out,), start=1.0))
            made.append(ParamSpec(f"s{i}", i, (self.f_out,)))
        if self.batch_norms:
            share = batch_norm.MOMENTUM
            made.append(ParamSpec(f"mean{i}", i, (self.f_out,), average=share))
            made.append(ParamSpec(f"variance{i}", i, (self.f_out,), start=1.0, average=share))
        return made

    def output_tensors(self, ghosts: Ghosts | None) -> list[RowTensor]:
        """Return the row tensors of its beginning and its end; the ghosts are those that H would have."""
        joined = self.jumps and self.index == self.n_layers - 1  # J is sent, not H
        made = [RowTensor(f"H{self.index}", self.f_out, None if joined else ghosts)]
        if self.z != f"H{self.index}":
            made.append(RowTensor(self.z, self.f_out))
        if self.residual and self.first:
            made.append(RowTensor("E1", self.f_out))
        if self.batch_norms:
            widths = {"B": batch_norm.forward_width, "dB": batch_norm.backward_width}
            made += [
                RowTensor(f"{name}{self.index}", of(self.f_out), trains_only=True, dtype="float64", sums=True)
                for name, of in widths.items()
            ]
        if self.last and self.jumps:
            made.append(RowTensor("J", self.f_in, "in" if self.gathers_its_input else None))
            made.append(RowTensor("dJ", self.f_in, trains_only=True))
        return made

    @abstractmethod
    def params(self) -> list[ParamSpec]:
        """Return the layer's weight tensors."""

    @abstractmethod
    def tensors(self) -> list[RowTensor]:
        """Return the layer's row tensors."""

    @abstractmethod
    def setup(self) -> tuple[Stage, ...]:
        """Return the stages of the set-up, of a first layer with dense features."""

    @abstractmethod
    def forward(self) -> list[Stage]:
        """Return the stages of the forward."""

    @abstractmethod
    def backward(self) -> list[Stage]:
        """Return the stages of the backward."""

    @property
    def order(self) -> str:
        """What to tell of the order of its stages."""
        return "transform-first"

    # How it begins.

    def begin_stages(self) -> list[Stage]:
        """Return what comes first: the input of jumping knowledge, dropout of features, their residual."""
        stages = self.drop_stages()
        if self.residual and self.first:
            stages.append(Stage("AV", 1, self.multiply_residual, on_server=True, makes=("E1",)))
        if self.last and self.jumps:
            stages.append(Stage("AV", self.index, self.join, weightless=True, ops=self.join_ops))
        return stages

    def multiply_residual(self, task: Task) -> None:
        """Multiply the features with the residual's matrix."""
        x, w = self.dropped_features(task), task.weights["Wr1"]
        task.part.features.times(task.rows, x, w, task.tensors["E1"])

    def join(self, task: Task) -> None:
        """Join the outputs of all hidden layers."""
        join_layers([task.block(name) for name in self._hidden], self.jump, out=task.block("J"))

    def join_ops(self, _: Pass) -> list[Op]:
        """Return what `join` does as ops."""
        return [("join_layers", {"how": self.jump}, list(self._hidden), ["J"])]

    @property
    def _hidden(self) -> list[str]:
        return [f"H{layer}" for layer in range(1, self.n_layers)]

    def drop_stages(self) -> list[Stage]:
        """Return the dropout of the features, if this layer has it."""
        if not (self.first and self.input_key.p):
            return []
        return [
            Stage(
                "AV",
                self.index,
                self.drop_features,
                covers_ghosts=True,
                trains_only=True,
                weightless=True,
                on_server=True,
                makes=(FEATURES,),
            )
        ]

    def drop_features(self, task: Task) -> None:
        """Drop from the features."""
        task.part.features.drop(task.rows, self.input_key, task.epoch, task.tensors[FEATURES])

    def dropped_features(self, task: Task) -> np.ndarray | None:
        """Return the features with dropout, or None where they are used as they are."""
        return task.tensors[FEATURES] if self.input_key.p and task.training else None

    # How it ends.

    def activate_stages(self) -> list[Stage]:
        """Return `activate` as a stage of its own; before a batch norm there may be nothing to do."""
        i, z = self.index, self.z
        if not self.batch_norms:
            return [Stage("AV", i, self.activate, ops=self.activate_ops)]
        if not self.residual:
            return []
        reads = (z, self._residual_rows)
        return [Stage("AV", i, self.activate, weightless=True, on_server=True, reads=reads, makes=(z,))]

    def activate(self, task: Task) -> None:
        """Add the bias; then ReLU and the dropout of the next layer's input, but for the last layer.

        Before a batch norm nothing but the residual is added: the rest is that of `end_stages`.
        """
        if self.residual:
            z = task.block(self.z)
            np.add(z, task.block(self._residual_rows), out=z)
        if self.batch_norms:
            return
        h, bias = task.block(f"H{self.index}"), task.weights[f"b{self.index}"]
        if self.last:
            np.add(h, bias, out=h)
            return
        gids = task.part.gids[slice(*task.rows)]
        row_scale = task.part.scale_in[slice(*task.rows)] if self.scales_output else None
        if self.norms:
            a, scale = task.block(self.z), task.weights[f"g{self.index}"]
            np.add(a, bias, out=a)
            layer_norm(a, scale, out=h)
            bias = task.weights[f"s{self.index}"]
        if self.normalises:
            a, key = task.block(self.z), self.output_key
            bias_relu_dropout(a, bias, None, 0.0, seed=0, epoch=0, layer=0, out=a)
            l2_normalise(a, out=h)
            if key.p and task.training:
                dropout(h, gids, key.p, seed=key.seed, epoch=task.epoch, layer=key.layer, out=h)
            if row_scale is not None:
                scale_rows(h, row_scale)
            return
        activate(
            h,
            bias,
            gids,
            self.output_key,
            epoch=task.epoch,
            training=task.training,
            scale=row_scale,
        )

    @property
    def _residual_rows(self) -> str:
        return "E1" if self.first else self.h_in

    def activate_ops(self, way: Pass) -> list[Op]:
        """Return what `activate` does as ops."""
        i, h, bias = self.index, f"H{self.index}", f"b{self.index}"
        ops: list[Op] = []
        if self.residual:
            ops.append(("add_rows", {}, [self.z, self._residual_rows], [self.z]))
        if self.batch_norms:
            return ops
        if self.last:
            return [*ops, ("add_bias", {}, [h, bias], [h])]
        if self.norms:
            ops.append(("add_bias", {}, [self.z, bias], [self.z]))
            ops.append(("layer_norm", {}, [self.z, f"g{i}"], [h]))
            bias = f"s{i}"
        if self.normalises:
            ops.append(("bias_relu_dropout", NO_DROPOUT, [self.z, bias, "gids"], [self.z]))
            ops.append(("l2_normalise_dropout", self.dropout_parameters(way), [self.z, "gids"], [h]))
        else:
            ops.append(("bias_relu_dropout", self.dropout_parameters(way), [h, bias, "gids"], [h]))
        if self.scales_output:
            ops.append(("scale_rows", {}, [h, "scale_in"], [h]))
        return ops

    def dropout_parameters(self, way: Pass) -> dict[str, Any]:
        """Return the parameters of an op that drops from the next layer's input."""
        key = self.output_key
        return {
            "p": key.p if way.training else 0.0,
            "seed": key.seed,
            "epoch": way.epoch,
            "layer": key.layer,
        }

    def end_stages(self) -> list[Stage]:
        """Return what follows `activate`: the batch norm, or (of the last layer) the loss."""
        return self.batch_norm_stages() if self.batch_norms else self.loss_stages()

    def batch_norm_stages(self) -> list[Stage]:
        """Return the batch norm, ReLU and dropout, which stay on the server: they are quickly done there."""
        i, a, h = self.index, self.z, f"H{self.index}"
        averages = gradient_of(f"mean{i}"), gradient_of(f"variance{i}")
        return [
            Stage(
                "AV", i, self.sum_rows, trains_only=True, weightless=True, on_server=True, reads=(a,),
                makes=(f"B{i}",),
            ),
            Stage(
                "RD", i, self.norm_rows, tensor=f"B{i}", trains_only=True, weighted=True, reads=(a,),
                makes=(h, *averages),
            ),
            Stage(
                "AV", i, self.norm_by_averages, evaluates_only=True, on_server=True, reads=(a,), makes=(h,)
            ),
        ]  # fmt: skip

    def sum_rows(self, task: Task) -> None:
        """Write an interval's sums."""
        batch_norm.sum_rows(task.block(self.z), task.tensors[f"B{self.index}"][task.number])

    def norm_rows(self, task: Task) -> None:
        """Norm by the statistics of all rows, which also go into the running averages, once."""
        i, known = self.index, batch_norm.merge(task.sources[f"B{self.index}"])
        counts = task.number == 0
        task.gradients[f"mean{i}"][...] = known.mean if counts else 0.0
        task.gradients[f"variance{i}"][...] = known.unbiased if counts else 0.0
        self._norm(task, known.mean, known.inverse)

    def norm_by_averages(self, task: Task) -> None:
        """Norm by the running averages."""
        mean, variance = (task.weights[f"{name}{self.index}"] for name in ("mean", "variance"))
        self._norm(task, mean, batch_norm.inverse_deviation(variance))

    def _norm(self, task: Task, mean: np.ndarray, inverse: np.ndarray) -> None:
        i, h = self.index, task.block(f"H{self.index}")
        batch_norm.norm(task.block(self.z), mean, inverse, task.weights[f"g{i}"], out=h)
        gids, key = task.part.gids[slice(*task.rows)], self.output_key
        activate(h, task.weights[f"s{i}"], gids, key, epoch=task.epoch, training=task.training)

    def loss_stages(self) -> list[Stage]:
        """Return the loss, if this is the last layer."""
        if not self.last:
            return []
        return [Stage("AV", self.index, self.loss, trains_only=True, ops=self.loss_ops)]

    def loss(self, task: Task) -> None:
        """Write the loss, and the gradient of the logits."""
        part, rows = task.part, slice(*task.rows)
        task.loss = task.objective.loss(
            task.block(f"H{self.index}"),
            part.labels[rows],
            part.train_mask[rows],
            task.n_labelled,
            task.block(f"dH{self.index}"),
        )

    def loss_ops(self, way: Pass) -> list[Op]:
        """Return what `loss` does as ops."""
        h = f"H{self.index}"
        name, parameters = way.objective.op(way.n_labelled)
        return [(name, parameters, [h, "labels", "train_mask"], [LOSS, f"d{h}"])]

    def begin_backward_stages(self) -> list[Stage]:
        """Return what turns the gradient of this layer's output into that of Z."""
        i = self.index
        if not self.batch_norms:
            return [Stage("dAV", i, self.output_gradient, ops=self.output_gradient_ops)]
        a, d_h, sums = self.z, f"dH{i}", f"dB{i}"
        ops = self.output_gradient_ops(Pass(epoch=1, training=True, n_labelled=1))
        reads = tuple(inputs_of(ops))
        scale, shift = gradient_of(f"g{i}"), gradient_of(f"s{i}")
        return [
            Stage("dAV", i, self.output_gradient, weightless=True, on_server=True, reads=reads, makes=(d_h,)),
            Stage(
                "dAV", i, self.sum_gradients, weightless=True, on_server=True, reads=(a, d_h, f"B{i}"),
                makes=(sums, scale, shift),
            ),
            Stage(
                "RD", i, self.norm_backward, tensor=sums, weighted=True, reads=(a, d_h, f"B{i}"), makes=(d_h,)
            ),
        ]  # fmt: skip

    def sum_gradients(self, task: Task) -> None:
        """Write an interval's sums, which are its share of the gradients of the norm's scale and shift."""
        i, row = self.index, task.tensors[f"dB{self.index}"][task.number]
        known = batch_norm.merge(task.sources[f"B{i}"])  # all are there: the forward has read them
        batch_norm.sum_gradients(task.block(f"dH{i}"), task.block(self.z), known, row)
        task.gradients[f"s{i}"][...] = row[: self.f_out]
        task.gradients[f"g{i}"][...] = row[self.f_out :]

    def norm_backward(self, task: Task) -> None:
        """Turn the gradient of the norm's output into that of Z, in place."""
        i, known = self.index, batch_norm.merge(task.sources[f"B{self.index}"])
        d_z, a, scale = task.block(f"dH{i}"), task.block(self.z), task.weights[f"g{i}"]
        batch_norm.norm_backward(d_z, a, known, scale, task.sources[f"dB{i}"])

    def output_gradient(self, task: Task) -> None:
        """Turn the gradient of this layer's output into that of Z, in place; the bias gradient falls out.

        With a batch norm it stops at the gradient of the norm's output.
        """
        i, d_h = self.index, task.block(f"dH{self.index}")
        if self.jumps and not self.last:
            hidden = [task.block(name) for name in self._hidden[:i]]
            share = join_backward(task.block("dJ"), task.block("J"), hidden, self.jump)
            if i == self.n_layers - 1:  # nobody else takes this layer's output
                d_h[...] = share
            else:
                np.add(d_h, share, out=d_h)
        if self.passes_on:
            np.add(d_h, task.block(f"dH{i + 1}"), out=d_h)
        if not self.last:
            relu_dropout_backward(
                d_h,
                task.block(f"H{self.index}"),
                self.output_key.p,
                out=d_h,
            )
        if self.batch_norms:
            return
        if self.norms:
            bias_gradient(d_h, out=task.gradients[f"s{i}"])
            a, scale = task.block(self.z), task.weights[f"g{i}"]
            layer_norm_backward(d_h, a, scale, out=d_h, d_scale=task.gradients[f"g{i}"])
        if self.normalises:
            a = task.block(self.z)
            relu_dropout_backward(l2_normalise_backward(d_h, a, out=d_h), a, 0.0, out=d_h)
        bias_gradient(d_h, out=task.gradients[f"b{self.index}"])

    def output_gradient_ops(self, _: Pass) -> list[Op]:
        """Return what `output_gradient` does as ops."""
        i, d_h, h = self.index, f"dH{self.index}", f"H{self.index}"
        ops: list[Op] = []
        if self.jumps and not self.last:
            reads = ["dJ", "J", *self._hidden[:i]]
            if i == self.n_layers - 1:
                ops.append(("join_backward", {"how": self.jump}, reads, [d_h]))
            else:
                ops.append(("add_join_backward", {"how": self.jump}, [d_h, *reads], [d_h]))
        if self.passes_on:
            ops.append(("add_rows", {}, [d_h, f"dH{i + 1}"], [d_h]))
        if not self.last:
            ops.append(("relu_dropout_backward", {"p": self.output_key.p}, [d_h, h], [d_h]))
        if self.batch_norms:
            return ops
        if self.norms:
            ops.append(("bias_gradient", {}, [d_h], [gradient_of(f"s{i}")]))
            made = [d_h, gradient_of(f"g{i}")]
            ops.append(("layer_norm_backward", {}, [d_h, self.z, f"g{i}"], made))
        if self.normalises:
            ops.append(("l2_normalise_backward", {}, [d_h, self.z], [d_h]))
            ops.append(("relu_dropout_backward", {"p": 0.0}, [d_h, self.z], [d_h]))
        return [*ops, ("bias_gradient", {}, [d_h], [gradient_of(f"b{self.index}")])]

    def end_backward_stages(self) -> list[Stage]:
        """Return what comes last in the backward: the gradient of the residual's matrix."""
        if not (self.residual and self.first):
            return []
        return [Stage("dAV", 1, self.residual_backward, on_server=True, reads=("dH1",), makes=("dWr1",))]

    def residual_backward(self, task: Task) -> None:
        """Make the gradient of the residual's matrix, which multiplies features."""
        d_z, x = task.tensors["dH1"][: task.part.n_own], self.dropped_features(task)
        task.part.features.weight_gradient(task.rows, x, d_z, task.gradients["Wr1"])


@dataclass(frozen=True, kw_only=True)
class OrderedLayer(Layer):
    """A layer that may aggregate its input, or the product of its input and weights.

    It has its aggregated input in ``M{l}``, or the product in ``Y{l}``; gradients in ``dM{l}`` or ``dY{l}``.

    Attributes
    ----------
    aggregate_first
        Which of the two.
    sends_output
        The next layer gathers H as it is.
    computes_once
        An aggregate that never changes is computed in the set-up.
    scales_in, scales_out
        In-edges, out-edges have a scale for their sources, and rows are multiplied by it where they are made
        if nobody but a gather reads them.
    """

    aggregate_first: bool
    sends_output: bool
    computes_once: bool = True
    scales_in: bool = False
    scales_out: bool = False

    @property
    def order(self) -> str:
        """Which of the two in words."""
        return "aggregate-first" if self.aggregate_first else "transform-first"

    @property
    def gathers_its_input(self) -> bool:
        """Whether neighbours read its input as it is."""
        return self.aggregate_first and not self.first

    @property
    def scales_output(self) -> bool:
        """Whether rows of H have the scale that the gather of the next layer wants."""
        apart = self.passes_on or self.jumps or self.norm == "batch"  # a batch norm makes rows later
        return self.scales_in and self.sends_output and not apart

    @property
    def input_is_scaled(self) -> bool:
        """Whether the layer before has scaled the rows that this one gathers."""
        apart = self.residual or self.jumps or self.norm == "batch"
        return self.scales_in and self.gathers_its_input and not apart

    @property
    def constant(self) -> bool:
        """The aggregate of this layer's input never changes."""
        return self.first and self.aggregate_first and not self.input_key.p and self.computes_once

    @property
    def replaces_input(self) -> str:
        """M, where it never changes and the layer takes nothing else; the residual takes features."""
        return f"M{self.index}" if self.constant and self.takes_only_aggregate and not self.residual else ""

    @property
    def takes_only_aggregate(self) -> bool:
        """Nothing of its input but what was aggregated is used, where that comes first."""
        return False

    def aggregate_tensors(self, width: int) -> list[RowTensor]:
        """Return the tensors around the gathers; `width` is that of the product."""
        i = self.index
        if not self.aggregate_first:
            return [RowTensor(f"Y{i}", width, "in"), RowTensor(f"dY{i}", width, trains_only=True)]
        made = [RowTensor(f"M{i}", self.f_in, constant=self.constant)]
        return made if self.first else [*made, RowTensor(f"dM{i}", self.f_in, "out", trains_only=True)]

    def setup(self) -> tuple[Stage, ...]:
        """Have dense features loaded, and gathered if that is for all epochs."""
        return load_stages(self.gather_features if self.constant else None)

    def gather_input_stages(self) -> list[Stage]:
        """Return what makes M in an epoch."""
        if self.constant:
            return []
        if self.first:
            return [Stage("GA", self.index, self.gather_features, tensor=FEATURES, makes=("M1",))]
        i, h = self.index, self.h_in
        return [Stage("SC", i, tensor=h), Stage("GA", i, self.gather_input, tensor=h, makes=(f"M{i}",))]

    def gather_features(self, task: Task) -> None:
        """Aggregate the features."""
        drops = self.input_key.p and task.training
        x = task.sources[FEATURES] if drops else task.part.features.x  # type: ignore[union-attr]
        task.part.in_edges.aggregate(x, task.tensors[f"M{self.index}"], task.rows)

    def gather_input(self, task: Task) -> None:
        """Aggregate the output of the layer before."""
        h, m = task.sources[self.h_in], task.tensors[f"M{self.index}"]
        task.part.in_edges.aggregate(h, m, task.rows, scaled=self.input_is_scaled)


def plan_layers(
    widths: Sequence[int],
    *,
    dropout: float,
    input_dropout: float,
    weight_decay: float,
    decay_scope: str,
    seed: int,
    l2_normalise: bool = False,
    norm: str = "none",
    residual: bool = False,
    jumping: str = "none",
) -> list[dict[str, Any]]:
    """Return the arguments of each `Layer`.

    Parameters
    ----------
    widths
        Columns of the features, of the hidden layers and of the logits.
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
    norm
        ``layer`` or ``batch``: hidden layers have a layer norm, or a batch norm, before ReLU; or ``none``.
    residual
        Hidden layers add their input.
    jumping
        ``cat`` or ``max``: the last layer takes the outputs of all hidden layers; or ``none``.

    Raises
    ------
    ValueError
        Hidden layers differ in width where they are added, or the largest is taken.
    """
    n_layers = len(widths) - 1
    if (residual or jumping == "max") and len(set(widths[1:-1])) > 1:
        raise ValueError(f"hidden layers must have equal widths, got {list(widths[1:-1])}")
    joined = jumping == "cat" and n_layers > 2
    return [
        {
            "index": index,
            "f_in": sum(widths[1:-1]) if joined and index == n_layers else widths[index - 1],
            "f_out": widths[index],
            "last": index == n_layers,
            "input_key": DropoutKey(input_dropout if index == 1 else dropout, seed, index),
            "output_key": DropoutKey(dropout, seed, index + 1),
            "decay": weight_decay if decay_scope == "all" or index == 1 else 0.0,
            "normalise": l2_normalise,
            "norm": norm,
            "residual": residual and index < n_layers,
            "passes_on": residual and index < n_layers - 1,
            "jump": jumping,
            "n_layers": n_layers,
        }
        for index in range(1, n_layers + 1)
    ]


def choose_orders(
    products: Sequence[tuple[int, int]],
    *,
    sparse_features: bool,
    input_dropout: float,
    choices: Choices | None = None,
) -> list[dict[str, Any]]:
    """Return what an `OrderedLayer` wants to know of its order, and the next one's.

    Parameters
    ----------
    products
        Columns before and after the product of each layer that may come before or after its gather.
    sparse_features, input_dropout
        Of layer 1.
    choices
        What was chosen beforehand.
    """
    once = choices is None or choices.constant_aggregate
    first = [
        gathers_input(index, f_in, f_out, sparse=sparse_features, drops=input_dropout > 0, choices=choices)
        for index, (f_in, f_out) in enumerate(products, start=1)
    ]
    return [
        {"aggregate_first": mine, "sends_output": following, "computes_once": once}
        for mine, following in zip(first, [*first[1:], False], strict=True)
    ]


def assemble(layers: Sequence[Layer], *, sparse_features: bool) -> Program:
    """Make a program of layers.

    Parameters
    ----------
    layers
        In order.
    sparse_features
        Features are CSR: they are there before the program starts, so there is no set-up.

    Raises
    ------
    InputError
        Two row tensors have the same name.
    """
    tensors = [tensor for layer in layers for tensor in layer.tensors()]
    for name, times in Counter(tensor.name for tensor in tensors).items():
        if times > 1:
            raise InputError(f"{times} row tensors are called {name}: give each a name of its own")
    return Program(
        params=tuple(spec for layer in layers for spec in layer.params()),
        tensors={tensor.name: tensor for tensor in tensors},
        setup=() if sparse_features else layers[0].setup(),
        forward=tuple(stage for layer in layers for stage in layer.forward()),
        backward=tuple(stage for layer in reversed(layers) for stage in layer.backward()),
        logits=f"H{len(layers)}",
        drops_input=layers[0].input_key.p > 0,
        orders=tuple(layer.order for layer in layers),
        differs_in_evaluation=any(layer.differs_in_evaluation for layer in layers),
        replaces_input="" if sparse_features else layers[0].replaces_input,
        tells_all=True,
    )
