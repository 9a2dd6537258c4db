"""Has dense tasks done by Lambda functions, without anybody waiting for one.

A task is offered to workers by the tensor server, and a thread calls the function with a small descriptor
that tells the worker where to find it. What the dispatcher decides is done here: calls, and the fall-back,
which computes on this server's cores with the workers' own arithmetic. A task has ended when its result was
accepted, be it by the tensor server or from these cores; what a late call still brings is refused.

                 submit                         call returned
    engine ───────────────▶ Controller ◀───────────────────── threads that call
                              │    ▲ accepted
                              ▼    │
                          TensorServer ◀────── workers
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self

from dorylus_hpc.serverless.claim import Claim
from dorylus_hpc.serverless.dispatcher import Action, Dispatcher, FallBack, Invoke, Result, Rules
from dorylus_hpc.serverless.invoker import Invocation
from dorylus_hpc.serverless.tasks import DenseTask
from dorylus_hpc.serverless.tensor_server import Block, TensorServer
from lambda_pkg import VERSION


class Calls(Protocol):
    """What calls the function."""

    def invoke(self, payload: bytes) -> Invocation:
        """Call it and wait for its answer; raises nothing."""


@dataclass(frozen=True)
class Settings:
    """How a controller works.

    Attributes
    ----------
    run
        Identifies the run to sandboxes, which keep weights for it.
    host
        Under which workers reach the tensor server.
    tls
        What a worker needs to prove that it is of this run; None without TLS.
    workers
        Invocations in flight at first.
    most_workers
        And at most.
    threads
        Of the fall-back.
    memory_mb
        Of the function; billed by the second.
    seconds
        A worker's patience with the tensor server.
    timeout
        Of the function: more than that is never billed for a call.
    budget
        What invocations may cost; 0: anything.
    price_gb_second, price_request
        In the same currency.
    """

    run: str
    host: str
    tls: Mapping[str, str] | None
    workers: int
    most_workers: int
    threads: int
    memory_mb: int
    seconds: float
    timeout: float = 900.0
    budget: float = 0.0
    price_gb_second: float = 0.0
    price_request: float = 0.0


@dataclass
class LambdaAccount:
    """What a controller used, over the whole run.

    Attributes
    ----------
    tasks, invoked, invocations, retries, throttles, timeouts, failures, fallbacks
        As in `dispatcher.Counters`.
    concurrency
        The most invocations in flight at once.
    cold_starts
        Sandboxes that served their first task.
    gb_seconds
        Billed, or where AWS did not say how much: as long as the call took, at most the function's timeout.
    call_seconds
        From each call to its return: for so long a place for an invocation was taken.
    bytes_sent, bytes_received
        To and from workers.
    kept
        Inputs that workers had kept and that did not travel.
    duplicates_refused
        Results that came when the task had ended.
    worker_seconds
        Spent by workers that answered: ``connect``, ``fetch``, ``compute``, ``send``, ``total``.
    broken
        Why the cores of the server took over, if they did.
    """

    tasks: int = 0
    invoked: int = 0
    invocations: int = 0
    retries: int = 0
    throttles: int = 0
    timeouts: int = 0
    failures: int = 0
    fallbacks: int = 0
    concurrency: int = 0
    cold_starts: int = 0
    gb_seconds: float = 0.0
    call_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    kept: int = 0
    duplicates_refused: int = 0
    worker_seconds: dict[str, float] = field(default_factory=dict)
    broken: str = ""


class _Running:
    """A task that has not ended, or attempts at which still fly."""

    def __init__(self, task: DenseTask, ended: Callable[[BaseException | None], None]) -> None:
        self.task, self.ended = task, ended
        self.claim: Claim
        self.began = time.perf_counter()
        self.lane = "server"
        self.tokens: set[str] = set()
        self.payload: dict[str, Any] = {}


class Controller:
    """Dense tasks of one graph server; use as a context manager.

    Parameters
    ----------
    calls
        The function.
    server
        Where workers fetch and deliver; closed by whoever made it.
    settings
        How.
    rules
        Of repetition.
    warn
        Takes a sentence for the user, when invocations end.
    """

    def __init__(
        self,
        calls: Calls,
        server: TensorServer,
        settings: Settings,
        *,
        rules: Rules | None = None,
        warn: Callable[[str], None] | None = None,
        seed: int = 0,
    ) -> None:
        self._calls, self._server, self._settings = calls, server, settings
        self._warn = warn or (lambda _: None)
        self._warned = ""
        self._dispatcher = Dispatcher(settings.workers, rules, seed=seed)
        self._lock = threading.RLock()  # of the dispatcher and all below
        self._wake = threading.Condition(self._lock)
        self._running: dict[int, _Running] = {}
        self._numbers = itertools.count()
        self._account = LambdaAccount()
        self._lanes = [*range(4 * settings.most_workers)]
        self._closing = False
        self._closed = False  # the account, too
        self._called: dict[int, float] = {}  # attempts whose calls have not returned, and when they began
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._callers: list[threading.Thread] = []
        self._busy = 0  # callers that have a job, or a job that waits for one
        self._most_callers = 4 * settings.most_workers + 8
        self._here = ThreadPoolExecutor(settings.threads, thread_name_prefix="fallback")
        self._timer = threading.Thread(target=self._keep_time, name="controller", daemon=True)
        self._timer.start()
        host, port = settings.host, server.address[1]
        self._common = {
            "protocol": VERSION,
            "run": settings.run,
            "server": {"host": host, "port": port},
            "tls": settings.tls,
            "seconds": settings.seconds,
        }

    def count(self, invocation: Invocation) -> None:
        """Count a call without a task."""
        with self._lock:
            self._note(invocation, 0.0, called=True)

    def submit(self, task: DenseTask, ended: Callable[[BaseException | None], None]) -> None:
        """Have a task done; `ended` is called once, on any thread, after its `finish`."""
        number = next(self._numbers)
        running = _Running(task, ended)
        running.claim = Claim(lambda: self._accepted(number))
        if task.n_rows == 0:  # nothing is gained elsewhere
            with self._lock:
                self._running[number] = running
            self._here.submit(self._compute, number)
            return
        with self._lock:
            self._running[number] = running
            actions = self._dispatcher.submit(time.perf_counter(), number, task.kind, task.priority)
            self._do(actions)

    def limit(self, workers: int) -> None:
        """Have another number of invocations in flight."""
        with self._lock:
            self._do(self._dispatcher.limit(time.perf_counter(), workers))

    def account(self) -> LambdaAccount:
        """Return what has been used so far."""
        with self._lock:
            account, counters = self._account, asdict(self._dispatcher.counters)
            account.concurrency = counters.pop("most")
            for name, value in counters.items():
                setattr(account, name, value)
            statistics = self._server.statistics
            account.bytes_sent, account.bytes_received = statistics.bytes_sent, statistics.bytes_received
            account.duplicates_refused = statistics.duplicates_refused
            account.broken = self._dispatcher.broken
            return account

    def usage(self) -> tuple[int, int]:
        """Return the MB-milliseconds billed and the invocations so far."""
        with self._lock:
            billed = round(self._account.gb_seconds * 1024 * 1000)
            counters = self._dispatcher.counters
            return billed, counters.invocations - counters.throttles  # AWS bills no throttled ones

    def close(self) -> None:
        """End all threads, but calls that hang: they end with the process. Idempotent.

        The account has these calls as well, for as long as they took until now.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._wake.notify_all()
        self._timer.join()
        self._here.shutdown(cancel_futures=True)
        for _ in self._callers:
            self._jobs.put(None)
        end = time.monotonic() + _LAST_WAIT
        for caller in self._callers:
            caller.join(max(0.0, end - time.monotonic()))
        with self._lock:
            for began in self._called.values():
                self._note(Invocation(Result.FAILED), time.perf_counter() - began, called=True)
            self._closed = True

    def __enter__(self) -> Self:
        """Return the controller."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    # Actions.

    def _do(self, actions: list[Action]) -> None:
        """Do what the dispatcher wants; the lock is held."""
        for action in actions:
            if isinstance(action, Invoke):
                self._call(action)
            elif isinstance(action, FallBack):
                assert isinstance(action.task, int)
                self._here.submit(self._compute, action.task)
        if self._dispatcher.broken != self._warned:
            self._warned = self._dispatcher.broken
            if self._warned:
                self._warn(f"Lambda: {self._warned}: dense tasks run on this server's cores")
        self._wake.notify()

    def _keep_time(self) -> None:
        with self._lock:
            while not self._closing:
                when = self._dispatcher.next_time
                now = time.perf_counter()
                if when is None or when > now:
                    self._wake.wait(None if when is None else when - now)
                else:
                    self._do(self._dispatcher.tick(now))

    def _compute(self, number: int) -> None:
        """Do a task on this thread, unless a worker has."""
        running = self._running.get(number)
        if running is None:
            return
        for token in list(running.tokens):  # one that hangs in the middle of its upload would hold us up
            self._server.withdraw(token)
        if not running.claim.begin(None):
            return
        running.began, running.lane = time.perf_counter(), threading.current_thread().name
        try:
            running.task.compute()
        except BaseException as error:
            running.claim.abandon(None)
            running.ended(error)
            return
        running.claim.accept(None)

    def _accepted(self, number: int) -> None:
        """Results are in their buffers."""
        running = self._running[number]
        error: BaseException | None = None
        try:
            running.task.finish(running.began, time.perf_counter(), running.lane)
        except BaseException as failure:
            error = failure
        with self._lock:
            del self._running[number]
            if running.task.n_rows:
                self._do(self._dispatcher.accepted(time.perf_counter(), number))
        running.ended(error)

    # Calls.

    def _call(self, action: Invoke) -> None:
        assert isinstance(action.task, int)
        running = self._running[action.task]
        lane = heappop(self._lanes) if self._lanes else -1
        self._busy += 1
        if self._busy > len(self._callers) and len(self._callers) < self._most_callers:
            caller = threading.Thread(
                target=self._serve_calls, name=f"calls_{len(self._callers)}", daemon=True
            )
            self._callers.append(caller)
            caller.start()
        self._jobs.put(lambda: self._attempt(action, running, lane))

    def _serve_calls(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _attempt(self, action: Invoke, running: _Running, lane: int) -> None:
        """Call the function once for a task."""
        task, claim = running.task, running.claim
        began = time.perf_counter()
        invocation = Invocation(Result.SKIPPED)
        token = ""
        if not self._closing and not claim.taken:
            running.began, running.lane = began, f"lambda_{lane}"
            try:
                token = self._server.offer(
                    [Block(array, name in task.rows) for name, array in task.inputs.items()],
                    list(task.buffers.values()),
                    task.chunk,
                    claim,
                )
                running.tokens.add(token)
                with self._lock:
                    self._called[action.attempt] = began
                invocation = self._calls.invoke(self._describe(task, token))
            except Exception as error:  # a task that cannot travel: a thread that died would say so to nobody
                invocation = Invocation(Result.FATAL, f"{type(error).__name__}: {error}")
            if token:
                self._server.withdraw(token)
                running.tokens.discard(token)
        elapsed = time.perf_counter() - began
        with self._lock:
            if lane >= 0:
                heappush(self._lanes, lane)
            self._busy -= 1
            self._called.pop(action.attempt, None)
            self._note(invocation, elapsed, called=bool(token))
            now, actions = time.perf_counter(), []
            if self._settings.budget and self._spent() >= self._settings.budget:  # before a place is free
                actions += self._dispatcher.stop(now, "the budget is spent")
            actions += self._dispatcher.returned(now, action.attempt, invocation.result, invocation.message)
            self._do(actions)

    def _describe(self, task: DenseTask, token: str) -> bytes:
        inputs = [
            {
                "name": name,
                "dtype": array.dtype.str,
                "shape": array.shape,
                "rows": name in task.rows,
                "key": task.keys.get(name),
            }
            for name, array in task.inputs.items()
        ]
        outputs = [
            {"name": name, "dtype": spec.dtype, "shape": spec.shape, "rows": spec.rows}
            for name, spec in task.outputs.items()
        ]
        described = self._common | {
            "token": token, "ops": task.program, "inputs": inputs, "outputs": outputs, "chunk": task.chunk,
        }  # fmt: skip
        return json.dumps(described, separators=(",", ":")).encode()

    def _note(self, invocation: Invocation, elapsed: float, *, called: bool) -> None:
        account = self._account
        if self._closed or not called or invocation.result in (Result.THROTTLED, Result.FATAL):
            return
        account.call_seconds += elapsed
        longest = self._settings.timeout
        billed = invocation.billed_ms / 1000 if invocation.billed_ms else min(elapsed, longest)
        account.gb_seconds += billed * self._settings.memory_mb / 1024
        account.cold_starts += invocation.cold
        answer = invocation.answer
        if answer is not None:
            account.kept += int(answer.get("kept", 0))
            for name, seconds in answer.get("seconds", {}).items():
                account.worker_seconds[name] = account.worker_seconds.get(name, 0.0) + seconds

    def _spent(self) -> float:
        settings = self._settings
        requests = self._dispatcher.counters.invocations - self._dispatcher.counters.throttles
        return self._account.gb_seconds * settings.price_gb_second + requests * settings.price_request


_LAST_WAIT = 2.0  # seconds for calls that are about to end
