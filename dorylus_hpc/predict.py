"""Entry point: ``python -m dorylus_hpc.predict --run-dir DIR --data DIR -o FILE``, alone or under mpirun."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dorylus_hpc.api import infer
from dorylus_hpc.cli import run_entry_point
from dorylus_hpc.comm.launch import start_mpi
from dorylus_hpc.config import make_parser
from dorylus_hpc.report.predictions import check_output, write_predictions

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

PROGRAM = "python -m dorylus_hpc.predict"


def main(argv: Sequence[str] | None = None) -> int:
    """Predict on all ranks of the job; return the exit status."""
    return run_entry_point(PROGRAM, lambda: start_mpi().COMM_WORLD, _parse, _run, argv)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(PROGRAM, "Predict a class, or classes, for every vertex, under its own id.")
    parser.add_argument("--run-dir", required=True, type=Path, help="folder of a finished training run")
    parser.add_argument("--data", required=True, help="prepared folder, FILE.npz, or the name of a data set")
    parser.add_argument(
        "--weights", choices=("best", "last"), default="best", help="best: by validation; default best"
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="file to write: .npz, .csv or .parquet",
    )
    options = parser.parse_args(arguments)
    check_output(options.output)
    return options


def _run(comm: Intracomm, options: argparse.Namespace) -> None:
    predictions = infer(options.run_dir, options.data, comm=comm, weights=options.weights)
    if predictions is not None:
        write_predictions(options.output, predictions.ids, predictions.classes, predictions.probabilities)
        print(f"{len(predictions.ids)} predictions are in {options.output}")


if __name__ == "__main__":
    sys.exit(main())
