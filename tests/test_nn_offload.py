"""Which arrays travel for a group of dense stages, and that its ops compute what its stages compute."""

import dataclasses
from functools import partial
from itertools import product

import numpy as np
import pytest

from dorylus_hpc.engine.wiring import split_by_place
from dorylus_hpc.nn.gat import gat_program
from dorylus_hpc.nn.gcn import gcn_program
from dorylus_hpc.nn.gin import gin_program
from dorylus_hpc.nn.layers import Choices
from dorylus_hpc.nn.objective import Objective
from dorylus_hpc.nn.offload import TALLY, plan_offload
from dorylus_hpc.nn.operands import DenseFeatures, EdgeOperand, PartOperands
from dorylus_hpc.nn.params import plan_layout
from dorylus_hpc.nn.program import LOSS, Pass, Task, gradient_of
from dorylus_hpc.nn.sage import sage_program
from lambda_pkg.dense import tally, tally_width
from lambda_pkg.ops import OutputSpec, run

MODELS = {
    "gcn": gcn_program,
    "mean": sage_program,
    "mean, normalised": partial(sage_program, l2_normalise=True),
    "gcn, normalised": partial(sage_program, aggregator="gcn", l2_normalise=True),
    "max": partial(sage_program, aggregator="max", pool=5),
    "gin": partial(gin_program, inner=5),
    "gin, epsilon fixed": partial(gin_program, inner=5, learns_epsilon=False),
    "gcn, normed, joined": partial(gcn_program, norm="layer", jumping="cat"),
    "mean, normed, joined": partial(sage_program, norm="layer", jumping="cat"),
    "max, normed, joined": partial(sage_program, aggregator="max", pool=5, norm="layer", jumping="cat"),
    "gin, normed, joined": partial(gin_program, inner=5, norm="layer", jumping="cat"),
    "gcn, batch norm": partial(gcn_program, norm="batch", jumping="cat"),
    "mean, batch norm": partial(sage_program, norm="batch"),
    "max, batch norm": partial(sage_program, aggregator="max", pool=5, norm="batch"),
    "gin, batch norm": partial(gin_program, inner=5, norm="batch"),
    "gat": partial(gat_program, heads=2, output_heads=3),
    "gatv2": partial(gat_program, heads=2, output_heads=3, second=True),
    "gat, products exchanged": partial(
        gat_program, heads=2, output_heads=3, choices=Choices(ghost_products="exchange")
    ),
}


def program(model="gcn", **changes):
    options = {
        "n_features": 6, "hidden": [5], "n_classes": 4, "sparse_features": False, "dropout": 0.5,
        "input_dropout": 0.0, "weight_decay": 0.0, "decay_scope": "all", "seed": 3,
    }  # fmt: skip
    return MODELS[model](**(options | changes))


def groups_of(model, kind="train", *, fuse=True):
    fused = model.training_groups() if kind == "train" else model.evaluation_groups()
    return [piece for group in fused if group[0].run for piece in split_by_place(group, fuse=fuse)]


def plans(model, *, rematerialise, kind="train", fuse=True):
    groups = groups_of(model, kind, fuse=fuse)
    found = [
        plan_offload(model, groups, place, rematerialise=rematerialise)
        for place, group in enumerate(groups)
        if group[0].ops
    ]
    return {plan.name: plan for plan in found}


def test_logits_and_their_gradient_stay_with_the_worker_where_the_last_layer_is_one_task():
    wide = program(n_classes=9)  # aggregates first: the last layer has a product of its own
    last = plans(wide, rematerialise=True)["AV2+AV2+dAV2+dAV2"]
    assert last.rows == ("M2",) and last.makes == ("dM2",)
    assert last.attributes == ("labels", "train_mask", "scale_out") and last.weights == ("W2", "b2")
    assert last.gradients == ("W2", "b2") and last.loss


def test_without_fusion_the_gradient_of_the_logits_travels_twice():
    apart = plans(program(n_classes=9), rematerialise=True, fuse=False)
    assert apart["AV2+AV2"].makes == ("dH2",) and apart["AV2+AV2"].loss
    assert apart["dAV2+dAV2"].rows == ("dH2", "M2") and apart["dAV2+dAV2"].makes == ("dM2",)


def test_rematerialisation_leaves_out_what_the_backward_can_make_again():
    with_it, without = (plans(program(), rematerialise=flag) for flag in (True, False))
    assert without["AV1+AV2"].makes == ("H1", "Y2")
    assert without["dAV2+dAV1+dAV1"].rows == ("H1", "dY2", "M1")
    assert with_it["AV1+AV2"].makes == ("Y2",)
    assert with_it["dAV2+dAV1+dAV1"].rows == ("M1", "dY2")
    assert with_it["dAV2+dAV1+dAV1"].weights == ("W1", "b1", "W2")


def test_what_comes_from_a_gather_is_not_made_again():
    deep = plans(program(hidden=[5, 4], n_classes=3), rematerialise=True)
    assert deep["dAV3+dAV2"].rows == ("H2", "dY3")
    assert deep["AV2+AV3"].makes == ("H2", "Y3")


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("rematerialise", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_classes": 9},
        {"hidden": [5, 4]},
        {"hidden": [4, 7, 3], "dropout": 0.0},
        {"hidden": []},
        {"input_dropout": 0.4},
        {"sparse_features": False, "n_features": 60, "input_dropout": 0.4},
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_ops_compute_what_stages_compute(name, changes, rematerialise, fuse):
    """A whole epoch on one part: every dense group once by its stages, once by its ops."""
    model = program(name, **changes)
    layout = plan_layout(model.params, 1)
    rng = np.random.default_rng(1)
    n, f = 40, model.params[0].shape[0]
    weights = layout.views(rng.normal(size=layout.size))
    part = random_part(rng, n, f, model.tensors[model.logits].width)
    mine = tensors_of(model, part, n)
    theirs = {name: array.copy() for name, array in mine.items()}
    gradients, gradients_there = (layout.views(np.full(layout.size, np.nan)) for _ in range(2))
    task, there = (
        Task(part, (0, n), tensors, tensors, weights, grads, epoch=2, training=True, n_labelled=30)
        for tensors, grads in ((mine, gradients), (theirs, gradients_there))
    )
    for stage in (*model.setup, *(s for group in groups_of(model) for s in group)):
        if stage.run:
            stage.run(task)
    for stage in model.setup:
        if stage.run:
            stage.run(there)
    groups = groups_of(model, fuse=fuse)
    loss = None
    for place, group in enumerate(groups):
        if not group[0].ops:
            for stage in group:
                stage.run(there)
            continue
        plan = plan_offload(model, groups, place, rematerialise=rematerialise, counts=False)
        found = compute(plan, there, weights)
        for name in plan.makes:
            theirs[name][:n] = found[name]
        for name in plan.gradients:
            gradients_there[name][...] = found[gradient_of(name)]
        if plan.loss:
            loss = float(found[LOSS][0])
    assert loss == pytest.approx(task.loss, rel=1e-12)
    for name in gradients:
        np.testing.assert_allclose(
            gradients_there[name], gradients[name], rtol=1e-9, atol=1e-12, err_msg=name
        )


def test_right_answers_are_counted_where_the_logits_are():
    model = program()
    groups = groups_of(model, "evaluate")
    plan = plan_offload(model, groups, len(groups) - 1, rematerialise=True, counts=True)
    assert plan.makes == () and plan.counts
    rng = np.random.default_rng(1)
    part = random_part(rng, 40, 6, 4)
    tensors = {"H2": rng.normal(size=(40, 4))}
    weights = {"b2": rng.normal(size=4)}
    task = Task(part, (0, 40), tensors, tensors, weights, {}, epoch=0, training=False, n_labelled=30)
    found = compute(plan, task, weights)[TALLY]
    logits = tensors["H2"] + weights["b2"]
    right = logits.argmax(axis=1) == part.labels
    np.testing.assert_array_equal(
        found[:, 0], [np.count_nonzero(right & (part.split == s)) for s in (1, 2, 3)]
    )
    np.testing.assert_array_equal(found, tally(logits, part.labels, part.split, 3))


@pytest.mark.parametrize("weights", [None, np.array([0.5, 2.0, 0.0, 3.0])], ids=["plain", "weighted"])
@pytest.mark.parametrize("several", [False, True])
def test_the_loss_is_the_same_as_stage_and_as_op(several, weights):
    model, rng, n = program(), np.random.default_rng(2), 40
    part = random_part(rng, n, 6, 4)
    if several:
        part = dataclasses.replace(part, labels=(rng.random((n, 4)) < 0.4).astype(np.uint8))
    objective = Objective(several, weights)
    (stage,) = (stage for stage in model.forward if stage.ops and stage.trains_only)
    tensors = {"H2": rng.normal(size=(n, 4)), "dH2": np.full((n, 4), np.nan)}
    task = Task(
        part, (0, n), tensors, tensors, {}, {}, epoch=1, training=True, n_labelled=7.5, objective=objective
    )
    stage.run(task)
    names = {"H2": tensors["H2"], "labels": part.labels, "train_mask": part.train_mask}
    outputs = {LOSS: OutputSpec((1,), "<f8", False), "dH2": OutputSpec((n, 4), "<f8", True)}
    ops = stage.ops(Pass(1, True, 7.5, objective))
    found = run(ops, names, outputs, rows=frozenset(names))
    assert found[LOSS][0] == pytest.approx(task.loss, rel=1e-14)
    np.testing.assert_allclose(found["dH2"], tensors["dH2"], rtol=1e-12, atol=1e-15)
    assert np.abs(tensors["dH2"]).max() > 1e-3


def compute(plan, task, weights):
    inputs = {name: task.block(name) for name in plan.rows}
    inputs |= {name: getattr(task.part, name) for name in plan.attributes}
    rows = frozenset(inputs)
    inputs |= {name: weights[name] for name in plan.weights}
    n = len(task.part.labels)
    outputs = {name: OutputSpec((n, task.tensors[name].shape[1]), "<f8", True) for name in plan.makes}
    outputs |= {gradient_of(name): OutputSpec(weights[name].shape, "<f8", False) for name in plan.gradients}
    if plan.loss:
        outputs[LOSS] = OutputSpec((1,), "<f8", False)
    if plan.counts:
        width = tally_width(task.tensors[plan.logits].shape[1], several=False)
        outputs[TALLY] = OutputSpec((3, width), "<i8", False)
    way = Pass(task.epoch, task.training, task.n_labelled)
    return run(plan.ops(way, 3), inputs, outputs, rows=rows)


def random_part(rng, n, f, classes):
    near = (rng.random((n, n)) < 0.1).astype(float)
    near = np.maximum(near, near.T)
    rows, indices = np.nonzero(near)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n))])
    scale = 1 / np.sqrt(np.diff(indptr) + 1.0)
    edges = EdgeOperand(indptr, indices.astype(np.int32), None, scale, scale)
    labels = rng.integers(-1, classes, n).astype(np.int32)
    split = np.where(labels >= 0, rng.integers(0, 4, n), 0).astype(np.int8)
    return PartOperands(
        index=0, gids=np.arange(n), in_edges=edges, out_edges=edges, n_in_ghosts=0, n_out_ghosts=0,
        features=DenseFeatures(rng.normal(size=(n, f)), np.arange(n)), labels=labels, split=split,
        train_mask=((split == 1) & (labels >= 0)).astype(np.uint8),
    )  # fmt: skip


def tensors_of(model, part, n):
    tensors = {
        name: np.zeros((1 if tensor.sums else n, tensor.width), tensor.dtype or float)
        for name, tensor in model.tensors.items()
    }
    tensors["X"] = part.features.x
    if model.drops_input:
        tensors["features"] = part.features.buffer()
    return tensors


def test_every_dense_stage_that_may_leave_the_server_has_ops():
    ways = ({}, {"hidden": [5, 4]}, {"sparse_features": True}, {"input_dropout": 0.4}, {"n_classes": 9})
    for name, changes in product(MODELS, ways):
        model = program(name, **changes)
        for stage in (*model.forward, *model.backward):
            dense = stage.kind in ("AV", "dAV") and not stage.on_server
            assert (stage.ops is not None) == dense, dataclasses.astuple(stage)
