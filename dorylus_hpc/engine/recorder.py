"""What rank 0 keeps of a run while it goes on, and writes when it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dorylus_hpc.comm.launch import library_name
from dorylus_hpc.comm.roles import Roles
from dorylus_hpc.config import TrainConfig
from dorylus_hpc.engine.checkpoint import CHECKPOINT, SavedModel, save_model, weights_sha256
from dorylus_hpc.files import atomic_path
from dorylus_hpc.graph.feature_norm import ColumnStatistics
from dorylus_hpc.graph.manifest import Manifest
from dorylus_hpc.nn.params import FlatLayout
from dorylus_hpc.report.classification import SETS, Tally
from dorylus_hpc.report.cost import Bill, Cost, Meter
from dorylus_hpc.report.metrics import Evaluation, History, MetricsFile, evaluation
from dorylus_hpc.report.progress import Progress
from dorylus_hpc.report.summary import build_summary, write_json
from dorylus_hpc.report.trace import TraceRecord, overlap, write_trace

if TYPE_CHECKING:
    from dorylus_hpc.serverless.controller import LambdaAccount

TRACE = "trace.json"


class DivergedError(ArithmeticError):
    """The training loss is no longer a finite number."""


@dataclass
class Account:
    """What a rank reports of itself at the end.

    Attributes
    ----------
    setup_seconds
        From the start to the first epoch.
    epoch_seconds
        Of each epoch; empty on a parameter server.
    task_seconds
        By kind of task.
    sent_bytes
        Ghost rows sent for training.
    peak_rss_bytes
        The most memory the process held.
    max_lead, max_read_age
        Epochs: the most that an interval was ahead when it started, and that rows it read were behind.
    weight_versions
        The most versions of the weights that the rank kept at a time.
    serverless
        What the rank used of Lambda.
    """

    setup_seconds: float = 0.0
    epoch_seconds: list[float] = field(default_factory=list)
    task_seconds: dict[str, float] = field(default_factory=dict)
    sent_bytes: int = 0
    peak_rss_bytes: int = 0
    max_lead: int = 0
    max_read_age: int = 0
    weight_versions: int = 0
    serverless: LambdaAccount | None = None


class Recorder:
    """History, best weights and results; on rank 0 only.

    Parameters
    ----------
    config
        Of the run, resolved.
    manifest
        Of the graph.
    layout
        To tell tensors apart in a flat vector.
    metrics, progress
        Where each epoch is told.
    bill
        Prices of the run's machines and of Lambda.
    began
        When the run began, by `time.perf_counter`: setting up costs too.
    divisor
        What the sum of the loss is divided by.
    model_sha256
        Of the file of a model of the user's own.
    place
        Where attention over edges is computed, as it is to appear.

    Attributes
    ----------
    weights : dict
        Flat ``best`` and ``last`` weights seen so far.
    """

    def __init__(
        self,
        config: TrainConfig,
        manifest: Manifest,
        layout: FlatLayout,
        metrics: MetricsFile,
        progress: Progress,
        bill: Bill,
        began: float,
        *,
        divisor: float = 1.0,
        model_sha256: str = "",
        place: Mapping[str, Any] | None = None,
    ) -> None:
        self._place = place or {}
        self._model_sha256 = model_sha256
        self.weights: dict[str, np.ndarray] = {}
        self._tallies: dict[str, Tally] = {}  # of the same weights
        self._divisor = divisor
        self._config, self._manifest, self._layout = config, manifest, layout
        self._metrics, self._progress = metrics, progress
        self._history = History()
        self._meter = Meter(bill)
        self._usage: dict[int, tuple[float, int]] = {}
        self._began = began

    def epoch(
        self, number: int, total: float, tally: Tally | None, flat: np.ndarray | None, seconds: float
    ) -> None:
        """Note an epoch.

        Parameters
        ----------
        number
            From 1.
        total
            Sum of the loss.
        tally
            Answers; None if this epoch had no evaluation.
        flat : ndarray
            The weights these belong to: those before the epoch's update; None if there was no evaluation.
        seconds
            Wall time.

        Raises
        ------
        DivergedError
            The loss is NaN or infinite.
        """
        loss = total / self._divisor
        if not math.isfinite(loss):
            raise DivergedError(
                f"the training loss is {loss} in epoch {number}: try a lower --lr than {self._config.lr}"
            )
        self._history.losses.append(loss)
        seen = Evaluation(number - 1)
        if tally is not None and flat is not None:
            seen = self._evaluation(number - 1, tally, flat)
        self._metrics.write(
            epoch=number,
            loss=loss,
            **{f"{name}_accuracy": share for name, share in zip(SETS, seen.accuracy, strict=True)},
            **{f"{name}_metric": getattr(seen, name) for name in SETS},
            seconds=seconds,
            cost=self._spend().priced,
            total_cost=self._meter.total.priced,
        )
        spent = self._meter.total.priced
        told = f"{spent:.3g} {self._meter.bill.prices.currency}" if spent else None
        self._progress.epoch(number, loss=loss, val=seen.val, test=seen.test, cost=told)

    def usage(self, rank: int, gb_seconds: float, invocations: int) -> None:
        """Take what a graph server has used of Lambda so far."""
        # Never less than before: letters are rounded, and an invocation that began may not be made after all.
        seconds, count = self._usage.get(rank, (0.0, 0))
        self._usage[rank] = (max(seconds, gb_seconds), max(count, invocations))

    def _spend(self) -> Cost:
        """Add the cost since the last call."""
        return self._meter.advance(
            time.perf_counter() - self._began,
            gb_seconds=sum(used for used, _ in self._usage.values()),
            requests=sum(count for _, count in self._usage.values()),
        )

    @property
    def history(self) -> History:
        """What is known so far."""
        return self._history

    def last(self, epochs: int, tally: Tally, flat: np.ndarray) -> None:
        """Note the evaluation of the final weights, after so many epochs."""
        self._evaluation(epochs, tally, flat)
        self.weights["last"], self._tallies["last"] = flat.copy(), tally

    def _evaluation(self, version: int, tally: Tally, flat: np.ndarray) -> Evaluation:
        """Note an evaluation, and keep its weights if they are the best so far."""
        seen = evaluation(version, tally, self._config.metric)
        if self._history.is_best(seen):
            self.weights["best"], self._tallies["best"] = flat.copy(), tally
        self._history.evaluations.append(seen)
        return seen

    def _final_cost(self, accounts: Sequence[Account]) -> dict[str, Any]:
        for rank, account in enumerate(accounts):
            if account.serverless is not None:
                used = account.serverless
                self.usage(rank, used.gb_seconds, used.invocations - used.throttles)
        self._spend()
        return self._meter.bill.summary(self._meter.total)

    def finish(
        self,
        roles: Roles,
        accounts: Sequence[Account],
        columns: ColumnStatistics | None,
        records: Sequence[TraceRecord],
    ) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        """Write checkpoint, configuration, timeline and summary.

        Parameters
        ----------
        roles
            Of all ranks.
        accounts
            Of all ranks, by rank.
        columns
            Feature statistics, if features were standardised.
        records
            The timelines of all ranks.

        Returns
        -------
        summary, weights
            As written; weights by ``best`` and ``last``, then by name.
        """
        config, manifest, run_dir = self._config, self._manifest, Path(self._config.run_dir)
        weights = {which: self._layout.views(flat) for which, flat in self.weights.items()}
        epochs = len(self._history.losses)
        times = [account.epoch_seconds[:epochs] for account in accounts if account.epoch_seconds]
        # An epoch lasts from the end of the one before on the last rank to its own end on the last rank.
        ends = np.max([np.cumsum(each) for each in times], axis=0)
        self._history.seconds = np.diff(ends, prepend=0.0).tolist()
        best = self._history.best
        summary = build_summary(
            graph=_describe_graph(manifest),
            config=asdict(config),
            ranks={
                "graph_servers": roles.n_graph,
                "parameter_servers": roles.n_parameter,
                "threads": config.threads,
                "mpi": library_name(),
            },
            history=self._history,
            best=best,
            metric=config.metric,
            report={
                "best_validation": self._tallies["best"].report(),
                "last": self._tallies["last"].report(),
            },
            setup_seconds=max(account.setup_seconds for account in accounts),
            task_seconds=_sum_by_kind([account.task_seconds for account in accounts]),
            peak_rss_bytes=[account.peak_rss_bytes for account in accounts],
            ghost_bytes_per_epoch=sum(account.sent_bytes for account in accounts) // epochs,
            staleness={
                "bound": config.staleness if config.mode == "async" else 0,
                "max_lead": max(account.max_lead for account in accounts),
                "max_read_age": max(account.max_read_age for account in accounts),
            },
            weight_versions=max(account.weight_versions for account in accounts),
            overlap=overlap(records),
            serverless=_add_accounts(
                {
                    f"{roles.name(rank)} {rank}": one.serverless
                    for rank, one in enumerate(accounts)
                    if one.serverless
                }
            ),
            cost=self._final_cost(accounts),
            weights_sha256=weights_sha256(weights["last"]),
            place=self._place,
        )
        model = SavedModel(
            weights=weights,
            epochs={"best": best.epoch, "last": epochs},
            config=asdict(config),
            features=manifest.features,
            classes=manifest.classes,
            several=manifest.several_classes,
            columns=columns,
            model_sha256=self._model_sha256,
        )
        save_model(run_dir / CHECKPOINT, model)
        with atomic_path(run_dir / "config.toml") as temporary:
            temporary.write_text(config.to_toml(), encoding="utf-8")
        if config.trace_events:
            names = [f"{roles.name(rank)} {rank}" for rank in range(len(records))]
            write_trace(run_dir / TRACE, records, names)
        write_json(run_dir / "summary.json", summary)
        return summary, weights


def _add_accounts(accounts: Mapping[str, LambdaAccount]) -> dict[str, Any]:
    """Add what the ranks used; the reasons of those that ended invocations are listed."""
    total: dict[str, Any] = {}
    for rank, account in accounts.items():
        for name, value in asdict(account).items():
            if isinstance(value, dict):
                kept = total.setdefault(name, {})
                for key, one in value.items():
                    kept[key] = kept.get(key, 0.0) + one
            elif isinstance(value, str):
                total.setdefault(name, []).extend([f"{rank}: {value}"] if value else [])
            else:
                total[name] = total.get(name, 0) + value
    return total


def _describe_graph(manifest: Manifest) -> dict[str, Any]:
    names = ("name", "vertices", "edges", "features", "classes", "ghosts", "edge_cut")
    return {name: getattr(manifest, name) for name in names} | {"parts": len(manifest.parts)}


def _sum_by_kind(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    kinds = {kind for table in tables for kind in table}
    return {kind: sum(table.get(kind, 0.0) for table in tables) for kind in kinds}
