"""Weights on disk: `checkpoint.h5` in the run's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from dorylus_hpc.errors import InputError
from dorylus_hpc.files import atomic_path
from dorylus_hpc.graph.feature_norm import ColumnStatistics

CHECKPOINT = "checkpoint.h5"
FORMAT = 1


@dataclass(frozen=True, eq=False)
class SavedModel:
    """What a prediction needs of a run.

    Attributes
    ----------
    weights
        ``best`` and ``last``: tensors by name.
    epochs
        Number of updates behind each of them.
    config
        The run's configuration, resolved.
    features, classes
        Input and output width.
    columns
        Feature statistics of the training graph, if features were standardised.
    several
        Whether a vertex may have several classes.
    model_sha256
        Of the file of a model of the user's own; empty: it is built in.
    """

    weights: dict[str, dict[str, np.ndarray]]
    epochs: dict[str, int]
    config: dict[str, Any]
    features: int
    classes: int
    columns: ColumnStatistics | None
    several: bool = False
    model_sha256: str = ""


def save_model(path: Path, model: SavedModel) -> None:
    """Write a model, whole or not at all."""
    with atomic_path(path) as temporary, h5py.File(temporary, "w", locking=False) as file:
        file.attrs.update(
            format=FORMAT, config=json.dumps(model.config), features=model.features, classes=model.classes
        )
        if model.several:
            file.attrs["several"] = True
        if model.model_sha256:
            file.attrs["model_sha256"] = model.model_sha256
        for which, tensors in model.weights.items():
            group = file.create_group(f"weights/{which}")
            group.attrs["epoch"] = model.epochs[which]
            for name, tensor in tensors.items():
                group[name] = tensor
        if model.columns is not None:
            file["columns/mean"] = model.columns.mean
            file["columns/deviation"] = model.columns.deviation


def load_model(path: Path) -> SavedModel:
    """Read a model.

    Raises
    ------
    InputError
        The file is missing, damaged, or of another format.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file: --run-dir must name the folder of a finished training run")
    try:
        with h5py.File(path, "r", locking=False) as file:
            if file.attrs["format"] != FORMAT:
                raise InputError(
                    f"{path}: format {file.attrs['format']}, but this version reads {FORMAT}: train again"
                )
            groups = file["weights"]
            columns = None
            if "columns" in file:
                columns = ColumnStatistics(file["columns/mean"][()], file["columns/deviation"][()])
            return SavedModel(
                weights={
                    which: {name: data[()] for name, data in group.items()} for which, group in groups.items()
                },
                epochs={which: int(group.attrs["epoch"]) for which, group in groups.items()},
                config=json.loads(file.attrs["config"]),
                features=int(file.attrs["features"]),
                classes=int(file.attrs["classes"]),
                columns=columns,
                several=bool(file.attrs.get("several", False)),
                model_sha256=str(file.attrs.get("model_sha256", "")),
            )
    except (OSError, KeyError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a checkpoint, or damaged ({error}): train again") from error


def weights_sha256(tensors: dict[str, np.ndarray]) -> str:
    """Return a digest of all tensors, in the order of the model: equal if and only if every bit is."""
    digest = sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name}{tensor.shape}{tensor.dtype.str}".encode())
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()
