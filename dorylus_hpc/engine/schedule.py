"""When each task of a graph server may start: the pipeline as a pure state machine.

Events come in (a task is done, a ghost block arrived, weights are bound, a peer made progress), actions
go out (run, send, install, bind, release, push). There is no MPI, thread, clock or random source here:
the runtime drives it, and so does the simulator, which replays any order of events from a seed.

What flows is a *unit*: a vertex interval of a hosted part, or the rows of its ghosts where a stage is
computed for them too. Every unit runs the groups of a round (an epoch, or an evaluation) in order. A
group whose first stage is a gather also reads rows of other units and *ghost blocks* (the rows of one
interval of another part), all of one *table*, a row tensor that gathers read:

    unit 0   [AV Y1] ----> [GA, AV] --+--> [GA, AV, dAV] --> ...        a gather waits for exactly
    unit 1   [AV Y1] ----> [GA, AV] --+                                 the rows that it reads
    block 0  .......arrives.........--+

Each entry of a table carries the round its rows are of. The modes differ in which rounds will do:

    nopipe  this round, and every group waits for all units to end the one before, and for all blocks
    pipe    this round: no barrier inside an epoch, results equal those of nopipe bit for bit
    async   round e may read rows of rounds e-1-S .. e+S; a unit may start epoch e iff
            e <= 1 + min(done anywhere) + S, and epoch 2 only after all have done epoch 1, which is exact

In `async` rows are written aside and installed when no running gather reads them, so none is torn. A
gather that has to wait for an installation does not start: readers can't keep a writer out for ever.

Reference: Dorylus (OSDI '21), sections 4 and 5: bounded pipeline-asynchronous computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, Literal

Mode = Literal["nopipe", "pipe", "async"]
Direction = Literal["in", "out", "all"]


@dataclass(frozen=True)
class Unit:
    """What flows through the pipeline.

    Attributes
    ----------
    part
        A hosted part.
    interval
        Number of the vertex interval; -1 for the rows of the part's ghosts.
    """

    part: int
    interval: int


@dataclass(frozen=True)
class Table:
    """A row tensor that gathers read.

    Attributes
    ----------
    name
        Of the row tensor.
    direction
        Whose neighbours read it: ``in`` for forward gathers, ``out`` for backward ones. ``all``: it has a row
        of sums an interval, and everyone reads all of them.
    exchanged
        Whether rows of ghosts come by message; otherwise the ghosts' unit computes them, if any does.
    layer
        Whose gather reads it; for people.
    """

    name: str
    direction: Direction
    exchanged: bool
    layer: int = 0

    @property
    def kind(self) -> str:
        """The kind of stage that its messages count as."""
        return {"in": "SC", "out": "dSC", "all": "RD"}[self.direction]


@dataclass(frozen=True)
class Group:
    """Fused stages: one task a unit.

    Attributes
    ----------
    name
        For people.
    resource
        Kind of worker that runs it.
    reads
        Number of the table that its gather reads, or None.
    writes
        Number of the table that it completes, or None.
    weights
        Whether it uses or gives gradients of weights.
    covers_ghosts
        Whether the ghosts' units run it too.
    """

    name: str
    resource: str = "cpu"
    reads: int | None = None
    writes: int | None = None
    weights: bool = False
    covers_ghosts: bool = False


@dataclass(frozen=True)
class Topology:
    """Who reads whom on one graph server; derived from the partition at start-up.

    Attributes
    ----------
    units
        All units; a unit's number is its place here.
    reads
        By direction, for each unit: the units, other than itself, whose rows its gathers read.
    blocks
        By direction: number of ghost blocks that arrive here.
    ghost_reads
        By direction, for each unit: the ghost blocks that its gathers read.
    sends
        By direction, for each unit: whether any other part reads its rows.
    peers
        Numbers of the other graph servers.
    """

    units: tuple[Unit, ...]
    reads: Mapping[Direction, Sequence[tuple[int, ...]]]
    blocks: Mapping[Direction, int]
    ghost_reads: Mapping[Direction, Sequence[tuple[int, ...]]]
    sends: Mapping[Direction, Sequence[bool]]
    peers: tuple[int, ...] = ()


class Reads:
    """For each table and unit, the entries that a gather reads; derived once, used in every schedule.

    Parameters
    ----------
    topology, tables
        As for `Schedule`.

    Attributes
    ----------
    entries
        By table and unit: units first, then blocks behind them; the unit itself among them.
    sets
        The same as sets.
    pick
        The same as functions that pick these entries of a list, at the speed of C.
    """

    def __init__(self, topology: Topology, tables: Sequence[Table]) -> None:
        self.entries = [_entries_read(topology, table) for table in tables]
        self.sets = [[frozenset(entries) for entries in table] for table in self.entries]
        self.pick = [[_picker(entries) for entries in table] for table in self.entries]


@dataclass(frozen=True)
class Round:
    """One pass over the graph.

    Attributes
    ----------
    kind
        Name of its groups.
    epoch
        From 1. An evaluation belongs to the epoch whose weights it uses.
    trains
        Whether it ends with gradients.
    """

    kind: str
    epoch: int
    trains: bool = True


class Epochs(Sequence[Round]):
    """Rounds of one kind, one an epoch, made when they are looked at: there may be millions.

    Parameters
    ----------
    kind
        Of all of them.
    first
        Epoch of the first.
    count
        How many.
    trains
        As for `Round`.
    """

    def __init__(self, kind: str, first: int, count: int, *, trains: bool = True) -> None:
        self.kind, self.first, self.trains = kind, first, trains
        self._count = count

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    def __getitem__(self, number: Any) -> Any:
        """Return a round by its number, from 0."""
        if not 0 <= number < self._count:
            raise IndexError(number)
        return Round(self.kind, self.first + number, self.trains)


@dataclass(frozen=True)
class Run:
    """Give a task to a worker; `Schedule.task_done` when it ended."""

    unit: int
    round: int
    group: int


@dataclass(frozen=True)
class Send:
    """Send the unit's rows of a table to whoever reads them."""

    table: int
    unit: int
    round: int


@dataclass(frozen=True)
class Install:
    """Put rows that were set aside in place before any later action; `entry` counts units, then blocks."""

    table: int
    entry: int
    round: int


@dataclass(frozen=True)
class Bind:
    """Bind the unit to a version of the weights, this one or a later; `Schedule.bound` when it is."""

    unit: int
    round: int
    version: int


@dataclass(frozen=True)
class Release:
    """The unit needs its weights no more; its gradients are complete."""

    unit: int
    round: int


@dataclass(frozen=True)
class Push:
    """All units of a part have done a round: its results, such as gradients, are complete."""

    part: int
    round: int


@dataclass(frozen=True)
class Progress:
    """Tell the peers how many rounds all units here have done."""

    done: int


Action = Run | Send | Install | Bind | Release | Push | Progress


class Schedule:
    """The tasks of one graph server.

    Parameters
    ----------
    mode
        ``nopipe``, ``pipe`` or ``async``.
    topology
        Units and who reads whom.
    tables
        The row tensors that gathers read.
    groups
        By kind of round: the groups, in the order in which every unit runs them.
    rounds
        What is to be run.
    workers
        Number of workers of each resource.
    staleness
        S of the asynchronous mode.
    reads
        Derived from `topology` and `tables` before, or None.

    Attributes
    ----------
    done : list of int
        Rounds that each unit has finished.
    max_lead : int
        The most rounds that a unit was ahead of the slowest known one when it started.
    max_read_age : int
        The most rounds that rows read were older than the reader's.
    """

    def __init__(
        self,
        mode: Mode,
        topology: Topology,
        tables: Sequence[Table],
        groups: Mapping[str, Sequence[Group]],
        rounds: Sequence[Round],
        *,
        workers: Mapping[str, int],
        staleness: int = 0,
        reads: Reads | None = None,
    ) -> None:
        if mode not in ("nopipe", "pipe", "async"):
            raise ValueError(f"mode must be nopipe, pipe or async, got {mode!r}")
        if not topology.units or min(workers.values(), default=0) < 1:
            raise ValueError(
                f"a schedule needs a unit and a worker of each kind, got {len(topology.units)}, {workers}"
            )
        if staleness < 0:
            raise ValueError(f"staleness must be at least 0, got {staleness}")
        trains = rounds.trains if isinstance(rounds, Epochs) else all(one.trains for one in rounds)
        if mode == "async" and not trains:
            raise ValueError("async runs training rounds only")
        self._mode, self._topology, self._tables = mode, topology, tuple(tables)
        self._groups = {kind: tuple(chain) for kind, chain in groups.items()}
        self._rounds = rounds
        self._only = self._groups[rounds.kind] if isinstance(rounds, Epochs) else None
        self._staleness = staleness
        self._exact = mode != "async"
        n_units = len(topology.units)
        reads = Reads(topology, tables) if reads is None else reads
        self._reads, self._read_sets, self._pick = reads.entries, reads.sets, reads.pick
        self._stamps = [[0] * (n_units + topology.blocks[table.direction]) for table in self._tables]
        self._staged: list[dict[int, int]] = [{} for _ in self._tables]
        self._early: list[tuple[int, int, int]] = []
        self._readers: list[set[int]] = [set() for _ in self._tables]  # units whose gathers run, in async
        self._looked = [0] * n_units
        self._waiting: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in self._tables]
        self._workers = dict(workers)
        self._free = dict(workers)  # below 0 while more tasks run than a smaller number of workers allows
        self._ready: dict[str, list[tuple[int, int, int]]] = {name: [] for name in workers}
        self._round, self._place = [0] * n_units, [0] * n_units
        self._bound: list[bool] = [False] * n_units
        self._binding: list[bool] = [False] * n_units
        self._blocked: set[int] = set()  # units that wait to start a round
        self._at_barrier: set[int] = set()
        self._held: list[Send] = []  # until all units have ended the group
        self._ended: defaultdict[tuple[int, int], int] = defaultdict(int)  # units that ended (round, group)
        self._arrived: defaultdict[tuple[int, int], int] = defaultdict(int)  # blocks of (round, table)
        self._part_left: dict[tuple[int, int], int] = {}
        self._part_size: defaultdict[int, int] = defaultdict(int)
        for unit in topology.units:
            self._part_size[unit.part] += unit.interval >= 0
        self._n_running = {
            (kind, place): sum(unit.interval >= 0 or group.covers_ghosts for unit in topology.units)
            for kind, chain in self._groups.items()
            for place, group in enumerate(chain)
        }
        self._peers = dict.fromkeys(topology.peers, 0)
        self._local_done = 0
        self._stopped = False
        self._denied = 0
        self._ended_by: defaultdict[int, int] = defaultdict(int)  # units that have ended a round
        self._through = 0  # units that have done all of them
        self.done = [0] * n_units
        self.max_lead = 0
        self.max_read_age = 0
        self._actions: list[Action] = []

    # Events. Each returns what is to be done, in this order.

    def start(self) -> list[Action]:
        """Begin the first round."""
        for unit in range(len(self.done)):
            self._advance(unit)
        return self._take()

    def task_done(self, unit: int) -> list[Action]:
        """A task of this unit ended."""
        number, place = self._round[unit], self._place[unit]
        group = self.group(number, place)
        self._free[group.resource] += 1
        if group.reads is not None and not self._exact:
            self._end_reading(group.reads, unit)
        if group.writes is not None:
            self._share(group.writes, unit, number)
        self._place[unit], self._looked[unit] = self._next_place(unit, number, place + 1), 0
        if self._mode == "nopipe":
            self._end_group(number, place)
        if self._place[unit] == len(self._chain(number)):
            self._end_round(unit, number)
        self._advance(unit)
        return self._take()

    def block_arrived(self, table: int, block: int, number: int) -> list[Action]:
        """A ghost block came, and lies aside until it is installed."""
        entry = len(self.done) + block
        if self._exact and number > self._local_done + 1:
            self._early.append((table, entry, number))  # this round's gathers still read the place it goes to
        else:
            self._stage(table, entry, number)
        return self._take()

    def bound(self, unit: int) -> list[Action]:
        """The unit has the weights that it asked for."""
        self._bound[unit], self._binding[unit] = True, False
        self._advance(unit)
        return self._take()

    def peer_progress(self, server: int, done: int) -> list[Action]:
        """All units of another graph server have done this many rounds."""
        self._peers[server] = max(done, self._peers[server])
        self._start_rounds()
        return self._take()

    def stop(self) -> list[Action]:
        """Start no more rounds; those begun go on, as far as weights come."""
        self._stopped = True
        return self._take()

    def denied(self, unit: int) -> list[Action]:
        """The weights that the unit asked for will never come: it stops where it is, and nothing starts.

        Whoever has weights can still end its round: what it reads was written by units that had theirs.
        """
        self._binding[unit] = False
        self._denied += 1
        self._stopped = True
        return self._take()

    def resize(self, resource: str, workers: int) -> list[Action]:
        """Change the number of workers of a resource, from now on.

        With fewer, tasks that run go on, and none starts until enough of them have ended. With more, ready
        tasks start at once, the oldest first.
        """
        if resource not in self._workers or workers < 1:
            known = ", ".join(self._workers)
            raise ValueError(f"resize needs a resource of {known} and a worker, got {resource!r}, {workers}")
        self._free[resource] += workers - self._workers[resource]
        self._workers[resource] = workers
        return self._take()

    def workers(self, resource: str) -> int:
        """How many workers a resource has now."""
        return self._workers[resource]

    def running(self, resource: str) -> int:
        """How many tasks of a resource run; after a `resize` these may be more than its workers."""
        return self._workers[resource] - self._free[resource]

    def ready(self, resource: str) -> int:
        """How many tasks of a resource wait for nothing but a worker.

        In ``async`` rows may have been set aside since a task became ready; it counts until a worker is free.
        """
        return len(self._ready[resource])

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do here: every round done by every unit, or none that may go on."""
        if self._local_done == len(self._rounds):
            return True
        idle = len(self._blocked) + self._denied + self._through
        return self._stopped and idle == len(self.done)

    def epoch(self, number: int) -> int:
        """Return the epoch of a round."""
        return self._rounds[number].epoch

    @property
    def stopped(self) -> bool:
        """Whether no more rounds start."""
        return self._stopped

    @property
    def rounds_done(self) -> int:
        """Rounds that all units here have done."""
        return self._local_done

    # How a unit moves.

    def _chain(self, number: int) -> tuple[Group, ...]:
        if self._only is not None:
            return self._only
        return self._groups[self._rounds[number].kind]

    def group(self, number: int, place: int) -> Group:
        """Return a group of a round."""
        return self._chain(number)[place]

    def _next_place(self, unit: int, number: int, place: int) -> int:
        """Skip groups that a ghosts' unit does not run."""
        chain = self._chain(number)
        if self._topology.units[unit].interval < 0:
            while place < len(chain) and not chain[place].covers_ghosts:
                place += 1
        return place

    def _advance(self, unit: int) -> None:
        """Make the unit's next task ready, or note what it waits for."""
        number = self._round[unit]
        if number == len(self._rounds):
            return
        if self._place[unit] == 0:
            if not self._may_start(unit, number):
                self._blocked.add(unit)
                return
            self._place[unit] = self._next_place(unit, number, 0)
            if self._place[unit] == len(self._chain(number)):
                self._end_round(unit, number)
                self._advance(unit)
                return
        group = self.group(number, self._place[unit])
        if group.weights and not self._bound[unit]:
            if not self._binding[unit]:
                self._binding[unit] = True
                self._actions.append(Bind(unit, number, self._least_version(number)))
            return
        if self._mode == "nopipe" and not self._past_barrier(number, self._place[unit]):
            self._at_barrier.add(unit)
            return
        if self._lags(group, unit, number):
            return
        heappush(self._ready[group.resource], (number, self._place[unit], unit))

    def _may_start(self, unit: int, number: int) -> bool:
        if self._stopped and not self._bound[unit]:
            return False
        if self._exact:
            return self._local_done >= number
        slowest = self._slowest()
        # In the count of the design, from 1: e <= 1 + min(done) + S, and the first epoch is exact.
        return number <= slowest + (self._staleness if number > 1 else 0)

    def _slowest(self) -> int:
        """Rounds that all units have done: in exact modes those here, as weights tell of the others."""
        return self._local_done if self._exact else min((self._local_done, *self._peers.values()))

    def _least_version(self, number: int) -> int:
        """Updates that must be behind the weights: all before the epoch, or as many as S allows to lack."""
        epoch = self._rounds[number].epoch
        return epoch - 1 if self._exact else max(0, epoch - 1 - self._staleness)

    def _lags(self, group: Group, unit: int, number: int) -> bool:
        """Whether an entry that the task touches is not fit for it yet; the unit then waits for it."""
        if group.writes is not None and unit in self._staged[group.writes]:
            self._waiting[group.writes][unit].append(unit)  # what is set aside must not be overwritten
            return True
        if group.reads is None:
            return False
        table, needed = group.reads, self._needed(number)
        stamps, entries = self._stamps[table], self._reads[table][unit]
        if not self._exact and min(self._pick[table][unit](stamps)) >= needed:
            at = len(entries)
        else:
            at = self._looked[unit] if self._exact else 0  # in exact modes what was there stays there
            while at < len(entries) and stamps[entries[at]] >= needed:
                at += 1
            self._looked[unit] = at
        if at < len(entries):
            self._waiting[table][entries[at]].append(unit)
            return True
        for entry in self._staged[table]:
            if entry in self._read_sets[table][unit]:
                self._waiting[table][entry].append(unit)
                return True
        return False

    def _needed(self, number: int) -> int:
        """The oldest round, counted from 1, whose rows will do for a gather of round `number`, from 0."""
        return number + 1 if self._exact else max(1, number - self._staleness)

    def _end_round(self, unit: int, number: int) -> None:
        self._round[unit], self._place[unit] = number + 1, 0
        self.done[unit] = number + 1
        self._ended_by[number] += 1
        self._through += number + 1 == len(self._rounds)
        part, interval = self._topology.units[unit].part, self._topology.units[unit].interval
        if self._bound[unit] and not self._same_epoch_follows(number):
            self._bound[unit] = False
            self._actions.append(Release(unit, number))
        if interval >= 0:
            left = self._part_left.pop((part, number), self._part_size[part]) - 1
            if left:
                self._part_left[part, number] = left
            else:
                self._actions.append(Push(part, number))
        if self._ended_by[number] == len(self.done):
            del self._ended_by[number]
            self._local_done = number + 1
            for counts in (self._ended, self._arrived):
                for key in [key for key in counts if key[0] < number]:
                    del counts[key]
            if not self._exact:
                self._actions.append(Progress(self._local_done))
            else:
                early, self._early = self._early, []
                for table, entry, of in early:
                    if of > self._local_done + 1:
                        self._early.append((table, entry, of))
                    else:
                        self._stage(table, entry, of)
            self._start_rounds()

    def _same_epoch_follows(self, number: int) -> bool:
        """Whether the next round is the evaluation of the weights that this one used."""
        rounds = self._rounds
        return number + 1 < len(rounds) and rounds[number + 1].epoch == rounds[number].epoch

    def _start_rounds(self) -> None:
        blocked, self._blocked = sorted(self._blocked), set()
        for unit in blocked:
            self._advance(unit)

    # Tables.

    def _share(self, table: int, unit: int, number: int) -> None:
        """The unit's rows of a table are written."""
        if self._tables[table].exchanged and self._topology.sends[self._tables[table].direction][unit]:
            send = Send(table, unit, number + 1)
            if self._mode == "nopipe":
                self._held.append(send)
            else:
                self._actions.append(send)
        if self._exact:
            self._stamps[table][unit] = number + 1
            self._wake(table, unit)
        else:
            self._stage(table, unit, number + 1)

    def _stage(self, table: int, entry: int, number: int) -> None:
        self._staged[table][entry] = number
        if not self._is_read(table, entry):
            self._install(table, entry)

    def _is_read(self, table: int, entry: int) -> bool:
        sets = self._read_sets[table]
        return any(entry in sets[reader] for reader in self._readers[table])

    def _install(self, table: int, entry: int) -> None:
        number = self._staged[table].pop(entry)
        self._stamps[table][entry] = number
        self._actions.append(Install(table, entry, number))
        if self._mode == "nopipe":
            self._arrived[number, table] += 1
            if self._arrived[number, table] == self._topology.blocks[self._tables[table].direction]:
                self._pass_barrier()
        self._wake(table, entry)

    def _wake(self, table: int, entry: int) -> None:
        for unit in self._waiting[table].pop(entry, ()):
            number, place = self._round[unit], self._place[unit]
            group = self.group(number, place)
            if not self._lags(group, unit, number):
                heappush(self._ready[group.resource], (number, place, unit))

    def _begin_reading(self, table: int, unit: int, number: int) -> None:
        oldest = min(self._pick[table][unit](self._stamps[table]))
        self.max_read_age = max(self.max_read_age, number + 1 - oldest)
        self._readers[table].add(unit)

    def _end_reading(self, table: int, unit: int) -> None:
        self._readers[table].discard(unit)
        for entry in [entry for entry in self._staged[table] if entry in self._read_sets[table][unit]]:
            if not self._is_read(table, entry):
                self._install(table, entry)

    # The barrier of nopipe.

    def _end_group(self, number: int, place: int) -> None:
        self._ended[number, place] += 1
        if self._ended[number, place] == self._n_running[self._rounds[number].kind, place]:
            self._actions += self._held
            self._held = []
            self._pass_barrier()

    def _pass_barrier(self) -> None:
        waiting, self._at_barrier = sorted(self._at_barrier), set()
        for unit in waiting:
            self._advance(unit)

    def _past_barrier(self, number: int, place: int) -> bool:
        kind, group = self._rounds[number].kind, self.group(number, place)
        if place and self._ended[number, place - 1] < self._n_running[kind, place - 1]:
            return False
        if group.reads is None or not self._tables[group.reads].exchanged:
            return True
        table = self._tables[group.reads]
        return self._arrived[number + 1, group.reads] == self._topology.blocks[table.direction]

    # Workers.

    def _take(self) -> list[Action]:
        """Give ready tasks to free workers, the oldest first, and return what is to be done."""
        for resource, ready in self._ready.items():
            while ready and self._free[resource] > 0:
                number, place, unit = heappop(ready)
                group = self.group(number, place)
                if not self._exact:
                    if self._lags(group, unit, number):
                        continue  # rows were set aside since it became ready
                    if group.reads is not None:
                        self._begin_reading(group.reads, unit, number)
                if place == self._next_place(unit, number, 0) and self._topology.units[unit].interval >= 0:
                    self.max_lead = max(self.max_lead, number - self._slowest())
                self._free[resource] -= 1
                self._actions.append(Run(unit, number, place))
        actions, self._actions = self._actions, []
        return actions


def _entries_read(topology: Topology, table: Table) -> list[tuple[int, ...]]:
    """For each unit, the entries of the table that its gather reads."""
    n_units = len(topology.units)
    ghosts = {unit.part: number for number, unit in enumerate(topology.units) if unit.interval < 0}
    entries = []
    for number, unit in enumerate(topology.units):
        read = (number, *topology.reads[table.direction][number])
        if table.exchanged:
            read += tuple(n_units + block for block in topology.ghost_reads[table.direction][number])
        elif unit.part in ghosts and ghosts[unit.part] != number:
            read += (ghosts[unit.part],)
        entries.append(read)
    return entries


def _picker(entries: tuple[int, ...]) -> Callable[[list[int]], tuple[int, ...]]:
    """Pick entries of a list, at the speed of C."""
    pick = itemgetter(*entries)
    return pick if len(entries) > 1 else lambda stamps: (pick(stamps),)


def idle_workers_with_work(schedule: Schedule) -> Iterable[str]:
    """Name the resources of which a worker is free although a task is ready: there must never be one."""
    return [name for name, ready in schedule._ready.items() if ready and schedule._free[name] > 0]
