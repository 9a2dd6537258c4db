"""The slow twins of `cython_kernels.ordering`: the same names and arguments, in plain Python.

Lists, dictionaries and sets where the loops have arrays; `validate` has no effect and nothing is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import cycle

import numpy as np

from . import ordering
from .checks import FloatArray, IntArray

WORD = 2**64
HEAVIEST = 1 << 26

Neighbours = list[list[tuple[int, int]]]  # of each vertex: (neighbour, weight)


def is_symmetric(indptr: IntArray, indices: IntArray, *, validate: bool = True) -> bool:
    """Twin of `ordering.is_symmetric`: count the pairs."""
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)).tolist()
    pairs = Counter(zip(rows, indices.tolist(), strict=True))
    return pairs == Counter({(j, i): times for (i, j), times in pairs.items()})


def communities(indptr: IntArray, indices: IntArray, *, largest: int, validate: bool = True) -> IntArray:
    """Twin of `ordering.communities`."""
    graph = _sample(indptr, indices)
    return np.array(_propagate(graph, [1] * len(graph), largest), np.int32)


def community_order(
    indptr: IntArray, indices: IntArray, *, largest: int = 2048, validate: bool = True
) -> IntArray:
    """Twin of `ordering.community_order`: vertices sorted by their groups on all levels, highest first."""
    graph = _sample(indptr, indices)
    n, bound, mass = len(graph), largest, [1] * len(graph)
    path = [[v] for v in range(n)]  # groups of a vertex, lowest level first
    while True:
        label = _propagate(graph, mass, bound)
        for groups in path:
            groups.append(label[groups[-1]])
        n_groups = len(set(label))
        able = sum(map(bool, graph))
        if n_groups <= 1 or (len(graph) - n_groups) * 20 <= able:
            return np.array(sorted(range(n), key=lambda v: path[v][::-1]), np.int32)
        graph, mass = _contract(graph, mass, label, n_groups)
        bound = min(bound * ordering.WIDER, max(n, 1))


def miss_rates(
    indptr: IntArray, indices: IntArray, order: IntArray, reaches: Sequence[int], *, validate: bool = True
) -> FloatArray:
    """Twin of `ordering.miss_rates`: for each entry that counts, look for its source before it."""
    length = min(ordering.WINDOW, 2 * len(indices))
    windows = min(ordering.WINDOWS, len(indices) // ordering.WINDOW + 1)
    before = np.cumsum([0, *np.diff(indptr)[order]])  # entries before each row
    gaps: list[float] = []
    for window in range(windows):
        read: list[int] = []
        first = int(np.searchsorted(before, window * len(indices) // windows))
        rows = cycle(np.roll(order, -first).tolist())
        while len(read) < length:
            row = next(rows)
            for source in indices[indptr[row] : indptr[row + 1]].tolist():
                if len(read) >= length // 2:
                    gaps.append(read[::-1].index(source) + 1 if source in read else np.inf)
                read.append(source)
    missed = [sum(gap > reach for gap in gaps) for reach in reaches]
    return np.array(missed) / max(len(gaps), 1)


def _sample(indptr: IntArray, indices: IntArray) -> Neighbours:
    graph = []
    for i in range(len(indptr) - 1):
        row = indices[indptr[i] : indptr[i + 1]].tolist()
        taken = min(len(row), ordering.SLOTS)
        picked = [row[k * len(row) // taken] for k in range(taken)]
        graph.append([(j, 1) for j in picked if j != i])
    return graph


def _propagate(graph: Neighbours, mass: list[int], bound: int) -> list[int]:
    label, size = list(range(len(graph))), Counter(dict(enumerate(mass)))
    for turn in range(ordering.ROUNDS):
        moved = 0
        for i, row in enumerate(graph):
            weight: Counter[int] = Counter()
            for j, w in row:
                weight[label[j]] += w
            at = (_mixed((turn << 32) + i) >> 32) * len(row) >> 32
            own = label[i]
            room = [label[j] for j, _ in row[at:] + row[:at] if size[label[j]] + mass[i] <= bound]
            best = max([own, *room], key=lambda group: weight[group])  # of equals the first
            if best != own:
                size[own] -= mass[i]
                size[best] += mass[i]
                label[i] = best
                moved += 1
        if moved * ordering.SETTLED < len(graph):
            break
    number = {group: k for k, group in enumerate(dict.fromkeys(label))}
    return [number[group] for group in label]


def _contract(
    graph: Neighbours, mass: list[int], label: list[int], n_groups: int
) -> tuple[Neighbours, list[int]]:
    weight: list[Counter[int]] = [Counter() for _ in range(n_groups)]
    size = [0] * n_groups
    for i, row in enumerate(graph):
        size[label[i]] += mass[i]
        for j, w in row:
            if label[j] != label[i]:
                weight[label[i]][label[j]] = min(weight[label[i]][label[j]] + w, HEAVIEST)
    return [one.most_common(ordering.SLOTS) for one in weight], size


def _mixed(key: int) -> int:
    """The finaliser of SplitMix64."""
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB % WORD
    return key ^ (key >> 31)
