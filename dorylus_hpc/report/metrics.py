"""Numbers of a run: one line an epoch in `metrics.jsonl`, and the table behind `summary.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

SETS = ("train", "val", "test")


@dataclass(frozen=True)
class Accuracies:
    """Accuracies of one version of the weights, fractions; None where unknown.

    Attributes
    ----------
    epoch
        Number of updates behind these weights.
    train, val, test
        Share of correctly classified vertices of each set.
    """

    epoch: int
    train: float | None = None
    val: float | None = None
    test: float | None = None


def accuracies(epoch: int, correct: Any, members: tuple[int, int, int]) -> Accuracies:
    """Return accuracies from counts of correct vertices and of all vertices, by set."""
    return Accuracies(
        epoch, *(float(right) / n if n else None for right, n in zip(correct, members, strict=True))
    )


@dataclass
class History:
    """What rank 0 learns of a run, epoch by epoch.

    Attributes
    ----------
    losses
        Mean training loss of each epoch, at the weights before its update.
    seconds
        Wall time of each epoch.
    evaluations
        In order of their weights' version.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    evaluations: list[Accuracies] = field(default_factory=list)

    def is_best(self, candidate: Accuracies) -> bool:
        """Tell if an evaluation is better, by validation, than all so far; the first of equals counts.

        Without a validation set the latest is always the best.
        """
        if candidate.val is None:
            return True
        return all(seen.val is None or candidate.val > seen.val for seen in self.evaluations)

    @property
    def best(self) -> Accuracies:
        """The evaluation of the best weights."""
        with_validation = [seen for seen in self.evaluations if seen.val is not None]
        if not with_validation:
            return self.evaluations[-1]
        return max(with_validation, key=lambda seen: (seen.val, -seen.epoch))

    @property
    def last(self) -> Accuracies:
        """The evaluation of the last weights."""
        return self.evaluations[-1]


class MetricsFile:
    """Appends a JSON object a line; each line is complete on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Append one line."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        """Return the file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()
