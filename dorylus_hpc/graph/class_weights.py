"""Weights of classes from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.checks import first, refuse


def read_class_weights(path: str | Path, n_classes: int) -> np.ndarray:
    """Read one weight a class.

    Parameters
    ----------
    path
        ``.npy``, or text with numbers between spaces or lines and comments behind ``#``.
    n_classes

    Returns
    -------
    ndarray, (n_classes,), float64

    Raises
    ------
    InputError
        The file cannot be read, or does not have one finite number >= 0 for each class, one of them above 0.
    """
    where = f"--class-weights {path}"
    try:
        with open(path, "rb") as file:
            if file.read(6) == b"\x93NUMPY":
                file.seek(0)
                found = np.load(file, allow_pickle=False)
            else:
                file.seek(0)
                lines = [line.partition("#")[0] for line in file.read().decode().splitlines()]
                found = np.array([float(word) for line in lines for word in line.split()])
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"{where}: cannot be read as none, balanced or a file of weights: {error}"
        ) from error
    if found.shape != (n_classes,) or found.dtype.kind not in "iuf":
        refuse(
            where,
            f"has {found.dtype} of shape {found.shape}, expected a weight for each of {n_classes} classes",
        )
    weights = found.astype(np.float64)
    if (bad := first(~(np.isfinite(weights) & (weights >= 0)))) is not None:
        refuse(where, f"class {bad}: weight {weights[bad]} is not a finite number >= 0")
    if not weights.any():
        refuse(where, "all weights are 0: nothing would be learned")
    return weights
