"""Run the tests of tests/mpi on several numbers of ranks, each as one MPI job with a time limit.

    python tests/run_mpi.py [--np 1 2 3 4] [--timeout SECONDS] [PYTEST ARGUMENTS]

The numbers of ranks may also be given in DORYLUS_TEST_RANKS. Prints one line per number of ranks, and a
job's whole output if it failed. Fails if a job fails, hits its time limit or runs no test. The launcher's
flags are those of mpirun.sh.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_SECONDS = 120  # for one test; shows where each thread stands, and ends the job
GRACE_SECONDS = 10  # for a launcher to end its ranks


def command(ranks, arguments):
    """Return the command line of one job."""
    # The thread method ends the process even when it waits inside MPI, where no signal handler runs.
    pytest = ["-m", "pytest", "tests/mpi", f"--timeout={TEST_SECONDS}", "--timeout-method=thread"]
    pytest += ["--color=no", "-p", "no:cacheprovider", *arguments]
    return [str(ROOT / "mpirun.sh"), "--no-setup", "-n", str(ranks), "python", *pytest]


def descendants(pid):
    """Return the ids of all processes below one, where /proc tells; ranks have groups of their own."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # has just ended
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = []
    unseen = [pid]
    while unseen:
        below = parents.get(unseen.pop(), [])
        found += below
        unseen += below
    return found


def end(process):
    """End a job: ask its launcher, then kill what is left of the group and of the ranks."""
    ranks = descendants(process.pid)
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        ranks = [*descendants(process.pid), *ranks]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for rank in ranks:
        try:
            os.kill(rank, signal.SIGKILL)
        except ProcessLookupError:
            continue


def run(ranks, seconds, arguments):
    """Run one job; return (tests passed, tests failed) and print how it went."""
    environment = {**os.environ, "DORYLUS_PYTHON": sys.executable, "DORYLUS_TEST_RANKS": str(ranks)}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command(ranks, arguments),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
            trouble = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            trouble = f"no end after {seconds} s"
            end(process)
        except BaseException:
            end(process)
            raise
        output.seek(0)
        text = output.read()
    closing = [line for line in text.splitlines() if re.search(r"\bin \d+\.\d+s\b", line)]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", closing[-1])} if closing else {}
    passed = counts.get("passed", 0)
    if not trouble and not passed:
        trouble = "no test ran"
    if trouble:
        print(text.rstrip())
    outcome = f"FAILED: {trouble}" if trouble else f"{passed} passed"
    print(f"ranks {ranks}: {outcome} ({time.monotonic() - start:.1f} s)", flush=True)
    return passed, 1 if trouble else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ranks = [int(number) for number in os.environ.get("DORYLUS_TEST_RANKS", "1 2 3 4").split()]
    parser.add_argument("--np", type=int, nargs="+", default=ranks, help="numbers of ranks")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one job")
    options, arguments = parser.parse_known_args()
    if select := os.environ.get("DORYLUS_TEST_SELECT"):
        arguments += ["-k", select]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the job on the way out
    results = [run(ranks, options.timeout, arguments) for ranks in options.np]
    passed, failed = (sum(column) for column in zip(*results, strict=True))
    print(f"MPI: {passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
