"""Invariant 2: for one prepared folder every bit is the same, whatever ranks and threads it is trained on.

So it is whether arrays make way for others or stay.
"""

from __future__ import annotations

import graphs
import pytest
from distributed import all_ranks, fitting, prepare, train

RUNS = {
    "dense": (
        {"features": 20},
        {"layers": 3, "hidden": 12, "input_dropout": 0.2, "intervals": 3, "feature_norm": "standard"},
    ),
    "sparse": (
        {"features": 30, "sparse": True},
        {"hidden": 8, "input_dropout": 0.4, "intervals": 2, "feature_norm": "row", "decay_scope": "all"},
    ),
    "one layer, float64": ({"features": 9}, {"layers": 1, "intervals": 5, "dtype": "float64"}),
    "sage": (
        {"features": 20, "classes": 9},
        {"model": "sage", "layers": 3, "hidden": 7, "input_dropout": 0.2, "intervals": 3},
    ),
    "sage, sparse and normalised": (
        {"features": 30, "sparse": True},
        {"model": "sage", "hidden": 8, "l2_normalise": "on", "intervals": 2, "feature_norm": "row"},
    ),
    "sage, max": (
        {"features": 20},
        {"model": "sage", "aggregator": "max", "layers": 3, "hidden": 7, "intervals": 3},
    ),
    "gin": (
        {"features": 20},
        {"model": "gin", "layers": 3, "hidden": 12, "intervals": 3, "feature_norm": "standard"},
    ),
    "batch norm": (
        {"features": 20},
        {"layers": 4, "hidden": 12, "norm": "batch", "residual": "on", "jumping": "max", "intervals": 3},
    ),
    "gat": (
        {"features": 20},
        {"model": "gat", "layers": 3, "hidden": 3, "heads": 4, "attention_dropout": 0.3, "intervals": 3},
    ),
    "gatv2": (
        {"features": 20},
        {"model": "gatv2", "hidden": 5, "heads": 2, "output_heads": 2, "intervals": 2, "input_dropout": 0.2},
    ),
    "gat, products computed": (
        {"features": 20},
        {"model": "gat", "hidden": 3, "heads": 4, "intervals": 3, "ghost_products": "compute"},
    ),
    "gat, products exchanged": (
        {"features": 20},
        {"model": "gat", "hidden": 3, "heads": 4, "intervals": 3, "ghost_products": "exchange"},
    ),
    "gatv2, sparse, products exchanged": (
        {"features": 30, "sparse": True},
        {"model": "gatv2", "hidden": 5, "intervals": 2, "input_dropout": 0.2, "ghost_products": "exchange"},
    ),
    "plain descent": ({"features": 9, "classes": 8}, {"hidden": 5, "optimizer": "sgd", "lr": 0.5}),
}


def outcome(result):
    """Return all that must not differ between runs."""
    summary = result.summary
    kept = ("weights_sha256", "loss", "best_epoch", "train_accuracy", "val_accuracy", "test_accuracy")
    tensors = {
        f"{which} {name}": tensor.tobytes()
        for which, by_name in result.weights.items()
        for name, tensor in by_name.items()
    }
    return {name: summary[name] for name in kept} | tensors


@pytest.mark.spread
@pytest.mark.parametrize("run", RUNS)
def test_any_ranks_and_threads(comm, shared_tmp_path, run):
    build, options = RUNS[run]
    graph = graphs.directed_random(90, 500, **build)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=4)
    want = None
    for number, (graph_servers, servers) in enumerate([*fitting(comm.size), all_ranks(comm)]):
        for mode, threads, saving in (
            ("nopipe", 1, "on"),
            ("pipe", 1, "off"),
            ("nopipe" if number % 2 else "pipe", 2, "on"),
        ):
            run_dir = shared_tmp_path / f"run{number}{mode}{threads}"
            how = {"mode": mode, "threads": threads, "save_memory": saving}
            result = train(comm, graph_servers, servers, folder, run_dir, epochs=5, **how, **options)
            if result is None:
                continue
            assert result.summary["ranks"]["graph_servers"] == graph_servers
            assert result.summary["ranks"]["parameter_servers"] == servers
            got = outcome(result)
            want = want or got
            assert got == want, (graph_servers, servers, mode, threads)


def test_same_on_every_rank(comm, shared_tmp_path):
    folder = prepare(comm, graphs.directed_random(), shared_tmp_path / "graph", parts=comm.size)
    result = train(comm, comm.size, 0, folder, shared_tmp_path / "run", epochs=3)
    first = comm.bcast(outcome(result))
    assert outcome(result) == first


@pytest.mark.ranks(2)
def test_seed_and_intervals_count(comm, shared_tmp_path):
    """What may change bits does: the comparisons above are not of constants."""
    folder = prepare(comm, graphs.directed_random(90, 500), shared_tmp_path / "graph", parts=4)
    base = {"epochs": 4, "intervals": 2, "seed": 1}
    seen = []
    for number, change in enumerate([{}, {"seed": 2}, {"intervals": 3}]):
        result = train(comm, *all_ranks(comm), folder, shared_tmp_path / f"run{number}", **base | change)
        seen.append(result and result.summary["weights_sha256"])
    assert len(set(seen)) == 3 or seen == [None] * 3
