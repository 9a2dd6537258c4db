"""Small awkward graphs: what breaks partitioners, ghosts and normalisation.

Each builder returns a GraphData with features, labels and a split, edges not yet cleaned. AWKWARD has
them by name; `awkward(name)` builds one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp

from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.readers import from_arrays

CLASSES = 3
FEATURES = 5


def make(
    n: int,
    sources: Any,
    destinations: Any,
    *,
    weights: Any = None,
    sparse: bool = False,
    unlabelled: Any = (),
    train: Any = None,
    ids: Any = None,
    features: int = FEATURES,
    classes: int = CLASSES,
    several: bool = False,
    seed: int = 0,
    name: str = "graph",
) -> GraphData:
    """A graph from pairs, with random features and labels; thirds train, validation and test.

    `several`: a vertex may have several classes.
    """
    rng = np.random.default_rng(seed)
    x: Any = rng.standard_normal((n, features))
    if sparse:
        x = sp.csr_array(np.where(rng.random((n, features)) < 0.4, x, 0.0))
    labels = rng.integers(0, classes, n)
    labels[np.asarray(unlabelled, int)] = -1
    values = np.ones(len(sources)) if weights is None else np.asarray(weights, float)
    turn = np.arange(n) % 3
    split_train = np.flatnonzero((turn == 0) & (labels >= 0)) if train is None else np.asarray(train)
    rest = np.setdiff1d(np.flatnonzero(labels >= 0), split_train)
    return from_arrays(
        sp.coo_array((values, (np.asarray(sources, int), np.asarray(destinations, int))), shape=(n, n)),
        x,
        _several(rng, labels, classes) if several else labels,
        train=split_train,
        validation=rest[: len(rest) // 2],
        test=rest[len(rest) // 2 :],
        ids=ids,
        n_classes=classes,
        name=name,
    )


def _several(rng: np.random.Generator, labels: np.ndarray, classes: int) -> np.ndarray:
    """A third of all classes for each vertex with a label, rather small ones; few are not known."""
    marks = (rng.random((len(labels), classes)) < np.linspace(0.5, 0.1, classes)).astype(np.int8)
    marks[rng.random((len(labels), classes)) < 0.1] = -1
    marks[labels < 0] = -1
    return marks


def _both(sources: Any, destinations: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([sources, destinations]), np.concatenate([destinations, sources])


def _distinct_pairs(n: int, m: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """About m distinct ordered pairs i != j."""
    keys = np.unique(np.random.default_rng(seed).integers(0, n * n, m))
    i, j = np.divmod(keys, n)
    return i[i != j], j[i != j]


def directed_random(n: int = 40, m: int = 160, seed: int = 1, **options: Any) -> GraphData:
    """Random arcs, most without their reverse."""
    i, j = _distinct_pairs(n, m, seed)
    return make(n, i, j, seed=seed, **{"name": "directed_random", **options})


def undirected_random(n: int = 40, m: int = 80, seed: int = 2, **options: Any) -> GraphData:
    """Random edges, each in both directions."""
    i, j = _distinct_pairs(n, m, seed)
    sources, destinations = _both(i[i < j], j[i < j])
    return make(n, sources, destinations, seed=seed, **{"name": "undirected_random", **options})


def star(leaves: int = 20) -> GraphData:
    """One hub with a neighbour for everybody else."""
    sources, destinations = _both(np.zeros(leaves, int), np.arange(1, leaves + 1))
    return make(leaves + 1, sources, destinations, name="star")


def directed_star(leaves: int = 20) -> GraphData:
    """Arcs from the leaves to the hub only: ghosts in one direction, hardly any in the other."""
    return make(leaves + 1, np.arange(1, leaves + 1), np.zeros(leaves, int), name="directed_star")


def edgeless(n: int = 9) -> GraphData:
    """Vertices without edges."""
    return make(n, [], [], name="edgeless")


def one_vertex() -> GraphData:
    """A single vertex without edges."""
    return make(1, [], [], train=[0], name="one_vertex")


def one_loop() -> GraphData:
    """A single vertex whose only edge is a self loop."""
    return make(1, [0], [0], train=[0], name="one_loop")


def path(n: int = 17) -> GraphData:
    """A chain, in both directions."""
    return make(n, *_both(np.arange(n - 1), np.arange(1, n)), name="path")


def cycle(n: int = 12) -> GraphData:
    """A directed ring: every vertex has in- and out-degree one, and yet it is not symmetric."""
    return make(n, np.arange(n), (np.arange(n) + 1) % n, name="cycle")


def cliques(count: int = 3, size: int = 6) -> GraphData:
    """Complete graphs that do not touch each other."""
    i, j = np.nonzero(sp.block_diag([np.ones((size, size)) - np.eye(size)] * count).toarray())
    return make(count * size, i, j, name="cliques")


def isolated() -> GraphData:
    """Random edges among the even vertices; the odd ones have none."""
    inner = undirected_random(20, 50)
    return make(40, inner.edges.rows() * 2, inner.indices * 2, name="isolated")


def with_loops() -> GraphData:
    """Some self loops, one of them on a vertex without other edges."""
    base = undirected_random(24, 60)
    loops = np.array([0, 3, 5, 24])
    sources = np.concatenate([base.edges.rows(), loops])
    return make(25, sources, np.concatenate([base.indices, loops]), name="with_loops")


def with_duplicates() -> GraphData:
    """Some edges twice or three times, alike in both directions."""
    base = undirected_random(24, 60)
    again = np.arange(base.n_edges) % 4 == 0
    i, j = base.edges.rows(), base.indices
    pairs = {tuple(sorted(pair)) for pair in zip(i[again].tolist(), j[again].tolist(), strict=True)}
    repeated = np.array(sorted(pairs))
    sources, destinations = _both(repeated[:, 0], repeated[:, 1])
    return make(24, np.concatenate([i, sources]), np.concatenate([j, destinations]), name="with_duplicates")


def weighted() -> GraphData:
    """Symmetric weights, a zero among them."""
    base = undirected_random(30, 80)
    i, j = base.edges.rows().astype(int), base.indices.astype(int)
    weights = ((i + j) % 5) / 4.0
    return make(30, i, j, weights=weights, name="weighted")


def directed_weighted(**options: Any) -> GraphData:
    """Random arcs with random weights, loops and repeated arcs among them."""
    rng = np.random.default_rng(5)
    i, j = rng.integers(0, 25, 140), rng.integers(0, 25, 140)
    return make(25, i, j, weights=rng.random(140) + 0.1, **{"name": "directed_weighted", **options})


def asymmetric_weights() -> GraphData:
    """Structure symmetric, weights not: directed all the same."""
    base = undirected_random(30, 80)
    weights = np.random.default_rng(6).random(base.n_edges) + 0.5
    return make(30, base.edges.rows(), base.indices, weights=weights, name="asymmetric_weights")


def half_unlabelled() -> GraphData:
    """Every second vertex has no label."""
    return undirected_random(40, 90, unlabelled=np.arange(1, 40, 2), name="half_unlabelled")


def one_training_vertex() -> GraphData:
    """All parts but one have no training vertex."""
    return undirected_random(train=[7], name="one_training_vertex")


def sparse_features() -> GraphData:
    """CSR features, some rows empty, on a directed graph."""
    return directed_random(sparse=True, features=30, name="sparse_features")


def text_ids() -> GraphData:
    """Ids that are text, not all ASCII."""
    return undirected_random(
        ids=[f"vertex-{k}-\u00e9\u4e2d"[: 9 + k % 3] + str(k) for k in range(40)], name="text_ids"
    )


def large_ids() -> GraphData:
    """Ids far apart, beyond 32 bits, not in order."""
    return undirected_random(ids=2**40 - 977 * np.arange(40), name="large_ids")


AWKWARD: dict[str, Callable[[], GraphData]] = {
    build.__name__: build
    for build in (
        directed_random,
        undirected_random,
        star,
        directed_star,
        edgeless,
        one_vertex,
        one_loop,
        path,
        cycle,
        cliques,
        isolated,
        with_loops,
        with_duplicates,
        weighted,
        directed_weighted,
        asymmetric_weights,
        half_unlabelled,
        one_training_vertex,
        sparse_features,
        text_ids,
        large_ids,
    )
}


def awkward(name: str) -> GraphData:
    """One of AWKWARD, by name."""
    return AWKWARD[name]()
