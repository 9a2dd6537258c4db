"""What follows the dense product of a layer (AV), and its backward (dAV), in one pass each.

The pass also does what the next gather wants of its input: the scale of the sources, the layout, and
bfloat16. A layer then has no pass of its own for any of them.
"""

from __future__ import annotations

import numpy as np

from . import _activation, checks, dispatch, matrices
from .checks import FloatArray, IntArray
from .dropout_masks import mask_key
from .matrices import Matrix, Result


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
    """Add a bias, apply relu, then dropout, then a scale: ``row_scale * dropout(relu(z + bias))``.

    A NaN that is kept stays a NaN: relu does not hide it. O(n f) time; every value is read once.

    Parameters
    ----------
    z
        float32 or float64 [n, f].
    bias
        [f], of the dtype of `z`, or None.
    gids
        int64 [n]: the vertices' indices before partitioning. May be None if `p` is 0.
    p, seed, epoch, layer
        As in `dropout`: `layer` is the layer that the result goes into.
    relu
        False leaves negative values.
    row_scale
        [n], of the dtype of `z`, or None: multiplied last. The source scale 1/sqrt(degree + 1) of the
        gather that follows goes here (and of the self term, which the gather scales the same way).
    out
        [n, f]: `z` itself, or apart from the inputs; made, row-major, if None. Row-major or `Tiles` (whose
        columns beyond f become 0); of the dtype of `z`, or, if that is float32, uint16: rounded to
        bfloat16 as the last step.
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
    Masks and their source: `cython_kernels.dropout_masks`.
    """
    checks.array("z", z, checks.FLOATS, (None, None))
    key = mask_key(p, seed, epoch, layer)
    bias_or_empty = checks.optional("bias", bias, z.dtype, z.shape[1])
    scale_or_empty = checks.optional("row_scale", row_scale, z.dtype, z.shape[0])
    vertices = _ids(gids, p, z.shape[0])
    result = matrices.result("out", out, z.dtype, z.shape)
    matrices.same_or_apart("out", result, "z", z)
    checks.apart("out", matrices.as_tiles(result), bias=bias, gids=gids, row_scale=row_scale)
    _activation.bias_relu_dropout(
        z, bias_or_empty, vertices, scale_or_empty, matrices.as_tiles(result), checks.flag("relu", relu),
        key.key, key.epoch, key.threshold, key.scale, matrices.streams(result, z),
        dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return result


def relu_dropout_backward(
    d_out: FloatArray,
    activated: Matrix,
    p: float,
    *,
    row_scale: FloatArray | None = None,
    out: Matrix | None = None,
    num_threads: int = 1,
) -> Result:
    """Pass a gradient back: ``row_scale * d_out / (1 - p)`` where `activated` > 0, else 0.

    A value that was dropped and one that relu cut are both 0 in `activated`, so no mask is needed. O(n f)
    time.

    Parameters
    ----------
    d_out
        float32 or float64 [n, f]: the gradient of the result of `bias_relu_dropout`.
    activated
        [n, f]: that result (with ``relu=True``, and positive scales if any), in any layout and dtype it
        can have.
    p
        The probability of dropping it was made with.
    row_scale
        [n], of the dtype of `d_out`, or None: multiplied last. Where the result was scaled, this is the
        same array, and the gradient is that of `z`.
    out
        [n, f]: `d_out` or `activated` itself, or apart from all inputs; made, row-major, if None. May be
        what `bias_relu_dropout` can write: row-major or `Tiles`, bfloat16 for float32.
    num_threads
        Threads over pieces of the rows; the result does not depend on it.

    Returns
    -------
    numpy.ndarray or Tiles
        `out`: the gradient of `z`; its column sums are the gradient of the bias.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.
    """
    checks.array("d_out", d_out, checks.FLOATS, (None, None))
    matrices.matrix("activated", activated, matrices.stored_as(d_out.dtype), d_out.shape)
    scale = 1.0 / (1.0 - checks.probability(p))
    scale_or_empty = checks.optional("row_scale", row_scale, d_out.dtype, d_out.shape[0])
    result = matrices.result("out", out, d_out.dtype, d_out.shape)
    matrices.same_or_apart("out", result, "d_out", d_out)
    matrices.same_or_apart("out", result, "activated", activated)
    checks.apart("out", matrices.as_tiles(result), row_scale=row_scale)
    _activation.relu_dropout_backward(
        d_out, matrices.as_tiles(activated), scale_or_empty, matrices.as_tiles(result), scale,
        matrices.streams(result, d_out, activated), dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return result


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
    """Add a bias, apply ELU, then dropout: ``dropout(elu(x + bias))``, elu(z) = z if z > 0 else e^z - 1.

    Within 3 units in the last place, the same bits on all instruction sets. A NaN that is kept stays a NaN.
    O(n f) time; every value is read once.

    Parameters
    ----------
    x
        float32 or float64 [n, f].
    bias
        [f], of the dtype of `x`, or None.
    gids
        int64 [n]: the vertices' indices before partitioning. May be None if `p` is 0.
    p, seed, epoch, layer
        As in `dropout`: `layer` is the layer that the result goes into.
    out
        [n, f] of the dtype of `x`: `x` itself, or apart from the inputs; made if None.
    num_threads
        Threads over pieces of the rows; the result does not depend on it.

    Returns
    -------
    numpy.ndarray
        `out`.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.

    Notes
    -----
    D.-A. Clevert, T. Unterthiner, S. Hochreiter, "Fast and accurate deep network learning by exponential
    linear units (ELUs)", ICLR 2016, with alpha = 1. Masks and their source: `cython_kernels.dropout_masks`.
    """
    checks.array("x", x, checks.FLOATS, (None, None))
    key = mask_key(p, seed, epoch, layer)
    bias_or_empty = checks.optional("bias", bias, x.dtype, x.shape[1])
    vertices = _ids(gids, p, x.shape[0])
    result = checks.output("out", out, x.dtype, x.shape)
    checks.same_or_apart("out", result, "x", x)
    checks.apart("out", result, bias=bias, gids=gids)
    _activation.bias_elu_dropout(
        x, bias_or_empty, vertices, result, key.key, key.epoch, key.threshold, key.scale,
        dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return result


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
    """Pass a gradient back through dropout and ELU: ``d_h / (1 - p) * (1 if a > 0 else a + 1)`` where kept.

    a = h (1 - p) is what dropout was given, and a + 1 = e^z the slope of ELU where it is negative. The mask
    is made again from its key: a 0 in `h` may have been dropped or not. O(n f) time.

    Parameters
    ----------
    d_h
        float32 or float64 [n, f]: the gradient of the result of `bias_elu_dropout`.
    h
        [n, f] of the dtype of `d_h`: that result.
    gids, p, seed, epoch, layer
        As `bias_elu_dropout` took them.
    out
        [n, f] of the dtype of `d_h`: `d_h` or `h` itself, or apart from all inputs; made if None.
    num_threads
        Threads over pieces of the rows; the result does not depend on it.

    Returns
    -------
    numpy.ndarray
        `out`: the gradient of `x`; its column sums are the gradient of the bias.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.
    """
    checks.array("d_h", d_h, checks.FLOATS, (None, None))
    checks.array("h", h, d_h.dtype, d_h.shape)
    key = mask_key(p, seed, epoch, layer)
    vertices = _ids(gids, p, d_h.shape[0])
    result = checks.output("out", out, d_h.dtype, d_h.shape)
    checks.same_or_apart("out", result, "d_h", d_h)
    checks.same_or_apart("out", result, "h", h)
    checks.apart("out", result, gids=gids)
    _activation.elu_dropout_backward(
        d_h, h, vertices, result, key.key, key.epoch, key.threshold, key.scale, 1.0 - float(p),
        dispatch.level(), checks.threads(num_threads),
    )  # fmt: skip
    return result


def _ids(gids: IntArray | None, p: float, n: int) -> IntArray:
    """Check the vertices' ids, which nothing needs that drops nothing."""
    if gids is None and p == 0:
        return np.empty(0, np.int64)
    return checks.array("gids", gids, "int64", (n,))
