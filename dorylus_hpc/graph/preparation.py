"""From what the user names to a prepared folder, telling what happened on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.sparse.csgraph import connected_components

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph import datasets
from dorylus_hpc.graph.clean import clean
from dorylus_hpc.graph.data import SPLIT_NAMES, GraphData, is_labelled
from dorylus_hpc.graph.manifest import Manifest
from dorylus_hpc.graph.partitioners import partition
from dorylus_hpc.graph.readers import read_npz
from dorylus_hpc.graph.store import write_folder

TABLE_ROWS = 16


def load_graph(source: str | os.PathLike[str], *, split: int | None = None, seed: int = 0) -> GraphData:
    """Read a graph from an ``.npz`` file, or make a data set by its name.

    Parameters
    ----------
    source : str or path
    split : int, optional
        Which of several splits in the file, see `dorylus_hpc.graph.readers.read_npz`.
    seed : int
        For drawing a split where there is none.

    Returns
    -------
    GraphData

    Raises
    ------
    InputError
        If it is neither, or wrong in itself.
    """
    text = os.fspath(source)
    if text in datasets.DATASETS:
        if split:
            raise InputError(f"split {split} was asked for, but the data set {text!r} has one split only")
        return datasets.load(text)
    path = Path(text)
    if path.suffix == ".npz":
        return read_npz(path, split=split, seed=seed)
    accepted = f"accepted are an .npz file or a data set name ({', '.join(datasets.DATASETS)})"
    if path.exists():
        what = "a folder" if path.is_dir() else "not an .npz file"
        raise InputError(f"{text}: is {what}; {accepted}")
    raise InputError(f"{text}: no such file or data set; {accepted}")


def prepare_folder(
    graph: GraphData,
    folder: str | os.PathLike[str],
    *,
    parts: int,
    partitioner: str = "metis",
    undirected: bool = False,
    self_loops: str = "drop",
    duplicates: str = "merge",
    order: str = "auto",
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> Manifest:
    """Clean, partition and write a graph.

    Parameters
    ----------
    graph : GraphData
    folder : path
        A prepared graph that is there already is replaced.
    parts : int
    partitioner, seed
        See `dorylus_hpc.graph.partitioners.partition`.
    undirected, self_loops, duplicates
        See `dorylus_hpc.graph.clean.clean`.
    order : {'auto', 'none'}
        Order of the vertices inside a part.
    report : callable
        Receives every line of the account: what was changed, and how good the cut is.

    Returns
    -------
    Manifest

    Raises
    ------
    InputError
    """
    graph = clean(graph, undirected=undirected, self_loops=self_loops, duplicates=duplicates)
    for line in _describe(graph):
        report(line)
    owner = partition(graph, parts, partitioner, seed)
    options = {
        "partitioner": partitioner,
        "parts": parts,
        "order": order,
        "seed": seed,
        "undirected": undirected,
        "self_loops": self_loops,
        "duplicates": duplicates,
    }
    manifest = write_folder(graph, owner, folder, parts=parts, order=order, options=options)
    for line in _describe_cut(manifest):
        report(line)
    return manifest


def _describe(graph: GraphData) -> list[str]:
    """The graph as it goes into the parts, and what was changed."""
    labelled = int(np.count_nonzero(is_labelled(graph.labels)))
    sets = ", ".join(
        f"{np.count_nonzero(graph.split == value)} {name}" for value, name in SPLIT_NAMES.items()
    )
    weighted = ", weighted" if graph.weights is not None else ""
    kind = "sparse" if graph.sparse_features else "dense"
    several = ", several a vertex" if graph.labels.ndim == 2 else ""
    components, _ = connected_components(graph.edges.matrix(graph.n), directed=False)
    isolated = int(np.count_nonzero(~_touched(graph)))
    return [
        f"{graph.name}: {graph.n} vertices, {graph.n_edges} arcs{weighted}, "
        f"{graph.n_features} {kind} features ({graph.features.dtype}), {graph.n_classes} classes{several}",
        f"labelled: {labelled} vertices; {sets}",
        f"connected components: {components}, {isolated} of them isolated vertices",
        *(f"note: {note}" for note in graph.notes),
    ]


def _touched(graph: GraphData) -> np.ndarray:
    """Vertices with an edge, in any direction."""
    touched = np.diff(graph.indptr) > 0
    touched[graph.indices] = True
    return touched


def _describe_cut(manifest: Manifest) -> list[str]:
    """Parts, balance and cut."""
    entries = manifest.parts
    columns = {
        "vertices": [entry.own for entry in entries],
        "in-edges": [entry.in_edges for entry in entries],
        "ghosts": [entry.in_ghosts for entry in entries],
        "train": [entry.train for entry in entries],
    }
    lines = [f"{'part':>6}" + "".join(f"{name:>14}" for name in columns)]
    if len(entries) <= TABLE_ROWS:
        rows = [(str(k), [values[k] for values in columns.values()]) for k in range(len(entries))]
    else:
        rows = [(f.__name__, [f(values) for values in columns.values()]) for f in (min, max)]
    lines += [f"{name:>6}" + "".join(f"{value:>14}" for value in values) for name, values in rows]
    share = manifest.edge_cut / max(1, manifest.edges)
    lines.append(
        f"balance (largest part / mean): {_balance(columns['vertices']):.3f} by vertices, "
        f"{_balance(columns['in-edges']):.3f} by edges"
    )
    lines.append(
        f"edge cut: {manifest.edge_cut} of {manifest.edges} arcs ({share:.1%}); {manifest.ghosts} ghosts"
    )
    lines.append(
        "directed: both directions are stored" if manifest.directed else "symmetric: one direction is stored"
    )
    return lines


def _balance(values: Sequence[int]) -> float:
    """Largest over mean; one where there is nothing."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
