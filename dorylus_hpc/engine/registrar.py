"""What rank 0 makes of the reports that come in from all parts: epochs and evaluations, in their order."""

from __future__ import annotations

import struct
from collections import defaultdict

import numpy as np

from dorylus_hpc.engine.recorder import Recorder
from dorylus_hpc.engine.runner import Results
from dorylus_hpc.report.classification import LabelForm, Tally
from dorylus_hpc.report.metrics import History

Rows = dict[int, Results]  # by part


def pack_results(results: Results, dtype: np.dtype) -> tuple[int, np.ndarray | None]:
    """Return results as a whole number and a vector of `dtype`, for a letter; no bit is lost."""
    (bits,) = struct.unpack("<q", struct.pack("<d", results.loss))
    if results.tally is None:
        return bits, None
    words = np.concatenate([results.tally.reshape(-1), results.scores.view(np.int64)])
    return bits, words.view(dtype)


def unpack_results(bits: int, data: np.ndarray, tally_shape: tuple[int, int]) -> Results:
    """Return the results that `pack_results` packed."""
    (loss,) = struct.unpack("<d", struct.pack("<q", bits))
    if not len(data):
        return Results(loss)
    words, counts = data.view(np.int64), tally_shape[0] * tally_shape[1]
    return Results(loss, words[:counts].reshape(tally_shape), words[counts:].view(np.float64))


_MB_MS_PER_GB_SECOND = 1024 * 1000


class Registrar:
    """Collects what the parts report, and tells the recorder in the order of epochs.

    Parameters
    ----------
    recorder
        Where it goes.
    n_parts
        Parts of the graph.
    form
        Of the graph's labels.
    from_training
        The training forward counts answers: it is the evaluation of the weights before its update.
    eval_every
        Epochs between evaluations otherwise.

    Attributes
    ----------
    epochs : int
        Epochs told to the recorder.
    form : LabelForm
    """

    def __init__(
        self, recorder: Recorder, n_parts: int, form: LabelForm, *, from_training: bool, eval_every: int
    ) -> None:
        self.epochs, self.form = 0, form
        self._recorder, self._n_parts = recorder, n_parts
        self._from_training, self._eval_every = from_training, eval_every
        self._trained: defaultdict[tuple[int, int], Rows] = defaultdict(dict)  # by epoch and phase
        self._evaluated: defaultdict[int, Rows] = defaultdict(dict)  # by version
        self._weights: dict[int, np.ndarray] = {}
        self._seconds: dict[int, float] = {}
        self._last = self._last_version = -1

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

    def trained(self, epoch: int, part: int, results: Results, *, phase: int) -> None:
        """Take what a part found in an epoch; what one phase did not end, the next does anew."""
        self._trained[epoch, phase][part] = results

    def evaluated(self, version: int, part: int, results: Results) -> None:
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

    def last(self, epochs: int, flat: np.ndarray, version: int) -> None:
        """The run ended after so many epochs, with these weights; they are evaluated under this number."""
        self._last, self._last_version = epochs, version
        self._weights[version] = flat

    @property
    def finished(self) -> bool:
        """Whether the last weights are evaluated."""
        return self._last == self.epochs and len(self._evaluated[self._last_version]) == self._n_parts

    def close(self) -> None:
        """Tell the recorder of the last weights."""
        tally = self._tally(self._evaluated[self._last_version])
        assert tally is not None
        self._recorder.last(self._last, tally, self._weights[self._last_version])

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
        trained, tally = self._trained[key], None
        if self.due(version):
            tally = self._tally(trained if self._from_training else self._evaluated[version])
        loss = _total_loss(trained)
        for old in [old for old in self._trained if old[0] <= epoch]:
            del self._trained[old]
        self._evaluated.pop(version - 1, None)  # the last version's are kept for the end
        flat = self._weights.pop(version, None)
        self.epochs = epoch
        self._recorder.epoch(epoch, loss, tally, flat, self._seconds.pop(epoch))

    def _tally(self, rows: Rows) -> Tally | None:
        """Add what the parts counted."""
        found = [(row.tally, row.scores) for row in rows.values() if row.tally is not None]
        return Tally.of_parts(self.form, found) if found else None


def _total_loss(rows: Rows) -> float:
    """Add what the parts reported, in the order of parts."""
    total = 0.0
    for _, row in sorted(rows.items()):
        total += row.loss
    return total
