"""Starting programs on ranks from a test, with a time limit after which nothing of them is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from run_mpi import ROOT, end

SECONDS = 60  # a job that takes longer hangs
_LAUNCHER = re.compile(
    r"-+|\s*|(prterun|mpirun|mpiexec|thus) .*|.*(Process name|Exit code):.*|\[(warn|[\w.-]+:\d+)\] .*"
)


@dataclass(frozen=True)
class Ended:
    """A job that has ended by itself.

    Attributes
    ----------
    status
        Exit status of the launcher, or of the program if there was none.
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
        return [line for line in self.err.replace("\x00", "").splitlines() if not _LAUNCHER.fullmatch(line)]


def launch(
    ranks: int,
    arguments: Sequence[object],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    seconds: float = SECONDS,
) -> Ended:
    """Run Python with `arguments` on so many ranks; 0 starts it without a launcher."""
    words = [str(argument) for argument in arguments]
    if ranks:
        command = [str(ROOT / "mpirun.sh"), "--no-setup", "-n", str(ranks), "python", *words]
    else:
        command = [sys.executable, "-P", *words]
    environment = {**os.environ, "DORYLUS_PYTHON": sys.executable, **(env or {})}
    start = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        process = subprocess.Popen(
            command,
            cwd=cwd or ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            end(process)
            err.seek(0)
            raise AssertionError(f"no end after {seconds} s: {' '.join(command)}\n{err.read()}") from None
        except BaseException:
            end(process)
            raise
        out.seek(0)
        err.seek(0)
        return Ended(status, out.read(), err.read(), time.monotonic() - start)


def train(ranks: int, *arguments: object, **options: object) -> Ended:
    """Run ``dorylus_hpc.train``."""
    return launch(ranks, ["-m", "dorylus_hpc.train", *arguments], **options)  # type: ignore[arg-type]


def predict(ranks: int, *arguments: object, **options: object) -> Ended:
    """Run ``dorylus_hpc.predict``."""
    return launch(ranks, ["-m", "dorylus_hpc.predict", *arguments], **options)  # type: ignore[arg-type]
