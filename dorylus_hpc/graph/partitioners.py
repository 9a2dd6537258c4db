"""Who owns which vertex: METIS, hash, range, or a file.

METIS is given a private copy of the graph that it can work with: both directions of every edge, no
loops, repeated edges merged into weights, no isolated vertices. What it returns is not trusted either:
parts it left empty are filled, and isolated vertices go to the lightest parts. METIS balances the
numbers of vertices and does not promise connected parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph import csr
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.order import bandwidth_order

PARTITIONERS = ("metis", "hash", "range", "file:PATH")

# Below so many vertices a part, METIS' k-way scheme leaves parts empty; bisection does far better, and
# for a handful of vertices a part even that fails where cutting a good order into runs does not.
RUNS_BELOW = 3
BISECTION_BELOW = 50
BISECTION_PARTS = 8


def partition(graph: GraphData, parts: int, kind: str = "metis", seed: int = 0) -> np.ndarray:
    """Assign every vertex to a part.

    Parameters
    ----------
    graph : GraphData
    parts : int
    kind : str
        'metis', 'hash', 'range' or 'file:PATH' (``.npy`` or text, one part a line in the order of the
        input). Only a file may leave parts empty.
    seed : int
        For METIS and the hash.

    Returns
    -------
    ndarray of int32, shape (n,)
        Part of every vertex.

    Raises
    ------
    InputError
        For more parts than vertices, an unknown kind, or a wrong owner file.

    Notes
    -----
    G. Karypis, V. Kumar, *A fast and high quality multilevel scheme for partitioning irregular
    graphs*, SIAM J. Sci. Comput. 20(1), 1998.
    """
    if parts < 1:
        raise InputError(f"--parts {parts}: at least one part is needed")
    if kind == "file" or kind.startswith("file:"):
        return read_owners(kind.removeprefix("file").removeprefix(":"), graph.n, parts)
    if kind == "stream":
        raise InputError("--partitioner stream: not available in this version; use metis, hash or range")
    if kind not in PARTITIONERS:
        raise InputError(f"--partitioner {kind}: unknown; known: {', '.join(PARTITIONERS)}")
    if parts > graph.n:
        raise InputError(
            f"--parts {parts}: more parts than the graph's {graph.n} vertices; use at most {graph.n}, "
            "or an owner file (file:PATH) that leaves parts empty"
        )
    if kind == "metis":
        owner = metis_owners(graph, parts, seed)
    elif kind == "hash":
        owner = hash_owners(graph.n, parts, seed)
    else:
        owner = range_owners(graph.n, parts)
    return fill_empty(owner.astype(np.int32, copy=False), parts)


def range_owners(n: int, parts: int) -> np.ndarray:
    """Contiguous ranges of vertices, equal to within one."""
    return np.arange(n, dtype=np.int64) * parts // n


def hash_owners(n: int, parts: int, seed: int) -> np.ndarray:
    """A fixed hash of vertex and seed, the same on every machine."""
    salt = _mix64(np.array([seed % 2**64], np.uint64))
    return _mix64(np.arange(n, dtype=np.uint64) ^ salt) % np.uint64(parts)


def _mix64(x: np.ndarray) -> np.ndarray:
    """The splitmix64 step and finaliser (S. Vigna, public domain)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fill_empty(owner: np.ndarray, parts: int) -> np.ndarray:
    """Give every empty part one vertex of the largest part (parts <= vertices)."""
    sizes = np.bincount(owner, minlength=parts)
    empty = np.flatnonzero(sizes == 0)
    owner = owner.copy() if len(empty) else owner
    for part in empty:
        largest = int(sizes.argmax())
        owner[np.flatnonzero(owner == largest)[-1]] = part
        sizes[largest] -= 1
        sizes[part] = 1
    return owner


# --- METIS


def metis_owners(graph: GraphData, parts: int, seed: int) -> np.ndarray:
    """METIS on the vertices that have neighbours, the others to the lightest parts; may leave parts empty."""
    owner = np.zeros(graph.n, np.int32)
    if parts == 1:
        return owner
    pattern = csr.symmetric_pattern(graph.edges)
    degree = np.diff(pattern.indptr)
    connected = np.flatnonzero(degree)
    isolated = np.flatnonzero(degree == 0)
    if len(connected) < len(degree):
        pattern = _without_empty_rows(pattern, connected)
    if len(connected) < RUNS_BELOW * parts:
        order = bandwidth_order(pattern) if len(connected) else connected
        owner[connected[order]] = range_owners(len(connected), parts) if len(connected) else 0
    else:
        owner[connected] = _metis(pattern, parts, seed)
    sizes = np.bincount(owner[connected], minlength=parts)
    owner[isolated] = np.repeat(np.arange(parts), level(sizes, len(isolated)))
    return owner


def _without_empty_rows(pattern: sp.csr_array, rows: np.ndarray) -> sp.csr_array:
    """The matrix over the given rows and columns, which hold all its entries."""
    number = np.zeros(pattern.shape[0], pattern.indices.dtype)
    number[rows] = np.arange(len(rows))
    starts = np.concatenate([pattern.indptr[rows], pattern.indptr[-1:]])
    return csr.narrow(pattern.data, number[pattern.indices], starts, (len(rows), len(rows)))


def _metis(pattern: sp.csr_array, parts: int, seed: int) -> Any:
    try:
        import pymetis
    except ImportError as error:
        raise InputError(
            f"--partitioner metis: pymetis cannot be imported ({error}): "
            "pip install pymetis, or use hash or range"
        ) from error
    wide = pymetis.zero_copy_dtype()
    uniform = pattern.data.min() == pattern.data.max()
    few = parts <= BISECTION_PARTS or pattern.shape[0] < BISECTION_BELOW * parts
    try:
        cut = pymetis.part_graph(
            parts,
            pymetis.CSRAdjacency(pattern.indptr.astype(wide), pattern.indices.astype(wide)),
            eweights=None if uniform else pattern.data.astype(wide),
            recursive=few,
            options=pymetis.Options(seed=seed % 2**31),
        )
    except (RuntimeError, MemoryError) as error:
        raise InputError(f"--partitioner metis: METIS failed: {error}; use hash or range") from error
    return np.asarray(cut.vertex_part)


def level(sizes: np.ndarray, extra: int) -> np.ndarray:
    """How many of `extra` things each part gets so that the smallest parts are filled up first."""
    order = np.argsort(sizes, kind="stable")
    ordered = sizes[order].astype(np.int64)
    # cost[k]: what it takes to lift the k + 1 smallest parts to the size of the largest of them
    cost = ordered * np.arange(1, len(sizes) + 1) - np.cumsum(ordered)
    lifted = int(np.searchsorted(cost, extra, side="right"))
    height, rest = divmod(extra - int(cost[lifted - 1]), lifted)
    added = np.zeros(len(sizes), np.int64)
    added[order[:lifted]] = ordered[lifted - 1] + height - ordered[:lifted]
    added[order[:rest]] += 1
    return added


# --- owner files


def read_owners(path: str, n: int, parts: int) -> np.ndarray:
    """Owners from a ``.npy`` file or a text file with one part a line; parts may be empty.

    Raises
    ------
    InputError
        For a file that cannot be read, has not n entries, or has an entry that is not a part; names
        the position or line and the value.
    """
    if not path:
        raise InputError("--partitioner file: needs a path, as in file:owners.txt")
    try:
        with open(path, "rb") as file:
            binary = file.read(6) == b"\x93NUMPY"
        if binary:
            owners, place, shift = _npy_owners(path), "position", 0
        else:
            owners, place, shift = _text_owners(path), "line", 1
    except OSError as error:
        raise InputError(f"{path}: cannot read the owner file: {error.strerror or error}") from error
    if len(owners) != n:
        raise InputError(f"{path}: has {len(owners)} entries, expected one for each of the {n} vertices")
    wrong = (owners < 0) | (owners >= parts)
    if wrong.any():
        bad = int(wrong.argmax())
        raise InputError(
            f"{path}: {place} {bad + shift}: part {owners[bad]} is not in 0..{parts - 1} (--parts {parts})"
        )
    return owners.astype(np.int32)


def _npy_owners(path: str) -> np.ndarray:
    try:
        owners = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if owners.ndim != 1 or owners.dtype.kind not in "iu":
        raise InputError(
            f"{path}: is {owners.dtype} of shape {owners.shape}, expected integers of one dimension"
        )
    return np.asarray(owners)


def _text_owners(path: str) -> np.ndarray:
    lines = Path(path).read_bytes().splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    try:
        return np.array([int(line) for line in lines], np.int64)
    except (ValueError, OverflowError):
        pass
    for number, line in enumerate(lines, 1):
        try:
            np.int64(int(line))
        except (ValueError, OverflowError):
            text = line[:40].decode("utf-8", "replace")
            raise InputError(f"{path}: line {number}: {text!r} is not a part number") from None
    raise AssertionError("one of the lines was refused")
