"""Where attention over edges is computed on the Lambda back end, by what it costs either way.

A worker needs every row that an interval's edges read, once an interval, and the edges themselves. The
estimate weighs the time in which those bytes pass against the time of the graph server's cores: it leaves out
what the worker computes, which speaks for the worker, and takes each edge of an interval to read a row of its
own as far as the part has so many, which speaks for the server. Nothing is measured: it is the same on all
ranks, and in the next run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dorylus_hpc.comm.roles import Placement
from dorylus_hpc.config import TrainConfig
from dorylus_hpc.graph.manifest import Manifest, PartEntry

BANDWIDTH = 75e6  # bytes a second of a worker, as AWS Lambda has them
LINE = 1.25e9  # of a graph server: 10 Gbit/s
# Seconds of a core for an edge, forward and backward: a column of a head, and a head (two exponentials).
COLUMN_SECONDS, HEAD_SECONDS = 0.2e-9, 4e-9
RECORD = 4  # numbers a head that sources need of a target


@dataclass(frozen=True)
class EdgeEstimate:
    """What attention over edges takes in an epoch, of the graph server with the most of it.

    Attributes
    ----------
    bytes_per_epoch
        To its workers and back, if the edges are theirs.
    transfer_seconds
        In which these pass.
    server_seconds
        Of its cores, if they are its own.
    """

    bytes_per_epoch: int
    transfer_seconds: float
    server_seconds: float

    @property
    def place(self) -> str:
        """Where it takes less."""
        return "ae=lambda" if self.transfer_seconds < self.server_seconds else "ae=server"


def estimate_edges(config: TrainConfig, manifest: Manifest, placement: Placement) -> EdgeEstimate:
    """Estimate both placements of a GAT.

    Parameters
    ----------
    config
        With resolved intervals and threads.
    manifest, placement
        Of the graph, and of its parts.
    """
    layers = [(config.hidden * config.heads, config.heads)] * (config.layers - 1)
    layers.append((manifest.classes * config.output_heads, config.output_heads))
    itemsize = np.dtype(config.dtype).itemsize
    most = EdgeEstimate(0, 0.0, 0.0)
    for server in range(placement.n_servers):
        parts = [manifest.parts[part] for part in placement.hosted(server)]
        amount = sum(_bytes(part, config.intervals, *layer, itemsize) for part in parts for layer in layers)
        intervals = sum(max(1, min(config.intervals, part.own)) for part in parts)
        workers = config.workers or min(intervals, config.max_workers)
        edges = sum(part.in_edges + part.own for part in parts)
        each = sum(columns * COLUMN_SECONDS + heads * HEAD_SECONDS for columns, heads in layers)
        one = EdgeEstimate(
            amount,
            amount / min(LINE, workers * (config.local_bandwidth or BANDWIDTH)),
            edges * each / config.threads,
        )
        most = max(most, one, key=lambda one: (one.server_seconds, one.bytes_per_epoch))
    return most


def _bytes(part: PartEntry, intervals: int, columns: int, heads: int, itemsize: int) -> int:
    """Bytes of a layer of a part: of edges 4 each, of rows to their intervals `itemsize` a number."""
    own, numbers = part.own, 0
    count = max(1, min(intervals, own))
    for edges, ghosts, width in (
        (part.in_edges + own, part.in_ghosts, columns + heads),
        (part.out_edges + own, part.out_ghosts, columns + RECORD * heads),
    ):
        numbers += min(edges, count * (own + ghosts)) * width
    numbers += own * heads + own * (2 * columns + 3 * heads)  # scores there; sums and what is saved back
    numbers += own * (2 * columns + 4 * heads) + own * (columns + (RECORD + 1) * heads)  # dAE of targets
    numbers += own * (columns + heads)  # rows of sources
    return numbers * itemsize + 4 * (part.in_edges + part.out_edges + 2 * own) + 16 * own


def describe_place(config: TrainConfig, estimate: EdgeEstimate | None, *, given: bool) -> dict[str, Any]:
    """Return where attention over edges was computed, and why, as ``summary.json`` has it."""
    numbers = asdict(estimate) if estimate else dict.fromkeys(EdgeEstimate.__dataclass_fields__)
    by = "option" if given else "estimate" if estimate else "default"
    return {"ae": config.place.removeprefix("ae="), "by": by, **numbers}
