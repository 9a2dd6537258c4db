"""The transpose of a CSR matrix, made once: after it the adjoint of a gather is a gather itself.

`gather_adjoint` adds to rows that many rows share, so its threads split the columns: with 16 columns only
one works. Over the transpose a row of the result is summed in the order of the entries, so the same bits
for any number of threads::

    indptr_t, indices_t, entries = transpose_csr(indptr, indices, n_cols=n_cols)
    gather(indptr_t, indices_t, data[entries], d_out)  # gather_adjoint(indptr, indices, data, d_out)

The two scales change places, ``row_scale=source_scale, source_scale=row_scale``, and `self_weight` stays (of
a matrix that is not square it may be refused: `gather` wants a source row for each row). `mean` divides by
the degree in the matrix itself, so it is not passed on: multiply that row scale by 1/degree (of empty rows
anything finite) ::

    degree = np.maximum(np.diff(indptr), 1).astype(d_out.dtype)
    gather(indptr_t, indices_t, data[entries], d_out, row_scale=source_scale, source_scale=row_scale / degree)

which holds without a self weight: `mean` does not divide the self term, while a scale does. With one, put
1/degree into the values instead: ``np.repeat(1 / degree, np.diff(indptr))[entries]``, times those of `data`.
"""

from __future__ import annotations

import numpy as np

from . import _transpose, checks
from .checks import IntArray


def transpose_csr(
    indptr: IntArray, indices: IntArray, *, n_cols: int, num_threads: int = 1, validate: bool = True
) -> tuple[IntArray, IntArray, IntArray]:
    """Transpose the structure of a CSR matrix of shape (n_rows, n_cols).

    A stable counting sort: O(nnz + num_threads n_cols) time, and memory for num_threads n_cols numbers: more
    threads do not help where that is more than nnz. With ``data[entries]`` for the values, `gather` over the
    result is `gather_adjoint` over the matrix: `row_scale` and `source_scale` change places, and `mean`
    becomes 1/degree within the new `source_scale` (`cython_kernels.transpose` has the calls).

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
        original rows, those of one original row in their order there: so its columns are sorted.
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
