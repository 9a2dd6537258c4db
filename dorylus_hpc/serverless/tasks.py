"""A dense task of an interval, as the controller takes it from the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lambda_pkg import ops
from lambda_pkg.ops import Op, OutputSpec


@dataclass(frozen=True, eq=False)
class DenseTask:
    """What a worker, or this server's own cores, are to compute.

    Attributes
    ----------
    kind
        Tasks of a kind take about as long as each other: ``AV2+dAV2``.
    priority
        The lowest goes first.
    program
        Ops.
    inputs
        By name, in the order in which they travel.
    rows
        Inputs whose rows are those of the interval.
    keys
        By input: what identifies its value in this run, where a worker may keep it for other tasks.
    outputs
        By name, in the order in which they come back.
    buffers
        Where they go, by name; apart from the inputs.
    chunk
        Rows that travel and are computed at a time; 0: all. Part of the arithmetic.
    finish
        Called once, on any thread, when the results are in the buffers: with the times at which
        the work began and ended, and the name of the lane that did it.
    """

    kind: str
    priority: tuple[int, ...]
    program: Sequence[Op]
    inputs: Mapping[str, np.ndarray]
    rows: frozenset[str]
    keys: Mapping[str, str]
    outputs: Mapping[str, OutputSpec]
    buffers: Mapping[str, np.ndarray]
    chunk: int
    finish: Callable[[float, float, str], None]

    @property
    def n_rows(self) -> int:
        """Rows of the interval."""
        return len(self.inputs[next(iter(self.rows))])

    def compute(self) -> None:
        """Do the work here, with the arithmetic of the workers."""
        ops.run(
            self.program, self.inputs, self.outputs, rows=self.rows, chunk=self.chunk, buffers=self.buffers
        )


class Remote(Protocol):
    """Where dense tasks go."""

    def submit(self, task: DenseTask, ended: Callable[[BaseException | None], None]) -> None:
        """Have a task done; `ended` is called once, on any thread, after its `finish`."""
