"""Dropout whose masks belong to vertices, not to whoever computes them.

A counter-based generator (Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011) turns (seed, layer, epoch, vertex, column) into a word of 32 bits::

    key     = mix(mix(seed) + 0x9E3779B97F4A7C15 * (layer + 1)), its low word first
    counter = (column // 4, epoch, low word of gid, high word of gid)
    word    = output number column % 4

where all arithmetic is modulo 2**64 and mix is the finaliser of splitmix64 (Steele, Lea, Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014; `mix64` below)::

    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    mix(z) = z ^ (z >> 31)

A value is kept iff word >= round(p * 2**32), and then multiplied by 1/(1 - p). The same vertex gets the same
mask in any part, interval, order, dtype and storage (dense or CSR), and a mask is made again rather than
stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import _activation, _dropout_masks, checks, dispatch, matrices
from .checks import FloatArray, IntArray
from .matrices import Matrix, Result

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's step

_WORD = 2**64 - 1


@dataclass(frozen=True)
class MaskKey:
    """Which masks are meant, as the loops take it."""

    key: int
    epoch: int
    threshold: int
    scale: float


def mask_key(p: float, seed: int, epoch: int, layer: int) -> MaskKey:
    """Check what selects a mask and derive the generator's key, the threshold and the kept values' factor."""
    p = checks.probability(p)
    seed = checks.integer("seed", seed, 0, 2**64)
    epoch = checks.integer("epoch", epoch, 0, 2**32)
    layer = checks.integer("layer", layer, 0, 2**32)
    key = mix64(mix64(seed) + GOLDEN * (layer + 1))
    return MaskKey(key, epoch, round(p * 2**32), 1.0 / (1.0 - p))


def mix64(word: int) -> int:
    """Mix 64 bits: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Compute one block of Philox4x32-10 with the code the masks are made with.

    Parameters
    ----------
    counter, key
        Four and two words, each in 0 .. 2**32 - 1, lowest first.

    Returns
    -------
    tuple of int
        Four random words.

    Raises
    ------
    TypeError, ValueError
        A word is no integer, or out of range; another number of words.

    Notes
    -----
    J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
    2011. `cython_kernels.dropout_masks` tells which counters and keys the masks come from.
    """
    if len(counter) != 4 or len(key) != 2:
        raise ValueError(f"a counter has 4 words and a key 2, got {len(counter)} and {len(key)}")
    words = [checks.integer("a word", word, 0, 2**32) for word in (*counter, *key)]
    return _dropout_masks.philox(dispatch.level(), *words)


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
    """Drop values with probability `p` and multiply the kept ones by 1/(1 - p).

    Applied to a gradient with the same arguments it is its own adjoint. O(n f) time. With a scale per
    row it is `bias_relu_dropout` without bias and relu.

    Parameters
    ----------
    x
        float32 or float64 [n, f]. A dropped value becomes 0, also a NaN.
    gids
        int64 [n]: the vertices' indices before partitioning.
    p
        0 <= p < 1; 0 copies.
    seed, epoch, layer
        0 <= seed < 2**64; epoch and layer below 2**32. `layer` is the layer whose input is dropped.
    out
        [n, f]: `x` itself, or apart from the inputs; made, row-major, if None. Row-major or `Tiles` (whose
        columns beyond f become 0); of the dtype of `x`, or, if that is float32, uint16: rounded to bfloat16.
    num_threads
        Threads over pieces of the rows; the result does not depend on it.

    Returns
    -------
    numpy.ndarray or Tiles
        `out`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.

    Notes
    -----
    N. Srivastava, G. Hinton, A. Krizhevsky, I. Sutskever, R. Salakhutdinov, "Dropout: a simple way to prevent
    neural networks from overfitting", JMLR 15, 2014. The masks come from Philox4x32-10 (Salmon et al., SC
    2011), as `cython_kernels.dropout_masks` tells.
    """
    checks.array("x", x, checks.FLOATS, (None, None))
    checks.array("gids", gids, "int64", (x.shape[0],))
    key = mask_key(p, seed, epoch, layer)
    result = matrices.result("out", out, x.dtype, x.shape)
    matrices.same_or_apart("out", result, "x", x)
    checks.apart("out", matrices.as_tiles(result), gids=gids)
    num_threads = checks.threads(num_threads)
    if p == 0 and isinstance(result, np.ndarray) and result.dtype == x.dtype:
        np.copyto(result, x)
        return result
    nothing = np.empty(0, x.dtype)
    _activation.bias_relu_dropout(
        x, nothing, gids, nothing, matrices.as_tiles(result), False,
        key.key, key.epoch, key.threshold, key.scale, matrices.streams(result, x),
        dispatch.level(), num_threads,
    )  # fmt: skip
    return result


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
    """Drop stored values of a CSR matrix: the same mask as `dropout` at (vertex, column).

    O(nnz + n) time, with one block of the generator for each entry, as columns may be far apart. A row is one
    thread's, and threads have equal numbers of rows: more of them do not help where a few rows next to each
    other have most of the entries.

    Parameters
    ----------
    indptr, indices, data
        int64 [n + 1], int32 [nnz], float32 or float64 [nnz]. Columns in any order.
    gids, p, seed, epoch, layer, num_threads
        As in `dropout`.
    out
        [nnz] of the dtype of `data`: `data` itself, or apart from the inputs; made if None. Dropped entries
        are stored zeros.
    validate
        False skips the check of every entry.

    Returns
    -------
    numpy.ndarray
        `out`, the new `data`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.

    Notes
    -----
    N. Srivastava, G. Hinton, A. Krizhevsky, I. Sutskever, R. Salakhutdinov, "Dropout: a simple way to prevent
    neural networks from overfitting", JMLR 15, 2014. The masks come from Philox4x32-10 (Salmon et al., SC
    2011), as `cython_kernels.dropout_masks` tells.
    """
    n_rows = checks.csr_layout(indptr, indices)
    checks.array("data", data, checks.FLOATS, indices.shape)
    checks.array("gids", gids, "int64", (n_rows,))
    if validate:
        checks.monotone(indptr)
        checks.in_range("indices", indices, 2**31, "a column is not negative")
    key = mask_key(p, seed, epoch, layer)
    result = checks.output("out", out, data.dtype, data.shape)
    checks.same_or_apart("out", result, "data", data)
    checks.apart("out", result, indptr=indptr, indices=indices, gids=gids)
    num_threads = checks.threads(num_threads)
    if p == 0:
        np.copyto(result, data)
    else:
        _dropout_masks.dropout_csr(
            indptr, indices, data, gids, result, key.key, key.epoch, key.threshold, key.scale,
            dispatch.level(), num_threads,
        )  # fmt: skip
    return result
