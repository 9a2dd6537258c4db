"""How many Lambda workers a graph server uses: as few as keep it from waiting for them.

The paper (Dorylus, OSDI '21, section 6) starts with min(intervals, 100) and looks at the queue of tasks for
the graph server's cores: if it grows, Lambdas are too fast for the cores, so there are too many; if it
drains, they are too slow, so there are too few; and where it is stable their number is right. Period, step
and damping are not published. What follows is a rule of our own in that spirit.

**What is looked at.** The number of intervals is fixed, so the queue cannot grow without end; but it does
drain, and that matters where it is the workers' fault: a core has nothing to do *while dense tasks wait for
a worker*. The share of an epoch's core time that is so lost, *starved*, is measured on the server itself. If
there is (almost) none, more workers are of no use: what waits for one while all cores are busy would only
wait for a core later. If there is some, more workers save at most that share. How much, only the *pace*
tells, the seconds a dense task: where the workers share a line or other cores, as many more as you like
gain nothing, and in a pipeline somebody else may be what is waited for. So a number of workers is

    enough   if starved <= 5 %, or if the pace is within 8 % of the best with more workers
    too few  otherwise

The pace is the best epoch's with that number: what slows single epochs, such as a straggler or the search
of another server, is no reason for more workers. Where the answer is close, a second epoch is waited for.

**Steps.** One decision an epoch. The search keeps the smallest number known to be enough and the largest
below it known to be too few, and tries one in between, until they are within a factor of 1.25 ::

    too few ......... tried next ......... enough             (1, 2 and 3 are all tried)

Between two known ones the next follows the line through both of pace over 1 / workers. Below all that is
known, the mean number of workers in use says where to look: fewer than that do only if their tasks get
shorter with less company. Whether they do is found by one careful step. Above all that is known,
a starved server doubles or, where it starves more than half of the time, goes on to what would end it.

From 100 workers that takes at most 8 epochs. Then the number stays, unless the pace or the use of workers has
been another for three epochs in a row (a switch of modes, a slower network): then the search starts again
from there. Noise of 10 % in epoch times does not start it.

The first epoch is not looked at: environments start cold, and it is exact in every mode. With a lead (S >= 1)
the second one is left out, too: it builds up the lead.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

FIRST = 100  # workers at the start, as in the paper
NOT_STARVED = 0.05  # share of the core time
CLOSE = 0.07  # slower than the best pace: still enough
UNSURE = (0.04, 0.12)  # slower by a share in between: a second epoch decides
UNSURE_LEADING = 0.35
REMEMBERED = 5
NARROW = 1.3  # ratio of enough and too few at which the search ends
CAREFUL, BOLD = 1.5, 4.0  # the least step down where workers are in use, and the largest where they are not
SAME = 1.1  # ratio of durations of tasks that are taken to be equal
CHANGED, USED, PATIENCE = 1.25, 1.6, 3  # ratio of the pace, of the use, and epochs for which they must last


@dataclass(frozen=True)
class Observation:
    """What a graph server saw in an epoch, as integrals over time.

    Attributes
    ----------
    seconds
        Of the epoch.
    dense_running, dense_ready
        Dense tasks that run, and that wait for nothing but a worker: tasks times seconds.
    cpu_running, cpu_ready
        The same of the tasks of the server's cores.
    starved
        Seconds, times the share of the cores that are idle, while a dense task waits for a worker.
    dense_ended
        Dense tasks that ended.
    """

    seconds: float
    dense_running: float
    dense_ready: float
    cpu_running: float
    cpu_ready: float
    starved: float
    dense_ended: int


@dataclass(frozen=True)
class Decision:
    """How many workers to use from now on, and why."""

    workers: int
    reason: str


class Integrals:
    """Adds up what an `Observation` has, from events.

    Parameters
    ----------
    cores
        Tasks that the server's own cores run at a time.
    now
        Seconds by any clock that does not go back.

    Attributes
    ----------
    dense_ended : int
        Dense tasks that have ended since the last `take`; whoever sees one end adds 1.
    """

    def __init__(self, cores: int, now: float) -> None:
        self._cores = cores
        self._began = self._since = now
        self._counts = (0, 0, 0, 0, 0.0)
        self._sums = [0.0] * 5
        self.dense_ended = 0

    def note(
        self, now: float, *, dense_running: int, dense_ready: int, cpu_running: int, cpu_ready: int
    ) -> None:
        """From now on so many tasks run and wait."""
        if now > self._since:
            self._add(now)
        idle = self._cores - cpu_running
        starved = idle / self._cores if dense_ready and idle > 0 else 0.0
        self._counts = (dense_running, dense_ready, cpu_running, cpu_ready, starved)

    def _add(self, now: float) -> None:
        seconds = now - self._since
        self._sums = [total + seconds * count for total, count in zip(self._sums, self._counts, strict=True)]
        self._since = now

    def take(self, now: float) -> Observation:
        """Return what was since the last time, and begin anew."""
        self._add(now)
        running, ready, cpu_running, cpu_ready, starved = self._sums
        seen = Observation(
            seconds=now - self._began,
            dense_running=running,
            dense_ready=ready,
            cpu_running=cpu_running,
            cpu_ready=cpu_ready,
            starved=starved,
            dense_ended=self.dense_ended,
        )
        self._began, self._sums, self.dense_ended = now, [0.0] * 5, 0
        return seen


@dataclass(frozen=True)
class _Epoch:
    pace: float  # seconds a dense task
    starved: float  # share of the core time
    used: float  # mean number of workers
    duration: float  # of a dense task


class _Trial:
    """What is known of a number of workers: its last epochs, and the typical one of them."""

    def __init__(self) -> None:
        self.count = 0
        self.typical: _Epoch
        self._last: deque[_Epoch] = deque(maxlen=REMEMBERED)
        self.provisional = False

    def add(self, epoch: _Epoch, *, provisional: bool) -> None:
        """Take another epoch. One in which the last number still shows counts while it is alone."""
        self.count += 1
        if provisional and self._last:
            return
        if self.provisional:
            self._last.clear()
        self.provisional = provisional
        self._last.append(epoch)
        ordered = sorted(self._last, key=lambda one: one.pace)
        self.typical = ordered[(len(ordered) - 1) // 2]


class Autotuner:
    """Chooses the number of workers of one graph server, epoch by epoch.

    Parameters
    ----------
    intervals
        Dense tasks that the server can have at a time: more workers are never of use.
    max_workers
        The most workers to use.
    lead
        S of the asynchronous mode, else 0.

    Attributes
    ----------
    workers : int
        To use now.
    settled : bool
        Whether the search is over.
    """

    def __init__(self, intervals: int, max_workers: int, *, lead: int = 0) -> None:
        if intervals < 1 or max_workers < 1 or lead < 0:
            raise ValueError(
                "an autotuner needs an interval, a worker and no negative lead, "
                f"got intervals {intervals}, max_workers {max_workers}, lead {lead}"
            )
        self._most = min(intervals, max_workers)
        self.workers = min(self._most, FIRST)
        self.settled = False
        self._leads, self._moved = lead > 0, False
        self._left_out = 1 + self._leads
        self._trials: dict[int, _Trial] = {}
        self._differs = 0

    def observe(self, seen: Observation) -> Decision:
        """Take what the epoch was that just ended; return what to do in the next."""
        if not seen.dense_ended or seen.seconds <= 0:
            return self._stay("no dense task ended")
        if self._left_out:
            self._left_out -= 1
            return self._stay("the first epochs are not like the others")
        epoch = _Epoch(
            pace=seen.seconds / seen.dense_ended,
            starved=seen.starved / seen.seconds,
            used=seen.dense_running / seen.seconds,
            duration=seen.dense_running / seen.dense_ended,
        )
        if self.settled and self._has_changed(self._trials[self.workers].typical, epoch):
            self._trials, self.settled, self._differs = {}, False, 0
        trial = self._trials.setdefault(self.workers, _Trial())
        trial.add(epoch, provisional=self._leads and self._moved)
        self._moved = False
        return self._decide()

    def _stay(self, reason: str) -> Decision:
        return Decision(self.workers, reason)

    def _go(self, workers: int, reason: str, *, settled: bool = False) -> Decision:
        self._moved |= workers != self.workers
        self.workers, self.settled = workers, settled
        return Decision(workers, reason)

    def _has_changed(self, known: _Epoch, last: _Epoch) -> bool:
        """Whether the last epochs were all unlike those for which the number was chosen."""
        pace, used = last.pace / known.pace, last.used / known.used
        differs = not 1 / CHANGED < pace < CHANGED or not 1 / USED < used < USED
        self._differs = self._differs + 1 if differs else 0
        return self._differs >= PATIENCE

    # Verdicts.

    def _typical(self, workers: int) -> _Epoch:
        return self._trials[workers].typical

    def _slower(self, workers: int) -> float | None:
        """By what share the pace is slower than the best with more workers; None: none were tried."""
        more = [trial for number, trial in self._trials.items() if number > workers]
        known = [trial for trial in more if not trial.provisional] or more
        paces = [trial.typical.pace for trial in known]
        return self._typical(workers).pace / min(paces) - 1 if paces else None

    def _is_enough(self, workers: int) -> bool:
        slower = self._slower(workers)
        if self._typical(workers).starved <= NOT_STARVED:
            return True
        if slower is None:
            return workers == self._most
        return slower <= (UNSURE[1] if self.settled and workers == self.workers else CLOSE)

    def _is_unsure(self, workers: int) -> bool:
        slower, trial = self._slower(workers), self._trials[workers]
        if slower is None or trial.count > 1 or trial.typical.starved <= NOT_STARVED:
            return False
        return UNSURE[0] < slower < (UNSURE_LEADING if self._leads else UNSURE[1])

    # The search.

    def _decide(self) -> Decision:
        if self._is_unsure(self.workers):
            return self._stay(f"{self._told(self.workers)}: close, one more epoch")
        enough = min((number for number in self._trials if self._is_enough(number)), default=None)
        if enough is None:
            top = max(self._trials)
            return self._go(self._above(top), f"{self._told(top)}: more")
        few = max((number for number in self._trials if number < enough), default=0)
        target = self._below(enough) if not few else self._between(few, enough)
        if target == enough:
            return self._go(enough, f"{self._told(enough)}: enough, and fewer would not be", settled=True)
        if enough == self.workers:
            return self._go(target, f"{self._told(enough)}: enough, fewer")
        return self._go(target, f"{self._told(self.workers)}: too few")

    def _told(self, workers: int) -> str:
        trial, slower = self._typical(workers), self._slower(workers)
        text = f"{workers} workers, {trial.used:.1f} in use, starved {trial.starved:.1%}"
        return text if slower is None else f"{text}, {slower:+.1%} to the best pace with more"

    def _above(self, workers: int) -> int:
        starved = self._typical(workers).starved
        step = min(BOLD, max(2.0, 1 / (1 - min(starved, 0.99))))
        return min(self._most, math.ceil(workers * step))

    def _below(self, enough: int) -> int:
        """What to try where nothing is known to be too few; `enough` itself if nothing is worth a trial."""
        trial = self._typical(enough)
        floor = trial.used / (1 + CLOSE)  # of workers whose tasks get no shorter
        shortens = self._shortens(enough)
        if shortens:
            target = min(enough / 2, math.sqrt(floor * enough))
        elif floor * CAREFUL <= enough:
            target = math.sqrt(floor * enough)
        elif shortens is None:
            target = enough / CAREFUL
        else:
            target = floor if floor * NARROW <= enough else enough
        return min(enough, max(1, round(max(target, enough / BOLD))))

    def _shortens(self, workers: int) -> bool | None:
        """Whether tasks were longer with more workers; None: not known."""
        more = [number for number in self._trials if number >= workers * NARROW]
        if not more:
            return None
        return self._typical(min(more)).duration > SAME * self._typical(workers).duration

    def _between(self, few: int, enough: int) -> int:
        """What to try between two; `enough` if it is no use."""
        if enough <= few * NARROW or enough == few + 1:
            return enough
        slow, fast = self._typical(few).pace, self._typical(enough).pace
        best = min(trial.typical.pace for trial in self._trials.values())
        wanted = best * (1 + CLOSE / 2)
        margin = (enough / few) ** 0.25
        low, high = few * margin, enough / margin
        if slow > fast:
            slope = (slow - fast) / (1 / few - 1 / enough)
            inverse = 1 / enough + (wanted - fast) / slope
            target = 1 / inverse if inverse > 0 else high
        else:
            target = high
        return min(enough - 1, max(few + 1, round(min(high, max(low, target)))))
