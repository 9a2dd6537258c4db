"""Numbers of a run: one line an epoch in `metrics.jsonl`, and the table behind `summary.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from dorylus_hpc.report.classification import SETS, Tally


@dataclass(frozen=True)
class Evaluation:
    """What one version of the weights is worth, as fractions; None where unknown.

    Attributes
    ----------
    epoch
        Number of updates behind these weights.
    train, val, test
        The run's metric on each set.
    accuracy
        Share of the vertices of each set whose answer is right in whole.
    """

    epoch: int
    train: float | None = None
    val: float | None = None
    test: float | None = None
    accuracy: tuple[float | None, float | None, float | None] = (None, None, None)


def evaluation(epoch: int, tally: Tally, metric: str) -> Evaluation:
    """Return what counted answers are worth."""
    train, val, test = (tally.value(metric, place) for place in range(len(SETS)))
    first, second, third = (tally.value("accuracy", place) for place in range(len(SETS)))
    return Evaluation(epoch, train, val, test, (first, second, third))


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
    evaluations: list[Evaluation] = field(default_factory=list)

    def is_best(self, candidate: Evaluation) -> bool:
        """Tell if an evaluation is better, by validation, than all so far; the first of equals counts.

        Without a validation set the latest is always the best.
        """
        if candidate.val is None:
            return True
        return all(seen.val is None or candidate.val > seen.val for seen in self.evaluations)

    @property
    def best(self) -> Evaluation:
        """The evaluation of the best weights."""
        with_validation = [seen for seen in self.evaluations if seen.val is not None]
        if not with_validation:
            return self.evaluations[-1]
        return max(with_validation, key=lambda seen: (seen.val, -seen.epoch))

    @property
    def last(self) -> Evaluation:
        """The evaluation of the last weights."""
        return self.evaluations[-1]


class MetricsFile:
    """Appends a JSON object a line; each line is complete on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=0)  # closing then fails at nothing that `write` failed at

    def write(self, **values: Any) -> None:
        """Append one line.

        Raises
        ------
        OSError
            Such as a full disk, with the file's name.
        """
        line = memoryview(f"{json.dumps(values)}\n".encode())
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            error.filename = str(self._path)
            raise

    def __enter__(self) -> MetricsFile:
        """Return the file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()
