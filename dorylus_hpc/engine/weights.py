"""Weights: where they are owned and served, and how a graph server gets them.

    graph server   --- bind ----->  weight server   an interval wants weights, of this version or later
                   <-- grant ----                   the version it got, and the weights if they are new here
                   --- release -->                  its backward is done
                   --- push ----->  owner           gradients of a part (or of an interval, at once)
    owner          --- publish -->  weight servers  its tensors after all gradients of an epoch

Each tensor has one owner; every weight server has all of them, to read. An interval binds to one server and
one version a round, for all layers, forward and backward; the version is kept for it (weight stashing). With
no parameter servers the graph servers are weight servers too: the same letters, some to oneself.

Reference: Dorylus (OSDI '21), section 5.1 and 6.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from dorylus_hpc.comm.mailbox import Letter, Letters, Mailbox
from dorylus_hpc.engine.stash import VersionStore
from dorylus_hpc.nn.optim import Optimizer
from dorylus_hpc.nn.params import FlatLayout
from dorylus_hpc.report.trace import Tracer

NEVER = -1  # in place of a version: no weights will come
NOBODY = -1  # in place of a unit: all are meant
LAST = -1  # in place of an epoch: the weights after the last gradient


class Verdict(IntEnum):
    """What rank 0 decides on an evaluation."""

    GO_ON = 0
    STOP = 1
    SWITCH = 2  # from async to pipe


class WeightShard:
    """The latest weights, and the optimizer state of those owned here.

    Parameters
    ----------
    layout
        The flat vector and its owners.
    owner
        Which of the owners this is.
    optimizer
        Applied elementwise, so the cut into owners changes no bit.
    initial
        Flat start weights. Not changed.

    Attributes
    ----------
    steps
        Number of updates applied.
    flat
        The latest weights; the segments of other owners are to be filled in.
    segment
        (start, stop) of the owned ones.
    """

    def __init__(self, layout: FlatLayout, owner: int, optimizer: Optimizer, initial: np.ndarray) -> None:
        self.steps = 0
        self.flat = initial.copy()
        self.segment = layout.segments[owner]
        self._optimizer = optimizer
        views = layout.views(self.flat)
        self._owned = [
            (spec, start - self.segment[0], views[spec.name].reshape(-1))
            for spec, start, tensor_owner in zip(layout.specs, layout.offsets, layout.owners, strict=True)
            if tensor_owner == owner
        ]
        self._state = {spec.name: optimizer.init(spec.size, initial.dtype) for spec, _, _ in self._owned}
        self._sum = np.zeros(self.segment[1] - self.segment[0], initial.dtype)

    @property
    def own(self) -> np.ndarray:
        """The owned segment of the latest weights."""
        return self.flat[slice(*self.segment)]

    def apply(self, partials: Sequence[np.ndarray] | np.ndarray, *, share: float = 1.0) -> None:
        """Apply one update.

        Parameters
        ----------
        partials : sequence of ndarray, each (segment,)
            They are added in this order, whatever order they came in.
        share
            Of the whole gradient; weight decay counts by it, so that the steps of an epoch decay as one.
        """
        self._sum[...] = 0
        for partial in partials:
            np.add(self._sum, partial, out=self._sum)
        self.steps += 1
        for spec, start, parameter in self._owned:
            gradient = self._sum[start : start + spec.size]
            if spec.average:
                np.add(parameter * (1 - spec.average), gradient * spec.average, out=parameter)
                continue
            self._optimizer.step(
                parameter, gradient, self._state[spec.name], self.steps, weight_decay=spec.decay * share
            )


@dataclass(frozen=True)
class Service:
    """What all ranks of a run know of its weights.

    Attributes
    ----------
    servers
        Ranks of the weight servers, by owner.
    clients
        Ranks of the graph servers.
    layout
        Of the flat vector.
    n_parts
        Parts of the graph.
    n_intervals
        Intervals of all parts.
    epochs
        At most.
    readers
        Ranks that want a version of before the last epoch, to evaluate it or to keep the best.
    judged
        Whether rank 0 must judge the evaluation of a version before exact training may go beyond it.
    """

    servers: tuple[int, ...]
    clients: tuple[int, ...]
    layout: FlatLayout
    n_parts: int
    n_intervals: int
    epochs: int
    readers: Callable[[int], Sequence[int]]
    judged: Callable[[int], bool]

    def home(self, client: int) -> int:
        """Return the weight server that sends a graph server what is to be evaluated."""
        return self.servers[client % len(self.servers)]


class WeightServer:
    """A rank that owns weights and serves all of them; it acts on letters.

    Parameters
    ----------
    mailbox
        Of this rank.
    service
        Of the run.
    shard
        What is owned here.
    tracer
        Takes the updates.

    Attributes
    ----------
    update_seconds : float
        Time spent in updates.
    most_versions : int
        The most versions kept at a time.
    finished : bool
        All graph servers have ended a phase and were told the weights after it.
    verdict : Verdict
        What rank 0 said last.
    outcome : Verdict
        What the graph servers have heard, all together: the same on all weight servers when finished.
    """

    def __init__(self, mailbox: Mailbox, service: Service, shard: WeightShard, tracer: Tracer) -> None:
        self._tracer = tracer
        self.update_seconds = 0.0
        self.most_versions = 1
        self.finished = True
        self.verdict = self.outcome = Verdict.GO_ON
        self._mailbox, self._service, self._shard = mailbox, service, shard
        self._others = [rank for rank in service.servers if rank != mailbox.rank]
        self._owners = {
            rank: segment
            for rank, segment in zip(service.servers, service.layout.segments, strict=True)
            if segment[0] < segment[1]
        }
        self._clients = [rank for rank in service.clients if service.home(rank) == mailbox.rank]
        self._spare: list[np.ndarray] = []
        self._complete = self._base = (
            0  # epochs after which all weights are known here; at the start of a phase
        )
        self._later: list[Letter] = []  # of the next phase
        self._published: defaultdict[int, dict[int, np.ndarray]] = defaultdict(dict)  # by epoch and owner
        self._last = shard.flat.copy()

    def begin(self, *, exact: bool, at_once: bool) -> None:
        """Start a phase from the last weights.

        Parameters
        ----------
        exact
            Rank 0 may hold it back.
        at_once
            Gradients are applied as they come, and not an epoch at a time.
        """
        self._exact, self._at_once = exact, at_once
        self.finished = False
        self._base = self._complete
        self.verdict = Verdict.GO_ON
        self._store = VersionStore(self._complete)
        self._flats = {self._complete: self._last}
        self._asking: list[tuple[int, int, int]] = []
        self._held: Counter[tuple[int, int]] = Counter()  # units of a rank that are bound to a version
        self._epoch = self._complete  # whose gradients are all applied here
        self._partials: dict[int, np.ndarray] = {}
        self._pushed: Counter[int] = Counter()
        self._changed = False
        self.outcome = Verdict.GO_ON
        self._judged = self._complete - 1
        self._done: dict[int, int] = {}
        self._final: dict[int, np.ndarray] = {}
        if self._complete == 0:
            self._tell_readers(0, self._last)
        later, self._later = self._later, []
        for letter in later:
            self.handle(letter)

    def handle(self, letter: Letter) -> None:
        """Act on a letter to a weight server."""
        numbers = letter.numbers
        if letter.kind in _FROM_CLIENTS and (self.finished or letter.source in self._done):
            self._later.append(letter)
            return
        if letter.kind in _BETWEEN_PHASES and numbers[_BETWEEN_PHASES[letter.kind]] > self._base:
            self._later.append(letter)  # others may be in the next phase: none of them waits for this server
            return
        match letter.kind:
            case Letters.BIND:
                self._asking.append((letter.source, numbers[0], numbers[1]))
                self._grant()
            case Letters.RELEASE:
                self._release(letter.source, numbers[0])
            case Letters.PUSH:
                self._push(numbers[0], numbers[1], letter.data)
            case Letters.PUBLISH:
                self._publish(numbers[0], letter.source, letter.data)
            case Letters.UPDATE:
                self._shard.flat[slice(*self._owners[letter.source])] = letter.data
                self._changed = True
            case Letters.VERDICT:
                if numbers[2] == self._base and not self.finished:  # else of a phase that has ended
                    self._judge(numbers[0], Verdict(numbers[1]))
            case Letters.DONE:
                self._end(letter.source, numbers[0], Verdict(numbers[1]))

    @property
    def epochs(self) -> int:
        """Epochs behind the last weights."""
        return self._complete

    # Binding.

    def _grant(self) -> None:
        if self._changed and self._asking:
            self._changed = False
            flat = self._room()
            flat[...] = self._shard.flat
            self._keep(self._store.newest + 1, flat)
        asking, self._asking = self._asking, []
        for client, unit, least in asking:
            # In exact modes a verdict on a version comes when the epoch that starts from it runs somewhere;
            # those that wait for its rows would wait for ever for a rank that had no weights for it.
            if self.verdict is not Verdict.GO_ON and not (self._exact and least <= self._judged):
                self._mailbox.send(client, Letters.GRANT, unit, NEVER, self._store.load, int(self.verdict))
                continue
            version = self._store.bind((client, unit), 0 if self._at_once else least)
            if version is None:
                self._asking.append((client, unit, least))
                continue
            self._held[client, version] += 1
            data = self._flats[version] if self._held[client, version] == 1 else None
            self._mailbox.send(client, Letters.GRANT, unit, version, self._store.load, data=data)

    def _release(self, client: int, unit: int) -> None:
        version = self._store.version_of((client, unit))
        self._held[client, version] -= 1
        if not self._held[client, version]:
            del self._held[client, version]
        self._free(self._store.release((client, unit)))

    def _keep(self, number: int, flat: np.ndarray) -> None:
        """Make a version the newest; its array is not the caller's any more."""
        self._flats[number] = flat
        self._free(self._store.publish(number))
        self.most_versions = max(self.most_versions, len(self._store.live))

    def _free(self, versions: Sequence[int]) -> None:
        self._spare += [self._flats.pop(version) for version in versions]

    def _room(self) -> np.ndarray:
        return self._spare.pop() if self._spare else np.empty_like(self._shard.flat)

    # Updates.

    def _push(self, epoch: int, part: int, gradient: np.ndarray) -> None:
        if self._at_once:
            self._update([gradient], share=1.0 / self._service.n_intervals)
            self._changed = True
            for rank in self._others:
                self._mailbox.send(rank, Letters.UPDATE, data=self._shard.own)
        else:
            if epoch not in self._partials:
                self._partials[epoch] = np.empty((self._service.n_parts, len(gradient)), gradient.dtype)
            self._partials[epoch][part] = gradient
        wanted = self._service.n_intervals if self._at_once else self._service.n_parts
        self._pushed[epoch] += 1
        if self._pushed[epoch] > wanted:
            raise RuntimeError(f"gradients of epoch {epoch} of part {part} came twice")
        while self._pushed[self._epoch + 1] == wanted:
            self._epoch += 1
            del self._pushed[self._epoch]
            if not self._at_once:
                self._update(self._partials.pop(self._epoch))
            for rank in self._others:
                self._mailbox.send(rank, Letters.PUBLISH, self._epoch, self._base, data=self._shard.own)
            self._publish(self._epoch, self._mailbox.rank, self._shard.own.copy())
        self._grant()

    def _update(self, gradients: Sequence[np.ndarray] | np.ndarray, share: float = 1.0) -> None:
        start = time.perf_counter()
        self._shard.apply(gradients, share=share)
        end = time.perf_counter()
        self.update_seconds += end - start
        self._tracer.task("WU", start, end, self._tracer.lane("weights"), epoch=self._epoch)

    def _publish(self, epoch: int, owner: int, segment: np.ndarray) -> None:
        if epoch == LAST:
            self._final[owner] = segment
        else:
            self._published[epoch][owner] = segment
        self._advance()

    def _judge(self, version: int, verdict: Verdict) -> None:
        self._judged, self.verdict = version, verdict
        if not self._exact:  # units that wait for slower ones would not ask
            for rank in self._clients:
                self._mailbox.send(rank, Letters.GRANT, NOBODY, NEVER, self._store.load, int(verdict))
        self._advance()

    def _advance(self) -> None:
        """Take the epochs after which all weights are known, as far as rank 0 lets the run go on."""
        while not self.finished and len(self._published.get(self._complete + 1, ())) == len(self._owners):
            epoch = self._complete + 1
            if self._exact and self._service.judged(epoch - 1) and self._judged < epoch - 1:
                break
            flat = self._assemble(self._published.pop(epoch), self._room())
            self._complete = epoch
            if epoch < self._service.epochs:
                self._tell_readers(epoch, flat)
            if self._at_once:
                self._spare.append(flat)
            else:
                self._keep(epoch, flat)
        self._grant()
        self._finish()

    def _assemble(self, segments: dict[int, np.ndarray], flat: np.ndarray) -> np.ndarray:
        for owner, segment in segments.items():
            flat[slice(*self._owners[owner])] = segment
        return flat

    def _tell_readers(self, version: int, flat: np.ndarray) -> None:
        for rank in self._service.readers(version):
            if rank in self._clients:
                self._mailbox.send(rank, Letters.SNAPSHOT, version, data=flat)

    # The end of a phase.

    def _end(self, client: int, done: int, heard: Verdict) -> None:
        self._done[client] = done
        self.outcome = max(self.outcome, heard)
        if len(self._done) == len(self._service.clients) and self._at_once:
            # The weights after the last gradient, which may be of an epoch that was not ended.
            for rank in self._others:
                if self._mailbox.rank in self._owners:
                    self._mailbox.send(rank, Letters.PUBLISH, LAST, self._base, data=self._shard.own)
            if self._mailbox.rank in self._owners:
                self._final[self._mailbox.rank] = self._shard.own.copy()
        self._finish()

    def _finish(self) -> None:
        """Tell the graph servers the last weights, once they all have ended and these are known here."""
        if self.finished or len(self._done) < len(self._service.clients):
            return
        if self._complete < min(self._done.values()):
            return
        if self._at_once:
            if len(self._final) < len(self._owners):
                return
            self._last = self._assemble(self._final, self._room())
        else:
            self._last = self._flats[self._store.newest]
        if self._store.load:
            raise RuntimeError(f"{self._store.load} intervals are still bound to weights after the end")
        for start, stop in [segment for rank, segment in self._owners.items() if rank != self._mailbox.rank]:
            self._shard.flat[start:stop] = self._last[start:stop]
        self.finished = True
        for rank in self._clients:
            self._mailbox.send(rank, Letters.FINAL, self._complete, int(self.outcome), data=self._last)


_FROM_CLIENTS = (Letters.BIND, Letters.RELEASE, Letters.PUSH, Letters.DONE)
_BETWEEN_PHASES = {Letters.PUBLISH: 1, Letters.VERDICT: 2}  # which number tells the first epoch of the phase


class WeightClient:
    """A graph server's side: which unit is bound to which weights.

    Parameters
    ----------
    mailbox
        Of this rank.
    service
        Of the run.
    """

    def __init__(self, mailbox: Mailbox, service: Service) -> None:
        self._mailbox, self._service = mailbox, service
        self._owners = list(zip(service.servers, service.layout.segments, strict=True))
        self._load = dict.fromkeys(service.servers, 0)
        self._asked: Counter[int] = Counter()  # binds under way, by server
        self._bound: dict[int, tuple[int, int]] = {}  # (server, version) of a unit
        self._kept: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self._users: Counter[tuple[int, int]] = Counter()
        self._shared: dict[int, list[int]] = {}  # units that wait for one binding, by version
        self._holders: dict[int, tuple[int, int]] = {}  # bindings that are shared, by version
        self._leaders: dict[tuple[int, int], int] = {}  # in whose name
        self._heard = Verdict.GO_ON

    def ask(self, unit: int, least: int, *, exact: bool) -> bool | None:
        """Get weights for a unit.

        Parameters
        ----------
        unit
            Not bound.
        least
            The version it needs, or a later one will do.
        exact
            Only that one will do: units then share one binding of this rank, and its letters.

        Returns
        -------
        True if the unit has them now; None if they are asked for.
        """
        if exact:
            if least in self._holders:
                self._bound[unit] = self._holders[least]
                self._users[self._holders[least]] += 1
                return True
            waiting = self._shared.setdefault(least, [])
            waiting.append(unit)
            if len(waiting) > 1:
                return None

        def load(server: int) -> tuple[int, int]:
            turn = (server - self._mailbox.rank) % (max(self._service.servers) + 1)
            return self._load[server] + self._asked[server], turn

        server = min(self._service.servers, key=load)
        self._asked[server] += 1
        self._mailbox.send(server, Letters.BIND, unit, least)
        return None

    def granted(self, letter: Letter) -> tuple[list[int], bool]:
        """Take a server's answer; return the units it is for (none: all), and whether they have weights."""
        unit, version, load, verdict = letter.numbers[:4]
        server = letter.source
        self._load[server] = load
        self._heard = max(self._heard, Verdict(verdict))
        if unit == NOBODY:
            return [], False
        self._asked[server] -= 1
        sharing = next((least for least, units in self._shared.items() if unit in units), None)
        units = [unit] if sharing is None else self._shared.pop(sharing)
        if version != NEVER:
            key = (server, version)
            if letter.data.size:
                self._kept[key] = self._service.layout.views(letter.data)
            for one in units:
                self._bound[one] = key
            self._users[key] += len(units)
            if sharing is not None:
                self._holders[version], self._leaders[key] = key, unit
        self._forget(server)
        return units, version != NEVER

    def weights(self, unit: int) -> dict[str, np.ndarray]:
        """Return the weights a unit is bound to; empty if it is not."""
        return self._kept[self._bound[unit]] if unit in self._bound else {}

    def version(self, unit: int) -> str:
        """Return the name of the version a unit is bound to; empty if it is not."""
        return "{}.{}".format(*self._bound[unit]) if unit in self._bound else ""

    def release(self, unit: int) -> None:
        """End a unit's binding."""
        key = self._bound.pop(unit)
        server, version = key
        self._users[key] -= 1
        if key in self._leaders:
            if self._users[key]:
                return
            unit = self._leaders.pop(key)
            del self._holders[version]
        self._mailbox.send(server, Letters.RELEASE, unit)
        self._load[server] -= 1
        self._forget(server)

    def push(self, epoch: int, part: int, gradient: np.ndarray) -> None:
        """Send gradients to the owners."""
        for server, (start, stop) in self._owners:
            if start < stop:
                self._mailbox.send(server, Letters.PUSH, epoch, part, data=gradient[start:stop])

    def end(self, done: int) -> None:
        """Tell every server that this rank has done its epochs and wants nothing more."""
        for server in self._service.servers:
            self._mailbox.send(server, Letters.DONE, done, int(self._heard))
        self._heard = Verdict.GO_ON

    def _forget(self, server: int) -> None:
        """Drop weights without users. While a bind is under way the server may count on them."""
        if not self._asked[server]:
            for key in [key for key in self._kept if key[0] == server and not self._users[key]]:
                del self._kept[key], self._users[key]
