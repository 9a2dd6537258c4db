"""Public graphs that tests may use where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def real_graph(name: str) -> Path:
    """Path of a public graph ("cora") in $DORYLUS_TEST_DATA, or in shared/data beside the repository.

    Without the file the test is skipped; where CI is set, that is a failure.
    """
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("DORYLUS_TEST_DATA") or beside) / f"{name}.npz"
    if path.is_file():
        return path
    message = f"{path} is not there: name the folder of the public graphs with DORYLUS_TEST_DATA"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
