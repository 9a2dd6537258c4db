"""Training and prediction from Python: the same runs as from the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dorylus_hpc.comm.failure import guarded, private, together
from dorylus_hpc.comm.launch import check_world, start_mpi
from dorylus_hpc.comm.roles import assign_roles
from dorylus_hpc.config import TrainConfig, make_config
from dorylus_hpc.engine.checkpoint import CHECKPOINT, SavedModel, load_model
from dorylus_hpc.engine.inference import Predictions
from dorylus_hpc.engine.inference import predict as run_prediction
from dorylus_hpc.engine.lambda_backend import check_backend
from dorylus_hpc.engine.own_model import agree_on_model, file_of, model_of_run
from dorylus_hpc.engine.trainer import TrainingResult
from dorylus_hpc.engine.trainer import train as run_training
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.sources import GRAPH_FOLDER, open_source, prepared_folder

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def fit(
    data: str | Path | GraphData | None,
    *,
    comm: Intracomm | None = None,
    run_dir: str | Path = "",
    progress: bool = False,
    **options: Any,
) -> TrainingResult:
    """Train a model. Collective over `comm`.

    Parameters
    ----------
    data
        A prepared folder, the path of a ``.npz`` graph, the name of a data set, or a graph in memory
        (`dorylus_hpc.graph.readers.from_arrays`). What is not prepared yet is prepared by rank 0, whose
        argument alone counts.
    comm
        All ranks of the job; by default this process alone.
    run_dir
        Folder for the results; by default ``runs/NAME``, with a number where that is taken.
    progress
        Show progress on rank 0.
    **options
        Options of the command line, with underscores: ``hidden=16, epochs=100, servers=1`` ...
        ``model_file`` may also be the class or function itself, if it comes from a file of its own.

    Returns
    -------
    TrainingResult
        Summary and weights, the same on every rank.

    Raises
    ------
    InputError
        Wrong input, on all ranks. With several ranks, any other exception aborts the job after
        printing it, since the other ranks could wait for ever.

    Examples
    --------
    >>> result = dorylus_hpc.fit("digits", epochs=100, hidden=32)  # doctest: +SKIP
    >>> result.summary["test_accuracy"]["best_validation"]  # doctest: +SKIP
    """
    comm = start_mpi().COMM_SELF if comm is None else comm
    with guarded(comm):
        together(comm, lambda: check_world(comm))
        name = data.name if isinstance(data, GraphData) else str(data)
        config = together(comm, lambda: _make_config(name, run_dir, options))
        return train_on(comm, config, data, progress=progress)


def _make_config(data: str, run_dir: str | Path, options: dict[str, Any]) -> TrainConfig:
    if "model_file" in options:
        options = options | {"model_file": file_of(options["model_file"])}
    return make_config({"data": data, "run_dir": str(run_dir)} | options)


def train_on(
    comm: Intracomm, config: TrainConfig, data: str | Path | GraphData | None, *, progress: bool
) -> TrainingResult:
    """Prepare what is to be prepared, and train. Collective; see `fit`."""
    with private(comm) as own:
        roles = together(own, lambda: assign_roles(own, config.servers))
        together(own, lambda: check_backend(config))
        model = agree_on_model(own, config.model_file)
        source = _open_source(own, data)
        run_dir = Path(own.bcast(together(own, lambda: _make_run_dir(own, config))))
        folder = prepared_folder(own, source, run_dir, parts=roles.n_graph, report=progress)
        return run_training(own, replace(config, run_dir=str(run_dir)), folder, progress=progress, own=model)


def _open_source(comm: Intracomm, data: str | Path | GraphData | None) -> Path | GraphData | None:
    """Read what rank 0 was given; None on the other ranks. Collective."""

    def read() -> Path | GraphData | None:
        if comm.Get_rank() != 0:
            return None
        if data is None:
            raise InputError("data is missing on rank 0: name a prepared folder, a FILE.npz, or a data set")
        return open_source(data)

    return together(comm, read)


def _make_run_dir(comm: Intracomm, config: TrainConfig) -> str:
    """Make the folder of results on rank 0: the one asked for, or a new one under ``runs``."""
    if comm.Get_rank() != 0:
        return ""
    wanted = Path(config.run_dir or Path("runs") / (Path(config.data).stem or "run"))
    path, number = wanted, 1
    try:
        while True:
            try:
                path.mkdir(parents=True, exist_ok=bool(config.run_dir))
                break
            except FileExistsError:
                if config.run_dir:
                    raise
                number += 1
                path = wanted.with_name(f"{wanted.name}-{number}")
        with (path / "metrics.jsonl").open("a"):  # what cannot be written is to be said now
            pass
    except OSError as error:
        raise InputError(f"--run-dir {path}: cannot be made or written: {error}") from error
    return str(path)


def infer(
    run_dir: str | Path,
    data: str | Path | GraphData | None = None,
    *,
    comm: Intracomm | None = None,
    weights: str = "best",
) -> Predictions | None:
    """Predict a class, or classes, for every vertex. Collective over `comm`.

    Parameters
    ----------
    run_dir
        Folder of a finished training run.
    data
        As for `fit`; by default what the model was trained on.
    comm
        All ranks of the job, at most one a part; by default this process alone.
    weights
        ``best`` (by validation) or ``last``.

    Returns
    -------
    Predictions
        On rank 0; None elsewhere.

    Raises
    ------
    InputError
        Wrong input, on all ranks; see `fit` for other exceptions.
    """
    comm = start_mpi().COMM_SELF if comm is None else comm
    with guarded(comm):
        together(comm, lambda: check_world(comm))
        with private(comm) as own:
            run_dir = Path(run_dir)
            model = together(own, lambda: _load_model(run_dir, weights))
            made_of = together(own, lambda: model_of_run(run_dir, model))
            if data is None:
                kept = run_dir / GRAPH_FOLDER
                data = kept if kept.is_dir() else model.config["data"]
            source = _open_source(own, data)
            folder = prepared_folder(own, source, run_dir / "prediction", parts=own.Get_size())
            return run_prediction(own, model, weights, folder, own=made_of)


def _load_model(run_dir: Path, weights: str) -> SavedModel:
    if weights not in ("best", "last"):
        raise InputError(f"weights must be best or last, got {weights!r}")
    try:
        model = load_model(run_dir / CHECKPOINT)
    except OSError as error:  # no permission to look there, or too long a name
        raise InputError(f"--run-dir {run_dir}: cannot be read: {error.strerror}") from error
    try:
        make_config(model.config)
    except InputError as error:
        raise InputError(f"{run_dir / CHECKPOINT}: written by another version: {error}") from error
    return model
