"""The order of a part's own rows: neighbours near each other make a gather read near memory."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import reverse_cuthill_mckee

from dorylus_hpc.graph import csr
from dorylus_hpc.graph.csr import Edges

ORDERS = ("auto", "none")

# Cuthill-McKee sorts the new neighbours of each vertex by insertion, quadratic in their number; and a
# vertex that is near everybody says nothing about who is near whom. Such hubs go first, unordered.
HUB_DEGREE = 4096


def vertex_order(inner: Edges, kind: str) -> np.ndarray:
    """Order the own vertices of a part by its inner edges.

    Parameters
    ----------
    inner : Edges
        Edges with both ends in the part, in any direction, n_own rows.
    kind : {'auto', 'none'}
        'auto' is reverse Cuthill-McKee (bandwidth-reducing), 'none' keeps the order.

    Returns
    -------
    ndarray of int, shape (n_own,)
        Row k of the part is vertex ``result[k]``.

    Raises
    ------
    ValueError
        For another `kind`.

    Notes
    -----
    A. George, J. W. Liu, *Computer Solution of Large Sparse Positive Definite Systems*, 1981.
    """
    if kind not in ORDERS:
        raise ValueError(f"unknown order {kind!r}; known: {', '.join(ORDERS)}")
    if kind == "none" or len(inner) == 0:
        return np.arange(inner.n_rows)
    return bandwidth_order(csr.symmetric_pattern(inner))


def bandwidth_order(pattern: sp.csr_array) -> np.ndarray:
    """Reverse Cuthill-McKee of a symmetric pattern, hubs first."""
    degree = np.diff(pattern.indptr)
    hubs = np.flatnonzero(degree > HUB_DEGREE)
    if len(hubs) == 0:
        return np.asarray(reverse_cuthill_mckee(pattern, symmetric_mode=True))
    others = np.flatnonzero(degree <= HUB_DEGREE)
    inner = pattern[others][:, others]
    return np.concatenate([hubs, others[reverse_cuthill_mckee(inner, symmetric_mode=True)]])
