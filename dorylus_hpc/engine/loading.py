"""From partition files to operands: what a graph server holds before its first epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from cython_kernels import check_csr
from dorylus_hpc.comm.failure import together
from dorylus_hpc.comm.features import exchange_csr, exchange_dense
from dorylus_hpc.comm.halo import HaloExchange, plan_halo
from dorylus_hpc.comm.reduce import gather_by_part
from dorylus_hpc.comm.roles import Placement
from dorylus_hpc.comm.tags import Kind
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.data import TRAIN, UNLABELLED
from dorylus_hpc.graph.feature_norm import (
    ColumnStatistics,
    check_norm,
    column_sums,
    normalise_rows,
    squared_deviations,
    standardise,
    statistics,
)
from dorylus_hpc.graph.normalise import gcn_scales
from dorylus_hpc.graph.partition import Adjacency, Part
from dorylus_hpc.graph.store import Manifest, read_part
from dorylus_hpc.nn.operands import DenseFeatures, EdgeOperand, Features, PartOperands, SparseFeatures

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
    """

    dtype: np.dtype
    feature_norm: str = "none"
    source_degree: str = "in"


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
    """

    placement: Placement
    parts: tuple[PartOperands, ...]
    ids: tuple[np.ndarray, ...]
    halo_in: HaloExchange
    halo_out: HaloExchange
    columns: ColumnStatistics | None


def load_graph(
    comm: Intracomm,
    folder: Path,
    manifest: Manifest,
    settings: LoadSettings,
    columns: ColumnStatistics | None = None,
) -> LoadedGraph:
    """Read the hosted parts and the features of their ghosts. Collective over graph servers.

    Parameters
    ----------
    comm
        The graph servers.
    folder, manifest
        A prepared folder.
    settings
        How to read it.
    columns
        Statistics to standardise with; by default those of this graph.

    Raises
    ------
    AgreedError
        A file is damaged, on any rank; or the features cannot be normalised as asked.
    """
    placement = Placement(len(manifest.parts), comm.Get_size())
    hosted = placement.hosted(comm.Get_rank())
    together(comm, lambda: check_norm(settings.feature_norm, sparse_features=manifest.feature_kind == "csr"))
    parts = together(comm, lambda: [_read_part(folder, manifest, index, settings.dtype) for index in hosted])
    halo_in = _halo(comm, placement, {part.index: part.in_edges for part in parts}, Kind.HALO_IN)
    halo_out = _halo(comm, placement, {part.index: part.out_edges for part in parts}, Kind.HALO_OUT)
    rows, columns = _normalised(comm, placement, parts, settings, columns)
    n_ghosts = {part.index: part.in_edges.n_ghost for part in parts}
    exchange: Any = exchange_csr if manifest.feature_kind == "csr" else exchange_dense
    local = exchange(halo_in, n_ghosts, rows)
    operands = tuple(_operands(part, local.pop(part.index), settings) for part in parts)
    return LoadedGraph(placement, operands, tuple(part.ids for part in parts), halo_in, halo_out, columns)


def _read_part(folder: Path, manifest: Manifest, index: int, dtype: np.dtype) -> Part:
    """Read a part without loops, features and edge weights in the dtype of the run."""
    part = read_part(folder, manifest, index).without_loops()
    with np.errstate(over="ignore"):  # what became infinite is found and told
        features = part.features.astype(dtype, copy=False)
        weights = [edges.weights for edges in (part.in_edges, part.out_edges) if edges.weights is not None]
        values = [("feature", features.data if sparse.issparse(features) else features)]
        values += [("edge weight", array.astype(dtype)) for array in weights]
    for kind, array in values:
        if not np.isfinite(array).all():
            raise InputError(
                f"{folder}: a {kind} of part {index} does not fit in {dtype}: use --dtype float64"
            )
    return replace(part, features=features)


def _halo(
    comm: Intracomm, placement: Placement, adjacencies: dict[int, Adjacency], kind: Kind
) -> HaloExchange:
    return HaloExchange(comm, plan_halo(comm.Get_rank(), placement, adjacencies), kind)


def _normalised(
    comm: Intracomm,
    placement: Placement,
    parts: list[Part],
    settings: LoadSettings,
    columns: ColumnStatistics | None,
) -> tuple[dict[int, Any], ColumnStatistics | None]:
    """Return the own rows of each part, normalised, in the dtype of the run."""
    rows = {part.index: part.features for part in parts}
    if settings.feature_norm == "row":
        return {index: normalise_rows(features) for index, features in rows.items()}, None
    if settings.feature_norm == "none":
        return rows, None
    if columns is None:
        totals = _totals(comm, placement, [column_sums(features) for features in rows.values()])
        count, sums = totals[0], totals[1:]
        mean = sums / max(count, 1.0)
        squares = _totals(comm, placement, [squared_deviations(features, mean) for features in rows.values()])
        columns = statistics(count, sums, squares)
    return {index: standardise(features, columns) for index, features in rows.items()}, columns


def _totals(comm: Intracomm, placement: Placement, mine: list[np.ndarray]) -> np.ndarray:
    """Add one vector a part, in the order of parts, and give the sum to every graph server."""
    table = gather_by_part(comm, placement, np.stack(mine))
    return comm.bcast(None if table is None else np.add.reduce(table, axis=0))


def _operands(part: Part, features: Any, settings: LoadSettings) -> PartOperands:
    forward = _edge_operand(part, part.in_edges, settings)
    backward = forward if part.symmetric else _edge_operand(part, part.out_edges, settings)
    gids = np.concatenate([part.gid, part.in_edges.ghost_gid])
    return PartOperands(
        index=part.index,
        gids=part.gid,
        in_edges=forward,
        out_edges=backward,
        n_in_ghosts=part.in_edges.n_ghost,
        n_out_ghosts=part.out_edges.n_ghost,
        features=_features(features, gids),
        labels=part.labels,
        split=part.split,
        train_mask=((part.split == TRAIN) & (part.labels != UNLABELLED)).astype(np.uint8),
    )


def _edge_operand(part: Part, edges: Adjacency, settings: LoadSettings) -> EdgeOperand:
    dtype = settings.dtype
    row_scale, source_scale = gcn_scales(part, edges, source=settings.source_degree)
    values = None if edges.weights is None else edges.weights.astype(dtype)
    check_csr(edges.indptr, edges.indices, values, n_cols=part.n_own + edges.n_ghost)
    return EdgeOperand(
        edges.indptr, edges.indices, values, row_scale.astype(dtype), source_scale.astype(dtype)
    )


def _features(local: Any, gids: np.ndarray) -> Features:
    if not sparse.issparse(local):
        return DenseFeatures(np.ascontiguousarray(local), gids)
    indptr, indices = local.indptr.astype(np.int64), local.indices.astype(np.int32)
    check_csr(indptr, indices, local.data, n_cols=local.shape[1])
    return SparseFeatures(indptr, indices, local.data, local.shape[1], gids)
