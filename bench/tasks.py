"""What whole runs are trained on: generated graphs with features, labels and sets; public ones from a file.

Graphs are symmetric, without loops, repeated edges and weights, so that every system that is measured reads
the very same edges whatever it would make of others. Features are a centre of the vertex's class plus noise
in which it can hardly be seen. Where classes are those of planted communities, neighbours tell it; in a
uniform graph they don't.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from bench.graphs import planted_pairs, scaled
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.clean import clean
from dorylus_hpc.graph.data import TRAIN, VALIDATION, GraphData
from dorylus_hpc.graph.preparation import load_graph
from dorylus_hpc.graph.readers import from_arrays

SIGNAL = 0.1  # deviation of the centres, beside noise of deviation 1
STRIP = 65536  # rows at a time: memory


@dataclass(frozen=True)
class Preset:
    """A generated graph.

    Attributes
    ----------
    vertices, arcs
        At scale 1; repeated pairs and loops are drawn too, and left out.
    features, classes
        Width of the features, number of classes.
    mixing
        Share of the edges that lead out of planted communities; None: all edges lead anywhere.
    """

    vertices: int
    arcs: int
    features: int
    classes: int
    mixing: float | None = None


PRESETS = {
    "58k": Preset(58_000, 10_000_000, 602, 41),
    "500k": Preset(500_000, 10_000_000, 300, 25),
    "uniform": Preset(200_000, 10_000_000, 128, 40),
    "communities": Preset(200_000, 10_000_000, 128, 40, mixing=0.2),
}


def generate(name: str, scale: float = 1.0, seed: int = 0) -> GraphData:
    """Make a preset's graph, its vertices and arcs times `scale`; 60/20/20 % of the vertices in the sets."""
    preset, rng = PRESETS[name], np.random.default_rng(seed)
    n, pairs = max(scaled(preset.vertices, scale), preset.classes), scaled(preset.arcs / 2, scale)
    if preset.mixing is None:
        rows, columns = rng.integers(n, size=(2, pairs))
        labels = rng.integers(preset.classes, size=n)
    else:
        rows, columns, home = planted_pairs(n, pairs, preset.mixing, rng)
        labels = home % preset.classes
    return from_arrays(
        symmetric(n, rows, columns),
        noisy(labels, preset.classes, preset.features, rng),
        labels,
        n_classes=preset.classes,
        name=name,
        seed=seed,
    )


def symmetric(n: int, rows: np.ndarray, columns: np.ndarray) -> sp.csr_array:
    """Both directions of the pairs, each once, without loops."""
    apart = rows != columns
    low, high = np.minimum(rows, columns)[apart], np.maximum(rows, columns)[apart]
    low, high = np.divmod(np.unique(low * n + high), n)
    ends = np.concatenate([low, high]), np.concatenate([high, low])
    return sp.csr_array((np.ones(len(ends[0]), np.int8), ends), shape=(n, n))


def noisy(labels: np.ndarray, classes: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Features, float32."""
    centres = SIGNAL * rng.standard_normal((classes, width), dtype=np.float32)
    x = rng.standard_normal((len(labels), width), dtype=np.float32)
    for first in range(0, len(x), STRIP):
        x[first : first + STRIP] += centres[labels[first : first + STRIP]]
    return x


def from_file(path: Path) -> GraphData:
    """Read a graph of a file, made symmetric, without loops and repeated edges, with dense features.

    Raises
    ------
    InputError
        The file is wrong, or its edges have weights.
    """
    graph = clean(load_graph(path), undirected=True, self_loops="drop", duplicates="merge")
    if graph.weights is not None:
        raise InputError(f"{path}: its edges have weights; the systems are compared on graphs without")
    if graph.sparse_features:
        graph = replace(graph, features=graph.features.toarray())
    return graph


def write_arrays(graph: GraphData, path: Path) -> None:
    """Write a graph as plain arrays: CSR, features, labels, and the vertices of two sets."""
    np.savez(
        path,
        indptr=graph.indptr,
        indices=graph.indices,
        x=np.ascontiguousarray(graph.features, np.float32),
        y=graph.labels.astype(np.int64),
        train=np.flatnonzero(graph.split == TRAIN),
        validation=np.flatnonzero(graph.split == VALIDATION),
    )
