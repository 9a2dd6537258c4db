"""Who is trained on, validated on, tested on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dorylus_hpc.graph.checks import first, integers, refuse
from dorylus_hpc.graph.data import NO_SPLIT, SPLIT_NAMES, TEST, TRAIN, VALIDATION, is_labelled

ROW_VALUES = {0: TRAIN, 1: VALIDATION, 2: TEST, 255: NO_SPLIT}  # of a `splits` array


def from_sets(sets: Mapping[int, tuple[Any, str]], n: int) -> tuple[np.ndarray, list[str]]:
    """A split from index sets or masks.

    Parameters
    ----------
    sets : mapping of split value to (indices or boolean mask, where)
    n : int
        Number of vertices.

    Returns
    -------
    split : ndarray of uint8, shape (n,)
    notes : list of str

    Raises
    ------
    InputError
        For an index out of range, a mask of another length, or a vertex in two sets.
    """
    split = np.zeros(n, np.uint8)
    notes = []
    for value, (given, where) in sets.items():
        members, repeated = _members(given, n, where)
        if repeated:
            notes.append(f"{where}: {repeated} repeated entries counted once")
        if (bad := first(split[members] != NO_SPLIT)) is not None:
            vertex = members[bad]
            refuse(
                where,
                f"vertex {vertex} is in this set and in {sets[split[vertex]][1]}; the sets must not overlap",
            )
        split[members] = value
    return split, notes


def _members(given: Any, n: int, where: str) -> tuple[np.ndarray, int]:
    """The vertices of a set, ascending, and how many entries were repetitions."""
    array = np.asarray(given)
    if array.dtype.kind == "b":
        if array.shape != (n,):
            refuse(where, f"is a mask of shape {array.shape}, expected ({n},)")
        return np.flatnonzero(array), 0
    array = integers(array, where)
    if (bad := first((array < 0) | (array >= n))) is not None:
        refuse(where, f"position {bad}: vertex {array[bad]} is not in 0..{n - 1}")
    members = np.unique(array)
    return members, len(array) - len(members)


def from_row(splits: Any, row: int, n: int, where: str) -> np.ndarray:
    """A split from one row of an array of splits (0 train, 1 validation, 2 test, 255 none)."""
    array = np.asarray(splits)
    if array.ndim != 2 or array.shape[1] != n or array.dtype.kind not in "iu":
        refuse(where, f"is {array.dtype} of shape {array.shape}, expected integers of shape (splits, {n})")
    if not 0 <= row < len(array):
        refuse(where, f"split {row} was asked for, the file has splits 0..{len(array) - 1}")
    chosen = array[row]
    if (bad := first(~np.isin(chosen, list(ROW_VALUES)))) is not None:
        refuse(where, f"split {row}, vertex {bad}: {chosen[bad]} is not 0, 1, 2 or 255")
    split = np.zeros(n, np.uint8)
    for found, value in ROW_VALUES.items():
        split[chosen == found] = value
    return split


def draw(labels: np.ndarray, seed: int) -> tuple[np.ndarray, str]:
    """A random split of the labelled vertices, 60/20/20 %, and the note that says so."""
    if seed < 0:
        refuse("seed", f"must not be negative, got {seed}")
    order = np.random.default_rng(seed).permutation(np.flatnonzero(is_labelled(labels)))
    ends = (max(1, round(0.6 * len(order))), round(0.8 * len(order)))
    split = np.zeros(len(labels), np.uint8)
    sets = dict(zip(SPLIT_NAMES, np.split(order, ends), strict=True))
    for value, members in sets.items():
        split[members] = value
    counts = ", ".join(f"{len(members)} {SPLIT_NAMES[value]}" for value, members in sets.items())
    return split, f"no split was given: drawn 60/20/20 from the labelled vertices with seed {seed} ({counts})"


def labelled_only(split: np.ndarray, labels: np.ndarray, where: str) -> tuple[np.ndarray, list[str]]:
    """Take unlabelled vertices out of all sets, say how many, and insist on a training vertex."""
    outside = (split != NO_SPLIT) & ~is_labelled(labels)
    notes = [
        f"{dropped} unlabelled vertices dropped from the {name} set"
        for value, name in SPLIT_NAMES.items()
        if (dropped := int(np.count_nonzero(split[outside] == value)))
    ]
    split = np.where(outside, NO_SPLIT, split).astype(np.uint8)
    if not (split == TRAIN).any():
        why = "all training vertices are unlabelled" if notes else "the training set is empty"
        refuse(where, f"no training vertex: {why}")
    return split, notes
