"""MPI tags: what a message is, and what it belongs to.

Messages of one kind between two ranks arrive in the order they were sent, so a tag is not needed to
match them; it makes sure that a rank out of step fails to match instead of reading wrong rows.
"""

from __future__ import annotations

from enum import IntEnum

_KIND_BITS, _LAYER_BITS, _EPOCH_BITS = 3, 6, 5  # 14 bits: every MPI allows tags up to 32767


class Kind(IntEnum):
    """What a message carries."""

    HALO_IN = 0
    HALO_OUT = 1
    FEATURES = 2
    GATHER = 3


def tag(kind: Kind, *, epoch: int = 0, layer: int = 0) -> int:
    """Return the tag of a message; epoch and layer wrap around."""
    return (
        kind
        | (layer % (1 << _LAYER_BITS)) << _KIND_BITS
        | (epoch % (1 << _EPOCH_BITS)) << (_KIND_BITS + _LAYER_BITS)
    )
