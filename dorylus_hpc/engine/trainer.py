"""A training run over all ranks, in an exact mode.

    rank 0 .. G-1   graph servers      pull weights -> forward, backward -> push partial gradients
    rank G .. N-1   parameter servers  offer weights -> collect partials -> update -> publish

With no parameter servers every graph server also owns a share of the weights and does both. Rank 0 is
always a graph server; it records the run (`recorder`).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dorylus_hpc.comm.failure import together
from dorylus_hpc.comm.reduce import gather_by_part
from dorylus_hpc.comm.roles import Placement, Roles, assign_roles
from dorylus_hpc.comm.weights import WeightClient, WeightServer
from dorylus_hpc.config import TrainConfig
from dorylus_hpc.engine.checkpoint import CHECKPOINT
from dorylus_hpc.engine.executor import Executor
from dorylus_hpc.engine.loading import load_graph
from dorylus_hpc.engine.model import build_optimizer, build_program, load_settings, resolve_intervals
from dorylus_hpc.engine.recorder import Account, Recorder
from dorylus_hpc.engine.resources import peak_rss_bytes, threads_per_rank
from dorylus_hpc.engine.runner import Runner
from dorylus_hpc.engine.schedule import Mode
from dorylus_hpc.engine.weights import WeightService, WeightShard
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.feature_norm import ColumnStatistics
from dorylus_hpc.graph.manifest import Manifest, read_manifest
from dorylus_hpc.nn.params import FlatLayout, plan_layout
from dorylus_hpc.nn.program import Program
from dorylus_hpc.report.metrics import MetricsFile
from dorylus_hpc.report.progress import Progress

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


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
    layout = plan_layout(program.params, len(roles.weight_ranks))
    plan = Plan(roles, config, manifest, program, layout, Placement(len(manifest.parts), roles.n_graph))
    service = _weight_service(plan) if roles.owns_weights else None
    servers = cast("Intracomm", comm.Split(color=int(roles.is_graph_server), key=roles.rank))
    with ExitStack() as stack:
        executor = stack.enter_context(Executor(config.threads))
        graph_server = together(
            comm,
            lambda: GraphServer(servers, plan, folder, executor, service) if roles.is_graph_server else None,
        )
        account = Account(setup_seconds=time.perf_counter() - started)
        recorder = _recorder(plan, stack, progress=progress) if roles.rank == 0 else None
        if graph_server is not None:
            graph_server.run(account, recorder)
        elif service is not None:
            service.serve(config.epochs)
        if service is not None:
            account.task_seconds["WU"] = service.update_seconds
        account.peak_rss_bytes = peak_rss_bytes()
        accounts = comm.gather(account)
        outcome = None
        if recorder is not None and accounts is not None and graph_server is not None:
            outcome = recorder.finish(roles, accounts, graph_server.columns)
        summary, weights = comm.bcast(outcome)
    servers.Free()  # not after a fault: the others may never come to do it too
    return TrainingResult(Path(config.run_dir), summary, weights)


def _checked_manifest(folder: Path, roles: Roles) -> Manifest:
    manifest = read_manifest(folder)
    check_parts(manifest, roles, folder)
    if manifest.train == 0:
        raise InputError(f"{folder}: no labelled training vertex: prepare the graph with a training set")
    return manifest


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
            f"{folder} has {parts} part{'s' if parts > 1 else ''}, too few for {roles.n_graph} graph "
            f"servers: run mpirun -n {parts + roles.n_parameter} python -m dorylus_hpc.train --data "
            f"{folder}{servers}, or prepare the graph again with --parts {roles.n_graph}"
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """What all ranks of a run know alike.

    Attributes
    ----------
    roles
        Ranks by role.
    config
        Resolved.
    manifest
        Of the graph.
    program
        The model's stages.
    layout
        The weights' places and owners.
    placement
        The parts' hosts.
    """

    roles: Roles
    config: TrainConfig
    manifest: Manifest
    program: Program
    layout: FlatLayout
    placement: Placement

    @property
    def dtype(self) -> np.dtype:
        """Of all arithmetic."""
        return np.dtype(self.config.dtype)

    def describe(self) -> str:
        """Return the run in words."""
        config, roles = self.config, self.roles
        return (
            f"{config.model}: {config.layers} layers ({', '.join(self.program.orders)}), {config.dtype}\n"
            f"{roles.n_graph} graph servers with {config.threads} threads each, {roles.n_parameter} "
            f"parameter servers; {len(self.manifest.parts)} parts, "
            f"{config.intervals} intervals a part, mode {config.mode}"
        )


def _weight_service(plan: Plan) -> WeightService:
    transport = WeightServer(plan.roles, plan.layout, plan.placement, plan.dtype)
    initial = plan.layout.initial(plan.config.seed, plan.dtype)
    shard = WeightShard(plan.layout, transport.owner, build_optimizer(plan.config), initial)
    return WeightService(shard, transport)


def _recorder(plan: Plan, stack: ExitStack, *, progress: bool) -> Recorder:
    if progress:
        print(plan.describe(), flush=True)
    for name in ("summary.json", CHECKPOINT):  # they stand for a finished run
        (Path(plan.config.run_dir) / name).unlink(missing_ok=True)
    metrics = stack.enter_context(MetricsFile(Path(plan.config.run_dir) / "metrics.jsonl"))
    shown = stack.enter_context(Progress(plan.config.epochs, shown=progress))
    return Recorder(plan.config, plan.manifest, plan.layout, metrics, shown)


class GraphServer:
    """A graph server's life: its parts, its epochs.

    Parameters
    ----------
    comm
        The graph servers.
    plan
        Of the run.
    folder
        The prepared folder.
    executor
        Threads to run on.
    service
        The weights this rank owns, if it owns any.

    Attributes
    ----------
    columns
        Feature statistics, if features were standardised.
    """

    def __init__(
        self, comm: Intracomm, plan: Plan, folder: Path, executor: Executor, service: WeightService | None
    ) -> None:
        graph = load_graph(comm, folder, plan.manifest, load_settings(plan.config))
        self.columns: ColumnStatistics | None = graph.columns
        self._comm, self._plan, self._service = comm, plan, service
        self._runner = Runner(
            graph,
            plan.program,
            plan.layout,
            executor,
            dtype=plan.dtype,
            mode=cast("Mode", plan.config.mode),
            intervals=plan.config.intervals,
            n_labelled=plan.manifest.train,
        )
        self._client = WeightClient(plan.roles, plan.layout, plan.dtype)

    def run(self, account: Account, recorder: Recorder | None) -> None:
        """Run all epochs and the last evaluation, and fill in the account. Collective."""
        for epoch in range(1, self._plan.config.epochs + 1):
            start = time.perf_counter()
            totals, flat = self._epoch(epoch)
            account.epoch_seconds.append(time.perf_counter() - start)
            if recorder is not None and totals is not None:
                recorder.epoch(epoch, totals, flat, account.epoch_seconds[-1])
        totals, flat = self._last_evaluation()
        if recorder is not None and totals is not None:
            recorder.last(totals, flat)
        account.task_seconds = dict(self._runner.seconds)
        account.sent_bytes = self._runner.sent_bytes
        self._runner.close()

    def _epoch(self, epoch: int) -> tuple[np.ndarray | None, np.ndarray]:
        """Run one epoch; return (loss and correct counts, on rank 0) and the weights they belong to."""
        runner, client = self._runner, self._client
        if self._service is not None:
            self._service.begin_epoch(epoch)
        flat, waited = client.pull(epoch - 1)
        weights = self._plan.layout.views(flat)
        losses = runner.train(weights, epoch)
        for part, gradient in runner.gradients.items():
            client.push(epoch, part, gradient)
        correct = self._correct(weights, epoch)
        if self._service is not None:
            self._service.end_epoch(epoch)
        runner.seconds["wait"] += waited + client.flush()
        return self._totals(np.column_stack([losses, correct])), flat

    def _correct(self, weights: dict[str, np.ndarray], epoch: int) -> np.ndarray:
        """Count right answers of the weights before this epoch's update; NaN if it is not their turn."""
        if self._plan.program.differs_in_evaluation:
            if (epoch - 1) % self._plan.config.eval_every:
                return np.full((len(self._runner.gradients), 3), np.nan)
            self._runner.evaluate(weights)
        return self._runner.correct()

    def _last_evaluation(self) -> tuple[np.ndarray | None, np.ndarray]:
        """Evaluate the weights after the last update."""
        epochs = self._plan.config.epochs
        if self._service is not None:
            self._service.begin_last(epochs)
        flat, _ = self._client.pull(epochs)
        self._runner.evaluate(self._plan.layout.views(flat))
        if self._service is not None:
            self._service.end_last()
        return self._totals(self._runner.correct()), flat

    def _totals(self, rows: np.ndarray) -> np.ndarray | None:
        """Add one row a part, in the order of parts, on rank 0."""
        table = gather_by_part(self._comm, self._plan.placement, rows)
        return None if table is None else np.add.reduce(table, axis=0)
