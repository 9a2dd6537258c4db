"""What AWS Lambda calls: ``lambda_pkg.handler.handler``.

Importing this loads next to nothing; NumPy comes with the first task.
"""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from lambda_pkg import VERSION

if TYPE_CHECKING:
    from lambda_pkg.worker import Sandbox

_MARGIN = 0.25  # seconds before Lambda's own limit: an error that tells more than "Task timed out"

_calls = itertools.count()


class VersionError(RuntimeError):
    """The graph server speaks another version of the protocol than this archive."""


def handler(event: Mapping[str, Any], context: Any = None) -> dict[str, Any]:
    """Work on one dense task, or say who is here.

    Parameters
    ----------
    event : mapping
        The descriptor of a task, or ``{"hello": true}``.
    context
        Lambda's; without one there is no limit to the whole.

    Returns
    -------
    dict
        For a task: ``protocol``; ``accepted``, whether the result counts; ``reason``, why not; ``cold``,
        whether this was the process's first call; ``seconds`` of ``connect``, ``fetch`` (from asking to the
        last input's arrival), ``compute`` (partly at the same time), ``send`` and ``total``; ``bytes_in``,
        ``bytes_out``; ``kept``, the number of inputs that were here already. For hello: the ``protocol``,
        the versions of ``python`` and ``numpy``, the ``machine``, and the function's ``memory_mb``.

    Raises
    ------
    VersionError
        A task of another version.
    TensorServerError
        The tensor server cannot be reached, breaks off, or is too slow.
    """
    cold = next(_calls) == 0
    if event.get("hello"):
        return _hello()
    if event.get("protocol") != VERSION:
        raise VersionError(
            f"the task has protocol {event.get('protocol')!r}, this archive has {VERSION!r}: "
            "deploy the archive of the version that trains"
        )
    limit = None
    if context is not None:
        limit = time.monotonic() + context.get_remaining_time_in_millis() / 1000 - _MARGIN
    return {"protocol": VERSION, "cold": cold, **_sandbox().work(event, limit)}


@cache
def _sandbox() -> Sandbox:
    """The process's own; it keeps connections and weights between calls."""
    from lambda_pkg.worker import Sandbox

    return Sandbox()


def _hello() -> dict[str, Any]:
    import numpy as np

    memory = os.environ.get("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", "")
    return {
        "memory_mb": int(memory) if memory.isdigit() else None,
        "protocol": VERSION,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
    }
