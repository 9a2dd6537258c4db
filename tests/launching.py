"""Starts programs as their users do, alone or on MPI ranks, always with a time limit.

Starting ranks takes seconds, so many command lines can share one start: `run_cases` runs a table of them, one
after the other, on the same ranks, and keeps status, output and time of each rank apart. For that this file
is a program, too.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from run_mpi import ROOT, end

# What launchers say about a job that did not end well: framed by lines of dashes (Open MPI), or
# single lines (MPICH).
_FRAMED = re.compile(r"^-{20,}\n.*?^-{20,}\n", re.MULTILINE | re.DOTALL)
_NOISE = re.compile(r"^(?:$|=|YOUR APPLICATION|Abort\(|\[(?:proxy|mpiexec|[\w.-]+:\d+\]))")


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    status: int
    out: str
    err: str
    seconds: float

    @property
    def told(self):
        """The lines on stderr that are not the launcher's."""
        return without_noise(self.err)


def without_noise(err):
    return [line for line in _FRAMED.sub("", err).splitlines() if not _NOISE.match(line)]


@contextmanager
def job(ranks, *arguments, cwd, stdout, stderr, **environment):
    """Give a running job: Python with these arguments on so many ranks, or without a launcher (None).

    At the end of the block whatever still runs of it is killed.
    """
    command = [sys.executable, *map(str, arguments)]
    if ranks is not None:
        command[:1] = [str(ROOT / "mpirun.sh"), "--no-setup", "-n", str(ranks), "python"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "DORYLUS_PYTHON": sys.executable, "PYTHONPATH": path, **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            end(process)


def run(ranks, *arguments, cwd, seconds=60, **environment):
    """Run a program to its end, as in `job`; fail if it takes more than so many seconds."""
    start = time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with job(ranks, *arguments, cwd=cwd, **pipes, **environment) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end(process)
            out, err = process.communicate()
            raise AssertionError(
                f"no end after {seconds} s\n{out.decode(errors='replace')}{err.decode(errors='replace')}"
            ) from None
    return Ended(
        process.returncode,
        out.decode(errors="replace"),
        err.decode(errors="replace"),
        time.monotonic() - start,
    )


# ---- tables of cases


def run_cases(ranks, cases, folder, seconds=120):
    """Run command lines one after the other on the same ranks.

    Parameters
    ----------
    ranks
        Number of ranks.
    cases
        By name: (program, arguments), the program being a module of dorylus_hpc.
    folder
        Current folder of the programs.
    seconds
        For all of them.

    Returns
    -------
    dict
        By name: a list with what each rank returned and wrote (`Ended`). If the job was aborted or did
        not end in time, the case at fault and those after it are missing.
    """
    results = Path(folder) / f".cases-{ranks}"
    results.mkdir()
    listed = [[program, [str(word) for word in arguments]] for program, arguments in cases.values()]
    (results / "cases.json").write_text(json.dumps(listed))
    try:
        whole = run(ranks, __file__, results, cwd=folder, seconds=seconds)
    except AssertionError as late:
        print(late)
    else:
        print(whole.out, whole.err)  # shown if a test fails
    found = {}
    for number, name in enumerate(cases):
        try:
            found[name] = [_result(results, number, rank) for rank in range(ranks)]
        except FileNotFoundError:
            print(f"{name}: not all ranks came to the end of it")
            for path in sorted(results.glob(f"{number}.*.err")):
                print(f"{path.name}:\n{path.read_text(errors='replace')}")
            break
    return found


def _result(results, number, rank):
    texts = [(results / f"{number}.{rank}.{kind}").read_text(errors="replace") for kind in ("out", "err")]
    status, seconds = json.loads((results / f"{number}.{rank}.json").read_text())
    return Ended(status, *texts, seconds)


def _serve(results):
    """Run all cases on this rank."""
    from dorylus_hpc.comm.launch import start_mpi

    rank = start_mpi().COMM_WORLD.Get_rank()
    own_out, own_err = os.dup(1), os.dup(2)
    for number, (program, arguments) in enumerate(json.loads((results / "cases.json").read_text())):
        for kind, descriptor in (("out", 1), ("err", 2)):
            with (results / f"{number}.{rank}.{kind}").open("wb") as file:
                os.dup2(file.fileno(), descriptor)
        start = time.monotonic()
        try:
            status = importlib.import_module(f"dorylus_hpc.{program}").main(arguments)
        except SystemExit as stopped:
            status = stopped.code
        except Exception:
            traceback.print_exc()
            status = 1
        seconds = time.monotonic() - start
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(own_out, 1)
        os.dup2(own_err, 2)
        (results / f"{number}.{rank}.json").write_text(json.dumps([status, seconds]))


# ---- small inputs


def write_ring(path, n=12, *, features=2, **changes):
    """Write the .npz of a ring: 2 classes, sets in turn; `changes` replace keys, None drops them."""
    vertices = np.arange(n)
    neighbours = np.sort(np.stack([(vertices - 1) % n, (vertices + 1) % n], axis=1), axis=1)
    degree = len(np.unique(neighbours[0]))  # 1 if there are two vertices only
    rng = np.random.default_rng(n)
    labels = vertices * 2 // n
    content = {
        "indptr": degree * np.arange(n + 1),
        "indices": neighbours[:, :degree].reshape(-1),
        "x": (rng.standard_normal((n, features)) + labels[:, None]).astype(np.float32),
        "y": labels,
        "train_idx": vertices[::3],
        "val_idx": vertices[1::3],
        "test_idx": vertices[2::3],
        **changes,
    }
    np.savez(path, **{key: value for key, value in content.items() if value is not None})
    return path


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
