"""Loops, repeated edges, direction: made what the user asked for, and counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph import csr
from dorylus_hpc.graph.csr import Edges
from dorylus_hpc.graph.data import GraphData

SELF_LOOPS = ("drop", "keep")
DUPLICATES = ("merge", "keep", "error")


def clean(
    graph: GraphData, *, undirected: bool = False, self_loops: str = "drop", duplicates: str = "merge"
) -> GraphData:
    """Apply the policies for self loops, repeated edges and direction, in this order.

    Parameters
    ----------
    graph : GraphData
    undirected : bool
        Add the missing reverse of every edge, with the same weight.
    self_loops : {'drop', 'keep'}
    duplicates : {'merge', 'keep', 'error'}
        'merge' sums the weights of a repeated edge; in an unweighted graph it becomes one edge.

    Returns
    -------
    GraphData
        The same vertices, other edges, and a note for everything that was changed or kept.

    Raises
    ------
    InputError
        With 'error', for a repeated edge; with `undirected`, for an edge whose reverse is there with
        another weight or another number of times. Both name the pair.
    """
    for value, known in ((self_loops, SELF_LOOPS), (duplicates, DUPLICATES)):
        if value not in known:
            raise InputError(f"unknown policy {value!r}; known: {', '.join(known)}")
    edges, loop_notes = _loops(graph.edges, self_loops)
    edges, duplicate_notes = _repeated(edges, duplicates, graph.name)
    edges, direction_notes = _both_ways(edges, graph.name) if undirected else (edges, [])
    return replace(
        graph,
        indptr=edges.indptr,
        indices=edges.indices,
        weights=edges.weights,
        notes=(*graph.notes, *loop_notes, *duplicate_notes, *direction_notes),
    )


def _loops(edges: Edges, policy: str) -> tuple[Edges, list[str]]:
    is_loop = csr.loops(edges)
    count = int(np.count_nonzero(is_loop))
    if not count:
        return edges, []
    if policy == "keep":
        return edges, [f"{count} self loops kept"]
    return edges.select(~is_loop), [f"{count} self loops dropped"]


def _repeated(edges: Edges, policy: str, name: str) -> tuple[Edges, list[str]]:
    again = csr.repeats(edges)
    count = int(np.count_nonzero(again))
    if not count:
        return edges, []
    if policy == "error":
        position = int(again.argmax())
        raise InputError(
            f"{name}: the edge {_pair(edges, position)} occurs more than once ({count} repeated in all); "
            "merge or keep them with --duplicates"
        )
    if policy == "keep":
        return edges, [f"{count} repeated edges kept"]
    merged = edges.select(~again)
    if edges.weights is None:
        return merged, [f"{count} repeated edges merged"]
    weights = np.add.reduceat(edges.weights, np.flatnonzero(~again))
    return Edges(merged.indptr, merged.indices, weights), [
        f"{count} repeated edges merged, their weights summed"
    ]


def _both_ways(edges: Edges, name: str) -> tuple[Edges, list[str]]:
    alone = ~_has_reverse(edges)
    count = int(np.count_nonzero(alone))
    if count:
        edges = _with_reverse(edges, alone)
    _insist_on_symmetry(edges, name)
    return edges, [f"{count} reverse edges added"] if count else []


def _has_reverse(edges: Edges) -> np.ndarray:
    """True for edges i -> j where an edge j -> i exists, shape (nnz,)."""
    n = edges.n_rows
    again = csr.repeats(edges)
    pattern = Edges(edges.indptr, edges.indices).select(~again).matrix(n)
    # 1: only this way, 2: only the other way, 3: both. Entries of the sum come in the order of ours.
    ways = sp.csr_array(pattern + pattern.T.tocsr() * np.int8(2))
    ways.sum_duplicates()
    ours = ways.data[ways.data != 2] == 3
    return ours[np.cumsum(~again) - 1]


def _with_reverse(edges: Edges, alone: np.ndarray) -> Edges:
    """Add the reverse of the marked edges."""
    rows = edges.rows()
    weights = None if edges.weights is None else np.concatenate([edges.weights, edges.weights[alone]])
    sources = np.concatenate([rows, edges.indices[alone]])
    destinations = np.concatenate([edges.indices, rows[alone]])
    return csr.from_pairs(edges.n_rows, sources, destinations, weights)


def _insist_on_symmetry(edges: Edges, name: str) -> None:
    """Refuse edges whose two directions differ in weight or number."""
    reverse = csr.transpose(edges, edges.n_rows)
    if csr.same(edges, reverse):
        return
    # both are sorted alike, so where they first differ the smaller pair is one that differs
    rows, reverse_rows = edges.rows(), reverse.rows()
    differs = (rows != reverse_rows) | (edges.indices != reverse.indices)
    if edges.weights is not None and reverse.weights is not None:
        differs |= edges.weights != reverse.weights
    k = int(differs.argmax())
    here, there = min((rows[k], edges.indices[k]), (reverse_rows[k], reverse.indices[k]))
    raise InputError(
        f"{name}: the edge {here} -> {there} {_describe(edges, here, there)}, its reverse "
        f"{_describe(edges, there, here)}; an undirected graph needs both alike"
    )


def _describe(edges: Edges, source: int, destination: int) -> str:
    """How often an edge is there, with which weights."""
    row = slice(edges.indptr[source], edges.indptr[source + 1])
    found = edges.indices[row] == destination
    if edges.weights is None:
        return f"occurs {np.count_nonzero(found)} times"
    weights = edges.weights[row][found].tolist()
    return f"has weight {weights[0]}" if len(weights) == 1 else f"occurs with weights {weights}"


def _pair(edges: Edges, position: int) -> str:
    source = int(np.searchsorted(edges.indptr, position, side="right")) - 1
    return f"{source} -> {edges.indices[position]}"
