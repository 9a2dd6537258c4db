"""Invariant 1: a run over ranks is the oracle's run, whatever the ranks, servers, intervals and parts."""

from __future__ import annotations

import json
from functools import partial

import graphs
import numpy as np
import pytest
from distributed import (
    GROUPS,
    SERVERS,
    adjacency_of,
    all_ranks,
    assert_close,
    assert_equals_oracle,
    assert_tensors_close,
    engine,
    forward,
    named,
    oracle_of,
    prepare,
    settings_of,
    train,
)

from dorylus_hpc.api import infer
from dorylus_hpc.config import make_config
from dorylus_hpc.engine.model import build_program
from dorylus_hpc.nn.gcn import gcn_program
from dorylus_hpc.nn.oracle import (
    OracleSettings,
    loss_and_gradients,
    propagation_matrix,
    start_params,
)
from dorylus_hpc.nn.params import plan_layout

pytestmark = pytest.mark.spread

PARTITIONERS = ["metis", "hash", "range"]
BOTH_DROPOUTS = {"dropout": 0.5, "input_dropout": 0.3}


# ---- float64: the proof ----


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("graph_servers, servers", GROUPS)
def test_float64(comm, shared_tmp_path, graph_servers, servers, partitioner):
    graph = graphs.directed_random(48, 220)
    options = {
        "dtype": "float64",
        "layers": 3,
        "hidden": 6,
        "epochs": 6,
        "intervals": 3,
        "source_degree": "out",
        **BOTH_DROPOUTS,
    }
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=5, partitioner=partitioner)
    group = graph_servers, servers
    result = train(comm, *group, folder, shared_tmp_path / "run", **options)
    assert_equals_oracle(comm, graph, folder, result, group, **options)


directed = partial(graphs.directed_random, 36, 150)
undirected = partial(graphs.undirected_random, 36, 90)
weighted = partial(graphs.directed_weighted, features=9)

# name: (graph, parts, options). Between them: every order of every layer, dense and sparse features with and
# without input dropout, 1-4 layers, 1-7 intervals, and every value of the other options.
CASES = {
    "one layer": (
        undirected,
        4,
        {"layers": 1, "dropout": 0.0, "intervals": 1, "optimizer": "sgd", "lr": 0.5},
    ),
    "one layer, input dropout": (
        partial(directed, features=40),
        5,
        {"layers": 1, "dropout": 0.9, "input_dropout": 0.5, "intervals": 2, "decay_scope": "all"},
    ),
    "one layer, sparse": (
        partial(directed, sparse=True, features=30),
        4,
        {"layers": 1, "input_dropout": 0.4, "feature_norm": "row", "intervals": 3},
    ),
    "constant aggregate": (undirected, 6, {"hidden": 8, "intervals": 4, "eval_every": 3}),
    "aggregate first, input dropout": (
        partial(directed, features=8),
        4,
        {
            "hidden": 9,
            "input_dropout": 0.3,
            "intervals": 5,
            "source_degree": "out",
            "feature_norm": "standard",
        },
    ),
    "transform first, input dropout": (
        partial(directed, features=20),
        7,
        {"hidden": 5, "input_dropout": 0.6, "intervals": 6, "decay_scope": "all", "feature_norm": "row"},
    ),
    "last layer widens": (
        partial(undirected, classes=11),
        4,
        {"hidden": 4, "intervals": 7, "optimizer": "sgd", "lr": 0.3, "decay_scope": "all", **BOTH_DROPOUTS},
    ),
    "sparse, last layer widens": (
        partial(directed, sparse=True, features=25, classes=9),
        5,
        {"layers": 3, "hidden": 5, "intervals": 2, "weight_decay": 0.0, **BOTH_DROPOUTS},
    ),
    "sparse, narrow features": (
        partial(undirected, sparse=True, features=3),
        4,
        {"layers": 2, "hidden": 7, "intervals": 3, "seed": 2**63 - 1},
    ),
    "no dropout": (directed, 4, {"dropout": 0.0, "hidden": 7, "intervals": 2, "eval_every": 2}),
    "no dropout, sparse": (
        partial(directed, sparse=True, features=12),
        4,
        {"dropout": 0.0, "layers": 3, "hidden": 6, "intervals": 1, "feature_norm": "row"},
    ),
    "four layers": (
        partial(weighted, classes=7),
        5,
        {"layers": 4, "hidden": 5, "intervals": 3, "source_degree": "out", "dropout": 0.2, "seed": 7},
    ),
    "four layers, standardised": (
        weighted,
        4,
        {"layers": 4, "hidden": 6, "intervals": 4, "feature_norm": "standard", **BOTH_DROPOUTS},
    ),
}


@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("case", CASES)
def test_cases(comm, shared_tmp_path, case, servers):
    build, parts, options = CASES[case]
    graph, group = build(), all_ranks(comm, servers)
    options = {"dtype": "float64", "epochs": 7, **options}
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=parts)
    result = train(comm, *group, folder, shared_tmp_path / "run", threads=1 + servers % 2, **options)
    assert_equals_oracle(comm, graph, folder, result, group, **options)


def test_cases_cover_the_ways():
    seen, intervals, values = (
        set(),
        set(),
        {name: set() for name in ("optimizer", "decay_scope", "feature_norm")},
    )
    for build, _, options in CASES.values():
        graph, config = build(), make_config(options)
        program = build_program(
            config,
            n_features=graph.n_features,
            n_classes=graph.n_classes,
            sparse_features=graph.sparse_features,
        )
        seen.add((1, program.orders[0], graph.sparse_features, config.input_dropout > 0))
        seen |= {(2, order) for order in program.orders[1:]}
        intervals.add(config.intervals)
        for name, found in values.items():
            found.add(getattr(config, name))
    assert seen == {
        (1, "aggregate-first", False, False),
        (1, "aggregate-first", False, True),
        (1, "transform-first", False, True),
        (1, "transform-first", True, False),
        (1, "transform-first", True, True),
        (2, "aggregate-first"),
        (2, "transform-first"),
    }
    assert intervals == set(range(1, 8))
    assert [len(found) for found in values.values()] == [2, 2, 3]


def test_long_run(comm, shared_tmp_path):
    """More epochs and parts than message stamps tell apart, and a part a vertex."""
    graph = graphs.path(70)
    options = {"dtype": "float64", "epochs": 36, "hidden": 3, "intervals": 2, "eval_every": 10}
    group = all_ranks(comm, min(1, comm.size - 1))
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=70, partitioner="range")
    result = train(comm, *group, folder, shared_tmp_path / "run", **options)
    assert_equals_oracle(comm, graph, folder, result, group, **options)


# ---- gradients, of any weights and of layers of any widths ----


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-5)])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("hidden", [[4, 9, 3], [9, 2, 6], [12]], ids=str)
def test_gradients(comm, shared_tmp_path, hidden, sparse, dtype, tolerance):
    graph = graphs.directed_random(40, 200, features=7, classes=5, sparse=sparse)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=comm.size + 2, partitioner="hash")
    program = gcn_program(
        n_features=7,
        hidden=hidden,
        n_classes=5,
        sparse_features=sparse,
        weight_decay=0.5,
        decay_scope="all",
        seed=3,
        **BOTH_DROPOUTS,
    )
    rng = np.random.default_rng(4)
    widths = [7, *hidden, 5]
    params = [
        (rng.standard_normal(shape) * 0.5, rng.standard_normal(shape[1]) * 0.3)
        for shape in zip(widths[:-1], widths[1:], strict=True)
    ]
    tensors = {name: tensor.astype(dtype) for name, tensor in named(params).items()}
    settings = settings_of(dtype, source_degree="out")
    with engine(comm, folder, program, settings, intervals=3, threads=2) as (runner, _):
        for epoch in (1, 9):  # the second overwrites what the first left
            losses = runner.train(tensors, epoch)
            mine = sum(runner.gradients.values())
            total, loss = comm.reduce(mine), comm.reduce(losses.sum())
            if comm.rank == 0:
                want_loss, want = loss_and_gradients(
                    propagation_matrix(adjacency_of(graph), "out"),
                    graph.features,
                    graph.labels,
                    (graph.split == 1) & (graph.labels >= 0),
                    params,
                    OracleSettings(seed=3, **BOTH_DROPOUTS),
                    epoch,
                )
                got = plan_layout(program.params, 1).views(total)
                assert_close("loss", loss / np.count_nonzero(graph.split == 1), want_loss, tolerance)
                assert_tensors_close("gradient of", got, named(want), tolerance)


# ---- float32 ----


@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_float32(comm, shared_tmp_path, partitioner, servers):
    graph, group = graphs.directed_random(60, 300, features=12), all_ranks(comm, servers)
    options = {"hidden": 16, "epochs": 50, "intervals": 3, "eval_every": 25, **BOTH_DROPOUTS}
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=4, partitioner=partitioner)
    result = train(comm, *group, folder, shared_tmp_path / "run", **options)
    tensors = comm.bcast(result.weights["last"] if comm.rank == 0 else None)
    logits = forward(comm, group[0], folder, tensors, **options)
    if comm.rank == 0:
        oracle = oracle_of(graph, dtype="float64", **options)
        losses = np.array(result.summary["loss"])
        assert_close("losses", losses / oracle.losses, np.ones(50), 1e-5)
        assert_close("logits", logits, oracle.logits, 1e-3)
        assert logits.dtype == np.float32


@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_float32_gradients(comm, shared_tmp_path, sparse, servers):
    """With plain descent at rate 1 the first step is the gradient."""
    graph = graphs.directed_random(60, 300, features=12, sparse=sparse)
    options = {
        "optimizer": "sgd",
        "lr": 1.0,
        "weight_decay": 0.0,
        "epochs": 1,
        "hidden": 16,
        "layers": 3,
        "intervals": 4,
        **BOTH_DROPOUTS,
    }
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=4)
    result = train(comm, *all_ranks(comm, servers), folder, shared_tmp_path / "run", **options)
    if comm.rank == 0:
        oracle = oracle_of(graph, dtype="float64", **options)
        start = named(start_params(12, graph.n_classes, OracleSettings(layers=3, dtype="float32")))
        got = {name: start[name] - last for name, last in result.weights["last"].items()}
        assert_tensors_close("gradient of", got, named(oracle.first_gradients), 1e-5)


# ---- what a run tells and leaves ----


@pytest.mark.parametrize("servers", SERVERS)
def test_evaluations_and_predictions(comm, shared_tmp_path, servers):
    """Accuracies epoch by epoch, and the predictions of a finished run under the user's ids."""
    graph, run_dir = graphs.large_ids(), shared_tmp_path / "run"
    options = {"dtype": "float64", "epochs": 9, "eval_every": 2, "hidden": 6, "intervals": 2, "lr": 0.1}
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=max(4, comm.size), partitioner="hash")
    train(comm, comm.size - servers, servers, folder, run_dir, **options)
    predictions = {which: infer(run_dir, folder, comm=comm, weights=which) for which in ("last", "best")}
    if comm.rank != 0:
        assert predictions == {"last": None, "best": None}
        return
    oracle = oracle_of(graph, **options)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 10))
    assert_close("losses", [line["loss"] for line in lines], oracle.losses, 1e-12)
    for line in lines:
        want = oracle.accuracies.get(line["epoch"] - 1, {})
        for role in ("train", "val", "test"):
            assert line[f"{role}_accuracy"] == want.get(role)
    exponentials = np.exp(oracle.logits)
    last, best = predictions["last"], predictions["best"]
    assert_close("probabilities", last.probabilities, exponentials / exponentials.sum(1, keepdims=True), 1e-6)
    np.testing.assert_array_equal(last.classes, oracle.logits.argmax(axis=1))
    np.testing.assert_array_equal(last.ids, graph.ids)
    for role, code in (("train", 1), ("val", 2), ("test", 3)):
        rows = graph.split == code
        right = (best.classes[rows] == graph.labels[rows]).mean()
        assert right == oracle.accuracies[oracle.best_version][role]
