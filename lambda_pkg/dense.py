"""Dense maths of the apply-vertex stage (AV) and its backward (dAV).

The one home of these formulas: graph servers and workers call the same functions, so a task gives
the same bits wherever it ran (given one BLAS thread and the same NumPy). Arrays are plain
``float32`` or ``float64``; every array of a call has the same dtype, and it is kept. A block may
have no rows.
"""

from __future__ import annotations

import numpy as np

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def _check_float(name: str, array: np.ndarray, ndim: int, dtype: np.dtype | None = None) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, got {type(array).__name__}")
    if array.dtype not in _FLOATS or (dtype is not None and array.dtype != dtype):
        wanted = "float32 or float64" if dtype is None else f"{dtype} like the other arrays"
        raise TypeError(f"{name} must be {wanted}, got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s), got shape {array.shape}")


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
    _check_float(name, array, len(shape), dtype)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")


def _check_factors(h: np.ndarray, w: np.ndarray) -> None:
    _check_float("h", h, 2)
    _check_float("w", w, 2, h.dtype)
    if h.shape[1] != w.shape[0]:
        raise ValueError(f"h has {h.shape[1]} columns but w has {w.shape[0]} rows: h {h.shape}, w {w.shape}")


def apply_vertex(
    h: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    relu: bool = False,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return ``h @ w (+ bias)``, cut off below zero if `relu`.

    Parameters
    ----------
    h : ndarray, (n, f_in)
        Rows of a vertex interval.
    w : ndarray, (f_in, f_out)
        Weights.
    bias : ndarray, (f_out,), optional
    relu : bool
        Apply ``max(0, .)``. A NaN stays NaN.
    out : ndarray, (n, f_out), optional
        Buffer for the result; made if absent.

    Returns
    -------
    ndarray, (n, f_out)
        `out`, of the dtype of `h`.

    Raises
    ------
    TypeError
        A dtype other than float32/float64, or arrays of different dtypes.
    ValueError
        Shapes that do not fit together.
    """
    _check_factors(h, w)
    if bias is not None:
        _check_shape("bias", bias, (w.shape[1],), h.dtype)
    if out is not None:
        _check_shape("out", out, (h.shape[0], w.shape[1]), h.dtype)
    out = np.matmul(h, w, out=out)
    if bias is not None:
        np.add(out, bias, out=out)
    if relu:
        np.maximum(out, 0, out=out)
    return out


def apply_vertex_backward(
    h: np.ndarray,
    w: np.ndarray,
    d_out: np.ndarray,
    *,
    need_d_h: bool = True,
    d_w: np.ndarray | None = None,
    d_h: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the gradients of ``h @ w`` with respect to `w` and `h`.

    Parameters
    ----------
    h : ndarray, (n, f_in)
        What the forward read.
    w : ndarray, (f_in, f_out)
        The weights the forward used.
    d_out : ndarray, (n, f_out)
        Gradient of ``h @ w`` (that is, after the backward of relu).
    need_d_h : bool
        False skips the gradient of `h` (nothing below the first layer wants it).
    d_w : ndarray, (f_in, f_out), optional
        Buffer, overwritten.
    d_h : ndarray, (n, f_in), optional
        Buffer, overwritten.

    Returns
    -------
    d_w : ndarray, (f_in, f_out)
        ``h.T @ d_out``; zeros if there are no rows.
    d_h : ndarray, (n, f_in), or None
        ``d_out @ w.T``; None if not `need_d_h`.

    Raises
    ------
    TypeError
        A dtype other than float32/float64, or arrays of different dtypes.
    ValueError
        Shapes that do not fit together, or a `d_h` buffer that is not wanted.
    """
    _check_factors(h, w)
    _check_shape("d_out", d_out, (h.shape[0], w.shape[1]), h.dtype)
    if d_w is not None:
        _check_shape("d_w", d_w, w.shape, h.dtype)
    if d_h is not None:
        if not need_d_h:
            raise ValueError("a d_h buffer was given together with need_d_h=False: leave one of them out")
        _check_shape("d_h", d_h, h.shape, h.dtype)
    d_w = np.matmul(h.T, d_out, out=d_w)
    return d_w, np.matmul(d_out, w.T, out=d_h) if need_d_h else None


def bias_gradient(d_out: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the column sums of `d_out`, added up in float64.

    Parameters
    ----------
    d_out : ndarray, (n, f_out)
    out : ndarray, (f_out,), optional
        Buffer, overwritten.

    Returns
    -------
    ndarray, (f_out,)
        `out`, of the dtype of `d_out`; zeros if there are no rows.

    Raises
    ------
    TypeError
        A dtype other than float32/float64, or a buffer of another dtype.
    ValueError
        Shapes that do not fit together.
    """
    _check_float("d_out", d_out, 2)
    if out is None:
        out = np.empty(d_out.shape[1], d_out.dtype)
    else:
        _check_shape("out", out, (d_out.shape[1],), d_out.dtype)
    # A column is added row after row: in float32 its error would grow with the number of rows.
    out[...] = np.add.reduce(d_out, axis=0, dtype=np.float64)
    return out
