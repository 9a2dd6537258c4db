"""What the machine gives to this rank."""

from __future__ import annotations

import os
import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(comm: Intracomm) -> int:
    """Return this rank's share of the cores it may use. Collective.

    A rank that the launcher bound to cores of its own takes them all; ranks of one node that may use the
    same cores share them. At least 1, also where there are more ranks than cores.
    """
    from dorylus_hpc.comm.launch import start_mpi

    node = comm.Split_type(start_mpi().COMM_TYPE_SHARED)
    cores = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(usable_cores()))
    )
    sharing = sum(bool(set(cores) & set(others)) for others in node.allgather(cores))
    node.Free()
    return max(1, len(cores) // sharing)


def peak_rss_bytes() -> int:
    """Return the most memory this process ever held, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
