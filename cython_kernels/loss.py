"""Softmax cross-entropy over the labelled training vertices."""

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
    scale
        Factor of the gradient (not of the returned sum), such as 1 / (training vertices of the graph).
    d_logits
        [n, n_classes], of the dtype of `logits`: receives scale * (softmax - onehot) in the rows of
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
    scale = checks.real("scale", scale)
    if validate:
        _check_labels(labels, mask, n_classes)
    with_gradient = d_logits is not None
    if with_gradient:
        gradient = checks.output("d_logits", d_logits, logits.dtype, logits.shape)
        checks.same_or_apart("d_logits", gradient, "logits", logits)
        checks.apart("d_logits", gradient, labels=labels, mask=mask)
    else:
        gradient = np.empty((0, 0), logits.dtype)
    row_loss = np.empty(n)
    return _loss.softmax_cross_entropy(
        logits,
        labels,
        mask.view(np.uint8),
        row_loss,
        gradient,
        with_gradient,
        scale,
        checks.threads(num_threads),
    )


def _check_labels(labels: IntArray, mask: npt.NDArray[Any], n_classes: int) -> None:
    """Refuse a label out of range under the mask, naming the first."""
    bad = (mask != 0) & ((labels < 0) | (labels >= n_classes))
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(
            f"labels[{at}] = {labels[at]} is outside 0..{n_classes - 1} and the mask is set there"
        )
