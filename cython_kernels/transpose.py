"""The transpose of a CSR matrix, made once: after it the adjoint of a gather is a gather itself.

`gather_adjoint` adds to rows that many rows share, so its threads split the columns: with 16 columns only
one works. Over the transpose every row of the result is summed by one thread, as ever the order of the
entries, so the same bits for any number of threads::

    indptr_t, indices_t, entries = transpose_csr(indptr, indices, n_cols=n_cols)
    gather(indptr_t, indices_t, data[entries], d_out)  # gather_adjoint(indptr, indices, data, d_out)
"""

from __future__ import annotations

import numpy as np

from . import _transpose, checks
from .checks import IntArray


def transpose_csr(
    indptr: IntArray, indices: IntArray, *, n_cols: int, num_threads: int = 1, validate: bool = True
) -> tuple[IntArray, IntArray, IntArray]:
    """Transpose the structure of a CSR matrix of shape (n_rows, n_cols).

    A stable counting sort: O(nnz + num_threads n_cols) time, and memory for num_threads n_cols numbers.

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
    indptr_t, indices_t
        int64 [n_cols + 1] and int32 [nnz]. The entries of a row of the transpose are in the order of the
        original rows, those of one original row in their order there.
    entries
        int64 [nnz]: the original position of each entry; ``data[entries]`` are its values.

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
    return indptr_t, indices_t, entries
