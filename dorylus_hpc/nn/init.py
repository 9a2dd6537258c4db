"""Start values of weights and biases: a function of (seed, layer, shape) and nothing else."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import DTypeLike

_MAX_SEED = 2**64 - 1
_DRAW_BITS = 8  # the highest ones of the second half of a key; the rest is the layer


def _check_count(name: str, value: int, low: int, high: int | None = None) -> int:
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bound}, got {value}")
    return value


def glorot_uniform(
    seed: int, layer: int, f_in: int, f_out: int, dtype: DTypeLike, *, draw: int = 0
) -> np.ndarray:
    """Draw a weight matrix uniformly from +-sqrt(6 / (f_in + f_out)).

    Drawn in float64 from the Philox stream with key (seed, layer, draw) and then cast, so both dtypes start
    from the same matrix. The raw 64-bit stream is used, which NumPy promises to keep, rather than a
    distribution method, which it does not.

    Parameters
    ----------
    seed : int
        Seed of the run, 0 .. 2**64 - 1.
    layer : int
        Layer, from 1.
    draw : int
        Number of the matrix among those of its layer, 0 .. 255.
    f_in, f_out : int
        Rows and columns, at least 1.
    dtype : dtype
        float32 or float64.

    Returns
    -------
    ndarray, (f_in, f_out)

    Raises
    ------
    TypeError
        A number that is not an integer, or another dtype.
    ValueError
        A number out of range.

    References
    ----------
    Glorot and Bengio, Understanding the difficulty of training deep feedforward neural networks,
    AISTATS 2010, equation 16.
    """
    layer = _check_count("layer", layer, 1, 2 ** (64 - _DRAW_BITS) - 1)
    draw = _check_count("draw", draw, 0, 2**_DRAW_BITS - 1)
    key = [_check_count("seed", seed, 0, _MAX_SEED), layer | draw << (64 - _DRAW_BITS)]
    f_in, f_out = _check_count("f_in", f_in, 1), _check_count("f_out", f_out, 1)
    dtype = _check_dtype(dtype)
    raw = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(f_in * f_out)
    unit = (raw >> np.uint64(11)) * 2.0**-53
    limit = np.sqrt(6.0 / (f_in + f_out))
    return (limit * (2.0 * unit - 1.0)).reshape(f_in, f_out).astype(dtype)


def zeros(f_out: int, dtype: DTypeLike) -> np.ndarray:
    """Return the start value of a bias, shape (f_out,): zeros of dtype float32 or float64."""
    return np.zeros(_check_count("f_out", f_out, 1), _check_dtype(dtype))


def _check_dtype(dtype: DTypeLike) -> np.dtype:
    dtype = np.dtype(dtype)
    if dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise TypeError(f"dtype must be float32 or float64, got {dtype}")
    return dtype
