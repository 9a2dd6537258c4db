"""The order of a part's own rows: neighbours near each other make a gather read near memory.

Three orders have won measured gathers (``python -m bench.orders``): communities wherever the graph has
them; reverse Cuthill-McKee on grids, bands and chains; a sort by degree on graphs with heavy tails and
nothing else to find. METIS gains no more than communities, for 30 times the time. Which of them a graph
needs, or none, is estimated from the graph: never timed, since the order decides the last bits of every
result.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import reverse_cuthill_mckee

from cython_kernels import ordering
from dorylus_hpc.graph import csr
from dorylus_hpc.graph.csr import Edges

ORDERS = ("auto", "none", "community", "rcm", "degree")

# Cuthill-McKee sorts the new neighbours of each vertex by insertion, quadratic in their number; and a
# vertex that is near everybody says nothing about who is near whom. Such hubs go first, unordered.
HUB_DEGREE = 4096

# An order costs the sum of its miss rates at these reaches, weighted: at the first a row is still in the
# nearest cache, at the others in the second and the shared one, if rows have some 100 values.
REACHES = (64, 1 << 13, 1 << 15)
WEIGHTS = np.array([1.0, 3.0, 3.0])

# The given order is kept unless another one saves this part of its cost: chance alone saves 2%.
GAIN = 0.05

# Cuthill-McKee reads all edges, communities a sample. Above so many edges it is not tried after
# communities that have saved half of the cost and have no finer structure for it to find: of the
# sources within them, so many were not used by the rows just before. Nor is it where hubs have so
# large a share of the entries, for everybody is near everybody by way of them.
FEW_EDGES = 1 << 20
PLAIN = 0.9
HUB_FACTOR = 4  # times the mean degree makes a hub
HUB_SHARE = 0.3

# Such a graph is sorted by degree if nothing else gains: hubs side by side are cheaper to keep in a
# cache, and rows of like length come one after the other. No reach tells that, so all that is asked
# of the misses is that they do not grow by more than this.
HARMLESS = 1.05


def vertex_order(inner: Edges, kind: str) -> np.ndarray:
    """Order the own vertices of a part by its inner edges.

    Parameters
    ----------
    inner : Edges
        Edges with both ends in the part, in any direction, n_own rows.
    kind : {'auto', 'none', 'community', 'rcm', 'degree'}
        'none' keeps the order; 'community' is `cython_kernels.ordering.community_order`; 'rcm' is
        reverse Cuthill-McKee (bandwidth-reducing); 'degree' puts those with most neighbours first;
        'auto' is the one of these with the least estimated cost of a gather.

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
    A. George, J. W. Liu, *Computer Solution of Large Sparse Positive Definite Systems*, 1981. By degree:
    V. Balaji, B. Lucia, "When is Graph Reordering an Optimization?", IISWC 2018.
    """
    if kind not in ORDERS:
        raise ValueError(f"unknown order {kind!r}; known: {', '.join(ORDERS)}")
    if kind == "none" or len(inner) == 0:
        return np.arange(inner.n_rows)
    pattern = _both_ways(inner)
    makers = {"community": _communities, "rcm": _banded, "degree": by_degree, "auto": cheapest_order}
    return makers[kind](pattern)


def cheapest_order(pattern: Edges) -> np.ndarray:
    """What `vertex_order` calls 'auto', of a symmetric pattern."""
    given = np.arange(pattern.n_rows)
    before = _cost(miss_rates(pattern, given))
    communities = _communities(pattern)
    rates = miss_rates(pattern, communities)
    cost, order = _cost(rates), communities
    heavy_tailed = _hub_share(pattern) >= HUB_SHARE
    promising = not heavy_tailed and (cost > before / 2 or rates[0] < PLAIN)
    if promising or len(pattern) <= FEW_EDGES:
        banded = _banded(pattern)
        banded_cost = _cost(miss_rates(pattern, banded))
        if banded_cost <= cost:
            cost, order = banded_cost, banded
    if cost < (1 - GAIN) * before:
        return order
    if heavy_tailed:
        falling = by_degree(pattern)
        if _cost(miss_rates(pattern, falling)) <= HARMLESS * before:
            return falling
    return given


def miss_rates(pattern: Edges, order: np.ndarray) -> np.ndarray:
    """Miss rates of a gather in this order at each of REACHES."""
    rows = np.ascontiguousarray(order, np.int32)
    return ordering.miss_rates(pattern.indptr, pattern.indices, rows, REACHES, validate=False)


def bandwidth_order(pattern: sp.csr_array) -> np.ndarray:
    """Reverse Cuthill-McKee of a symmetric pattern, hubs first."""
    degree = np.diff(pattern.indptr)
    hubs = np.flatnonzero(degree > HUB_DEGREE)
    if len(hubs) == 0:
        return np.asarray(reverse_cuthill_mckee(pattern, symmetric_mode=True))
    others = np.flatnonzero(degree <= HUB_DEGREE)
    inner = pattern[others][:, others]
    return np.concatenate([hubs, others[reverse_cuthill_mckee(inner, symmetric_mode=True)]])


def by_degree(pattern: Edges) -> np.ndarray:
    """Most neighbours first, equals in the given order."""
    return np.argsort(-np.diff(pattern.indptr), kind="stable")


def _hub_share(pattern: Edges) -> float:
    """Which part of the entries has a hub as its source."""
    degree = np.diff(pattern.indptr)
    return float(degree[degree > HUB_FACTOR * degree.mean()].sum() / len(pattern))


def _both_ways(inner: Edges) -> Edges:
    """The edges themselves if they are symmetric, as they mostly are; else with their mirror images."""
    if ordering.is_symmetric(inner.indptr, inner.indices, validate=False):
        return inner
    both = csr.symmetric_pattern(inner)
    return Edges(both.indptr.astype(np.int64), both.indices.astype(np.int32, copy=False))


def _communities(pattern: Edges) -> np.ndarray:
    return ordering.community_order(pattern.indptr, pattern.indices, validate=False)


def _banded(pattern: Edges) -> np.ndarray:
    return bandwidth_order(pattern.matrix(pattern.n_rows))


def _cost(rates: np.ndarray) -> float:
    return float(WEIGHTS @ rates)
