"""Data sets that come without a download."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.sparse as sp

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.readers import from_arrays

SPLIT_SEED = 0


def digits(k: int = 8) -> GraphData:
    """Handwritten digits: 1,797 real images of 8 x 8 pixels, each joined to its nearest neighbours.

    Parameters
    ----------
    k : int
        Neighbours looked for; two images are joined if either is among the other's k nearest.

    Returns
    -------
    GraphData
        Undirected, without loops; 64 features in 0..1; 10 training and 30 validation images a class,
        the rest for testing, always the same ones.

    Raises
    ------
    InputError
        If scikit-learn, which ships the images, is not installed.

    Notes
    -----
    E. Alpaydin, C. Kaynak, *Optical Recognition of Handwritten Digits*, UCI, 1998.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            "the data set 'digits' comes with scikit-learn, which is not installed: "
            "pip install 'dorylus_hpc[demo]'"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    train, validation, test = _per_class(labels, 10, 30)
    return from_arrays(
        _nearest(pixels.astype(np.int64), k),
        (pixels / 16.0).astype(np.float32),
        labels,
        train=train,
        validation=validation,
        test=test,
        n_classes=10,
        name="digits",
    )


def _nearest(points: np.ndarray, k: int) -> sp.csr_array:
    """Symmetric k-nearest-neighbour graph; whole numbers and stable sorting make it the same everywhere."""
    n = len(points)
    squares = (points**2).sum(axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * (points @ points.T)
    np.fill_diagonal(distances, np.iinfo(np.int64).max)
    nearest = np.argsort(distances, axis=1, kind="stable")[:, :k]
    arcs = sp.csr_array((np.ones(n * k, bool), nearest.ravel(), np.arange(0, n * k + 1, k)), shape=(n, n))
    return sp.csr_array(arcs + arcs.T)


def _per_class(labels: np.ndarray, train: int, validation: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices of `train` and `validation` vertices of each class, and of the rest."""
    rng = np.random.default_rng(SPLIT_SEED)
    shuffled = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
    cut = [np.split(members, (train, train + validation)) for members in shuffled]
    first, second, rest = (np.sort(np.concatenate(sets)) for sets in zip(*cut, strict=True))
    return first, second, rest


DATASETS: dict[str, Callable[[], GraphData]] = {"digits": digits}


def load(name: str) -> GraphData:
    """A data set by its name (see DATASETS).

    Raises
    ------
    InputError
        For an unknown name.
    """
    if name not in DATASETS:
        raise InputError(f"unknown data set {name!r}; known: {', '.join(DATASETS)}")
    return DATASETS[name]()
