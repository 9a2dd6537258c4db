"""Batch norms: sums of intervals against whole arrays, who needs them, and what a schedule makes of that."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jobs import write_ring

import dorylus_hpc
from dorylus_hpc.comm.blocks import sums_plan
from dorylus_hpc.config import make_config
from dorylus_hpc.engine.checkpoint import load_model
from dorylus_hpc.engine.model import build_optimizer
from dorylus_hpc.engine.schedule import Epochs, Run, Schedule, Send, Unit
from dorylus_hpc.engine.weights import WeightShard
from dorylus_hpc.engine.wiring import wire
from dorylus_hpc.nn.batch_norm import (
    backward_width,
    forward_width,
    inverse_deviation,
    merge,
    norm,
    norm_backward,
    sum_gradients,
    sum_rows,
)
from dorylus_hpc.nn.gcn import gcn_program
from dorylus_hpc.nn.params import ParamSpec, plan_layout

CUTS = {
    "one": [0, 50],
    "several, some without rows": [0, 0, 7, 20, 20, 49, 50],
    "rows": list(range(51)),
}


def blocks(cut: list[int]) -> list[slice]:
    return [slice(*bounds) for bounds in pairwise(cut)]


def forward_table(a: np.ndarray, cut: list[int]) -> np.ndarray:
    table = np.full((len(cut) - 1, forward_width(a.shape[1])), np.nan)
    for row, rows in zip(table, blocks(cut), strict=True):
        sum_rows(a[rows], row)
    return table


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cut", CUTS)
def test_statistics_of_all_rows(cut: str, dtype: str, offset: float) -> None:
    """Far from 0, where a difference of sums of squares would have lost everything."""
    a = (np.random.default_rng(1).standard_normal((50, 4)) * [1, 2, 3, 0.5] + offset).astype(dtype)
    known, wide = merge(forward_table(a, CUTS[cut])), a.astype(np.float64)
    assert known.count == 50 and known.mean.dtype == np.float64
    np.testing.assert_allclose(known.mean, wide.mean(axis=0), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(known.variance, wide.var(axis=0), rtol=1e-9 if offset else 1e-13)
    np.testing.assert_allclose(known.unbiased, known.variance * 50 / 49, rtol=1e-15)
    np.testing.assert_allclose(known.inverse, 1 / np.sqrt(known.variance + 1e-5), rtol=1e-15)


def test_pieces_of_an_interval_change_only_rounding() -> None:
    a = np.random.default_rng(2).standard_normal((70_000, 3)).astype(np.float32)  # three pieces
    known = merge(forward_table(a, [0, 70_000]))
    np.testing.assert_allclose(known.mean, a.mean(axis=0, dtype=np.float64), rtol=1e-10)
    np.testing.assert_allclose(known.variance, a.astype(np.float64).var(axis=0), rtol=1e-12)


def test_a_single_row_has_no_variance() -> None:
    known = merge(forward_table(np.array([[3.0, -1.0]]), [0, 1]))
    assert known.mean.tolist() == [3, -1] and known.unbiased.tolist() == [0, 0]


@pytest.mark.parametrize("cut", CUTS)
def test_forward_and_backward(cut: str) -> None:
    rng = np.random.default_rng(3)
    a, weight, scale = rng.standard_normal((50, 4)) * 2 + 1, rng.standard_normal((50, 4)), rng.random(4) + 0.5

    def normed(a: np.ndarray) -> np.ndarray:
        return (a - a.mean(axis=0)) / np.sqrt(a.var(axis=0) + 1e-5)

    known, out = merge(forward_table(a, CUTS[cut])), np.empty_like(a)
    for rows in blocks(CUTS[cut]):
        norm(a[rows], known.mean, inverse_deviation(known.variance), scale, out=out[rows])
    np.testing.assert_allclose(out, normed(a) * scale, rtol=1e-12, atol=1e-13)

    table = np.full((len(CUTS[cut]) - 1, backward_width(4)), np.nan)
    for row, rows in zip(table, blocks(CUTS[cut]), strict=True):
        sum_gradients(weight[rows], a[rows], known, row)
    np.testing.assert_allclose(table.sum(axis=0)[:4], weight.sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(table.sum(axis=0)[4:], (weight * normed(a)).sum(axis=0), rtol=1e-11)
    d_a = weight.copy()
    for rows in blocks(CUTS[cut]):
        norm_backward(d_a[rows], a[rows], known, scale, table)
    want = np.empty_like(a)
    for at in np.ndindex(a.shape):
        kept, values = a[at], []
        for step in (1e-6, -1e-6):
            a[at] = kept + step
            values.append((normed(a) * scale * weight).sum())
        a[at] = kept
        want[at] = (values[0] - values[1]) / 2e-6
    np.testing.assert_allclose(d_a, want, rtol=1e-6, atol=1e-8)


# ---- running averages ----


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_running_averages_take_their_share_of_an_epoch(optimizer: str) -> None:
    specs = [
        ParamSpec("W1", 1, (2, 3), decay=0.1),
        ParamSpec("mean1", 1, (3,), average=0.1),
        ParamSpec("variance1", 1, (3,), start=1.0, average=0.1),
    ]
    layout = plan_layout(specs, 1)
    made = build_optimizer(make_config({"optimizer": optimizer}))
    shard = WeightShard(layout, 0, made, layout.initial(0, np.dtype("float64")))
    mean, variance, rng = np.zeros(3), np.ones(3), np.random.default_rng(4)
    for _ in range(3):
        gradient, nothing = np.zeros(layout.size), np.zeros(layout.size)
        given = layout.views(gradient)
        for tensor in given.values():
            tensor[...] = rng.random(tensor.shape)
        shard.apply([nothing, gradient])
        mean, variance = 0.9 * mean + 0.1 * given["mean1"], 0.9 * variance + 0.1 * given["variance1"]
        found = layout.views(shard.flat)
        np.testing.assert_allclose(found["mean1"], mean, rtol=1e-15)
        np.testing.assert_allclose(found["variance1"], variance, rtol=1e-15)


def test_they_are_kept_with_the_model_and_predict(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint has them; predictions, by other intervals, are those of a formula with them."""
    monkeypatch.chdir(tmp_path)
    write_ring(tmp_path / "ring.npz", n=60, features=4)
    options = {"hidden": 5, "epochs": 7, "lr": 0.1, "norm": "batch", "dropout": 0.0, "dtype": "float64"}
    result = dorylus_hpc.fit("ring.npz", run_dir="run", intervals=3, **options)
    saved = load_model(tmp_path / "run" / "checkpoint.h5").weights["last"]
    assert set(saved) == {"W1", "g1", "s1", "mean1", "variance1", "W2", "b2"}
    for name, tensor in saved.items():
        np.testing.assert_array_equal(tensor, result.weights["last"][name])
    with np.load("ring.npz") as file:
        content = dict(file)
    n, x = len(content["y"]), content["x"].astype(np.float64)
    adjacency = np.zeros((n, n))  # [i, j]: i -> j
    adjacency[np.repeat(np.arange(n), np.diff(content["indptr"])), content["indices"]] = 1
    np.fill_diagonal(adjacency, 1)
    scale = 1 / np.sqrt(adjacency.sum(axis=0))
    p = (adjacency * scale * scale[:, None]).T
    z = p @ x @ saved["W1"]
    hidden = (z - saved["mean1"]) / np.sqrt(saved["variance1"] + 1e-5) * saved["g1"] + saved["s1"]
    logits = p @ np.maximum(hidden, 0) @ saved["W2"] + saved["b2"]
    want = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = dorylus_hpc.infer("run", weights="last").probabilities
    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert np.abs(saved["mean1"]).min() > 0 and (saved["variance1"] != 1).all()
    again = dorylus_hpc.fit("ring.npz", run_dir="again", intervals=3, mode="nopipe", **options)
    assert again.summary["weights_sha256"] == result.summary["weights_sha256"]
    assert result.summary["task_seconds"]["RD"] > 0


# ---- who needs which sums, and when ----


def test_every_rank_gets_a_row_of_each_interval() -> None:
    hosts = {0: 0, 1: 0, 2: 1, 3: 2}
    cuts = {0: [(0, 2)], 1: [(0, 1), (1, 5)], 2: [(0, 0)], 3: [(0, 3), (3, 4)]}
    plans = [sums_plan(hosts, rank, cuts) for rank in range(3)]
    assert [plan.n_own for plan in plans] == [{0: 0, 1: 0}, {2: 0}, {3: 0}]
    numbers = {(0, 0): 0, (1, 0): 1, (1, 1): 2, (2, 0): 3, (3, 0): 4, (3, 1): 5}
    for rank, plan in enumerate(plans):
        assert not plan.copies
        mine = {block for block in numbers if hosts[block[0]] == rank}
        assert set(plan.outgoing) == mine and set(plan.blocks) == set(numbers) - mine
        for block, sent in plan.outgoing.items():
            assert [(other, lids.tolist()) for other, lids in sent] == [
                (other, [numbers[block]]) for other in range(3) if other != rank
            ]
        for block, received in plan.incoming.items():
            (delivery,) = received.deliveries
            assert (received.rank, received.n_rows) == (hosts[block[0]], 1)
            assert delivery.ghosts == (numbers[block], numbers[block] + 1) and hosts[delivery.part] == rank
    assert sums_plan({0: 0}, 0, {0: [(0, 2)]}).outgoing == {}


def wired() -> Any:
    """Rank 0 of two: part 0, no edges, intervals 0 and 1; rank 1 has part 1, interval 0."""
    program = gcn_program(
        n_features=4, hidden=[3], n_classes=5, sparse_features=False, dropout=0.0, input_dropout=0.0,
        weight_decay=0.0, decay_scope="all", seed=0, norm="batch",
    )  # fmt: skip
    edges = SimpleNamespace(indptr=np.zeros(5, np.int64), indices=np.zeros(0, np.int32))
    part: Any = SimpleNamespace(
        index=0, n_own=4, n_in_ghosts=0, n_out_ghosts=0, in_edges=edges, out_edges=edges
    )
    cuts = {0: ((0, 2), (2, 4)), 1: ((0, 3),)}
    plans: Any = {way: sums_plan({0: 0}, 0, {}) for way in ("in", "out")}
    plans["all"] = sums_plan({0: 0, 1: 1}, 0, cuts)
    return wire(program, {0: part}, {0: cuts[0]}, plans, peers=(1,))


def test_wiring() -> None:
    wiring = wired()
    assert [(table.name, table.direction, table.exchanged, table.kind) for table in wiring.tables] == [
        ("B1", "all", True, "RD"),
        ("H1", "in", True, "SC"),
        ("dM2", "out", True, "dSC"),
        ("dB1", "all", True, "RD"),
        ("X", "in", True, "SC"),
    ]
    topology = wiring.topology
    assert topology.reads["all"] == [(1,), (0,)] and topology.ghost_reads["all"] == [(0,), (0,)]
    assert topology.blocks["all"] == 1 and topology.sends["all"] == [True, True]
    names = {table.name: number for number, table in enumerate(wiring.tables)}
    train = [(g.name, g.reads, g.writes, g.weights) for g in wiring.groups["train"]]
    assert train == [
        ("AV1+AV1", None, names["B1"], True),
        ("RD1", names["B1"], names["H1"], True),
        ("GA2+AV2+AV2+dAV2+dAV2", names["H1"], names["dM2"], True),
        ("dGA2+dAV1+dAV1", names["dM2"], names["dB1"], False),
        ("RD1+dAV1", names["dB1"], None, True),
    ]
    assert [g.name for g in wiring.groups["evaluate"]] == ["AV1+AV1", "GA2+AV2"]


@pytest.mark.parametrize("mode", ["nopipe", "pipe"])
def test_a_reduction_waits_for_all_intervals_everywhere(mode: Any) -> None:
    wiring = wired()
    schedule = Schedule(
        mode,
        wiring.topology,
        wiring.tables,
        wiring.groups,
        Epochs("train", 1, 2),
        workers={"cpu": 4, "io": 1},
    )
    table = next(number for number, one in enumerate(wiring.tables) if one.name == "B1")
    assert wiring.topology.units == (Unit(0, 0), Unit(0, 1))
    schedule.start()
    begun = [one for unit in (0, 1) for one in schedule.bound(unit)]
    assert begun == [Run(0, 0, 0), Run(1, 0, 0)]
    did = schedule.task_done(0)
    assert did == ([Send(table, 0, 1)] if mode == "pipe" else [])  # the other interval is not there
    did = schedule.task_done(1)
    assert [one for one in did if isinstance(one, Run)] == []  # nor is that of the other server
    assert Send(table, 1, 1) in did
    assert [one for one in schedule.block_arrived(table, 0, 1) if isinstance(one, Run)] == [
        Run(0, 0, 1),
        Run(1, 0, 1),
    ]


def test_it_is_refused_where_it_would_not_be_exact() -> None:
    with pytest.raises(dorylus_hpc.InputError, match="--norm batch is for --mode pipe or nopipe: its means"):
        make_config({"norm": "batch", "mode": "async"})
    with pytest.raises(dorylus_hpc.InputError, match="--norm batch and --l2-normalise on are two norms"):
        make_config({"norm": "batch", "model": "sage", "l2_normalise": "on"})
    with pytest.raises(dorylus_hpc.InputError, match="--norm is for --model gcn, sage and gin, not for gat"):
        make_config({"norm": "batch", "model": "gat"})
