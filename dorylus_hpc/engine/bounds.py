"""How fast a simulated cluster can be at best, whatever order its tasks are run in.

Two things take time however well a schedule does: a resource must do all its work, and a task must wait
for what it needs. With fixed task times both can be computed without running anything:

    busiest resource   work of a resource of a server / its workers
    critical path      the longest chain of tasks, each of which needs the one before

What a task needs depends on the mode, and on nothing else: `critical_path` follows exactly those waits that
a mode prescribes, and leaves out workers, and the installation of rows beside readers. In `pipe` nothing
else makes a task wait, so with workers for all, and messages that take no time, the path is the time of the
run, not only a bound.

Epochs overlap, so the bound of a run is not that of an epoch times their number. In `pipe` servers overlap a
little: one starts an epoch before others have ended the last, up to the first group that uses weights. In
`async`, in counts from 1, epoch 1 is exact and over everywhere before epoch 2 starts anywhere. From then on

    a unit starts epoch e once it has ended e-1 itself, and all units anywhere have ended e-1-S;
    its gathers read rows of epoch e-1-S or later: what was there, by the line above, before it started

so no later chain need pass through a gather, and one that passes to another unit goes down S + 1 epochs for
the tasks of one. A chain that stays with a unit gets them all. With message times of zero that leaves ::

    critical path of E epochs = critical path of the exact one + (E - 1) * longest chain of one unit

for every S: with fixed task times S can't shorten the path. What it does is to fill the resources, towards
E * busiest resource, to even out task times that are not fixed, and to hide messages: news of progress and
new weights are waited for from epoch e-1-S only. The walk below follows all chains, and needs no formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dorylus_hpc.engine.schedule import Group, Reads, Round
from dorylus_hpc.engine.simulator import Cluster

SecondsOf = Callable[[int, Group], float]


@dataclass(frozen=True)
class Bound:
    """Seconds that an epoch takes at least.

    Attributes
    ----------
    busiest_resource
        The largest work of a resource of a server, divided by its workers.
    critical_path
        The longest chain of tasks that wait for each other.
    """

    busiest_resource: float
    critical_path: float

    @property
    def exact(self) -> float:
        """The larger of the two: no epoch in an exact mode, run by itself, is faster."""
        return max(self.busiest_resource, self.critical_path)


def epoch_bound(cluster: Cluster, seconds_of: SecondsOf, *, message_seconds: float = 0.0) -> Bound:
    """Bound the first epoch of a cluster, which is exact in every mode, run by itself.

    Parameters
    ----------
    cluster
        Its epochs after the first are left out; evaluations of the first one's weights count.
    seconds_of
        Time of a task of (server, group).
    message_seconds
        The least time of a message.

    Notes
    -----
    E epochs may take less than E times this, in exact modes too: a server starts an epoch before others
    have ended the last one, up to the first group that uses weights or reads ghosts. In ``async`` the later
    epochs may read older rows, with S = 0 those of the epoch before. See `run_bound`.
    """
    first = tuple(one for one in cluster.rounds if one.epoch == cluster.rounds[0].epoch)
    alone = replace(cluster, rounds=first)
    return Bound(
        busiest_resource(alone, seconds_of),
        critical_path(replace(alone, mode="pipe"), seconds_of, message_seconds=message_seconds),
    )


def run_bound(cluster: Cluster, seconds_of: SecondsOf, *, message_seconds: float = 0.0) -> float:
    """Seconds that all rounds of a cluster take at least, in its mode.

    Parameters are those of `epoch_bound`. The bound holds for tasks and messages that take longer, too.
    """
    path = critical_path(cluster, seconds_of, message_seconds=message_seconds)
    if cluster.mode != "async" or len(cluster.rounds) < 2:
        return max(busiest_resource(cluster, seconds_of), path)
    # No work of the later epochs is done during the first.
    first = epoch_bound(cluster, seconds_of, message_seconds=message_seconds).exact
    return max(first + busiest_resource(replace(cluster, rounds=cluster.rounds[1:]), seconds_of), path)


def nopipe_seconds(cluster: Cluster, seconds_of: SecondsOf) -> float:
    """Time of all rounds where every group waits for the slowest server to end the one before.

    It is the time of ``nopipe`` where all servers take equally long for each group, and messages no time.
    Where they do not, ``nopipe`` may be faster: a server waits for others only for ghosts and weights.
    """
    return sum(
        max(
            -(-_count(cluster, server, group) // cluster.workers[group.resource]) * seconds_of(server, group)
            for server in range(len(cluster.topologies))
        )
        for one in cluster.rounds
        for group in cluster.groups[one.kind]
    )


def busiest_resource(cluster: Cluster, seconds_of: SecondsOf) -> float:
    """The largest work of a resource of a server in all rounds, divided by its workers."""
    work = {(server, name): 0.0 for server in range(len(cluster.topologies)) for name in cluster.workers}
    for one in cluster.rounds:
        for group in cluster.groups[one.kind]:
            for server in range(len(cluster.topologies)):
                count = _count(cluster, server, group)
                work[server, group.resource] += count * seconds_of(server, group)
    return max(seconds / cluster.workers[name] for (_, name), seconds in work.items())


def critical_path(cluster: Cluster, seconds_of: SecondsOf, *, message_seconds: float = 0.0) -> float:
    """The longest chain of tasks and messages of all rounds, each of which needs the one before.

    Parameters are those of `epoch_bound`. These are the waits of ``pipe`` and ``async``; ``nopipe``, which
    waits for more, is bounded as ``pipe``. With ``update="interval"`` no wait for weights is counted but
    that for the answer: which units' updates make up a version is not fixed.
    """
    return _Walk(cluster, seconds_of, message_seconds).run()


def _count(cluster: Cluster, server: int, group: Group) -> int:
    """Tasks of a group on a server."""
    return sum(unit.interval >= 0 or group.covers_ghosts for unit in cluster.topologies[server].units)


class _Walk:
    """Passes over the rounds in order and keeps the earliest time of everything that later tasks wait for."""

    def __init__(self, cluster: Cluster, seconds_of: SecondsOf, message: float) -> None:
        self.cluster, self.seconds_of, self.message = cluster, seconds_of, message
        self.exact = cluster.mode != "async"
        self.servers = range(len(cluster.topologies))
        self.reads = [Reads(topology, cluster.tables).pick for topology in cluster.topologies]
        self.clock = [[0.0] * len(topology.units) for topology in cluster.topologies]
        self.bound: list[dict[int, tuple[int, float]]] = [{} for _ in self.servers]  # unit -> epoch, time
        self.done: list[list[float]] = []  # by round and server: all units have done it
        self.published = [0.0]  # by version of the weights
        self.rows: list[list[list[list[float]]]] = []  # by round, server, table and entry: they are there

    def run(self) -> float:
        for number, one in enumerate(self.cluster.rounds):
            self.rows.append([self._no_rows(server) for server in self.servers])
            self._start(number)
            for group in self.cluster.groups[one.kind]:
                for server in self.servers:
                    self._run_group(number, one, server, group)
            self.done.append([max(clock) for clock in self.clock])
            if one.trains and self.cluster.update == "epoch":
                self._publish()
        return max(self.done[-1])

    def _no_rows(self, server: int) -> list[list[float]]:
        topology = self.cluster.topologies[server]
        return [
            [0.0] * (len(topology.units) + topology.blocks[table.direction]) for table in self.cluster.tables
        ]

    def _start(self, number: int) -> None:
        """Hold units back until enough rounds are done: in exact modes here, in ``async`` everywhere."""
        lead = self.cluster.staleness if not self.exact and number > 1 else 0
        behind = number - lead - 1
        if behind < 0:
            return
        for server in self.servers:
            start = self.done[behind][server]
            if not self.exact:
                peers = (self.done[behind][peer] for peer in self.cluster.topologies[server].peers)
                start = max(start, max(peers, default=0.0) + self.message)
            self.clock[server] = [max(seconds, start) for seconds in self.clock[server]]

    def _run_group(self, number: int, one: Round, server: int, group: Group) -> None:
        seconds, clock = self.seconds_of(server, group), self.clock[server]
        for unit, what in enumerate(self.cluster.topologies[server].units):
            if what.interval < 0 and not group.covers_ghosts:
                continue
            start = clock[unit]
            if group.weights:
                start = max(start, self._weights(one, server, unit))
            if group.reads is not None:
                rows = self.rows[self._oldest(number)][server][group.reads]
                start = max(start, *self.reads[server][group.reads][unit](rows))  # type: ignore[arg-type]
            clock[unit] = start + seconds
            if group.writes is not None:
                self._write(number, server, group.writes, unit, clock[unit])

    def _oldest(self, number: int) -> int:
        """The oldest round whose rows will do: units write them before those of later rounds."""
        return number if self.exact else max(0, number - 1 - self.cluster.staleness)

    def _write(self, number: int, server: int, table: int, unit: int, now: float) -> None:
        self.rows[number][server][table][unit] = now
        one = self.cluster.tables[table]
        if one.exchanged:
            for other, block in self.cluster.routes[server][one.direction][unit]:
                entry = len(self.cluster.topologies[other].units) + block
                self.rows[number][other][table][entry] = now + self.message

    def _weights(self, one: Round, server: int, unit: int) -> float:
        """When the unit has weights, asked for at the first task of an epoch that uses them.

        Only the answer counts as a message: a server may answer together with those who asked before.
        """
        epoch, time = self.bound[server].get(unit, (0, 0.0))
        if epoch != one.epoch:
            version = one.epoch - 1 - (0 if self.exact else self.cluster.staleness)
            known = self.published[version] if 0 < version < len(self.published) else 0.0
            time = max(self.clock[server][unit], known) + self.message
            self.bound[server][unit] = one.epoch, time
        return time

    def _publish(self) -> None:
        """The next version: gradients of all intervals go to a weight server, which tells the others."""
        ends: list[Sequence[float]] = [
            [clock[unit] for unit, what in enumerate(topology.units) if what.interval >= 0]
            for clock, topology in zip(self.clock, self.cluster.topologies, strict=True)
        ]
        self.published.append(max(max(end, default=0.0) for end in ends) + 2 * self.message)
