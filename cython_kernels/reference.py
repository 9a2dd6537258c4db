"""The slow twin of every door: the same names and arguments, in NumPy and SciPy.

Written for the reader and for tests, independently of the loops: sums are made in float64 and
rounded once, masks come from a generator of their own. `num_threads` and `validate` have no effect,
and nothing is checked. Needs SciPy, which the kernels do not.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, diags_array
from scipy.special import expit, log_expit, log_softmax

from .checks import Bfloat16Array, FloatArray, IntArray, StoredArray
from .graph_attention import AttentionSaved
from .graph_attention_v2 import AttentionV2Saved
from .layout import Tiles
from .matrices import Matrix, Result
from .transpose import Transposed

Uint64Array = npt.NDArray[np.uint64]
LOW = np.uint64(0xFFFFFFFF)


def check_csr(indptr: IntArray, indices: IntArray, data: FloatArray | None = None, *, n_cols: int) -> None:
    """Twin of `cython_kernels.check_csr`: entry by entry."""
    position = 0
    for start, stop in pairwise(indptr):
        if start != position or stop < start:
            raise ValueError(f"indptr: {stop} after {start}, expected to go on at {position}")
        position = stop
    if len(indptr) == 0 or indptr[0] != 0 or position != len(indices):
        raise ValueError(f"indptr must run from 0 to {len(indices)}")
    for at, column in enumerate(indices):
        if not 0 <= column < n_cols:
            raise ValueError(f"indices[{at}] = {column} is outside 0..{n_cols - 1}")
    if data is not None and len(data) != len(indices):
        raise ValueError(f"data has {len(data)} values for {len(indices)} indices")


def _operator(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray | None,
    n_cols: int,
    row_scale: FloatArray | None,
    source_scale: FloatArray | None,
    self_weight: float,
    mean: bool,
    rows: tuple[int, int] | None,
) -> csr_array:
    """Build the float64 matrix that a gather applies; rows outside the range are empty."""
    n_rows = len(indptr) - 1
    values = np.ones(len(indices)) if data is None else data.astype(np.float64)
    matrix = csr_array((values, indices, indptr), shape=(n_rows, n_cols))
    if mean:
        matrix = diags_array(1.0 / np.maximum(np.diff(indptr), 1)) @ matrix
    if self_weight != 0:
        matrix = matrix + self_weight * diags_array(np.ones(n_rows), shape=(n_rows, n_cols))
    if source_scale is not None:
        matrix = matrix @ diags_array(source_scale.astype(np.float64))
    if row_scale is not None:
        matrix = diags_array(row_scale.astype(np.float64)) @ matrix
    inside = np.zeros(n_rows)
    inside[slice(*rows) if rows is not None else slice(None)] = 1
    return csr_array(diags_array(inside) @ matrix)


def _rows_of(x: Matrix) -> FloatArray:
    """Lay a feature matrix out row by row, and widen bfloat16."""
    rows = _logical(x)
    return from_bfloat16(rows.view(np.uint16)) if rows.dtype == np.uint16 else rows


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
    """Twin of `cython_kernels.gather`: one product with a SciPy matrix."""
    values = _rows_of(x)
    matrix = _operator(indptr, indices, data, len(values), row_scale, source_scale, self_weight, mean, rows)
    total: FloatArray = matrix @ values.astype(np.float64)
    if out is None:
        return total.astype(values.dtype)
    inside = slice(*rows) if rows is not None else slice(None)
    if isinstance(out, Tiles):
        before = _rows_of(out)
        for column in range(out.columns):
            tile, place = divmod(column, out.array.shape[2])
            out.array[tile, inside, place] = total[inside, column] + (
                before[inside, column] if accumulate else 0
            )
        return out
    out[inside] = total[inside] + (out[inside] if accumulate else 0)
    return out


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
    """Twin of `cython_kernels.gather_max`: row by row."""
    values = _rows_of(x)
    result = np.zeros((len(indptr) - 1, values.shape[1]), values.dtype) if out is None else out
    for i in range(*(rows if rows is not None else (0, len(indptr) - 1))):
        columns = indices[indptr[i] : indptr[i + 1]]
        best = np.argmax(values[columns], axis=0) if len(columns) else None  # a NaN is the largest
        result[i] = 0 if best is None else values[columns[best], np.arange(values.shape[1])]
        if source is not None:
            source[i] = -1 if best is None else columns[best]
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
    """Twin of `cython_kernels.gather_max_adjoint`: one scattered addition."""
    total = np.zeros((n_sources, d_out.shape[1]))
    row, column = np.nonzero(source >= 0)
    if rows is not None:
        inside = (row >= rows[0]) & (row < rows[1])
        row, column = row[inside], column[inside]
    np.add.at(total, (source[row, column], column), d_out[row, column].astype(np.float64))
    if d_x is None:
        return total.astype(d_out.dtype)
    d_x[...] = total + (d_x if accumulate else 0)
    return d_x


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
    """Twin of `cython_kernels.pack_max`: both halves at once."""
    n, f = d_out.shape
    start, stop = rows if rows is not None else (0, n)
    out = np.zeros((n, 2 * f), d_out.dtype) if out is None else out
    named = np.where(source >= 0, ids[source], -1)[start:stop]
    out[start:stop, :f] = d_out[start:stop]
    out[start:stop, f:] = named.astype(np.int32 if d_out.dtype == np.float32 else np.int64).view(d_out.dtype)
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
    """Twin of `cython_kernels.gather_max_pull`: row by row, each entry once."""
    f = packed.shape[1] // 2
    keys = np.ascontiguousarray(packed[:, f:]).view(np.int32 if packed.dtype == np.float32 else np.int64)
    result = np.zeros((len(indptr) - 1, f), packed.dtype) if d_x is None else d_x
    for i in range(*(rows if rows is not None else (0, len(indptr) - 1))):
        entries = np.unique(indices[indptr[i] : indptr[i + 1]])
        chosen = np.where(keys[entries] == ids[i], packed[entries, :f], 0)
        result[i] = chosen.sum(axis=0, dtype=np.float64)
    return result


def narrow_product(
    a: FloatArray, b: FloatArray, out: FloatArray | None = None, *, num_threads: int = 1
) -> FloatArray:
    """See `cython_kernels.narrow.narrow_product`."""
    total = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[k]
    return _deliver(total, out)


def narrow_product_adjoint(
    a: FloatArray, d_out: FloatArray, d_b: FloatArray | None = None, *, num_threads: int = 1
) -> FloatArray:
    """See `cython_kernels.narrow.narrow_product_adjoint`."""
    total = np.zeros((a.shape[1], d_out.shape[1]), a.dtype)
    for first in range(0, a.shape[0], 64):
        block = np.zeros_like(total)
        for one, d in zip(a[first : first + 64], d_out[first : first + 64], strict=True):
            block += one[:, None] * d
        total += block
    return _deliver(total, d_b)


def to_bfloat16(x: FloatArray, out: Bfloat16Array | None = None, *, num_threads: int = 1) -> Bfloat16Array:
    """Twin of `cython_kernels.to_bfloat16`: choose the nearer neighbour, of two equally near the even one."""
    bits = x.view(np.uint32).astype(np.uint64)
    low, rest = bits >> np.uint64(16), bits & np.uint64(0xFFFF)
    up = (rest > 0x8000) | ((rest == 0x8000) & (low % np.uint64(2) == 1))
    rounded = np.where(np.isnan(x), low | np.uint64(0x40), low + up).astype(np.uint16)
    if out is None:
        return rounded
    out[...] = rounded
    return out


def from_bfloat16(x: IntArray, out: FloatArray | None = None, *, num_threads: int = 1) -> FloatArray:
    """Twin of `cython_kernels.from_bfloat16`: shift the bits."""
    wide = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if out is None:
        return wide
    out[...] = wide
    return out


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
    """Twin of `cython_kernels.gather_adjoint`: the matrix of `gather`, transposed here in any case."""
    matrix = _operator(indptr, indices, data, n_sources, row_scale, source_scale, self_weight, mean, rows)
    total: FloatArray = matrix.T @ d_out.astype(np.float64)
    if d_x is None:
        return total.astype(d_out.dtype)
    d_x[...] = total + (d_x if accumulate else 0)
    return d_x


def transpose_csr(
    indptr: IntArray, indices: IntArray, *, n_cols: int, num_threads: int = 1, validate: bool = True
) -> Transposed:
    """Twin of `cython_kernels.transpose_csr`: NumPy's stable sort."""
    entries = np.argsort(indices, kind="stable")
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    lengths = np.bincount(indices, minlength=n_cols)
    indptr_t = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Transposed(indptr_t, rows[entries].astype(np.int32), entries)


def pack_rows(
    x: Matrix,
    index: IntArray,
    out: StoredArray | None = None,
    *,
    num_threads: int = 1,
    validate: bool = True,
) -> npt.NDArray[Any]:
    """Twin of `cython_kernels.pack_rows`."""
    result: npt.NDArray[Any] = np.empty((len(index), x.shape[1]), x.dtype) if out is None else out
    rows = _logical(x)[index]
    result[...] = rows if rows.dtype == result.dtype else _converted(rows, result.dtype)
    return result


def unpack_rows(
    rows: StoredArray, index: IntArray, out: Matrix, *, num_threads: int = 1, validate: bool = True
) -> Result:
    """Twin of `cython_kernels.unpack_rows`."""
    result = _logical(out).copy()
    values = rows if rows.dtype == out.dtype else _converted(rows, out.dtype)
    for row, target in zip(values, index, strict=True):
        result[target] = row
    return _lay_out(result, out)


def _logical(x: Matrix) -> npt.NDArray[Any]:
    """Lay a matrix out row by row, as it is stored."""
    if not isinstance(x, Tiles):
        return x
    n_tiles, n_rows, width = x.array.shape
    return x.array.transpose(1, 0, 2).reshape(n_rows, n_tiles * width)[:, : x.columns]


def _lay_out(result: npt.NDArray[Any], out: Matrix) -> Matrix:
    """Write a row-major matrix to one of either layout."""
    if isinstance(out, Tiles):
        for column in range(out.columns):
            tile, place = divmod(column, out.array.shape[2])
            out.array[tile, :, place] = result[:, column]
    else:
        out[...] = result
    return out


def _converted(x: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Round to bfloat16, or widen it."""
    return to_bfloat16(np.ascontiguousarray(x)) if dtype == np.uint16 else from_bfloat16(x)


def scatter_add_rows(
    rows: FloatArray, index: IntArray, out: FloatArray, *, num_threads: int = 1, validate: bool = True
) -> FloatArray:
    """Twin of `cython_kernels.scatter_add_rows`."""
    np.add.at(out, index, rows)
    return out


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Twin of `cython_kernels.philox4x32`."""
    words = _philox([np.array([word], np.uint64) for word in counter], *key)
    return int(words[0][0]), int(words[1][0]), int(words[2][0]), int(words[3][0])


def _philox(counter: list[Uint64Array], key0: int, key1: int) -> list[Uint64Array]:
    """Ten rounds on arrays of counters; each word sits in the low half of a uint64."""
    left, mid_left, right, mid_right = counter
    for step in range(10):
        round_key0 = np.uint64((key0 + step * 0x9E3779B9) % 2**32)
        round_key1 = np.uint64((key1 + step * 0xBB67AE85) % 2**32)
        product_left = left * np.uint64(0xD2511F53)
        product_right = right * np.uint64(0xCD9E8D57)
        left, mid_left, right, mid_right = (
            (product_right >> np.uint64(32)) ^ mid_left ^ round_key0,
            product_right & LOW,
            (product_left >> np.uint64(32)) ^ mid_right ^ round_key1,
            product_left & LOW,
        )
    return [left, mid_left, right, mid_right]


def _mix(word: Uint64Array) -> Uint64Array:
    """Mix 64 bits: the finaliser of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
    return word ^ (word >> np.uint64(31))


def kept(
    gids: IntArray, columns: IntArray, p: float, *, seed: int, epoch: int, layer: int
) -> npt.NDArray[np.bool_]:
    """Tell for each pair (gid, column), elementwise, whether dropout keeps it."""
    steps = np.array([layer + 1], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    key = int(_mix(_mix(np.array([seed], np.uint64)) + steps)[0])
    vertex = gids.astype(np.int64).view(np.uint64)
    column = columns.astype(np.uint64)
    counter = [column >> np.uint64(2), np.full_like(column, epoch), vertex & LOW, vertex >> np.uint64(32)]
    words = np.array(_philox(counter, key % 2**32, key >> 32))
    word: Uint64Array = np.take_along_axis(words, (column & np.uint64(3)).astype(np.intp)[None], axis=0)[0]
    result: npt.NDArray[np.bool_] = word >= np.uint64(round(p * 2**32))
    return result


def _dropped(x: FloatArray, gids: IntArray, columns: IntArray, p: float, **key: int) -> FloatArray:
    """Values of vertices `gids` in `columns` after dropout."""
    scaled = x * x.dtype.type(1.0 / (1.0 - p))
    result: FloatArray = np.where(kept(gids, columns, p, **key), scaled, x.dtype.type(0))
    return result


def dropout(
    x: FloatArray,
    gids: IntArray,
    p: float,
    *,
    seed: int,
    epoch: int,
    layer: int,
    out: Matrix | None = None,
    num_threads: int = 1,
) -> Result:
    """Twin of `cython_kernels.dropout`: every (vertex, column) by itself."""
    n, f = x.shape
    flat = _dropped(
        x.ravel(), np.repeat(gids, f), np.tile(np.arange(f), n), p, seed=seed, epoch=epoch, layer=layer
    ).reshape(n, f)
    return _deliver(flat, out)


def dropout_csr(
    indptr: IntArray,
    indices: IntArray,
    data: FloatArray,
    gids: IntArray,
    p: float,
    *,
    seed: int,
    epoch: int,
    layer: int,
    out: FloatArray | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Twin of `cython_kernels.dropout_csr`."""
    result = _dropped(data, np.repeat(gids, np.diff(indptr)), indices, p, seed=seed, epoch=epoch, layer=layer)
    return _deliver(result, out)


def bias_relu_dropout(
    z: FloatArray,
    bias: FloatArray | None,
    gids: IntArray | None,
    p: float,
    *,
    seed: int,
    epoch: int,
    layer: int,
    relu: bool = True,
    row_scale: FloatArray | None = None,
    out: Matrix | None = None,
    num_threads: int = 1,
) -> Result:
    """Twin of `cython_kernels.bias_relu_dropout`: step by step."""
    result = z if bias is None else z + bias
    if relu:
        result = np.maximum(result, 0)
    if p > 0:
        assert gids is not None
        columns = np.broadcast_to(np.arange(z.shape[1]), z.shape)
        vertices = np.broadcast_to(gids[:, None], z.shape)
        result = _dropped(result, vertices, columns, p, seed=seed, epoch=epoch, layer=layer)
    if row_scale is not None:
        result = result * row_scale[:, None]
    return _deliver(result, out)


def relu_dropout_backward(
    d_out: FloatArray,
    activated: Matrix,
    p: float,
    *,
    row_scale: FloatArray | None = None,
    out: Matrix | None = None,
    num_threads: int = 1,
) -> Result:
    """Twin of `cython_kernels.relu_dropout_backward`."""
    result = np.where(_rows_of(activated) > 0, d_out * d_out.dtype.type(1.0 / (1.0 - p)), d_out.dtype.type(0))
    if row_scale is not None:
        result = result * row_scale[:, None]
    return _deliver(result, out)


def bias_elu_dropout(
    x: FloatArray,
    bias: FloatArray | None,
    gids: IntArray | None,
    p: float,
    *,
    seed: int,
    epoch: int,
    layer: int,
    out: FloatArray | None = None,
    num_threads: int = 1,
) -> FloatArray:
    """Twin of `cython_kernels.bias_elu_dropout`: step by step, the exponential in float64."""
    z = x if bias is None else x + bias
    result = np.where(z > 0, z, np.expm1(np.minimum(z, 0), dtype=np.float64).astype(x.dtype))
    if p > 0:
        assert gids is not None
        columns = np.broadcast_to(np.arange(x.shape[1]), x.shape)
        vertices = np.broadcast_to(gids[:, None], x.shape)
        result = _dropped(result, vertices, columns, p, seed=seed, epoch=epoch, layer=layer)
    delivered: FloatArray = _deliver(result, out)
    return delivered


def elu_dropout_backward(
    d_h: FloatArray,
    h: FloatArray,
    gids: IntArray | None,
    p: float,
    *,
    seed: int,
    epoch: int,
    layer: int,
    out: FloatArray | None = None,
    num_threads: int = 1,
) -> FloatArray:
    """Twin of `cython_kernels.elu_dropout_backward`."""
    before = h * h.dtype.type(1.0 - p)
    slope = np.where(before > 0, h.dtype.type(1), before + h.dtype.type(1))
    result = d_h * h.dtype.type(1.0 / (1.0 - p)) * slope
    if p > 0:
        assert gids is not None
        columns = np.broadcast_to(np.arange(h.shape[1]), h.shape)
        vertices = np.broadcast_to(gids[:, None], h.shape)
        result = np.where(
            kept(vertices, columns, p, seed=seed, epoch=epoch, layer=layer), result, h.dtype.type(0)
        )
    delivered: FloatArray = _deliver(result, out)
    return delivered


def softmax_cross_entropy(
    logits: FloatArray,
    labels: IntArray,
    mask: npt.NDArray[Any],
    *,
    class_weights: FloatArray | None = None,
    scale: float = 1.0,
    d_logits: FloatArray | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> float:
    """Twin of `cython_kernels.softmax_cross_entropy`: SciPy's log-softmax in double precision."""
    chosen = np.flatnonzero(mask)
    logs = log_softmax(logits[chosen].astype(np.float64), axis=1)
    at = np.arange(len(chosen)), labels[chosen]
    weights = np.ones(len(chosen)) if class_weights is None else class_weights[labels[chosen]]
    if d_logits is not None:
        gradient = np.exp(logs)
        gradient[at] -= 1
        d_logits[...] = 0
        d_logits[chosen] = scale * weights[:, None] * gradient
    return float(-(weights * logs[at]).sum())


def sigmoid_cross_entropy(
    logits: FloatArray,
    labels: npt.NDArray[np.uint8],
    mask: npt.NDArray[Any],
    *,
    pos_weight: FloatArray | None = None,
    scale: float = 1.0,
    d_logits: FloatArray | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> float:
    """Twin of `cython_kernels.sigmoid_cross_entropy`: SciPy's log-sigmoid in double precision."""
    chosen = np.flatnonzero(mask)
    z, has, known = logits[chosen].astype(np.float64), labels[chosen] != 0, labels[chosen] != 255
    weight = np.where(has, 1.0 if pos_weight is None else pos_weight, 1.0) * known
    if d_logits is not None:
        d_logits[...] = 0
        d_logits[chosen] = scale * weight * np.where(has, -expit(-z), expit(z))
    return float(-(weight * log_expit(np.where(has, z, -z)))[known].sum())


def _entries(indptr: IntArray, rows: tuple[int, int] | None) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Name the row of each entry, and tell whether it is in the range."""
    row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    start, stop = rows if rows is not None else (0, len(indptr) - 1)
    return row, (row >= start) & (row < stop)


def _occurrences(row: IntArray, column: IntArray) -> Uint64Array:
    """Count for each entry the earlier ones with the same row and column."""
    met: dict[tuple[int, int], int] = {}
    count = np.zeros(len(row), np.uint64)
    for e, pair in enumerate(zip(row.tolist(), column.tolist(), strict=True)):
        count[e] = met.get(pair, 0)
        met[pair] = met.get(pair, 0) + 1
    return count


def attention_kept(
    source_gids: IntArray,
    target_gids: IntArray,
    occurrences: Uint64Array,
    heads: int,
    p: float,
    *,
    seed: int,
    epoch: int,
    layer: int,
) -> npt.NDArray[np.bool_]:
    """Tell for each entry, given by its two vertices and its occurrence, and for each head if it is kept."""
    step = np.array([0x9E3779B97F4A7C15], np.uint64)
    features = _mix(_mix(np.array([seed], np.uint64)) + step * np.uint64(layer + 1))
    base = _mix(_mix(features ^ np.uint64(0x617474656E74696F)) + step * np.uint64(epoch + 1))
    source, target = source_gids.view(np.uint64), target_gids.view(np.uint64)
    result = np.zeros((len(source), heads), np.bool_)
    for occurrence in np.unique(occurrences):
        at = occurrences == occurrence
        counter = [
            source[at] & LOW,
            source[at] >> np.uint64(32),
            target[at] & LOW,
            target[at] >> np.uint64(32),
        ]
        for h in range(heads):
            key = int(_mix(base + step * ((occurrence << np.uint64(32)) + np.uint64(h // 4 + 1)))[0])
            word = _philox(list(counter), key % 2**32, key >> 32)[h % 4]
            result[at, h] = word >= np.uint64(round(p * 2**32))
    return result


def _attention_masks(
    row: IntArray,
    column: IntArray,
    source_gids: IntArray,
    target_gids: IntArray,
    heads: int,
    p: float,
    **key: int,
) -> FloatArray:
    """Make the factor of each entry and head."""
    kept = attention_kept(source_gids, target_gids, _occurrences(row, column), heads, p, **key)
    return np.where(kept, 1.0 / (1.0 - p), 0.0)


def _softmax(raw: FloatArray, row: IntArray, n_rows: int, slope: float) -> tuple[FloatArray, ...]:
    """Make alpha of each entry and the maximum and sum of each row, from scores in float64."""
    s = np.where(raw > 0, raw, slope * raw)
    most = np.full((n_rows, raw.shape[1]), -np.inf)
    np.maximum.at(most, row, s)
    most[np.isneginf(most)] = 0
    e = np.exp(s - most[row])
    total = np.zeros_like(most)
    np.add.at(total, row, e)
    with np.errstate(invalid="ignore"):
        return e / total[row], most, total


def _scores(source: FloatArray, target: FloatArray) -> FloatArray:
    """Add scores in their own precision, on whose sign the gradient depends."""
    return (source + target).astype(np.float64)


def attention(
    indptr: IntArray,
    indices: IntArray,
    x: FloatArray,
    score_source: FloatArray,
    score_target: FloatArray,
    out: FloatArray | None = None,
    *,
    slope: float = 0.2,
    p: float = 0.0,
    seed: int = 0,
    epoch: int = 0,
    layer: int = 0,
    source_gids: IntArray | None = None,
    target_gids: IntArray | None = None,
    saved: AttentionSaved | None = None,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Twin of `cython_kernels.attention`: with arrays of the size of the entries."""
    n_rows, heads = score_target.shape
    row, _ = _entries(indptr, rows)
    raw = _scores(score_source[indices], score_target[row])
    alpha, most, total = _softmax(raw, row, n_rows, slope)
    factor = alpha
    if p > 0:
        assert source_gids is not None and target_gids is not None
        gids = source_gids[indices], target_gids[row]
        factor = alpha * _attention_masks(row, indices, *gids, heads, p, seed=seed, epoch=epoch, layer=layer)
    values = x.reshape(len(x), heads, -1)[indices].astype(np.float64)
    sums = []
    for chosen in (np.ones_like(raw), raw <= 0):
        sums.append(np.zeros((n_rows, heads, x.shape[1] // heads)))
        np.add.at(sums[-1], row, (factor * chosen)[:, :, None] * values)
    below = np.zeros((n_rows, heads))
    np.add.at(below, row, alpha * (raw <= 0))
    inside = slice(*rows) if rows is not None else slice(None)
    result = np.zeros((n_rows, x.shape[1]), x.dtype) if out is None else out
    result[inside] = sums[0].reshape(n_rows, -1)[inside]
    if saved is not None:
        for array, value in zip(saved, (most, total, sums[1].reshape(n_rows, -1), below), strict=True):
            array[inside] = value[inside]
    return result


def attention_targets(
    out: FloatArray,
    d_out: FloatArray,
    score_target: FloatArray,
    saved: AttentionSaved,
    d_score_target: FloatArray | None = None,
    *,
    record: FloatArray | None = None,
    slope: float = 0.2,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
) -> tuple[FloatArray, FloatArray]:
    """Twin of `cython_kernels.attention_targets`."""
    n_rows, heads = score_target.shape
    shape = (n_rows, heads, -1)
    change, most, total, negative, below = (
        array.astype(np.float64) for array in (d_out.reshape(shape), *saved)
    )
    t = (change * out.reshape(shape)).sum(axis=2)
    gradient = (slope - 1) * ((change * negative.reshape(shape)).sum(axis=2) - t * below)
    inverse = np.divide(1.0, total, out=np.zeros_like(total), where=total != 0)
    records = np.stack([score_target, most, inverse, t], axis=1)
    inside = slice(*rows) if rows is not None else slice(None)
    results = []
    for given, value in ((d_score_target, gradient), (record, records)):
        results.append(np.zeros(value.shape, out.dtype) if given is None else given)
        results[-1][inside] = value[inside]
    return results[0], results[1]


def attention_adjoint(
    indptr: IntArray,
    indices: IntArray,
    x: FloatArray,
    score_source: FloatArray,
    record: FloatArray,
    d_out: FloatArray,
    d_x: FloatArray | None = None,
    *,
    d_score_source: FloatArray | None = None,
    slope: float = 0.2,
    p: float = 0.0,
    seed: int = 0,
    epoch: int = 0,
    layer: int = 0,
    source_gids: IntArray | None = None,
    target_gids: IntArray | None = None,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> tuple[FloatArray, FloatArray]:
    """Twin of `cython_kernels.attention_adjoint`: ds of every entry by its definition."""
    n_sources, heads = score_source.shape
    row, _ = _entries(indptr, rows)
    raw = _scores(score_source[row], record[indices, 0])
    most, inverse, t = record[indices, 1:].astype(np.float64).transpose(1, 0, 2)
    alpha = np.exp(np.minimum(np.where(raw > 0, raw, slope * raw) - most, 0)) * inverse
    mask: FloatArray = np.ones_like(alpha)
    if p > 0:
        assert source_gids is not None and target_gids is not None
        gids = source_gids[row], target_gids[indices]
        mask = _attention_masks(row, indices, *gids, heads, p, seed=seed, epoch=epoch, layer=layer)
    change = d_out.reshape(len(d_out), heads, -1)[indices].astype(np.float64)
    features = np.zeros((n_sources, heads, x.shape[1] // heads))
    np.add.at(features, row, (mask * alpha)[:, :, None] * change)
    d_alpha = mask * (change * x.reshape(n_sources, heads, -1)[row]).sum(axis=2)
    scores = np.zeros((n_sources, heads))
    np.add.at(scores, row, alpha * (d_alpha - t) * np.where(raw > 0, 1.0, slope))
    inside = slice(*rows) if rows is not None else slice(None)
    results = []
    for given, value in ((d_x, features.reshape(x.shape)), (d_score_source, scores)):
        results.append(np.zeros(value.shape, x.dtype) if given is None else given)
        results[-1][inside] = value[inside]
    return results[0], results[1]


def attention_weights(
    indptr: IntArray,
    indices: IntArray,
    score_source: FloatArray,
    score_target: FloatArray,
    out: FloatArray | None = None,
    *,
    slope: float = 0.2,
    p: float = 0.0,
    seed: int = 0,
    epoch: int = 0,
    layer: int = 0,
    source_gids: IntArray | None = None,
    target_gids: IntArray | None = None,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Twin of `cython_kernels.attention_weights`."""
    n_rows, heads = score_target.shape
    row, inside = _entries(indptr, rows)
    alpha = _softmax(_scores(score_source[indices], score_target[row]), row, n_rows, slope)[0]
    if p > 0:
        assert source_gids is not None and target_gids is not None
        gids = source_gids[indices], target_gids[row]
        alpha *= _attention_masks(row, indices, *gids, heads, p, seed=seed, epoch=epoch, layer=layer)
    result = np.zeros(alpha.shape, score_source.dtype) if out is None else out
    result[inside] = alpha[inside]
    return result


def _scores_v2(
    left: FloatArray, right: FloatArray, a: FloatArray, slope: float
) -> tuple[FloatArray, FloatArray]:
    """Make the raw numbers of each entry, head and column, whose signs count, and the scores."""
    raw = (left + right).reshape(len(left), *a.shape).astype(np.float64)
    return raw, (np.where(raw > 0, raw, slope * raw) * a).sum(axis=2)


def attention_v2(
    indptr: IntArray,
    indices: IntArray,
    left: FloatArray,
    right: FloatArray,
    a: FloatArray,
    out: FloatArray | None = None,
    *,
    slope: float = 0.2,
    p: float = 0.0,
    seed: int = 0,
    epoch: int = 0,
    layer: int = 0,
    source_gids: IntArray | None = None,
    target_gids: IntArray | None = None,
    saved: AttentionV2Saved | None = None,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Twin of `cython_kernels.attention_v2`: with arrays of the size of the entries."""
    n_rows, heads = len(right), len(a)
    row, _ = _entries(indptr, rows)
    _, s = _scores_v2(left[indices], right[row], a, slope)
    alpha, most, total = _softmax(s, row, n_rows, 1.0)
    if p > 0:
        assert source_gids is not None and target_gids is not None
        gids = source_gids[indices], target_gids[row]
        alpha *= _attention_masks(row, indices, *gids, heads, p, seed=seed, epoch=epoch, layer=layer)
    sums = np.zeros((n_rows, *a.shape))
    np.add.at(sums, row, alpha[:, :, None] * left.reshape(len(left), *a.shape)[indices].astype(np.float64))
    inside = slice(*rows) if rows is not None else slice(None)
    result = np.zeros(right.shape, left.dtype) if out is None else out
    result[inside] = sums.reshape(right.shape)[inside]
    if saved is not None:
        for array, value in zip(saved, (most, total), strict=True):
            array[inside] = value[inside]
    return result


def _changes_v2(
    a: FloatArray, slope: float, raw: FloatArray, s: FloatArray, record: FloatArray, d_alpha: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Make alpha, ds, and ds times the slope at raw, from the records of the entries' targets."""
    most, inverse, t = record.astype(np.float64).transpose(1, 0, 2)
    alpha = np.exp(s - most) * inverse
    change = alpha * (d_alpha - t)
    return alpha, change, change[:, :, None] * np.where(raw > 0, 1.0, slope)


def attention_v2_targets(
    indptr: IntArray,
    indices: IntArray,
    left: FloatArray,
    right: FloatArray,
    a: FloatArray,
    out: FloatArray,
    d_out: FloatArray,
    saved: AttentionV2Saved,
    d_right: FloatArray | None = None,
    d_a: FloatArray | None = None,
    *,
    record: FloatArray | None = None,
    slope: float = 0.2,
    p: float = 0.0,
    seed: int = 0,
    epoch: int = 0,
    layer: int = 0,
    source_gids: IntArray | None = None,
    target_gids: IntArray | None = None,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Twin of `cython_kernels.attention_v2_targets`: ds of every entry by its definition."""
    n_rows, heads = len(right), len(a)
    row, chosen = _entries(indptr, rows)
    d_rows = d_out.reshape(n_rows, *a.shape).astype(np.float64)
    most, total = (array.astype(np.float64) for array in saved)
    t = (d_rows * out.reshape(d_rows.shape)).sum(axis=2)
    inverse = np.divide(1.0, total, out=np.zeros_like(total), where=total != 0)
    records = np.stack([most, inverse, t], axis=1)
    raw, s = _scores_v2(left[indices], right[row], a, slope)
    d_alpha = (d_rows[row] * left.reshape(len(left), *a.shape)[indices]).sum(axis=2)
    if p > 0:
        assert source_gids is not None and target_gids is not None
        gids = source_gids[indices], target_gids[row]
        d_alpha *= _attention_masks(row, indices, *gids, heads, p, seed=seed, epoch=epoch, layer=layer)
    change = _changes_v2(a, slope, raw, s, records[row], d_alpha)[2]
    gradient = np.zeros(d_rows.shape)
    np.add.at(gradient, row, a * change)
    inside = slice(*rows) if rows is not None else slice(None)
    results = []
    for given, value in ((d_right, gradient.reshape(right.shape)), (record, records)):
        results.append(np.zeros(value.shape, left.dtype) if given is None else given)
        results[-1][inside] = value[inside]
    factor = np.zeros(a.shape, left.dtype) if d_a is None else d_a
    factor[...] = (change * raw)[chosen].sum(axis=0)
    return results[0], factor, results[1]


def attention_v2_adjoint(
    indptr: IntArray,
    indices: IntArray,
    left: FloatArray,
    right: FloatArray,
    a: FloatArray,
    record: FloatArray,
    d_out: FloatArray,
    d_left: FloatArray | None = None,
    *,
    slope: float = 0.2,
    p: float = 0.0,
    seed: int = 0,
    epoch: int = 0,
    layer: int = 0,
    source_gids: IntArray | None = None,
    target_gids: IntArray | None = None,
    rows: tuple[int, int] | None = None,
    num_threads: int = 1,
    validate: bool = True,
) -> FloatArray:
    """Twin of `cython_kernels.attention_v2_adjoint`."""
    n_sources, heads = len(left), len(a)
    row, _ = _entries(indptr, rows)
    raw, s = _scores_v2(left[row], right[indices], a, slope)
    d_rows = d_out.reshape(len(d_out), *a.shape)[indices].astype(np.float64)
    mask: FloatArray = np.ones(s.shape)
    if p > 0:
        assert source_gids is not None and target_gids is not None
        gids = source_gids[row], target_gids[indices]
        mask = _attention_masks(row, indices, *gids, heads, p, seed=seed, epoch=epoch, layer=layer)
    d_alpha = mask * (d_rows * left.reshape(n_sources, *a.shape)[row]).sum(axis=2)
    alpha, _, change = _changes_v2(a, slope, raw, s, record[indices], d_alpha)
    gradient = np.zeros((n_sources, *a.shape))
    np.add.at(gradient, row, (mask * alpha)[:, :, None] * d_rows + a * change)
    inside = slice(*rows) if rows is not None else slice(None)
    result = np.zeros(left.shape, left.dtype) if d_left is None else d_left
    result[inside] = gradient.reshape(left.shape)[inside]
    return result


def _deliver(result: FloatArray, out: Matrix | None) -> Any:
    """Put a result where the caller wants it, rounded to bfloat16 if that is what it stores."""
    if out is None:
        return result.copy()
    return _lay_out(_converted(result, out.dtype) if out.dtype == np.uint16 else result, out)
