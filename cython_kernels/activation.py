"""What follows the dense product of a layer (AV), and its backward (dAV), in one pass each."""

from __future__ import annotations

import numpy as np

from . import _activation, checks
from .checks import FloatArray, IntArray
from .dropout_masks import mask_key


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
    out: FloatArray | None = None,
    num_threads: int = 1,
) -> FloatArray:
    """Add a bias, apply relu, then dropout: ``dropout(relu(z + bias))``.

    A NaN that is kept stays a NaN: relu does not hide it.

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
    out
        [n, f]: `z` itself, or apart from the inputs; made if None.
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
    """
    checks.array("z", z, checks.FLOATS, (None, None))
    key = mask_key(p, seed, epoch, layer)
    bias_or_empty = checks.optional("bias", bias, z.dtype, z.shape[1])
    if gids is None and p == 0:
        vertices = np.empty(0, np.int64)
    else:
        vertices = checks.array("gids", gids, "int64", (z.shape[0],))
    result = checks.output("out", out, z.dtype, z.shape)
    checks.same_or_apart("out", result, "z", z)
    checks.apart("out", result, bias=bias, gids=gids)
    _activation.bias_relu_dropout(
        z, bias_or_empty, vertices, result, bool(relu), key.key, key.epoch, key.threshold, key.scale,
        checks.threads(num_threads),
    )  # fmt: skip
    return result


def relu_dropout_backward(
    d_out: FloatArray, activated: FloatArray, p: float, *, out: FloatArray | None = None, num_threads: int = 1
) -> FloatArray:
    """Pass a gradient back through relu and dropout: ``d_out / (1 - p)`` where `activated` > 0, else 0.

    A value that was dropped and one that relu cut are both 0 in `activated`, so no mask is needed.

    Parameters
    ----------
    d_out
        float32 or float64 [n, f]: the gradient of the result of `bias_relu_dropout`.
    activated
        [n, f], of the dtype of `d_out`: that result (with ``relu=True``).
    p
        The probability of dropping it was made with.
    out
        [n, f]: `d_out` or `activated` itself, or apart from both; made if None.
    num_threads
        Threads over pieces of the rows; the result does not depend on it.

    Returns
    -------
    numpy.ndarray
        `out`: the gradient of `z`; its column sums are the gradient of the bias.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape, layout or range than above.
    """
    checks.array("d_out", d_out, checks.FLOATS, (None, None))
    checks.array("activated", activated, d_out.dtype, d_out.shape)
    scale = 1.0 / (1.0 - checks.probability(p))
    result = checks.output("out", out, d_out.dtype, d_out.shape)
    checks.same_or_apart("out", result, "d_out", d_out)
    checks.same_or_apart("out", result, "activated", activated)
    _activation.relu_dropout_backward(d_out, activated, result, scale, checks.threads(num_threads))
    return result
