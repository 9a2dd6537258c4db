"""Which dense task is invoked when, again, or no more: a pure state machine.

Events come in with the time (a task was submitted, its result was accepted, an invocation returned, time
passed), actions go out (invoke, fall back on this server's cores). There is no thread, clock or network here.

- A task is idempotent, so an attempt that is late is not waited for: another one starts beside it, and the
  first result wins. Late is what takes longer than max(`floor`, `ratio` x the moving average of its kind);
  `first` where no task of the kind has returned yet.
- A failed attempt is repeated after a pause that doubles, with jitter; after `attempts` of them the server's
  own cores do the task.
- A throttled attempt (429) does not count. It halves the number of invocations in flight, at most once a
  pause, and each wave of successes adds one again, up to the limit. A task that has paused for it for as
  long as an attempt may take is done by the server's own cores.
- When `breaker` attempts in a row fail, the service is taken for broken: tasks go to the server's cores, and
  every `probe` seconds one invocation tries whether it is back; its task waits for it no longer than
  `floor`, then is done here, and the answer still counts for the service. A late attempt counts as failed if
  its task had one before, and no result has come since it started. A task that is done here because it was
  only throttled, or did not run within `patience`, breaks, too, if no result came in that time. What can't
  get better (wrong credentials, no such function, budget spent) ends invocations for good.

References: Dorylus (OSDI '21), section 6; Dean and Barroso, "The tail at scale", CACM 2013 (hedged requests).
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush


@dataclass(frozen=True)
class Rules:
    """The numbers in the rules above; seconds where they are times."""

    floor: float = 1.0
    ratio: float = 4.0
    first: float = 15.0
    attempts: int = 4
    pause: float = 0.05
    longest_pause: float = 2.0
    patience: float = 30.0  # from its submission, after which a task that never ran is done here
    breaker: int = 8
    probe: float = 10.0
    smoothing: float = 0.1  # weight of a new duration in the average


class Result(Enum):
    """How an invocation ended."""

    DONE = "done"
    THROTTLED = "throttled"
    FAILED = "failed"
    FATAL = "fatal"
    SKIPPED = "skipped"  # never called: the task had ended meanwhile


@dataclass(frozen=True)
class Invoke:
    """Start an attempt; `Dispatcher.returned` when it has ended."""

    task: Hashable
    attempt: int


@dataclass(frozen=True)
class FallBack:
    """Compute the task on this server's cores; `Dispatcher.accepted` when it is done."""

    task: Hashable


Action = Invoke | FallBack


@dataclass
class Counters:
    """What happened, in numbers.

    Attributes
    ----------
    tasks
        Submitted.
    invoked
        Tasks with an attempt that was not throttled; the rest was done by the server's cores alone.
    invocations
        Attempts started: invoked + retries + throttles, at any time.
    retries
        Attempts of a task beyond its first, of those that were not throttled.
    throttles, timeouts, failures
        Attempts that were throttled, late, failed.
    fallbacks
        Tasks given to the server's cores.
    most
        The most attempts in flight at once.
    """

    tasks: int = 0
    invoked: int = 0
    invocations: int = 0
    retries: int = 0
    throttles: int = 0
    timeouts: int = 0
    failures: int = 0
    fallbacks: int = 0
    most: int = 0


@dataclass
class _Task:
    kind: str
    priority: tuple[int, ...]
    born: float
    tried: int = 0  # attempts that were not throttled
    pauses: int = 0
    throttled: float = 0.0  # seconds of pauses after 429
    waiting: bool = True  # for its turn to be invoked
    here: bool = False
    flying: set[int] = field(default_factory=set)


@dataclass
class _Attempt:
    task: Hashable
    of: _Task  # also when the task has ended
    kind: str
    started: float
    probe: bool = False
    late: bool = False


class Dispatcher:
    """Invocations of one graph server.

    Parameters
    ----------
    limit
        Invocations in flight at most, late ones not counted.
    rules
        As above.
    seed
        Of the jitter.

    Attributes
    ----------
    counters : Counters
    broken : str
        Why nothing is invoked, or empty.
    """

    def __init__(self, limit: int, rules: Rules | None = None, *, seed: int = 0) -> None:
        self._rules = rules or Rules()
        self._limit, self._window = limit, float(limit)
        self._random = random.Random(seed)
        self._tasks: dict[Hashable, _Task] = {}
        self._attempts: dict[int, _Attempt] = {}
        self._queue: list[tuple[tuple[int, ...], int, Hashable]] = []
        self._clock: list[tuple[float, int, str, Hashable]] = []  # what is to be looked at when
        self._serial = 0
        self._late = 0
        self._average: dict[str, float] = {}
        self._slowed_until = 0.0
        self._failed_in_a_row = 0
        self._succeeded_at = -math.inf
        self._throttle = ""
        self._probe_at = 0.0
        self._for_good = False
        self.broken = ""
        self.counters = Counters()
        self._actions: list[Action] = []

    # Events. Each returns what is to be done.

    def submit(self, now: float, task: Hashable, kind: str, priority: tuple[int, ...]) -> list[Action]:
        """A task is to be done."""
        self._tasks[task] = _Task(kind, priority, now)
        self.counters.tasks += 1
        self._put_in_queue(task)
        self._note(now + self._rules.patience, "task", task)
        return self._go_on(now)

    def accepted(self, now: float, task: Hashable) -> list[Action]:
        """A task's result is there. Attempts that still fly do not matter any more."""
        if not self._tasks.pop(task).here:
            self._failed_in_a_row, self._succeeded_at = 0, now
        return self._go_on(now)

    def returned(self, now: float, attempt: int, result: Result, message: str = "") -> list[Action]:
        """An invocation ended; the result of its task was told before, if there was one."""
        one = self._attempts.pop(attempt)
        self._late -= one.late
        task = self._tasks.get(one.task)
        if task is not None:
            task.flying.discard(attempt)
        if result is Result.SKIPPED:
            self.counters.invocations -= 1
            self._count_try(one.of, -1)
        elif result is Result.THROTTLED:
            self._throttled(now, one, task, message)
        elif result is Result.DONE and (task is None or task.here):
            self._succeeded(now, one)
        else:  # also one that ended well, but whose result nobody has
            self.counters.failures += 1
            if result is Result.DONE:
                message = message or "the function answers, but its results do not come"
            if result is Result.FATAL:
                self._break(message, for_good=True)
            elif task is not None and not one.late:  # a late one was counted when it became that
                self._failed(now, message)
            if task is not None and not one.late:
                self._again(now, one.task, task)
        return self._go_on(now)

    def tick(self, now: float) -> list[Action]:
        """Time passed; see `next_time`."""
        while self._clock and self._clock[0][0] <= now:
            _, _, what, key = heappop(self._clock)
            if what == "attempt":
                self._look_at_attempt(now, key)
            elif what == "task":
                self._look_at_task(now, key)
            elif what == "queue" and key in self._tasks:
                self._put_in_queue(key)
        return self._go_on(now)

    def limit(self, now: float, number: int) -> list[Action]:
        """Another number of invocations may be in flight."""
        whole = self._window >= self._limit
        self._limit = number
        self._window = float(number) if whole else min(self._window, float(number))
        return self._go_on(now)

    def stop(self, now: float, reason: str) -> list[Action]:
        """Invoke nothing more."""
        self._break(reason, for_good=True)
        return self._go_on(now)

    @property
    def next_time(self) -> float | None:
        """When `tick` is to be called next; None: not before another event."""
        return self._clock[0][0] if self._clock else None

    @property
    def window(self) -> int:
        """Invocations that may be in flight now."""
        return max(1, int(self._window))

    @property
    def idle(self) -> bool:
        """Whether no task is left."""
        return not self._tasks

    def deadline(self, kind: str) -> float:
        """Return the seconds after which an attempt is late."""
        average = self._average.get(kind)
        if average is None:
            return self._rules.first
        return max(self._rules.floor, self._rules.ratio * average)

    # What follows from them.

    def _go_on(self, now: float) -> list[Action]:
        """Start what may start, and hand out the actions."""
        if self.broken:
            if not self._for_good and now >= self._probe_at and self._flying == 0 and self._invoke_next(now):
                self._probe_at = now + self._rules.probe
            for key, task in self._tasks.items():
                if all(self._attempts[one].late for one in task.flying):
                    self._fall_back(key)
            self._queue.clear()
        while self._flying < self.window and self._invoke_next(now):
            pass
        actions, self._actions = self._actions, []
        return actions

    @property
    def _flying(self) -> int:
        """Attempts that are not late."""
        return len(self._attempts) - self._late

    def _invoke_next(self, now: float) -> bool:
        while self._queue:
            _, _, key = heappop(self._queue)
            task = self._tasks.get(key)
            if task is None or task.here or not task.waiting:
                continue
            task.waiting = False
            self._serial += 1
            attempt = self._serial
            self._attempts[attempt] = _Attempt(key, task, task.kind, now, probe=bool(self.broken))
            task.flying.add(attempt)
            self.counters.invocations += 1
            self._count_try(task, 1)
            self.counters.most = max(self.counters.most, len(self._attempts))
            self._note(now + min(self._rules.floor, self.deadline(task.kind)), "attempt", attempt)
            self._actions.append(Invoke(key, attempt))
            return True
        return False

    def _count_try(self, task: _Task, change: int) -> None:
        """Add an attempt that was not throttled, or take one back."""
        task.tried += change
        if task.tried == (1 if change > 0 else 0):
            self.counters.invoked += change
        else:
            self.counters.retries += change

    def _put_in_queue(self, key: Hashable) -> None:
        task = self._tasks[key]
        task.waiting = True
        self._serial += 1
        heappush(self._queue, (task.priority, self._serial, key))

    def _note(self, when: float, what: str, key: Hashable) -> None:
        self._serial += 1
        heappush(self._clock, (when, self._serial, what, key))

    def _look_at_attempt(self, now: float, key: Hashable) -> None:
        """Is it late by what is known now? The average of its kind may have come since it started."""
        one = self._attempts.get(key)  # type: ignore[call-overload]
        if one is None or one.late:
            return
        task = self._tasks.get(one.task)
        if task is None:
            one.late = True  # nobody waits for it; its worker may be dead
            self._late += 1
            return
        seconds = self.deadline(task.kind)
        end = one.started + (min(self._rules.floor, seconds) if one.probe and self.broken else seconds)
        if now < end:
            self._note(min(end, now + self._rules.floor), "attempt", key)
            return
        one.late = True
        self._late += 1
        self.counters.timeouts += 1
        if task.tried > 1 and self._succeeded_at < one.started:  # not just slow, and not just for a moment
            self._failed(now, "no answer in time")
        self._again(now, one.task, task, pause=False)

    def _look_at_task(self, now: float, key: Hashable) -> None:
        task = self._tasks.get(key)
        if task is not None and not task.here and not task.flying:
            self._lose_patience(now, key, task)

    def _lose_patience(self, now: float, key: Hashable, task: _Task) -> None:
        """Do a task here that never ran; if no other had a result since it came, the next will not wait."""
        self._fall_back(key)
        if self._succeeded_at < task.born and not self._for_good:
            self._probe_at = now + self._rules.probe
            self._break(self._throttle or "nothing could be invoked", for_good=False)

    def _again(self, now: float, key: Hashable, task: _Task, *, pause: bool = True) -> None:
        if task.here or task.waiting:
            return
        if task.tried >= self._rules.attempts:
            if all(self._attempts[one].late for one in task.flying):
                self._fall_back(key)
        elif not self.broken:
            self._queue_later(now, key, task) if pause else self._put_in_queue(key)

    def _queue_later(self, now: float, key: Hashable, task: _Task) -> float:
        """Let a task wait before its next attempt; for how long."""
        longest = min(self._rules.longest_pause, self._rules.pause * 2**task.pauses)
        task.pauses += 1
        task.waiting = True
        pause = longest * (0.5 + 0.5 * self._random.random())
        self._note(now + pause, "queue", key)
        return pause

    def _throttled(self, now: float, one: _Attempt, task: _Task | None, message: str) -> None:
        self.counters.throttles += 1
        self._throttle = message
        self._count_try(one.of, -1)
        if now >= self._slowed_until:
            self._window = max(1.0, min(self._window, self._flying + 1.0) / 2)
            self._slowed_until = now + self._rules.pause
        if task is not None:
            patient = now - task.born < self._rules.patience and task.throttled < self.deadline(task.kind)
            if not patient and not task.flying:
                self._lose_patience(now, one.task, task)
            elif not one.late and not task.here and not task.waiting:
                task.throttled += self._queue_later(now, one.task, task)

    def _succeeded(self, now: float, one: _Attempt) -> None:
        self._failed_in_a_row, self._succeeded_at = 0, now
        if not self._for_good:
            self.broken = ""
        self._window = min(float(self._limit), self._window + 1.0 / max(1.0, self._window))
        # A late one counts as just late: one that was held up should not make all others seem quick, but
        # where all have become slow the deadline must follow.
        seconds = min(now - one.started, self.deadline(one.kind))
        old = self._average.get(one.kind, seconds)
        self._average[one.kind] = old + self._rules.smoothing * (seconds - old)

    def _failed(self, now: float, message: str) -> None:
        """One more attempt in a row has failed, or is late: a service that hangs returns nothing."""
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self._rules.breaker and not self._for_good:
            self._probe_at = now + self._rules.probe
            self._break(message, for_good=False)

    def _break(self, message: str, *, for_good: bool) -> None:
        self.broken = message or "the service is broken"
        self._for_good = self._for_good or for_good

    def _fall_back(self, key: Hashable) -> None:
        task = self._tasks[key]
        if not task.here:
            task.here, task.waiting = True, False
            self.counters.fallbacks += 1
            self._actions.append(FallBack(key))
