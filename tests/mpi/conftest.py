"""How the tests in this folder run: every rank of one MPI job runs the same tests in the same order.

    python tests/run_mpi.py                             on 1, 2, 3 and 4 ranks, with time limits
    ./mpirun.sh -n 3 python -m pytest tests/mpi         on 3 ranks
    python -m pytest tests/mpi                          on 1 rank, without a launcher

A failure on one rank must not leave the others waiting in a collective call that it never joins, and
pytest would go on with the next test and report only at the end. So on more than one rank the first failure,
in a test, its fixtures, at collection or in pytest itself, prints rank and traceback at once and aborts the
job. On one rank nobody waits, and pytest reports as usual. Only rank 0 prints the rest.

Tests take the communicator from the fixture `comm`, never COMM_WORLD. A test that needs more ranks than
there are asks for them with `@pytest.mark.ranks(3)` and is deselected on fewer. Tests with many cases are
`spread`: every number of ranks takes a quarter of the cases, 1 to 4 all of them; DORYLUS_TEST_ALL=1 takes
all.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from dorylus_hpc.comm.launch import start_mpi

MPI = start_mpi()
WORLD = MPI.COMM_WORLD

# pytest removes folders of older runs when it ends: ranks that share a root would do it at the same time.
_root = Path(tempfile.gettempdir()) / f"dorylus-mpi-tests-{os.getuid()}-rank-{WORLD.rank}"
_root.mkdir(mode=0o700, exist_ok=True)
os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_root)


def _abort(what, text):
    """Print this rank's failure in one piece and end the job."""
    message = f"\n==== rank {WORLD.rank} of {WORLD.size}: {what}\n{text}\n"
    os.write(2, message.encode(errors="backslashreplace"))
    WORLD.Abort(1)


@pytest.hookimpl(trylast=True)  # the reporter is registered by then
def pytest_configure(config):
    config.addinivalue_line("markers", "ranks(n): needs n ranks or more")
    config.addinivalue_line("markers", "spread: each case runs with one number of ranks")
    expected = os.environ.get("DORYLUS_TEST_RANKS")
    if expected and int(expected) != WORLD.size:
        raise pytest.UsageError(
            f"{expected} ranks were launched, MPI sees {WORLD.size}: mpirun and mpi4py are of different MPIs"
        )
    if WORLD.rank != 0:
        config.pluginmanager.unregister(name="terminalreporter")
        silent = pytest.TerminalReporter(config, open(os.devnull, "w"))
        config.pluginmanager.register(silent, "terminalreporter")


def pytest_collection_modifyitems(config, items):
    kept, dropped = [], []
    place = 0  # among the cases that are spread
    for item in items:
        marker = item.get_closest_marker("ranks")
        wanted = marker is None or marker.args[0] <= WORLD.size
        if item.get_closest_marker("spread") is not None and not os.environ.get("DORYLUS_TEST_ALL"):
            place += 1
            wanted &= (place + WORLD.size) % 4 == 0
        (kept if wanted else dropped).append(item)
    if dropped:
        items[:] = kept
        config.hook.pytest_deselected(items=dropped)


def pytest_exception_interact(node, report):
    if WORLD.size > 1:
        _abort(f"{node.nodeid} failed", report.longreprtext)


def pytest_internalerror(excrepr):
    if WORLD.size > 1:
        _abort("internal error of pytest", excrepr)


def pytest_keyboard_interrupt(excinfo):
    if WORLD.size > 1:
        _abort("interrupted", excinfo.getrepr(style="short"))


@pytest.fixture
def comm():
    """A communicator of all ranks that only this test uses: no message can reach another test. Collective."""
    own = WORLD.Dup()
    yield own
    own.Barrier()
    own.Free()


@pytest.fixture
def shared_tmp_path(comm, tmp_path):
    """An empty folder that is the same on every rank; `tmp_path` is each rank's own. Collective."""
    return Path(comm.bcast(str(tmp_path)))
