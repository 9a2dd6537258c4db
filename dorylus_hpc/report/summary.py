"""`summary.json`: what a finished run was and what came out of it. Keys are stable; more may be added."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dorylus_hpc.files import atomic_path
from dorylus_hpc.report.classification import SETS
from dorylus_hpc.report.metrics import Evaluation, History

TASK_KINDS = ("GA", "AV", "SC", "AE", "dGA", "dAV", "dSC", "dAE", "WU", "RD", "LD", "eval", "wait")
_LAMBDA = (
    "invocations",
    "retries",
    "throttles",
    "duplicates_refused",
    "timeouts",
    "cold_starts",
    "gb_seconds",
    "concurrency",
)
_PLACE = ("ae", "by", "bytes_per_epoch", "transfer_seconds", "server_seconds")
_COST = (
    "graph_servers",
    "parameter_servers",
    "lambda_compute",
    "lambda_requests",
    "total",
    "currency",
    "prices_dated",
)


def build_summary(
    *,
    graph: Mapping[str, Any],
    config: Mapping[str, Any],
    ranks: Mapping[str, Any],
    history: History,
    best: Evaluation,
    metric: str,
    report: Mapping[str, Any],
    setup_seconds: float,
    task_seconds: Mapping[str, float],
    peak_rss_bytes: Sequence[int],
    ghost_bytes_per_epoch: int,
    staleness: Mapping[str, int],
    weight_versions: int,
    overlap: Mapping[str, float],
    serverless: Mapping[str, Any],
    cost: Mapping[str, Any],
    weights_sha256: str,
    place: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the summary of a run.

    Parameters
    ----------
    graph, config, ranks
        As they are to appear.
    history
        Losses, times and evaluations.
    best
        The evaluation of the best weights.
    metric
        What they are the best by.
    report
        All metrics and classes, of the best and of the last weights.
    setup_seconds
        From start to the first epoch, the slowest rank.
    task_seconds
        By kind, summed over tasks and ranks.
    peak_rss_bytes
        By rank.
    ghost_bytes_per_epoch
        Sent by all ranks for training, evaluation not counted.
    staleness
        Bound, largest start lead and largest age of rows read.
    weight_versions
        The most versions of the weights that a rank kept at a time.
    overlap
        Seconds in which graph work, dense work and messages ran, alone and at once.
    serverless
        What was used of Lambda, all graph servers together; empty on the CPU back end.
    cost
        Of the run so far, None where there is no price.
    weights_sha256
        Of the last weights.
    place
        Where attention over edges was computed, and what was estimated of it.

    Returns
    -------
    dict
        JSON values only. `lambda` counts are zero on the CPU back end.
    """
    seconds = history.seconds
    return {
        "graph": dict(graph),
        "config": dict(config),
        "ranks": dict(ranks),
        "epochs": len(history.losses),
        "epoch_seconds": {
            "median": statistics.median(seconds),
            "min": min(seconds),
            "mean": statistics.fmean(seconds),
        },
        "setup_seconds": setup_seconds,
        "loss": history.losses,
        "best_epoch": best.epoch,
        **{
            f"{name}_accuracy": {
                "best_validation": best.accuracy[place],
                "last": history.last.accuracy[place],
            }
            for place, name in enumerate(SETS)
        },
        "metric": {
            "name": metric,
            **{
                name: {"best_validation": getattr(best, name), "last": getattr(history.last, name)}
                for name in SETS
            },
        },
        "report": dict(report),
        "task_seconds": {kind: task_seconds.get(kind, 0.0) for kind in TASK_KINDS},
        "peak_rss_bytes": list(peak_rss_bytes),
        "ghost_bytes_per_epoch": ghost_bytes_per_epoch,
        "staleness": dict(staleness),
        "weight_versions": weight_versions,
        "overlap": dict(overlap),
        "weights_sha256": weights_sha256,
        "place": dict.fromkeys(_PLACE) | dict(place),
        "lambda": dict.fromkeys(_LAMBDA, 0) | dict(serverless),
        "cost": dict.fromkeys(_COST) | dict(cost),
    }


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
