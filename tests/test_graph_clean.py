"""Policies for loops, repeated edges and direction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import AWKWARD, awkward, directed_random, directed_weighted, make
from hypothesis import given
from hypothesis import strategies as st

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.clean import clean
from dorylus_hpc.graph.data import GraphData

PAIRS = ([0, 0, 1, 2, 2, 2, 3], [1, 1, 1, 0, 0, 2, 0])  # 0->1 twice, loops at 1 and 2, 2->0 twice


def arcs(graph: GraphData) -> list[tuple]:
    columns = [graph.edges.rows().tolist(), graph.indices.tolist()]
    return list(zip(*columns, *([] if graph.weights is None else [graph.weights.tolist()]), strict=True))


def cleaned(weights: Any = None, **policy: Any) -> GraphData:
    return clean(make(4, *PAIRS, weights=weights), **policy)


def test_defaults_drop_loops_and_merge_duplicates():
    graph = cleaned()
    assert arcs(graph) == [(0, 1), (2, 0), (3, 0)]
    assert graph.notes == ("2 self loops dropped", "2 repeated edges merged")


def test_loops_are_kept_on_request():
    graph = cleaned(self_loops="keep")
    assert arcs(graph) == [(0, 1), (1, 1), (2, 0), (2, 2), (3, 0)]
    assert graph.notes[0] == "2 self loops kept"


def test_duplicates_are_kept_on_request():
    graph = cleaned(duplicates="keep")
    assert arcs(graph) == [(0, 1), (0, 1), (2, 0), (2, 0), (3, 0)]
    assert graph.notes[1] == "2 repeated edges kept"


def test_merging_sums_weights():
    graph = cleaned(weights=[1, 2, 7, 4, 8, 7, 16])
    assert arcs(graph) == [(0, 1, 3.0), (2, 0, 12.0), (3, 0, 16.0)]
    assert graph.notes[1] == "2 repeated edges merged, their weights summed"


def test_duplicates_are_an_error_on_request():
    with pytest.raises(
        InputError, match=r"graph: the edge 0 -> 1 occurs more than once \(2 repeated in all\)"
    ):
        cleaned(duplicates="error")
    assert clean(make(3, [0, 1], [1, 0]), duplicates="error").notes == ()


def test_undirected_adds_what_is_missing():
    graph = clean(make(4, [0, 1, 2], [1, 0, 3], weights=[5, 5, 7]), undirected=True)
    assert arcs(graph) == [(0, 1, 5.0), (1, 0, 5.0), (2, 3, 7.0), (3, 2, 7.0)]
    assert graph.notes == ("1 reverse edges added",)


@pytest.mark.parametrize(
    ("pairs", "weights", "message"),
    [
        (([0, 1], [1, 0]), [1, 2], "the edge 0 -> 1 has weight 1.0, its reverse has weight 2.0"),
        (
            ([0, 1, 2, 3], [1, 0, 3, 2]),
            [1, 1, 0, 2],
            "the edge 2 -> 3 has weight 0.0, its reverse has weight 2.0",
        ),
        (([1, 3, 3], [3, 1, 1]), None, "the edge 1 -> 3 occurs 1 times, its reverse occurs 2 times"),
        (([3, 1, 1], [1, 3, 3]), None, "the edge 1 -> 3 occurs 2 times, its reverse occurs 1 times"),
        (
            ([0, 0, 1, 1], [1, 1, 0, 0]),
            [1, 3, 1, 2],
            r"weights \[1.0, 3.0\], its reverse occurs with weights \[1.0, 2.0\]",
        ),
        (
            ([0, 3, 3, 1, 2, 2], [3, 0, 0, 2, 1, 1]),
            None,
            "the edge 0 -> 3 occurs 1 times, its reverse occurs 2 times",
        ),
    ],
)
def test_undirected_refuses_directions_that_differ(pairs, weights, message):
    with pytest.raises(InputError, match=message):
        clean(make(4, *pairs, weights=weights), undirected=True, duplicates="keep")


def test_undirected_keeps_the_number_of_repeated_edges():
    graph = clean(make(4, [0, 0, 2], [1, 1, 2]), undirected=True, duplicates="keep", self_loops="keep")
    assert arcs(graph) == [(0, 1), (0, 1), (1, 0), (1, 0), (2, 2)]


@given(st.integers(0, 10**6), st.booleans())
def test_undirected_makes_any_graph_symmetric(seed, duplicates):
    graph = directed_random(12, 40, seed)
    rng = np.random.default_rng(seed)
    i, j = graph.edges.rows(), graph.indices
    one_way = (i < j) if rng.random() < 0.5 else np.ones(len(i), bool)
    base = make(12, i[one_way], j[one_way])
    result = clean(base, undirected=True, duplicates="keep" if duplicates else "merge")
    expected = set(arcs(base)) | {(b, a) for a, b in arcs(base)}
    assert arcs(result) == sorted(expected)
    added = len(expected) - base.n_edges
    assert result.notes == ((f"{added} reverse edges added",) if added else ())


@pytest.mark.parametrize("name", AWKWARD)
def test_cleaning_twice_changes_nothing_more(name):
    once = clean(awkward(name))
    twice = clean(once)
    assert arcs(twice) == arcs(once)
    assert twice.notes == once.notes
    assert once.features is twice.features


def test_weighted_zero_edges_stay():
    graph = clean(make(3, [0, 1], [1, 2], weights=[0, 2]), undirected=True)
    assert arcs(graph) == [(0, 1, 0.0), (1, 0, 0.0), (1, 2, 2.0), (2, 1, 2.0)]


@pytest.mark.parametrize("policy", [{"self_loops": "maybe"}, {"duplicates": "sum"}])
def test_unknown_policy(policy):
    with pytest.raises(InputError, match="unknown policy"):
        clean(directed_weighted(), **policy)
