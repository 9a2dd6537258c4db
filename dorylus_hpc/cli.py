"""What the entry points under mpirun share: every rank parses, one speaks, all end alike."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from dorylus_hpc.comm.failure import run_program, together, write_line
from dorylus_hpc.comm.launch import check_world, speaks_first
from dorylus_hpc.errors import InputError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_T = TypeVar("_T")


def run_entry_point(
    program: str,
    world: Callable[[], Intracomm],
    parse: Callable[[Sequence[str]], _T],
    run: Callable[[Intracomm, _T], None],
    argv: Sequence[str] | None,
) -> int:
    """Run an entry point on all ranks of the job.

    Parameters
    ----------
    program
        Name for messages.
    world
        Starts MPI and returns the communicator of all ranks.
    parse
        Makes a configuration of the arguments, or raises `InputError`. Runs on every rank; only rank 0
        may print.
    run
        The work.
    argv
        Arguments; None for those of the process.

    Returns
    -------
    int
        Exit status: 0, or 2 for wrong input.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        comm = world()
        check_world(comm)
    except InputError as error:
        if speaks_first():
            write_line(f"{program}: error: {error}")
        return 2

    def main() -> None:
        quiet = contextlib.redirect_stdout(io.StringIO())
        with contextlib.nullcontext() if comm.Get_rank() == 0 else quiet:
            try:
                options = together(comm, lambda: parse(arguments))
            except SystemExit:  # help was asked for, of every rank alike
                return
        run(comm, options)

    return run_program(comm, program, main)
