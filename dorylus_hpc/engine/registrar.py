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
Rows = dict[int, tuple[float, ...]]  # loss and correct counts, by part


def pack_results(results: Results) -> tuple[int, ...]:
    """Return results as whole numbers, for a letter; no bit of the loss is lost."""
    (bits,) = struct.unpack("<q", struct.pack("<d", results.loss))
    return (bits, *results.correct)


def unpack_results(numbers: Sequence[int]) -> tuple[float, ...]:
    """Return the loss and the correct counts that `pack_results` packed."""
    (loss,) = struct.unpack("<d", struct.pack("<q", numbers[0]))
    return (loss, *numbers[1 : 1 + _N_COUNTS])


_MB_MS_PER_GB_SECOND = 1024 * 1000


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
        self._trained: defaultdict[tuple[int, int], Rows] = defaultdict(dict)  # by epoch and phase
        self._evaluated: defaultdict[int, Rows] = defaultdict(dict)  # by version
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

    def usage(self, rank: int, mb_milliseconds: int, invocations: int) -> None:
        """Take what a graph server has used of Lambda so far."""
        self._recorder.usage(rank, mb_milliseconds / _MB_MS_PER_GB_SECOND, invocations)

    def trained(self, epoch: int, part: int, results: tuple[float, ...], *, phase: int) -> None:
        """Take what a part found in an epoch; what one phase did not end, the next does anew."""
        self._trained[epoch, phase][part] = results

    def evaluated(self, version: int, part: int, results: tuple[float, ...]) -> None:
        """Take what a part found of weights."""
        self._evaluated[version][part] = results

    def resume(self, epochs: int) -> None:
        """A new phase begins after so many epochs."""
        self._seconds = {epoch: seconds for epoch, seconds in self._seconds.items() if epoch <= epochs}

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
        return self._last == self.epochs and len(self._evaluated[self._last]) == self._n_parts

    def close(self) -> None:
        """Tell the recorder of the last weights."""
        correct = _totals(self._evaluated[self._last])[1:]
        self._recorder.last(self._last, correct, self._weights[self._last])

    def _whole(self, epoch: int) -> tuple[int, int] | None:
        """The phase that all parts ended an epoch in."""
        whole = [key for key, rows in self._trained.items() if key[0] == epoch and len(rows) == self._n_parts]
        return max(whole, default=None)

    def _epoch_is_complete(self, epoch: int) -> bool:
        version = epoch - 1
        if epoch not in self._seconds or self._whole(epoch) is None:
            return False
        if not self.due(version):
            return True
        evaluated = self._from_training or len(self._evaluated[version]) == self._n_parts
        return evaluated and version in self._weights

    def _tell(self, epoch: int) -> None:
        version, key = epoch - 1, self._whole(epoch)
        assert key is not None
        totals = _totals(self._trained[key])
        if not self._from_training:
            totals[1:] = np.nan
            if self.due(version):
                totals[1:] = _totals(self._evaluated[version])[1:]
        for old in [old for old in self._trained if old[0] <= epoch]:
            del self._trained[old]
        self._evaluated.pop(version - 1, None)  # the last version's are kept for the end
        flat = self._weights.pop(version, None)
        self.epochs = epoch
        self._recorder.epoch(epoch, totals, flat, self._seconds.pop(epoch))


def _totals(rows: Rows) -> np.ndarray:
    """Add what the parts reported, in the order of parts."""
    return np.add.reduce(np.array([row for _, row in sorted(rows.items())]), axis=0)
