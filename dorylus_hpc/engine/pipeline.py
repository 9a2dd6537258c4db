"""Drives schedules: one thread for them and for MPI, the executor's for the tasks.

A *line* is one schedule over one set of row tensors. Training is a line; evaluation is another, whose tasks
take what the first leaves of the workers. The loop sleeps until a task ends. Where messages can come it
also looks at MPI now and then, at intervals that grow to a millisecond: that is what moves large messages
while kernels run, and it spins on nothing.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from dorylus_hpc.comm.blocks import BlockExchange
from dorylus_hpc.comm.mailbox import Letter, Mailbox
from dorylus_hpc.engine.executor import CPU, Delayed, Executor
from dorylus_hpc.engine.schedule import (
    Action,
    Bind,
    Install,
    Progress,
    Push,
    Release,
    Run,
    Schedule,
    Send,
)
from dorylus_hpc.engine.wiring import Wiring
from dorylus_hpc.report.trace import Tracer
from dorylus_hpc.serverless.tasks import DenseTask

# Seconds between two looks at MPI. While every worker has a task and one more, looks are few, for they take
# the interpreter and a core from them: enough to move what is on its way, and fewer if nothing is. Else the
# first and the longest.
_MOVING, _BUSY = 1e-3, 4e-3
_SHORTEST, _LONGEST = 20e-6, 200e-6
_AT_ONCE = 4  # ends of tasks handled between two looks


class Work(Protocol):
    """What a line's schedule wants done and the loop does not do itself."""

    def task(self, unit: int, number: int, group: int) -> Callable[[], object] | Delayed | DenseTask:
        """Make the task of a unit, a round and a group."""

    def bind(self, unit: int, number: int, least: int) -> bool | None:
        """Get weights for a unit: True if it has them, False if none will come, None if they may."""

    def release(self, unit: int, number: int) -> None:
        """The unit needs its weights no more."""

    def complete(self, part: int, number: int) -> None:
        """All intervals of a part have done a round."""

    def install(self, table: int, unit: int) -> None:
        """Show rows that a unit wrote aside to the gathers."""

    def progress(self, done: int) -> None:
        """All units here have done this many rounds."""


class Line:
    """One schedule at a time, over one set of row tensors.

    Parameters
    ----------
    wiring
        Tables, groups and topology.
    exchange
        Moves the ghost blocks of these tensors.
    first
        Whether its tasks go before those of other lines.

    Attributes
    ----------
    schedule
        The present one.
    urgent
        Whether its tasks are not to wait for idle workers.
    expects
        Whether blocks may be taken now; until then they wait with MPI.
    receives
        Whether any block comes from another rank.
    """

    def __init__(self, wiring: Wiring, exchange: BlockExchange, *, first: bool) -> None:
        self.wiring, self.exchange, self.first = wiring, exchange, first
        self.schedule: Schedule | None = None
        self.work: Work | None = None
        self.urgent = False
        self.expects = True
        self.waiting: deque[Run] = deque()
        self._numbers = {
            way: {block: number for number, block in enumerate(blocks)}
            for way, blocks in wiring.blocks.items()
        }
        self.receives = any(self._numbers.values())
        self._before = [0] * len(wiring.tables)  # rounds of earlier schedules, by table
        self._during = [0] * len(wiring.tables)  # rounds of the present one
        self._early: list[tuple[int, tuple[int, int], int]] = []
        self._era = 0

    def begin(self, schedule: Schedule, kind: str, n_rounds: int, work: Work) -> list[Action]:
        """Start a schedule whose rounds are all of one kind."""
        self.schedule, self.work = schedule, work
        self._before = [before + during for before, during in zip(self._before, self._during, strict=True)]
        self._during = [
            n_rounds * (table in self.wiring.exchanged[kind]) for table in range(len(self._before))
        ]
        actions = schedule.start()
        early, self._early = self._early, []
        for table, block, stamp in early:
            actions += self.arrived(table, block, stamp)
        return actions

    def restart(self) -> None:
        """Count blocks from 1 again, after `BlockExchange.forget`."""
        self._before = [0] * len(self._before)
        self._during = [0] * len(self._during)
        self._early = []
        self._era += 1

    def serial(self, stamp: int) -> int:
        """Return a number of a block's rows that never comes again, for the timeline."""
        return stamp + self._era * 10**9

    def arrived(self, table: int, block: tuple[int, int], stamp: int) -> list[Action]:
        """Tell the schedule of a block, now or when its round begins."""
        number = stamp - self._before[table]
        if self.schedule is None or number > self._during[table]:
            self._early.append((table, block, stamp))
            return []
        way = self.wiring.tables[table].direction
        return self.schedule.block_arrived(table, self._numbers[way][block], number)

    def place(self, table: int, entry: int) -> tuple[int, int]:
        """Return the part and the interval of a table's entry."""
        units = self.wiring.topology.units
        if entry < len(units):
            return units[entry].part, units[entry].interval
        return self.wiring.blocks[self.wiring.tables[table].direction][entry - len(units)]

    def stamp(self, action: Send) -> int:
        """Return the stamp of rows that are to be sent."""
        return action.round + self._before[action.table]

    def install(self, action: Install) -> None:
        """Put rows in place."""
        n_units = len(self.wiring.topology.units)
        if action.entry < n_units:
            assert self.work is not None
            self.work.install(action.table, action.entry)
            return
        block = self.wiring.blocks[self.wiring.tables[action.table].direction][action.entry - n_units]
        self.exchange.install(action.table, block, action.round + self._before[action.table])


class Loop:
    """Runs lines side by side on one executor, and hands out letters.

    Parameters
    ----------
    executor
        Threads to run on.
    lines
        In the order of their priority.
    tracer
        Takes what happens.

    Attributes
    ----------
    seconds : dict
        ``SC``, ``dSC``, ``RD``: packing, sending and placing rows, those of evaluations in ``eval``;
        ``wait``: no task ran here.
    """

    def __init__(self, executor: Executor, lines: Sequence[Line], tracer: Tracer) -> None:
        self.seconds = {"SC": 0.0, "dSC": 0.0, "RD": 0.0, "eval": 0.0, "wait": 0.0}
        self._tracer = tracer
        self._idle_since: float | None = None
        self._executor, self._lines = executor, lines
        self._mailbox: Mailbox | None = None
        self._handle: Callable[[Letter], None] | None = None
        self._actions: deque[tuple[Line, Action]] = deque()
        self._sends: deque[tuple[Line, Send]] = deque()
        self._running: Counter[str] = Counter()
        self._n_running = 0
        self._acting = False
        self._observer: Callable[[int], None] | None = None

    def listen(self, mailbox: Mailbox, handle: Callable[[Letter], None]) -> None:
        """Give every letter to `handle`."""
        self._mailbox, self._handle = mailbox, handle

    def observe(self, observer: Callable[[int], None]) -> None:
        """Call this when tasks of the first line started or ended, with how many of others' workers ended."""
        self._observer = observer

    @property
    def threads(self) -> int:
        """Threads for the work on this server's cores."""
        return self._executor.threads

    @property
    def at_cores(self) -> int:
        """Tasks that run on these threads, or were given to them ahead."""
        return self._running[CPU]

    def resize(self, line: Line, resource: str, workers: int) -> None:
        """Use another number of workers of a resource from now on."""
        self._executor.workers[resource] = workers
        if line.schedule is not None:
            self.do(line, line.schedule.resize(resource, workers))

    def do(self, line: Line, actions: Sequence[Action]) -> None:
        """Do what a line's schedule wants, and what comes of it."""
        self._actions += [(line, action) for action in actions]
        if self._acting:
            return
        self._acting = True
        while self._actions or self._sends:
            if self._actions:
                self._act(*self._actions.popleft())
            else:  # packing takes time: workers get their tasks first, none of which changes these rows
                self._send(*self._sends.popleft())
        self._acting = False
        self._start_waiting()

    def run(self, until: Callable[[], bool]) -> None:
        """Go on until something is true.

        Raises
        ------
        RuntimeError
            Nothing runs, nothing can come, and it is not.
        """
        letters = self._mailbox is not None and self._mailbox.size > 1
        listens = letters or any(line.receives for line in self._lines)
        pause = _SHORTEST
        while not until():
            busy = self._n_running > 0
            self._note_idleness(busy)
            happened = 0
            if self._mailbox is not None and not letters:
                happened = self._take_letters()
            if busy and not happened:
                happened = self._take_tasks(pause if listens else None)
            if not listens:
                if not happened and not busy:
                    raise RuntimeError("the pipeline stands still")
                continue
            came = self._take_messages()
            if not came and not happened and not busy:
                time.sleep(pause)
            if self._running[CPU] > self._executor.threads:
                pause = _MOVING if self._moves() else _BUSY
            elif came or happened or pause >= _MOVING:
                pause = _SHORTEST
            else:
                pause = min(1.5 * pause, _LONGEST)
        self._note_idleness(True)

    def leave(self) -> None:
        """Wait until all that was sent has left."""
        pause = _SHORTEST
        while any(line.exchange.sending for line in self._lines) or (
            self._mailbox is not None and self._mailbox.sending
        ):
            if not self._take_messages():
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST)

    def _moves(self) -> bool:
        """Whether anything is on its way that this rank knows of."""
        return any(line.exchange.moving for line in self._lines) or (
            self._mailbox is not None and self._mailbox.sending
        )

    def _note_idleness(self, busy: bool) -> None:
        """Account for the time in which no task ran."""
        if busy == (self._idle_since is None):
            return
        now = time.perf_counter()
        if self._idle_since is None:
            self._idle_since = now
            return
        self.seconds["wait"] += now - self._idle_since
        self._tracer.task("wait", self._idle_since, now, self._tracer.lane("wait"))
        self._idle_since = None

    # Events.

    def _take_tasks(self, seconds: float | None) -> int:
        """Wait for the end of a task, and take a few that ended."""
        count = elsewhere = 0
        ended = self._executor.wait(seconds)
        while ended is not None:
            line, unit, resource = cast("tuple[Line, int, str]", ended)
            self._running[resource] -= 1
            self._n_running -= 1
            elsewhere += line.first and resource != CPU
            assert line.schedule is not None
            self.do(line, line.schedule.task_done(unit))
            count += 1
            ended = self._executor.wait(0) if count < _AT_ONCE else None
        if self._observer is not None and count:
            self._observer(elsewhere)
        return count

    def _take_messages(self) -> int:
        count = self._take_letters()
        for line in self._lines:
            if (line.receives and line.expects) or line.exchange.sending:
                for table, block, stamp in line.exchange.poll():
                    self._tracer.arrived(
                        time.perf_counter(), table, *block, line.serial(stamp), evaluation=not line.first
                    )
                    self.do(line, line.arrived(table, block, stamp))
                    count += 1
        return count

    def _take_letters(self) -> int:
        if self._mailbox is None or self._handle is None:
            return 0
        letters = self._mailbox.poll()
        for letter in letters:
            self._handle(letter)
        return len(letters)

    # Actions.

    def _act(self, line: Line, action: Action) -> None:
        schedule, work = line.schedule, line.work
        assert schedule is not None and work is not None
        match action:
            case Run():
                if line.first or line.urgent:
                    self._start(line, action)
                else:
                    line.waiting.append(action)
            case Send():
                self._sends.append((line, action))
            case Install():
                began = time.perf_counter()
                line.install(action)
                self._note(line, action.table, began, action.round, line.place(action.table, action.entry))
            case Bind():
                granted = work.bind(action.unit, action.round, action.version)
                if granted is not None:
                    self.do(line, schedule.bound(action.unit) if granted else schedule.denied(action.unit))
            case Release():
                work.release(action.unit, action.round)
            case Push():
                work.complete(action.part, action.round)
            case Progress():
                work.progress(action.done)

    def _start(self, line: Line, action: Run) -> None:
        assert line.schedule is not None and line.work is not None
        resource = line.schedule.group(action.round, action.group).resource
        self._running[resource] += 1
        self._n_running += 1
        task = line.work.task(action.unit, action.round, action.group)
        self._executor.start((line, action.unit, resource), task, resource)

    def _start_waiting(self) -> None:
        """Give what the first lines leave of the workers to the others."""
        for line in self._lines:
            while line.waiting:
                action = line.waiting[0]
                assert line.schedule is not None
                resource = line.schedule.group(action.round, action.group).resource
                if self._running[resource] >= self._executor.workers[resource] and not line.urgent:
                    break
                self._start(line, line.waiting.popleft())

    def _send(self, line: Line, action: Send) -> None:
        began = time.perf_counter()
        unit = line.wiring.topology.units[action.unit]
        block = (unit.part, unit.interval)
        serial = line.serial(line.stamp(action))
        self._tracer.sent(began, action.table, *block, serial, evaluation=not line.first)
        stamp = line.exchange.send(action.table, block)
        self._note(line, action.table, began, action.round, block)
        if stamp:  # what other parts of this rank need is there at once
            self.do(line, line.arrived(action.table, block, stamp))

    def _note(self, line: Line, table: int, began: float, number: int, place: tuple[int, int]) -> None:
        """Account for packing or placing the rows of a part's interval, of a round counted from 1."""
        one, now = line.wiring.tables[table], time.perf_counter()
        kind = one.kind
        self.seconds[kind if line.first else "eval"] += now - began
        assert line.schedule is not None
        self._tracer.task(
            kind,
            began,
            now,
            self._tracer.lane("messages"),
            epoch=line.schedule.epoch(number - 1) if line.first else 0,
            layer=one.layer,
            part=place[0],
            interval=place[1],
            evaluation=not line.first,
        )
