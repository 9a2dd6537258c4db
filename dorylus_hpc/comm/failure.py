"""One rank's failure becomes everybody's, at once.

Two kinds of failure are kept apart:

* wrong input is found by some ranks in a *together* block; all ranks then raise the same
  `AgreedError`, rank 0 prints one line, and the job ends in order with status 2;
* everything else is a fault: the rank prints its traceback and aborts the job, since the others may be
  waiting for it anywhere.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from dorylus_hpc.comm.waiting import wait_all
from dorylus_hpc.errors import InputError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_T = TypeVar("_T")

USAGE_STATUS = 2
FAULT_STATUS = 1


class AgreedError(InputError):
    """Wrong input that every rank of the job raises at the same place."""


def together(comm: Intracomm, step: Callable[[], _T]) -> _T:
    """Run `step` on every rank; if it finds wrong input on any, raise that on all. Collective.

    Parameters
    ----------
    comm
        The ranks that call.
    step
        Must not communicate, since a rank whose step fails no longer takes part; or only with ranks that
        fail alike, as in a *together* block of its own.

    Returns
    -------
    The value of this rank's `step`.

    Raises
    ------
    AgreedError
        `step` raised `InputError` on some rank; the message is that of the lowest such rank.
    """
    problem = None
    try:
        value = step()
    except InputError as error:
        problem = str(error)
    wait_all([comm.Ibarrier()])  # one rank's step may take minutes: the others must not spin meanwhile
    problems = [text for text in comm.allgather(problem) if text is not None]
    if problems:
        raise AgreedError(problems[0])
    return value


@contextmanager
def guarded(comm: Intracomm) -> Iterator[None]:
    """Abort the job on an exception that the other ranks do not share.

    An `AgreedError` passes: all ranks raise it. Anything else is printed with its rank, and then the job
    is aborted, since the other ranks may be waiting for this one anywhere. A job of one rank is not
    aborted: the exception passes.
    """
    try:
        yield
    except AgreedError:
        raise
    except BaseException as error:
        if comm.Get_size() == 1:
            raise
        told = f"error: {error}" if isinstance(error, InputError) else traceback.format_exc().rstrip()
        write_line(f"rank {comm.Get_rank()} of {comm.Get_size()} failed:\n{told}")
        time.sleep(0.3)  # the launcher forwards what was written before it tells of the abort
        comm.Abort(USAGE_STATUS if isinstance(error, InputError) else FAULT_STATUS)


@contextmanager
def private(comm: Intracomm) -> Iterator[Intracomm]:
    """Give a duplicate of `comm` to a run. Collective.

    What a run that failed still waits for cannot match the messages of the next one, nor those of the
    caller those of the run. After a fault the duplicate is not freed: others may never come to do it too.
    """
    own = comm.Dup()
    try:
        yield own
    except AgreedError:
        own.Free()
        raise
    own.Free()


def run_program(comm: Intracomm, program: str, main: Callable[[], None]) -> int:
    """Run the whole of an entry point on all ranks. Collective.

    Parameters
    ----------
    comm
        All ranks of the job.
    program
        Name to print before an error.
    main
        The work.

    Returns
    -------
    int
        Exit status: 0, or 2 for wrong input, after one line by rank 0. On any other failure the job is
        aborted or the exception passes, see `guarded`.
    """
    try:
        with guarded(comm):
            main()
    except InputError as error:
        if comm.Get_rank() == 0:
            write_line(f"{program}: error: {' '.join(str(error).splitlines())}")
        comm.Barrier()  # a launcher ends the job as soon as one rank exits with a status
        return USAGE_STATUS
    return 0


def write_line(text: str) -> None:
    """Write to stderr in one piece, so that lines of several ranks do not mix."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, f"{text}\n".encode(errors="backslashreplace"))  # file names may hold anything
