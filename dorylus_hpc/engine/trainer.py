"""A training run over all ranks, mode `nopipe`.

    rank 0 .. G-1   graph servers      pull weights -> forward, backward -> push partial gradients
    rank G .. N-1   parameter servers  offer weights -> collect partials -> update -> publish

Rank 0 is a graph server; it keeps the history, the best weights, and writes the results.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dorylus_hpc.comm.failure import together
from dorylus_hpc.comm.launch import library_name
from dorylus_hpc.comm.reduce import gather_by_part
from dorylus_hpc.comm.roles import Placement, Roles, assign_roles
from dorylus_hpc.comm.weights import WeightClient, WeightServer
from dorylus_hpc.config import TrainConfig
from dorylus_hpc.engine.checkpoint import CHECKPOINT, SavedModel, save_model, weights_sha256
from dorylus_hpc.engine.executor import Executor
from dorylus_hpc.engine.loading import LoadedGraph, load_graph
from dorylus_hpc.engine.model import build_optimizer, build_program, load_settings, resolve_intervals
from dorylus_hpc.engine.runner import Runner
from dorylus_hpc.engine.resources import peak_rss_bytes, threads_per_rank
from dorylus_hpc.engine.weights import WeightService, WeightShard
from dorylus_hpc.errors import InputError
from dorylus_hpc.files import atomic_path
from dorylus_hpc.graph.feature_norm import ColumnStatistics
from dorylus_hpc.graph.manifest import Manifest, read_manifest
from dorylus_hpc.nn.params import FlatLayout, plan_layout
from dorylus_hpc.nn.program import Program
from dorylus_hpc.report.metrics import Accuracies, History, MetricsFile, accuracies
from dorylus_hpc.report.progress import Progress
from dorylus_hpc.report.summary import build_summary, write_json

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class DivergedError(ArithmeticError):
    """The training loss is no longer a finite number."""


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """What a run leaves in memory.

    Attributes
    ----------
    run_dir
        Where everything was written.
    summary
        Contents of `summary.json`.
    weights
        ``best`` (by validation) and ``last``: tensors by name.
    """

    run_dir: Path
    summary: dict[str, Any]
    weights: dict[str, dict[str, np.ndarray]]


@dataclass
class _Account:
    """What a rank reports of itself at the end."""

    setup_seconds: float
    epoch_seconds: list[float] = field(default_factory=list)
    task_seconds: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    peak_rss_bytes: int = 0
    threads: int = 1


def check_parts(manifest: Manifest, roles: Roles, folder: Path) -> None:
    """Refuse more graph servers than parts.

    Raises
    ------
    InputError
        With the commands that would work.
    """
    parts = len(manifest.parts)
    if roles.n_graph > parts:
        servers = f" --servers {roles.n_parameter}" if roles.n_parameter else ""
        raise InputError(
            f"{folder} has {parts} part{'s' if parts > 1 else ''}, too few for {roles.n_graph} graph servers: "
            f"run mpirun -n {parts + roles.n_parameter} python -m dorylus_hpc.train --data {folder}{servers}, or "
            f"prepare the graph again with --parts {roles.n_graph}"
        )


def train(comm: Intracomm, config: TrainConfig, folder: Path, *, progress: bool = False) -> TrainingResult:
    """Train a model on a prepared folder. Collective.

    Parameters
    ----------
    comm
        All ranks of the job: graph servers first, then ``config.servers`` parameter servers.
    config
        What to train; ``run_dir`` must be set and exist.
    folder
        A prepared folder, readable on every rank.
    progress
        Rank 0 shows progress and prints what it found.

    Returns
    -------
    TrainingResult
        The same on every rank.

    Raises
    ------
    AgreedError
        Wrong input, on all ranks.
    DivergedError
        On rank 0 alone: the loss became NaN or infinite.
    """
    started = time.perf_counter()
    roles = together(comm, lambda: assign_roles(comm, config.servers))
    manifest = together(comm, lambda: _checked_manifest(folder, roles))
    program = build_program(
        config,
        n_features=manifest.features,
        n_classes=manifest.classes,
        sparse_features=manifest.feature_kind == "csr",
    )
    config = replace(
        config,
        servers=roles.n_parameter,
        intervals=resolve_intervals(config, manifest, program),
        threads=config.threads or threads_per_rank(comm),
    )
    run = _Run(roles, config, manifest, program, started, progress=progress and comm.Get_rank() == 0)
    servers = comm.Split(color=int(roles.is_graph_server), key=roles.rank)
    try:
        if roles.is_graph_server:
            with Executor(config.threads) as executor:
                run.serve_graph(servers, folder, executor)
        else:
            run.serve_weights()
        return run.finish()
    finally:
        servers.Free()


def _checked_manifest(folder: Path, roles: Roles) -> Manifest:
    manifest = read_manifest(folder)
    check_parts(manifest, roles, folder)
    if manifest.train == 0:
        raise InputError(f"{folder}: no labelled training vertex: prepare the graph with a training set")
    return manifest


class _Run:
    """The state of one run on one rank."""

    def __init__(
        self,
        roles: Roles,
        config: TrainConfig,
        manifest: Manifest,
        program: Program,
        started: float,
        *,
        progress: bool,
    ) -> None:
        self.roles, self.config, self.manifest, self.program = roles, config, manifest, program
        self.run_dir = Path(config.run_dir)
        self.layout: FlatLayout = plan_layout(program.params, len(roles.weight_ranks))
        self.dtype = np.dtype(config.dtype)
        self.placement = Placement(len(manifest.parts), roles.n_graph)
        self.progress = progress
        self.started = started
        self.history = History()
        self.weights: dict[str, np.ndarray] = {}
        self.best: Accuracies | None = None
        self.columns: ColumnStatistics | None = None
        self.service = self._weight_service() if roles.owns_weights else None
        self.account = _Account(setup_seconds=0.0, threads=config.threads)

    def _weight_service(self) -> WeightService:
        transport = WeightServer(self.roles, self.layout, self.placement, self.dtype)
        initial = self.layout.initial(self.config.seed, self.dtype)
        shard = WeightShard(self.layout, transport.owner, build_optimizer(self.config), initial)
        return WeightService(shard, transport)

    # A parameter server's life.

    def serve_weights(self) -> None:
        self.account.setup_seconds = time.perf_counter() - self.started
        assert self.service is not None
        self.service.serve(self.config.epochs)

    # A graph server's life.

    def serve_graph(self, comm: Intracomm, folder: Path, executor: Executor) -> None:
        graph = load_graph(comm, folder, self.manifest, load_settings(self.config))
        self.columns = graph.columns
        runner = self._runner(graph, executor)
        client = WeightClient(self.roles, self.layout, self.dtype)
        leads = comm.Get_rank() == 0
        self.account.setup_seconds = time.perf_counter() - self.started
        if self.progress:
            self._announce()
        with ExitStack() as stack:
            progress = stack.enter_context(Progress(self.config.epochs, shown=self.progress))
            metrics = stack.enter_context(MetricsFile(self.run_dir / "metrics.jsonl")) if leads else None
            for epoch in range(1, self.config.epochs + 1):
                self._epoch(comm, runner, client, epoch, metrics, progress)
        self._last_evaluation(comm, runner, client)
        self.account.task_seconds = runner.seconds
        self.account.sent_bytes = runner.sent_bytes

    def _runner(self, graph: LoadedGraph, executor: Executor) -> Runner:
        return Runner(
            graph,
            self.program,
            self.layout,
            executor,
            dtype=self.dtype,
            intervals=self.config.intervals,
            n_labelled=self.manifest.train,
        )

    def _epoch(
        self,
        comm: Intracomm,
        runner: Runner,
        client: WeightClient,
        epoch: int,
        metrics: MetricsFile | None,
        progress: Progress,
    ) -> None:
        start = time.perf_counter()
        if self.service is not None:
            self.service.begin_epoch(epoch)
        flat, waited = client.pull(epoch - 1)
        weights = self.layout.views(flat)
        losses = runner.train(weights, epoch)
        for part, gradient in runner.gradients.items():
            client.push(epoch, part, gradient)
        correct = self._correct(runner, weights, epoch)
        if self.service is not None:
            self.service.end_epoch(epoch)
        runner.seconds["wait"] += waited + client.flush()
        table = gather_by_part(comm, self.placement, np.column_stack([losses, correct]))
        self.account.epoch_seconds.append(time.perf_counter() - start)
        if table is not None and metrics is not None:
            self._record(epoch, np.add.reduce(table, axis=0), flat, metrics, progress)

    def _correct(self, runner: Runner, weights: dict[str, np.ndarray], epoch: int) -> np.ndarray:
        """Count right answers of the weights before this epoch's update; NaN if it is not their turn."""
        if self.program.differs_in_evaluation:
            if (epoch - 1) % self.config.eval_every:
                return np.full((len(runner.gradients), 3), np.nan)
            runner.evaluate(weights)
        return runner.correct()

    def _record(
        self, epoch: int, totals: np.ndarray, flat: np.ndarray, metrics: MetricsFile, progress: Progress
    ) -> None:
        """Note an epoch, on rank 0."""
        loss = float(totals[0]) / self.manifest.train
        if not math.isfinite(loss):
            raise DivergedError(
                f"the training loss is {loss} in epoch {epoch}: try a lower --lr than {self.config.lr}"
            )
        seen = self._evaluated(epoch - 1, totals[1:], flat)
        self.history.losses.append(loss)
        self.history.seconds.append(self.account.epoch_seconds[-1])
        metrics.write(
            epoch=epoch,
            loss=loss,
            train_accuracy=seen and seen.train,
            val_accuracy=seen and seen.val,
            test_accuracy=seen and seen.test,
            seconds=self.account.epoch_seconds[-1],
        )
        progress.epoch(epoch, loss=loss, val=seen and seen.val, test=seen and seen.test)

    def _evaluated(self, version: int, correct: np.ndarray, flat: np.ndarray) -> Accuracies | None:
        """Note an evaluation and keep its weights if they are the best, on rank 0."""
        if np.isnan(correct).any():
            return None
        members = (self.manifest.train, self.manifest.validation, self.manifest.test)
        seen = accuracies(version, correct, members)
        if self.history.is_best(seen):
            self.best = seen
            self.weights["best"] = flat.copy()
        self.history.evaluations.append(seen)
        return seen

    def _last_evaluation(self, comm: Intracomm, runner: Runner, client: WeightClient) -> None:
        """Evaluate the weights after the last update."""
        epochs = self.config.epochs
        if self.service is not None:
            self.service.begin_last(epochs)
        flat, _ = client.pull(epochs)
        runner.evaluate(self.layout.views(flat))
        if self.service is not None:
            self.service.end_last()
        table = gather_by_part(comm, self.placement, runner.correct())
        if table is not None:
            self._evaluated(epochs, np.add.reduce(table, axis=0), flat)
            self.weights["last"] = flat.copy()

    def _announce(self) -> None:
        manifest, config, roles = self.manifest, self.config, self.roles
        print(
            f"{manifest.name}: {manifest.vertices} vertices, {manifest.edges} edges, {manifest.features} features, "
            f"{manifest.classes} classes, {len(manifest.parts)} parts\n"
            f"{config.model}: {config.layers} layers, order {', '.join(self.program.orders)}\n"
            f"{roles.n_graph} graph servers with {config.threads} threads each, {roles.n_parameter} parameter "
            f"servers, {config.intervals} intervals a part",
            flush=True,
        )

    # The end.

    def finish(self) -> TrainingResult:
        """Collect every rank's account, write the results on rank 0, and tell all ranks. Collective."""
        if self.service is not None:
            self.account.task_seconds["WU"] += self.service.update_seconds
        self.account.peak_rss_bytes = peak_rss_bytes()
        accounts = self.roles.comm.gather(self.account)
        outcome: tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]] | None = None
        if accounts is not None:
            weights = {which: self.layout.views(flat) for which, flat in self.weights.items()}
            outcome = self._write(accounts, weights), weights
        summary, weights = self.roles.comm.bcast(outcome)
        return TrainingResult(self.run_dir, summary, weights)

    def _write(self, accounts: list[_Account], weights: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
        assert self.best is not None
        slowest = [
            max(times) for times in zip(*(a.epoch_seconds for a in accounts if a.epoch_seconds), strict=True)
        ]
        self.history.seconds = slowest
        manifest, roles = self.manifest, self.roles
        summary = build_summary(
            graph={
                "name": manifest.name,
                "vertices": manifest.vertices,
                "edges": manifest.edges,
                "features": manifest.features,
                "classes": manifest.classes,
                "parts": len(manifest.parts),
                "ghosts": manifest.ghosts,
                "edge_cut": manifest.edge_cut,
            },
            config=asdict(self.config),
            ranks={
                "graph_servers": roles.n_graph,
                "parameter_servers": roles.n_parameter,
                "threads": self.config.threads,
                "mpi": library_name(),
            },
            history=self.history,
            best=self.best,
            setup_seconds=max(account.setup_seconds for account in accounts),
            task_seconds=sum((account.task_seconds for account in accounts), Counter()),
            peak_rss_bytes=[account.peak_rss_bytes for account in accounts],
            ghost_bytes_per_epoch=sum(account.sent_bytes for account in accounts) // self.config.epochs,
            weights_sha256=weights_sha256(weights["last"]),
        )
        model = SavedModel(
            weights=weights,
            epochs={"best": self.best.epoch, "last": self.config.epochs},
            config=asdict(self.config),
            features=manifest.features,
            classes=manifest.classes,
            columns=self.columns,
        )
        save_model(self.run_dir / CHECKPOINT, model)
        with atomic_path(self.run_dir / "config.toml") as temporary:
            temporary.write_text(self.config.to_toml(), encoding="utf-8")
        write_json(self.run_dir / "summary.json", summary)
        return summary
