"""How many Lambda workers a graph server uses: as few as keep it from waiting for them.

The paper (Dorylus, OSDI '21, section 6) starts with min(intervals, 100) and looks at the queue of tasks for
the graph server's cores: if it grows, Lambdas are too fast for the cores, so there are too many; if it
drains, they are too slow, so there are too few; and where it is stable their number is right. Period, step
and damping are not published. What follows is a rule of our own in that spirit.

**What is looked at.** The number of intervals is fixed, so the queue cannot grow without end; but it does
drain, and that matters where it is the workers' fault: a core has nothing to do *while dense tasks wait for
a worker*. The share of an epoch's core time that is lost so, *starved*, is measured on the server itself. If
there is (almost) none, more workers are of no use: what waits for one while all cores are busy would only
wait for a core later. If there is some, more workers save at most that share. How much, only the *pace*
tells, the seconds a dense task: where the workers share a line or other cores, any number more may gain
nothing, and in a pipeline somebody else may be what is waited for. So a number of workers is

    enough   if starved <= 5 %, or if the pace is within 7.5 % of the best with more workers
    too few  otherwise

It is the pace of tasks, not of epochs, for with a lead the epochs that end and the work that is done differ
while the lead grows or shrinks.

**Steps.** One decision an epoch. The search keeps the smallest number known to be enough and the largest
below it known to be too few, and tries one in between until they are within a factor of 1.3, or 1 apart ::

    too few ......... tried next ......... enough

Between two known ones the next follows a line through both in pace over 1 / workers. With none known to be
too few, the mean number of workers in use says how far to go down: fewer than that will do only if tasks get
shorter where they are fewer, and whether they do is found by one careful step. With none known to be enough,
a starved server doubles, or goes on to what would end it if it starves for more than half of the time.

**What is not the workers' doing.** The search of one server slows down all others, and times vary. So an
epoch much slower than one before with as many workers is left out (three in a row are not), of the others
the middle one counts, and where a verdict is closer than epochs were seen to vary, up to three epochs are
looked at. With a lead, the first epoch after a change still shows the number before, and counts only
until there is a second.

**Then** the number stays, which from 100 workers is after 4 to 10 epochs. It is raised a little if five
epochs tell that it is too few after all: slower than the best by 10 % and what epochs vary, and more
starved than when it was chosen; a server that waits for another is slower, but not that. The search starts
again, from where it is, if for three epochs the pace has been another by 25 %, or the use of workers by 60 %:
another mode, another network. Noise of 10 % in epoch times does not start it.

Where whole epochs vary by that much and a shared line makes pace the only witness, a search of ten epochs can
end at too many workers. They cost money, not time.

The first epoch is not looked at: environments start cold, and it is exact in every mode. With a lead (S >= 1)
the second one is left out, too: it builds up the lead.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

FIRST = 100  # workers at the start, as in the paper

# Verdicts. Shares of the core time, or of the best pace.
NOT_STARVED = 0.05
CLOSE = 0.075  # slower than the best pace by at most this: still enough
DOUBTED = 0.10  # the same for what was settled on
FIRST_LOOK = (0.04, 0.35)  # slower by what is in between, in an epoch that shows the number before: unsure
VARIES = 0.02  # deviation of paces before any was seen; weighs as much as one pair
LOOKS, REMEMBERED = 3, 5  # epochs: the most to be sure, the last that count

# Steps. Ratios of numbers of workers.
NARROW = 1.3  # of enough to too few: the search ends
CAREFUL, BOLD = 1.5, 4.0  # of a step: down where all workers are in use, and the largest
AIM = 0.6  # at what share of CLOSE the next number between two is aimed
SAME = 1.1  # ratio of durations of tasks that are taken to be equal

# Changes. Ratios, and the epochs in a row that they last.
PACE, USE, PATIENCE = 1.25, 1.6, 3


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
        self.provisional = False  # all that is known is an epoch that shows the number before
        self.count, self.squares = 0, 0.0  # of epochs, and of their paces' relative distances from the mean
        self.typical: _Epoch
        self._last: deque[_Epoch] = deque(maxlen=REMEMBERED)

    @property
    def is_known(self) -> bool:
        """Whether there is an epoch that shows this number only."""
        return self.count > 0 and not self.provisional

    def add(self, epoch: _Epoch, *, provisional: bool) -> None:
        """Take another epoch. A provisional one counts while it is alone."""
        if provisional and self._last:
            return
        if self.provisional:
            self._last.clear()
        self.provisional = provisional
        self._last.append(epoch)
        self.count = len(self._last)
        mean = statistics.fmean(one.pace for one in self._last)
        self.squares = sum((one.pace / mean - 1) ** 2 for one in self._last)
        ordered = sorted(self._last, key=lambda one: one.pace)
        self.typical = ordered[(self.count - 1) // 2]


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
        self._differs = self._disturbed = 0
        self._chosen: _Epoch | None = None  # what the number was settled on for

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
        moved, self._moved = self._moved, False
        trial = self._trials.get(self.workers)
        if self.settled and self._has_changed(epoch):
            self._trials, self.settled, self._differs, trial = {}, False, 0, None
        if trial is None:
            trial = self._trials[self.workers] = _Trial()
        if not self.settled and trial.is_known and epoch.pace > PACE * trial.typical.pace:
            self._disturbed += 1
            if self._disturbed < PATIENCE:
                return self._stay("much slower than before with as many workers: not their doing")
        self._disturbed = 0
        trial.add(epoch, provisional=self._leads and moved)
        return self._watch() if self.settled else self._decide()

    def _stay(self, reason: str) -> Decision:
        return Decision(self.workers, reason)

    def _go(self, workers: int, reason: str, *, settled: bool = False) -> Decision:
        self._moved |= workers != self.workers
        self.workers, self.settled = workers, settled
        if settled:
            self._chosen = self._typical(workers) if workers in self._trials else None
        return Decision(workers, reason)

    def _has_changed(self, last: _Epoch) -> bool:
        """Whether the last epochs were all unlike the one for which the number was chosen."""
        known = self._chosen = self._chosen or last
        pace, used = last.pace / known.pace, last.used / max(known.used, 1e-9)
        differs = not 1 / PACE < pace < PACE or not 1 / USE < used < USE
        self._differs = self._differs + 1 if differs else 0
        return self._differs >= PATIENCE

    # Verdicts.

    def _typical(self, workers: int) -> _Epoch:
        return self._trials[workers].typical

    def _better(self, workers: int) -> list[_Trial]:
        """The trials with more workers, the provisional ones only if there are no others."""
        more = [trial for number, trial in self._trials.items() if number > workers]
        return [trial for trial in more if not trial.provisional] or more

    def _slower(self, workers: int) -> float | None:
        """By what share the pace is slower than the best with more workers; None: none were tried."""
        better = self._better(workers)
        if not better:
            return None
        best = min(trial.typical.pace for trial in better)
        top = max(self._trials)
        if top < self._most and self._typical(top).starved <= NOT_STARVED:
            # With even more, which nobody tried, this much could be saved.
            best = min(best, self._typical(top).pace * (1 - self._typical(top).starved))
        return self._typical(workers).pace / best - 1

    def _noise(self) -> float:
        """Relative deviation of the paces of epochs with the same number of workers."""
        squares = VARIES**2 + sum(trial.squares for trial in self._trials.values())
        return math.sqrt(squares / (1 + sum(trial.count - 1 for trial in self._trials.values())))

    def _is_enough(self, workers: int) -> bool:
        slower, trial = self._slower(workers), self._trials[workers]
        if trial.typical.starved <= NOT_STARVED:
            return True
        if slower is None:
            return workers == self._most
        return slower <= CLOSE

    def _is_unsure(self, workers: int) -> bool:
        slower, trial = self._slower(workers), self._trials[workers]
        if slower is None or trial.count >= LOOKS or trial.typical.starved <= NOT_STARVED:
            return False
        if trial.provisional:
            return FIRST_LOOK[0] < slower < FIRST_LOOK[1]
        best = min(self._better(workers), key=lambda one: one.typical.pace)
        deviation = self._noise() * math.sqrt(1 / trial.count + 1 / best.count)
        return abs(slower - CLOSE) < deviation

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
        if target == enough and few and self._is_unsure(few):
            return self._go(few, f"{self._told(few)}: close, one more epoch")
        if target == enough == self.workers and self._trials[enough].provisional:
            return self._stay(f"{self._told(enough)}: enough, if it stays so")
        if target == enough:
            return self._go(enough, f"{self._told(enough)}: enough, and fewer would not be", settled=True)
        if enough == self.workers:
            return self._go(target, f"{self._told(enough)}: enough, fewer")
        return self._go(target, f"{self._told(self.workers)}: too few")

    def _watch(self) -> Decision:
        """Stay with what was found, unless several epochs tell that it is too few after all."""
        trial, slower = self._trials[self.workers], self._slower(self.workers)
        # A server that waits for another one is slower as well, but not more starved than it was.
        starved = trial.typical.starved > NOT_STARVED
        if self._chosen is not None:
            starved = starved and trial.typical.starved > self._chosen.starved
        slow = slower > DOUBTED + self._noise() if slower is not None else self.workers < self._most
        if not (starved and slow and trial.count == REMEMBERED):
            return self._stay(f"{self._told(self.workers)}: settled")
        more = max(self.workers + 1, round(self.workers * NARROW))
        more = min(self._most, more, *(number for number in self._trials if number > self.workers))
        return self._go(more, f"{self._told(self.workers)}: too few after all", settled=True)

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
            target = min(enough / (CAREFUL + trial.starved), math.sqrt(floor * enough))
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
        wanted = min(trial.typical.pace for trial in self._trials.values()) * (1 + AIM * CLOSE)
        margin = (enough / few) ** 0.25
        if fast < wanted < slow:
            share = (wanted - fast) / (slow - fast)
            target = 1 / (1 / enough + share * (1 / few - 1 / enough))
        else:
            target = math.sqrt(few * enough)
        target = min(enough / margin, max(few * margin, target))
        return min(enough - 1, max(few + 1, round(target)))
