"""Sparse input features of ghosts: static, so they are exchanged once, at start-up.

CSR rows are ragged and need their lengths first. Dense rows go as blocks of a table like any other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy import sparse

from dorylus_hpc.comm.halo import HaloExchange
from dorylus_hpc.comm.tags import Kind, tag
from dorylus_hpc.comm.waiting import wait_all

_CHUNK = 1 << 28  # elements a message: counts stay far below 2^31


def ghost_counts(halo: HaloExchange, lengths: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Return the lengths of own and ghost rows from those of own rows. Collective.

    Parameters
    ----------
    halo
        The direction whose ghosts are meant.
    lengths
        By hosted part, (n_own + n_ghosts,), int64: own rows filled in.
    """
    columns = {part: column.astype(np.float64)[:, None] for part, column in lengths.items()}  # exact to 2^53
    halo.begin(columns).end()
    return {part: column[:, 0].astype(np.int64) for part, column in columns.items()}


def exchange_csr(
    halo: HaloExchange, n_ghosts: Mapping[int, int], rows: Mapping[int, sparse.csr_array]
) -> dict[int, sparse.csr_array]:
    """Append the ghosts' CSR rows to each hosted part's own. Collective over graph servers.

    Parameters
    ----------
    halo
        The direction whose ghosts are meant.
    n_ghosts
        Ghosts of each hosted part.
    rows
        Own rows of each hosted part, (n_own, n_columns), int32 indices.

    Returns
    -------
    dict of csr_array
        By hosted part, (n_own + n_ghosts, n_columns).
    """
    lengths = {}
    for part, own in rows.items():
        lengths[part] = np.zeros(own.shape[0] + n_ghosts[part], np.int64)
        lengths[part][: own.shape[0]] = np.diff(own.indptr)
    counts = ghost_counts(halo, lengths)

    stamp = tag(Kind.FEATURES)
    blocks: dict[int, list[tuple[int, sparse.csr_array]]] = {part: [] for part in rows}
    requests, arriving, sent = [], [], []
    for message in halo.plan.incoming:
        row_counts = np.zeros(message.n_rows, np.int64)
        for delivery in message.deliveries:
            n_own = halo.plan.n_own[delivery.part]
            wanted = counts[delivery.part][n_own + delivery.ghosts[0] : n_own + delivery.ghosts[1]]
            row_counts[slice(None) if delivery.pick is None else delivery.pick] = wanted
        like = rows[message.deliveries[0].part]
        indptr = np.concatenate([[0], np.cumsum(row_counts)])
        indices, data = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], like.dtype)
        for array in (indices, data):
            requests += [halo.comm.Irecv(piece, source=message.rank, tag=stamp) for piece in _pieces(array)]
        arriving.append((message, (data, indices, indptr), like.shape[1]))
    for going in halo.plan.outgoing:
        picked = rows[going.source][going.lids]
        for array in (picked.indices.astype(np.int32, copy=False), picked.data):
            sent.append(array)  # alive until the sends are complete
            requests += [halo.comm.Isend(piece, dest=going.rank, tag=stamp) for piece in _pieces(array)]
    wait_all(requests)

    for copy in halo.plan.copies:
        blocks[copy.part].append((copy.ghosts[0], rows[copy.source][copy.lids]))
    for message, (data, indices, indptr), n_columns in arriving:
        matrix = sparse.csr_array((data, indices, indptr), shape=(message.n_rows, n_columns))
        for delivery in message.deliveries:
            block = matrix if delivery.pick is None else matrix[delivery.pick]
            blocks[delivery.part].append((delivery.ghosts[0], block))
    return {
        part: sparse.csr_array(
            sparse.vstack(
                [own, *(block for _, block in sorted(blocks[part], key=lambda pair: pair[0]))], format="csr"
            )
        )
        for part, own in rows.items()
    }


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    return [array[start : start + _CHUNK] for start in range(0, len(array), _CHUNK)]
