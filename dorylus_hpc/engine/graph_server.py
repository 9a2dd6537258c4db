"""A graph server's life: it trains in phases, evaluates beside, and reports to rank 0.

A phase is one schedule over many epochs. There is one, unless rank 0 decides that an asynchronous run is to
end exactly: then the first ends where it is, all agree on the last whole epoch, and a second goes on in
`pipe` from there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import numpy as np

from dorylus_hpc.comm.mailbox import Letter, Letters, Mailbox
from dorylus_hpc.config import TrainConfig
from dorylus_hpc.engine.executor import Delayed
from dorylus_hpc.engine.recorder import Account
from dorylus_hpc.engine.registrar import Registrar, pack_results, unpack_results
from dorylus_hpc.engine.runner import Runner
from dorylus_hpc.engine.schedule import Epochs, Mode
from dorylus_hpc.engine.tuning import Tuning
from dorylus_hpc.engine.weights import Service, Verdict, WeightClient, WeightServer
from dorylus_hpc.serverless.tasks import DenseTask

if TYPE_CHECKING:
    from dorylus_hpc.serverless.controller import Controller


class Evaluations:
    """Forwards without dropout, one after the other, of the weights that come.

    Parameters
    ----------
    runner
        Makes the tasks.
    most
        Evaluations at most.
    report
        Called with (version, part) when a part has done one.
    rest
        Called when all weights that came are evaluated here.
    """

    def __init__(
        self, runner: Runner, most: int, report: Callable[[int, int], None], rest: Callable[[], None]
    ) -> None:
        self.versions: list[int] = []
        self._runner, self._report, self._rest = runner, report, rest
        self._weights: list[Mapping[str, np.ndarray]] = []
        self._waiting: list[tuple[int, int]] = []
        self._left: Counter[int] = Counter()
        self._done = 0
        rounds = Epochs("evaluate", 1, most, trains=False)
        line = runner.evaluation
        line.expects = False
        runner.loop.do(line, runner.begin(line, "evaluate", "pipe", rounds, self))

    @property
    def idle(self) -> bool:
        """Whether all weights that came are evaluated here."""
        return self._done == len(self.versions)

    def add(self, version: int, weights: Mapping[str, np.ndarray]) -> None:
        """Evaluate these too."""
        number = len(self.versions)
        self.versions.append(version)
        self._weights.append(weights)
        self._left[number] = len(self._runner.parts)
        self._hurry()
        waiting, self._waiting = self._waiting, []
        for unit, wanted in waiting:
            if wanted < len(self._weights):
                schedule = self._runner.evaluation.schedule
                assert schedule is not None
                self._runner.loop.do(self._runner.evaluation, schedule.bound(unit))
            else:
                self._waiting.append((unit, wanted))

    def task(self, unit: int, number: int, group: int) -> Callable[[], None] | Delayed | DenseTask:
        """Make a task."""
        weights = self._weights[number] if number < len(self._weights) else {}  # not all groups need them
        version = f"e{self.versions[number]}" if weights else ""
        return self._runner.task("evaluate", unit, number, group, weights, 0, version)

    def bind(self, unit: int, number: int, least: int) -> bool | None:
        """Give the weights of a round, if they have come."""
        if number < len(self._weights):
            return True
        self._waiting.append((unit, number))
        return None

    def release(self, unit: int, number: int) -> None:
        """The weights are kept until all parts are through."""

    def complete(self, part: int, number: int) -> None:
        """Report what a part found."""
        self._report(number, part)
        self._left[number] -= 1
        if not self._left[number]:
            self._weights[number] = {}
            self._done += 1
            self._hurry()
            if self.idle:
                self._rest()

    def install(self, table: int, unit: int) -> None:
        """Evaluations write where they read."""

    def progress(self, done: int) -> None:
        """Nobody is told."""

    def _hurry(self) -> None:
        """Where evaluations come faster than idle workers do them, they no longer wait for such."""
        self._runner.evaluation.urgent = len(self.versions) - self._done > 1
        self._runner.evaluation.expects = not self.idle


class GraphServer:
    """A graph server in a run; it acts on letters and on what its schedules want.

    Parameters
    ----------
    runner
        The hosted parts.
    mailbox
        Of this rank.
    service
        The weights.
    server
        The weights that this rank owns, if any.
    config
        Of the run, resolved.
    evaluates
        Whether weights of before the last are evaluated by forwards of their own.
    registrar
        On rank 0.
    controller
        Of dense tasks in Lambda, if there is one.
    tuning
        Of the number of its workers, if that is not fixed.
    in_turn
        An epoch does not begin before evaluations of weights that came before its own have ended. This must
        be the only graph server, and weights must come from one rank.
    """

    def __init__(
        self,
        runner: Runner,
        mailbox: Mailbox,
        service: Service,
        server: WeightServer | None,
        config: TrainConfig,
        *,
        evaluates: bool,
        registrar: Registrar | None,
        controller: Controller | None = None,
        tuning: Tuning | None = None,
        in_turn: bool = False,
    ) -> None:
        self._in_turn = in_turn
        self._held: list[Letter] = []  # weights that wait for evaluations
        self._runner, self._mailbox, self._service, self._config = runner, mailbox, service, config
        self._server, self._registrar, self._evaluates = server, registrar, evaluates
        self._lambda, self._tuning = controller, tuning
        self._client = WeightClient(mailbox, service)
        self._ended: list[tuple[int, Verdict]] = []  # of each phase: epochs done, what is next
        self._last_flat: np.ndarray | None = None
        self._verdict = Verdict.GO_ON
        self._exact, self._at_once = config.mode != "async", False
        self._first = 0  # epochs before this phase
        self._sums: dict[tuple[int, int], np.ndarray] = {}  # async: gradients by round and part
        self._left: Counter[int] = Counter()
        self._whole = 0  # the last epoch that all hosted parts have done
        self._epoch_began = 0.0
        self._account = Account()

    def run(self, account: Account) -> None:
        """Run all epochs and evaluations, and fill in the account. Collective."""
        self._account = account
        runner, loop = self._runner, self._runner.loop
        loop.listen(self._mailbox, self.handle)
        self._evaluations = Evaluations(runner, self._config.epochs + 2, self._report_evaluation, self._go_on)
        self._epoch_began = time.perf_counter()
        epochs, verdict = self._phase(cast("Mode", self._config.mode))
        if verdict is Verdict.SWITCH and epochs < self._config.epochs:
            runner.settle()
            self._exact, self._verdict = True, Verdict.GO_ON
            if self._registrar is not None:
                self._registrar.resume(epochs)
            self._first = epochs
            del account.epoch_seconds[epochs:]
            epochs, _ = self._phase("pipe")
        flat = self._last_flat
        assert flat is not None
        # Gradients that were applied at once, of epochs that were not ended, are in the last weights too:
        # they are then not the weights after so many epochs, which may have been evaluated already.
        version = self._config.epochs + 1 if self._at_once else epochs
        if self._registrar is not None:
            self._registrar.last(epochs, flat, version)
        if version not in self._evaluations.versions:
            self._evaluations.add(version, self._service.layout.views(flat))
        loop.run(lambda: self._evaluations.idle and (self._registrar is None or self._registrar.finished))
        runner.leave()
        if self._registrar is not None:
            self._registrar.close()
        for kind, seconds in loop.seconds.items():
            runner.seconds[kind] += seconds
        account.task_seconds = dict(runner.seconds)
        account.sent_bytes = runner.training.exchange.sent_bytes

    def _phase(self, mode: Mode) -> tuple[int, Verdict]:
        """Train in a mode to the end, or to where rank 0 stops; return the epochs done, and what is next."""
        runner, line, loop = self._runner, self._runner.training, self._runner.loop
        self._at_once = mode == "async" and self._config.weight_update == "interval"
        if self._server is not None:
            self._server.begin(exact=self._exact, at_once=self._at_once)
        phases = len(self._ended)
        self._whole = self._first
        rounds = Epochs("train", self._first + 1, self._config.epochs - self._first)
        staleness = self._config.staleness if mode == "async" else 0
        loop.do(line, runner.begin(line, "train", mode, rounds, self, staleness=staleness))
        schedule = line.schedule
        assert schedule is not None
        loop.run(lambda: schedule.finished)
        self._account.max_lead = max(self._account.max_lead, schedule.max_lead)
        self._account.max_read_age = max(self._account.max_read_age, schedule.max_read_age)
        # Not rounds that all units did: a ghosts' unit that was denied its weights has no gradients, and
        # weight servers must know of every epoch whose gradients are all there, to end with the same one.
        self._client.end(self._whole)
        loop.run(lambda: len(self._ended) > phases and (self._server is None or self._server.finished))
        self._sums.clear()
        self._left.clear()
        return self._ended[-1]

    # Letters.

    def handle(self, letter: Letter) -> None:
        """Act on a letter."""
        numbers = letter.numbers
        match letter.kind:
            case Letters.GRANT:
                if self._in_turn and not self._evaluations.idle:
                    self._held.append(letter)
                else:
                    self._granted(letter)
            case Letters.PROGRESS:
                line = self._runner.training
                assert line.schedule is not None
                if numbers[0] == self._first:  # not of a phase that has ended
                    self._runner.loop.do(line, line.schedule.peer_progress(letter.source, numbers[1]))
            case Letters.SNAPSHOT:
                if self._registrar is not None:
                    self._registrar.weights(numbers[0], letter.data)
                    self._judge()
                if self._evaluates:
                    self._evaluations.add(numbers[0], self._service.layout.views(letter.data))
            case Letters.REPORT:
                self._register(numbers, letter.data)
            case Letters.USAGE:
                assert self._registrar is not None
                self._registrar.usage(letter.source, numbers[0], numbers[1])
            case Letters.FINAL:
                self._last_flat = letter.data
                self._ended.append((numbers[0], Verdict(numbers[1])))
            case _:
                assert self._server is not None
                self._server.handle(letter)

    def _granted(self, letter: Letter) -> None:
        line = self._runner.training
        assert line.schedule is not None
        units, granted = self._client.granted(letter)
        if not units:
            self._runner.loop.do(line, line.schedule.stop())
        for unit in units:
            event = line.schedule.bound if granted else line.schedule.denied
            self._runner.loop.do(line, event(unit))

    def _go_on(self) -> None:
        """Take the weights that waited for evaluations."""
        held, self._held = self._held, []
        for letter in held:
            self._granted(letter)

    def _report(self, *, evaluation: bool, number: int, part: int, round_number: int) -> None:
        results = self._runner.take_results("evaluate" if evaluation else "train", round_number, part)
        bits, data = pack_results(results, self._mailbox.dtype)
        self._mailbox.send(0, Letters.REPORT, int(evaluation), number, part, bits, self._first, data=data)

    def _report_evaluation(self, number: int, part: int) -> None:
        version = self._evaluations.versions[number]
        self._report(evaluation=True, number=version, part=part, round_number=number)

    def _register(self, numbers: tuple[int, ...], data: np.ndarray) -> None:
        """Take a report, on rank 0, and tell the weight servers what follows from it."""
        registrar = self._registrar
        assert registrar is not None
        evaluation, number, part, bits, phase = bool(numbers[0]), *numbers[1:5]
        results = unpack_results(bits, data, registrar.form.tally_shape)
        if evaluation:
            registrar.evaluated(number, part, results)
        else:
            registrar.trained(number, part, results, phase=phase)
        self._judge()

    def _judge(self) -> None:
        """Tell the weight servers what follows from what is known now."""
        assert self._registrar is not None
        for version in self._registrar.advance():
            if not self._service.judged(version) or self._verdict is not Verdict.GO_ON:
                continue  # the phase ends already
            if version < self._first:
                continue  # weight servers are beyond it: each would stop somewhere else
            verdict = self._decide(version)
            if self._exact and verdict is Verdict.SWITCH:
                verdict = Verdict.GO_ON
            if verdict is Verdict.GO_ON and not self._exact:
                continue  # nobody waits for it
            self._verdict = verdict
            for server in self._service.servers:
                self._mailbox.send(server, Letters.VERDICT, version, int(verdict), self._first)

    def _decide(self, version: int) -> Verdict:
        """Return what an evaluation means for the run."""
        assert self._registrar is not None
        config, history = self._config, self._registrar.history
        accuracy = next((seen.val for seen in history.evaluations if seen.epoch == version), None)
        if config.target_accuracy and accuracy is not None:
            if accuracy >= config.target_accuracy:
                return Verdict.STOP
            if config.switch_margin and accuracy >= config.target_accuracy - config.switch_margin:
                return Verdict.SWITCH
        if config.patience and version - history.best.epoch >= config.patience:
            return Verdict.STOP
        return Verdict.GO_ON

    # What the schedule of the training wants.

    def task(self, unit: int, number: int, group: int) -> Callable[[], None] | Delayed | DenseTask:
        """Make a task."""
        weights = self._client.weights(unit)
        bound = self._client.version(unit)
        version = f"{self._first}.{bound}" if bound else ""  # numbers may come again in the next phase
        return self._runner.task("train", unit, number, group, weights, self._epoch(number), version)

    def bind(self, unit: int, number: int, least: int) -> bool | None:
        """Ask for weights."""
        return self._client.ask(unit, least, exact=self._exact)

    def release(self, unit: int, number: int) -> None:
        """Give the weights back; the unit's gradients are complete."""
        self._client.release(unit)
        place = self._runner.unit(unit)
        if self._exact or place.interval < 0:
            return
        gradient = self._runner.gradient(place.part, place.interval)
        if self._config.weight_update == "interval":
            self._client.push(self._epoch(number), place.part, gradient)
        elif (number, place.part) in self._sums:
            self._sums[number, place.part] += gradient
        else:
            self._sums[number, place.part] = gradient.copy()

    def complete(self, part: int, number: int) -> None:
        """Report what a part found in an epoch, and send its gradients."""
        epoch = self._epoch(number)
        if self._exact:
            self._client.push(epoch, part, self._runner.add_gradients(part))
        elif self._config.weight_update == "epoch":
            self._client.push(epoch, part, self._sums.pop((number, part)))
        self._report(evaluation=False, number=epoch, part=part, round_number=number)
        self._left[number] += 1
        if self._left[number] == len(self._runner.parts):
            del self._left[number]
            self._end_epoch(epoch)

    def install(self, table: int, unit: int) -> None:
        """Show rows to gathers."""
        self._runner.show(table, unit)

    def progress(self, done: int) -> None:
        """Tell the other graph servers."""
        for rank in self._service.clients:
            if rank != self._mailbox.rank:
                self._mailbox.send(rank, Letters.PROGRESS, self._first, done)

    def _epoch(self, number: int) -> int:
        return self._first + number + 1

    def _end_epoch(self, epoch: int) -> None:
        self._whole = epoch
        now = time.perf_counter()
        self._account.epoch_seconds.append(now - self._epoch_began)
        self._epoch_began = now
        if self._lambda is not None:
            self._mailbox.send(0, Letters.USAGE, *self._lambda.usage())
        if self._tuning is not None:
            self._tuning.end_epoch()
        if self._registrar is not None:
            self._registrar.seconds(epoch, self._account.epoch_seconds[-1])
            self._judge()
