"""Starting programs from a test as their users do, alone or on ranks, with a time limit after which nothing
is left of them; and tables of command lines that share one start, which takes seconds on several ranks.

To run a table on ranks, this file is a program, too.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from run_mpi import ROOT, end

SECONDS = 60  # a job that takes longer hangs

# What launchers say of a job that did not end well: framed by dashes (Open MPI), or in lines of their own.
_FRAMED = re.compile(r"^-{20,}\n.*?^-{20,}\n", re.MULTILINE | re.DOTALL)
_LAUNCHER = re.compile(
    r"-+|\s*|(prterun|mpirun|mpiexec|thus) .*|.*(Process name|Exit code):.*"
    r"|\[(warn|proxy.*|mpiexec.*|[\w.-]+:\d+)\] .*|=.*|YOUR APPLICATION.*|Abort\(.*"
)


@dataclass(frozen=True)
class Ended:
    """A program that has ended by itself.

    Attributes
    ----------
    status
        Exit status: of the launcher, or of the program if there was none.
    out, err
        What it printed.
    seconds
        From start to end.
    """

    status: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        """Lines on stderr that are not the launcher's own."""
        text = _FRAMED.sub("", self.err.replace("\x00", ""))
        return [line for line in text.splitlines() if not _LAUNCHER.fullmatch(line)]


@contextmanager
def started(
    ranks: int,
    arguments: Sequence[object],
    *,
    out: Any = subprocess.DEVNULL,
    err: Any = subprocess.DEVNULL,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen]:
    """Start Python with `arguments` on so many ranks, 0 for no launcher; at the end kill what still runs."""
    words = [str(argument) for argument in arguments]
    command = [sys.executable, *words]
    if ranks:
        command = [str(ROOT / "mpirun.sh"), "--no-setup", "-n", str(ranks), "python", *words]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        cwd=cwd or ROOT,
        env={**os.environ, "DORYLUS_PYTHON": sys.executable, "PYTHONPATH": path, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            end(process)


def launch(
    ranks: int,
    arguments: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
) -> Ended:
    """Run Python with `arguments` to its end, on so many ranks; 0 starts it without a launcher."""
    start = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        with started(ranks, arguments, out=out, err=err, cwd=cwd, env=env) as process:
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
        ended = time.monotonic() - start
        out.seek(0)
        err.seek(0)
        if status is None:
            raise AssertionError(f"no end after {seconds} s: {arguments}\n{out.read()}\n{err.read()}")
        return Ended(status, out.read(), err.read(), ended)


def train(ranks: int, *arguments: object, **options: Any) -> Ended:
    """Run ``dorylus_hpc.train``."""
    return launch(ranks, ["-m", "dorylus_hpc.train", *arguments], **options)


def predict(ranks: int, *arguments: object, **options: Any) -> Ended:
    """Run ``dorylus_hpc.predict``."""
    return launch(ranks, ["-m", "dorylus_hpc.predict", *arguments], **options)


# ---- tables of command lines


Table = Mapping[str, tuple[str, Sequence[object]]]  # by name: a program of dorylus_hpc, its arguments


def run_table(ranks: int, table: Table, folder: Path, seconds: float = 2 * SECONDS) -> dict[str, list[Ended]]:
    """Run command lines one after the other on the same ranks, in `folder`.

    Returns
    -------
    dict
        By name, what each rank returned and wrote. Where a rank aborts the job or does not end in time, that
        command line and those after it are missing.
    """
    results = Path(tempfile.mkdtemp(prefix=".table-", dir=folder))
    listed = [[program, [str(word) for word in arguments]] for program, arguments in table.values()]
    (results / "table.json").write_text(json.dumps(listed))
    try:
        whole = launch(ranks, [__file__, results], cwd=folder, seconds=seconds)
        print(whole.out, whole.err)  # seen where a test fails
    except AssertionError as late:
        print(late)
    found = {}
    for number, name in enumerate(table):
        try:
            found[name] = [_result(results, number, rank) for rank in range(ranks)]
        except FileNotFoundError:
            print(f"{name}: not every rank came to its end")
            for path in sorted(results.glob(f"{number}.*.err")):
                print(f"{path.name}:\n{path.read_text(errors='replace')}")
            break
    return found


def _result(results: Path, number: int, rank: int) -> Ended:
    status, seconds = json.loads((results / f"{number}.{rank}.json").read_text())
    out, err = ((results / f"{number}.{rank}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
    return Ended(status, out, err, seconds)


def _serve(results: Path) -> None:
    """Run a table on this rank."""
    from dorylus_hpc.comm.launch import start_mpi

    rank = start_mpi().COMM_WORLD.Get_rank()
    own = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    for number, (program, arguments) in enumerate(json.loads((results / "table.json").read_text())):
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
        for descriptor, original in own.items():
            os.dup2(original, descriptor)
        (results / f"{number}.{rank}.json").write_text(json.dumps([status, seconds]))


# ---- small inputs


def write_ring(path: Path, n: int = 12, *, features: int = 2, **changes: Any) -> Path:
    """Write a ring as .npz: 2 classes, sets in turn; `changes` replace keys, or drop those that are None."""
    vertices = np.arange(n)
    neighbours = np.sort(np.stack([(vertices - 1) % n, (vertices + 1) % n], axis=1), axis=1)
    degree = len(np.unique(neighbours[0]))  # 1 if there are two vertices only
    labels = vertices * 2 // n
    noise = np.random.default_rng(n).standard_normal((n, features))
    content = {
        "indptr": degree * np.arange(n + 1),
        "indices": neighbours[:, :degree].reshape(-1),
        "x": (noise + labels[:, None]).astype(np.float32),
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
