"""Scales of edges against the dense matrix, both directions, over several parts."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import AWKWARD, awkward

from dorylus_hpc.graph.clean import clean
from dorylus_hpc.graph.normalise import AGGREGATES, edge_scales, gcn_scales
from dorylus_hpc.graph.partition import Part, build_parts
from dorylus_hpc.graph.partitioners import partition


def dense_gcn(graph, source: str) -> np.ndarray:
    """Row = destination, column = source; loops replaced by the self term."""
    a = np.zeros((graph.n, graph.n))
    weights = np.ones(graph.n_edges) if graph.weights is None else graph.weights
    np.add.at(a, (graph.indices, graph.edges.rows()), weights)
    np.fill_diagonal(a, 0.0)
    in_degree, out_degree = a.sum(axis=1) + 1, a.sum(axis=0) + 1
    at_source = in_degree if source == "in" else out_degree
    return (a + np.eye(graph.n)) / np.sqrt(np.outer(in_degree, at_source))


def scaled(part: Part, adjacency, source: str, n: int) -> np.ndarray:
    """Rows of the scaled matrix with its self term, in columns by gid."""
    row_scale, read_scale = gcn_scales(part, adjacency, source=source)
    assert row_scale.shape == (part.n_own,)
    assert read_scale.shape == (part.n_own + adjacency.n_ghost,)
    gid = np.concatenate([part.gid, adjacency.ghost_gid])
    weights = np.ones(adjacency.n_edges) if adjacency.weights is None else adjacency.weights
    rows = adjacency.edges.rows()
    out = np.zeros((part.n_own, n))
    np.add.at(out, (rows, gid[adjacency.indices]), weights * read_scale[adjacency.indices] * row_scale[rows])
    out[np.arange(part.n_own), part.gid] += row_scale * read_scale[: part.n_own]
    return out


@pytest.mark.parametrize("source", ["in", "out"])
@pytest.mark.parametrize("name", AWKWARD)
def test_both_directions_are_the_dense_matrix_and_its_transpose(name, source):
    graph = clean(awkward(name), self_loops="keep", duplicates="keep")
    expected = dense_gcn(graph, source)
    for part in build_parts(graph, partition(graph, min(3, graph.n), "hash")):
        bare = part.without_loops()
        forward = scaled(bare, bare.in_edges, source, graph.n)
        np.testing.assert_allclose(forward, expected[part.gid], atol=1e-14)
        backward = scaled(bare, bare.out_edges, source, graph.n)
        np.testing.assert_allclose(backward, expected.T[part.gid], atol=1e-14)


def dense_aggregate(graph, aggregate: str) -> np.ndarray:
    """Row = destination, column = source; of a maximum the sum over the same entries."""
    a = np.zeros((graph.n, graph.n))
    weights = np.ones(graph.n_edges) if graph.weights is None else graph.weights
    np.add.at(a, (graph.indices, graph.edges.rows()), weights)
    np.fill_diagonal(a, 1.0 if aggregate.endswith("-self") else 0.0)
    if aggregate.startswith("mean"):
        degree = a.sum(axis=1, keepdims=True)
        a = np.divide(a, degree, out=np.zeros_like(a), where=degree > 0)
    return a


@pytest.mark.parametrize("aggregate", AGGREGATES[1:])
@pytest.mark.parametrize("name", AWKWARD)
def test_scales_of_an_aggregate_and_of_its_transpose(name, aggregate):
    graph = clean(awkward(name), self_loops="keep", duplicates="keep")
    expected = dense_aggregate(graph, aggregate)
    for part in build_parts(graph, partition(graph, min(3, graph.n), "hash")):
        bare = part.without_loops()
        for adjacency, forward, want in (
            (bare.in_edges, True, expected),
            (bare.out_edges, False, expected.T),
        ):
            row_scale, read_scale, own = edge_scales(aggregate, bare, adjacency, forward=forward)
            gid = np.concatenate([part.gid, adjacency.ghost_gid])
            row_scale = np.ones(part.n_own) if row_scale is None else row_scale
            read_scale = np.ones(len(gid)) if read_scale is None else read_scale
            weights = np.ones(adjacency.n_edges) if adjacency.weights is None else adjacency.weights
            rows, read = adjacency.edges.rows(), adjacency.indices
            got = np.zeros((part.n_own, graph.n))
            np.add.at(got, (rows, gid[read]), weights * read_scale[read] * row_scale[rows])
            got[np.arange(part.n_own), part.gid] += own * row_scale * read_scale[: part.n_own]
            np.testing.assert_allclose(got, want[part.gid], atol=1e-14)


def test_an_isolated_vertex_has_scale_one():
    part = next(build_parts(awkward("edgeless"), np.zeros(9, int)))
    assert all((scale == 1).all() for scale in gcn_scales(part, part.in_edges))


def test_wrong_arguments():
    part, other = build_parts(awkward("path"), np.arange(17) // 9)
    with pytest.raises(ValueError, match="'both'"):
        gcn_scales(part, part.in_edges, source="both")
    with pytest.raises(ValueError, match="neither in_edges nor out_edges of part 0"):
        gcn_scales(part, other.in_edges)
    with pytest.raises(ValueError, match="aggregate must be one of gcn, mean, .*, got 'median'"):
        edge_scales("median", part, part.in_edges, forward=True)
