"""From the user's files and objects to a checked graph."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph import checks, csr, splits
from dorylus_hpc.graph.csr import Edges
from dorylus_hpc.graph.data import TEST, TRAIN, VALIDATION, GraphData

SET_KEYS = {TRAIN: "train_idx", VALIDATION: "val_idx", TEST: "test_idx"}
CSR_KEYS = ("x_indptr", "x_indices", "x_data", "x_shape")
LABEL_CSR_KEYS = ("y_indptr", "y_indices")
KNOWN_KEYS = {
    "indptr",
    "indices",
    "weights",
    "x",
    *CSR_KEYS,
    "y",
    *LABEL_CSR_KEYS,
    *SET_KEYS.values(),
    "splits",
    "ids",
    "meta",
}


def read_npz(path: str | os.PathLike[str], *, split: int | None = None, seed: int = 0) -> GraphData:
    """Read a graph from one ``.npz`` file.

    Keys: ``indptr, indices`` (out-edges in CSR form), ``weights`` (optional, one an edge), ``x``
    (n, f) or ``x_indptr, x_indices, x_data, x_shape``, ``y`` (whole numbers; -1 or NaN: unlabelled; or,
    where vertices have several classes, 0 and 1 in (n, classes)) or ``y_indptr, y_indices`` (the classes of
    each vertex), ``train_idx, val_idx, test_idx`` (indices or masks) or ``splits`` (k, n), ``ids`` (optional)
    and ``meta`` (optional JSON; ``name``, ``num_classes`` and ``classes`` are used).

    Parameters
    ----------
    path : path
    split : int, optional
        Row of ``splits``. By default the ``*_idx`` sets are used, or row 0 if there are none.
    seed : int
        For drawing a split where the file has none.

    Returns
    -------
    GraphData
        Edges as they are in the file, loops and repeated edges included, with sorted rows.

    Raises
    ------
    InputError
        Naming the file, the key, the position and the value that is wrong.
    """
    path = Path(path)
    with _open_npz(path) as file:
        meta, notes = _meta(file)
        edges = checks.structure(file["indptr"], file["indices"], file.where("indptr"), file.where("indices"))
        if "weights" in file:
            weights = checks.edge_weights(file["weights"], edges, file.where("weights"))
            edges = Edges(edges.indptr, edges.indices, weights)
        n = edges.n_rows
        labels, n_classes = _npz_labels(file, n, _meta_classes(meta, file))
        vertex_split, split_notes = _npz_split(file, split, labels, seed)
        unused = sorted(set(file.keys) - KNOWN_KEYS)
        notes += [f"key {key!r} is not used" for key in unused] + split_notes
        return _assemble(
            edges,
            _npz_features(file, n),
            labels,
            n_classes,
            vertex_split,
            checks.vertex_ids(file["ids"], n, file.where("ids")) if "ids" in file else None,
            name=str(meta.get("name", path.stem)),
            notes=notes,
            where=str(path),
        )


def from_arrays(
    adjacency: Any,
    features: Any,
    labels: Any,
    *,
    train: Any = None,
    validation: Any = None,
    test: Any = None,
    ids: Any = None,
    n_classes: int | None = None,
    name: str = "graph",
    seed: int = 0,
) -> GraphData:
    """Make a graph from a SciPy matrix and arrays.

    Parameters
    ----------
    adjacency : SciPy sparse matrix or array, shape (n, n)
        Entry [i, j] is the edge i -> j. Repeated entries stay repeated edges and explicit zeros stay
        edges of weight 0. If all values are one (or True), the graph is unweighted.
    features : array_like or SciPy sparse, shape (n, f)
    labels : array_like, shape (n,), or array_like or SciPy sparse, shape (n, classes)
        Whole numbers; -1 or NaN: unlabelled. Or, for vertices of several classes, 1 for each of them, 0 for
        the others and -1 or NaN where it is not known; unlabelled is a vertex of which nothing is known.
    train, validation, test : array_like, optional
        Indices or boolean masks. With none of them a 60/20/20 % split is drawn with `seed`.
    ids : array_like, shape (n,), optional
        The user's ids: whole numbers or text.
    n_classes : int, optional
        By default the largest label + 1, or the columns of `labels`.
    name : str
    seed : int

    Returns
    -------
    GraphData

    Raises
    ------
    InputError
        Naming the argument, the position and the value that is wrong.
    """
    edges = _scipy_edges(adjacency)
    n = edges.n_rows
    if sp.issparse(labels):
        checked, classes = checks.sparse_marks(sp.csr_array(labels), n, n_classes, "labels")
    else:
        checked, classes = checks.labels(labels, n, n_classes, "labels")
    given = {TRAIN: (train, "train"), VALIDATION: (validation, "validation"), TEST: (test, "test")}
    vertex_split, notes = _split_of_sets(given, checked, seed, "train, validation, test")
    return _assemble(
        edges,
        _features(features, n),
        checked,
        classes,
        vertex_split,
        None if ids is None else checks.vertex_ids(ids, n, "ids"),
        name=name,
        notes=notes,
        where="train",
    )


def _assemble(
    edges: Edges,
    features: Any,
    labels: np.ndarray,
    n_classes: int,
    split: np.ndarray,
    ids: np.ndarray | None,
    *,
    name: str,
    notes: list[str],
    where: str,
) -> GraphData:
    """The last checks, and canonical edges."""
    split, dropped = splits.labelled_only(split, labels, where)
    edges = csr.canonical(edges, edges.n_rows)
    return GraphData(
        n=edges.n_rows,
        indptr=edges.indptr,
        indices=edges.indices,
        weights=edges.weights,
        features=features,
        labels=labels,
        n_classes=n_classes,
        split=split,
        ids=np.arange(edges.n_rows, dtype=np.int64) if ids is None else ids,
        name=name,
        notes=(*notes, *dropped),
    )


def _split_of_sets(
    given: dict[int, tuple[Any, str]], labels: np.ndarray, seed: int, where: str
) -> tuple[np.ndarray, list[str]]:
    """A split from up to three sets; drawn if there is none at all."""
    sets = {value: pair for value, pair in given.items() if pair[0] is not None}
    if not sets:
        split, note = splits.draw(labels, seed)
        return split, [note]
    if TRAIN not in sets:
        checks.refuse(where, f"{given[TRAIN][1]} is missing, but {next(iter(sets.values()))[1]} is there")
    split, notes = splits.from_sets(sets, len(labels))
    return split, notes + [
        f"{given[value][1]} is missing: that set is empty" for value in given if value not in sets
    ]


# --- SciPy objects


def _scipy_edges(adjacency: Any) -> Edges:
    if not sp.issparse(adjacency):
        checks.refuse("adjacency", f"expected a SciPy sparse matrix, got {type(adjacency).__name__}")
    if adjacency.ndim != 2 or adjacency.shape[0] != adjacency.shape[1]:
        checks.refuse("adjacency", f"has shape {adjacency.shape}, expected a square matrix")
    n = checks.vertex_count(adjacency.shape[0], "adjacency")
    if adjacency.format == "coo":  # SciPy's own conversion would sum repeated entries
        rows = checks.columns(adjacency.row, None, n, "adjacency.row")
        cols = checks.columns(adjacency.col, None, n, "adjacency.col")
        indptr, order = csr.group(rows, n)
        edges, data = Edges(indptr, cols[order]), adjacency.data[order]
    else:
        matrix = adjacency.tocsr()
        edges = checks.structure(matrix.indptr, matrix.indices, "adjacency.indptr", "adjacency.indices")
        data = matrix.data
    weights = checks.edge_weights(data, edges, "adjacency.data")
    return edges if (weights == 1).all() else Edges(edges.indptr, edges.indices, weights)


def _features(features: Any, n: int) -> Any:
    if not sp.issparse(features):
        return checks.dense_features(features, n, "features")
    if features.ndim != 2:
        checks.refuse("features", f"has shape {features.shape}, expected ({n}, number of features)")
    matrix = sp.csr_array(features)
    return _checked_csr(matrix.indptr, matrix.indices, matrix.data, matrix.shape, n, ("features",) * 3)


def _checked_csr(
    indptr: Any, indices: Any, data: Any, shape: tuple[int, int], n: int, where: tuple[str, str, str]
) -> sp.csr_array:
    """A feature matrix from its CSR arrays; `where` names them."""
    indices = checks.integers(indices, where[1])
    starts = checks.row_starts(indptr, len(indices), where[0], where[1])
    if len(starts) != shape[0] + 1:
        checks.refuse(where[0], f"has {len(starts)} entries, expected rows + 1 = {shape[0] + 1}")
    indices = checks.columns(indices, starts, shape[1], where[1])
    if data.shape != indices.shape:
        checks.refuse(where[2], f"has shape {data.shape}, but {where[1]} has shape {indices.shape}")
    return checks.csr_features(csr.narrow(data, indices, starts, shape), n, where[2])


# --- npz files


@dataclass(frozen=True)
class _Npz:
    """An open npz file whose every failure names file and key."""

    path: Path
    file: Any

    @property
    def keys(self) -> list[str]:
        return list(self.file.files)

    def __contains__(self, key: str) -> bool:
        return key in self.file.files

    def where(self, key: str) -> str:
        return f"{self.path}: {key}"

    def __getitem__(self, key: str) -> np.ndarray:
        if key not in self:
            found = ", ".join(self.keys) or "nothing"
            raise InputError(f"{self.path}: key {key!r} is missing; the file has {found}")
        try:
            return np.asarray(self.file[key])
        except (
            OSError,
            ValueError,
            EOFError,
            MemoryError,
            RuntimeError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            if "pickle" in str(error).lower():
                checks.refuse(
                    self.where(key), "is a pickled (object) array, which is never loaded; save a plain array"
                )
            raise InputError(f"{self.where(key)}: cannot be read: {error}") from error


@contextmanager
def _open_npz(path: Path) -> Iterator[_Npz]:
    try:
        if path.is_file() and not zipfile.is_zipfile(path):
            raise InputError(f"{path}: not an .npz file (a zip archive of NumPy arrays), or a damaged one")
        file = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except InputError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    with file:
        yield _Npz(path, file)


def _meta(file: _Npz) -> tuple[dict[str, Any], list[str]]:
    """The JSON object in `meta`, if there is one."""
    if "meta" not in file:
        return {}, []
    try:
        meta = json.loads(str(file["meta"]))
    except ValueError:
        meta = None
    if isinstance(meta, dict):
        return meta, []
    return {}, ["key 'meta' is not used: it is not a JSON object"]


def _meta_classes(meta: dict[str, Any], file: _Npz) -> int | None:
    """The number of classes that `meta` states, as a number or as a list of names."""
    stated = {key: meta[key] for key in ("num_classes", "classes") if meta.get(key) is not None}
    counts = {key: len(value) if isinstance(value, list | dict) else value for key, value in stated.items()}
    if len(set(map(repr, counts.values()))) > 1:
        checks.refuse(
            file.where("meta"),
            f"num_classes is {counts['num_classes']}, but there are {counts['classes']} classes",
        )
    for key, count in counts.items():
        if type(count) is not int or count < 1:
            checks.refuse(
                file.where("meta"),
                f"{key} must be a whole number >= 1 or a list of names, got {stated[key]!r}",
            )
        return count
    return None


def _npz_features(file: _Npz, n: int) -> Any:
    sparse_keys = [key for key in CSR_KEYS if key in file]
    if "x" in file and sparse_keys:
        checks.refuse(
            str(file.path), f"has dense features (x) and sparse ones ({sparse_keys[0]}); keep one of them"
        )
    if not sparse_keys:
        return checks.dense_features(file["x"], n, file.where("x"))
    indptr, indices, data, shape = (file[key] for key in CSR_KEYS)
    shape = checks.integers(shape, file.where("x_shape"), length=2).tolist()
    if shape[0] != n or not 1 <= shape[1] < 2**31:
        checks.refuse(file.where("x_shape"), f"is {shape}, expected [{n}, number of features]")
    where = (file.where("x_indptr"), file.where("x_indices"), file.where("x_data"))
    return _checked_csr(indptr, indices, data, tuple(shape), n, where)


def _npz_labels(file: _Npz, n: int, n_classes: int | None) -> tuple[np.ndarray, int]:
    if not any(key in file for key in LABEL_CSR_KEYS):
        return checks.labels(file["y"], n, n_classes, file.where("y"))
    if "y" in file:
        checks.refuse(str(file.path), "has labels twice (y, and y_indptr with y_indices); keep one of them")
    indptr, indices = (file[key] for key in LABEL_CSR_KEYS)
    where = [file.where(key) for key in LABEL_CSR_KEYS]
    indices = checks.integers(indices, where[1])
    starts = checks.row_starts(indptr, len(indices), where[0], where[1])
    if len(starts) != n + 1:
        checks.refuse(where[0], f"has {len(starts)} entries, expected vertices + 1 = {n + 1}")
    width = int(indices.max(initial=-1)) + 1 if n_classes is None else n_classes
    indices = checks.columns(indices, starts, width, where[1])
    ones = np.ones(len(indices), np.uint8)
    return checks.sparse_marks(sp.csr_array((ones, indices, starts), shape=(n, width)), n, width, where[1])


def _npz_split(file: _Npz, row: int | None, labels: np.ndarray, seed: int) -> tuple[np.ndarray, list[str]]:
    """The split that was asked for; see `read_npz`."""
    has_sets = any(key in file for key in SET_KEYS.values())
    if row is not None and row != 0 and "splits" not in file:
        checks.refuse(str(file.path), f"split {row} was asked for, but the file has no key 'splits'")
    if "splits" in file and (row is not None or not has_sets):
        chosen = row or 0
        return splits.from_row(file["splits"], chosen, len(labels), file.where("splits")), [
            f"split {chosen} of `splits`"
        ]
    given = {value: (file[key] if key in file else None, file.where(key)) for value, key in SET_KEYS.items()}
    return _split_of_sets(given, labels, seed, str(file.path))
