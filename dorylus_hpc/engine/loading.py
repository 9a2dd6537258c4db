"""From partition files to operands: what a graph server holds before its first epoch.

The structure is read first. Dense features follow on a thread of their own (`feature_loader`) while halos are
planned and the runner is set up; features of ghosts come in the set-up, as soon as whoever owns them has
read them. Sparse features are read beside the planning alone: rows of ghosts have lengths of their own, and
are exchanged here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from cython_kernels import check_csr
from dorylus_hpc.comm.failure import together
from dorylus_hpc.comm.features import exchange_csr
from dorylus_hpc.comm.halo import HaloExchange, plan_halo
from dorylus_hpc.comm.reduce import gather_by_part
from dorylus_hpc.comm.roles import Placement
from dorylus_hpc.comm.tags import Kind
from dorylus_hpc.engine.executor import Executor
from dorylus_hpc.engine.feature_loader import FeatureLoader, Target
from dorylus_hpc.engine.pages import Room
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.csr import narrow
from dorylus_hpc.graph.data import TEST, TRAIN, UNKNOWN_MARK, VALIDATION, is_labelled
from dorylus_hpc.graph.feature_norm import (
    ColumnStatistics,
    check_norm,
    column_sums,
    normalise_rows,
    squared_deviations,
    standardise,
    statistics,
)
from dorylus_hpc.graph.normalise import edge_scales
from dorylus_hpc.graph.part_file import StoredFeatures
from dorylus_hpc.graph.partition import Adjacency, Part
from dorylus_hpc.graph.store import Manifest, read_structure
from dorylus_hpc.nn.operands import DenseFeatures, EdgeOperand, Features, PartOperands, SparseFeatures
from dorylus_hpc.report.trace import Tracer

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@dataclass(frozen=True)
class LoadSettings:
    """How a graph is to be read.

    Attributes
    ----------
    dtype
        Of features, weights and all arithmetic.
    feature_norm
        ``none``, ``row`` or ``standard``.
    source_degree
        Whose degree normalises the source end of an edge: ``in`` or ``out``.
    aggregate
        What the model takes from neighbours, a name of `dorylus_hpc.graph.normalise`.
    ghost_features
        False: features of ghosts are neither exchanged nor given room.
    """

    dtype: np.dtype
    feature_norm: str = "none"
    source_degree: str = "in"
    aggregate: str = "gcn"
    ghost_features: bool = True


@dataclass(frozen=True, eq=False)
class LoadedGraph:
    """A graph server's share of a graph.

    Attributes
    ----------
    placement
        Which server hosts which part.
    parts
        The hosted parts.
    ids
        The user's ids of each hosted part's vertices.
    halo_in, halo_out
        Exchanges for the ghosts of in-edges (forward) and of out-edges (backward).
    columns
        Statistics of the features, if they were standardised.
    loader
        Reads what is not there yet of dense features. Those of ghosts are not there.
    """

    placement: Placement
    parts: tuple[PartOperands, ...]
    ids: tuple[np.ndarray, ...]
    halo_in: HaloExchange
    halo_out: HaloExchange
    columns: ColumnStatistics | None
    loader: FeatureLoader


def load_graph(
    comm: Intracomm,
    folder: Path,
    manifest: Manifest,
    settings: LoadSettings,
    columns: ColumnStatistics | None = None,
    *,
    executor: Executor | None = None,
    tracer: Tracer | None = None,
) -> LoadedGraph:
    """Read the hosted parts, and go on reading their features. Collective over graph servers.

    Parameters
    ----------
    comm
        The graph servers.
    folder, manifest
        A prepared folder.
    settings
        How to read it.
    columns
        Statistics to standardise with; by default those of this graph, which have all of its features read
        here.
    executor
        Reads features on its thread for it; by default they are read when they are wanted.
    tracer
        Takes the slices.

    Raises
    ------
    AgreedError
        A file is damaged, on any rank; or the features cannot be normalised as asked. Of dense features this
        may be found later, by `FeatureLoader.finish`.
    """
    placement = Placement(len(manifest.parts), comm.Get_size())
    hosted = placement.hosted(comm.Get_rank())
    is_sparse = manifest.feature_kind == "csr"
    together(comm, lambda: check_norm(settings.feature_norm, sparse_features=is_sparse))
    read = together(
        comm, lambda: [_read_structure(folder, manifest, index, settings.dtype) for index in hosted]
    )
    parts = [part for part, _ in read]
    loader = FeatureLoader(executor, tracer or Tracer(time.perf_counter(), limit=0))
    dense, stored_sparse = {}, {}
    for part, stored in read:
        if is_sparse:
            stored_sparse[part.index] = _add_sparse(loader, folder, part, stored, settings)
        else:
            dense[part.index] = _add_dense(loader, folder, part, stored, settings, columns)
    halo_in = _halo(comm, placement, {part.index: part.in_edges for part in parts}, Kind.HALO_IN)
    halo_out = _halo(comm, placement, {part.index: part.out_edges for part in parts}, Kind.HALO_OUT)
    edges = {part.index: edge_operands(part, settings) for part in parts}
    features: dict[int, Features] = {}
    if is_sparse:
        together(comm, loader.finish)  # lengths of rows are lengths of messages: they must be right
        features |= _exchanged(halo_in, parts, manifest, stored_sparse, settings)
    else:
        if settings.feature_norm == "standard" and columns is None:
            together(comm, loader.finish)
            columns = _standardised(
                comm, placement, [dense[part.index].array[: part.n_own] for part in parts]
            )
        features |= {part.index: _dense_features(loader, part, dense[part.index]) for part in parts}
    return LoadedGraph(
        placement,
        tuple(part_operands(part, *edges[part.index], features[part.index]) for part in parts),
        tuple(part.ids for part in parts),
        halo_in,
        halo_out,
        columns if settings.feature_norm == "standard" else None,
        loader,
    )


def count_members(comm: Intracomm, graph: LoadedGraph, n_classes: int) -> np.ndarray:
    """Count the vertices of each class over the whole graph. Collective over graph servers.

    Parameters
    ----------
    comm
        The graph servers.
    graph
        A share of it.
    n_classes
        Classes in all.

    Returns
    -------
    ndarray, (2, 3, n_classes), int64
        Of the training, validation and test set: vertices of each class, and vertices of which it is known
        whether they have it. A vertex of several classes counts in each.
    """

    def of_part(part: PartOperands) -> np.ndarray:
        counts = np.zeros((2, 3, n_classes), np.int64)
        for place, member in enumerate((TRAIN, VALIDATION, TEST)):
            labels = part.labels[part.split == member]
            if labels.ndim == 2:
                has, known = (
                    np.count_nonzero(labels == 1, axis=0),
                    np.count_nonzero(labels != UNKNOWN_MARK, axis=0),
                )
            else:
                has, known = np.bincount(labels, minlength=n_classes), np.full(n_classes, len(labels))
            counts[:, place] = has, known
        return counts.reshape(-1)

    table = gather_by_part(comm, graph.placement, np.stack([of_part(part) for part in graph.parts]))
    totals = comm.bcast(None if table is None else table.sum(axis=0))
    return np.asarray(totals).reshape(2, 3, n_classes)


def _read_structure(
    folder: Path, manifest: Manifest, index: int, dtype: np.dtype
) -> tuple[Part, StoredFeatures]:
    """Read a part without loops and features."""
    part, stored = read_structure(folder, manifest, index)
    part = part.without_loops()
    for edges in (part.in_edges, part.out_edges):
        if edges.weights is None:
            continue
        with np.errstate(over="ignore"):  # what became infinite is found and told
            weights = edges.weights.astype(dtype)
        if not np.isfinite(weights).all():
            raise InputError(_not_finite("edge weight", folder, index, dtype))
    return part, stored


def _not_finite(what: str, folder: Path, index: int, dtype: np.dtype) -> str:
    return f"{folder}: a {what} of part {index} does not fit in {dtype}: use --dtype float64"


def _add_dense(
    loader: FeatureLoader,
    folder: Path,
    part: Part,
    stored: StoredFeatures,
    settings: LoadSettings,
    columns: ColumnStatistics | None,
) -> Room:
    """Have own rows read, and normalised where a row needs no other; return room for ghosts' rows too."""
    n_own, width = stored.arrays["values"].shape
    n_ghost = part.in_edges.n_ghost if settings.ghost_features else 0
    room = Room((n_own + n_ghost, width), settings.dtype)

    def normalise(rows: np.ndarray) -> None:
        if settings.feature_norm == "row":
            rows[...] = normalise_rows(rows)
        elif settings.feature_norm == "standard" and columns is not None:
            rows[...] = standardise(rows, columns)

    refuses = _not_finite("feature", folder, part.index, settings.dtype)
    loader.add(part.index, stored, [Target("values", room.array[:n_own], refuses, normalise)])
    return room


def _dense_features(loader: FeatureLoader, part: Part, room: Room) -> DenseFeatures:
    gids = np.concatenate([part.gid, part.in_edges.ghost_gid])
    return DenseFeatures(room.array, gids, partial(loader.load, part.index), room.release)


def _standardised(comm: Intracomm, placement: Placement, features: list[np.ndarray]) -> ColumnStatistics:
    """Standardise the own rows of the hosted parts in place, by the statistics of the whole graph."""
    totals = _totals(comm, placement, [column_sums(rows) for rows in features])
    count, sums = totals[0], totals[1:]
    mean = sums / max(count, 1.0)
    squares = _totals(comm, placement, [squared_deviations(rows, mean) for rows in features])
    columns = statistics(count, sums, squares)
    for rows in features:
        for start in range(0, len(rows), 4096):  # no second copy of the features
            piece = rows[start : start + 4096]
            piece[...] = standardise(piece, columns)
    return columns


def _add_sparse(
    loader: FeatureLoader, folder: Path, part: Part, stored: StoredFeatures, settings: LoadSettings
) -> dict[str, np.ndarray]:
    """Have the arrays of own rows read; return where they will be."""
    arrays = {
        name: np.empty(array.shape, settings.dtype if name == "data" else array.dtype)
        for name, array in stored.arrays.items()
    }
    refuses = _not_finite("feature", folder, part.index, settings.dtype)
    targets = [Target(name, array, refuses if name == "data" else "") for name, array in arrays.items()]
    loader.add(part.index, stored, targets)
    return arrays


def _exchanged(
    halo: HaloExchange,
    parts: list[Part],
    manifest: Manifest,
    arrays: dict[int, dict[str, np.ndarray]],
    settings: LoadSettings,
) -> dict[int, SparseFeatures]:
    """Make sparse rows of what was read, normalise them, and add those of ghosts where they are read."""
    rows = {}
    for part in parts:
        own = arrays.pop(part.index)
        matrix = narrow(own["data"], own["indices"], own["indptr"], (part.n_own, manifest.features))
        rows[part.index] = normalise_rows(matrix) if settings.feature_norm == "row" else matrix
    local = rows
    if settings.ghost_features:
        local = exchange_csr(halo, {part.index: part.in_edges.n_ghost for part in parts}, rows)
    return {part.index: _sparse_features(part, local.pop(part.index)) for part in parts}


def _halo(
    comm: Intracomm, placement: Placement, adjacencies: dict[int, Adjacency], kind: Kind
) -> HaloExchange:
    return HaloExchange(comm, plan_halo(comm.Get_rank(), placement, adjacencies), kind)


def _totals(comm: Intracomm, placement: Placement, mine: list[np.ndarray]) -> np.ndarray:
    """Add one vector a part, in the order of parts, and give the sum to every graph server."""
    table = gather_by_part(comm, placement, np.stack(mine))
    return comm.bcast(None if table is None else np.add.reduce(table, axis=0))


def part_operands(
    part: Part, forward: EdgeOperand, backward: EdgeOperand, features: Features
) -> PartOperands:
    """Return a part as the stages read it."""
    return PartOperands(
        index=part.index,
        gids=part.gid,
        in_edges=forward,
        out_edges=backward,
        n_in_ghosts=part.in_edges.n_ghost,
        n_out_ghosts=part.out_edges.n_ghost,
        features=features,
        labels=part.labels,
        split=part.split,
        train_mask=((part.split == TRAIN) & is_labelled(part.labels)).astype(np.uint8),
    )


def edge_operands(part: Part, settings: LoadSettings) -> tuple[EdgeOperand, EdgeOperand]:
    """Return both directions of the edges of a part without loops, with the scales of an aggregate."""
    forward = _edge_operand(part, part.in_edges, settings, forward=True)
    if not part.symmetric:
        return forward, _edge_operand(part, part.out_edges, settings, forward=False)
    scales = _scales(part, part.out_edges, settings, forward=False)
    return forward, replace(forward, **scales) if settings.aggregate.startswith("mean") else forward


def _edge_operand(part: Part, edges: Adjacency, settings: LoadSettings, *, forward: bool) -> EdgeOperand:
    indices, values = edges.indices, None if edges.weights is None else edges.weights.astype(settings.dtype)
    if settings.aggregate == "max":
        indices, values = _by_gid(part, edges), None
    check_csr(edges.indptr, indices, values, n_cols=part.n_own + edges.n_ghost)
    scales = _scales(part, edges, settings, forward=forward)
    if settings.aggregate == "attention":
        gids = np.concatenate([part.gid, edges.ghost_gid])
        return EdgeOperand(*_with_loops(edges), None, **scales, gids=gids)
    return EdgeOperand(edges.indptr, indices, values, **scales)


def _with_loops(edges: Adjacency) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries with one more a row, the row itself; sorted within a row, as they were."""
    n_rows = len(edges.indptr) - 1
    indptr = edges.indptr + np.arange(n_rows + 1)
    indices = np.empty(edges.n_edges + n_rows, edges.indices.dtype)
    for first, last, rows in _pieces_of_rows(edges.indptr):
        begin, end = edges.indptr[first], edges.indptr[last]
        entries = edges.indices[begin:end]
        after = entries > rows
        indices[np.arange(begin, end) + rows + after] = entries
        smaller = np.concatenate([[0], np.cumsum(~after)])[edges.indptr[first : last + 1] - begin]
        here = np.arange(first, last)
        indices[indptr[first:last] + np.diff(smaller)] = here
    return indptr, indices


def _pieces_of_rows(indptr: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Cut a matrix into rows of about `_SORTED_AT_ONCE` entries: (first row, end, row of each entry)."""
    n_rows = len(indptr) - 1
    starts = np.searchsorted(indptr, np.arange(0, indptr[-1], _SORTED_AT_ONCE))
    bounds = np.unique(np.concatenate([[0], np.minimum(starts, n_rows), [n_rows]]))
    for first, last in pairwise(bounds.tolist()):
        yield first, last, np.repeat(np.arange(first, last), np.diff(indptr[first : last + 1]))


def _by_gid(part: Part, edges: Adjacency) -> np.ndarray:
    """Return the entries of each row by vertex id: of equal values the same one is first in any partition."""
    gids, sorted_ = np.concatenate([part.gid, edges.ghost_gid]), np.empty_like(edges.indices)
    for first, last, rows in _pieces_of_rows(edges.indptr):
        begin, end = edges.indptr[first], edges.indptr[last]
        entries = edges.indices[begin:end]
        sorted_[begin:end] = entries[np.lexsort((gids[entries], rows))]
    return sorted_


_SORTED_AT_ONCE = 1_000_000  # entries: sorting takes six times their memory


def _scales(part: Part, edges: Adjacency, settings: LoadSettings, *, forward: bool) -> dict[str, Any]:
    row_scale, source_scale, self_weight = edge_scales(
        settings.aggregate, part, edges, forward=forward, source=settings.source_degree
    )
    return {
        "row_scale": None if row_scale is None else row_scale.astype(settings.dtype),
        "source_scale": None if source_scale is None else source_scale.astype(settings.dtype),
        "self_weight": self_weight,
    }


def _sparse_features(part: Part, local: sparse.csr_array) -> SparseFeatures:
    indptr, indices = local.indptr.astype(np.int64), local.indices.astype(np.int32)
    check_csr(indptr, indices, local.data, n_cols=local.shape[1])
    gids = np.concatenate([part.gid, part.in_edges.ghost_gid])
    return SparseFeatures(indptr, indices, local.data, local.shape[1], gids)
