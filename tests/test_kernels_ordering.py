"""Orders of vertices: the loops against their twins, and what an order must hold on any graph."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cython_kernels import _ordering, ordering, reference_ordering

DOORS = ("is_symmetric", "communities", "community_order", "miss_rates")


def csr(n, rows, columns):
    """A pattern from pairs; repeated pairs stay."""
    rows, columns = np.asarray(rows, np.int64), np.asarray(columns, np.int32)
    by_row = np.lexsort((columns, rows))
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=n), out=indptr[1:])
    return indptr, columns[by_row]


def both_ways(n, i, j):
    return csr(n, np.concatenate([i, j]), np.concatenate([j, i]))


def planted(n_groups, size, degree, leaving, seed):
    """Equal communities under a random numbering: the graph, and the community of each vertex."""
    rng = np.random.default_rng(seed)
    n, pairs = n_groups * size, n_groups * size * degree // 2
    i = rng.integers(n, size=pairs)
    j = i // size * size + rng.integers(size, size=pairs)
    j = np.where(rng.random(pairs) < leaving, rng.integers(n, size=pairs), j)
    name = rng.permutation(n)
    community = np.empty(n, int)
    community[name] = np.arange(n) // size
    return both_ways(n, name[i], name[j]), community


def grid(side, seed):
    name = np.random.default_rng(seed).permutation(side * side).reshape(side, side)
    i = np.concatenate([name[:, 1:].ravel(), name[1:].ravel()])
    j = np.concatenate([name[:, :-1].ravel(), name[:-1].ravel()])
    return both_ways(side * side, i, j)


def star(n):
    return both_ways(n, np.zeros(n - 1, int), np.arange(1, n))


AWKWARD = {
    "nothing": csr(0, [], []),
    "one vertex": csr(1, [], []),
    "one loop": csr(1, [0, 0], [0, 0]),
    "no edges": csr(40, [], []),
    "one edge": both_ways(9, [7], [2]),
    "only loops": csr(5, range(5), range(5)),
    "a star": star(300),
    "two stars": both_ways(200, np.repeat([0, 1], 99), np.arange(2, 200)),
    "a directed path": csr(50, range(49), range(1, 50)),
    "into one": csr(60, range(59), [59] * 59),
    "repeated edges": both_ways(6, [0, 0, 0, 1, 2], [1, 1, 1, 2, 3]),
    "complete": csr(40, np.repeat(np.arange(40), 40), np.tile(np.arange(40), 40)),
    "grid": grid(12, 0),
    "planted": planted(4, 25, 12, 0.1, 0)[0],
}


@st.composite
def graphs(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, pairs = draw(st.integers(1, 60)), draw(st.integers(0, 400))
    i, j = rng.integers(n, size=pairs), (n * rng.random(pairs) ** draw(st.sampled_from([1, 3]))).astype(int)
    return both_ways(n, i, j) if draw(st.booleans()) else csr(n, i, j)


def check_all(graph, largest):
    """Every loop against its twin, on one graph; and what holds for whatever they return."""
    n = len(graph[0]) - 1
    assert ordering.is_symmetric(*graph) == reference_ordering.is_symmetric(*graph)
    label = ordering.communities(*graph, largest=largest)
    np.testing.assert_array_equal(label, reference_ordering.communities(*graph, largest=largest))
    order = ordering.community_order(*graph, largest=largest)
    np.testing.assert_array_equal(order, reference_ordering.community_order(*graph, largest=largest))
    assert (label.dtype, order.dtype) == (np.int32, np.int32)
    np.testing.assert_array_equal(np.sort(order), np.arange(n))
    assert np.bincount(label, minlength=1).max() <= largest
    # a community is one run of the order
    runs = np.count_nonzero(np.diff(label[order])) + (n > 0)
    assert runs == len(np.unique(label)) == label.max(initial=-1) + 1
    for rows in (order, np.arange(n, dtype=np.int32)):
        rates = ordering.miss_rates(*graph, rows, (1, 5, 60))
        np.testing.assert_allclose(rates, reference_ordering.miss_rates(*graph, rows, (1, 5, 60)), rtol=1e-12)
        assert (np.diff(rates) <= 0).all()


@pytest.mark.parametrize("largest", [1, 7, 2048])
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_graphs(name, largest):
    check_all(AWKWARD[name], largest)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(1, 30))
def test_any_graph(graph, largest):
    check_all(graph, largest)


def test_windows(monkeypatch):
    graph = grid(15, 1)
    monkeypatch.setattr(ordering, "WINDOW", 50)
    for windows in (3, 16, 100):
        monkeypatch.setattr(ordering, "WINDOWS", windows)
        check_all(graph, 20)


def test_isolated_vertices_and_hubs_stop_nothing():
    i, j = np.zeros(5000, int), np.arange(1, 5001)
    graph = both_ways(20_000, i, j)
    order = ordering.community_order(*graph)
    np.testing.assert_array_equal(np.sort(order), np.arange(20_000))
    sizes = np.bincount(ordering.communities(*graph, largest=100))
    assert sizes.max() == 100


def test_planted_communities_are_found():
    """Of a vertex's neighbours inside its community, nearly all are near it in the order."""
    graph, community = planted(40, 200, 30, 0.2, 3)
    label = ordering.communities(*graph, largest=400)
    pure = sum(np.bincount(community[label == group]).max() for group in range(label.max() + 1))
    assert pure / len(label) > 0.95
    order = ordering.community_order(*graph)
    assert np.count_nonzero(np.diff(community[order])) < 400  # 7 800 where the order is random
    shuffled = np.arange(len(order), dtype=np.int32)
    before, after = (ordering.miss_rates(*graph, rows, [6000])[0] for rows in (shuffled, order))
    assert before > 0.4
    assert after < 0.25


def test_a_hierarchy_brings_a_grid_together():
    graph = grid(60, 2)
    order = ordering.community_order(*graph)
    given_order = np.arange(3600, dtype=np.int32)
    assert ordering.miss_rates(*graph, order, [256])[0] < 0.4
    assert ordering.miss_rates(*graph, given_order, [256])[0] > 0.9


def test_misses_of_known_orders():
    n = 1000
    everyone_reads_the_next = csr(n, range(n), [*range(1, n), 0])
    rows = np.arange(n, dtype=np.int32)
    assert ordering.miss_rates(*everyone_reads_the_next, rows, [10, 500]).tolist() == [1, 1]
    everyone_reads_the_first = csr(n, range(n), [0] * n)
    assert ordering.miss_rates(*everyone_reads_the_first, rows, [1]).tolist() == [0]
    ring = both_ways(n, np.arange(n), np.roll(np.arange(n), 1))
    assert ordering.miss_rates(*ring, rows, [4])[0] == pytest.approx(0.5, abs=0.01)
    shuffled = np.random.default_rng(0).permutation(n).astype(np.int32)
    assert ordering.miss_rates(*ring, shuffled, [4])[0] > 0.95


def test_one_entry_more_or_turned_is_not_symmetric():
    (indptr, indices), _ = planted(10, 50, 8, 0.3, 5)
    rows = np.repeat(np.arange(500), np.diff(indptr))
    assert ordering.is_symmetric(indptr, indices)
    rng = np.random.default_rng(6)
    off = np.flatnonzero(rows != indices)
    for at in rng.choice(off, 50, replace=False):
        kept = np.arange(len(rows)) != at
        assert not ordering.is_symmetric(*csr(500, rows[kept], indices[kept]))
        moved = indices.copy()
        moved[at] = (moved[at] + 1) % 500
        assert not ordering.is_symmetric(*csr(500, rows, moved))
    assert not ordering.is_symmetric(*csr(500, range(500), [*range(1, 500), 0]))


def test_arcs_whose_numbers_add_up_are_not_symmetric():
    """From 1 and 2 to 0 and from there to 3; small directed graphs of all kinds."""
    assert not ordering.is_symmetric(*csr(4, [1, 2, 0], [0, 0, 3]))
    assert not ordering.is_symmetric(*csr(3, [1, 1, 0], [0, 0, 2]))
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2000):
        n = int(rng.integers(1, 5))
        graph = csr(n, *rng.integers(n, size=(2, rng.integers(7))))
        found.append(reference_ordering.is_symmetric(*graph))
        assert ordering.is_symmetric(*graph) == found[-1]
    assert 200 < sum(found) < 1800


def test_the_same_twice():
    graph, _ = planted(10, 60, 10, 0.3, 1)
    np.testing.assert_array_equal(ordering.community_order(*graph), ordering.community_order(*graph))


def test_weights_do_not_overflow():
    most = np.array([(1 << 26) - 1, 5], np.int32)
    starts, weights = np.empty(3, np.int64), np.empty(32, np.int32)
    _ordering.contract(
        np.array([0, 1, 2, 2], np.int64), np.array([2, 2], np.int32), most, np.array([0, 0, 1], np.int32),
        np.array([0, 2, 3], np.int64), np.arange(3, dtype=np.int32), np.zeros(2, np.int32),
        np.empty(2, np.int32), starts, np.empty(32, np.int32), weights,
    )  # fmt: skip
    assert (starts.tolist(), weights[0]) == ([0, 1, 1], 1 << 26)


# --- the doors


def good():
    indptr, indices = both_ways(4, np.array([0, 1]), np.array([1, 2]))
    pattern = {"indptr": indptr, "indices": indices}
    return {
        "is_symmetric": pattern,
        "communities": pattern | {"largest": 3},
        "community_order": pattern | {"largest": 3},
        "miss_rates": pattern | {"order": np.arange(4, dtype=np.int32), "reaches": [1, 2]},
    }


def refused(door, error, match, **changes):
    with pytest.raises(error, match=match):
        getattr(ordering, door)(**good()[door] | changes)


@pytest.mark.parametrize("door", DOORS)
def test_twins_and_what_is_no_square_matrix(door):
    twin = getattr(reference_ordering, door)
    assert inspect.signature(getattr(ordering, door)) == inspect.signature(twin)
    got, want = (getattr(module, door)(**good()[door]) for module in (ordering, reference_ordering))
    np.testing.assert_array_equal(got, want)
    indptr, indices = good()[door]["indptr"], good()[door]["indices"]
    refused(door, TypeError, "indptr must be int64", indptr=indptr.astype(np.int32))
    refused(door, TypeError, "indices must be a NumPy array, got a list", indices=indices.tolist())
    refused(door, ValueError, "indptr must run from 0", indptr=indptr + 1)
    refused(door, ValueError, "indptr must not decrease", indptr=np.array([0, 3, 2, 4, 4]))
    refused(door, ValueError, r"indices\[0\] = 4 is outside 0\.\.3", indices=indices + 3)
    for array in (indptr, indices):
        array.flags.writeable = False
    getattr(ordering, door)(**good()[door] | {"indptr": indptr, "indices": indices, "validate": False})


@pytest.mark.parametrize("door", ["communities", "community_order"])
def test_sizes(door):
    for value in (0, -1, 2**31):
        refused(door, ValueError, "largest must be at least 1", largest=value)
    for value in (1.0, None, True):
        refused(door, TypeError, "largest must be an integer", largest=value)


def test_orders_and_reaches():
    refused("miss_rates", TypeError, "order must be int32", order=np.arange(4))
    refused("miss_rates", ValueError, r"order must have shape \(4\)", order=np.arange(3, dtype=np.int32))
    refused("miss_rates", ValueError, r"order\[1\] = 4", order=np.array([0, 4, 1, 2], np.int32))
    refused("miss_rates", ValueError, "more than once", order=np.array([0, 1, 1, 2], np.int32))
    for reaches in ([], [2, 1], [3, 3]):
        refused("miss_rates", ValueError, "reaches must rise", reaches=reaches)
    refused("miss_rates", ValueError, "a reach must be at least 1", reaches=[0, 1])
    refused("miss_rates", TypeError, "a reach must be an integer", reaches=[0.5])
