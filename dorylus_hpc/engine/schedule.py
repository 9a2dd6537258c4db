"""In which order an epoch's groups of stages run. Pure: no MPI, no threads, no clock.

`nopipe`, the baseline of the paper: a group's tasks are all issued at once, and all must have ended
before the next group begins. The order and the tasks are data; the runner executes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dorylus_hpc.nn.program import Stage


@dataclass(frozen=True)
class Span:
    """Rows of a part that one task works on.

    Attributes
    ----------
    part
        The part.
    interval
        Number of the vertex interval; -1 for the rows of ghosts.
    rows
        (start, stop) in local rows.
    """

    part: int
    interval: int
    rows: tuple[int, int]


@dataclass(frozen=True)
class Exchange:
    """Bring the ghost rows of the stage's tensor, in all parts."""

    stage: Stage


@dataclass(frozen=True)
class Wave:
    """Run the stages, one after the other, on every span; spans are independent of each other."""

    stages: tuple[Stage, ...]
    spans: tuple[Span, ...]


def nopipe(
    groups: Iterable[tuple[Stage, ...]],
    intervals: Mapping[int, tuple[tuple[int, int], ...]],
    ghosts: Mapping[int, tuple[int, int]],
) -> Iterator[Exchange | Wave]:
    """Yield the steps of a pass, with a barrier after each.

    Parameters
    ----------
    groups
        Fused stages, from the program.
    intervals
        Own rows of each hosted part, cut into intervals.
    ghosts
        Rows of the in-edges' ghosts of each hosted part, for stages that cover them.
    """
    own = tuple(
        Span(part, number, rows) for part, cut in sorted(intervals.items()) for number, rows in enumerate(cut)
    )
    beside = tuple(Span(part, -1, rows) for part, rows in sorted(ghosts.items()) if rows[0] < rows[1])
    for group in groups:
        if group[0].run is None:
            yield Exchange(group[0])
        else:
            yield Wave(group, own + beside if group[0].covers_ghosts else own)
