"""Dense maths of graph attention: products, scores, and their gradients.

What attention does with edges is not here: a graph server's kernels sum over them. A layer has H heads of D
columns; its product ``D W`` has H D columns, those of a head beside each other.

References: Velickovic et al., Graph attention networks, ICLR 2018, equations 1 to 6 (`transform`); Brody,
Alon and Yahav, How attentive are graph attention networks?, ICLR 2022, equation 7.
"""

from __future__ import annotations

import numpy as np

from lambda_pkg.dense import apply_vertex, apply_vertex_backward, bias_gradient


def spread_heads(a: np.ndarray) -> np.ndarray:
    """Return the matrix that makes scores of products: ``(y @ spread_heads(a))[v, h] = y[v, h] . a[h]``.

    Parameters
    ----------
    a : ndarray, (H, D)
        A vector a head.

    Returns
    -------
    ndarray, (H D, H)
    """
    heads, columns = a.shape
    spread = np.zeros((heads, columns, heads), a.dtype)
    each = np.arange(heads)
    spread[each, :, each] = a
    return spread.reshape(heads * columns, heads)


def packed_weights(w: np.ndarray, a_source: np.ndarray) -> np.ndarray:
    """Return weights whose product has the scores of sources behind the columns of ``h @ w``.

    Parameters
    ----------
    w : ndarray, (f_in, H D)
    a_source : ndarray, (H, D)

    Returns
    -------
    ndarray, (f_in, H D + H)
    """
    return np.hstack([w, w @ spread_heads(a_source)])


def target_scores(packed: np.ndarray, a_target: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
    """Return the scores of targets.

    Parameters
    ----------
    packed : ndarray, (n, H D + anything)
        Products in the first columns.
    a_target : ndarray, (H, D)
    out : ndarray, (n, H), optional

    Returns
    -------
    ndarray, (n, H)
    """
    return np.matmul(packed[:, : a_target.size], spread_heads(a_target), out=out)


def transform(
    h: np.ndarray,
    w: np.ndarray,
    a_source: np.ndarray,
    a_target: np.ndarray,
    *,
    packed: np.ndarray | None = None,
    score_target: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the products of rows with the scores that they have as sources, and those as targets.

    Parameters
    ----------
    h : ndarray, (n, f_in)
    w : ndarray, (f_in, H D)
    a_source, a_target : ndarray, (H, D)
    packed : ndarray, (n, H D + H), optional
        Buffer, overwritten.
    score_target : ndarray, (n, H), optional
        Buffer, overwritten.

    Returns
    -------
    packed : ndarray, (n, H D + H)
        ``h @ w``, and behind it the scores ``(h @ w)[v, k] . a_source[k]``.
    score_target : ndarray, (n, H)
    """
    packed = apply_vertex(h, packed_weights(w, a_source), out=packed)
    return packed, target_scores(packed, a_target, out=score_target)


def scores_backward(
    packed: np.ndarray,
    a_source: np.ndarray,
    a_target: np.ndarray,
    d_y: np.ndarray,
    d_score_source: np.ndarray,
    d_score_target: np.ndarray,
    *,
    out: np.ndarray | None = None,
    d_a_source: np.ndarray | None = None,
    d_a_target: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the whole gradient of the products, and those of the vectors that make scores of them.

    Parameters
    ----------
    packed : ndarray, (n, H D + H)
        As `transform` left it.
    a_source, a_target : ndarray, (H, D)
    d_y : ndarray, (n, H D)
        Gradient of the products apart from their scores.
    d_score_source, d_score_target : ndarray, (n, H)
    out : ndarray, (n, H D), optional
        For the result; may be `d_y`.
    d_a_source, d_a_target : ndarray, (H, D), optional
        Buffers, overwritten.

    Returns
    -------
    out : ndarray, (n, H D)
    d_a_source, d_a_target : ndarray, (H, D)
    """
    d_source = _own_heads(packed, d_score_source, a_source, d_a_source)
    d_target = _own_heads(packed, d_score_target, a_target, d_a_target)
    scores = np.hstack([d_score_source, d_score_target])
    spread = np.hstack([spread_heads(a_source), spread_heads(a_target)])
    return np.add(d_y, scores @ spread.T, out=out), d_source, d_target


def _own_heads(packed: np.ndarray, d_score: np.ndarray, a: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    """Return the gradient of `a`: of each head's columns with its own scores alone."""
    heads, columns = a.shape
    every = (packed[:, : a.size].T @ d_score).reshape(heads, columns, heads)
    each = np.arange(heads)
    if out is None:
        return np.ascontiguousarray(every[each, :, each])
    out[...] = every[each, :, each]
    return out


def mean_heads(z: np.ndarray, bias: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
    """Return the mean of the heads, plus the bias.

    Parameters
    ----------
    z : ndarray, (n, H C)
    bias : ndarray, (C,)
    out : ndarray, (n, C), optional

    Returns
    -------
    ndarray, (n, C)
    """
    heads = z.shape[1] // len(bias)
    if heads == 1:
        return np.add(z, bias, out=out)
    out = np.mean(z.reshape(len(z), heads, len(bias)), axis=1, out=out)
    return np.add(out, bias, out=out)


def mean_heads_backward(
    d_out: np.ndarray,
    heads: int,
    *,
    d_z: np.ndarray | None = None,
    d_bias: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of `mean_heads`.

    Parameters
    ----------
    d_out : ndarray, (n, C)
    heads : int
    d_z : ndarray, (n, heads C), optional
        Buffer, overwritten.
    d_bias : ndarray, (C,), optional
        Buffer, overwritten.

    Returns
    -------
    d_z : ndarray, (n, heads C)
    d_bias : ndarray, (C,)
    """
    n, columns = d_out.shape
    d_z = np.empty((n, heads * columns), d_out.dtype) if d_z is None else d_z
    np.multiply(d_out[:, None], d_out.dtype.type(1 / heads), out=d_z.reshape(n, heads, columns))
    return d_z, bias_gradient(d_out, out=d_bias)


def transform_backward(
    h: np.ndarray,
    w: np.ndarray,
    a_source: np.ndarray,
    a_target: np.ndarray,
    packed: np.ndarray,
    d_y: np.ndarray,
    d_score_source: np.ndarray,
    d_score_target: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of `transform` with respect to w, a_source, a_target and h.

    Parameters
    ----------
    h, w, a_source, a_target, packed
        As for `transform`, and what it returned.
    d_y, d_score_source, d_score_target
        As for `scores_backward`.

    Returns
    -------
    d_w : ndarray, (f_in, H D)
    d_a_source, d_a_target : ndarray, (H, D)
    d_h : ndarray, (n, f_in)
    """
    whole, d_source, d_target = scores_backward(
        packed, a_source, a_target, d_y, d_score_source, d_score_target
    )
    d_w, d_h = apply_vertex_backward(h, w, whole)
    assert d_h is not None
    return d_w, d_source, d_target, d_h
