"""What the doors of both kinds of graph attention ask: masks, entries, the slope."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import checks
from .checks import IntArray
from .dropout_masks import GOLDEN, mask_key, mix64

ATTENTION = 0x617474656E74696F  # sets the keys of these masks apart: "attentio"

_NO_GIDS = np.empty(0, np.int64)


class Masks:
    """What selects the masks, checked, as the loops take it; without dropout they get no gids."""

    def __init__(
        self,
        p: float,
        seed: int,
        epoch: int,
        layer: int,
        source_gids: IntArray | None,
        n_sources: int,
        target_gids: IntArray | None,
        n_targets: int,
    ) -> None:
        features = mask_key(p, seed, epoch, layer)
        self.key = mix64(mix64(features.key ^ ATTENTION) + GOLDEN * (features.epoch + 1))
        self.threshold, self.scale = features.threshold, features.scale
        for name, gids, length in (
            ("source_gids", source_gids, n_sources),
            ("target_gids", target_gids, n_targets),
        ):
            if gids is not None or p > 0:
                checks.array(name, gids, "int64", (length,))
        self.source_gids = source_gids if p > 0 and source_gids is not None else _NO_GIDS
        self.target_gids = target_gids if p > 0 and target_gids is not None else _NO_GIDS


def check_entries(indptr: IntArray, indices: IntArray, n_cols: int, what: str) -> None:
    """Refuse row starts that decrease, and entries that name no row of `what`."""
    checks.monotone(indptr)
    checks.in_range("indices", indices, n_cols, f"there are {n_cols} {what} rows")


def check_slope(slope: object, dtype: np.dtype[Any]) -> float:
    """Require a slope of the leaky rectifier."""
    number = checks.real("slope", slope, dtype)
    if number < 0:
        raise ValueError(f"slope must not be negative, got {number}")
    return number
