"""Small letters between ranks: who binds to which weights, gradients, results, progress.

A letter is a few whole numbers and perhaps a vector; its kind is the tag. Nobody waits for a letter: each
rank's loop looks whether one came. Letters from one rank to another arrive in the order they were sent.
A letter to oneself needs no MPI. Nothing is pickled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dorylus_hpc.comm.launch import start_mpi

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

_NUMBERS = 8
_HEAD = 8 * _NUMBERS  # bytes; the vector behind it stays aligned
_MOST_BYTES = 2**31 - 1
_SHORTEST, _LONGEST = 20e-6, 200e-6  # seconds between two looks


class Letters(IntEnum):
    """What letters carry, and their numbers."""

    BIND = 0  # graph server -> weight server: unit, least version
    GRANT = 1  # back: unit, version (-1: none), load of the server, verdict; weights new to the rank
    RELEASE = 2  # graph server -> weight server: unit
    PUSH = 3  # graph server -> owner: epoch, part; gradient of the part, or of one of its intervals
    PUBLISH = (
        4  # owner -> weight servers: epoch, first epoch of the phase; its weights after all gradients of it
    )
    UPDATE = 5  # owner -> weight servers: its weights after one more gradient
    SNAPSHOT = 6  # weight server -> graph server: version; weights to evaluate
    REPORT = (
        7  # graph server -> rank 0: evaluation or not, epoch or version, part, loss, phase; bits of counts
    )
    VERDICT = 8  # rank 0 -> weight servers: version evaluated, what to do, first epoch of the phase
    PROGRESS = 9  # graph server -> graph server: rounds done
    DONE = (
        10  # graph server -> weight servers: epochs done, verdict heard; it wants nothing more of this phase
    )
    FINAL = 11  # weight server -> graph server: epochs behind the weights, what to do; weights
    USAGE = 12  # graph server -> rank 0: billed MB-milliseconds and invocations of Lambda so far


class Letter(NamedTuple):
    """A letter that came.

    Attributes
    ----------
    source
        Rank of the sender.
    kind
        What it is.
    numbers
        Always `_NUMBERS` of them.
    data
        The vector, maybe empty; the receiver's own.
    """

    source: int
    kind: Letters
    numbers: tuple[int, ...]
    data: np.ndarray


class Mailbox:
    """A rank's letters; one thread may call it.

    Parameters
    ----------
    comm
        All ranks; letters travel on a communicator of their own. Collective.
    dtype
        Of the vectors.

    Attributes
    ----------
    rank, size : int
    dtype : dtype
    """

    def __init__(self, comm: Intracomm, dtype: np.dtype) -> None:
        self._status = start_mpi().Status()
        self._comm = comm.Dup()
        self.dtype = dtype
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._mine: deque[Letter] = deque()
        self._sends: list[tuple[Request, np.ndarray]] = []
        self._receives: deque[tuple[Request, int, Letters, np.ndarray]] = deque()

    def send(self, to: int, kind: Letters, *numbers: int, data: np.ndarray | None = None) -> None:
        """Send a letter; `data` may be changed at once.

        Raises
        ------
        ValueError
            More data than one message of MPI takes.
        """
        if to == self.rank:
            vector = np.empty(0, self.dtype) if data is None else data.astype(self.dtype)
            self._mine.append(Letter(to, kind, numbers + (0,) * (_NUMBERS - len(numbers)), vector))
            return
        n_bytes = _HEAD + (0 if data is None else data.nbytes)
        if n_bytes > _MOST_BYTES:
            raise ValueError(f"a letter of {n_bytes} bytes is more than one message may have: {_MOST_BYTES}")
        buffer = np.zeros(n_bytes, np.uint8)
        buffer[:_HEAD].view(np.int64)[: len(numbers)] = numbers
        if data is not None:
            buffer[_HEAD:].view(self.dtype)[...] = data
        self._sends.append((self._comm.Isend(buffer, dest=to, tag=int(kind)), buffer))

    @property
    def sending(self) -> bool:
        """Whether letters are still to leave."""
        return bool(self._sends)

    def poll(self) -> list[Letter]:
        """Let letters proceed and return those that came, in order of each sender."""
        letters = list(self._mine)
        self._mine.clear()
        if self.size == 1:
            return letters
        self._sends = [one for one in self._sends if not one[0].Test()]
        while (message := self._comm.Improbe(status=self._status)) is not None:
            buffer = np.empty(self._status.Get_count(), np.uint8)
            source, kind = self._status.Get_source(), Letters(self._status.Get_tag())
            self._receives.append((message.Irecv(buffer), source, kind, buffer))
        while self._receives and self._receives[0][0].Test():  # in the order in which they were announced
            _, source, kind, buffer = self._receives.popleft()
            numbers = tuple(buffer[:_HEAD].view(np.int64).tolist())
            data = buffer[_HEAD:].view(self.dtype)
            letters.append(Letter(source, kind, numbers, data))
        return letters

    def listen(self, handle: Callable[[Letter], None], until: Callable[[], bool]) -> None:
        """Hand out letters until something is true, asleep in between."""
        pause = _SHORTEST
        while not until() or self.sending:
            letters = self.poll()
            for letter in letters:
                handle(letter)
            if letters:
                pause = _SHORTEST
            else:
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST)

    def close(self) -> None:
        """Free the communicator, after a whole run; letters that nobody waits for are dropped. Collective."""
        meeting = self._comm.Ibarrier()
        while not meeting.Test():
            self.poll()
            time.sleep(_SHORTEST)
        self.poll()
        self._comm.Free()
