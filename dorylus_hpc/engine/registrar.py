"""What rank 0 makes of the reports that come in from all parts: epochs and evaluations, in their order."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from dorylus_hpc.engine.recorder import Recorder
from dorylus_hpc.engine.runner import Results
from dorylus_hpc.report.metrics import History

_N_COUNTS = 3


def pack_results(results: Results) -> tuple[int, ...]:
    """Return results as whole numbers, for a letter; no bit of the loss is lost."""
    (bits,) = struct.unpack("<q", struct.pack("<d", results.loss))
    return (bits, *results.correct)


def unpack_results(numbers: Sequence[int]) -> tuple[float, ...]:
    """Return the loss and the correct counts that `pack_results` packed."""
    (loss,) = struct.unpack("<d", struct.pack("<q", numbers[0]))
    return (loss, *numbers[1 : 1 + _N_COUNTS])


class Registrar:
    """Collects what the parts report, and tells the recorder in the order of epochs.

    Parameters
    ----------
    recorder
        Where it goes.
    n_parts
        Parts of the graph.
    from_training
        The training forward counts right answers: it is the evaluation of the weights before its update.
    eval_every
        Epochs between evaluations otherwise.

    Attributes
    ----------
    epochs : int
        Epochs told to the recorder.
    """

    def __init__(self, recorder: Recorder, n_parts: int, *, from_training: bool, eval_every: int) -> None:
        self.epochs = 0
        self._recorder, self._n_parts = recorder, n_parts
        self._from_training, self._eval_every = from_training, eval_every
        self._reports: defaultdict[tuple[bool, int], dict[int, tuple[float, ...]]] = defaultdict(dict)
        self._weights: dict[int, np.ndarray] = {}
        self._seconds: dict[int, float] = {}
        self._last = -1

    def due(self, version: int) -> bool:
        """Whether these weights are evaluated before the run is over."""
        return self._from_training or version % self._eval_every == 0

    @property
    def history(self) -> History:
        """What the recorder knows so far."""
        return self._recorder.history

    def weights(self, version: int, flat: np.ndarray) -> None:
        """Take weights that will be evaluated; the array is the registrar's from now on."""
        self._weights[version] = flat

    def seconds(self, epoch: int, seconds: float) -> None:
        """Take the time that an epoch took here."""
        self._seconds[epoch] = seconds

    def report(self, *, evaluation: bool, number: int, part: int, results: tuple[float, ...]) -> None:
        """Take what a part found in an epoch, or of a version."""
        self._reports[evaluation, number][part] = results

    def advance(self) -> list[int]:
        """Tell the recorder of epochs that are complete now; return the versions evaluated in them."""
        judged = []
        while self._epoch_is_complete(self.epochs + 1):
            self._tell(self.epochs + 1)
            if self.due(self.epochs - 1):
                judged.append(self.epochs - 1)
        return judged

    def last(self, epochs: int, flat: np.ndarray) -> None:
        """The run ended after so many epochs, with these weights."""
        self._last = epochs
        self._weights[epochs] = flat

    @property
    def finished(self) -> bool:
        """Whether the last weights are evaluated."""
        return self._last == self.epochs and self._is_complete(evaluation=True, number=self._last)

    def close(self) -> None:
        """Tell the recorder of the last weights."""
        self._recorder.last(
            self._last, self._totals(evaluation=True, number=self._last)[1:], self._weights[self._last]
        )

    def _is_complete(self, *, evaluation: bool, number: int) -> bool:
        return len(self._reports.get((evaluation, number), ())) == self._n_parts

    def _epoch_is_complete(self, epoch: int) -> bool:
        version = epoch - 1
        if epoch not in self._seconds or not self._is_complete(evaluation=False, number=epoch):
            return False
        if not self.due(version):
            return True
        evaluated = self._from_training or self._is_complete(evaluation=True, number=version)
        return evaluated and version in self._weights

    def _totals(self, *, evaluation: bool, number: int) -> np.ndarray:
        """Add what the parts reported, in the order of parts."""
        return np.add.reduce(
            np.array([row for _, row in sorted(self._reports[evaluation, number].items())]), axis=0
        )

    def _tell(self, epoch: int) -> None:
        version = epoch - 1
        totals = self._totals(evaluation=False, number=epoch)
        if not self._from_training:
            totals[1:] = np.nan
            if self.due(version):
                totals[1:] = self._totals(evaluation=True, number=version)[1:]
        del self._reports[False, epoch]
        self._reports.pop((True, version - 1), None)  # the last version's are kept for the end
        flat = self._weights.pop(version, None)
        self.epochs = epoch
        self._recorder.epoch(epoch, totals, flat, self._seconds.pop(epoch))
