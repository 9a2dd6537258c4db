"""A prepared folder: one HDF5 file a part and a manifest that must add up.

    manifest.json            totals, options, checksum of every part; written last
    part-00000.h5            gid, ids, in_degree, out_degree, labels, split
        features/            dense: values | csr: indptr, indices, data
        in_edges/            indptr, indices, weights, ghost_*, send_part, send_indptr, send_lid
        out_edges/           the same; only if the graph is not symmetric

What is absent has no dataset: weights of an unweighted graph, ids that are just gids, a second direction
of a symmetric graph. Arrays are contiguous and move in slices well under 2 GB. Labels are a class a vertex
or, where a vertex may have several, a byte a class.

A part can be read in two steps: its structure, which is all but the values of features, and then those values
in slices, as `StoredFeatures`. Each step has a checksum of its own, so what was read first may be used while
the second goes on.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.sparse as sp

from dorylus_hpc.errors import InputError
from dorylus_hpc.files import atomic_path
from dorylus_hpc.graph import csr
from dorylus_hpc.graph.data import TEST, TRAIN, VALIDATION, GraphData, is_labelled
from dorylus_hpc.graph.manifest import MANIFEST, VERSION, Manifest, PartEntry, read_manifest
from dorylus_hpc.graph.part_file import (
    StoredArray,
    StoredFeatures,
    check_sum,
    checksum_outside,
    checksums,
    reading,
)
from dorylus_hpc.graph.partition import Adjacency, Part, build_parts

__all__ = ["Manifest", "PartEntry", "read_manifest", "read_part", "read_structure", "write_folder"]

SLICE_BYTES = 512 * 1024 * 1024
FEATURE_ARRAYS = ("values", "indptr", "indices", "data")
GHOST_ARRAYS = ("ghost_gid", "ghost_part", "ghost_lid", "ghost_in_degree", "ghost_out_degree")


def write_folder(
    graph: GraphData,
    owner: np.ndarray,
    folder: str | os.PathLike[str],
    *,
    parts: int | None = None,
    order: str = "auto",
    options: dict[str, Any] | None = None,
) -> Manifest:
    """Cut a graph and write its parts and manifest.

    All parts are complete under temporary names before the first replaces an older one, and the
    manifest comes last. Part files of an older preparation are removed, other files are left alone.

    Parameters
    ----------
    graph : GraphData
    owner : ndarray of int, shape (n,)
    folder : path
        Made if missing.
    parts : int, optional
        Number of parts; by default the largest owner + 1.
    order : {'auto', 'none'}
    options : dict, optional
        Stored in the manifest as it is (values that JSON knows).

    Returns
    -------
    Manifest

    Raises
    ------
    InputError
        If the folder cannot be made or written.
    """
    folder = Path(folder)
    id_kind = _id_kind(graph.ids)
    entries: list[PartEntry] = []
    totals = {"edge_cut": 0, "loops": 0}
    symmetric = True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replaces = (folder / MANIFEST).is_file()
        with ExitStack() as files:
            for part in build_parts(graph, owner, parts=parts, order=order):
                name = f"part-{part.index:05d}.h5"
                temporary = files.enter_context(atomic_path(folder / name))
                _write_part(temporary, part, id_kind)
                entries.append(_entry(part, name, temporary))
                totals["edge_cut"] += int(np.count_nonzero(part.in_edges.indices >= part.n_own))
                totals["loops"] += int(np.count_nonzero(csr.loops(part.in_edges.edges)))
                symmetric &= part.symmetric
        manifest = Manifest(
            version=VERSION,
            name=graph.name,
            vertices=graph.n,
            edges=graph.n_edges,
            features=graph.n_features,
            classes=graph.n_classes,
            feature_kind="csr" if graph.sparse_features else "dense",
            feature_dtype=graph.features.dtype.name,
            directed=not symmetric,
            weighted=graph.weights is not None,
            has_loops=totals["loops"] > 0,
            parts=tuple(entries),
            ghosts=sum(entry.in_ghosts for entry in entries),
            edge_cut=totals["edge_cut"],
            options=dict(options or {}),
            id_kind=id_kind,
            label_kind="several" if graph.labels.ndim == 2 else "one",
            **_label_counts(graph.labels, graph.split),
        )
        with atomic_path(folder / MANIFEST) as temporary:
            temporary.write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
        if replaces:  # without a manifest, files that look like parts are somebody else's
            _remove_stale(folder, {entry.file for entry in entries})
    except OSError as error:
        raise InputError(f"{folder}: cannot write the prepared graph: {error}") from error
    return manifest


def _label_counts(labels: np.ndarray, split: np.ndarray) -> dict[str, int]:
    return {
        "labelled": int(np.count_nonzero(is_labelled(labels))),
        "train": int(np.count_nonzero(split == TRAIN)),
        "validation": int(np.count_nonzero(split == VALIDATION)),
        "test": int(np.count_nonzero(split == TEST)),
    }


def _entry(part: Part, name: str, path: Path) -> PartEntry:
    """Describe a part that was written to `path` and will be called `name`."""
    with h5py.File(path, "r", locking=False) as file:
        ranges = _byte_ranges(_stored_features(file))
    whole, structure, features = checksums(path, ranges)
    return PartEntry(
        file=name,
        sha256=whole,
        structure_sha256=structure,
        features_sha256=features,
        feature_bytes=ranges,
        **_counts(part),
    )


def _counts(part: Part) -> dict[str, int]:
    return {
        "own": part.n_own,
        "in_edges": part.in_edges.n_edges,
        "out_edges": part.out_edges.n_edges,
        "in_ghosts": part.in_edges.n_ghost,
        "out_ghosts": part.out_edges.n_ghost,
        **_label_counts(part.labels, part.split),
    }


def _id_kind(ids: np.ndarray) -> str:
    if ids.dtype.kind == "U":
        return "str"
    return "gid" if np.array_equal(ids, np.arange(len(ids))) else "int64"


def _remove_stale(folder: Path, current: set[str]) -> None:
    """Remove part files that the new manifest does not name, and leftovers of killed preparations."""
    for path in folder.iterdir():
        old_part = re.fullmatch(r"part-\d{5,}\.h5", path.name) and path.name not in current
        leftover = re.fullmatch(r"\.(?:part-\d{5,}\.h5|manifest\.json)\.(\d+)\.tmp", path.name)
        if old_part or (leftover and not _alive(int(leftover[1]))):
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


# --- one part file


def _write_part(path: Path, part: Part, id_kind: str) -> None:
    with h5py.File(path, "w", locking=False) as file:
        file.attrs.update({"version": VERSION, "index": part.index, "n_features": part.n_features})
        _write(file, "gid", part.gid)
        if id_kind == "str":
            _write(file, "ids", np.char.encode(part.ids, "utf-8"), text=True)
        elif id_kind == "int64":
            _write(file, "ids", part.ids)
        _write(file, "in_degree", part.in_degree)
        _write(file, "labels", part.labels)
        _write(file, "split", part.split)
        _write_features(file.create_group("features"), part.features)
        _write_adjacency(file.create_group("in_edges"), part.in_edges, part.symmetric)
        if not part.symmetric:
            _write(file, "out_degree", part.out_degree)
            _write_adjacency(file.create_group("out_edges"), part.out_edges, part.symmetric)


def _write_features(group: h5py.Group, features: Any) -> None:
    if not sp.issparse(features):
        _write(group, "values", features)
        return
    _write(group, "indptr", features.indptr.astype(np.int64, copy=False))
    _write(group, "indices", features.indices.astype(np.int32, copy=False))
    _write(group, "data", features.data)


def _write_adjacency(group: h5py.Group, adjacency: Adjacency, symmetric: bool) -> None:
    _write(group, "indptr", adjacency.indptr)
    _write(group, "indices", adjacency.indices)
    if adjacency.weights is not None:
        _write(group, "weights", adjacency.weights)
    for name in GHOST_ARRAYS:
        if not (symmetric and name == "ghost_out_degree"):
            _write(group, name, getattr(adjacency, name))
    lists = list(adjacency.send.values())
    ends = np.cumsum([0, *(len(lids) for lids in lists)], dtype=np.int64)
    _write(group, "send_part", np.array(list(adjacency.send), np.int32))
    _write(group, "send_indptr", ends)
    _write(group, "send_lid", np.concatenate([np.empty(0, np.int32), *lists]))


def _write(group: h5py.Group, name: str, array: np.ndarray, *, text: bool = False) -> None:
    if text:
        array = array.view(h5py.string_dtype("utf-8", array.dtype.itemsize))
    dataset = group.create_dataset(name, array.shape, array.dtype)
    for rows in _slices(array.shape, array.dtype.itemsize):
        dataset[rows] = array[rows]


def _slices(shape: tuple[int, ...], itemsize: int) -> Iterable[slice]:
    """Ranges of rows that hold at most SLICE_BYTES (or one row)."""
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * itemsize
    step = max(1, SLICE_BYTES // max(1, row_bytes))
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def _read(group: h5py.Group, name: str) -> np.ndarray:
    dataset = group[name]
    array = np.empty(dataset.shape, dataset.dtype)
    for rows in _slices(array.shape, array.dtype.itemsize):
        dataset.read_direct(array, rows, rows)
    return array


def read_part(folder: str | os.PathLike[str], manifest: Manifest, index: int, *, verify: bool = True) -> Part:
    """Read one part of a prepared folder.

    Parameters
    ----------
    folder : path
    manifest : Manifest
    index : int
        Number of the part.
    verify : bool
        Compare the file's checksum with the manifest first.

    Returns
    -------
    Part

    Raises
    ------
    InputError
        If the file is missing, unreadable, changed, or not what the manifest says.
    """
    entry = manifest.parts[index]
    path = Path(folder) / entry.file
    with reading(path):
        if verify:
            check_sum(path, checksum_outside(path, ()), entry.sha256)
        with h5py.File(path, "r", locking=False) as file:
            part = _read_part(file, manifest, index)
            part = replace(part, features=_read_features(file, part.n_own, manifest))
    _check_counts(path, part, entry)
    return part


def read_structure(
    folder: str | os.PathLike[str], manifest: Manifest, index: int, *, verify: bool = True
) -> tuple[Part, StoredFeatures]:
    """Read one part of a prepared folder, but for its features.

    Parameters
    ----------
    folder, manifest, index
        As for `read_part`.
    verify : bool
        Compare the checksum of what is read with the manifest first, and that of the features once they
        are read.

    Returns
    -------
    Part
        Its `features` are None.
    StoredFeatures
        To read them.

    Raises
    ------
    InputError
        If the file is missing, unreadable, changed, or not what the manifest says.
    """
    entry = manifest.parts[index]
    path = Path(folder) / entry.file
    with reading(path):
        if verify:
            found = checksum_outside(path, entry.feature_bytes)
            check_sum(path, found, entry.structure_sha256 or entry.sha256)
        with h5py.File(path, "r", locking=False) as file:
            part = _read_part(file, manifest, index)
            arrays = _stored_features(file)
        if entry.feature_bytes and _byte_ranges(arrays) != entry.feature_bytes:
            raise ValueError("its features are not where the manifest says")
    _check_counts(path, part, entry)
    return part, StoredFeatures(path, arrays, entry.features_sha256 if verify else "")


def _check_counts(path: Path, part: Part, entry: PartEntry) -> None:
    if any(getattr(entry, name) != count for name, count in _counts(part).items()):
        raise InputError(f"{path}: holds other counts than {MANIFEST} says; run prepare again")


def _read_part(file: h5py.File, manifest: Manifest, index: int) -> Part:
    """Read all but the features."""
    gid, labels = _read(file, "gid"), _read(file, "labels")
    if labels.shape != gid.shape + ((manifest.classes,) if manifest.several_classes else ()):
        raise ValueError(f"its labels have shape {labels.shape}")
    in_degree = _read(file, "in_degree")
    in_edges = _read_adjacency(file["in_edges"], manifest.directed)
    return Part(
        index=index,
        gid=gid,
        ids=_read_ids(file, gid, manifest.id_kind),
        in_degree=in_degree,
        out_degree=_read(file, "out_degree") if manifest.directed else in_degree,
        in_edges=in_edges,
        out_edges=_read_adjacency(file["out_edges"], True) if manifest.directed else in_edges,
        features=None,
        labels=labels,
        split=_read(file, "split"),
    )


def _read_ids(file: h5py.File, gid: np.ndarray, kind: str) -> np.ndarray:
    if kind == "gid":
        return gid
    ids = _read(file, "ids")
    return np.char.decode(ids.astype(f"S{ids.dtype.itemsize}"), "utf-8") if kind == "str" else ids


def _read_features(file: h5py.File, n_own: int, manifest: Manifest) -> Any:
    group = file["features"]
    if manifest.feature_kind == "dense":
        return _read(group, "values")
    arrays = (_read(group, "data"), _read(group, "indices"), _read(group, "indptr"))
    return csr.narrow(*arrays, (n_own, manifest.features))


def _stored_features(file: h5py.File) -> list[StoredArray]:
    """Find the arrays of the features, in the order in which they lie there."""
    arrays = []
    for name in FEATURE_ARRAYS:
        if name not in file["features"]:
            continue
        dataset = file["features"][name]
        offset = dataset.id.get_offset()
        if offset is None and dataset.size:
            raise ValueError(f"features/{name} is not contiguous")
        arrays.append(StoredArray(name, offset or 0, dataset.shape, dataset.dtype))
    return sorted(arrays, key=lambda array: array.offset)


def _byte_ranges(arrays: Iterable[StoredArray]) -> tuple[int, ...]:
    """Return first and last end of each array that is not empty, one after the other."""
    return tuple(end for one in arrays if one.n_bytes for end in (one.offset, one.offset + one.n_bytes))


def _read_adjacency(group: h5py.Group, directed: bool) -> Adjacency:
    ghosts = {name: _read(group, name) for name in GHOST_ARRAYS if directed or name != "ghost_out_degree"}
    ghosts.setdefault("ghost_out_degree", ghosts["ghost_in_degree"])
    ends, lids = _read(group, "send_indptr"), _read(group, "send_lid")
    peers = _read(group, "send_part").tolist()
    return Adjacency(
        indptr=_read(group, "indptr"),
        indices=_read(group, "indices"),
        weights=_read(group, "weights") if "weights" in group else None,
        send={peer: lids[ends[k] : ends[k + 1]] for k, peer in enumerate(peers)},
        **ghosts,
    )
