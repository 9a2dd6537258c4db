"""What answers are worth: accuracy, F1, ROC AUC and a report by class, from counts over the whole graph.

Every number is a quotient of counts that were added over all parts, so it does not depend on which rank has
which vertex, nor on whether a rank has any with a label:

    precision  TP / answered     recall  TP / true     F1  2 TP / (answered + true)

with TP, answered and true the numbers of vertices for which a class is rightly answered, is answered and is
true. *Micro* adds these over the classes first, *macro* is the mean of the classes' F1. The AUC is that of
the scores themselves, of all vertices, not of a curve with a few thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lambda_pkg.dense import tally_width

SETS = ("train", "val", "test")
METRICS = ("accuracy", "f1-micro", "f1-macro", "auc")


@dataclass(frozen=True)
class LabelForm:
    """What labels a graph has.

    Attributes
    ----------
    n_classes
    several
        Whether a vertex may have several classes.
    members
        Labelled vertices of each set.
    """

    n_classes: int
    several: bool
    members: tuple[int, int, int]

    @property
    def tally_shape(self) -> tuple[int, int]:
        """Shape of the counts of `lambda_pkg.dense.tally`."""
        return len(SETS), tally_width(self.n_classes, several=self.several)

    @property
    def default_metric(self) -> str:
        """What a run goes by if nothing else is asked for."""
        return "f1-micro" if self.several else "accuracy"


@dataclass(frozen=True, eq=False)
class Tally:
    """Counts of right and wrong answers of a whole graph, by set; and scores, where they are wanted.

    Attributes
    ----------
    form
        Of the labels.
    counts : ndarray, (sets, columns), int64
        As `lambda_pkg.dense.tally` has them.
    scores : list, by set, of pairs of ndarray
        Scores of the vertices of class 0 and of class 1, in any order; empty if they were not collected.
    """

    form: LabelForm
    counts: np.ndarray
    scores: tuple[tuple[np.ndarray, np.ndarray], ...] = ()

    @classmethod
    def of_parts(cls, form: LabelForm, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Tally:
        """Add up what parts found: counts, and scores by set and class, one after the other."""
        counts = np.sum([part_counts for part_counts, _ in parts], axis=0)
        if not any(len(scores) for _, scores in parts):
            return cls(form, counts)
        pieces = [
            np.split(scores, np.cumsum(_true(part_counts, form).reshape(-1))[:-1])
            for part_counts, scores in parts
        ]
        groups = [np.concatenate(group) for group in zip(*pieces, strict=True)]
        return cls(form, counts, tuple(zip(groups[::2], groups[1::2], strict=True)))

    def value(self, metric: str, place: int) -> float | None:
        """Return a metric of a set, or None where it is not defined.

        Parameters
        ----------
        metric
            Of `METRICS`.
        place
            Of the set in `SETS`.
        """
        if not self.form.members[place]:
            return None
        right, answered, true = self._by_class(place)
        match metric:
            case "accuracy":
                return float(self.counts[place, 0] / self.form.members[place])
            case "f1-micro":
                both = int(answered.sum() + true.sum())
                return float(2 * right.sum() / both) if both else 0.0
            case "f1-macro":
                each = [f1 for f1 in _quotients(2 * right, answered + true) if f1 is not None]
                return float(np.mean(each)) if each else 0.0
            case "auc":
                return roc_auc(*self.scores[place]) if self.scores else None
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")

    def report(self) -> dict[str, Any]:
        """Return all metrics and all classes of each set, as JSON has it; None for what is not defined."""
        return {name: self._report(place) for place, name in enumerate(SETS) if self.form.members[place]}

    def _report(self, place: int) -> dict[str, Any]:
        right, answered, true = self._by_class(place)
        rest, n = self.counts[place, 1 + 3 * self.form.n_classes :], self.form.n_classes
        return {
            "vertices": self.form.members[place],
            **{metric.replace("-", "_"): self.value(metric, place) for metric in METRICS},
            "precision": _quotients(right, answered),
            "recall": _quotients(right, true),
            "f1": _quotients(2 * right, answered + true),
            "support": true.tolist(),
            "confusion": rest.reshape(n, n).tolist() if len(rest) else None,
        }

    def _by_class(self, place: int) -> np.ndarray:
        """Return TP, answered and true of a set, (3, n_classes)."""
        n = self.form.n_classes
        return self.counts[place, 1 : 1 + 3 * n].reshape(3, n)


def _true(counts: np.ndarray, form: LabelForm) -> np.ndarray:
    """Return the vertices that have each class, (sets, n_classes)."""
    return counts[:, 1 + 2 * form.n_classes : 1 + 3 * form.n_classes]


def _quotients(above: np.ndarray, below: np.ndarray) -> list[float | None]:
    return [a / b if b else None for a, b in zip(above.tolist(), below.tolist(), strict=True)]


def roc_auc(negative: np.ndarray, positive: np.ndarray) -> float | None:
    """Return the area under the ROC curve: the share of pairs in which the positive has the higher score.

    Parameters
    ----------
    negative, positive : ndarray, (n,), (p,)
        Scores of each class, finite or infinite; the order does not matter.

    Returns
    -------
    float
        With pairs of equal scores counted half, as mid-ranks do: (R - p (p + 1) / 2) / (n p) for the sum R of
        the positives' ranks. One rounding of a quotient of whole numbers. None if there are no pairs.

    References
    ----------
    Hanley and McNeil, The meaning and use of the area under a ROC curve, Radiology 143, 1982.
    """
    if not (len(negative) and len(positive)):
        return None
    ordered = np.sort(negative)
    below = int(np.searchsorted(ordered, positive, side="left").sum(dtype=np.int64))
    not_above = int(np.searchsorted(ordered, positive, side="right").sum(dtype=np.int64))
    return (below + not_above) / (2 * len(negative) * len(positive))
