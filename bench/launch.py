"""Starts the training runs that are measured.

Runs start through mpirun.sh, as a user's do, so that the launcher's settings live in one place; with the
Python that runs the benchmark, and with the code of this clone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import ROOT, SLOWING


@dataclass(frozen=True, order=True, repr=False)
class Layout:
    """Ranks that are graph servers, and the threads of each."""

    ranks: int
    threads: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read RANKSxTHREADS, such as 2x1.

        Raises
        ------
        ArgumentTypeError
            It is something else.
        """
        if not (found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)):
            raise ArgumentTypeError(f"{text!r} is not RANKSxTHREADS, such as 2x1")
        return cls(int(found[1]), int(found[2]))

    def __repr__(self) -> str:
        return f"{self.ranks}x{self.threads}"


def train(ranks: int, run_dir: Path, options: Mapping[str, Any], extra: Sequence[str] = ()) -> dict[str, Any]:
    """Train on so many ranks and return the summary; a run that fails ends the benchmark.

    `options` are those of the command line, without the dashes; `extra` are arguments as they are.
    """
    flags = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    program = ["-m", "dorylus_hpc.train", *flags, "--run-dir", str(run_dir.resolve()), *extra]
    command = [str(ROOT / "mpirun.sh"), "--no-setup", "-n", str(ranks), "python", *program]
    environment = {name: value for name, value in os.environ.items() if name not in SLOWING}
    environment |= {"DORYLUS_PYTHON": sys.executable}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if result.returncode:
        raise SystemExit(
            f"status {result.returncode} of: {' '.join(command)}\n{result.stdout}{result.stderr}"
        )
    return json.loads((run_dir / "summary.json").read_text())


def epochs_of(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has written of each epoch, in order."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda line: line["epoch"])


def not_passed_on() -> list[str]:
    """Tell what of this process's environment runs do not see, because it slows NumPy's products."""
    return [f"{name} is not passed on" for name in SLOWING if name in os.environ]
