"""Starts the training runs that are measured.

Runs start through mpirun.sh, as a user's do, so that the launcher's settings live in one place; with the
Python that runs the benchmark, and with the code of this clone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.machine import ROOT


def train(ranks: int, run_dir: Path, options: Mapping[str, Any], extra: Sequence[str] = ()) -> dict[str, Any]:
    """Train on so many ranks and return the summary; a run that fails ends the benchmark.

    `options` are those of the command line, without the dashes; `extra` are arguments as they are.
    """
    flags = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    program = ["-m", "dorylus_hpc.train", *flags, "--run-dir", str(run_dir.resolve()), *extra]
    command = [str(ROOT / "mpirun.sh"), "--no-setup", "-n", str(ranks), "python", *program]
    environment = {**os.environ, "DORYLUS_PYTHON": sys.executable}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if result.returncode:
        raise SystemExit(
            f"status {result.returncode} of: {' '.join(command)}\n{result.stdout}{result.stderr}"
        )
    return json.loads((run_dir / "summary.json").read_text())
