"""Which order `auto` takes, and that each of them is one."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import AWKWARD, awkward
from realdata import real_graph

from dorylus_hpc.graph import csr, order
from dorylus_hpc.graph.order import ORDERS, vertex_order

KINDS = ("none", "community", "rcm", "degree")


def pairs(n, i, j):
    """Both directions of the pairs, under a random numbering."""
    name = np.random.default_rng(n).permutation(n).astype(np.int32)
    return csr.from_pairs(n, name[np.concatenate([i, j])], name[np.concatenate([j, i])], None)


def planted(n=20_000, size=250, degree=30, leaving=0.2):
    rng = np.random.default_rng(0)
    i = rng.integers(n, size=n * degree // 2)
    j = i // size * size + rng.integers(size, size=len(i))
    return pairs(n, i, np.where(rng.random(len(i)) < leaving, rng.integers(n, size=len(i)), j))


def stencil(side=120, reach=3):
    """A grid where everybody within a square is a neighbour."""
    at = np.arange(side * side).reshape(side, side)
    i, j = [], []
    for down in range(reach + 1):
        for right in range(-reach if down else 1, reach + 1):
            left, stop = max(0, -right), side - max(0, right)
            i.append(at[: side - down, left:stop].ravel())
            j.append(at[down:, left + right : stop + right].ravel())
    return pairs(side * side, np.concatenate(i), np.concatenate(j))


def random(n=20_000, degree=30):
    rng = np.random.default_rng(0)
    return pairs(n, *rng.integers(n, size=(2, n * degree // 2)))


def heavy_tailed(scale=16, edges=500_000):
    rng = np.random.default_rng(0)
    bits = rng.choice(4, size=(edges, scale), p=[0.57, 0.19, 0.19, 0.05])
    powers = 1 << np.arange(scale)
    return pairs(1 << scale, (bits >> 1) @ powers, (bits & 1) @ powers)


def renumbered(edges, rows):
    """The graph in the order of its rows."""
    place = np.empty(len(rows), np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    return csr.from_pairs(len(rows), place[edges.rows()], place[edges.indices], None)


def taken(edges):
    """The name of the order that `auto` takes."""
    auto = vertex_order(edges, "auto")
    return next(kind for kind in KINDS if np.array_equal(vertex_order(edges, kind), auto))


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("name", AWKWARD)
def test_an_order_has_everybody_once(name, kind):
    edges = awkward(name).edges
    rows = vertex_order(edges, kind)
    assert np.array_equal(np.sort(rows), np.arange(edges.n_rows))
    assert np.array_equal(rows, vertex_order(edges, kind))


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("n", [0, 1, 4])
def test_without_edges(n, kind):
    nothing = csr.Edges(np.zeros(n + 1, np.int64), np.empty(0, np.int32))
    assert vertex_order(nothing, kind).tolist() == list(range(n))


@pytest.mark.parametrize(
    ("graph", "kind"), [(planted, "community"), (stencil, "rcm"), (heavy_tailed, "degree"), (random, "none")]
)
def test_each_kind_of_graph_has_its_order(graph, kind):
    assert taken(graph()) == kind


def test_most_neighbours_first_and_equals_stay():
    edges = heavy_tailed()
    rows = vertex_order(edges, "degree")
    degree = np.diff(edges.indptr)[rows]
    assert (np.diff(degree) <= 0).all()
    assert (np.diff(rows)[np.diff(degree) == 0] > 0).all()


@pytest.mark.parametrize("graph", [planted, stencil])
def test_a_good_order_stays(graph):
    edges = graph()
    assert taken(renumbered(edges, vertex_order(edges, "auto"))) == "none"


def test_communities_without_finer_structure_need_no_other_order(monkeypatch):
    edges = planted(size=1000)
    monkeypatch.setattr(order, "FEW_EDGES", 0)
    monkeypatch.setattr(order, "REACHES", (64, 1 << 12, 1 << 14))  # a smaller graph, a smaller cache
    monkeypatch.setattr(order, "bandwidth_order", None)
    assert np.array_equal(vertex_order(edges, "auto"), vertex_order(edges, "community"))


def test_direction_does_not_matter():
    """Half of the arcs, each in one direction, are ordered as what they are a half of."""
    edges = planted(n=2000, size=100, degree=20)
    plain = csr.from_pairs(2000, *np.unique([edges.rows(), edges.indices], axis=1), None)
    upward = plain.select(plain.rows() < plain.indices)
    whole = plain.select(plain.rows() != plain.indices)
    for kind in ORDERS:
        assert np.array_equal(vertex_order(upward, kind), vertex_order(whole, kind))


@pytest.mark.parametrize("name", ["debian12_packages", "tolokers", "amazon_photo"])
def test_public_graphs_gain(name):
    with np.load(real_graph(name), allow_pickle=False) as file:
        edges = csr.Edges(file["indptr"].astype(np.int64), file["indices"])
    cost = {kind: order._cost(order.miss_rates(edges, vertex_order(edges, kind))) for kind in ORDERS}
    assert cost["auto"] == min(cost.values())
    assert cost["auto"] < 0.95 * cost["none"]
