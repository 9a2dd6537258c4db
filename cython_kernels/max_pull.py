"""The gradient of `gather_max` as a gather over the reversed edges, for rows that come from elsewhere.

`gather_max_adjoint` gives each gradient to the row that its value came from. Where that row is another
process's, it is turned round: a row looks, among those it was read by, for the values that came from itself.
So it must be told, with the gradients, where each value came from. Both travel as one *packed* row ::

    packed[v] = [d_out[v, 0] .. d_out[v, f - 1], id of the source of out[v, 0] .. of out[v, f - 1]]

in which the ids are the bits of integers of the size of the gradients: int32 beside float32, int64 beside
float64. They may be copied, and nothing else.
"""

from __future__ import annotations

import numpy as np

from . import _max_pull, checks, dispatch
from .aggregate import MAX_COLUMNS
from .checks import FloatArray, IntArray


def pack_max(
    source: IntArray,
    d_out: FloatArray,
    ids: IntArray,
    out: FloatArray | None = None,
    *,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Put each gradient beside the id of the source that its value came from.

    O(n f) time.

    Parameters
    ----------
    source
        int32 [n, f], as `gather_max` left it; -1 names nobody.
    d_out
        float32 or float64 [n, f]: the gradient of the result of `gather_max`.
    ids
        int64 [n_sources]: of everything that was read, 0 .. 2**31 - 1, each once.
    out
        [n or more, 2 f] of the dtype of `d_out`; made if None, with n rows, those outside `rows` being 0.
    rows
        (start, stop): only these rows. None: all.
    num_threads
        Threads over pieces of the rows.
    validate
        False skips the check of every source and id.

    Returns
    -------
    numpy.ndarray
        `out`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above, or a source or an id out of range.
    """
    checks.array("d_out", d_out, checks.FLOATS, (None, None))
    checks.array("source", source, "int32", d_out.shape)
    checks.array("ids", ids, "int64", (None,))
    n, f = d_out.shape
    start, stop = checks.row_range(rows, n)
    if out is None:
        out = np.zeros((n, 2 * f), d_out.dtype)
    checks.array("out", out, d_out.dtype, (None, 2 * f), writable=True)
    if len(out) < n:
        raise ValueError(f"out must have the {n} rows of d_out at least, got {len(out)}")
    checks.apart("out", out, source=source, d_out=d_out, ids=ids)
    if validate:
        checks.in_range("ids", ids, MAX_COLUMNS, "ids are of 31 bits")
        if source.size and (source.min() < -1 or source.max() >= len(ids)):
            row, column = np.argwhere((source < -1) | (source >= len(ids)))[0]
            raise ValueError(
                f"source[{row}, {column}] = {source[row, column]} is outside -1..{len(ids) - 1} "
                f"(there are {len(ids)} source rows)"
            )
    keys: IntArray = out.view(np.int32 if out.dtype == np.float32 else np.int64)
    _max_pull.pack_max(source, d_out, ids, out, keys, start, stop, checks.threads(num_threads))
    return out


def gather_max_pull(
    indptr: IntArray,
    indices: IntArray,
    packed: FloatArray,
    ids: IntArray,
    d_x: FloatArray | None = None,
    *,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Add up, column by column, the gradients of those values among a row's entries that came from it.

    O(nnz f) time. Entries are added in their order; of equal ones next to each other the first counts.

    Parameters
    ----------
    indptr, indices
        int64 [n_rows + 1] and int32 [nnz]: the transpose of what was given to `gather_max`, repeated entries
        next to each other.
    packed
        [n_cols, 2 f], as `pack_max` made it.
    ids
        int64 [n_rows]: of the rows, 0 .. 2**31 - 1, as there.
    d_x
        [n_rows, f] of the dtype of `packed`, apart from the inputs; made if None, rows outside `rows` being
        0.
    rows
        (start, stop): compute and write only these rows. None: all.
    num_threads
        Threads over pieces of the rows; the result does not depend on it.
    validate
        False skips the check of every entry and id.

    Returns
    -------
    numpy.ndarray
        `d_x`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above, or an index out of range.
    """
    checks.array("packed", packed, checks.FLOATS, (None, None))
    n_rows = checks.csr_layout(indptr, indices)
    if packed.shape[1] % 2:
        raise ValueError(f"packed must have an even number of columns, got shape {packed.shape}")
    checks.array("ids", ids, "int64", (n_rows,))
    start, stop = checks.row_range(rows, n_rows)
    if validate:
        checks.monotone(indptr)
        checks.in_range("indices", indices, packed.shape[0], f"there are {packed.shape[0]} source rows")
        checks.in_range("ids", ids, MAX_COLUMNS, "ids are of 31 bits")
    if d_x is None:
        d_x = np.zeros((n_rows, packed.shape[1] // 2), packed.dtype)
    checks.array("d_x", d_x, packed.dtype, (n_rows, packed.shape[1] // 2), writable=True)
    checks.apart("d_x", d_x, packed=packed, ids=ids, indptr=indptr, indices=indices)
    _max_pull.gather_max_pull(
        indptr, indices, packed, ids, d_x, start, stop, dispatch.level(), checks.threads(num_threads)
    )
    return d_x
