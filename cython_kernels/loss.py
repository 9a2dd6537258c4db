"""Cross-entropies over the labelled training vertices: of one class a vertex, and of any number."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import _loss, checks
from .checks import FloatArray, IntArray


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
    """Sum -log softmax(logits)[label] over the rows of a mask; optionally also its gradient.

    O(n + m n_classes) time for m rows under the mask (O(n n_classes) with a gradient), 8 bytes of memory a
    row. A row is computed in double precision and the rows are added in their order, so that the sum depends
    neither on `num_threads` nor on what is outside the mask.

    Parameters
    ----------
    logits
        float32 or float64 [n, n_classes].
    labels
        int32 [n]: each in 0 .. n_classes - 1 where the mask is set, anything elsewhere.
    mask
        uint8 or bool [n]: the rows that count.
    class_weights
        float64 [n_classes]: factor of a row, in the sum and the gradient, by its label. None: 1 for all.
    scale
        Factor of the gradient (not of the returned sum), such as 1 / (training vertices of the graph).
    d_logits
        [n, n_classes], of the dtype of `logits`: receives scale * weight * (softmax - onehot) in the rows of
        the mask and exactly 0 elsewhere. `logits` itself, or apart from the inputs. None: no gradient.
    num_threads
        Threads over pieces of the rows.
    validate
        False skips the range check of the labels.

    Returns
    -------
    float
        The sum, in nats; 0.0 if the mask is empty.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above, or a label out of range under the mask.
    """
    checks.array("logits", logits, checks.FLOATS, (None, None))
    n, n_classes = logits.shape
    checks.array("labels", labels, "int32", (n,))
    checks.array("mask", mask, ("uint8", "bool"), (n,))
    weights = checks.optional("class_weights", class_weights, _WEIGHTS, n_classes)
    scale = checks.real("scale", scale)
    if validate:
        _check_labels(labels, mask, n_classes)
    gradient = _gradient(d_logits, logits, labels=labels, mask=mask, class_weights=weights)
    row_loss = np.empty(n)
    return _loss.softmax_cross_entropy(
        logits,
        labels,
        mask.view(np.uint8),
        weights,
        row_loss,
        gradient,
        d_logits is not None,
        scale,
        checks.threads(num_threads),
    )


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
    """Sum the binary cross-entropies of all classes over the rows of a mask; optionally also their gradient.

    A class that the vertex has costs -w log sigmoid(z), one that it has not -log(1 - sigmoid(z)); z is its
    logit and w its `pos_weight`. O(n + m n_classes) time for m rows under the mask (O(n n_classes) with a
    gradient), 8 bytes of memory a row. A row is computed in double precision and the rows are added in their
    order, so that the sum depends neither on `num_threads` nor on what is outside the mask. No logit
    overflows.

    Parameters
    ----------
    logits
        float32 or float64 [n, n_classes].
    labels
        uint8 [n, n_classes]: 1 for the classes of a vertex, 0 for the others and 255 where it is not known,
        which costs nothing; anything where the mask is not set.
    mask
        uint8 or bool [n]: the rows that count.
    pos_weight
        float64 [n_classes]: factor of what a class costs the vertices that have it. None: 1 for all.
    scale
        Factor of the gradient (not of the returned sum), such as 1 / (training vertices x classes).
    d_logits
        [n, n_classes], of the dtype of `logits`: receives scale * w * (sigmoid - 1) for classes that a row of
        the mask has, scale * sigmoid for the others, and exactly 0 where it is not known and in other rows.
        `logits` itself, or apart from the inputs. None: no gradient.
    num_threads
        Threads over pieces of the rows.
    validate
        False skips the check of the labels; what is neither 0 nor 255 is then a class that the vertex has.

    Returns
    -------
    float
        The sum, in nats; 0.0 if the mask is empty.

    Raises
    ------
    TypeError, ValueError
        An argument of another type, shape or layout than above, or another label under the mask.
    """
    checks.array("logits", logits, checks.FLOATS, (None, None))
    n, n_classes = logits.shape
    checks.array("labels", labels, "uint8", (n, n_classes))
    checks.array("mask", mask, ("uint8", "bool"), (n,))
    weights = checks.optional("pos_weight", pos_weight, _WEIGHTS, n_classes)
    scale = checks.real("scale", scale)
    if validate:
        _check_marks(labels, mask)
    gradient = _gradient(d_logits, logits, labels=labels, mask=mask, pos_weight=weights)
    row_loss = np.empty(n)
    return _loss.sigmoid_cross_entropy(
        logits,
        labels,
        mask.view(np.uint8),
        weights,
        row_loss,
        gradient,
        d_logits is not None,
        scale,
        checks.threads(num_threads),
    )


_WEIGHTS: np.dtype[Any] = np.dtype(np.float64)


def _gradient(d_logits: FloatArray | None, logits: FloatArray, **inputs: object) -> FloatArray:
    """Check where the gradient goes; an empty array stands for nowhere."""
    if d_logits is None:
        return np.empty((0, 0), logits.dtype)
    gradient = checks.output("d_logits", d_logits, logits.dtype, logits.shape)
    checks.same_or_apart("d_logits", gradient, "logits", logits)
    checks.apart("d_logits", gradient, **inputs)
    return gradient


def _check_labels(labels: IntArray, mask: npt.NDArray[Any], n_classes: int) -> None:
    """Refuse a label out of range under the mask, naming the first."""
    bad = (mask != 0) & ((labels < 0) | (labels >= n_classes))
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(
            f"labels[{at}] = {labels[at]} is outside 0..{n_classes - 1} and the mask is set there"
        )


def _check_marks(labels: npt.NDArray[np.uint8], mask: npt.NDArray[Any]) -> None:
    """Refuse a label that is neither 0, 1 nor 255 under the mask, naming the first."""
    wrong = (labels > 1) & (labels != 255)
    bad = wrong.any(axis=1) & (mask != 0)
    if bad.any():
        at = int(bad.argmax())
        column = int(wrong[at].argmax())
        raise ValueError(
            f"labels[{at}, {column}] = {labels[at, column]} is neither 0, 1 nor 255 and the mask is set there"
        )
