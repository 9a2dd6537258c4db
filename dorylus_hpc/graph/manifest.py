"""The manifest of a prepared folder: totals that must add up again, and how the folder was made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, cast, get_type_hints

from dorylus_hpc.errors import InputError

VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class PartEntry:
    """One part in the manifest: its file and what must be found in it.

    `sha256` is that of the whole file. The others let the structure be checked and used while features are
    still read: of the bytes outside `feature_bytes`, in the order of the file, and of those inside.
    `feature_bytes` are pairs of (start, stop), one after the other, in the order in which they are read.
    Folders prepared before these keys were known have none of them: then the whole file is checked first.
    """

    file: str
    sha256: str
    own: int
    in_edges: int
    out_edges: int
    in_ghosts: int
    out_ghosts: int
    labelled: int
    train: int
    validation: int
    test: int
    structure_sha256: str = ""
    features_sha256: str = ""
    feature_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What a prepared folder holds.

    Attributes
    ----------
    version : int
        Of the format.
    name : str
    vertices, edges, features, classes : int
        Totals; `edges` counts arcs.
    feature_kind : str
        'dense' or 'csr'.
    feature_dtype : str
        'float32' or 'float64'.
    directed, weighted, has_loops : bool
    labelled, train, validation, test : int
        Numbers of vertices.
    parts : tuple of PartEntry
    ghosts : int
        Ghosts of the in-edges, summed over the parts.
    edge_cut : int
        Arcs whose ends are in different parts.
    options : dict
        How the folder was made: partitioner, order, seed, ...
    id_kind : str
        'gid' (no ids were given), 'int64' or 'str'.
    label_kind : str
        'one' class a vertex, or 'several'. Folders prepared before this key was known have one.
    """

    version: int
    name: str
    vertices: int
    edges: int
    features: int
    classes: int
    feature_kind: str
    feature_dtype: str
    directed: bool
    weighted: bool
    has_loops: bool
    labelled: int
    train: int
    validation: int
    test: int
    parts: tuple[PartEntry, ...]
    ghosts: int
    edge_cut: int
    options: dict[str, Any]
    id_kind: str
    label_kind: str = "one"

    @property
    def several_classes(self) -> bool:
        """Whether a vertex may have several classes."""
        return self.label_kind == "several"


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of a prepared folder; no part is opened.

    Parameters
    ----------
    folder : path

    Returns
    -------
    Manifest

    Raises
    ------
    InputError
        If the folder or its manifest is missing, of another version, damaged, or if its totals do not
        add up or a part file is missing.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        raise InputError(
            f"{folder}: no such folder; make it with: python -m dorylus_hpc.prepare INPUT -o {folder}"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder}: not a prepared folder, it has no {MANIFEST}; run prepare") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot read the manifest: {error}; run prepare again") from error
    manifest = _manifest(raw, path)
    for problem in _problems(manifest, folder):
        raise InputError(f"{path}: {problem}; run prepare again")
    return manifest


def _manifest(raw: Any, path: Path) -> Manifest:
    if not isinstance(raw, dict):
        raise InputError(f"{path}: not a manifest: expected an object, got {type(raw).__name__}")
    if raw.get("version") != VERSION:
        raise InputError(
            f"{path}: format version {raw.get('version')!r}, this program reads {VERSION}; run prepare again"
        )
    entries = raw.get("parts")
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: key 'parts' must be a list of at least one part, got {entries!r:.40}")
    parts = tuple(_entry(entry, f"{path}: parts[{k}]") for k, entry in enumerate(entries))
    return _typed(Manifest, {**raw, "parts": parts}, str(path))


def _entry(raw: Any, where: str) -> PartEntry:
    entry = _typed(PartEntry, _with_tuple(raw, "feature_bytes"), where)
    ends = entry.feature_bytes
    if any(type(end) is not int for end in ends) or len(ends) % 2 or list(ends) != sorted(ends):
        raise InputError(f"{where}: key 'feature_bytes' must be pairs of rising numbers, got {ends!r:.40}")
    return cast("PartEntry", entry)


def _with_tuple(raw: Any, name: str) -> Any:
    """JSON has no tuples."""
    if isinstance(raw, dict) and isinstance(raw.get(name), list):
        return {**raw, name: tuple(raw[name])}
    return raw


def _typed(cls: Callable[..., Any], raw: Any, where: str) -> Any:
    """Make a dataclass from a JSON object that has its keys and no others, each of the right type."""
    if not isinstance(raw, dict):
        raise InputError(f"{where}: expected an object, got {raw!r:.40}")
    hints = get_type_hints(cls)
    optional = {field.name: field.default is not MISSING for field in fields(cls)}  # type: ignore[arg-type]
    names = list(optional)
    if missing := [name for name in names if name not in raw and not optional[name]]:
        raise InputError(f"{where}: key {missing[0]!r} is missing; run prepare again")
    if unknown := [name for name in raw if name not in names]:
        raise InputError(f"{where}: unknown key {unknown[0]!r}; run prepare again")
    for name in raw:
        kind = getattr(hints[name], "__origin__", hints[name])
        if type(raw[name]) is not kind:
            raise InputError(f"{where}: key {name!r} must be {kind.__name__}, got {raw[name]!r:.40}")
    return cls(**raw)


def _problems(manifest: Manifest, folder: Path) -> Iterator[str]:
    """What does not add up."""
    if manifest.label_kind not in ("one", "several"):
        yield f"key 'label_kind' must be one or several, got {manifest.label_kind!r:.40}"
    sums = {"own": manifest.vertices, "in_edges": manifest.edges, "out_edges": manifest.edges}
    sums |= {"in_ghosts": manifest.ghosts}
    sums |= {name: getattr(manifest, name) for name in ("labelled", "train", "validation", "test")}
    for name, total in sums.items():
        if (found := sum(getattr(entry, name) for entry in manifest.parts)) != total:
            yield f"the parts' {name!r} add up to {found}, the total is {total}"
    for entry in manifest.parts:
        if Path(entry.file).name != entry.file or not (folder / entry.file).is_file():
            yield f"part file {entry.file!r} is missing"
