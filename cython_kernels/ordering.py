"""Orders of the vertices of a graph in which a gather reads memory that it has just read.

The graph is a square CSR pattern `indptr, indices` of n vertices: its values are of no account here.
An entry that is there twice counts twice, loops count for nothing. Best is a symmetric pattern; of any
other, a vertex knows only the neighbours in its own row.

`community_order` is the order, `miss_rates` the judge of any order, without a clock: what an order
does to a cache can be read off the graph, and is then the same on every machine. All of it is
deterministic, runs in one thread, and needs memory in proportion to n, not to the entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import _ordering, checks
from .aggregate import check_csr
from .checks import FloatArray, IntArray

SLOTS = 16  # neighbours looked at of each vertex, as in _ordering.pyx
ROUNDS = 8  # of label propagation, at most
SETTLED = 50  # fewer than one vertex in so many moved: no further round
WIDER = 16  # how much larger a group of groups may be
WINDOWS = 16  # samples of an order
WINDOW = 1 << 16  # entries of each
LONG_AGO = -(1 << 62)


@dataclass(frozen=True, eq=False)
class _Graph:
    """A level of the hierarchy: at most SLOTS weighted neighbours of each vertex, and its size."""

    starts: IntArray
    neighbours: IntArray
    weights: IntArray
    mass: IntArray  # vertices of the whole graph that are in each vertex of this one

    @property
    def n(self) -> int:
        return len(self.mass)


@dataclass(frozen=True, eq=False)
class _Groups:
    """Vertices in groups: group g is ``members[first[g] : first[g + 1]]``, and `label` says who is where."""

    label: IntArray
    first: IntArray
    members: IntArray

    @property
    def n(self) -> int:
        return len(self.first) - 1


def is_symmetric(indptr: IntArray, indices: IntArray, *, validate: bool = True) -> bool:
    """Whether each entry of a square pattern has its mirror image, as often as it is there itself.

    One pass over the entries, without memory: sums of hashes are compared, not entries. A symmetric
    pattern is always recognised; another one passes for symmetric with a chance of about 2**-60.

    Parameters
    ----------
    indptr, indices
        int64 [n + 1] and int32 [nnz].
    validate
        False skips the check of every entry, for a matrix that passed `check_csr` before.

    Returns
    -------
    bool

    Raises
    ------
    TypeError, ValueError
        The matrix is none, or is not square.
    """
    _check_pattern(indptr, indices, validate)
    return _ordering.asymmetry(indptr, indices) == 0


def communities(indptr: IntArray, indices: IntArray, *, largest: int, validate: bool = True) -> IntArray:
    """Group the vertices so that many edges stay within a group, none larger than `largest`.

    Label propagation: in a few rounds each vertex joins the group that most of its neighbours are in,
    by a sample of at most 16 of them, unless that group is full. The bound is what keeps one group from
    swallowing a graph with hubs. O(n) time and memory.

    Parameters
    ----------
    indptr, indices
        int64 [n + 1] and int32 [nnz].
    largest
        Most vertices in a group.
    validate
        As for `is_symmetric`.

    Returns
    -------
    numpy.ndarray
        int32 [n], the group of each vertex; groups are numbered by their first vertex.

    Raises
    ------
    TypeError, ValueError
        The matrix is none or is not square, or `largest` is not a positive integer.

    Notes
    -----
    U. N. Raghavan, R. Albert, S. Kumara, "Near linear time algorithm to detect community structures in
    large-scale networks", Physical Review E 76, 2007. With bounded sizes: H. Meyerhenke, P. Sanders,
    C. Schulz, "Partitioning complex networks via size-constrained clustering", SEA 2014.
    """
    _check_pattern(indptr, indices, validate)
    largest = checks.integer("largest", largest, 1, 2**31)
    return _propagate(_sample(indptr, indices), largest).label


def community_order(
    indptr: IntArray, indices: IntArray, *, largest: int = 2048, validate: bool = True
) -> IntArray:
    """Order the vertices by communities, and communities by communities of them, up to the whole.

    The groups of `communities` become the vertices of a smaller graph, which is grouped again with a
    bound 16 times as large, and so on until nothing joins. Groups are laid out one after the other, each
    with its groups one after the other: near in the order are those who share a group on a low level, on
    whatever scale the graph has structure. Rabbit order has the same aim. O(n log n) time at most, O(n)
    memory: 10 million entries of 200 000 vertices took 0.1 s.

    Parameters
    ----------
    indptr, indices, largest, validate
        As for `communities`. The default is what fits a second-level cache of 1 MB as rows of 128
        float32 values.

    Returns
    -------
    numpy.ndarray
        int32 [n]: vertex ``result[k]`` comes at place k.

    Raises
    ------
    TypeError, ValueError
        As `communities`.

    Notes
    -----
    J. Arai et al., "Rabbit Order: Just-in-time Parallel Reordering for Fast Graph Analysis", IPDPS 2016.

    Examples
    --------
    Renumber a SciPy matrix and the features, gather, and put the rows of the result back::

        from cython_kernels.ordering import community_order

        o = community_order(a.indptr.astype(np.int64), a.indices.astype(np.int32))
        b, y = a[o][:, o], x[o]  # vertex o[k] is now number k
        sums = gather(b.indptr.astype(np.int64), b.indices.astype(np.int32), b.data, y)
        out = np.empty_like(sums)
        out[o] = sums

    Labels and ids are renumbered as `x` is; an old number v becomes ``np.argsort(o)[v]``.
    """
    _check_pattern(indptr, indices, validate)
    bound = checks.integer("largest", largest, 1, 2**31)
    graph = _sample(indptr, indices)
    levels = [_propagate(graph, bound)]
    while _is_shrinking(graph, levels[-1]):
        graph = _contract(graph, levels[-1])
        bound = min(bound * WIDER, max(len(indptr) - 1, 1))
        levels.append(_propagate(graph, bound))
    order: IntArray = np.arange(levels[-1].n, dtype=np.int32)
    for groups in reversed(levels):
        order = _spread(groups, order)
    return order


def miss_rates(
    indptr: IntArray,
    indices: IntArray,
    order: IntArray,
    reaches: Sequence[int],
    *,
    validate: bool = True,
) -> FloatArray:
    """Estimate how often a gather over the rows in this order needs a source it has not used lately.

    16 windows of 65 536 entries, evenly spaced, stand for the whole; the first half of each warms up.
    After the last row comes the first one, as in the next gather: a small graph is walked twice.
    A use of a source is a miss of reach r if more than r entries have passed since its last use; r is
    about the number of rows that a cache holds, or more where some rows come again and again.
    O(n) time and memory.

    Parameters
    ----------
    indptr, indices
        int64 [n + 1] and int32 [nnz].
    order
        int32 [n]: the rows in the order they are gathered. A permutation; columns need no renumbering.
    reaches
        Rising positive integers.
    validate
        As for `is_symmetric`.

    Returns
    -------
    numpy.ndarray
        float64 [len(reaches)], each in 0 .. 1; 0 if there are no entries.

    Raises
    ------
    TypeError, ValueError
        The matrix is none or is not square, the order is no permutation, or the reaches do not rise.
    """
    n = _check_pattern(indptr, indices, validate)
    checks.array("order", order, "int32", (n,))
    if validate:
        checks.in_range("order", order, n, f"there are {n} rows")
        if np.bincount(order, minlength=n).max(initial=1) > 1:
            raise ValueError("order must be a permutation, got a vertex more than once")
    steps = [checks.integer("a reach", reach, 1, 2**31) for reach in reaches]
    if not steps or steps != sorted(set(steps)):
        raise ValueError(f"reaches must rise, got {list(reaches)}")
    missed = np.zeros(len(steps), np.int64)
    length = min(WINDOW, 2 * len(indices))
    windows = min(WINDOWS, len(indices) // WINDOW + 1)
    counted = _ordering.misses(
        indptr, indices, order, np.full(n, LONG_AGO), windows, length, np.array(steps, np.int64), missed
    )
    return missed / max(counted, 1)


def _check_pattern(indptr: IntArray, indices: IntArray, validate: bool) -> int:
    """Check a square matrix, as far as asked, and return its number of rows."""
    n = checks.csr_layout(indptr, indices)
    if validate:
        check_csr(indptr, indices, n_cols=n)
    return n


def _sample(indptr: IntArray, indices: IntArray) -> _Graph:
    """The lowest level: the graph with a sample of its edges."""
    n = len(indptr) - 1
    most = int(np.minimum(np.diff(indptr), SLOTS).sum())
    starts = np.empty(n + 1, np.int64)
    neighbours = np.empty(most + 1, np.int32)  # one more: where a loop is written before it is dropped
    _ordering.sample(indptr, indices, starts, neighbours)
    return _Graph(starts, neighbours, np.ones(most, np.int32), np.ones(n, np.int64))


def _propagate(graph: _Graph, bound: int) -> _Groups:
    """Group the vertices of a level."""
    label, size = np.arange(graph.n, dtype=np.int32), graph.mass.copy()
    count = np.zeros(graph.n, np.int32)
    for turn in range(ROUNDS):
        moved = _ordering.propagate(
            graph.starts, graph.neighbours, graph.weights, graph.mass, bound, label, size, count, turn << 32
        )
        if moved * SETTLED < graph.n:
            break
    first, members = np.empty(graph.n + 1, np.int64), np.empty(graph.n, np.int32)
    n_groups = _ordering.group(label, np.empty(graph.n, np.int32), first, members)
    return _Groups(label, first[: n_groups + 1].copy(), members)


def _is_shrinking(graph: _Graph, groups: _Groups) -> bool:
    """Whether enough joined for another level; vertices without neighbours never do."""
    able = int(np.count_nonzero(np.diff(graph.starts)))
    return groups.n > 1 and (graph.n - groups.n) * 20 > able


def _contract(graph: _Graph, groups: _Groups) -> _Graph:
    """The graph whose vertices are the groups."""
    starts = np.empty(groups.n + 1, np.int64)
    neighbours, weights = np.empty((2, groups.n * SLOTS), np.int32)
    count, touched = np.zeros(groups.n, np.int32), np.empty(groups.n, np.int32)
    _ordering.contract(
        graph.starts, graph.neighbours, graph.weights, groups.label, groups.first, groups.members,
        count, touched, starts, neighbours, weights,
    )  # fmt: skip
    return _Graph(starts, neighbours, weights, np.add.reduceat(graph.mass[groups.members], groups.first[:-1]))


def _spread(groups: _Groups, order: IntArray) -> IntArray:
    """The vertices of a level, given the order of their groups."""
    length = np.diff(groups.first)[order]
    shift = groups.first[order] - (np.cumsum(length) - length)
    return groups.members[np.repeat(shift, length) + np.arange(len(groups.members))]
