"""The attempts at tasks that a tensor server knows, and what may still be done with them.

An attempt moves on like this, and never back::

    offered ── FETCH ──▶ fetched ── RESULT ──▶ over, accepted
       │                    │
       └───── withdraw ─────┴────────────────▶ over: whoever comes with its token is refused

While a connection's thread reads or writes an attempt's arrays it *touches* it. An attempt that is over is
touched by nobody and has no arrays. One lock guards all of this; nobody sends, receives or waits for a claim
while holding it.

Tokens are 256 random bits, looked up in a dictionary. That compares hashes first, which are keyed by a secret
of the process: the time it takes tells a guesser nothing that leads towards a token.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dorylus_hpc.serverless.claim import Claim
from lambda_pkg.ops import chunk_bounds
from lambda_pkg.protocol import MOST_INPUTS, TOKEN_BYTES, ProtocolError, as_bytes

_REMEMBERED = 4096  # tokens that are over


@dataclass(frozen=True)
class Block:
    """An input of a task.

    Attributes
    ----------
    array
        C-contiguous and little-endian. Not to be changed before the attempt is over.
    rows
        Whether its rows are those of the interval, so that it is sent in chunks.
    """

    array: np.ndarray
    rows: bool


@dataclass
class TensorStatistics:
    """What a tensor server has done so far.

    Attributes
    ----------
    bytes_sent, bytes_received
        Of whole frames, also of results that were thrown away; without what TLS adds.
    connections
        Accepted from the system, whoever it was.
    refused
        Frames that were no frames, of a wrong size, out of order, or with a token that was never made.
    duplicates_refused
        FETCHes and RESULTs that came too late or twice: the attempt was over, used, or its task taken.
    handshakes_failed
        Peers that showed no certificate of this run, or hung.
    turned_away
        Connections closed because there were too many.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    connections: int = 0
    refused: int = 0
    duplicates_refused: int = 0
    handshakes_failed: int = 0
    turned_away: int = 0


class Toucher(Protocol):
    """A connection."""

    def cut(self) -> None:
        """End at once what it sends or receives."""


class Attempt:
    """One attempt at one task. Its state belongs to `Attempts`."""

    def __init__(
        self,
        token: bytes,
        inputs: tuple[Block, ...],
        outputs: tuple[np.ndarray, ...],
        chunk: int,
        claim: Claim,
    ) -> None:
        self.token, self.inputs, self.outputs, self.chunk = token, inputs, outputs, chunk
        self.claim: Claim | None = claim
        self.result_bytes = sum(output.nbytes for output in outputs)
        self.fetched = self.over = False
        self.touched_by: Toucher | None = None

    def blocks(self, mask: int) -> list[memoryview]:
        """Return views of the wanted inputs, in the order of the wire."""
        wanted = [block for place, block in enumerate(self.inputs) if mask >> place & 1]
        views = [as_bytes(block.array) for block in wanted if not block.rows]
        cut = [block.array for block in wanted if block.rows]
        for start, stop in chunk_bounds(len(cut[0]), self.chunk) if cut else []:
            views += [as_bytes(array[start:stop]) for array in cut]
        return views


class Attempts:
    """All attempts of a tensor server, and its counters. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._open: dict[bytes, Attempt] = {}
        self._past: dict[bytes, None] = {}  # tokens, the oldest first
        self._closed = False
        self._statistics = TensorStatistics()

    def offer(self, inputs: Sequence[Block], outputs: Sequence[np.ndarray], chunk: int, claim: Claim) -> str:
        """See `TensorServer.offer`."""
        _check(inputs, outputs, chunk)
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            if self._closed:
                raise RuntimeError("the tensor server is closed")
            self._open[token] = Attempt(token, tuple(inputs), tuple(outputs), chunk, claim)
        return token.hex()

    def withdraw(self, token: bytes) -> None:
        """See `TensorServer.withdraw`."""
        with self._lock:
            attempt = self._open.get(token)
            if attempt is None or attempt.claim is None:
                return
            attempt.over = True
            claim = attempt.claim
        claim.retire(attempt)
        with self._lock:
            if attempt.touched_by is not None:
                attempt.touched_by.cut()
            self._left.wait_for(lambda: attempt.touched_by is None)
            self._bury(attempt)

    def close(self) -> None:
        """Withdraw all attempts; no more can be offered."""
        with self._lock:
            self._closed = True
            for attempt in self._open.values():
                attempt.over = True  # all first, or the end of one would let another be accepted
            tokens = list(self._open)
        for token in tokens:
            self.withdraw(token)

    # ---- for connections ----

    def fetch(self, token: bytes, mask: int, toucher: Toucher) -> Attempt | str:
        """Return the attempt to serve, which is touched now; or why there is none.

        Raises
        ------
        ProtocolError
            A mask with bits that stand for no input.
        """
        with self._lock:
            attempt = self._open.get(token)
            if attempt is None and token not in self._past:
                self._statistics.refused += 1
                return "unknown token"
            if attempt is None or attempt.over or attempt.claim is None or attempt.claim.taken:
                self._statistics.duplicates_refused += 1
                return "the task is over"
            if attempt.fetched:
                self._statistics.duplicates_refused += 1
                return "the token was used before"
            if mask >> len(attempt.inputs):
                raise ProtocolError(f"there are {len(attempt.inputs)} inputs, but the mask is {mask:#x}")
            attempt.fetched = True
            attempt.touched_by = toucher
            return attempt

    def touch(self, attempt: Attempt, toucher: Toucher) -> bool:
        """Let a connection use the arrays of an attempt; False if it is over."""
        with self._lock:
            if not attempt.over:
                attempt.touched_by = toucher
            return not attempt.over

    def leave(self, attempt: Attempt) -> None:
        """Undo `touch`, or the one of `fetch`."""
        with self._lock:
            attempt.touched_by = None
            self._left.notify_all()

    def settle(self, attempt: Attempt) -> bool:
        """Take the task, the outputs of which this attempt has written; False if it is over."""
        with self._lock:
            if attempt.over or attempt.claim is None:
                return False
            attempt.over = True
            attempt.claim.settle(attempt)
            self._bury(attempt)
            return True

    # ---- counters ----

    def count(self, **more: int) -> None:
        """Add to counters."""
        with self._lock:
            for name, number in more.items():
                setattr(self._statistics, name, getattr(self._statistics, name) + number)

    @property
    def statistics(self) -> TensorStatistics:
        """A copy of the counters."""
        with self._lock:
            return dataclasses.replace(self._statistics)

    def _bury(self, attempt: Attempt) -> None:
        attempt.inputs = attempt.outputs = ()
        attempt.claim = None  # which may know the attempt: a cycle would keep what the claim's owner holds
        self._open.pop(attempt.token, None)
        self._past[attempt.token] = None
        if len(self._past) > _REMEMBERED:
            del self._past[next(iter(self._past))]


def _check(inputs: Sequence[Block], outputs: Sequence[np.ndarray], chunk: int) -> None:
    """Refuse what cannot be sent or received as it is."""
    if len(inputs) > MOST_INPUTS:
        raise ValueError(f"a task has at most {MOST_INPUTS} inputs, got {len(inputs)}")
    shapes = [block.array.shape for block in inputs if block.rows]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        raise ValueError(
            f"a task has inputs with rows, and all have equally many; theirs have shapes {shapes}"
        )
    if chunk < 0:
        raise ValueError(f"chunk must be 0 (all rows at once) or more, got {chunk}")
    for what, array in [("input", block.array) for block in inputs] + [("output", one) for one in outputs]:
        if array.dtype.kind not in "biuf" or array.dtype.str.startswith(">"):
            raise ValueError(f"an {what} must be of little-endian numbers, got dtype {array.dtype.str}")
        if not array.flags.c_contiguous:
            raise ValueError(
                f"an {what} must be C-contiguous, got {array.shape} with strides {array.strides}"
            )
        if what == "output" and not array.flags.writeable:
            raise ValueError(f"an output must be writeable, got a read-only array of shape {array.shape}")
