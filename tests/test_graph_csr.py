"""Edges in CSR form against plain lists of triples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dorylus_hpc.graph import csr
from dorylus_hpc.graph.csr import Edges

N = 7
pairs = st.tuples(st.integers(0, N - 1), st.integers(0, N - 1), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
edge_lists = st.lists(pairs, max_size=30)


def build(triples: list, weighted: bool = True) -> Edges:
    columns = list(zip(*triples, strict=True)) or [(), (), ()]
    i, j, w = (np.array(column) for column in columns)
    return csr.from_pairs(N, i.astype(np.int32), j.astype(np.int32), w.astype(float) if weighted else None)


def triples_of(edges: Edges) -> list:
    weights = np.ones(len(edges)) if edges.weights is None else edges.weights
    return list(zip(edges.rows().tolist(), edges.indices.tolist(), weights.tolist(), strict=True))


@given(edge_lists)
def test_pairs_become_sorted_rows(triples):
    edges = build(triples)
    assert triples_of(edges) == sorted(triples)
    assert (edges.indptr.dtype, edges.indices.dtype) == (np.int64, np.int32)
    assert triples_of(csr.canonical(edges, N)) == sorted(triples)


@given(edge_lists)
def test_transpose(triples):
    turned = csr.transpose(build(triples), N)
    assert triples_of(turned) == sorted((j, i, w) for i, j, w in triples)
    assert (turned.indptr.dtype, turned.indices.dtype) == (np.int64, np.int32)


@given(edge_lists)
def test_symmetric_means_one_object(triples):
    out_edges, in_edges = csr.both_directions(build(triples))
    assert (in_edges is out_edges) == (sorted(triples) == sorted((j, i, w) for i, j, w in triples))


@given(edge_lists, st.booleans())
def test_degrees_leave_loops_out(triples, weighted):
    expected = np.zeros(N)
    for i, j, w in sorted(triples):
        expected[i] += (w if weighted else 1.0) * (i != j)
    assert np.array_equal(csr.degrees(build(triples, weighted)), expected)


@given(edge_lists, st.permutations(range(N)))
def test_take(triples, rows):
    rows = np.array(rows[: N - 2])
    taken = build(triples).take(rows)
    expected = [(k, j, w) for k, row in enumerate(rows.tolist()) for i, j, w in sorted(triples) if i == row]
    assert triples_of(taken) == expected


@given(edge_lists)
def test_repeats_and_loops(triples):
    edges = build(triples)
    found = sorted(triples)
    assert csr.repeats(edges).tolist() == [
        k > 0 and found[k][:2] == found[k - 1][:2] for k in range(len(found))
    ]
    assert csr.loops(edges).tolist() == [i == j for i, j, _ in found]


@given(edge_lists)
def test_symmetric_pattern(triples):
    expected = np.zeros((N, N))
    for i, j, _ in triples:
        if i != j:
            expected[i, j] += 1
            expected[j, i] += 1
    pattern = csr.symmetric_pattern(build(triples))
    assert np.array_equal(pattern.toarray(), expected)
    assert pattern.has_canonical_format


@pytest.mark.parametrize("keys", [[], [0], [3, 1, 3, 0, 1, 3]])
def test_group_is_a_stable_sort(keys):
    keys = np.array(keys, np.int32)
    indptr, positions = csr.group(keys, 5)
    for g in range(5):
        assert np.array_equal(positions[indptr[g] : indptr[g + 1]], np.flatnonzero(keys == g))
