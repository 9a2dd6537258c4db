"""Invariant 1 for GraphSAGE, GIN and GAT: a run over ranks is the oracle's run."""

from __future__ import annotations

from functools import partial

import graphs
import numpy as np
import pytest
from distributed import (
    ORACLES,
    SERVERS,
    adjacency_of,
    all_ranks,
    assert_close,
    assert_equals_oracle,
    assert_tensors_close,
    engine,
    named,
    prepare,
    train,
)

from dorylus_hpc.api import infer
from dorylus_hpc.config import make_config
from dorylus_hpc.engine import loading
from dorylus_hpc.engine.model import build_program, load_settings
from dorylus_hpc.nn.oracle import OracleSettings
from dorylus_hpc.nn.params import plan_layout

pytestmark = pytest.mark.spread

BOTH_DROPOUTS = {"dropout": 0.5, "input_dropout": 0.3}
# A norm makes sums of gradients 0, and so do equal sources those of attention: Adam would divide what
# rounding leaves of them by its own size.
PLAIN = {"optimizer": "sgd", "lr": 0.3}
NORMALISED = {"l2_normalise": "on", **PLAIN}
MODELS = {
    "mean": {"model": "sage"},
    "mean, normalised": {"model": "sage", **NORMALISED},
    "gcn": {"model": "sage", "aggregator": "gcn"},
    "gcn, normalised": {"model": "sage", "aggregator": "gcn", **NORMALISED},
    "max": {"model": "sage", "aggregator": "max"},
    "max, normalised": {"model": "sage", "aggregator": "max", **NORMALISED},
    "gin": {"model": "gin"},
    "gin, epsilon fixed": {"model": "gin", "epsilon": "fixed"},
    "gat": {"model": "gat", "heads": 3, "output_heads": 2, "attention_dropout": 0.4},
    "gatv2": {"model": "gatv2", "heads": 2, "output_heads": 3, "attention_dropout": 0.3, **PLAIN},
}
MODELS |= {
    f"{name}, products exchanged": {**MODELS[name], "ghost_products": "exchange"} for name in ("gat", "gatv2")
}
directed = partial(graphs.directed_random, 36, 150)
undirected = partial(graphs.undirected_random, 36, 90)

# name: (graph, parts, options). Between them: every order of every layer, dense and sparse features with and
# without input dropout, directed and weighted graphs, isolated vertices.
CASES = {
    "one layer": (undirected, 4, {"layers": 1, "intervals": 1, "optimizer": "sgd", "lr": 0.5}),
    "one layer, sparse": (
        partial(directed, sparse=True, features=30),
        4,
        {"layers": 1, "input_dropout": 0.4, "feature_norm": "row", "intervals": 3, "decay_scope": "all"},
    ),
    "constant aggregate": (directed, 5, {"layers": 3, "hidden": 8, "intervals": 4, "eval_every": 3}),
    "aggregate first, input dropout": (
        partial(directed, features=8),
        4,
        {"hidden": 9, "input_dropout": 0.3, "intervals": 5, "feature_norm": "standard"},
    ),
    "transform first, input dropout": (
        partial(directed, features=20),
        7,
        {"hidden": 5, "input_dropout": 0.6, "intervals": 6, "decay_scope": "all", "feature_norm": "row"},
    ),
    "last layer widens": (
        partial(directed, classes=11),
        4,
        {"layers": 3, "hidden": 4, "intervals": 7, "optimizer": "sgd", "lr": 0.3, **BOTH_DROPOUTS},
    ),
    "sparse, last layer widens": (
        partial(directed, sparse=True, features=25, classes=9),
        5,
        {"layers": 3, "hidden": 5, "intervals": 2, **BOTH_DROPOUTS},
    ),
    "weighted": (graphs.directed_weighted, 4, {"layers": 3, "hidden": 6, "intervals": 2, "dropout": 0.2}),
    "many arcs": (
        partial(graphs.directed_random, 20, 150, classes=11),
        3,
        {"layers": 3, "hidden": 8, "intervals": 2, "dropout": 0.2},
    ),
    "isolated vertices": (graphs.isolated, 6, {"hidden": 5, "intervals": 3, **BOTH_DROPOUTS}),
    "aggregate first, in every epoch": (
        directed,
        4,
        {
            "layers": 3,
            "hidden": 5,
            "intervals": 3,
            "layer_order": "aggregate-first",
            "constant_aggregate": "off",
        },
    ),
    "transform first, always": (
        directed,
        4,
        {
            "layers": 3,
            "hidden": 8,
            "intervals": 3,
            "layer_order": "transform-first",
            "constant_aggregate": "off",
        },
    ),
    "a star of sources": (graphs.directed_star, 4, {"hidden": 5, "intervals": 2}),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_cases(comm, shared_tmp_path, case, model):
    build, parts, options = CASES[case]
    graph, group = build(), all_ranks(comm, min(1, comm.size - 1))
    options = {"dtype": "float64", "epochs": 5, **options, **MODELS[model]}
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=parts)
    result = train(comm, *group, folder, shared_tmp_path / "run", **options)
    assert_equals_oracle(comm, graph, folder, result, group, **options)


def test_cases_cover_the_ways():
    seen = set()
    for build, _, options in CASES.values():
        graph = build()
        for model in MODELS.values():
            config = make_config({**options, **model})
            program = build_program(
                config,
                n_features=graph.n_features,
                n_classes=graph.n_classes,
                sparse_features=graph.sparse_features,
            )
            first = (program.orders[0], graph.sparse_features, config.input_dropout > 0)
            seen.add((config.model, *first))
            seen |= {(config.model, order) for order in program.orders[1:]}
    for model in ("sage", "gin"):
        assert {way[1:] for way in seen if way[0] == model} >= {
            ("aggregate-first", False, False),
            ("aggregate-first", False, True),
            ("transform-first", False, True),
            ("transform-first", True, True),
            ("transform-first",),
            *([("aggregate-first",)] if model == "sage" else []),
        }


@pytest.mark.parametrize("model", MODELS)
def test_empty_parts(comm, shared_tmp_path, model):
    graph = directed()
    owner = np.array([0, 2, 5])[np.arange(36) % 3]  # of parts 0 .. 5 three are empty
    options = {"dtype": "float64", "epochs": 4, "hidden": 5, "intervals": 2, **MODELS[model], **BOTH_DROPOUTS}
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=6, owner=owner)
    group = all_ranks(comm)
    result = train(comm, *group, folder, shared_tmp_path / "run", **options)
    assert_equals_oracle(comm, graph, folder, result, group, **options)


@pytest.mark.parametrize("model", MODELS)
def test_ties_and_repeated_arcs(comm, shared_tmp_path, model, monkeypatch):
    """Of equal values the same vertex's counts in any partition, and once, however many arcs bring it."""
    monkeypatch.setattr(loading, "_SORTED_AT_ONCE", 3)
    graph = graphs.with_duplicates()
    graph.features[:] = graph.features[np.arange(graph.n) % 3]  # three kinds of vertices
    options = {"dtype": "float64", "epochs": 5, "hidden": 5, "intervals": 2, "dropout": 0.0, **MODELS[model]}
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=5, partitioner="hash", duplicates="keep")
    group = all_ranks(comm)
    result = train(comm, *group, folder, shared_tmp_path / "run", **options)
    adjacency = adjacency_of(graph, duplicates="apart" if "gat" in model else "keep")
    assert_equals_oracle(comm, graph, folder, result, group, adjacency=adjacency, **options)


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-5)])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients(comm, shared_tmp_path, model, sparse, dtype, tolerance):
    """Of any weights, elementwise against the oracle's, which are right by finite differences."""
    graph = graphs.directed_random(40, 200, features=7, classes=9, sparse=sparse)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=comm.size + 2, partitioner="hash")
    options = {"layers": 3, "hidden": 6, "seed": 3, **BOTH_DROPOUTS}
    config = make_config({**options, "dtype": dtype, **MODELS[model]})
    program = build_program(config, n_features=7, n_classes=9, sparse_features=sparse)
    own = {name: value for name, value in MODELS[model].items() if name not in ("model", "ghost_products")}
    oracle = ORACLES[config.model](adjacency_of(graph), OracleSettings(**options, **own))
    rng = np.random.default_rng(4)
    params = [
        tuple(tensor if tensor.ndim == 2 else rng.standard_normal(tensor.shape) * 0.3 for tensor in tensors)
        for tensors in oracle.start(7, 9)
    ]
    tensors = {name: tensor.astype(dtype) for name, tensor in named(params, **MODELS[model]).items()}
    settings = load_settings(config, program=program)
    with engine(comm, folder, program, settings, intervals=3, threads=2) as (runner, _):
        for epoch in (1, 9):
            losses = runner.train(tensors, epoch)
            total, loss = comm.reduce(sum(runner.gradients.values())), comm.reduce(losses.sum())
            if comm.rank == 0:
                train_rows = (graph.split == 1) & (graph.labels >= 0)
                want_loss, want = oracle.loss_and_gradients(
                    graph.features, graph.labels, train_rows, params, epoch
                )
                got = plan_layout(program.params, 1).views(total)
                assert_close("loss", loss / np.count_nonzero(graph.split == 1), want_loss, tolerance)
                assert_tensors_close("gradient of", got, named(want, **MODELS[model]), tolerance)


@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("model", ["mean, normalised", "max", "gin", "gat", "gat, products exchanged"])
def test_predictions(comm, shared_tmp_path, model, servers):
    """The model of a checkpoint is the one that was trained."""
    graph, run_dir = graphs.large_ids(), shared_tmp_path / "run"
    options = {"dtype": "float64", "epochs": 5, "hidden": 6, "feature_norm": "standard", **MODELS[model]}
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=max(4, comm.size), partitioner="hash")
    group = comm.size - servers, servers
    result = train(comm, *group, folder, run_dir, **options)
    predictions = infer(run_dir, folder, comm=comm, weights="best")
    if comm.rank == 0:
        rows = graph.split == 3
        right = (predictions.classes[rows] == graph.labels[rows]).mean()
        assert right == result.summary["test_accuracy"]["best_validation"]


def test_learns_in_async(comm, shared_tmp_path):
    """Stale rows change results, not whether it learns."""
    graph = graphs.cliques(3, 12)
    labels = np.repeat(np.arange(3), 12).astype(graph.labels.dtype)
    graph.labels[:] = labels
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=max(3, comm.size), partitioner="hash")
    for name in ("mean", "max", "gin, epsilon fixed", "gat", "gat, products exchanged"):
        options = {"mode": "async", "epochs": 60, "hidden": 8, "intervals": 2, "dropout": 0.0}
        options["lr"] = 0.003 if "gat" in name else 0.01  # with larger steps stale rows make it swing
        run_dir = shared_tmp_path / name
        result = train(comm, comm.size, 0, folder, run_dir, **options, **MODELS[name])
        assert result.summary["loss"][-1] < 0.5 * result.summary["loss"][0]
