"""Entry point: ``mpirun -n N python -m dorylus_hpc.train --data ...``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dorylus_hpc.api import train_on
from dorylus_hpc.cli import run_entry_point
from dorylus_hpc.comm.launch import start_mpi
from dorylus_hpc.config import TrainConfig, parse_train
from dorylus_hpc.engine.trainer import TrainingResult

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

PROGRAM = "python -m dorylus_hpc.train"


def main(argv: Sequence[str] | None = None) -> int:
    """Train on all ranks of the job; return the exit status."""
    return run_entry_point(
        PROGRAM,
        lambda: start_mpi().COMM_WORLD,
        lambda arguments: parse_train(arguments, PROGRAM),
        _run,
        argv,
    )


def _run(comm: Intracomm, config: TrainConfig) -> None:
    speaks = comm.Get_rank() == 0
    result = train_on(comm, config, config.data, progress=speaks)
    if speaks:
        _report(result)


def _report(result: TrainingResult) -> None:
    summary = result.summary
    metric = summary["metric"]
    found = {name: metric[name]["best_validation"] for name in ("train", "val", "test")}
    words = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if value is not None)
    print(
        f"{metric['name']} of the best weights (after epoch {summary['best_epoch']}): {words}\n"
        f"{summary['epochs']} epochs, median {summary['epoch_seconds']['median']:.4f} s an epoch\n"
        f"{_spent(summary)}"
        f"results are in {result.run_dir}: summary.json, metrics.jsonl, checkpoint.h5, config.toml\n"
        f"predict with: {shlex.quote(sys.executable)} -m dorylus_hpc.predict --run-dir "
        f"{shlex.quote(str(result.run_dir))} --data {shlex.quote(summary['config']['data'])} "
        "-o predictions.csv"
    )


def _spent(summary: dict[str, Any]) -> str:
    """Return a line about what the run used of Lambda and what it cost, where anything has a price."""
    cost, used = summary["cost"], summary["lambda"]
    parts = [
        f"{cost[name]:.3g} {cost['currency']} {name.replace('_', ' ')}"
        for name in ("graph_servers", "parameter_servers", "lambda_compute", "lambda_requests")
        if cost[name]
    ]
    if not parts:
        return ""
    calls = f"{used['invocations']} invocations ({used['retries']} retries); " if used["invocations"] else ""
    return f"cost: {calls}{', '.join(parts)}\n"


if __name__ == "__main__":
    sys.exit(main())
