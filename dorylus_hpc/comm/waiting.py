"""Waiting for MPI without burning a core.

MPI's own blocking calls spin. With more ranks than cores, or kernels running beside, that takes time
from those who have work. Here a wait polls (which also drives the transfer of large messages), gives
way, and then sleeps for growing but short times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py.MPI import Request

_EAGER_POLLS = 20  # polls before the first sleep
_SHORTEST, _LONGEST = 20e-6, 1e-3  # seconds


def wait_all(requests: Sequence[Request]) -> float:
    """Wait until all requests are complete.

    Returns
    -------
    float
        Seconds waited.
    """
    if not requests:
        return 0.0
    test_all = type(requests[0]).Testall
    pending = list(requests)
    start = time.perf_counter()
    polls, pause = 0, _SHORTEST
    while not test_all(pending):
        polls += 1
        if polls > _EAGER_POLLS:
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)
        else:
            time.sleep(0)
    return time.perf_counter() - start
