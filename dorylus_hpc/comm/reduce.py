"""Reductions whose result does not depend on how many ranks took part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dorylus_hpc.comm.roles import Placement
from dorylus_hpc.comm.tags import Kind, tag
from dorylus_hpc.comm.waiting import wait_all

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def gather_by_part(comm: Intracomm, placement: Placement, rows: np.ndarray) -> np.ndarray | None:
    """Collect one row a part on rank 0, in the order of the parts. Collective over graph servers.

    Summing the rows in that order gives the same bits for any number of graph servers.

    Parameters
    ----------
    comm
        The graph servers.
    placement
        Which of them hosts which part.
    rows : ndarray, (parts hosted here, k), float64

    Returns
    -------
    ndarray, (n_parts, k), or None on the other ranks
    """
    if comm.Get_rank() != 0:
        wait_all([comm.Isend(np.ascontiguousarray(rows), dest=0, tag=tag(Kind.GATHER))])
        return None
    table = np.empty((placement.n_parts, rows.shape[1]), rows.dtype)
    table[: len(rows)] = rows
    wait_all(
        [
            comm.Irecv(table[slice(parts.start, parts.stop)], source=server, tag=tag(Kind.GATHER))
            for server in range(1, placement.n_servers)
            if (parts := placement.hosted(server))
        ]
    )
    return table


def gather_arrays(comm: Intracomm, arrays: list[np.ndarray]) -> list[list[np.ndarray]] | None:
    """Collect arrays of any lengths on rank 0, by rank; nothing is pickled but their lengths. Collective.

    Parameters
    ----------
    comm
        The ranks that call.
    arrays
        As many on all ranks, each of one dimension and the same dtype everywhere.

    Returns
    -------
    list, by rank, of lists of ndarray; None on the other ranks
    """
    lengths = comm.gather([len(array) for array in arrays])
    if lengths is None:
        pieces = [piece for array in arrays for piece in _bytes(array)]
        wait_all([comm.Isend(piece, dest=0, tag=tag(Kind.GATHER)) for piece in pieces])
        return None
    found = [arrays]
    requests = []
    for rank in range(1, comm.Get_size()):
        room = [np.empty(n, array.dtype) for n, array in zip(lengths[rank], arrays, strict=True)]
        found.append(room)
        requests += [
            comm.Irecv(piece, source=rank, tag=tag(Kind.GATHER)) for array in room for piece in _bytes(array)
        ]
    wait_all(requests)
    return found


def _bytes(array: np.ndarray) -> list[np.ndarray]:
    flat = array.view(np.uint8).reshape(-1)
    return [flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK)]


def gather_rows(
    comm: Intracomm, placement: Placement, rows: list[np.ndarray], counts: list[int]
) -> np.ndarray | None:
    """Collect the rows of all parts on rank 0, part after part. Collective over graph servers.

    Parameters
    ----------
    comm
        The graph servers.
    placement
        Which of them hosts which part.
    rows
        Of each hosted part, (n_own, width), one dtype.
    counts
        Rows of every part.

    Returns
    -------
    ndarray, (sum of counts, width), or None on the other ranks
    """
    if comm.Get_rank() != 0:
        wait_all(
            [
                comm.Isend(piece, dest=0, tag=tag(Kind.GATHER))
                for block in rows
                for piece in _pieces(np.ascontiguousarray(block))
            ]
        )
        return None
    width, dtype = rows[0].shape[1], rows[0].dtype
    starts = np.concatenate([[0], np.cumsum(counts)])
    table = np.empty((starts[-1], width), dtype)
    requests = []
    for part in range(placement.n_parts):
        block = table[starts[part] : starts[part + 1]]
        if placement.host(part) == 0:
            block[...] = rows[part]
        else:
            requests += [
                comm.Irecv(piece, source=placement.host(part), tag=tag(Kind.GATHER))
                for piece in _pieces(block)
            ]
    wait_all(requests)
    return table


def _pieces(rows: np.ndarray) -> list[np.ndarray]:
    """Cut rows into messages whose counts stay far below 2^31."""
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    return [rows[start : start + step] for start in range(0, len(rows), step)]


_CHUNK = 1 << 28  # elements
