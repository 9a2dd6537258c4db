"""A whole cluster in virtual time, around the very state machine that the runtime drives.

Task times, message delays and their order come from a seed; nothing else is random, so a seed replays
a run. Beside the schedules there is a *data plane*: which rows of which round lie where, which weights
each unit holds. It does not trust the schedules but checks them, and raises `Violation` when a task
reads what it must not, while rows are replaced under a reader, when a worker idles though a task could
run, or when the cluster stands still.

Tasks of one resource may run in Lambda, whose `Lambdas` model has what decides how many workers are worth
their money: an environment is started cold and kept, it takes so many invocations a second, and inputs and
results cross a line that all workers of a graph server share. ::

    invoke -> environment -> [cold start] -> latency -> inputs -> compute -> results -> warm, for the next
              or 429: once more a little later          one line each way a server, shared evenly

An autotuner for each graph server may change the number of its workers after every epoch.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from dorylus_hpc.engine.schedule import (
    Action,
    Bind,
    Direction,
    Group,
    Install,
    Mode,
    Progress,
    Push,
    Release,
    Round,
    Run,
    Schedule,
    Send,
    Table,
    Topology,
    idle_workers_with_work,
)
from dorylus_hpc.engine.stash import VersionStore
from dorylus_hpc.serverless.autotuner import Autotuner, Decision, Integrals


class Violation(AssertionError):
    """The schedule did what its mode forbids; the message has the seed that replays it."""


@dataclass(frozen=True)
class Lambdas:
    """A Lambda function that runs all tasks of a resource, shared by all graph servers.

    Attributes
    ----------
    resource
        Of the tasks that it runs; `Cluster.workers` says how many a server has under way at a time.
    transfers
        By name of the group: bytes of a task's inputs and of its results; none where it is not named.
    spread
        By what share, at most, these vary from task to task.
    latency
        Seconds from an invocation to its first input, and from the last result to its end, together.
    bandwidth
        Bytes a second of an environment, each way.
    line
        Bytes a second of a graph server, each way, for all its workers; None: as many as they take.
    cold_seconds
        More that the first invocation of an environment takes.
    environments
        The most there may be (the function's reserved concurrency).
    invocations_per_second
        The most that one environment takes.
    start_rate, start_burst
        New environments a second, and at once after a pause.
    retry_seconds
        From an invocation that is refused (429) to the next try.
    """

    resource: str = "dense"
    transfers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    spread: float = 0.0
    latency: float = 0.02
    bandwidth: float = 75e6
    line: float | None = None
    cold_seconds: float = 0.5
    environments: int = 1_000
    invocations_per_second: float = 10.0
    start_rate: float = 100.0
    start_burst: int = 1_000
    retry_seconds: float = 0.1


@dataclass(frozen=True)
class Cluster:
    """What is simulated.

    Attributes
    ----------
    topologies
        Of each graph server.
    routes
        By graph server, direction and unit: (server, block) of each place where its rows are ghosts.
    tables, groups, rounds, mode, staleness, workers
        As for `Schedule`.
    parameter_servers
        At least 1.
    update
        ``epoch``: a version when all gradients of an epoch are there; ``interval``: one a unit and epoch.
    stop_at
        When the run is told to stop, asynchronous modes only; None: it goes on to its end.
    resizes
        Changes of the number of workers: time, server, resource, workers.
    lambdas
        What runs the tasks of a resource, or None for workers like all others.
    """

    topologies: Sequence[Topology]
    routes: Sequence[Mapping[Direction, Sequence[Sequence[tuple[int, int]]]]]
    tables: Sequence[Table]
    groups: Mapping[str, Sequence[Group]]
    rounds: Sequence[Round]
    mode: Mode
    staleness: int = 0
    workers: Mapping[str, int] = field(default_factory=lambda: {"cpu": 1})
    parameter_servers: int = 1
    update: str = "epoch"
    stop_at: float | None = None
    resizes: Sequence[tuple[float, int, str, int]] = ()
    lambdas: Lambdas | None = None


@dataclass
class Outcome:
    """What a simulation found.

    Attributes
    ----------
    seconds
        Virtual time until all was done.
    busy
        Seconds of work by (server, resource), summed over its workers.
    max_lead, max_read_age
        Over all schedules.
    most_versions
        The most weight versions that a parameter server kept at a time.
    ends
        By server: when each round was done there.
    decisions
        By server: what its autotuner decided after each epoch.
    environments
        Environments of Lambda, each of which was started cold.
    refused
        Invocations that were refused (429) and tried again.
    """

    seconds: float = 0.0
    busy: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    max_lead: int = 0
    max_read_age: int = 0
    most_versions: int = 1
    ends: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    decisions: dict[int, list[Decision]] = field(default_factory=lambda: defaultdict(list))
    environments: int = 0
    refused: int = 0


def simulate(
    cluster: Cluster,
    *,
    seed: int = 0,
    task_seconds: Callable[[random.Random, int, Group], float] | None = None,
    message_seconds: Callable[[random.Random, int, int], float] | None = None,
    check_idle: bool = True,
    autotuner: Callable[[int], Autotuner] | None = None,
) -> Outcome:
    """Run a cluster to its end.

    Parameters
    ----------
    cluster
        What to run.
    seed
        Of all that is random.
    task_seconds
        Time of a task from (generator, server, group); None: uniform in 0.1 .. 1, one in ten 10 times that.
        In Lambda it is the time to compute; the rest comes on top.
    message_seconds
        Time of a message from (generator, sender, receiver); None: uniform in 0 .. 2.
    check_idle
        Whether to check after every event that no worker idles beside work: it takes most of the time where
        units are many, and changes nothing.
    autotuner
        Makes the autotuner of a server, which says how many ``dense`` workers it has, or workers in Lambda;
        None: there are as many as `Cluster.workers` says.

    Raises
    ------
    Violation
        Anything that the mode forbids.
    """
    times = task_seconds or _random_task, message_seconds or _random_message
    return _Simulation(cluster, seed, *times, checks_idle=check_idle, autotuner=autotuner).run()


def _random_task(rng: random.Random, server: int, group: Group) -> float:
    return rng.uniform(0.1, 1.0) * (10.0 if rng.random() < 0.1 else 1.0)


def _random_message(rng: random.Random, sender: int, receiver: int) -> float:
    return rng.uniform(0.0, 2.0)


class _Line:
    """A network line: whoever transfers gets an even share of it, and no more than it takes by itself.

    All transfers are equally fast at any time, so one number, the bytes that a transfer which never ends
    would have had so far, tells when each of them ends.
    """

    def __init__(self, simulation: _Simulation, each: float, total: float | None) -> None:
        self.simulation, self.each, self.total = simulation, each, total
        self.had, self.at, self.serial = 0.0, 0.0, 0
        self.ends: list[tuple[float, int, Callable[[], None]]] = []

    @property
    def rate(self) -> float:
        return self.each if self.total is None else min(self.each, self.total / max(1, len(self.ends)))

    def transfer(self, amount: float, then: Callable[[], None]) -> None:
        if not amount:
            then()
        elif self.total is None:
            self.simulation.later(amount / self.each, then)
        else:
            self.go_on()
            heappush(self.ends, (self.had + amount, self.serial, then))
            self.look_again()

    def go_on(self) -> None:
        self.had += self.rate * (self.simulation.now - self.at)
        self.at = self.simulation.now

    def look_again(self) -> None:
        """Wake up when the next transfer ends, if nothing changes until then."""
        self.serial += 1
        if self.ends:
            seconds = max(0.0, (self.ends[0][0] - self.had) / self.rate)
            self.simulation.later(seconds, lambda serial=self.serial: self.end(serial))  # type: ignore[misc]

    def end(self, serial: int) -> None:
        if serial != self.serial:
            return  # somebody began or ended since
        self.go_on()
        amount, ended = self.ends[0][0], []
        self.had = max(self.had, amount)  # it has had all, whatever rounding says
        while self.ends and self.ends[0][0] <= self.had:
            ended.append(heappop(self.ends)[2])
        self.look_again()
        for then in ended:
            then()


class _Function:
    """The environments of a Lambda function."""

    def __init__(self, simulation: _Simulation, model: Lambdas) -> None:
        self.simulation, self.model = simulation, model
        self.warm: list[float] = []  # when each idle environment may be invoked again
        self.count, self.refused = 0, 0
        self.startable, self.at = float(model.start_burst), 0.0
        lines = range(len(simulation.schedules))
        self.inputs = [_Line(simulation, model.bandwidth, model.line) for _ in lines]
        self.results = [_Line(simulation, model.bandwidth, model.line) for _ in lines]

    def invoke(self, server: int, group: Group, seconds: float, then: Callable[[], None]) -> None:
        """Run a task that computes for so long, and call `then` when its results are there."""
        now, model = self.simulation.now, self.model
        delay = self.claim()
        if delay is None:
            self.refused += 1
            self.simulation.later(model.retry_seconds, lambda: self.invoke(server, group, seconds, then))
            return
        size = self.simulation.rng.uniform(1 - model.spread, 1 + model.spread) if model.spread else 1.0
        bytes_in, bytes_out = (size * amount for amount in model.transfers.get(group.name, (0.0, 0.0)))
        ready_again = now + delay + 1.0 / model.invocations_per_second

        def compute() -> None:
            self.simulation.later(seconds, lambda: self.results[server].transfer(bytes_out, end))

        def end() -> None:
            heappush(self.warm, max(self.simulation.now, ready_again))
            then()

        self.simulation.later(delay + model.latency, lambda: self.inputs[server].transfer(bytes_in, compute))

    def claim(self) -> float | None:
        """Take an environment: seconds until it is started, or None where none is to be had now."""
        now, model = self.simulation.now, self.model
        if self.warm and self.warm[0] <= now:
            heappop(self.warm)
            return 0.0
        self.startable = min(model.start_burst, self.startable + (now - self.at) * model.start_rate)
        self.at = now
        if self.count >= model.environments or self.startable < 1:
            return None
        self.startable -= 1
        self.count += 1
        return model.cold_seconds


class _Simulation:
    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        task_seconds: Callable[[random.Random, int, Group], float],
        message_seconds: Callable[[random.Random, int, int], float],
        *,
        checks_idle: bool,
        autotuner: Callable[[int], Autotuner] | None,
    ) -> None:
        self.checks_idle = checks_idle
        self.cluster, self.seed, self.rng = cluster, seed, random.Random(seed)
        self.task_seconds, self.message_seconds = task_seconds, message_seconds
        self.schedules = [
            Schedule(
                cluster.mode, topology, cluster.tables, cluster.groups, cluster.rounds,
                workers=cluster.workers, staleness=cluster.staleness,
            )
            for topology in cluster.topologies
        ]  # fmt: skip
        self.now = 0.0
        self.workers = [dict(cluster.workers) for _ in self.schedules]
        self.function = None if cluster.lambdas is None else _Function(self, cluster.lambdas)
        self.tuners = (
            [] if autotuner is None else [autotuner(server) for server in range(len(self.schedules))]
        )
        self.integrals = [Integrals(cluster.workers.get("cpu", 1), 0.0) for _ in self.tuners]
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.serial = 0
        self.outcome = Outcome()
        # The data plane.
        self.rows: list[list[defaultdict[int, int]]] = [
            [defaultdict(int) for _ in cluster.tables] for _ in self.schedules
        ]  # entry -> round
        self.aside = [[dict[int, int]() for _ in cluster.tables] for _ in self.schedules]
        self.early: set[tuple[int, int, int, int]] = set()  # (server, table, entry, round)
        self.running: list[dict[int, tuple[int, int, dict[int, int]]]] = [{} for _ in self.schedules]
        self.weights: list[dict[int, int]] = [{} for _ in self.schedules]  # unit -> version
        self.home: dict[tuple[int, int], int] = {}
        self.stores = [VersionStore() for _ in range(cluster.parameter_servers)]
        self.version = 0
        self.closed: set[int] = set()
        self.refused: set[tuple[int, int]] = set()
        self.pending_binds: list[list[tuple[int, int, int]]] = [[] for _ in self.stores]
        self.published: list[set[int]] = [set() for _ in self.stores]
        self.gradients: defaultdict[int, int] = defaultdict(int)
        self.n_parts = sum(len({unit.part for unit in one.units}) for one in cluster.topologies)
        self.arrivals: dict[tuple[int, int, int], float] = {}

    def fail(self, text: str) -> Violation:
        return Violation(f"seed {self.seed}, at {self.now:.3f}: {text}")

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        self.serial += 1
        heappush(self.events, (self.now + seconds, self.serial, event))

    def run(self) -> Outcome:
        for server, tuner in enumerate(self.tuners):
            self.resize(server, self.tuned, tuner.workers)
        for seconds, *change in self.cluster.resizes:
            self.later(seconds, lambda change=change: self.resize(*change))  # type: ignore[misc]
        for server, schedule in enumerate(self.schedules):
            self.act(server, schedule.start())
        if self.cluster.stop_at is not None:
            self.later(self.cluster.stop_at, self.stop)
        while self.events:
            self.now, _, event = heappop(self.events)
            event()
        for server, schedule in enumerate(self.schedules):
            if not schedule.finished:
                raise self.fail(f"server {server} stands still after rounds {schedule.done}")
            self.outcome.max_lead = max(self.outcome.max_lead, schedule.max_lead)
            self.outcome.max_read_age = max(self.outcome.max_read_age, schedule.max_read_age)
        for number, store in enumerate(self.stores):
            if store.load or store.live != (store.newest,):
                raise self.fail(f"parameter server {number} still keeps {store.live} for {store.load}")
        self.outcome.seconds = self.now
        if self.function is not None:
            self.outcome.environments, self.outcome.refused = self.function.count, self.function.refused
        return self.outcome

    # What schedules want done.

    def act(self, server: int, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Run():
                    self.begin(server, action)
                case Send():
                    self.send(server, action)
                case Install():
                    self.install(server, action)
                case Bind():
                    self.bind(server, action)
                case Release():
                    self.release(server, action)
                case Push():
                    self.push(action)
                case Progress():
                    self.tell(server, action.done)
        if self.checks_idle:
            self.check_idle(server)
        ends, done = self.outcome.ends[server], self.schedules[server].rounds_done
        if self.tuners:
            self.note(server)
        if len(ends) < done:
            ends += [self.now] * (done - len(ends))
            if self.tuners:
                self.tune(server, done - 1)

    def begin(self, server: int, task: Run) -> None:
        group = self.group(task.round, task.group)
        if task.unit in self.running[server]:
            raise self.fail(f"unit {task.unit} of server {server} runs twice")
        free = self.workers[server][group.resource] - sum(
            self.group(number, place).resource == group.resource
            for number, place, _ in self.running[server].values()
        )
        if free < 1:
            raise self.fail(f"more tasks than workers of {group.resource} on server {server}")
        read = self.check_reads(server, task, group)
        self.check_weights(server, task, group)
        self.running[server][task.unit] = (task.round, task.group, read)
        seconds = self.task_seconds(self.rng, server, group)
        if self.function is not None and group.resource == self.function.model.resource:
            begun = self.now
            self.function.invoke(server, group, seconds, lambda: self.end_in_lambda(server, task, begun))
            return
        self.outcome.busy[server, group.resource] += seconds
        self.later(seconds, lambda: self.end(server, task))

    def end_in_lambda(self, server: int, task: Run, begun: float) -> None:
        group = self.group(task.round, task.group)
        self.outcome.busy[server, group.resource] += self.now - begun
        self.end(server, task)

    def end(self, server: int, task: Run) -> None:
        _, _, read = self.running[server].pop(task.unit)
        group = self.group(task.round, task.group)
        if self.tuners and group.resource == self.tuned:
            self.integrals[server].dense_ended += 1
        if group.reads is not None:
            rows = self.rows[server][group.reads]
            changed = [entry for entry, number in read.items() if rows[entry] != number]
            if changed:
                raise self.fail(f"rows {changed} of table {group.reads} changed under unit {task.unit}")
        if group.writes is not None:
            if self.cluster.mode == "async":
                if task.unit in self.aside[server][group.writes]:
                    raise self.fail(f"rows of unit {task.unit} set aside are overwritten")
                self.aside[server][group.writes][task.unit] = task.round + 1
            else:
                for number, place, others in self.running[server].values():
                    if self.group(number, place).reads == group.writes and task.unit in others:
                        raise self.fail(f"rows of unit {task.unit} are written while they are read")
                self.rows[server][group.writes][task.unit] = task.round + 1
        self.act(server, self.schedules[server].task_done(task.unit))

    def send(self, server: int, action: Send) -> None:
        direction = self.cluster.tables[action.table].direction
        held = self.rows if self.cluster.mode != "async" else self.aside
        number = held[server][action.table].get(action.unit, self.rows[server][action.table][action.unit])
        for other, block in self.cluster.routes[server][direction][action.unit]:
            key = (other, action.table, block)
            at = max(self.now + self.message_seconds(self.rng, server, other), self.arrivals.get(key, 0.0))
            self.arrivals[key] = at  # messages of one block do not overtake each other
            self.later(at - self.now, lambda o=other, b=block: self.arrive(o, action.table, b, number))  # type: ignore[misc]

    def arrive(self, server: int, table: int, block: int, number: int) -> None:
        entry = len(self.schedules[server].done) + block
        if self.cluster.mode == "async":
            self.aside[server][table][entry] = number  # the newest will do
        else:
            self.early.add((server, table, entry, number))
        self.act(server, self.schedules[server].block_arrived(table, block, number))

    def install(self, server: int, action: Install) -> None:
        if self.cluster.mode == "async":
            number = self.aside[server][action.table].pop(action.entry)
        else:
            self.early.remove((server, action.table, action.entry, action.round))
            number = action.round
        if number != action.round:
            raise self.fail(f"rows of round {number} installed as those of {action.round}")
        for running, place, read in self.running[server].values():
            if self.group(running, place).reads == action.table and action.entry in read:
                raise self.fail(f"entry {action.entry} of table {action.table} installed under a reader")
        self.rows[server][action.table][action.entry] = number

    def tell(self, server: int, done: int) -> None:
        for other in self.cluster.topologies[server].peers:
            self.later(
                self.message_seconds(self.rng, server, other),
                lambda o=other: self.act(o, self.schedules[o].peer_progress(server, done)),  # type: ignore[misc]
            )

    # Workers.

    def resize(self, server: int, resource: str, workers: int) -> None:
        self.workers[server][resource] = workers
        self.act(server, self.schedules[server].resize(resource, workers))

    @property
    def tuned(self) -> str:
        return "dense" if self.cluster.lambdas is None else self.cluster.lambdas.resource

    def note(self, server: int) -> None:
        """Tell the autotuner's integrals how many tasks run and wait from now on."""
        schedule, name = self.schedules[server], self.tuned
        self.integrals[server].note(
            self.now,
            cpu_running=schedule.running("cpu"),
            cpu_ready=schedule.ready("cpu"),
            dense_running=schedule.running(name),
            dense_ready=schedule.ready(name),
        )

    def tune(self, server: int, number: int) -> None:
        """A round is over: let the autotuner choose the number of workers for the next."""
        seen = self.integrals[server].take(self.now)
        if not self.cluster.rounds[number].trains:
            return
        decision = self.tuners[server].observe(seen)
        self.outcome.decisions[server].append(decision)
        if decision.workers != self.workers[server][self.tuned]:
            self.resize(server, self.tuned, decision.workers)

    # Weights.

    def bind(self, server: int, action: Bind) -> None:
        home = min(range(len(self.stores)), key=lambda number: (self.stores[number].load, number))
        self.home[server, action.unit] = home
        self.pending_binds[home].append((server, action.unit, action.version))
        self.later(self.message_seconds(self.rng, server, -1), lambda: self.grant(home))

    def stop(self) -> None:
        """Each weight server, and each graph server, hears of it in its own time."""
        for home in range(len(self.stores)):
            self.later(self.message_seconds(self.rng, -1, -1), lambda h=home: self.close(h))  # type: ignore[misc]
        for server in range(len(self.schedules)):
            self.later(
                self.message_seconds(self.rng, -1, server),
                lambda s=server: self.act(s, self.schedules[s].stop()),  # type: ignore[misc]
            )

    def close(self, home: int) -> None:
        self.closed.add(home)
        self.grant(home)

    def grant(self, home: int) -> None:
        waiting, self.pending_binds[home] = self.pending_binds[home], []
        for server, unit, least in waiting:
            if home in self.closed:
                self.refused.add((server, unit))
                self.later(
                    self.message_seconds(self.rng, -1, server),
                    lambda s=server, u=unit: self.act(s, self.schedules[s].denied(u)),  # type: ignore[misc]
                )
                continue
            version = self.stores[home].bind((server, unit), least)
            if version is None:
                self.pending_binds[home].append((server, unit, least))
                continue
            self.later(
                self.message_seconds(self.rng, -1, server),
                lambda s=server, u=unit, v=version: self.granted(s, u, v),  # type: ignore[misc]
            )

    def granted(self, server: int, unit: int, version: int) -> None:
        self.weights[server][unit] = version
        self.act(server, self.schedules[server].bound(unit))

    def release(self, server: int, action: Release) -> None:
        if action.unit not in self.weights[server]:
            raise self.fail(f"unit {action.unit} of server {server} releases weights that it has not")
        del self.weights[server][action.unit]
        self.stores[self.home.pop((server, action.unit))].release((server, action.unit))
        trains = self.cluster.rounds[action.round].trains
        if (
            self.cluster.update == "interval"
            and trains
            and self.topology(server).units[action.unit].interval >= 0
        ):
            self.later(self.message_seconds(self.rng, server, -1), self.step)

    def push(self, action: Push) -> None:
        if not self.cluster.rounds[action.round].trains:
            return
        self.later(self.message_seconds(self.rng, 0, -1), lambda: self.collect(action.round))

    def collect(self, number: int) -> None:
        self.gradients[number] += 1
        if self.gradients[number] > self.n_parts:
            raise self.fail(f"gradients of round {number} counted twice")
        if self.cluster.update == "epoch" and self.gradients[number] == self.n_parts:
            self.step()

    def step(self) -> None:
        self.version += 1
        for home in range(len(self.stores)):
            self.later(
                self.message_seconds(self.rng, -1, -1),
                lambda h=home, v=self.version: self.publish(h, v),  # type: ignore[misc]
            )

    def publish(self, home: int, version: int) -> None:
        store = self.stores[home]
        self.published[home].add(version)  # versions may come in any order; they are published in theirs
        while store.newest + 1 in self.published[home]:
            self.published[home].remove(store.newest + 1)
            store.publish(store.newest + 1)
            self.outcome.most_versions = max(self.outcome.most_versions, len(store.live))
        self.grant(home)

    # What must hold.

    def topology(self, server: int) -> Topology:
        return self.cluster.topologies[server]

    def group(self, number: int, place: int) -> Group:
        return self.cluster.groups[self.cluster.rounds[number].kind][place]

    def entries(self, server: int, table: int, unit: int) -> list[int]:
        """What a gather reads, from the topology alone."""
        topology, one = self.topology(server), self.cluster.tables[table]
        entries = [unit, *topology.reads[one.direction][unit]]
        if one.exchanged:
            entries += [len(topology.units) + block for block in topology.ghost_reads[one.direction][unit]]
        else:
            part = topology.units[unit].part
            entries += [
                n for n, other in enumerate(topology.units) if other.part == part and other.interval < 0
            ]
        return entries

    def acceptable(self, number: int, stamp: int) -> bool:
        """Whether rows of a round (counted from 1) will do for a gather of round `number` (from 0)."""
        if self.cluster.mode != "async" or number == 0:
            return stamp == number + 1
        return max(1, number - self.cluster.staleness) <= stamp <= number + 1 + self.cluster.staleness

    def check_reads(self, server: int, task: Run, group: Group) -> dict[int, int]:
        if group.reads is None:
            return {}
        rows = self.rows[server][group.reads]
        read = {entry: rows[entry] for entry in self.entries(server, group.reads, task.unit)}
        for stamp in read.values():
            if not self.acceptable(task.round, stamp):
                raise self.fail(
                    f"unit {task.unit} of server {server} reads rows of round {stamp} "
                    f"in round {task.round + 1}"
                )
        return read

    def check_weights(self, server: int, task: Run, group: Group) -> None:
        if not group.weights:
            return
        epoch = self.cluster.rounds[task.round].epoch
        version = self.weights[server].get(task.unit)
        if version is None:
            raise self.fail(f"unit {task.unit} of server {server} runs {group.name} without weights")
        slack = 0 if self.cluster.mode != "async" else self.cluster.staleness
        least = max(0, epoch - 1 - slack)
        most = epoch - 1 + slack if self.cluster.update == "epoch" else version
        if not least <= version <= most:
            raise self.fail(f"unit {task.unit} runs epoch {epoch} with weights of version {version}")

    def check_idle(self, server: int) -> None:
        """No worker may idle while a task could run, as the data plane sees it."""
        names = idle_workers_with_work(self.schedules[server])
        if names:
            raise self.fail(f"workers of {names} of server {server} idle beside ready tasks")
        if self.cluster.mode == "nopipe":
            return
        busy: defaultdict[str, int] = defaultdict(int)
        for number, place, _ in self.running[server].values():
            busy[self.group(number, place).resource] += 1
        schedule = self.schedules[server]
        slowest = min(min(schedule.done), *(schedule._peers.values() or [len(self.cluster.rounds)]))
        for unit, number in enumerate(schedule.done):
            if unit in self.running[server] or number == len(self.cluster.rounds):
                continue
            place = schedule._place[unit]
            group = (
                self.group(number, place)
                if place < len(self.cluster.groups[self.cluster.rounds[number].kind])
                else None
            )
            if group is None or busy[group.resource] >= self.workers[server][group.resource]:
                continue
            if self.could_run(server, unit, number, place, group, slowest):
                raise self.fail(f"unit {unit} of server {server} could run {group.name}, and a worker idles")

    def could_run(self, server: int, unit: int, number: int, place: int, group: Group, slowest: int) -> bool:
        asynchronous, staleness = self.cluster.mode == "async", self.cluster.staleness
        if (server, unit) in self.refused:
            return False
        if place == 0:
            if self.schedules[server].stopped and unit not in self.weights[server]:
                return False
            if asynchronous and number > slowest + (staleness if number > 1 else 0):
                return False
            if not asynchronous and min(self.schedules[server].done) < number:
                return False
        if group.weights and unit not in self.weights[server]:
            return False
        if group.writes is not None and unit in self.aside[server][group.writes]:
            return False
        if group.reads is None:
            return True
        rows, aside = self.rows[server][group.reads], self.aside[server][group.reads]
        return all(
            self.acceptable(number, rows[entry]) and not (asynchronous and entry in aside)
            for entry in self.entries(server, group.reads, unit)
        )
