"""Dense maths of the apply-vertex stage (AV) and its backward (dAV).

The one home of these formulas: graph servers and workers call the same functions, so a task gives
the same bits wherever it ran (given one BLAS thread and the same NumPy). Arrays are plain
``float32`` or ``float64``; every array of a call has the same dtype, and it is kept. A block may
have no rows.

For the row-wise passes and the loss the graph server's own cores have compiled twins with the same
names in `cython_kernels`; masks are equal, values to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lambda_pkg.dropout import keep_mask

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
    accumulate: bool = False,
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
    accumulate : bool
        Add the product to `out`, which must then be given.

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
    if accumulate:
        if out is None:
            raise ValueError("accumulate=True adds to out, got out=None")
        _add_product(h, w, out)
    else:
        out = np.matmul(h, w, out=out)
    if bias is not None:
        np.add(out, bias, out=out)
    if relu:
        np.maximum(out, 0, out=out)
    return out


_BLOCK = 64 * 1024  # elements of a product that is added to something: it stays in a core's cache


def _add_product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Add ``a @ b`` to `out`, some rows at a time."""
    rows = max(1, _BLOCK // max(1, b.shape[1]))
    product = np.empty((min(rows, a.shape[0]), b.shape[1]), a.dtype)
    for start in range(0, a.shape[0], rows):
        block = out[start : start + rows]
        np.add(block, np.matmul(a[start : start + rows], b, out=product[: len(block)]), out=block)


def apply_vertex_backward(
    h: np.ndarray,
    w: np.ndarray,
    d_out: np.ndarray,
    *,
    need_d_h: bool = True,
    d_w: np.ndarray | None = None,
    d_h: np.ndarray | None = None,
    accumulate: bool = False,
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
    accumulate : bool
        Add to `d_h`, which must then be given.

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
    if accumulate:
        if d_h is None:
            raise ValueError("accumulate=True adds to d_h, got d_h=None")
        _add_product(d_out, w.T, d_h)
        return d_w, d_h
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


def bias_relu_dropout(
    z: np.ndarray,
    bias: np.ndarray,
    gids: np.ndarray,
    p: float,
    *,
    seed: int,
    epoch: int,
    layer: int,
    relu: bool = True,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return ``dropout(relu(z + bias))``, the activation of a hidden layer.

    Parameters
    ----------
    z : ndarray, (n, f)
    bias : ndarray, (f,)
    gids : ndarray, (n,), int64
        Vertex ids, which key the masks.
    p : float
        Probability of dropping a value; 0: no dropout.
    seed, epoch, layer : int
        What else the masks depend on (`lambda_pkg.dropout`).
    relu : bool
        False leaves ReLU out.
    out : ndarray, (n, f), optional
        Buffer; `z` itself or apart from it.

    Returns
    -------
    ndarray, (n, f)

    Raises
    ------
    TypeError, ValueError
        Dtypes or shapes that do not fit together.
    """
    _check_float("z", z, 2)
    _check_shape("bias", bias, (z.shape[1],), z.dtype)
    _check_ids(gids, z.shape[0])
    out = np.add(z, bias, out=out)
    if relu:
        np.maximum(out, 0, out=out)
    if p > 0:
        _drop(out, gids, p, seed=seed, epoch=epoch, layer=layer)
    return out


def _drop(out: np.ndarray, gids: np.ndarray, p: float, *, seed: int, epoch: int, layer: int) -> None:
    np.multiply(out, out.dtype.type(1.0 / (1.0 - p)), out=out)
    _cut_out(out, gids, p, seed=seed, epoch=epoch, layer=layer)


def _cut_out(out: np.ndarray, gids: np.ndarray, p: float, *, seed: int, epoch: int, layer: int) -> None:
    kept = keep_mask(gids, out.shape[1], p, seed=seed, epoch=epoch, layer=layer)
    np.copyto(out, 0, where=np.logical_not(kept, out=kept))


def relu_dropout_backward(
    d_out: np.ndarray, activated: np.ndarray, p: float, *, out: np.ndarray | None = None
) -> np.ndarray:
    """Return the gradient of ``z + bias`` in `bias_relu_dropout`.

    Parameters
    ----------
    d_out : ndarray, (n, f)
        Gradient of its result.
    activated : ndarray, (n, f)
        Its result: positive exactly where both ReLU and dropout let a value pass.
    p : float
        As in the forward.
    out : ndarray, (n, f), optional
        Buffer; `d_out` itself or apart from the inputs.

    Returns
    -------
    ndarray, (n, f)

    Raises
    ------
    TypeError, ValueError
        Dtypes or shapes that do not fit together.
    """
    _check_float("d_out", d_out, 2)
    _check_shape("activated", activated, d_out.shape, d_out.dtype)
    passed = activated > 0
    out = np.multiply(d_out, d_out.dtype.type(1.0 / (1.0 - p)), out=out)
    np.copyto(out, 0, where=np.logical_not(passed, out=passed))
    return out


def bias_elu_dropout(
    z: np.ndarray,
    bias: np.ndarray,
    gids: np.ndarray,
    p: float,
    *,
    seed: int,
    epoch: int,
    layer: int,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return ``dropout(elu(z + bias))``, elu(z) = z if z > 0 else e^z - 1 (Clevert et al., ICLR 2016).

    The compiled twin has the same masks; its exponentials may differ in the last bits.

    Parameters
    ----------
    z : ndarray, (n, f)
    bias : ndarray, (f,)
    gids : ndarray, (n,), int64
        Vertex ids, which key the masks.
    p : float
        Probability of dropping a value; 0: no dropout.
    seed, epoch, layer : int
        What else the masks depend on (`lambda_pkg.dropout`).
    out : ndarray, (n, f), optional
        Buffer; `z` itself or apart from it.

    Returns
    -------
    ndarray, (n, f)
        A NaN that is kept stays NaN.

    Raises
    ------
    TypeError, ValueError
        Dtypes or shapes that do not fit together.
    """
    _check_float("z", z, 2)
    _check_shape("bias", bias, (z.shape[1],), z.dtype)
    _check_ids(gids, z.shape[0])
    out = np.add(z, bias, out=out)
    negative = np.minimum(out, 0)
    np.copyto(out, np.expm1(negative, out=negative), where=out <= 0)
    if p > 0:
        _drop(out, gids, p, seed=seed, epoch=epoch, layer=layer)
    return out


def elu_dropout_backward(
    d_h: np.ndarray,
    h: np.ndarray,
    gids: np.ndarray,
    p: float,
    *,
    seed: int,
    epoch: int,
    layer: int,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return the gradient of ``z + bias`` in `bias_elu_dropout`, of the same bits as the compiled twin's.

    Parameters
    ----------
    d_h : ndarray, (n, f)
        Gradient of its result.
    h : ndarray, (n, f)
        Its result. What dropout was given is h (1 - p), of which the slope of ELU follows.
    gids, p, seed, epoch, layer
        As in the forward: the mask is made again.
    out : ndarray, (n, f), optional
        Buffer; `d_h` itself or apart from the inputs.

    Returns
    -------
    ndarray, (n, f)

    Raises
    ------
    TypeError, ValueError
        Dtypes or shapes that do not fit together.
    """
    _check_float("d_h", d_h, 2)
    _check_shape("h", h, d_h.shape, d_h.dtype)
    _check_ids(gids, d_h.shape[0])
    slope = h * h.dtype.type(1.0 - p)
    np.add(np.minimum(slope, 0, out=slope), 1, out=slope)
    out = np.multiply(d_h, d_h.dtype.type(1.0 / (1.0 - p)), out=out)
    np.multiply(out, slope, out=out)
    if p > 0:
        _cut_out(out, gids, p, seed=seed, epoch=epoch, layer=layer)
    return out


def _check_ids(gids: np.ndarray, n: int) -> None:
    if gids.shape != (n,):
        raise ValueError(f"gids must have shape {(n,)}, got {gids.shape}")


SMALLEST_NORM = 1e-12  # a shorter row is divided by this


LAYER_NORM_EPSILON = 1e-5  # added to the variance


def layer_norm(a: np.ndarray, scale: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
    """Return each row with mean 0 and variance 1, times `scale`.

    Parameters
    ----------
    a : ndarray, (n, f)
    scale : ndarray, (f,)
    out : ndarray, (n, f), optional
        Buffer; `a` itself or apart from it.

    Returns
    -------
    ndarray, (n, f)
        ``(a - mean) / sqrt(variance + 1e-5) * scale``, mean and variance over the columns of a row.

    Raises
    ------
    TypeError, ValueError
        Dtypes or shapes that do not fit together.

    References
    ----------
    Ba, Kiros and Hinton, Layer normalization, 2016, equation 4.
    """
    _check_float("a", a, 2)
    _check_shape("scale", scale, a.shape[1:], a.dtype)
    if out is not None:
        _check_shape("out", out, a.shape, a.dtype)
    return np.multiply(_standard_rows(a)[0], scale, out=out)


def layer_norm_backward(
    d_out: np.ndarray,
    a: np.ndarray,
    scale: np.ndarray,
    *,
    out: np.ndarray | None = None,
    d_scale: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of `a` and `scale` in `layer_norm`.

    Parameters
    ----------
    d_out : ndarray, (n, f)
        Gradient of its result.
    a, scale
        As for `layer_norm`.
    out : ndarray, (n, f), optional
        Buffer; `d_out` itself or apart from the inputs.
    d_scale : ndarray, (f,), optional
        Buffer.

    Returns
    -------
    d_a : ndarray, (n, f)
        ``(g - mean(g) - n mean(g n)) / deviation`` with ``g = d_out scale`` and n the normed rows.
    d_scale : ndarray, (f,)

    Raises
    ------
    TypeError, ValueError
        Dtypes or shapes that do not fit together.
    """
    _check_float("d_out", d_out, 2)
    _check_shape("a", a, d_out.shape, d_out.dtype)
    _check_shape("scale", scale, a.shape[1:], a.dtype)
    normed, inverse = _standard_rows(a)
    d_scale = np.sum(d_out * normed, axis=0, out=d_scale)
    g = d_out * scale
    along = np.einsum("ij,ij->i", g, normed)[:, None] / a.shape[1]
    g -= g.mean(axis=1, keepdims=True)
    g -= normed * along
    return np.multiply(g, inverse, out=out), d_scale


def _standard_rows(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of mean 0 and variance 1, and the inverse deviations."""
    centred = a - a.mean(axis=1, keepdims=True)
    variance = np.einsum("ij,ij->i", centred, centred)[:, None] / a.shape[1]
    inverse = 1 / np.sqrt(variance + a.dtype.type(LAYER_NORM_EPSILON))
    return np.multiply(centred, inverse, out=centred), inverse


def join_layers(hidden: Sequence[np.ndarray], how: str, *, out: np.ndarray | None = None) -> np.ndarray:
    """Return the outputs of several layers as one input.

    Parameters
    ----------
    hidden : sequence of ndarray, (n, f)
        Of each layer, in order.
    how : {'cat', 'max'}
        Beside each other, or the largest of each element.
    out : ndarray, (n, k f) or (n, f), optional
        Buffer.

    Raises
    ------
    ValueError
        Another `how`, or shapes that do not fit together.
    """
    if how == "cat":
        return np.concatenate(hidden, axis=1, out=out)
    if how != "max":
        raise ValueError(f"how must be cat or max, got {how!r}")
    out = np.array(hidden[0]) if out is None else out
    out[...] = hidden[0]
    for more in hidden[1:]:
        np.maximum(out, more, out=out)
    return out


def join_backward(
    d_out: np.ndarray, joined: np.ndarray, hidden: Sequence[np.ndarray], how: str
) -> np.ndarray:
    """Return the gradient of a layer's output in `join_layers`.

    Parameters
    ----------
    d_out, joined : ndarray
        Gradient of the result, and the result.
    hidden : sequence of ndarray, (n, f)
        Outputs of this layer, which is the last of them, and of those before.
    how : {'cat', 'max'}
        Of equal values that of the first layer is taken.

    Returns
    -------
    ndarray, (n, f)
    """
    mine = hidden[-1]
    if how == "cat":
        first = sum(one.shape[1] for one in hidden[:-1])
        return d_out[:, first : first + mine.shape[1]]
    taken = mine == joined
    for before in hidden[:-1]:
        taken &= before != joined
    return d_out * taken


def l2_normalise(a: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
    """Return each row divided by its Euclidean norm.

    Parameters
    ----------
    a : ndarray, (n, f)
    out : ndarray, (n, f), optional
        Buffer; `a` itself or apart from it.

    Returns
    -------
    ndarray, (n, f)
        A row of zeros stays one.

    Raises
    ------
    TypeError
        A dtype other than float32/float64, or a buffer of another dtype.
    ValueError
        Shapes that do not fit together.
    """
    _check_float("a", a, 2)
    if out is not None:
        _check_shape("out", out, a.shape, a.dtype)
    return np.divide(a, _norms(a), out=out)


def l2_normalise_dropout(
    a: np.ndarray,
    gids: np.ndarray,
    p: float,
    *,
    seed: int,
    epoch: int,
    layer: int,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return ``dropout(l2_normalise(a))``; arguments as for `bias_relu_dropout`."""
    out = l2_normalise(a, out=out)
    if p > 0:
        _drop(out, gids, p, seed=seed, epoch=epoch, layer=layer)
    return out


def l2_normalise_backward(d_out: np.ndarray, a: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
    """Return the gradient of `a` in `l2_normalise`: ``(d - n (n . d)) / norm`` with n the normalised row.

    Parameters
    ----------
    d_out : ndarray, (n, f)
        Gradient of its result.
    a : ndarray, (n, f)
    out : ndarray, (n, f), optional
        Buffer; `d_out` itself or apart from the inputs.

    Returns
    -------
    ndarray, (n, f)
        ``d / 1e-12`` for a row of norm below that, which no gradient of the norm reaches.

    Raises
    ------
    TypeError, ValueError
        Dtypes or shapes that do not fit together.
    """
    _check_float("d_out", d_out, 2)
    _check_shape("a", a, d_out.shape, d_out.dtype)
    norms = _norms(a)
    along = np.einsum("ij,ij->i", d_out, a)[:, None] / (norms * norms)
    np.copyto(along, 0, where=norms <= SMALLEST_NORM)
    out = np.subtract(d_out, a * along, out=out)
    return np.divide(out, norms, out=out)


def _norms(a: np.ndarray) -> np.ndarray:
    """Return what each row is divided by, as a column."""
    squares = np.einsum("ij,ij->i", a, a)[:, None]
    return np.maximum(np.sqrt(squares, out=squares), a.dtype.type(SMALLEST_NORM), out=squares)


def add_self(x: np.ndarray, own: np.ndarray, eps: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
    """Return ``x + (1 + eps) own``: GIN's sum over the neighbours, and the vertex itself.

    Parameters
    ----------
    x, own : ndarray, (n, f)
    eps : ndarray, (1,)
    out : ndarray, (n, f), optional
        Buffer; `x` itself or apart from the inputs.

    Raises
    ------
    TypeError, ValueError
        Dtypes or shapes that do not fit together.
    """
    _check_float("x", x, 2)
    _check_shape("own", own, x.shape, x.dtype)
    _check_shape("eps", eps, (1,), x.dtype)
    return np.add(x, own * (1 + eps), out=out)


def self_gradient(d_out: np.ndarray, own: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the gradient of `eps` in `add_self`: the sum of all ``d_out * own``, rows added in float64.

    Parameters
    ----------
    d_out, own : ndarray, (n, f)
    out : ndarray, (1,), optional
        Buffer, overwritten.

    Raises
    ------
    TypeError, ValueError
        Dtypes or shapes that do not fit together.
    """
    _check_float("d_out", d_out, 2)
    _check_shape("own", own, d_out.shape, d_out.dtype)
    if out is None:
        out = np.empty(1, d_out.dtype)
    else:
        _check_shape("out", out, (1,), d_out.dtype)
    out[...] = np.einsum("ij,ij->i", d_out, own).sum(dtype=np.float64)
    return out


def softmax_cross_entropy(
    logits: np.ndarray,
    labels: np.ndarray,
    mask: np.ndarray,
    *,
    class_weights: np.ndarray | None = None,
    scale: float = 1.0,
) -> tuple[float, np.ndarray]:
    """Return the sum of -log softmax(logits)[label] over the rows of a mask, and its gradient.

    Parameters
    ----------
    logits : ndarray, (n, n_classes)
        Computed in double precision whatever their dtype.
    labels : ndarray, (n,), int
        In 0 .. n_classes - 1 where the mask is set, anything elsewhere.
    mask : ndarray, (n,)
        Not 0 in the rows that count.
    class_weights : ndarray, (n_classes,), float64, optional
        Factor of a row, in the sum and the gradient, by its label.
    scale : float
        Factor of the gradient, not of the sum.

    Returns
    -------
    loss : float
        In nats.
    d_logits : ndarray, (n, n_classes)
        ``scale * weight * (softmax - onehot)`` in the rows of the mask, exactly 0 elsewhere.

    Raises
    ------
    TypeError, ValueError
        Dtypes or shapes that do not fit together, or a label out of range under the mask.
    """
    _check_loss(logits, labels, mask, (len(logits),), "class_weights", class_weights)
    n_classes = logits.shape[1]
    d_logits = np.zeros_like(logits)
    rows = np.flatnonzero(mask)
    if len(rows) == 0:
        return 0.0, d_logits
    wanted = labels[rows]
    if wanted.min() < 0 or wanted.max() >= n_classes:
        raise ValueError(
            f"labels under the mask must lie in 0..{n_classes - 1}, got {wanted.min()}..{wanted.max()}"
        )
    z = logits[rows].astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    picked = z[np.arange(len(rows)), wanted]
    np.exp(z, out=z)
    totals = z.sum(axis=1)
    losses = np.log(totals) - picked
    z /= totals[:, None]
    z[np.arange(len(rows)), wanted] -= 1.0
    if class_weights is None:
        z *= scale
    else:
        weights = class_weights[wanted]
        losses *= weights
        z *= (scale * weights)[:, None]
    d_logits[rows] = z
    return float(np.cumsum(losses)[-1]), d_logits  # row after row, like the compiled twin


UNKNOWN = 255  # a label of which nobody knows whether it is 0 or 1


def sigmoid_cross_entropy(
    logits: np.ndarray,
    labels: np.ndarray,
    mask: np.ndarray,
    *,
    pos_weight: np.ndarray | None = None,
    scale: float = 1.0,
) -> tuple[float, np.ndarray]:
    """Return the sum of all classes' binary cross-entropies over the rows of a mask, and its gradient.

    Parameters
    ----------
    logits : ndarray, (n, n_classes)
        Computed in double precision whatever their dtype; none overflows.
    labels : ndarray, (n, n_classes), uint8
        1 for the classes of a vertex, 0 for the others and 255 where it is not known, which costs nothing;
        anything where the mask is not set.
    mask : ndarray, (n,)
        Not 0 in the rows that count.
    pos_weight : ndarray, (n_classes,), float64, optional
        Factor of what a class costs the vertices that have it.
    scale : float
        Factor of the gradient, not of the sum.

    Returns
    -------
    loss : float
        In nats.
    d_logits : ndarray, (n, n_classes)
        In the rows of the mask ``scale * weight * (sigmoid - 1)`` for classes that the vertex has and
        ``scale * sigmoid`` for the others; exactly 0 where it is not known, and elsewhere.

    Raises
    ------
    TypeError, ValueError
        Dtypes or shapes that do not fit together, or another label under the mask.
    """
    _check_loss(logits, labels, mask, logits.shape, "pos_weight", pos_weight)
    d_logits = np.zeros_like(logits)
    rows = np.flatnonzero(mask)
    if logits[rows].size == 0:
        return 0.0, d_logits
    marks = labels[rows]
    has, known = marks == 1, marks != UNKNOWN
    if (marks[known] > 1).any():
        raise ValueError(f"labels under the mask must be 0, 1 or {UNKNOWN}, got {marks[known].max()}")
    sign = np.where(has, -1.0, 1.0)
    z = logits[rows] * sign  # large where the answer is wrong
    decay = np.exp(-np.abs(z))
    losses = np.log1p(decay) + np.maximum(z, 0)
    slopes = np.where(z < 0, decay, 1.0) / (1.0 + decay) * sign
    if pos_weight is not None:
        weights = np.where(has, pos_weight, 1.0)
        losses *= weights
        slopes *= weights
    slopes *= scale
    for array in (losses, slopes):
        np.copyto(array, 0, where=~known)
    d_logits[rows] = slopes
    return float(np.cumsum(losses.sum(axis=1))[-1]), d_logits


def _check_loss(
    logits: np.ndarray,
    labels: np.ndarray,
    mask: np.ndarray,
    labels_shape: tuple[int, ...],
    weights_name: str,
    weights: np.ndarray | None,
) -> None:
    _check_float("logits", logits, 2)
    n, n_classes = logits.shape
    for name, array, shape in (("labels", labels, labels_shape), ("mask", mask, (n,))):
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    if weights is not None:
        _check_shape(weights_name, weights, (n_classes,), np.dtype(np.float64))


MOST_IN_CONFUSION = 32  # classes up to which every pair of them is counted


def tally_width(n_classes: int, *, several: bool) -> int:
    """Return the columns of a `tally`; `several`: a vertex may have several classes."""
    pairs = 0 if several or n_classes > MOST_IN_CONFUSION else n_classes * n_classes
    return 1 + 3 * n_classes + pairs


def tally(logits: np.ndarray, labels: np.ndarray, split: np.ndarray, n_sets: int) -> np.ndarray:
    """Count right and wrong answers by set and class.

    The answer to a vertex is the class of the largest logit or, if a vertex may have several, all classes of
    logits above 0 (a probability above 1/2).

    Parameters
    ----------
    logits : ndarray, (n, n_classes)
    labels : ndarray, (n,), int, or (n, n_classes), uint8
        A class, in 0 .. n_classes - 1 in the rows of a set; or 1 for each class of a vertex, 0 for others and
        255 where it is not known, which counts for nothing.
    split : ndarray, (n,), int
        Set of each row: 1 .. `n_sets`, or 0 for none.
    n_sets : int

    Returns
    -------
    ndarray, (n_sets, tally_width(n_classes)), int64
        Of each set: vertices whose answer is right in whole; by class the vertices for which it is rightly
        answered, is answered, is true; and, for at most `MOST_IN_CONFUSION` classes of which a vertex has
        one, vertices by (true class, answer), row after row.
    """
    n_classes = logits.shape[1]
    counts = np.zeros((n_sets, tally_width(n_classes, several=labels.ndim == 2)), np.int64)
    if len(logits) == 0:
        return counts
    answers = logits > 0 if labels.ndim == 2 else logits.argmax(axis=1)
    for member, count in enumerate(counts, start=1):
        rows = np.flatnonzero(split == member)
        if len(rows) == 0:
            continue
        by_class = count[1 : 1 + 3 * n_classes].reshape(3, n_classes)
        if labels.ndim == 2:
            marks = labels[rows]
            has, answer = marks == 1, answers[rows] & (marks != UNKNOWN)
            count[0] = np.count_nonzero((has == answer).all(axis=1))
            by_class[:] = [np.count_nonzero(some, axis=0) for some in (has & answer, answer, has)]
            continue
        wanted, found = labels[rows].astype(np.int64), answers[rows]
        right = found == wanted
        count[0] = np.count_nonzero(right)
        by_class[:] = [np.bincount(some, minlength=n_classes) for some in (found[right], found, wanted)]
        if count.size > 1 + 3 * n_classes:
            pairs = np.bincount(wanted * n_classes + found, minlength=n_classes * n_classes)
            count[1 + 3 * n_classes :] = pairs
    return counts
