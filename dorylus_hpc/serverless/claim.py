"""Who may write the outputs of a task: one attempt at a time, and one for good."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

_NOBODY = object()


class Claim:
    """Shared by all attempts of one task, and by the server's own cores where they step in.

    It moves like this::

                 begin                  accept
        free ─────────────▶ writing ─────────────▶ taken
          ◀─────────────────
               abandon

    `begin` waits while somebody else is writing. It returns True to one caller at a time, and to nobody once
    the task is taken. Who was given True writes, then calls `accept` or `abandon`. Any thread may call any
    method; no lock is held while `accepted` runs.

    Parameters
    ----------
    accepted
        Called once, by the thread that accepts, when all outputs lie in their buffers. It must not raise, nor
        close the tensor server, whose thread it may be.

    Attributes
    ----------
    taken : bool
        Whether the outputs are there. Never becomes False again.
    """

    def __init__(self, accepted: Callable[[], None]) -> None:
        self.taken = False
        self._accepted = accepted
        self._changed = threading.Condition()
        self._writer: object = _NOBODY
        self._retired: set[Hashable] = set()

    def begin(self, owner: Hashable) -> bool:
        """Wait for the right to write; False if the task is taken, or `owner` retired.

        `owner` is an attempt, or None for the server's own cores.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed_to(owner) or self._writer is _NOBODY)
            if self._is_closed_to(owner):
                return False
            self._writer = owner
            return True

    def accept(self, owner: Hashable) -> None:
        """Say that all outputs are written: the task is taken."""
        self.settle(owner)
        self.announce()

    def settle(self, owner: Hashable) -> None:
        """First half of `accept`: the task is taken."""
        self._end(owner, taken=True)

    def announce(self) -> None:
        """Second half of `accept`: call `accepted`. The caller holds no lock."""
        self._accepted()

    def abandon(self, owner: Hashable) -> None:
        """Give the right to write back; what was written does not count."""
        self._end(owner, taken=False)

    def retire(self, owner: Hashable) -> None:
        """Let `begin` return False to this owner from now on, also where it is waiting."""
        with self._changed:
            self._retired.add(owner)
            self._changed.notify_all()

    def _is_closed_to(self, owner: Hashable) -> bool:
        return self.taken or owner in self._retired

    def _end(self, owner: Hashable, *, taken: bool) -> None:
        with self._changed:
            if self._writer is not owner:
                raise RuntimeError(f"{owner!r} is not the one that is writing")
            self._writer = _NOBODY
            self.taken = taken
            self._changed.notify_all()
