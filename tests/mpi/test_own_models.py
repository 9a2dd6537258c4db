"""A layer that the engine has not seen trains on any ranks as in one process, and as NumPy says."""

from __future__ import annotations

import graphs
import numpy as np
import pytest
import scipy.sparse as sp
from distributed import (
    SERVERS,
    adjacency_of,
    all_ranks,
    assert_close,
    assert_tensors_close,
    prepare,
    rejoin,
    train,
)
from own_models import EXAMPLES, write_example

from dorylus_hpc.api import fit, infer
from dorylus_hpc.errors import InputError

OPTIONS = {"epochs": 5, "hidden": 6, "layers": 3, "dtype": "float64", "dropout": 0.4, "trace_events": 0}
CASES = {
    "dense": (graphs.directed_random, {"mode": "nopipe"}),
    "dense, dropped": (graphs.directed_weighted, {"input_dropout": 0.3, "decay_scope": "all"}),
    "sparse, dropped": (graphs.sparse_features, {"input_dropout": 0.3}),
    "one layer": (graphs.isolated, {"layers": 1, "optimizer": "sgd", "lr": 0.3}),
}


def dense_operator(graph):
    """Return GCN's P of a directed graph, by its definition: rows are destinations."""
    arcs = adjacency_of(graph).toarray().T
    np.fill_diagonal(arcs, 0.0)
    scale = 1 / np.sqrt(arcs.sum(axis=1) + 1)
    return scale[:, None] * (arcs + np.eye(graph.n)) * scale


def gated_sum(p, x, weights, layers):
    """Return the logits, from the formula in the README."""
    for layer in range(1, layers + 1):
        u, w, b = (weights[f"{name}{layer}"] for name in "UWb")
        x = p @ (x @ w / (1 + np.exp(-(x @ u)))) + b
        x = x if layer == layers else np.maximum(x, 0)
    return x


def appnp(p, x, weights, layers):
    for layer in range(1, layers + 1):
        x = x @ weights[f"W{layer}"] + weights[f"b{layer}"]
        x = x if layer == layers else np.maximum(x, 0)
    steps = x
    for _ in range(10):
        steps = 0.9 * p @ steps + 0.1 * x
    return steps


FORMULAS = {"GatedSum": gated_sum, "Appnp": appnp}


def example_of(comm, name, folder):
    """Write an example on rank 0; return its path."""
    path = folder / f"{name.lower()}.py"
    if comm.rank == 0:
        write_example(name, folder)
    rejoin(comm)
    return path


@pytest.mark.spread
@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_equals_one_process(comm, shared_tmp_path, name, case, servers):
    build, changes = CASES[case]
    graph, group = build(), all_ranks(comm, servers)
    path = example_of(comm, name, shared_tmp_path)
    options = OPTIONS | changes | {"model_file": path}
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=6, partitioner="hash")
    whole = prepare(comm, graph, shared_tmp_path / "whole", parts=1)
    run_dir = shared_tmp_path / "run"
    result = train(comm, *group, folder, run_dir, intervals=2, **options)
    predictions = infer(run_dir, folder, comm=comm, weights="last")
    if comm.rank == 0:
        alone = fit(whole, run_dir=shared_tmp_path / "alone", threads=1, **options)
        assert_close("losses", result.summary["loss"], alone.summary["loss"], 1e-12)
        assert_tensors_close("weights", result.weights["last"], alone.weights["last"], 1e-12)
        for key in ("best_epoch", "train_accuracy", "val_accuracy", "test_accuracy"):
            assert result.summary[key] == alone.summary[key], key
        x = graph.features.toarray() if sp.issparse(graph.features) else graph.features
        logits = FORMULAS[name](dense_operator(graph), x, result.weights["last"], options["layers"])
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        assert_close("probabilities", predictions.probabilities, shares, 1e-6)  # float32
        np.testing.assert_array_equal(predictions.classes, logits.argmax(axis=1))
        np.testing.assert_array_equal(predictions.ids, graph.ids)
    rejoin(comm)


@pytest.mark.parametrize("name", EXAMPLES)
def test_bit_equal_for_any_ranks(comm, shared_tmp_path, name):
    path = example_of(comm, name, shared_tmp_path)
    folder = prepare(comm, graphs.directed_random(), shared_tmp_path / "graph", parts=5)
    options = OPTIONS | {"model_file": path, "dtype": "float32", "intervals": 3}
    result = train(comm, *all_ranks(comm), folder, shared_tmp_path / "run", **options)
    if comm.rank == 0:
        alone = fit(folder, run_dir=shared_tmp_path / "alone", **options)
        assert result.summary["weights_sha256"] == alone.summary["weights_sha256"]
        assert result.summary["loss"] == alone.summary["loss"]
    rejoin(comm)


@pytest.mark.parametrize("name", EXAMPLES)
def test_learns_in_async(comm, shared_tmp_path, name):
    graph = graphs.cliques(3, 12)
    graph.labels[:] = np.repeat(np.arange(3), 12)
    path = example_of(comm, name, shared_tmp_path)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=max(3, comm.size), partitioner="hash")
    options = {"mode": "async", "epochs": 60, "hidden": 8, "intervals": 2, "dropout": 0.0, "lr": 0.03}
    result = train(comm, comm.size, 0, folder, shared_tmp_path / "run", model_file=path, **options)
    assert result.summary["loss"][-1] < 0.5 * result.summary["loss"][0]


@pytest.mark.ranks(2)
def test_ranks_have_the_same_file(comm, tmp_path, shared_tmp_path):
    """Each rank has a file of its own; that of the last one differs in a comment."""
    path = write_example("GatedSum", tmp_path)
    if comm.rank == comm.size - 1:
        path.write_text(path.read_text() + "# mine\n")
    with pytest.raises(InputError, match=f"is another file on rank {comm.size - 1} .* than on rank 0"):
        fit(graphs.path(), comm=comm, model_file=path, run_dir=shared_tmp_path / "run")


@pytest.mark.ranks(2)
def test_a_mistake_on_one_rank_is_told_on_all(comm, tmp_path, shared_tmp_path):
    changes = [("def params(self):", "def params(self:")] if comm.rank == comm.size - 1 else []
    path = write_example("GatedSum", tmp_path, *changes)
    with pytest.raises(InputError, match=r"gatedsum\.py:\d+: SyntaxError"):
        fit(graphs.path(), comm=comm, model_file=path, run_dir=shared_tmp_path / "run")


def test_a_mistake_is_told_before_anything_is_trained(comm, shared_tmp_path):
    if comm.rank == 0:
        write_example("GatedSum", shared_tmp_path, ("return sigmoid(gate) * value", "return 1 / 0"))
    rejoin(comm)
    path = shared_tmp_path / "gatedsum.py"
    with pytest.raises(InputError, match=r"gatedsum\.py:\d+: layer 1, AV message: ZeroDivisionError"):
        fit(graphs.path(), comm=comm, model_file=path, run_dir=shared_tmp_path / "run")
    assert not (shared_tmp_path / "run" / "checkpoint.h5").exists()
