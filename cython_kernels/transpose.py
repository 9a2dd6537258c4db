"""The transpose of a CSR matrix, made once: after it the adjoint of a gather is a gather itself.

`gather_adjoint` adds to rows that many rows share. Given the transpose it reads, for each row of its result,
the rows that add to it: the same sums in the same order, so the same bits, and faster ::

    transposed = transpose_csr(indptr, indices, n_cols=n_cols, num_threads=threads)  # once
    gather_adjoint(indptr, indices, data, d_out, n_sources=n_cols, transposed=transposed)  # in every step

Other kernels take the transpose as the matrix that it is, with ``data[transposed.entries]`` for its values. A
`gather` over it with the two scales in each other's place is an adjoint, too (not the same bits). Its `mean`
would divide by degrees of the transpose, though: those of the matrix are factors of what is gathered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import _transpose, checks
from .checks import FloatArray, IntArray


class Transposed(NamedTuple):
    """A transposed matrix, without values: what `transpose_csr` makes and `gather_adjoint` takes.

    Attributes
    ----------
    indptr, indices
        int64 [n_cols + 1] and int32 [nnz]. The entries of a row are in the order of the original rows, those
        of one original row in their order there: so the columns of a row are sorted.
    entries
        int64 [nnz]: the original position of each entry; ``data[entries]`` are its values.
    """

    indptr: IntArray
    indices: IntArray
    entries: IntArray


def transpose_csr(
    indptr: IntArray, indices: IntArray, *, n_cols: int, num_threads: int = 1, validate: bool = True
) -> Transposed:
    """Transpose the structure of a CSR matrix of shape (n_rows, n_cols).

    A stable counting sort: O(nnz + num_threads n_cols) time, and memory for num_threads n_cols numbers: more
    threads do not help where that is more than nnz. `gather_adjoint` is faster with it.

    Parameters
    ----------
    indptr, indices
        int64 [n_rows + 1] and int32 [nnz]. Any order, duplicates allowed.
    n_cols
        Number of columns.
    num_threads
        Threads over pieces of the rows; the result does not depend on it.
    validate
        False skips the check of every entry, for a matrix that passed `check_csr` before.

    Returns
    -------
    Transposed
        A tuple of three new arrays: indptr, indices and the original position of each entry.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.
    """
    n_rows = checks.csr_layout(indptr, indices)
    n_cols = checks.integer("n_cols", n_cols, 0, 2**31 + 1)
    if n_rows > 2**31:
        raise ValueError(f"rows must be numbers of int32, got {n_rows} rows")
    if validate:
        checks.monotone(indptr)
        checks.in_range("indices", indices, n_cols, f"the matrix has {n_cols} columns")
    threads = min(checks.threads(num_threads), max(1, n_rows))
    indptr_t = np.empty(n_cols + 1, np.int64)
    indices_t = np.empty(len(indices), np.int32)
    entries = np.empty(len(indices), np.int64)
    begin = np.zeros((threads, n_cols), np.int64)
    _transpose.transpose_csr(indptr, indices, indptr_t, indices_t, entries, begin)
    return Transposed(indptr_t, indices_t, entries)


def check_transposed(
    transposed: object, indptr: IntArray, indices: IntArray, n_cols: int, num_threads: int, validate: bool
) -> Transposed:
    """Require the transpose of a matrix that is checked itself; entry by entry, as far as asked."""
    if not isinstance(transposed, Transposed):
        raise TypeError(f"transposed must be a Transposed, got {checks.describe(transposed)}")
    lengths = (("int64", n_cols + 1), ("int32", len(indices)), ("int64", len(indices)))
    for name, value, (dtype, length) in zip(Transposed._fields, transposed, lengths, strict=True):
        checks.array(f"transposed.{name}", value, dtype, (length,))
    if transposed.indptr[0] != 0 or transposed.indptr[-1] != len(indices):
        raise ValueError(
            f"transposed.indptr must run from 0 to the number of entries ({len(indices)}), "
            f"got {transposed.indptr[0]} to {transposed.indptr[-1]}"
        )
    if validate:
        checks.monotone(transposed.indptr, "transposed.indptr")
        wrong = np.empty(max(1, min(num_threads, n_cols)), np.int64)
        _transpose.first_wrong(indptr, indices, *transposed, wrong)
        first = int(wrong.min())
        if first < len(indices):
            row, entry = transposed.indices[first], transposed.entries[first]
            raise ValueError(
                "transposed is not the transpose of this matrix, as transpose_csr makes it: "
                f"its entry {first} comes from row {row}, entry {entry}"
            )
    return transposed


def values_of(
    transposed: Transposed, data: FloatArray, source_scale: FloatArray, num_threads: int
) -> FloatArray:
    """Put values into the order of the transpose, times the scales of its rows; empty arrays are absent."""
    if len(data) == 0:
        return data
    values = np.empty_like(data)
    _transpose.permute(transposed.indptr, transposed.entries, data, source_scale, values, num_threads)
    return values


def transpose_rows(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray,
    source_scale: FloatArray,
    rows: tuple[int, int],
    n_cols: int,
    num_threads: int,
) -> tuple[IntArray, IntArray, FloatArray]:
    """Transpose some rows of a checked matrix, with their values times the scales of the columns."""
    start, stop = rows
    stored = int(indptr[stop] - indptr[start])
    indptr_t, indices_t = np.empty(n_cols + 1, np.int64), np.empty(stored, np.int32)
    values_t = np.empty(stored if len(data) else 0, data.dtype)
    threads = max(1, min(num_threads, stop - start, stored // max(1, n_cols)))
    begin = np.zeros((threads, n_cols), np.int64)
    _transpose.transpose_rows(
        indptr, indices, data, source_scale, start, stop, indptr_t, indices_t, values_t, begin
    )
    return indptr_t, indices_t, values_t
