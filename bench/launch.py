"""Starts the training runs that are measured, and says where they ran.

Runs start through mpirun.sh, as a user's do, so that the launcher's settings live in one place; with the
Python that runs the benchmark, and with the code of this clone.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dorylus_hpc.files import atomic_path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("runs", "bench")


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


def surroundings() -> dict[str, Any]:
    """What a number means nothing without: the code and the machine."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "changed_files": len(_git("status", "--porcelain").splitlines()),
        "machine": platform.platform(),
        "cpu": _cpu(),
        "cores": len(usable),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "scipy": version("scipy"),
    }


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write the results as JSON, with the surroundings in front."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(surroundings() | dict(results), indent=1) + "\n")
    print(f"written to {path}")


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
