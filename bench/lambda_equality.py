"""Whether Lambda changes any number: trains on the local service, beside the CPU back end and under faults.

    python -m bench.lambda_equality [--only backends faults] [--seeds 20] [--epochs 4]

The graph is digits in four parts, with dropout, in float32 and mode pipe. Two tables:

backends
    The CPU back end against lambda-local, for each number of graph and parameter servers: the largest
    relative error of the losses and of the final weights (normwise, of a tensor), and predictions that
    differ. The first two must stay below 1e-5, the third must be 0, and all lambda-local runs must have the
    same weights to the last bit.
faults
    lambda-local with faults from many seeds: about 20 % of the invocations are lost or their sandbox crashes
    (before or after its result came), 20 % are held for longer than their deadline, 10 % run twice, and
    there are bursts of 429. The final weights must be those of a run without faults, to the last bit.

After every run the counters must add up, and nothing may be left: no process of the run, of the service or
of a sandbox (and so no socket), and no folder. That no stash is left a run asserts at its own end. The
status is 1 if anything is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.launch import train
from bench.machine import RESULTS, ROOT, write_results
from dorylus_hpc.engine.checkpoint import load_model

TOLERANCE = 1e-5
GROUPS = [(graph, parameter) for graph in (1, 2, 3, 4) for parameter in (1, 2)]
FAULTS = (
    "drop=0.07,crash_before=0.07,crash_after=0.06,delay=0.2,delay_seconds=4,duplicate=0.1,"
    "throttle=0.02,throttle_calls=5,seed={}"
)
LOCAL = {"backend": "lambda-local", "workers": 8, "max-workers": 8, "function-timeout": 6}
SOON = 10.0  # seconds until everything of a run has ended
COUNTERS = (
    "tasks", "invocations", "retries", "throttles", "timeouts", "failures", "fallbacks", "duplicates_refused",
)  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lambda_equality",
        description="Whether Lambda changes any number, and whether faults do.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    tables = ["backends", "faults"]
    add("--only", nargs="+", choices=tables, default=tables, help="tables")
    add("--seeds", type=int, default=20, help="of faults")
    add("--epochs", type=int, default=4, help="of every run")
    add("--intervals", type=int, default=2, help="a part")
    add("--json", type=Path, default=RESULTS / "lambda_equality.json", metavar="FILE", help="for the results")
    options = parser.parse_args(argv)
    if min(options.seeds, options.epochs, options.intervals) < 1:
        parser.error("--seeds, --epochs and --intervals must be at least 1")
    return options


# ---- runs ----


class Runs:
    """Trainings on one graph, in one folder, which is also where they put temporary files."""

    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        self.work = work
        self.data = work / "graph"
        self.common = {
            "data": self.data,
            "epochs": options.epochs,
            "intervals": options.intervals,
            "threads": 1,
        }
        self.python("dorylus_hpc.prepare", "digits", "-o", self.data, "--parts", 4)

    def train(
        self, name: str, graph: int, parameter: int, **changes: Any
    ) -> tuple[dict[str, Any], list[str]]:
        """Train; return the summary, and what is amiss with it."""
        flags = {flag.replace("_", "-"): value for flag, value in changes.items()}
        run_dir = self.work / name
        summary = train(graph + parameter, run_dir, self.common | {"servers": parameter} | flags)
        return summary, amiss(summary["lambda"]) + self.left()

    def python(self, module: str, *words: object) -> None:
        command = [sys.executable, "-m", module, *map(str, words)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    def predictions(self, name: str) -> dict[str, np.ndarray]:
        """Return what the final weights of a run predict."""
        file = self.work / f"{name}.npz"
        words = ["--run-dir", self.work / name, "--data", self.data, "--weights", "last", "-o", file]
        self.python("dorylus_hpc.predict", *words)
        with np.load(file) as content:
            return dict(content)

    def left(self) -> list[str]:
        """Say what is left of a run that has ended."""
        end = time.monotonic() + SOON
        while processes := self._processes():
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        folders = [path.name for path in self.work.glob("dorylus-*")]
        return [f"left: process {one}" for one in processes] + [f"left: {name}" for name in folders]

    def _processes(self) -> list[str]:
        """Processes that know of our folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and str(self.work) in str(process.environ()):
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
            except psutil.Error:
                continue
        return found


def amiss(counters: dict[str, Any]) -> list[str]:
    """Say where counters of Lambda do not add up."""
    if not counters.get("tasks"):
        return []
    get = counters.__getitem__
    rules = {
        "invocations = invoked + retries + throttles": get("invocations")
        == get("invoked") + get("retries") + get("throttles"),
        "tasks - fallbacks <= invoked <= tasks": get("tasks") - get("fallbacks")
        <= get("invoked")
        <= get("tasks"),
        "failures + throttles <= invocations": get("failures") + get("throttles") <= get("invocations"),
    }
    return [f"counters: {rule}" for rule, holds in rules.items() if not holds]


# ---- comparisons ----


def relative(one: Any, other: Any) -> float:
    """The largest difference, relative to the largest value."""
    one, other = np.asarray(one, float), np.asarray(other, float)
    return float(np.abs(one - other).max() / np.abs(other).max())


def errors(runs: Runs, one: str, other: str, losses: tuple[list[float], list[float]]) -> dict[str, float]:
    """How far two runs are apart."""
    weights = [load_model(runs.work / name / "checkpoint.h5").weights["last"] for name in (one, other)]
    predicted = [runs.predictions(name) for name in (one, other)]
    return {
        "loss": float(np.abs(np.subtract(*losses) / losses[1]).max()),
        "weights": max(relative(weights[0][name], weights[1][name]) for name in weights[1]),
        "predictions": int((predicted[0]["classes"] != predicted[1]["classes"]).sum()),
    }


def compare_backends(runs: Runs) -> list[dict[str, Any]]:
    """Table one."""
    print(f"{'servers':>12}{'loss':>12}{'weights':>12}{'predictions':>13}  sha256")
    rows: list[dict[str, Any]] = []
    for graph, parameter in GROUPS:
        names = [f"{backend}-{graph}-{parameter}" for backend in ("local", "cpu")]
        local, wrong = runs.train(names[0], graph, parameter, **LOCAL)
        cpu, more = runs.train(names[1], graph, parameter)
        row = {"graph_servers": graph, "parameter_servers": parameter, "counters": local["lambda"]}
        row |= errors(runs, *names, (local["loss"], cpu["loss"]))
        row["sha256"] = local["weights_sha256"]
        wrong += more
        wrong += [f"{name}: {row[name]:.1e}" for name in ("loss", "weights") if not row[name] < TOLERANCE]
        wrong += [f"{row['predictions']} predictions differ"] if row["predictions"] else []
        wrong += [] if row["sha256"] == (rows or [row])[0]["sha256"] else ["other weights"]
        wrong += (
            ["the cores did tasks alone"] if local["lambda"]["invoked"] < local["lambda"]["tasks"] else []
        )
        rows.append(row | {"amiss": wrong})
        print(
            f"{graph:>8} + {parameter}{row['loss']:12.1e}{row['weights']:12.1e}{row['predictions']:13}  "
            f"{row['sha256'][:12]}  {'; '.join(wrong)}",
            flush=True,
        )
    return rows


def inject_faults(runs: Runs, seeds: int) -> list[dict[str, Any]]:
    """Table two."""
    print(
        f"{'seed':>5}{'seconds':>9}" + "".join(f"{name.split('_')[0]:>13}" for name in COUNTERS) + "  sha256"
    )
    rows: list[dict[str, Any]] = []
    for number in range(seeds + 1):  # the first without
        faults = FAULTS.format(number) if number else ""
        graph, parameter = (2, 1) if number % 2 else (2, 0)
        began = time.monotonic()
        summary, wrong = runs.train(f"faults-{number}", graph, parameter, **LOCAL, local_faults=faults)
        row = {"seed": number, "faults": faults, "seconds": time.monotonic() - began}
        row |= {"counters": summary["lambda"], "sha256": summary["weights_sha256"]}
        wrong += [] if row["sha256"] == (rows or [row])[0]["sha256"] else ["other weights"]
        rows.append(row | {"amiss": wrong})
        print(
            f"{number or '-':>5}{row['seconds']:9.1f}"
            + "".join(f"{summary['lambda'][name]:13}" for name in COUNTERS)
            + f"  {row['sha256'][:12]}  {'; '.join(wrong)}",
            flush=True,
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign."""
    options = parse(argv)
    names = ("seeds", "epochs", "intervals")
    results: dict[str, Any] = {name: getattr(options, name) for name in names} | {"faults_each": FAULTS}
    with tempfile.TemporaryDirectory(prefix="lambda-equality-") as folder:
        os.environ["TMPDIR"] = folder  # by which all processes of runs are known
        runs = Runs(Path(folder), options)
        if "backends" in options.only:
            results["backends"] = compare_backends(runs)
        if "faults" in options.only:
            results["faults"] = inject_faults(runs, options.seeds)
        del os.environ["TMPDIR"]
    missed = [row for table in options.only for row in results[table] if row["amiss"]]
    print(f"{len(missed)} of {sum(len(results[table]) for table in options.only)} rows missed something")
    write_results(options.json, results)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
