"""Cutting a graph into parts.

A part owns vertices and keeps all their in-edges and out-edges. The far end of an edge may belong to
another part: then it is a ghost, numbered after the owned rows. In- and out-edges of a directed graph
touch different vertices, so each direction has its own ghosts and its own send lists:

    lid:   0 .. n_own-1 | n_own ........................ n_own + n_ghost - 1
           own vertices | ghosts of part 0 | of part 1 | ...  (each by row in its owner)

Because ghosts are sorted by (owner, row in the owner), the rows a peer sends are exactly its sorted
list of rows, and a received message is one contiguous block of ghost rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from dorylus_hpc.graph import csr
from dorylus_hpc.graph.csr import Edges
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.order import vertex_order


@dataclass(frozen=True, eq=False)
class Adjacency:
    """A part's edges in one direction, with their ghosts.

    Attributes
    ----------
    indptr : ndarray of int64, shape (n_own + 1,)
    indices : ndarray of int32, shape (nnz,)
        lids, sorted within a row.
    weights : ndarray of float64, shape (nnz,), or None
    ghost_gid : ndarray of int64, shape (n_ghost,)
        Ghost g has lid ``n_own + g``; sorted by (ghost_part, ghost_lid).
    ghost_part : ndarray of int32, shape (n_ghost,)
        The part that owns the ghost.
    ghost_lid : ndarray of int32, shape (n_ghost,)
        Its row there.
    ghost_in_degree, ghost_out_degree : ndarray of float64, shape (n_ghost,)
        As `Part.in_degree`, `Part.out_degree`.
    send : dict of int to ndarray of int32
        Peer part -> sorted own lids which that peer holds as ghosts in this direction; equals, entry
        by entry, the peer's `ghost_lid` of this part's vertices. Peers in ascending order.
    """

    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray | None
    ghost_gid: np.ndarray
    ghost_part: np.ndarray
    ghost_lid: np.ndarray
    ghost_in_degree: np.ndarray
    ghost_out_degree: np.ndarray
    send: dict[int, np.ndarray]

    @property
    def n_edges(self) -> int:
        """Number of entries."""
        return len(self.indices)

    @property
    def n_ghost(self) -> int:
        """Number of ghosts."""
        return len(self.ghost_gid)

    @property
    def edges(self) -> Edges:
        """The bare edges: rows are own vertices, indices are lids."""
        return Edges(self.indptr, self.indices, self.weights)

    def without_loops(self) -> Adjacency:
        """The same without self loops; ghosts and send lists never depend on loops."""
        is_loop = csr.loops(self.edges)
        if not is_loop.any():
            return self
        plain = self.edges.select(~is_loop)
        return replace(self, indptr=plain.indptr, indices=plain.indices, weights=plain.weights)


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a graph: the unit of ownership. Row i of every array is own vertex i.

    Attributes
    ----------
    index : int
        Number of the part.
    gid : ndarray of int64, shape (n_own,)
    ids : ndarray, shape (n_own,)
        The user's ids, int64 or strings.
    in_degree, out_degree : ndarray of float64, shape (n_own,)
        Weighted, of the whole graph, without self loops and without the one that GCN adds.
    in_edges : Adjacency
        Row = destination, indices = sources.
    out_edges : Adjacency
        Row = source, indices = destinations. The very same object as `in_edges` if the whole graph is
        symmetric in structure and weights.
    features : ndarray or scipy.sparse.csr_array, shape (n_own, f)
    labels : ndarray of int32, shape (n_own,), or of uint8, shape (n_own, n_classes)
    split : ndarray of uint8, shape (n_own,)
        As in `GraphData`.
    """

    index: int
    gid: np.ndarray
    ids: np.ndarray
    in_degree: np.ndarray
    out_degree: np.ndarray
    in_edges: Adjacency
    out_edges: Adjacency
    features: Any
    labels: np.ndarray
    split: np.ndarray

    @property
    def n_own(self) -> int:
        """Number of own vertices."""
        return len(self.gid)

    @property
    def n_features(self) -> int:
        """Columns of the feature matrix."""
        return int(self.features.shape[1])

    @property
    def symmetric(self) -> bool:
        """True if one adjacency serves both directions."""
        return self.out_edges is self.in_edges

    def without_loops(self) -> Part:
        """This part with the self loops removed from both directions."""
        in_edges = self.in_edges.without_loops()
        out_edges = in_edges if self.symmetric else self.out_edges.without_loops()
        return replace(self, in_edges=in_edges, out_edges=out_edges)


def build_parts(
    graph: GraphData, owner: np.ndarray, *, parts: int | None = None, order: str = "auto"
) -> Iterator[Part]:
    """Cut a graph, one part after the other (only one is built at a time).

    Parameters
    ----------
    graph : GraphData
    owner : ndarray of int, shape (n,)
        Part of every vertex.
    parts : int, optional
        Number of parts; by default the largest owner + 1. Parts without vertices are built too.
    order : {'auto', 'none'}
        Order of a part's own rows, see `dorylus_hpc.graph.order.vertex_order`.

    Yields
    ------
    Part
        Parts 0, 1, ...
    """
    builder = _Builder(graph, owner, int(owner.max(initial=-1)) + 1 if parts is None else parts, order)
    return (builder.part(index) for index in range(builder.parts))


class _Builder:
    """What all parts of one graph need: both directions, global degrees, everybody's row."""

    def __init__(self, graph: GraphData, owner: np.ndarray, parts: int, order: str) -> None:
        self.graph = graph
        self.parts = parts
        self.owner = owner.astype(np.int32, copy=False)
        self.out_edges, self.in_edges = csr.both_directions(graph.edges)
        self.symmetric = self.in_edges is self.out_edges
        self.in_degree = csr.degrees(self.in_edges)
        self.out_degree = self.in_degree if self.symmetric else csr.degrees(self.out_edges)
        self.lid = np.empty(graph.n, np.int32)
        self.own = self._order_parts(order)
        self._local = np.empty(graph.n, np.int32)  # gid -> lid in the part at work
        self._seen = np.zeros(graph.n, bool)

    def _order_parts(self, order: str) -> list[np.ndarray]:
        """Fix the row of every vertex in its part (`lid`); returns the gids of each part by row."""
        starts, by_part = csr.group(self.owner, self.parts)
        members = [by_part[starts[p] : starts[p + 1]] for p in range(self.parts)]
        for gids in members:
            self.lid[gids] = np.arange(len(gids), dtype=np.int32)
        if order == "none":
            return members
        for p, gids in enumerate(members):
            inner = vertex_order(self._inner_edges(p, gids), order)
            members[p] = gids[inner]
        for gids in members:
            self.lid[gids] = np.arange(len(gids), dtype=np.int32)
        return members

    def _inner_edges(self, part: int, gids: np.ndarray) -> Edges:
        """Edges with both ends in the part, numbered by `lid`, without weights."""
        rows = self.out_edges.take(gids)
        inside = Edges(rows.indptr, rows.indices).select(self.owner[rows.indices] == part)
        return Edges(inside.indptr, self.lid[inside.indices])

    def part(self, index: int) -> Part:
        gids = self.own[index]
        in_rows = self.in_edges.take(gids)
        out_rows = in_rows if self.symmetric else self.out_edges.take(gids)
        in_edges = self._adjacency(index, gids, in_rows, out_rows)
        out_edges = in_edges if self.symmetric else self._adjacency(index, gids, out_rows, in_rows)
        in_degree = self.in_degree[gids]
        return Part(
            index=index,
            gid=gids.astype(np.int64),
            ids=self.graph.ids[gids],
            in_degree=in_degree,
            out_degree=in_degree if self.symmetric else self.out_degree[gids],
            in_edges=in_edges,
            out_edges=out_edges,
            features=_own_rows(self.graph.features, gids),
            labels=self.graph.labels[gids],
            split=self.graph.split[gids],
        )

    def _adjacency(self, index: int, gids: np.ndarray, rows: Edges, reverse: Edges) -> Adjacency:
        """One direction of a part; `reverse` (the other direction's rows) says who needs our rows."""
        ghosts = self._ghosts(index, rows.indices)
        n_own = len(gids)
        self._local[gids] = np.arange(n_own, dtype=np.int32)
        self._local[ghosts] = np.arange(n_own, n_own + len(ghosts), dtype=np.int32)
        local = Edges(rows.indptr, self._local[rows.indices], rows.weights)
        local = csr.canonical(local, n_own + len(ghosts))
        ghost_in_degree = self.in_degree[ghosts]
        return Adjacency(
            indptr=local.indptr,
            indices=local.indices,
            weights=local.weights,
            ghost_gid=ghosts.astype(np.int64),
            ghost_part=self.owner[ghosts],
            ghost_lid=self.lid[ghosts],
            ghost_in_degree=ghost_in_degree,
            ghost_out_degree=ghost_in_degree if self.symmetric else self.out_degree[ghosts],
            send=self._send(index, reverse),
        )

    def _ghosts(self, index: int, far: np.ndarray) -> np.ndarray:
        """The other parts' vertices among `far`, each once, sorted by (part, row there)."""
        self._seen[far] = True
        found = np.flatnonzero(self._seen)
        self._seen[found] = False
        found = found[self.owner[found] != index]
        return found[np.lexsort((self.lid[found], self.owner[found]))]

    def _send(self, index: int, reverse: Edges) -> dict[int, np.ndarray]:
        """Own rows that each other part touches: those with an edge, the other way, into it."""
        touched = Edges(reverse.indptr, self.owner[reverse.indices])
        by_peer = csr.transpose(touched, self.parts)
        by_peer = by_peer.select(~csr.repeats(by_peer))
        rows = {p: by_peer.indices[by_peer.indptr[p] : by_peer.indptr[p + 1]] for p in range(self.parts)}
        return {p: lids for p, lids in rows.items() if p != index and len(lids)}


def _own_rows(features: Any, gids: np.ndarray) -> Any:
    """Rows of a dense or sparse feature matrix."""
    if len(gids) == 0 and sp.issparse(features):
        return sp.csr_array((0, features.shape[1]), dtype=features.dtype)
    return features[gids]
