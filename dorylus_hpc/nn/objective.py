"""What a model learns: one class a vertex, or any number of classes; and what each class counts.

    one       mean over the labelled training vertices of -w_y log softmax(z)_y, divided by the mean of w_y
    several   mean over the labelled training vertices and the classes, where it is known, of
              -p_c log sigmoid(z_c) for classes that the vertex has, -log(1 - sigmoid(z_c)) for the others

z are the logits and y the label; the weights w and p are 1 unless they are given. These are the means of
PyTorch's ``CrossEntropyLoss(weight=w)`` and ``BCEWithLogitsLoss(pos_weight=p)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cython_kernels import sigmoid_cross_entropy, softmax_cross_entropy


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss, before it is divided by what its mean is over.

    Attributes
    ----------
    several
        Whether a vertex may have several classes: labels are then 0, 1 and 255 (not known), (n, n_classes).
    class_weights : ndarray, (n_classes,), float64, or None
        Factor of a vertex by its class, or of what a class costs the vertices that have it; None: 1.
    """

    several: bool = False
    class_weights: np.ndarray | None = None

    def loss(
        self, logits: np.ndarray, labels: np.ndarray, mask: np.ndarray, divisor: float, d_logits: np.ndarray
    ) -> float:
        """Return the sum of the loss over the rows of a mask, and write the gradient of sum / divisor."""
        scale = 1.0 / divisor
        if self.several:
            return sigmoid_cross_entropy(
                logits, labels, mask, pos_weight=self.class_weights, scale=scale, d_logits=d_logits
            )
        return softmax_cross_entropy(
            logits, labels, mask, class_weights=self.class_weights, scale=scale, d_logits=d_logits
        )

    def op(self, divisor: float) -> tuple[str, dict[str, Any]]:
        """Return the name and the parameters of the op that does what `loss` does."""
        parameters: dict[str, Any] = {"scale": 1.0 / divisor}
        if self.class_weights is not None:
            parameters["pos_weight" if self.several else "class_weights"] = self.class_weights.tolist()
        return "sigmoid_cross_entropy" if self.several else "softmax_cross_entropy", parameters

    def divisor(self, members: np.ndarray, known: np.ndarray) -> float:
        """Return what the sum of the loss over a whole graph is divided by.

        Parameters
        ----------
        members, known : ndarray, (n_classes,), int
            Labelled training vertices of each class, and those of which it is known whether they have it.
        """
        if self.several:
            return float(known.sum())
        return float(members.sum() if self.class_weights is None else self.class_weights @ members)


def balanced_weights(members: np.ndarray, known: np.ndarray, *, several: bool) -> np.ndarray:
    """Return weights under which no class counts more for being frequent.

    Parameters
    ----------
    members, known : ndarray, (n_classes,), int
        Labelled training vertices of each class, and those of which it is known whether they have it.
    several
        Whether a vertex may have several.

    Returns
    -------
    ndarray, (n_classes,), float64
        For one class a vertex ``sum(members) / (n_classes * members)``: all classes add the same. For several
        ``(known - members) / members``: with a class and without it add the same. 1 for a class that no
        training vertex has, and for one that all have.

    References
    ----------
    King and Zeng, Logistic regression in rare events data, Political Analysis 9(2), 2001.
    """
    wanted = known - members if several else np.full(len(members), members.sum() / len(members))
    usable = (members > 0) & (wanted > 0)
    return np.divide(wanted, members, out=np.ones(len(members)), where=usable)
