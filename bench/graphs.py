"""Graphs that kernels are measured on: generated from a seed at any scale, and real ones from a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import scipy.sparse as sp

RMAT = (0.57, 0.19, 0.19)  # Graph500's a, b, c
COMMUNITY = 500  # vertices of a planted community


@dataclass(frozen=True, eq=False)
class Graph:
    """A square CSR pattern of n vertices: int64 `indptr`, int32 `indices`, sorted within a row."""

    name: str
    indptr: np.ndarray
    indices: np.ndarray

    @property
    def n(self) -> int:
        return len(self.indptr) - 1

    @property
    def nnz(self) -> int:
        return len(self.indices)

    @cached_property
    def degrees(self) -> np.ndarray:
        return np.diff(self.indptr)

    @cached_property
    def transposed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The transposed pattern, and where each of its entries stands in this one."""
        places = sp.csr_array((np.arange(self.nnz), self.indices, self.indptr), shape=(self.n, self.n))
        other = places.T.tocsr()
        return other.indptr.astype(np.int64), other.indices.astype(np.int32), other.data

    def describe(self) -> dict[str, object]:
        """What a reader of the results must know of it."""
        return {
            "name": self.name,
            "vertices": self.n,
            "entries": self.nnz,
            "largest_degree": int(self.degrees.max(initial=0)),
            "empty_rows": int((self.degrees == 0).sum()),
        }


def from_pairs(name: str, n: int, rows: np.ndarray, columns: np.ndarray) -> Graph:
    """Make a graph of pairs in any order; a pair that is there twice counts twice."""
    keys = rows.astype(np.int64) * n + columns
    keys.sort()
    rows, columns = np.divmod(keys, n)
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=n), out=indptr[1:])
    return Graph(name, indptr, columns.astype(np.int32))


def uniform(name: str, scale: float, *, vertices: int, entries: int, seed: int = 0) -> Graph:
    """Both ends of every entry anywhere: no locality, no hubs."""
    rng = np.random.default_rng(seed)
    n, m = scaled(vertices, scale), scaled(entries, scale)
    return from_pairs(name, n, rng.integers(n, size=m), rng.integers(n, size=m))


def rmat(name: str, scale: float, *, levels: int, entries: int, seed: int = 0) -> Graph:
    """Hubs, many empty rows: recursive quadrants (Chakrabarti, Zhan, Faloutsos, SDM 2004), ids permuted."""
    rng = np.random.default_rng(seed)
    levels = max(1, levels + round(np.log2(scale)))
    m = scaled(entries, scale)
    rows, columns = np.zeros(m, np.int64), np.zeros(m, np.int64)
    for _ in range(levels):
        quadrant = np.searchsorted(np.cumsum(RMAT), rng.random(m))
        rows, columns = rows * 2 + (quadrant >> 1), columns * 2 + (quadrant & 1)
    ids = rng.permutation(1 << levels)
    return from_pairs(name, 1 << levels, ids[rows], ids[columns])


def communities(
    name: str, scale: float, *, vertices: int, entries: int, mixing: float, seed: int = 0
) -> Graph:
    """Planted communities: a share `mixing` of the entries lead anywhere; ids shuffled, so no locality."""
    rng = np.random.default_rng(seed)
    n, m = scaled(vertices, scale), scaled(entries, scale)
    rows, columns, _ = planted_pairs(n, m, mixing, rng)
    return from_pairs(name, n, rows, columns)


def planted_pairs(
    n: int, m: int, mixing: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both ends of the m entries of planted communities, and the community of each of the n vertices."""
    size = min(COMMUNITY, n)
    rows = rng.integers(n, size=m)
    inside = np.minimum(rows // size * size + rng.integers(size, size=m), n - 1)
    columns = np.where(rng.random(m) < mixing, rng.integers(n, size=m), inside)
    ids = rng.permutation(n)
    home = np.empty(n, np.int64)
    home[ids] = np.arange(n) // size
    return ids[rows], ids[columns], home


def scaled(count: int, scale: float) -> int:
    """Shrink a count, but not to nothing."""
    return max(2, round(count * scale))


def awkward() -> Graph:
    """A small graph with what kernels trip over: a hub, empty rows, loops, repeated entries, a last row."""
    rng = np.random.default_rng(7)
    rows, columns = rng.integers(300, size=3000), rng.integers(300, size=3000)
    kept = rows % 10 != 3
    hub = np.full(2500, 5)
    loops = np.arange(0, 300, 7)
    return from_pairs(
        "awkward",
        300,
        np.concatenate([rows[kept], hub, loops, rows[kept][:50]]),
        np.concatenate([columns[kept], rng.integers(300, size=2500), loops, columns[kept][:50]]),
    )


def real(path: Path) -> Graph:
    """The graph of a file as it is; needs dorylus_hpc, but neither MPI nor what partitioning needs."""
    from dorylus_hpc.graph.readers import read_npz

    data = read_npz(path)
    return Graph(path.stem, data.indptr, data.indices)


GENERATED: dict[str, Callable[[float], Graph]] = {
    "uniform": partial(uniform, "uniform", vertices=200_000, entries=10_000_000),
    "rmat": partial(rmat, "rmat", levels=18, entries=8_000_000),
    "communities": partial(communities, "communities", vertices=200_000, entries=10_000_000, mixing=0.2),
    "uniform-58k": partial(uniform, "uniform-58k", vertices=58_000, entries=10_000_000),
    "uniform-500k": partial(uniform, "uniform-500k", vertices=500_000, entries=10_000_000),
}
