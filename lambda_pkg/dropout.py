"""Dropout masks that belong to vertices: the same whoever makes them.

A counter-based generator turns (seed, layer, epoch, vertex, column) into a word of 32 bits, as
`cython_kernels.dropout_masks` says it does; this is the same function on NumPy arrays, for workers.

Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011: Philox4x32-10.
"""

from __future__ import annotations

import numpy as np

_WORD = 2**64 - 1
_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)
_FACTORS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_STEPS = (0x9E3779B9, 0xBB67AE85)
_BLOCK = 8192  # counters at a time: eight arrays of them stay in a core's cache


def keep_mask(gids: np.ndarray, n_columns: int, p: float, *, seed: int, epoch: int, layer: int) -> np.ndarray:
    """Tell which values dropout keeps.

    Parameters
    ----------
    gids : ndarray, (n,), int64
        Vertex ids of the rows.
    n_columns : int
    p : float
        Probability of dropping a value, in [0, 1).
    seed, epoch, layer : int
        What else the mask depends on.

    Returns
    -------
    ndarray, (n, n_columns), bool
    """
    key = _mix(_mix(seed) + 0x9E3779B97F4A7C15 * (layer + 1))
    groups = -(-n_columns // 4)  # a counter gives the words of four columns
    words = np.empty((len(gids), groups, 4), np.uint32)
    vertices = np.ascontiguousarray(gids, np.int64).view(np.uint64)
    rows = max(1, _BLOCK // max(1, groups))
    for start in range(0, len(vertices), rows):
        part = vertices[start : start + rows]
        shape = (len(part), groups)
        counter = [
            np.broadcast_to(np.arange(groups, dtype=np.uint64), shape),
            np.full(shape, epoch, np.uint64),
            np.broadcast_to((part & _LOW)[:, None], shape),
            np.broadcast_to((part >> _HALF)[:, None], shape),
        ]
        for place, word in enumerate(_philox(counter, key & (2**32 - 1), key >> 32)):
            words[start : start + len(part), :, place] = word
    kept: np.ndarray = words.reshape(len(gids), 4 * groups)[:, :n_columns] >= np.uint64(round(p * 2**32))
    return kept


def _mix(word: int) -> int:
    """Mix 64 bits: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def _philox(counter: list[np.ndarray], key0: int, key1: int) -> list[np.ndarray]:
    """Run ten rounds; a word is the low half of a uint64."""
    left, mid_left, right, mid_right = counter
    for step in range(10):
        product_left = left * _FACTORS[0]
        product_right = right * _FACTORS[1]
        left = product_right >> _HALF
        left ^= mid_left
        left ^= np.uint64((key0 + step * _STEPS[0]) % 2**32)
        right = product_left >> _HALF
        right ^= mid_right
        right ^= np.uint64((key1 + step * _STEPS[1]) % 2**32)
        product_right &= _LOW
        product_left &= _LOW
        mid_left, mid_right = product_right, product_left
    return [left, mid_left, right, mid_right]
