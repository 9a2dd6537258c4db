"""Progress on rank 0: a bar on a terminal, a plain line now and then otherwise."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows epochs as they end; use as a context manager.

    Parameters
    ----------
    epochs
        How many there will be.
    shown
        False shows nothing.
    """

    def __init__(self, epochs: int, *, shown: bool) -> None:
        self._epochs = epochs
        terminal = shown and sys.stderr.isatty()
        self._bar: Any = tqdm(total=epochs, unit="epoch", dynamic_ncols=True) if terminal else None
        self._lines = shown and not terminal
        self._last_line = time.monotonic()

    def epoch(self, number: int, **values: float | str | None) -> None:
        """Show an ended epoch and some of its numbers."""
        texts = {
            name: value if isinstance(value, str) else f"{value:.4f}"
            for name, value in values.items()
            if value is not None
        }
        if self._bar is not None:
            self._bar.set_postfix(texts, refresh=False)
            self._bar.update()
        elif self._lines and (
            number == self._epochs or time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES
        ):
            self._last_line = time.monotonic()
            words = "  ".join(f"{name} {text}" for name, text in texts.items())
            print(f"epoch {number}/{self._epochs}  {words}", flush=True)

    def __enter__(self) -> Progress:
        """Return the progress display."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal in order."""
        if self._bar is not None:
            self._bar.close()
