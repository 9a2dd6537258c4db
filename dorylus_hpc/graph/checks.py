"""Refusing wrong input: every error says which file and key, where in it, which value, what to do.

Each function takes an array as it came and `where` ("cora.npz: indptr", or an argument's name), and
returns it in the project's own types.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import scipy.sparse as sp

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph import csr
from dorylus_hpc.graph.csr import Edges
from dorylus_hpc.graph.data import MAX_VERTICES, UNKNOWN_MARK, UNLABELLED

ROWS_AT_ONCE = 65536  # feature rows scanned at a time, so that the scan needs no second copy
EXACT_FLOAT32 = 2**24  # integers up to here are exact in float32


def refuse(where: str, problem: str) -> NoReturn:
    """Raise an InputError of the usual form."""
    raise InputError(f"{where}: {problem}")


def first(mask: np.ndarray) -> int | None:
    """Position of the first true value, or None."""
    position = int(mask.argmax()) if mask.size else 0
    return position if mask.size and mask[position] else None


def integers(value: Any, where: str, *, length: int | None = None) -> np.ndarray:
    """A 1-D integer array, of the given length."""
    array = np.asarray(value)
    if array.ndim != 1:
        refuse(where, f"has shape {array.shape}, expected one dimension")
    if array.dtype.kind not in "iu" and array.size:
        refuse(where, f"has dtype {array.dtype}, expected integers")
    if length is not None and len(array) != length:
        refuse(where, f"has {len(array)} entries, expected {length}")
    return array if array.dtype.kind in "iu" else array.astype(np.int64)


def vertex_count(n: int, where: str) -> int:
    """A number of vertices that can be worked with."""
    if n < 1:
        refuse(where, "the graph has no vertices")
    if n > MAX_VERTICES:
        refuse(where, f"the graph has {n} vertices; at most {MAX_VERTICES} (2^31 - 1) are possible")
    return n


def row_starts(indptr: Any, entries: int, where: str, entries_name: str) -> np.ndarray:
    """Row starts of a CSR structure: 0, never decreasing, ending at the number of entries; int64."""
    starts = integers(indptr, where)
    if len(starts) < 1 or starts[0] != 0:
        refuse(where, f"must start with 0, got {starts[:1].tolist() or 'no entries'}")
    if (bad := first(starts[1:] < starts[:-1])) is not None:
        refuse(
            where, f"position {bad + 1}: {starts[bad + 1]} after {starts[bad]}; row starts must not decrease"
        )
    if starts[-1] != entries:
        refuse(where, f"ends with {starts[-1]}, but {entries_name} has {entries} entries")
    return starts.astype(np.int64, copy=False)


def columns(indices: Any, starts: np.ndarray | None, n_cols: int, where: str) -> np.ndarray:
    """Column indices, of a CSR structure with these row starts if given; int32."""
    found = integers(indices, where)
    if found.size and (found.min() < 0 or found.max() >= n_cols):
        bad = int(np.argmax((found < 0) | (found >= n_cols)))
        row = "" if starts is None else f" (row {row_at(starts, bad)})"
        refuse(where, f"position {bad}{row}: {found[bad]} is not in 0..{n_cols - 1}")
    return found.astype(np.int32, copy=False)


def row_at(starts: np.ndarray, position: int) -> int:
    """The row that an entry belongs to."""
    return int(np.searchsorted(starts, position, side="right")) - 1


def structure(indptr: Any, indices: Any, where_indptr: str, where_indices: str) -> Edges:
    """The edges of a graph in CSR form, not yet sorted."""
    entries = integers(indices, where_indices)
    starts = row_starts(indptr, len(entries), where_indptr, "indices")
    n = vertex_count(len(starts) - 1, where_indptr)
    return Edges(starts, columns(entries, starts, n, where_indices))


def edge_weights(weights: Any, edges: Edges, where: str) -> np.ndarray:
    """Finite, non-negative weights, one an edge; float64."""
    array = np.asarray(weights)
    if array.dtype.kind not in "iufb":
        refuse(where, f"has dtype {array.dtype}, expected numbers")
    if array.shape != (len(edges),):
        refuse(where, f"has shape {array.shape}, expected one weight for each of the {len(edges)} edges")
    array = array.astype(np.float64, copy=False)
    if (bad := first(~(np.isfinite(array) & (array >= 0)))) is not None:
        pair = f"edge {row_at(edges.indptr, bad)} -> {edges.indices[bad]}"
        refuse(where, f"position {bad} ({pair}): weight {array[bad]} is not a finite number >= 0")
    return array


# --- features


def dense_features(x: Any, n: int, where: str) -> np.ndarray:
    """A finite (n, f) matrix, C-contiguous; float32, or float64 where the values need or have it."""
    array = np.asarray(x)
    _feature_shape(array.shape, n, where)
    array = np.ascontiguousarray(_feature_values(array, where))
    for start in range(0, n, ROWS_AT_ONCE):
        finite = np.isfinite(array[start : start + ROWS_AT_ONCE])
        if not finite.all():
            row, column = np.unravel_index(int(np.argmin(finite)), finite.shape)
            _refuse_value(array[start + row, column], start + int(row), int(column), where)
    return array


def csr_features(matrix: sp.csr_array, n: int, where: str) -> sp.csr_array:
    """A finite CSR matrix (n, f) whose structure has been checked; repeated entries are summed."""
    _feature_shape(matrix.shape, n, where)
    data = _feature_values(matrix.data, where)
    if (bad := first(~np.isfinite(data))) is not None:
        _refuse_value(data[bad], row_at(matrix.indptr, bad), int(matrix.indices[bad]), where)
    checked = csr.narrow(data, matrix.indices, matrix.indptr, matrix.shape)
    if not checked.has_canonical_format:
        checked = checked.copy()  # the caller's arrays stay as they are
        checked.sum_duplicates()
    return checked


def _feature_shape(shape: tuple[int, ...], n: int, where: str) -> None:
    if len(shape) != 2 or shape[0] != n:
        refuse(where, f"has shape {shape}, expected ({n}, number of features)")
    if shape[1] < 1:
        refuse(where, "has no columns; at least one feature is needed")


def _feature_values(array: np.ndarray, where: str) -> np.ndarray:
    """The values as float32 or float64."""
    kind = array.dtype.kind
    if kind not in "iufb" or array.dtype.itemsize > 8:
        refuse(where, f"has dtype {array.dtype}, expected real numbers of at most 64 bits")
    if kind == "f":
        return array.astype(np.float64 if array.dtype.itemsize == 8 else np.float32, copy=False)
    exact = kind == "b" or (array.max(initial=0) <= EXACT_FLOAT32 and array.min(initial=0) >= -EXACT_FLOAT32)
    return array.astype(np.float32 if exact else np.float64)


def _refuse_value(value: Any, vertex: int, column: int, where: str) -> NoReturn:
    refuse(where, f"vertex {vertex}, column {column}: {value} is not a finite number; fill or drop it first")


# --- labels and ids


def labels(y: Any, n: int, n_classes: int | None, where: str) -> tuple[np.ndarray, int]:
    """Labels in a form of `GraphData`, told by the shape, and the number of classes."""
    array = np.asarray(y)
    if array.ndim == 2 and array.shape[1] > 1:
        return marks(array, n, n_classes, where)
    return class_labels(array, n, n_classes, where)


def class_labels(y: Any, n: int, n_classes: int | None, where: str) -> tuple[np.ndarray, int]:
    """Labels of one class a vertex as int32 (-1 or NaN: unlabelled), and the number of classes."""
    array = np.asarray(y)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.shape != (n,):
        refuse(
            where,
            f"has shape {array.shape}, expected one label for each of the {n} vertices, "
            f"or ({n}, number of classes)",
        )
    array = _whole_labels(array, where)
    if (bad := first(array < UNLABELLED)) is not None:
        refuse(where, f"vertex {bad}: label {array[bad]} is negative; only -1 (unlabelled) may be")
    n_classes = _class_count(array, n_classes, where)
    return array.astype(np.int32), n_classes


def marks(y: np.ndarray, n: int, n_classes: int | None, where: str) -> tuple[np.ndarray, int]:
    """Labels of any number of classes a vertex as uint8 (255: not known), and the number of classes."""
    if y.shape[0] != n:
        refuse(where, f"has shape {y.shape}, expected one row for each of the {n} vertices")
    if n_classes is not None and n_classes != y.shape[1]:
        refuse(where, f"has {y.shape[1]} columns, but the number of classes is {n_classes}")
    if y.dtype.kind not in "iufb":
        refuse(where, f"has dtype {y.dtype}, expected 0 and 1 (-1 or NaN: not known)")
    checked = np.empty(y.shape, np.uint8)
    for start in range(0, n, ROWS_AT_ONCE):
        rows = y[start : start + ROWS_AT_ONCE]
        unknown: np.ndarray = np.isnan(rows) if y.dtype.kind == "f" else np.zeros(rows.shape, bool)
        if y.dtype.kind in "if":
            unknown |= rows == UNLABELLED
        if (bad := first(~((rows == 0) | (rows == 1) | unknown).ravel())) is not None:
            row, column = divmod(bad, y.shape[1])
            refuse(where, f"vertex {start + row}, class {column}: {rows[row, column]} is not 0 or 1")
        checked[start : start + ROWS_AT_ONCE] = np.where(unknown, UNKNOWN_MARK, rows == 1)
    return checked, int(y.shape[1])


def sparse_marks(matrix: sp.csr_array, n: int, n_classes: int | None, where: str) -> tuple[np.ndarray, int]:
    """As `marks`, of a CSR matrix with a stored 1 for each class of a vertex: all vertices are labelled."""
    if matrix.ndim != 2 or matrix.shape[0] != n or matrix.shape[1] < 2:
        refuse(where, f"has shape {matrix.shape}, expected ({n}, number of classes), at least 2 classes")
    starts = row_starts(matrix.indptr, len(matrix.indices), f"{where}.indptr", f"{where}.indices")
    columns(matrix.indices, starts, matrix.shape[1], f"{where}.indices")
    values: Any = matrix.data
    if (bad := first((values != 0) & (values != 1))) is not None:
        place = f"vertex {row_at(matrix.indptr, bad)}, class {matrix.indices[bad]}"
        refuse(where, f"{place}: {values[bad]} is not 0 or 1")
    dense = np.zeros(matrix.shape, np.uint8)
    rows = np.repeat(np.arange(n), np.diff(matrix.indptr))
    is_set = values == 1
    dense[rows[is_set], matrix.indices[is_set]] = 1
    return marks(dense, n, n_classes, where)


def _whole_labels(array: np.ndarray, where: str) -> np.ndarray:
    """Integer labels; float ones must be whole or NaN."""
    if array.dtype.kind == "b":
        return array.astype(np.int32)
    if array.dtype.kind in "iu":
        return array
    if array.dtype.kind != "f":
        refuse(where, f"has dtype {array.dtype}, expected whole numbers (-1 or NaN: unlabelled)")
    unlabelled = np.isnan(array)
    filled = np.where(unlabelled, UNLABELLED, array)
    if (bad := first((filled != np.floor(filled)) | (np.abs(filled) > 2**53))) is not None:
        refuse(where, f"vertex {bad}: label {array[bad]} is not a whole number")
    return filled.astype(np.int64)


def _class_count(labels: np.ndarray, n_classes: int | None, where: str) -> int:
    """The given number of classes, which no label may reach; or one more than the largest label."""
    labelled = int(np.count_nonzero(labels >= 0))
    largest = int(labels.max(initial=0)) if labelled else -1
    vertex = int(labels.argmax())
    if n_classes is None:
        if largest >= labelled > 0:
            refuse(
                where,
                f"vertex {vertex}: label {largest} would mean {largest + 1} classes for {labelled} labelled "
                "vertices: are these ids? Number the classes from 0, or give the number of classes",
            )
        return largest + 1
    if (
        not isinstance(n_classes, int | np.integer)
        or isinstance(n_classes, bool)
        or not 1 <= n_classes < 2**31
    ):
        refuse(where, f"the number of classes must be a whole number >= 1, got {n_classes!r}")
    if largest >= n_classes:
        refuse(where, f"vertex {vertex}: label {largest} is not in 0..{n_classes - 1} ({n_classes} classes)")
    return int(n_classes)


def vertex_ids(ids: Any, n: int, where: str) -> np.ndarray:
    """The user's ids, each once: int64, or strings."""
    array = np.asarray(ids)
    if array.shape != (n,):
        refuse(where, f"has shape {array.shape}, expected one id for each of the {n} vertices")
    if array.dtype.kind in "iu":
        if array.dtype == np.uint64 and (bad := first(array > np.uint64(2**63 - 1))) is not None:
            refuse(
                where, f"position {bad}: id {array[bad]} does not fit in 64 bits with sign; give ids as text"
            )
        array = array.astype(np.int64)
    else:
        array = _text_ids(array, where)
    order = np.argsort(array, kind="stable")
    if (again := first(array[order[1:]] == array[order[:-1]])) is not None:
        pair = f"positions {order[again]} and {order[again + 1]}"
        refuse(where, f"{pair}: id {array[order[again]].item()!r} occurs twice")
    return array


def _text_ids(array: np.ndarray, where: str) -> np.ndarray:
    """Ids as unicode text, all of which UTF-8 can hold."""
    if (
        array.dtype.kind == "O"
        and (bad := first(np.array([not isinstance(v, str) for v in array]))) is not None
    ):
        refuse(
            where,
            f"position {bad}: id {array[bad]!r} is neither a whole number nor text, or the kinds are mixed",
        )
    if array.dtype.kind not in "OUST":
        refuse(where, f"has dtype {array.dtype}, expected whole numbers or text")
    try:
        text = (
            np.char.decode(array, "utf-8") if array.dtype.kind == "S" else np.array(array.tolist(), np.str_)
        )
        np.char.encode(text, "utf-8")
    except UnicodeError as error:
        raise InputError(f"{where}: an id is not valid UTF-8: {error}") from error
    return text
