"""Norms, residuals and jumping knowledge: a run over ranks is the oracle's run."""

from __future__ import annotations

from functools import partial

import graphs
import numpy as np
import pytest
from distributed import (
    DEFAULTS,
    NOT_THE_ORACLES,
    adjacency_of,
    all_ranks,
    assert_accuracies,
    assert_close,
    forward,
    prepare,
    rejoin,
    train,
)

from dorylus_hpc.nn.oracle import OracleSettings, train_oracle
from dorylus_hpc.nn.oracle_deep import DeepOracle

pytestmark = pytest.mark.spread

# A norm makes sums of gradients 0: Adam would divide what rounding leaves of them by its own size.
NORMED = {"norm": "layer", "optimizer": "sgd", "lr": 0.2}
BATCH = {**NORMED, "norm": "batch"}
PARTS = {
    "norm": NORMED,
    "residual": {"residual": "on"},
    "cat": {"jumping": "cat"},
    "max": {"jumping": "max"},
    "all": {**NORMED, "residual": "on", "jumping": "cat"},
    "norm, residual, max": {**NORMED, "residual": "on", "jumping": "max"},
    "batch norm": BATCH,
    "batch norm, residual, cat": {**BATCH, "residual": "on", "jumping": "cat", "mode": "nopipe"},
}
directed = partial(graphs.directed_random, 36, 150)
CASES = {
    "constant aggregate": (directed, {"hidden": 8}),
    "transform first": (
        partial(directed, features=20),
        {"hidden": 5, "input_dropout": 0.5, "decay_scope": "all"},
    ),
    "sparse, last layer widens": (
        partial(directed, sparse=True, features=25, classes=9),
        {"hidden": 4, "input_dropout": 0.3, "dropout": 0.3},
    ),
}


def oracle(graph, model, **options):
    settings = {name: value for name, value in options.items() if name not in NOT_THE_ORACLES}
    settings = OracleSettings(**{**DEFAULTS, **settings})
    made = DeepOracle(adjacency_of(graph), settings, model)
    result = train_oracle(
        adjacency_of(graph), graph.features, graph.labels, graph.split, graph.n_classes, settings,
        lambda adjacency, given: DeepOracle(adjacency, given, model),
    )  # fmt: skip
    tensors = {
        f"{name}{layer}": tensor
        for layer, of_layer in enumerate(result.params, start=1)
        for name, tensor in zip(made.names(layer), of_layer, strict=True)
    }
    return result, tensors


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("model", ["gcn", "sage", "gin"])
def test_cases(comm, shared_tmp_path, model, part, case):
    build, options = CASES[case]
    graph, group = build(), all_ranks(comm, min(1, comm.size - 1))
    layers = 2 if part == "residual" and model == "gcn" else 4
    options = {"dtype": "float64", "epochs": 4, "layers": layers, "intervals": 3, **options, **PARTS[part]}
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=5)
    result = train(comm, *group, folder, shared_tmp_path / "run", model=model, **options)
    tensors = comm.bcast(result.weights["last"] if comm.rank == 0 else None)
    logits = forward(comm, group[0], folder, tensors, model=model, **options)
    if comm.rank == 0:
        want, named = oracle(graph, model, **options)
        assert_close("losses", result.summary["loss"], want.losses, 1e-12)
        assert sorted(named) == sorted(tensors)
        for name, tensor in named.items():
            # Gradients that a norm makes almost 0 have rounding errors of the others' size.
            scale = max(np.abs(tensor).max(), 1e-3)
            assert_close(f"weights {name}", tensors[name], tensor, 1e-12, scale)
        assert_close("logits", logits, want.logits, 1e-12)
        assert_accuracies(result.summary, want)
        norms, batch = "norm" in part or part == "all", "batch" in part
        for layer in range(1, layers):
            assert (f"g{layer}" in tensors) == norms
            assert (f"variance{layer}" in tensors) == batch == (f"b{layer}" not in tensors)
    rejoin(comm)


@pytest.mark.parametrize(
    ("part", "parts"),
    [("norm, residual, max", (0, 2, 5)), ("batch norm", (1, 3, 4)), ("batch norm", (5, 5, 5))],
)
def test_empty_parts_and_float32(comm, shared_tmp_path, part, parts):
    graph, owner = directed(), np.array(parts)[np.arange(36) % 3]
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=6, owner=owner)
    options = {"epochs": 10, "layers": 4, "hidden": 6, "intervals": 2, **PARTS[part]}
    result = train(comm, *all_ranks(comm), folder, shared_tmp_path / "run", dtype="float32", **options)
    if comm.rank == 0:
        want, _ = oracle(graph, "gcn", **options)
        assert_close("losses", result.summary["loss"], want.losses, 1e-4)
    rejoin(comm)


@pytest.mark.parametrize("name", [name for name in graphs.AWKWARD if graphs.awkward(name).n > 1])
def test_batch_norm_of_awkward_graphs(comm, shared_tmp_path, name):
    graph, servers = graphs.awkward(name), list(graphs.AWKWARD).index(name) % min(comm.size, 2)
    group, parts = (comm.size - servers, servers), max(4, comm.size)
    owner = np.ones(graph.n, int) if graph.n < parts else None
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=parts, owner=owner)
    options = {"dtype": "float64", "epochs": 3, "layers": 3, "hidden": 4, "intervals": 2, **BATCH}
    result = train(comm, *group, folder, shared_tmp_path / "run", **options)
    tensors = comm.bcast(result.weights["last"] if comm.rank == 0 else None)
    logits = forward(comm, group[0], folder, tensors, **options)
    if comm.rank == 0:
        want, named = oracle(graph, "gcn", **options)
        assert_close("losses", result.summary["loss"], want.losses, 1e-11)
        for kind in ("mean", "variance"):  # a column that hardly varies is divided by almost nothing
            for layer in (1, 2):
                found, hoped = (of[f"{kind}{layer}"] for of in (tensors, named))
                assert_close(f"{kind}{layer}", found, hoped, 1e-11)
        assert_close("logits", logits, want.logits, 1e-10)
    rejoin(comm)


def test_learns_in_async(comm, shared_tmp_path):
    graph = graphs.cliques(3, 12)
    graph.labels[:] = np.repeat(np.arange(3), 12)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=max(3, comm.size), partitioner="hash")
    options = {"mode": "async", "epochs": 60, "hidden": 8, "intervals": 2, "dropout": 0.0, "layers": 4}
    options |= {"norm": "layer", "residual": "on", "jumping": "max"}
    result = train(comm, comm.size, 0, folder, shared_tmp_path / "run", **options)
    assert result.summary["loss"][-1] < 0.5 * result.summary["loss"][0]
