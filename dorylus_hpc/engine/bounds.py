"""How fast a simulated cluster can be at best, whatever order its tasks are run in.

Two things take time however well a schedule does: a resource must do all its work, and a task must wait
for what it needs. With fixed task times both can be computed without running anything, and both together:

    busiest resource   work of a resource of a server / its workers
    critical path      the longest chain of tasks, each of which needs the one before
    head, load, tail   a resource has nothing to do before the first of its tasks can start (head), then at
                       least all its work (load), and behind the last of its tasks others follow (tail)::

                           dense  |==head==|           |==tail==|
                           cpu             |===load===|

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

Heads and tails come again with every epoch that ends before the next begins: on each server in `pipe`,
everywhere in `async` with S = 0. With S >= 1 the work of the next epoch fills them, but for the first and the
last. So the walk of `run_bound` carries on, beside the chains, when the workers of each resource can have
done all that they had to: a round is not done before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

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
    head_load_tail
        The largest sum, over resources of a server, of the earliest start of any of its tasks, its work
        divided by its workers, and the least that must follow any of its tasks.
    """

    busiest_resource: float
    critical_path: float
    head_load_tail: float

    @property
    def exact(self) -> float:
        """The largest of the three: no epoch in an exact mode, run by itself, is faster."""
        return max(self.busiest_resource, self.critical_path, self.head_load_tail)


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
    alone = replace(cluster, rounds=first, mode="pipe")
    return Bound(
        busiest_resource(alone, seconds_of),
        critical_path(alone, seconds_of, message_seconds=message_seconds),
        _head_load_tail(alone, seconds_of, message_seconds),
    )


def run_bound(cluster: Cluster, seconds_of: SecondsOf, *, message_seconds: float = 0.0) -> float:
    """Seconds that all rounds of a cluster take at least, in its mode.

    Parameters are those of `epoch_bound`. The bound holds for tasks and messages that take longer, too.
    """
    path = _Walk(cluster, seconds_of, message_seconds, loaded=True).run()
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
    return max(_loads(cluster, seconds_of, cluster.rounds).values())


def critical_path(cluster: Cluster, seconds_of: SecondsOf, *, message_seconds: float = 0.0) -> float:
    """The longest chain of tasks and messages of all rounds, each of which needs the one before.

    Parameters are those of `epoch_bound`. These are the waits of ``pipe`` and ``async``; ``nopipe``, which
    waits for more, is bounded as ``pipe``. With ``update="interval"`` no wait for weights is counted but
    that for the answer: which units' updates make up a version is not fixed.
    """
    return _Walk(cluster, seconds_of, message_seconds).run()


def _count(cluster: Cluster, server: int, group: Group, *, ghosts: bool = True) -> int:
    """Tasks of a group on a server."""
    covers = ghosts and group.covers_ghosts
    return sum(unit.interval >= 0 or covers for unit in cluster.topologies[server].units)


def _loads(
    cluster: Cluster, seconds_of: SecondsOf, rounds: Sequence[Round], *, ghosts: bool = True
) -> dict[tuple[int, str], float]:
    """By server and resource: the work in these rounds, divided by the workers."""
    work = {(server, name): 0.0 for server in range(len(cluster.topologies)) for name in cluster.workers}
    for one in rounds:
        for group in cluster.groups[one.kind]:
            for server in range(len(cluster.topologies)):
                count = _count(cluster, server, group, ghosts=ghosts)
                work[server, group.resource] += count * seconds_of(server, group)
    return {key: seconds / cluster.workers[key[1]] for key, seconds in work.items()}


def _head_load_tail(cluster: Cluster, seconds_of: SecondsOf, message: float) -> float:
    """The bound of that name for the rounds of a cluster in an exact mode."""
    walk = _Walk(cluster, seconds_of, message)
    walk.run()
    loads = _loads(cluster, seconds_of, cluster.rounds)
    tails = _least_tails(cluster, seconds_of, message, cluster.rounds, _Readers.ANYWHERE)
    heads: dict[tuple[int, str], float] = {}
    for first in walk.first:
        heads = first | heads  # no task of a later round starts earlier
    return max(head + loads[key] + tails[key] for key, head in heads.items())


class _Readers(Enum):
    """Whose gathers count as what must follow a task, beside the tasks of its own unit."""

    ANYWHERE = auto()
    ON_THE_SERVER = auto()
    NOBODY = auto()  # in the later epochs of ``async``: older rows will do


def _least_tails(
    cluster: Cluster, seconds_of: SecondsOf, message: float, rounds: Sequence[Round], readers: _Readers
) -> dict[tuple[int, str], float]:
    """By server and resource: the least, over tasks in these rounds, of the longest chain behind one.

    In exact modes a unit starts a round when all of its server have ended the one before. Messages with
    weights are left out.
    """
    servers = range(len(cluster.topologies))
    entries = [Reads(topology, cluster.tables).entries for topology in cluster.topologies]
    after = [[0.0] * len(topology.units) for topology in cluster.topologies]
    least: dict[tuple[int, str], float] = {}
    for one in reversed(rounds):
        after = [[max(chains)] * len(chains) for chains in after]
        # By server, table and entry: the longest chain that begins with a gather of these rows.
        reading = [_no_rows(cluster, server) for server in servers]

        def behind(server: int, table: int, unit: int, reading: list[list[list[float]]] = reading) -> float:
            longest = reading[server][table][unit]
            if cluster.tables[table].exchanged:
                for other, block in cluster.routes[server][cluster.tables[table].direction][unit]:
                    if other == server or readers is _Readers.ANYWHERE:
                        entry = len(cluster.topologies[other].units) + block
                        longest = max(longest, message + reading[other][table][entry])
            return longest

        for group in reversed(cluster.groups[one.kind]):
            for server in servers:
                key, seconds = (server, group.resource), seconds_of(server, group)
                for unit, what in enumerate(cluster.topologies[server].units):
                    if what.interval < 0 and not group.covers_ghosts:
                        continue
                    tail = after[server][unit]
                    if group.writes is not None and readers is not _Readers.NOBODY:
                        tail = max(tail, behind(server, group.writes, unit))
                    least[key] = min(tail, least.get(key, tail))
                    after[server][unit] = tail + seconds
                    if group.reads is not None:
                        rows = reading[server][group.reads]
                        for entry in entries[server][group.reads][unit]:
                            rows[entry] = max(rows[entry], tail + seconds)
    return least


def _no_rows(cluster: Cluster, server: int) -> list[list[float]]:
    """A zero for each table and entry."""
    topology = cluster.topologies[server]
    return [[0.0] * (len(topology.units) + topology.blocks[table.direction]) for table in cluster.tables]


class _Walk:
    """Passes over the rounds in order and keeps the earliest time of everything that later tasks wait for.

    If it is `loaded`, a round is not done before the workers can have done the work of the intervals.
    """

    def __init__(
        self, cluster: Cluster, seconds_of: SecondsOf, message: float, *, loaded: bool = False
    ) -> None:
        self.cluster, self.seconds_of, self.message, self.loaded = cluster, seconds_of, message, loaded
        self.exact = cluster.mode != "async"
        self.servers = range(len(cluster.topologies))
        self.reads = [Reads(topology, cluster.tables).pick for topology in cluster.topologies]
        self.clock = [[0.0] * len(topology.units) for topology in cluster.topologies]
        self.bound: list[dict[int, tuple[int, float]]] = [{} for _ in self.servers]  # unit -> epoch, time
        self.done: list[list[float]] = []  # by round and server: all units have done it
        self.done_everywhere: list[float] = []  # by round
        self.first: list[dict[tuple[int, str], float]] = []  # by round, server, resource: a task may start
        self.worked: dict[tuple[int, str], float] = {}  # the workers have done what they had to so far
        self.known_tails: dict[tuple[str, _Readers], dict[tuple[int, str], float]] = {}
        self.known_loads: dict[str, dict[tuple[int, str], float]] = {}
        self.published = [0.0]  # by version of the weights
        self.rows: list[list[list[list[float]]]] = []  # by round, server, table and entry: they are there

    def run(self) -> float:
        for number, one in enumerate(self.cluster.rounds):
            self.rows.append([_no_rows(self.cluster, server) for server in self.servers])
            self.first.append({})
            self._start(number)
            for group in self.cluster.groups[one.kind]:
                for server in self.servers:
                    self._run_group(number, one, server, group)
            here, everywhere = self._work(number, one) if self.loaded else ([0.0] * len(self.servers), 0.0)
            self.done.append([max(*clock, least) for clock, least in zip(self.clock, here, strict=True)])
            self.done_everywhere.append(max(*self.done[-1], everywhere))
            if one.trains and self.cluster.update == "epoch":
                self._publish(max(*here, everywhere))
        return self.done_everywhere[-1]

    def _work(self, number: int, one: Round) -> tuple[list[float], float]:
        """When the intervals can have done a round at the earliest for want of workers: by server, in all."""
        if one.kind not in self.known_loads:
            self.known_loads[one.kind] = _loads(self.cluster, self.seconds_of, [one], ghosts=False)
        reads = self.exact or number == 0
        local = self._tails(one, _Readers.ON_THE_SERVER if reads else _Readers.NOBODY)
        tails = self._tails(one, _Readers.ANYWHERE if reads else _Readers.NOBODY)
        here, everywhere = [0.0] * len(self.servers), 0.0
        for key, first in self.first[number].items():
            # Of the work of rounds m to this one none begins before that of m can, for every m.
            self.worked[key] = max(first, self.worked.get(key, 0.0)) + self.known_loads[one.kind][key]
            here[key[0]] = max(here[key[0]], self.worked[key] + local[key])
            everywhere = max(everywhere, self.worked[key] + tails[key])
        return here, everywhere

    def _tails(self, one: Round, readers: _Readers) -> dict[tuple[int, str], float]:
        key = one.kind, readers
        if key not in self.known_tails:
            self.known_tails[key] = _least_tails(self.cluster, self.seconds_of, self.message, [one], readers)
        return self.known_tails[key]

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
                start = max(start, max(peers, default=0.0) + self.message, self.done_everywhere[behind])
            self.clock[server] = [max(seconds, start) for seconds in self.clock[server]]

    def _run_group(self, number: int, one: Round, server: int, group: Group) -> None:
        seconds, clock = self.seconds_of(server, group), self.clock[server]
        first, key = self.first[number], (server, group.resource)
        for unit, what in enumerate(self.cluster.topologies[server].units):
            if what.interval < 0 and not group.covers_ghosts:
                continue
            start = clock[unit]
            if group.weights:
                start = max(start, self._weights(one, server, unit))
            if group.reads is not None:
                rows = self.rows[self._oldest(number)][server][group.reads]
                start = max(start, *self.reads[server][group.reads][unit](rows))  # type: ignore[arg-type]
            first[key] = min(start, first.get(key, start))
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

    def _publish(self, least: float) -> None:
        """The next version: gradients of all intervals go to a weight server, which tells the others."""
        ends: list[Sequence[float]] = [
            [clock[unit] for unit, what in enumerate(topology.units) if what.interval >= 0]
            for clock, topology in zip(self.clock, self.cluster.topologies, strict=True)
        ]
        self.published.append(max(least, *(max(end, default=0.0) for end in ends)) + 2 * self.message)
