"""Gather (GA) and its adjoint (dGA): the sparse half of a graph layer.

Both work on a CSR matrix A of shape (n_rows, n_cols) given as `indptr, indices, data`. Row i of the
result of `gather` is ::

    out[i] = row_scale[i] * (self_weight * source_scale[i] * x[i] + sum_e data[e] * source_scale[j] * x[j])

over the entries e of row i, with j = indices[e]. With `mean` the sum over e (not the self term) is
divided by the number of entries of the row. A GCN layer needs no value per edge this way: both
scales are 1/sqrt(degree + 1) and the self weight is 1 (Kipf and Welling, "Semi-supervised
classification with graph convolutional networks", ICLR 2017, eq. 2).

Sums are made in the dtype of `x`, those of bfloat16 in float32. No result depends on `num_threads`, on
the layout of `x` or on the instructions of the CPU, bit for bit (but for which of its bit patterns a NaN
has). `simd/isa.hpp` tells how that is done and why features are tiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _aggregate, checks, dispatch, matrices
from .bfloat16 import sum_dtype
from .checks import FloatArray, IntArray
from .layout import LAYOUTS, Tiles, choose_layout, empty, last_level_cache, tile_columns
from .matrices import Matrix, Result
from .transpose import Transposed, check_transposed, transpose_rows, values_of

MAX_COLUMNS = 2**31  # indices are int32
FACTOR_LINES = 8  # cache lines of columns that are multiplied by their factors at a time
# For gather_adjoint without a transpose to make one: bytes of a row of the result (if entries have values),
# and entries such a row.
LEAST_ROW = 512
LEAST_VALUED_ROW = 768
LEAST_ENTRIES = 4


def check_csr(indptr: IntArray, indices: IntArray, data: FloatArray | None = None, *, n_cols: int) -> None:
    """Check a CSR matrix through and through, once, so that kernels may be called with ``validate=False``.

    O(n_rows + nnz) time in one thread, O(n_rows) memory.

    Parameters
    ----------
    indptr
        int64 [n_rows + 1], from 0 to nnz, never decreasing.
    indices
        int32 [nnz], each in 0 .. n_cols - 1. Any order, duplicates allowed.
    data
        float32 or float64 [nnz], or None.
    n_cols
        Number of columns.

    Raises
    ------
    TypeError
        An array is none, or of another dtype.
    ValueError
        A layout that does not hold; the message names the first bad position and its value.
    """
    checks.csr_layout(indptr, indices)
    n_cols = checks.integer("n_cols", n_cols, 0, MAX_COLUMNS + 1)
    if data is not None:
        checks.array("data", data, checks.FLOATS, indices.shape)
    checks.monotone(indptr)
    checks.in_range("indices", indices, n_cols, f"the matrix has {n_cols} columns")


def gather(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray | None,
    x: Matrix,
    out: Matrix | None = None,
    *,
    row_scale: FloatArray | None = None,
    source_scale: FloatArray | None = None,
    self_weight: float = 0.0,
    mean: bool = False,
    accumulate: bool = False,
    rows: tuple[int, int] | None = None,
    layout: str = "auto",
    num_threads: int = 1,
    validate: bool = True,
) -> Result:
    """Sum the rows of `x` that each row of a CSR matrix names.

    Over the entries e of row i, with j = indices[e], ::

        own = self_weight * source_scale[i] * x[i]
        out[i] = row_scale[i] * (own + sum_e data[e] * source_scale[j] * x[j])

    With `data` alone it is the product of a SciPy matrix and `x`; `x` may be the weights of a layer and the
    matrix its sparse features. O(nnz f) time. A row of more than 8,192 entries is summed in pieces of that
    many, which threads share; the others are cut among the threads by their entries, not by their number.

    Parameters
    ----------
    indptr, indices
        int64 [n_rows + 1] and int32 [nnz]. Duplicate entries count each time.
    data
        One value per entry, of the dtype of the sums; None stands for ones.
    x
        [n_cols, f]: the rows of the sources, own rows first, ghosts after them; row-major, or `Tiles`.
        float32 or float64, summed in that dtype; or uint16, the bits of bfloat16 (`to_bfloat16`), summed in
        float32.
    out
        [n_rows, f] of the dtype of the sums, apart from every input; row-major, or `Tiles`. If None it is
        made, row-major; rows outside `rows` are then zero.
    row_scale
        [n_rows], of the dtype of the sums, or None.
    source_scale
        [n_cols], of the dtype of the sums, or None.
    self_weight
        Weight of a row's own `x`; other than 0 it needs n_cols >= n_rows.
    mean
        Divide the sum over the entries by their number; an empty row gives 0.
    accumulate
        Add to `out`, which must then be given, instead of overwriting it.
    rows
        (start, stop): compute and write only these rows. None: all.
    layout
        How a row-major `x` is read. ``rows``: as it is. ``tiles``: copied, a cache line of columns at a
        time, into one tile of scratch memory (64 bytes a source) and gathered from there. ``auto``: what
        `choose_layout` says for all rows; ``rows`` for some of them, whose work may not pay for a copy.
    num_threads
        Threads over pieces of the rows.
    validate
        False skips the check of every entry, for a matrix that passed `check_csr` before. The check runs in
        one thread: over few columns, with many threads, it takes longer than the sum.

    Returns
    -------
    numpy.ndarray or Tiles
        `out`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above, or an index out of range.

    Notes
    -----
    The GCN layer that scales and self weight stand for: T. N. Kipf, M. Welling, "Semi-supervised
    classification with graph convolutional networks", ICLR 2017, eq. 2.
    """
    n_cols, columns = _check_features("x", x)
    dtype = sum_dtype(x.dtype)
    n_rows = _check_matrix(indptr, indices, data, dtype, n_cols, validate)
    start, stop = checks.row_range(rows, n_rows)
    scales = _check_scales(row_scale, source_scale, self_weight, dtype, n_rows, n_cols)
    mean, accumulate = checks.flag("mean", mean), checks.flag("accumulate", accumulate)
    if out is None and accumulate:
        raise ValueError("accumulate=True adds to out, got out=None")
    result = _check_result(out, dtype, (n_rows, columns))
    checks.apart(
        "out", matrices.as_tiles(result), x=matrices.as_tiles(x), data=data, indptr=indptr, indices=indices,
        row_scale=row_scale, source_scale=source_scale,
    )  # fmt: skip
    if out is None and isinstance(result, np.ndarray):
        result[:start] = 0
        result[stop:] = 0
    scratch = _scratch(layout, indptr, indices, x, (start, stop) == (0, n_rows))
    # What is written past the caches does not push the tile out of them.
    stream = (
        scratch.size > 0 or isinstance(x, Tiles)
    ) and n_rows * columns * dtype.itemsize > last_level_cache()
    _aggregate.gather(
        indptr, indices, _values(data, dtype), matrices.as_tiles(x), matrices.as_tiles(result), columns,
        *scales, mean, accumulate, stream, start, stop, scratch,
        dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return result


def gather_max(
    indptr: IntArray,
    indices: IntArray,
    x: Matrix,
    out: FloatArray | None = None,
    *,
    source: IntArray | None = None,
    rows: tuple[int, int] | None = None,
    layout: str = "auto",
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Take the largest value of each column over the sources that each row names.

    O(nnz f) time. A row is one thread's, however long: more threads do not help where one row has most of
    the entries. The pooling aggregator of GraphSAGE (Hamilton, Ying, Leskovec, "Inductive representation
    learning on large graphs", NeurIPS 2017, eq. 3).

    Parameters
    ----------
    indptr, indices, rows, layout, num_threads, validate
        As for `gather`.
    x
        [n_cols, f], as for `gather`.
    out
        [n_rows, f] of the dtype of the sums, row-major; made if None, rows outside `rows` then being 0.
        A row without entries becomes 0. A NaN counts as the largest value.
    source
        int32 [n_rows, f], or None: is given the source of each value, of equal ones that of the first
        entry; -1 for a row without entries. `gather_max_adjoint` needs it.

    Returns
    -------
    numpy.ndarray
        `out`.

    Raises
    ------
    TypeError, ValueError
        As `gather`.
    """
    n_cols, columns = _check_features("x", x)
    dtype = sum_dtype(x.dtype)
    n_rows = _check_matrix(indptr, indices, None, dtype, n_cols, validate)
    start, stop = checks.row_range(rows, n_rows)
    result = checks.output("out", out, dtype, (n_rows, columns))
    if source is None:
        sources = np.empty((0, 0), np.int32)
    else:
        sources = checks.array("source", source, "int32", (n_rows, columns), writable=True)
    checks.apart("out", result, x=matrices.as_tiles(x), indptr=indptr, indices=indices, source=source)
    checks.apart("source", sources, x=matrices.as_tiles(x), indptr=indptr, indices=indices)
    if out is None:
        result[:start] = 0
        result[stop:] = 0
    scratch = _scratch(layout, indptr, indices, x, (start, stop) == (0, n_rows))
    _aggregate.gather_max(
        indptr, indices, matrices.as_tiles(x), result, sources, start, stop, scratch,
        dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return result


def gather_max_adjoint(
    source: IntArray,
    d_out: FloatArray,
    d_x: FloatArray | None = None,
    *,
    n_sources: int,
    accumulate: bool = False,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Give each gradient to the source that its value came from.

    O((n_rows + n_sources) f) time: no edge is read. Threads split the columns, in strips of about 16: no
    more than ceil(f / 16) of them have work, and with up to 16 columns more than one thread does not help.

    Parameters
    ----------
    source
        int32 [n_rows, f], as `gather_max` left it; -1 names nobody.
    d_out
        float32 or float64 [n_rows, f]: the gradient of the result of `gather_max`.
    d_x
        [n_sources, f] of the dtype of `d_out`, apart from the inputs; made if None.
    n_sources
        Number of rows of `x`.
    accumulate
        Add to `d_x`, which must then be given, instead of overwriting all of it.
    rows
        (start, stop): only these rows of `d_out` contribute. None: all.
    num_threads
        Threads over strips of columns, at most ceil(f / 16) of them.
    validate
        False skips the check of every source.

    Returns
    -------
    numpy.ndarray
        `d_x`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above, or a source out of range.
    """
    checks.array("d_out", d_out, checks.FLOATS, (None, None))
    checks.array("source", source, "int32", d_out.shape)
    n_sources = checks.integer("n_sources", n_sources, 0, MAX_COLUMNS + 1)
    start, stop = checks.row_range(rows, d_out.shape[0])
    accumulate = checks.flag("accumulate", accumulate)
    if d_x is None and accumulate:
        raise ValueError("accumulate=True adds to d_x, got d_x=None")
    result = checks.output("d_x", d_x, d_out.dtype, (n_sources, d_out.shape[1]))
    checks.apart("d_x", result, d_out=d_out, source=source)
    if validate and source.size and (source.min() < -1 or source.max() >= n_sources):
        row, column = np.argwhere((source < -1) | (source >= n_sources))[0]
        raise ValueError(
            f"source[{row}, {column}] = {source[row, column]} is outside -1..{n_sources - 1} "
            f"(there are {n_sources} source rows)"
        )
    _aggregate.gather_max_adjoint(source, d_out, result, accumulate, start, stop, checks.threads(num_threads))
    return result


def gather_adjoint(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray | None,
    d_out: FloatArray,
    d_x: FloatArray | None = None,
    *,
    n_sources: int,
    row_scale: FloatArray | None = None,
    source_scale: FloatArray | None = None,
    self_weight: float = 0.0,
    mean: bool = False,
    accumulate: bool = False,
    rows: tuple[int, int] | None = None,
    transposed: Transposed | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Apply the transpose of `gather` over the same CSR matrix: the gradient of `x` from that of `out`.

    O((nnz + n_rows + n_sources) f) time. Every entry adds to the row of its source, in the order of rows and
    entries: the same bits with `transposed` and without, with any threads, and for one call or several that
    accumulate over following `rows`.

    Give `transposed` where the matrix is used more than once: rows are then read, by tiles where
    `choose_layout` says so, and not added to, which is up to three times faster. Values, if there are any,
    are put into its order in every call: O(nnz) memory. So are, by pieces of columns, rows of `d_out` that
    have factors (`row_scale`, `mean`) or are read by tiles: 64 to 512 bytes a row. A row of the result is one
    thread's: more threads do not help where one source has most of the entries.

    Without it, threads split the sources, and each reads all of `indices`. Where the result is larger than
    the caches and 128 float32 wide (192 with values), the matrix is transposed within the call, with
    8 n_sources bytes a thread and 4 to 12 nnz bytes of memory.

    Parameters
    ----------
    indptr, indices, data, row_scale, source_scale, self_weight, mean
        As they were given to `gather`; n_cols is `n_sources`.
    d_out
        float32 or float64 [n_rows, f].
    d_x
        [n_sources, f] of the dtype of `d_out`, apart from every input; made if None.
    n_sources
        Number of rows of `x`.
    accumulate
        Add to `d_x`, which must then be given, instead of overwriting all of it.
    rows
        (start, stop): only these rows of `d_out` contribute. None: all.
    transposed
        ``transpose_csr(indptr, indices, n_cols=n_sources)``, or None.
    num_threads
        Threads over ranges of sources; over strips of 16 columns if there are few sources.
    validate
        False skips the check of every entry, for a matrix that passed `check_csr` before, and for what
        `transpose_csr` made of it: to check that, with random reads, may take longer than to use it.

    Returns
    -------
    numpy.ndarray
        `d_x`.

    Raises
    ------
    TypeError, ValueError
        As `gather`.
    """
    checks.array("d_out", d_out, checks.FLOATS, (None, None))
    n_sources = checks.integer("n_sources", n_sources, 0, MAX_COLUMNS + 1)
    n_rows = _check_matrix(indptr, indices, data, d_out.dtype, n_sources, validate)
    checks.array("d_out", d_out, checks.FLOATS, (n_rows, None))
    start, stop = checks.row_range(rows, n_rows)
    row_factors, source_factors, self_weight = _check_scales(
        row_scale, source_scale, self_weight, d_out.dtype, n_rows, n_sources
    )
    mean, accumulate = checks.flag("mean", mean), checks.flag("accumulate", accumulate)
    if d_x is None and accumulate:
        raise ValueError("accumulate=True adds to d_x, got d_x=None")
    threads = checks.threads(num_threads)
    inputs: dict[str, object] = {}
    if transposed is not None:
        check_transposed(transposed, indptr, indices, n_sources, threads, validate)
        inputs = {f"transposed.{name}": array for name, array in transposed._asdict().items()}
    result = (
        empty((n_sources, d_out.shape[1]), d_out.dtype)
        if d_x is None
        else checks.output("d_x", d_x, d_out.dtype, (n_sources, d_out.shape[1]))
    )
    checks.apart(
        "d_x", result, d_out=d_out, data=data, indptr=indptr, indices=indices,
        row_scale=row_scale, source_scale=source_scale, **inputs,
    )  # fmt: skip
    values = _values(data, d_out.dtype)
    if transposed is not None:
        turned = transposed.indptr, transposed.indices, values_of(transposed, values, source_factors, threads)
    elif n_rows <= MAX_COLUMNS and _pays_to_transpose(
        int(indptr[stop] - indptr[start]), result, len(values) > 0
    ):
        turned = transpose_rows(indptr, indices, values, source_factors, (start, stop), n_sources, threads)
    else:
        _aggregate.gather_adjoint(
            indptr, indices, values, d_out, result, row_factors, source_factors, self_weight,
            mean, accumulate, start, stop, dispatch.level(), threads,
        )  # fmt: skip
        return result
    factors = mean or len(row_factors) > 0
    scratch = _gradient_scratch(*turned[:2], d_out, factors, (start, stop) == (0, n_rows))
    stream = scratch.size > 0 and result.nbytes > last_level_cache()
    _aggregate.gather_transposed(
        indptr, *turned, d_out, result, row_factors, source_factors, self_weight,
        mean, accumulate, stream, start, stop, scratch, dispatch.level(), threads,
    )  # fmt: skip
    return result


def _pays_to_transpose(entries: int, d_x: FloatArray, valued: bool) -> bool:
    """Tell whether to transpose within a call: the bits of the result are the same either way.

    Measured (python -m bench.kernels, uniform and R-MAT graphs): a line of `d_x` that is not in a cache costs
    0.5 to 1 ns an entry more to add to than one of `d_out` costs to read; transposing costs 4 to 5 ns an
    entry, 6 to 7 with its value, and threads share either. A row that is longer than a few lines
    repays it.
    """
    return (
        d_x.nbytes > last_level_cache()
        and d_x.shape[1] * d_x.itemsize >= (LEAST_VALUED_ROW if valued else LEAST_ROW)
        and entries >= LEAST_ENTRIES * d_x.shape[0]
    )


def _gradient_scratch(
    indptr: IntArray, indices: IntArray, d_out: FloatArray, factors: bool, whole: bool
) -> FloatArray:
    """Make a tile to read `d_out` from, if it is to be read by tiles or its rows have factors."""
    if whole and choose_layout(indptr, indices, d_out.shape, d_out.dtype) == "tiles":
        columns = tile_columns(d_out.dtype)
    elif factors:
        columns = min(d_out.shape[1], FACTOR_LINES * tile_columns(d_out.dtype))
    else:
        return np.empty((0, 0), d_out.dtype)
    return empty((d_out.shape[0], columns), d_out.dtype)


def _check_matrix(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray | None,
    dtype: np.dtype[Any],
    n_cols: int,
    validate: bool,
) -> int:
    """Check the matrix, as far as asked, and return its number of rows."""
    n_rows = checks.csr_layout(indptr, indices)
    if data is not None:
        checks.array("data", data, dtype, indices.shape)
    if validate:
        checks.monotone(indptr)
        checks.in_range("indices", indices, n_cols, f"there are {n_cols} source rows")
    return n_rows


def _check_scales(
    row_scale: FloatArray | None,
    source_scale: FloatArray | None,
    self_weight: float,
    dtype: np.dtype[Any],
    n_rows: int,
    n_cols: int,
) -> tuple[FloatArray, FloatArray, float]:
    """Check the factors around the sum and put them as the loops want them."""
    self_weight = checks.real("self_weight", self_weight, dtype)
    if self_weight != 0 and n_cols < n_rows:
        raise ValueError(f"self_weight needs a source row for each row, got {n_cols} for {n_rows}")
    return (
        checks.optional("row_scale", row_scale, dtype, n_rows),
        checks.optional("source_scale", source_scale, dtype, n_cols),
        self_weight,
    )


def _check_features(name: str, x: Matrix) -> tuple[int, int]:
    """Check a feature matrix of either layout and return its shape."""
    checked = matrices.matrix(name, x, (*checks.FLOATS, "uint16"), (None, None))
    return checked.shape[0], checked.shape[1]


def _check_result(out: Matrix | None, dtype: np.dtype[Any], shape: tuple[int, int]) -> Matrix:
    """Check an output of either layout, or make a row-major one."""
    return (
        empty(shape, dtype)
        if out is None
        else matrices.matrix("out", out, (dtype.name,), shape, writable=True)
    )


def _scratch(layout: str, indptr: IntArray, indices: IntArray, x: Matrix, whole: bool) -> FloatArray:
    """Make a tile for a row-major matrix that is to be read by tiles; an empty array if none is needed."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout must be {', '.join(LAYOUTS)}, got {layout!r}")
    none = np.empty((0, 0), x.dtype)
    if isinstance(x, Tiles) or layout == "rows":
        return none
    if layout == "auto" and not (whole and choose_layout(indptr, indices, x.shape, x.dtype) == "tiles"):
        return none
    return empty((x.shape[0], tile_columns(x.dtype)), x.dtype)


def _values(data: FloatArray | None, dtype: np.dtype[Any]) -> FloatArray:
    """Give the loops an empty array for ones."""
    return np.empty(0, dtype) if data is None else data
