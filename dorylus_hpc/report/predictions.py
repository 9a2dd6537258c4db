"""Predictions as a file: npz, csv or parquet."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dorylus_hpc.errors import InputError
from dorylus_hpc.files import atomic_path


def check_output(path: Path) -> None:
    """Refuse an output that cannot be written, before any work is done for it.

    Raises
    ------
    InputError
        Unknown ending, missing folder, or a format whose package is not installed.
    """
    if path.suffix not in _WRITERS:
        raise InputError(f"-o {path}: the ending must be one of {', '.join(_WRITERS)}")
    if not os.path.isdir(path.parent):  # unlike Path.is_dir, False for whatever cannot be looked at
        raise InputError(f"-o {path}: the folder {path.parent} does not exist")
    if os.path.isdir(path) or not os.access(path.parent, os.W_OK):
        raise InputError(f"-o {path}: cannot be written: name a file in a folder of yours")
    if path.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise InputError(
                f"-o {path}: parquet needs pyarrow: pip install 'dorylus_hpc[parquet]', or write .npz or .csv"
            ) from error


def write_predictions(path: Path, ids: np.ndarray, classes: np.ndarray, probabilities: np.ndarray) -> None:
    """Write one row a vertex: id, predicted class or classes, probability of each class.

    Parameters
    ----------
    path
        Ends in ``.npz`` (arrays ``ids``, ``classes``, ``probabilities``), ``.csv`` or ``.parquet``
        (columns ``id``, ``class``, ``p0``, ``p1``, ...; of several classes a vertex ``classes`` in place of
        ``class``: numbers between spaces, in ``.parquet`` a list).
    ids : ndarray, (n,)
    classes : ndarray, (n,), int32, or (n, n_classes), uint8
        A class; or 1 for each class of a vertex, 0 for the others.
    probabilities : ndarray, (n, n_classes), float32

    Raises
    ------
    InputError
        See `check_output`.
    """
    check_output(path)
    with atomic_path(path) as temporary:
        _WRITERS[path.suffix](temporary, ids, classes, probabilities)


def _columns(classes: np.ndarray, probabilities: np.ndarray) -> list[str]:
    name = "class" if classes.ndim == 1 else "classes"
    return ["id", name, *(f"p{k}" for k in range(probabilities.shape[1]))]


def _sets(classes: np.ndarray) -> list[list[int]]:
    """Return the numbers of each vertex' classes."""
    return [np.flatnonzero(row).tolist() for row in classes]


def _write_npz(path: Path, ids: np.ndarray, classes: np.ndarray, probabilities: np.ndarray) -> None:
    with path.open("wb") as file:
        np.savez(file, ids=ids, classes=classes, probabilities=probabilities)


def _write_csv(path: Path, ids: np.ndarray, classes: np.ndarray, probabilities: np.ndarray) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_columns(classes, probabilities))
        if classes.ndim == 1:
            answers = classes.tolist()
        else:
            answers = [" ".join(map(str, chosen)) for chosen in _sets(classes)]
        for vertex, chosen, row in zip(ids.tolist(), answers, probabilities, strict=True):
            writer.writerow([vertex, chosen, *(f"{value:.6g}" for value in row)])


def _write_parquet(path: Path, ids: np.ndarray, classes: np.ndarray, probabilities: np.ndarray) -> None:
    import pyarrow
    from pyarrow import parquet

    if classes.ndim == 1:
        answers = classes
    else:
        answers = pyarrow.array(_sets(classes), pyarrow.list_(pyarrow.int32()))
    arrays = [ids, answers, *np.ascontiguousarray(probabilities.T)]
    parquet.write_table(pyarrow.table(arrays, names=_columns(classes, probabilities)), path)


_WRITERS: dict[str, Callable[[Path, np.ndarray, np.ndarray, np.ndarray], None]] = {
    ".npz": _write_npz,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
}
