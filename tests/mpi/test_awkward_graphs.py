"""Graphs and partitions that break ghosts, normalisation and reductions: forward and gradients all the same.

Plain descent at rate 1, so that the weights after a few epochs are sums of gradients.
"""

from __future__ import annotations

import graphs
import numpy as np
import pytest
from distributed import adjacency_of, assert_equals_oracle, prepare, train

from dorylus_hpc.graph.manifest import read_manifest

pytestmark = pytest.mark.spread

OPTIONS = {
    "dtype": "float64",
    "layers": 3,
    "hidden": 4,
    "epochs": 4,
    "optimizer": "sgd",
    "lr": 1.0,
    "dropout": 0.3,
    "input_dropout": 0.2,
    "intervals": 3,
}


def check(comm, folder, graph, servers=0, *, parts=4, owner=None, options=None, **cleaning):
    """Train on all ranks and compare with the oracle on the graph as it should have been cleaned."""
    group, options = (comm.size - servers, servers), {**OPTIONS, **(options or {})}
    prepare(comm, graph, folder / "graph", parts=max(parts, comm.size), owner=owner, **cleaning)
    result = train(comm, *group, folder / "graph", folder / "run", **options)
    adjacency = adjacency_of(
        graph,
        duplicates=cleaning.get("duplicates", "merge"),
        undirected=cleaning.get("undirected", False),
    )
    assert_equals_oracle(comm, graph, folder / "graph", result, group, adjacency=adjacency, **options)


@pytest.mark.parametrize("source_degree", ["in", "out"])
@pytest.mark.parametrize("name", graphs.AWKWARD)
def test_graph(comm, shared_tmp_path, name, source_degree):
    graph = graphs.awkward(name)
    owner = np.ones(graph.n, int) if graph.n < max(4, comm.size) else None  # fewer vertices than parts
    servers = list(graphs.AWKWARD).index(name) % min(comm.size, 3)
    options = {"source_degree": source_degree}
    check(comm, shared_tmp_path, graph, servers, owner=owner, options=options)


CLEANING = [
    ("with_loops", {"self_loops": "keep"}),
    ("one_loop", {"self_loops": "keep"}),
    ("with_duplicates", {"duplicates": "keep"}),
    ("directed_weighted", {"duplicates": "keep"}),
    ("directed_weighted", {"self_loops": "keep"}),
    ("directed_weighted", {"duplicates": "keep", "self_loops": "keep"}),
    ("directed_random", {"undirected": True}),
    ("directed_star", {"undirected": True, "order": "none"}),
]


@pytest.mark.parametrize("name, cleaning", CLEANING, ids=[f"{n} {' '.join(c)}" for n, c in CLEANING])
def test_cleaning(comm, shared_tmp_path, name, cleaning):
    graph = graphs.awkward(name)
    owner = np.ones(graph.n, int) if graph.n < max(4, comm.size) else None
    check(comm, shared_tmp_path, graph, min(1, comm.size - 1), owner=owner, **cleaning)


# What a part may look like, by its vertices' owners.
OWNERS = {
    "single vertices": lambda n: np.where(np.arange(n) < 2, np.arange(n), 2 + np.arange(n) % 2),
    "the last two empty": lambda n: np.arange(n) % 2,
    "the first empty": lambda n: 1 + np.arange(n) % 3,
    "one in the middle empty": lambda n: np.array([0, 1, 3])[np.arange(n) * 3 // n],
    "all but one empty": lambda n: np.full(n, 2),
    "all but the last empty": lambda n: np.full(n, 3),
}
FEATURES = {
    "dense": (graphs.directed_random, {}),
    "standardised": (graphs.directed_random, {"feature_norm": "standard", "input_dropout": 0.0}),
    "sparse": (graphs.sparse_features, {"feature_norm": "row"}),
}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("owners", OWNERS)
def test_parts(comm, shared_tmp_path, owners, features):
    build, options = FEATURES[features]
    graph = build()
    check(
        comm,
        shared_tmp_path,
        graph,
        list(OWNERS).index(owners) % min(comm.size, 3),
        owner=OWNERS[owners](graph.n),
        options=options,
    )


@pytest.mark.parametrize("partitioner", ["metis", "hash", "range"])
def test_parts_without_training_vertices(comm, shared_tmp_path, partitioner):
    check(comm, shared_tmp_path, graphs.one_training_vertex(), parts=5, partitioner=partitioner)
    trained = sorted(part.train for part in read_manifest(shared_tmp_path / "graph").parts)
    assert trained == [0] * (len(trained) - 1) + [1]
