"""Parts: every edge once, ghosts and send lists that match, degrees of the whole graph."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import scipy.sparse as sp
from graphs import AWKWARD, awkward, directed_random, directed_weighted, undirected_random, with_loops
from hypothesis import given
from hypothesis import strategies as st

from dorylus_hpc.graph import csr
from dorylus_hpc.graph.clean import clean
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.order import HUB_DEGREE, bandwidth_order, vertex_order
from dorylus_hpc.graph.partition import Adjacency, Part, build_parts
from dorylus_hpc.graph.partitioners import partition


def triples(graph: GraphData) -> Counter:
    weights = np.ones(graph.n_edges) if graph.weights is None else graph.weights
    return Counter(zip(graph.edges.rows().tolist(), graph.indices.tolist(), weights.tolist(), strict=True))


def local_triples(part: Part, adjacency: Adjacency) -> list:
    """(own gid, far gid, weight) of every entry."""
    gid = np.concatenate([part.gid, adjacency.ghost_gid])
    weights = np.ones(adjacency.n_edges) if adjacency.weights is None else adjacency.weights
    rows = part.gid[adjacency.edges.rows()]
    return list(zip(rows.tolist(), gid[adjacency.indices].tolist(), weights.tolist(), strict=True))


def check_parts(graph: GraphData, owner: np.ndarray, parts: list[Part]) -> None:
    """All that makes a set of parts right."""
    check_vertices(graph, owner, parts)
    check_degrees(graph, parts)
    arcs = triples(graph)
    symmetric = arcs == Counter({(j, i, w): count for (i, j, w), count in arcs.items()})
    assert Counter(t for p in parts for t in local_triples(p, p.out_edges)) == arcs
    assert Counter((j, i, w) for p in parts for i, j, w in local_triples(p, p.in_edges)) == arcs
    for part in parts:
        assert part.symmetric == symmetric
        for adjacency in (part.in_edges, part.out_edges):
            check_adjacency(part, adjacency, parts)
    for direction in ("in_edges", "out_edges"):
        check_send_lists(parts, direction)


def check_vertices(graph: GraphData, owner: np.ndarray, parts: list[Part]) -> None:
    assert np.array_equal(np.sort(np.concatenate([p.gid for p in parts])), np.arange(graph.n))
    dense = graph.features.toarray() if sp.issparse(graph.features) else graph.features
    for index, part in enumerate(parts):
        assert part.index == index
        assert (owner[part.gid] == index).all()
        assert part.gid.dtype == np.int64
        own = part.features.toarray() if sp.issparse(part.features) else part.features
        assert sp.issparse(part.features) == sp.issparse(graph.features)
        assert np.array_equal(own, dense[part.gid])
        assert own.dtype == dense.dtype
        assert np.array_equal(part.ids, graph.ids[part.gid])
        assert np.array_equal(part.labels, graph.labels[part.gid])
        assert np.array_equal(part.split, graph.split[part.gid])
        assert (part.labels.dtype, part.split.dtype) == (np.int32, np.uint8)


def check_degrees(graph: GraphData, parts: list[Part]) -> None:
    in_degree, out_degree = np.zeros(graph.n), np.zeros(graph.n)
    for (i, j, w), count in triples(graph).items():
        if i != j:
            out_degree[i] += w * count
            in_degree[j] += w * count
    for part in parts:
        np.testing.assert_allclose(part.in_degree, in_degree[part.gid], rtol=1e-14)
        np.testing.assert_allclose(part.out_degree, out_degree[part.gid], rtol=1e-14)
        for adjacency in (part.in_edges, part.out_edges):
            np.testing.assert_allclose(adjacency.ghost_in_degree, in_degree[adjacency.ghost_gid], rtol=1e-14)
            np.testing.assert_allclose(
                adjacency.ghost_out_degree, out_degree[adjacency.ghost_gid], rtol=1e-14
            )


def check_adjacency(part: Part, adjacency: Adjacency, parts: list[Part]) -> None:
    assert (adjacency.indptr.dtype, adjacency.indices.dtype) == (np.int64, np.int32)
    assert adjacency.indptr.shape == (part.n_own + 1,)
    # every ghost is used, and none of the own vertices is among them
    used = np.unique(adjacency.indices[adjacency.indices >= part.n_own])
    assert np.array_equal(used, np.arange(part.n_own, part.n_own + adjacency.n_ghost))
    assert part.index not in adjacency.ghost_part
    places = list(zip(adjacency.ghost_part.tolist(), adjacency.ghost_lid.tolist(), strict=True))
    assert places == sorted(set(places))
    for (peer, lid), gid in zip(places, adjacency.ghost_gid, strict=True):
        assert parts[peer].gid[lid] == gid
    for row in range(part.n_own):
        entries = adjacency.indices[adjacency.indptr[row] : adjacency.indptr[row + 1]]
        assert (np.diff(entries) >= 0).all()


def check_send_lists(parts: list[Part], direction: str) -> None:
    """What p sends to q is, in order, what q holds as ghosts of p; and nothing else is sent."""
    for sender in parts:
        send = getattr(sender, direction).send
        assert list(send) == sorted(send)
        for receiver in parts:
            held = getattr(receiver, direction)
            wanted = held.ghost_lid[held.ghost_part == sender.index]
            sent = send.get(receiver.index, np.empty(0, np.int32))
            assert sent.dtype == np.int32
            assert np.array_equal(sent, wanted)
            assert (receiver.index in send) == (len(wanted) > 0)


POLICIES = [
    {"self_loops": "drop", "duplicates": "merge"},
    {"self_loops": "keep", "duplicates": "keep"},
    {"self_loops": "keep", "duplicates": "merge"},
]


@pytest.mark.parametrize("order", ["auto", "none"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p['self_loops']}-{p['duplicates']}")
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_graphs(name, policy, order):
    graph = clean(awkward(name), **policy)
    for parts in {1, min(3, graph.n), min(7, graph.n), graph.n}:
        for kind in ("metis", "hash", "range"):
            owner = partition(graph, parts, kind)
            check_parts(graph, owner, list(build_parts(graph, owner, order=order)))


@given(st.integers(0, 2**31), st.integers(1, 5), st.booleans(), st.booleans())
def test_any_owner(seed, parts, directed, loops):
    graph = (directed_random if directed else undirected_random)(15, 50, seed)
    graph = clean(with_loops() if loops and not directed else graph, self_loops="keep")
    owner = np.random.default_rng(seed).integers(0, parts, graph.n)
    check_parts(graph, owner, list(build_parts(graph, owner, parts=parts)))


def test_empty_parts_anywhere():
    graph = clean(directed_weighted())
    owner = np.where(np.arange(graph.n) < 10, 1, 3)
    parts = list(build_parts(graph, owner, parts=6))
    assert [p.n_own for p in parts] == [0, 10, 0, 15, 0, 0]
    check_parts(graph, owner, parts)
    empty = parts[0]
    assert (empty.n_features, empty.in_edges.n_edges, empty.in_edges.send) == (graph.n_features, 0, {})


def test_empty_part_with_sparse_features():
    graph = clean(awkward("sparse_features"))
    parts = list(build_parts(graph, np.full(graph.n, 1), parts=3))
    assert [p.features.shape for p in parts] == [(0, 30), (40, 30), (0, 30)]
    check_parts(graph, np.full(graph.n, 1), parts)


def test_symmetry_is_of_structure_and_weights():
    def one_object(name: str, **policy: str) -> bool:
        graph = clean(awkward(name), **policy)
        part = next(build_parts(graph, np.zeros(graph.n, int)))
        return part.out_edges is part.in_edges

    assert one_object("weighted")
    assert one_object("with_duplicates", duplicates="keep")
    assert not one_object("asymmetric_weights")
    assert not one_object("cycle")


def test_without_loops_strips_both_directions_only_of_loops():
    graph = clean(directed_weighted(), self_loops="keep", duplicates="keep")
    bare = clean(directed_weighted(), self_loops="drop", duplicates="keep")
    owner = partition(graph, 3, "hash")
    for kept, plain in zip(
        build_parts(graph, owner, order="none"), build_parts(bare, owner, order="none"), strict=True
    ):
        stripped = kept.without_loops()
        assert stripped.without_loops().in_edges is stripped.in_edges
        for name in ("in_edges", "out_edges"):
            a, b = getattr(stripped, name), getattr(plain, name)
            for field in ("indptr", "indices", "weights", "ghost_gid", "ghost_lid"):
                assert np.array_equal(getattr(a, field), getattr(b, field))
        # the very same numbers: a kept loop must not change a bit of a degree
        assert np.array_equal(stripped.in_degree, plain.in_degree)
        assert np.array_equal(stripped.in_edges.ghost_out_degree, plain.in_edges.ghost_out_degree)


def test_without_loops_keeps_one_object_for_both_directions():
    graph = clean(with_loops(), self_loops="keep")
    part = next(build_parts(graph, np.zeros(graph.n, int)))
    assert csr.loops(part.in_edges.edges).sum() == 4
    assert part.without_loops().symmetric


def test_the_same_twice():
    graph = clean(directed_weighted())
    owner = partition(graph, 4)
    for a, b in zip(build_parts(graph, owner), build_parts(graph, owner), strict=True):
        assert np.array_equal(a.gid, b.gid)
        assert np.array_equal(a.in_edges.indices, b.in_edges.indices)


# --- order


def bandwidth(edges: csr.Edges, order: np.ndarray) -> int:
    place = np.empty(len(order), int)
    place[order] = np.arange(len(order))
    return int(np.abs(place[edges.rows()] - place[edges.indices]).max())


def test_auto_order_brings_neighbours_together():
    n = 400
    shuffled = np.random.default_rng(0).permutation(n)
    i, j = shuffled[:-1].astype(np.int32), shuffled[1:].astype(np.int32)
    chain = csr.from_pairs(n, i, j, None)
    assert bandwidth(chain, vertex_order(chain, "none")) > 100
    assert bandwidth(chain, vertex_order(chain, "auto")) == 1


def test_hubs_do_not_make_ordering_quadratic():
    leaves = 2 * HUB_DEGREE
    spokes = csr.from_pairs(
        leaves + 3, np.full(leaves, 5, np.int32), np.arange(3, leaves + 3, dtype=np.int32), None
    )
    order = vertex_order(spokes, "rcm")
    assert order[0] == 5
    assert np.array_equal(np.sort(order), np.arange(leaves + 3))


def test_order_of_nothing():
    nothing = csr.from_pairs(4, np.empty(0, np.int32), np.empty(0, np.int32), None)
    assert vertex_order(nothing, "auto").tolist() == [0, 1, 2, 3]
    assert np.array_equal(np.sort(bandwidth_order(csr.symmetric_pattern(nothing))), np.arange(4))


def test_unknown_order():
    with pytest.raises(ValueError, match="'best'"):
        vertex_order(awkward("path").edges, "best")
