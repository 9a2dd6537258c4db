"""A training run over all ranks.

    rank 0 .. G-1   graph servers      bind to weights -> forward, backward -> push gradients
    rank G .. N-1   parameter servers  grant weights; add gradients -> update -> publish

With no parameter servers every graph server also owns a share of the weights and does both. Rank 0 is
always a graph server; it records the run (`recorder`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dorylus_hpc.comm.failure import together
from dorylus_hpc.comm.mailbox import Mailbox
from dorylus_hpc.comm.reduce import gather_arrays
from dorylus_hpc.comm.roles import Placement, Roles, assign_roles
from dorylus_hpc.comm.waiting import wait_all
from dorylus_hpc.config import TrainConfig
from dorylus_hpc.engine.checkpoint import CHECKPOINT
from dorylus_hpc.engine.edge_placement import describe_place, estimate_edges
from dorylus_hpc.engine.executor import Executor
from dorylus_hpc.engine.graph_server import GraphServer
from dorylus_hpc.engine.lambda_backend import LambdaBackend, check_backend, offload_of
from dorylus_hpc.engine.loading import count_members, load_graph
from dorylus_hpc.engine.model import build_optimizer, build_program, load_settings, resolve_intervals
from dorylus_hpc.engine.own_model import OwnModel, keep_copy
from dorylus_hpc.engine.recorder import TRACE, Account, Recorder
from dorylus_hpc.engine.registrar import Registrar
from dorylus_hpc.engine.resources import peak_rss_bytes, threads_per_rank
from dorylus_hpc.engine.runner import DENSE, Experiment, Runner
from dorylus_hpc.engine.schedule import Mode
from dorylus_hpc.engine.tuning import Tuning
from dorylus_hpc.engine.weights import Service, Verdict, WeightServer, WeightShard
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.class_weights import read_class_weights
from dorylus_hpc.graph.feature_norm import ColumnStatistics
from dorylus_hpc.graph.manifest import Manifest, read_manifest
from dorylus_hpc.nn.objective import Objective, balanced_weights
from dorylus_hpc.nn.params import FlatLayout, plan_layout
from dorylus_hpc.nn.program import Program
from dorylus_hpc.report.classification import LabelForm
from dorylus_hpc.report.cost import Bill, Fleet, Prices
from dorylus_hpc.report.metrics import MetricsFile
from dorylus_hpc.report.progress import Progress
from dorylus_hpc.report.trace import Tracer, TraceRecord
from dorylus_hpc.serverless.autotuner import FIRST, Autotuner

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


def train(
    comm: Intracomm,
    config: TrainConfig,
    folder: Path,
    *,
    progress: bool = False,
    own: OwnModel | None = None,
) -> TrainingResult:
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
    own
        The model of ``config.model_file``, the same on every rank.

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
    wait_all([comm.Ibarrier()])  # the timelines of all ranks begin together
    started = time.perf_counter()
    tracer = Tracer(started, config.trace_events)
    roles = together(comm, lambda: assign_roles(comm, config.servers))
    manifest = together(comm, lambda: _checked_manifest(folder, roles))
    together(comm, lambda: _check_goal(config, manifest, folder))

    def build() -> Program:
        return build_program(
            config,
            n_features=manifest.features,
            n_classes=manifest.classes,
            sparse_features=manifest.feature_kind == "csr",
            own=own,
        )

    program = together(comm, build)
    config = replace(
        config,
        metric=together(comm, lambda: _metric(config, manifest, folder)),
        servers=roles.n_parameter,
        intervals=resolve_intervals(config, manifest, program),
        threads=config.threads or threads_per_rank(comm),
    )
    placement = Placement(len(manifest.parts), roles.n_graph)
    estimate = estimate_edges(config, manifest, placement) if config.may_place_edges else None
    place = describe_place(config, estimate, given=config.place != "auto")
    if config.place == "auto":
        config = replace(config, place=estimate.place if estimate else "ae=server")
        place["ae"] = config.place.removeprefix("ae=")
    if config.place == "ae=lambda":
        program = together(comm, build)
    layout = plan_layout(program.params, len(roles.weight_ranks))
    plan = Plan(roles, config, manifest, program, layout, placement, own, place)
    servers = cast("Intracomm", comm.Split(color=int(roles.is_graph_server), key=roles.rank))
    prices = together(comm, lambda: check_backend(config))
    with ExitStack() as stack:
        backend = together(comm, lambda: _lambda_backend(plan, servers, stack, prices))
        executor = stack.enter_context(_executor(plan, backend))
        hosted = together(
            comm, lambda: _host(servers, plan, folder, executor, tracer) if roles.is_graph_server else None
        )
        mailbox = Mailbox(comm, plan.dtype)
        service = _service(plan)
        server = _weight_server(plan, mailbox, service, tracer) if roles.owns_weights else None
        wait_all([comm.Ibarrier()])  # epochs begin everywhere at once
        account = Account(setup_seconds=time.perf_counter() - started)
        recorder = None
        if roles.rank == 0:
            bill = _bill(plan, prices, backend.architecture if backend else "x86_64")
            assert hosted is not None
            recorder = _recorder(plan, stack, bill, started, hosted.divisor, progress=progress)
        if hosted is not None:
            registrar = None if recorder is None else _registrar(plan, recorder)
            GraphServer(
                hosted.runner,
                mailbox,
                service,
                server,
                config,
                evaluates=not plan.evaluated_in_training,
                registrar=registrar,
                controller=backend.controller if backend else None,
                tuning=_tuning(plan, hosted.runner, backend, tracer) if backend else None,
                in_turn=plan.evaluated_in_turn,
            ).run(account)
            if backend is not None:
                account.serverless = backend.finish()
        elif server is not None:
            _serve(plan, mailbox, server)
        if server is not None:
            account.task_seconds["WU"] = server.update_seconds
            account.weight_versions = server.most_versions
        account.peak_rss_bytes = peak_rss_bytes()
        mailbox.close()
        if hosted is not None:
            hosted.runner.close()
        accounts = comm.gather(account)
        records = _gather_records(comm, tracer.record())
        outcome = None
        if recorder is not None and accounts is not None and records is not None and hosted is not None:
            outcome = recorder.finish(roles, accounts, hosted.columns, records)
        summary, weights = comm.bcast(outcome)
    servers.Free()  # not after a fault: the others may never come to do it too
    return TrainingResult(Path(config.run_dir), summary, weights)


def _gather_records(comm: Intracomm, record: TraceRecord) -> list[TraceRecord] | None:
    """Collect what all ranks saw on rank 0. Collective."""
    small = comm.gather((record.lanes, record.dropped, record.notes))
    arrays = gather_arrays(comm, [record.tasks, record.sent, record.arrived])
    if small is None or arrays is None:
        return None
    return [
        TraceRecord(found[0], found[1], found[2], lanes, dropped, notes)
        for found, (lanes, dropped, notes) in zip(arrays, small, strict=True)
    ]


def _checked_manifest(folder: Path, roles: Roles) -> Manifest:
    manifest = read_manifest(folder)
    check_parts(manifest, roles, folder)
    if manifest.train == 0:
        raise InputError(f"{folder}: no labelled training vertex: prepare the graph with a training set")
    return manifest


def _check_goal(config: TrainConfig, manifest: Manifest, folder: Path) -> None:
    for name in ("target_accuracy", "patience"):
        if getattr(config, name) and not manifest.validation:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} needs labelled validation vertices, and {folder} has none")


def _metric(config: TrainConfig, manifest: Manifest, folder: Path) -> str:
    """Return what the run goes by."""
    if config.metric == "auc" and (manifest.several_classes or manifest.classes != 2):
        what = "vertices of several classes" if manifest.several_classes else f"{manifest.classes} classes"
        raise InputError(f"--metric auc is for two classes, one a vertex, and {folder} has {what}")
    return _form(manifest).default_metric if config.metric == "auto" else config.metric


def _form(manifest: Manifest) -> LabelForm:
    members = (manifest.train, manifest.validation, manifest.test)
    return LabelForm(manifest.classes, manifest.several_classes, members)


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


_BUSY = 4  # intervals a thread from which threads wait for each other little


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
    own
        The model, if it is the user's own.
    place
        Where attention over edges is computed, for the summary.
    """

    roles: Roles
    config: TrainConfig
    manifest: Manifest
    program: Program
    layout: FlatLayout
    placement: Placement
    own: OwnModel | None = None
    place: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype:
        """Of all arithmetic."""
        return np.dtype(self.config.dtype)

    @property
    def evaluated_in_training(self) -> bool:
        """Whether the training forward is a valid evaluation of the weights before an epoch's update."""
        return not self.program.differs_in_evaluation and self.config.mode != "async"

    @property
    def evaluated_in_turn(self) -> bool:
        """Whether evaluations and epochs take turns, on the same row tensors.

        That saves memory, and takes no time where all cores work all the time: on one graph server that waits
        for nobody, with intervals for all. No group of an epoch may begin without weights, which evaluations
        hold back.
        """
        config, roles = self.config, self.roles
        many = config.intervals * len(self.manifest.parts) >= _BUSY * config.threads
        alone = roles.n_graph == 1 and len(roles.weight_ranks) == 1 and config.backend == "cpu"
        first = next((group for group in self.program.training_groups() if group[0].run is not None), ())
        bound = any(
            stage.weighted or (stage.kind in ("AV", "dAV") and not stage.weightless) for stage in first
        )
        return (
            config.save_memory == "on"
            and config.mode != "async"
            and not config.dense_delay
            and not self.evaluated_in_training
            and alone
            and many
            and bound
        )

    def describe(self) -> str:
        """Return the run in words."""
        config, roles = self.config, self.roles
        name = self.own.told if self.own else config.model
        return (
            f"{name}: {config.layers} layers ({', '.join(self.program.orders)}), {config.dtype}\n"
            f"{roles.n_graph} graph servers with {config.threads} threads each, {roles.n_parameter} "
            f"parameter servers; {len(self.manifest.parts)} parts, "
            f"{config.intervals} intervals a part, mode {config.mode}"
            + (f", staleness {config.staleness}" if config.mode == "async" else "")
            + (f"\nmetric {config.metric}" if config.metric != "accuracy" else "")
            + self._describe_place()
        )

    def _describe_place(self) -> str:
        if not self.config.may_place_edges:
            return ""
        where = "on the workers" if self.config.place == "ae=lambda" else "on the graph servers"
        place = self.place
        return (
            f"\nattention over edges {where}: to workers and back {place['bytes_per_epoch'] / 1e6:.3g} MB an "
            f"epoch, {place['transfer_seconds']:.3g} s, against {place['server_seconds']:.3g} s on the server"
        )


@dataclass(frozen=True, eq=False)
class Hosted:
    """What a graph server holds.

    Attributes
    ----------
    runner
        Of its parts.
    columns
        Feature statistics, if features were standardised.
    divisor
        What the sum of the loss over the whole graph is divided by.
    """

    runner: Runner
    columns: ColumnStatistics | None
    divisor: float


def _bill(plan: Plan, prices: Prices, architecture: str) -> Bill:
    kind = plan.config.instance_type or None
    return Bill(prices, Fleet(plan.roles.n_graph, plan.roles.n_parameter, kind, kind, architecture))


def _lambda_backend(plan: Plan, servers: Intracomm, stack: ExitStack, prices: Prices) -> LambdaBackend | None:
    """Open the workers in Lambda. Collective over graph servers."""
    config = plan.config
    if config.backend == "cpu" or not plan.roles.is_graph_server:
        return None
    intervals = len(plan.placement.hosted(plan.roles.rank)) * config.intervals
    workers = config.workers or min(intervals, FIRST, config.max_workers)
    return stack.enter_context(LambdaBackend(servers, config, workers=workers, prices=prices))


def _tuning(plan: Plan, runner: Runner, backend: LambdaBackend, tracer: Tracer) -> Tuning | None:
    config = plan.config
    if config.workers:
        return None
    intervals = sum(len(cut) for cut in runner.intervals.values())
    lead = config.staleness if config.mode == "async" else 0
    tuner = Autotuner(intervals, config.max_workers, lead=lead)
    return Tuning(runner.loop, runner.training, backend.controller, tuner, tracer)


def _executor(plan: Plan, backend: LambdaBackend | None) -> Executor:
    config = plan.config
    if backend is not None:
        return Executor(config.threads, remotes={DENSE: (backend.controller, backend.workers)})
    parts = len(plan.placement.hosted(plan.roles.rank)) if plan.roles.is_graph_server else 1
    # Workers far away are as many as could ever have a task.
    far = {DENSE: 2 * parts * (config.intervals + 1)} if config.dense_delay else {}
    return Executor(config.threads, far)


def _host(servers: Intracomm, plan: Plan, folder: Path, executor: Executor, tracer: Tracer) -> Hosted:
    config = plan.config
    settings = load_settings(config, plan.own, plan.program)
    graph = load_graph(servers, folder, plan.manifest, settings, executor=executor, tracer=tracer)
    members, known = count_members(servers, graph, plan.manifest.classes)
    _check_members(config, members, folder)
    objective = _objective(servers, plan, members[0], known[0], folder)
    divisor = objective.divisor(members[0], known[0])
    runner = Runner(
        graph,
        plan.program,
        plan.layout,
        executor,
        dtype=plan.dtype,
        mode=cast("Mode", config.mode),
        intervals=config.intervals,
        n_labelled=divisor,
        objective=objective,
        scores=config.metric == "auc",
        evaluates_beside=not (plan.evaluated_in_training or plan.evaluated_in_turn),
        keeps_logits=False,
        offload=offload_of(config),
        experiment=Experiment(config.dense_delay, config.straggler),
        saves_memory=config.save_memory == "on",
        tracer=tracer,
    )
    runner.counts_training = plan.evaluated_in_training
    return Hosted(runner, graph.columns, divisor)


def _check_members(config: TrainConfig, members: np.ndarray, folder: Path) -> None:
    """Refuse a goal by the AUC of vertices that are all of one class."""
    _, validation, _ = members
    if config.metric == "auc" and validation.any() and not validation.all():
        raise InputError(
            f"--metric auc needs both classes in the validation set, and that of {folder} has none of class "
            f"{int(validation.argmin())}"
        )


def _objective(
    servers: Intracomm, plan: Plan, members: np.ndarray, known: np.ndarray, folder: Path
) -> Objective:
    """Return the loss, with the weights of the classes. Collective over graph servers.

    Parameters
    ----------
    members, known : ndarray, (n_classes,), int
        Training vertices of each class, and those of which it is known whether they have it.
    """
    manifest, wanted, weights = plan.manifest, plan.config.class_weights, None
    if wanted == "balanced":
        weights = balanced_weights(members, known, several=manifest.several_classes)
    elif wanted != "none":
        read = together(
            servers, lambda: None if plan.roles.rank else read_class_weights(wanted, manifest.classes)
        )
        weights = servers.bcast(read)
    objective = Objective(manifest.several_classes, weights)
    if not objective.divisor(members, known):
        raise InputError(
            f"--class-weights {wanted}: the weights of all classes in the training set of {folder} are 0"
        )
    return objective


def _service(plan: Plan) -> Service:
    config, roles = plan.config, plan.roles
    clients = tuple(range(roles.n_graph))

    def readers(version: int) -> tuple[int, ...]:
        if plan.evaluated_in_training:
            return (0,)  # for the best weights alone
        return clients if version % config.eval_every == 0 else ()

    def judged(version: int) -> bool:
        return bool((config.target_accuracy or config.patience) and readers(version))

    return Service(
        servers=tuple(roles.weight_ranks),
        clients=clients,
        layout=plan.layout,
        n_parts=len(plan.manifest.parts),
        n_intervals=sum(max(1, min(config.intervals, part.own)) for part in plan.manifest.parts),
        epochs=config.epochs,
        readers=readers,
        judged=judged,
    )


def _weight_server(plan: Plan, mailbox: Mailbox, service: Service, tracer: Tracer) -> WeightServer:
    owner = service.servers.index(plan.roles.rank)
    initial = plan.layout.initial(plan.config.seed, plan.dtype)
    shard = WeightShard(plan.layout, owner, build_optimizer(plan.config), initial)
    return WeightServer(mailbox, service, shard, tracer)


def _serve(plan: Plan, mailbox: Mailbox, server: WeightServer) -> None:
    """Do what a parameter server does: its whole life."""
    config = plan.config
    asynchronous = config.mode == "async"
    server.begin(exact=not asynchronous, at_once=asynchronous and config.weight_update == "interval")
    mailbox.listen(server.handle, lambda: server.finished)
    if server.outcome is Verdict.SWITCH and server.epochs < config.epochs:
        server.begin(exact=True, at_once=False)
        mailbox.listen(server.handle, lambda: server.finished)


def _registrar(plan: Plan, recorder: Recorder) -> Registrar:
    return Registrar(
        recorder,
        len(plan.manifest.parts),
        _form(plan.manifest),
        from_training=plan.evaluated_in_training,
        eval_every=plan.config.eval_every,
    )


def _recorder(
    plan: Plan, stack: ExitStack, bill: Bill, began: float, divisor: float, *, progress: bool
) -> Recorder:
    if progress:
        print(plan.describe(), flush=True)
    for name in ("summary.json", CHECKPOINT, TRACE):  # they stand for a finished run
        (Path(plan.config.run_dir) / name).unlink(missing_ok=True)
    if plan.own is not None:
        keep_copy(plan.own, Path(plan.config.run_dir))
    metrics = stack.enter_context(MetricsFile(Path(plan.config.run_dir) / "metrics.jsonl"))
    shown = stack.enter_context(Progress(plan.config.epochs, shown=progress))
    digest = plan.own.sha256 if plan.own else ""
    return Recorder(
        plan.config,
        plan.manifest,
        plan.layout,
        metrics,
        shown,
        bill,
        began,
        divisor=divisor,
        model_sha256=digest,
        place=plan.place,
    )
