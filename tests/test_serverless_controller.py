"""Dense tasks through the controller: right to the last bit whatever becomes of calls, and all is counted.

Results come from real workers through a real tensor server with TLS. Calls are either scripted, so that what
goes wrong goes wrong in every run, or go through boto3 to the local service.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import random
import shutil
import signal
import socket
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import psutil
import pytest
from serverless import VERSION_0, assert_adds_up, other_archive

from dorylus_hpc.errors import InputError
from dorylus_hpc.serverless.certificates import make_credentials
from dorylus_hpc.serverless.controller import Controller, Settings
from dorylus_hpc.serverless.dispatcher import Result, Rules
from dorylus_hpc.serverless.invoker import Account, Invocation, Invoker
from dorylus_hpc.serverless.local import LocalService, LocalSettings
from dorylus_hpc.serverless.tasks import DenseTask
from dorylus_hpc.serverless.tensor_server import TensorServer
from lambda_pkg import ops
from lambda_pkg.ops import OutputSpec
from lambda_pkg.worker import Sandbox, TensorServerError

HANGS = 60  # seconds without any end of a task: a hang
PATIENT = Rules(floor=HANGS, first=HANGS, patience=4 * HANGS, pause=0.001, longest_pause=0.01, breaker=10**6)
HASTY = Rules(floor=0.1, first=0.2, patience=4 * HANGS, pause=0.001, longest_pause=0.01, breaker=10**6)

F_IN, CLASSES = 6, 4
PROGRAM = [
    ["apply_vertex", {}, ["x", "w"], ["z"]],
    ["bias_relu_dropout", {"p": 0.5, "seed": 3, "epoch": 1, "layer": 1}, ["z", "b", "gids"], ["h"]],
    ["softmax_cross_entropy", {"scale": 0.1}, ["h", "labels", "mask"], ["loss", "dh"]],
    ["apply_vertex_backward", {}, ["x", "w", "dh"], ["dw", "dx"]],
    ["bias_gradient", {}, ["dh"], ["db"]],
]


class Work:
    """Tasks, what they must give, and how they ended."""

    def __init__(self, count, *, rows=range(1, 60), chunk=7, seed=0):
        rng = np.random.default_rng(seed)
        self.weights = {
            "w": rng.standard_normal((F_IN, CLASSES), np.float32),
            "b": rng.standard_normal(CLASSES, np.float32),
        }
        self.ended = queue.SimpleQueue()
        self.finished = Counter()
        self.lanes = {}
        self.tasks = [self._make(rng, number, rows[number % len(rows)], chunk) for number in range(count)]

    def _make(self, rng, number, n, chunk):
        rows = {
            "x": rng.standard_normal((n, F_IN), np.float32),
            "gids": rng.integers(0, 10**6, n),
            "labels": rng.integers(0, CLASSES, n),
            "mask": rng.integers(0, 2, n).astype(np.uint8),
        }
        outputs = {
            "h": OutputSpec((n, CLASSES), "<f4", True),
            "dx": OutputSpec((n, F_IN), "<f4", True),
            "dw": OutputSpec((F_IN, CLASSES), "<f4", False),
            "db": OutputSpec((CLASSES,), "<f4", False),
            "loss": OutputSpec((1,), "<f8", False),
        }

        def finish(begin, end, lane):
            assert begin <= end
            self.finished[number] += 1
            self.lanes[number] = lane

        return DenseTask(
            kind=f"kind{number % 2}",
            priority=(number,),
            program=PROGRAM,
            inputs=rows | self.weights,
            rows=frozenset(rows),
            keys={"w": "w@1", "b": "b@1"},
            outputs=outputs,
            buffers={name: np.full(spec.shape, -77, spec.dtype) for name, spec in outputs.items()},
            chunk=chunk,
            finish=finish,
        )

    def submit(self, controller, numbers=None):
        for number in range(len(self.tasks)) if numbers is None else numbers:
            controller.submit(
                self.tasks[number], lambda error, number=number: self.ended.put((number, error))
            )

    def wait(self, count=None):
        """Wait for the ends of tasks; none fails, and none ends twice."""
        count = len(self.tasks) if count is None else count
        ended = [self.ended.get(timeout=HANGS) for _ in range(count)]
        assert [error for _, error in ended if error] == []
        assert len({number for number, _ in ended}) == count

    def check(self):
        """Assert that everything was done once, and right to the last bit."""
        assert self.ended.empty()
        assert self.finished == Counter(range(len(self.tasks)))
        for number, task in enumerate(self.tasks):
            want = ops.run(task.program, task.inputs, task.outputs, rows=task.rows, chunk=task.chunk)
            for name, array in want.items():
                assert task.buffers[name].tobytes() == array.tobytes(), (number, name)

    @property
    def elsewhere(self):
        """How many tasks a worker did."""
        return sum(lane.startswith("lambda_") for lane in self.lanes.values())


class Scripted:
    """Calls that meet the fates of a script; those that run have a worker in this process."""

    def __init__(self, fate):
        self._fate, self._numbers = fate, itertools.count()
        self._local, self._sandboxes = threading.local(), []
        self.fates, self.refused = Counter(), 0
        self.over, self.begun = threading.Event(), queue.SimpleQueue()
        self._lock = threading.Lock()

    def invoke(self, payload):
        with self._lock:
            fate = self._fate(next(self._numbers))
            self.fates[fate] += 1
        self.begun.put(fate)
        return getattr(self, f"_{fate}")(json.loads(payload))

    def close(self):
        for sandbox in self._sandboxes:
            sandbox.close()

    def _work(self, event):
        if not hasattr(self._local, "sandbox"):
            self._local.sandbox = Sandbox()
            self._sandboxes.append(self._local.sandbox)
        try:
            answer = self._local.sandbox.work(event)
        except TensorServerError as error:  # its attempt was withdrawn under way
            return Invocation(Result.FAILED, str(error))
        with self._lock:
            self.refused += not answer["accepted"]
        return Invocation(Result.DONE, answer["reason"], answer, billed_ms=8)

    def _twice(self, event):
        first = self._work(event)
        again = self._work(event)
        assert again.answer["accepted"] is False and again.message
        return first

    def _crash_before(self, event):
        return Invocation(Result.FAILED, "the sandbox crashed", billed_ms=8)

    def _crash_after(self, event):
        self._work(event)
        return Invocation(Result.FAILED, "the sandbox crashed", billed_ms=8)

    def _throttle(self, event):
        return Invocation(Result.THROTTLED, "Rate Exceeded.")

    def _fatal(self, event):
        return Invocation(Result.FATAL, "Function not found")

    def _lost(self, event):
        assert self.over.wait(HANGS)
        return Invocation(Result.FAILED, "Read timeout")

    def _late(self, event):
        assert self.over.wait(HANGS)
        return self._work(event)


@pytest.fixture(scope="module")
def credentials():
    return make_credentials("test")


@pytest.fixture(scope="module")
def service():
    with LocalService(LocalSettings(concurrency=12)) as running:
        yield running


def account_of(service, **changes):
    known = {
        "function": service.settings.function,
        "region": service.region,
        "endpoint_url": service.endpoint_url,
        "access_key": service.access_key,
        "secret_key": service.secret_key,
    }
    return Account(**known | changes)


@contextmanager
def controlling(calls, credentials, *, rules=PATIENT, warn=None, **changes):
    settings = {"workers": 4, "most_workers": 8, "threads": 2, "memory_mb": 1769, "seconds": 30.0}
    with TensorServer(context=credentials and credentials.server_context()) as server:
        tls = credentials.descriptor() if credentials else None
        common = {"run": "test", "host": "127.0.0.1", "tls": tls}
        with Controller(
            calls, server, Settings(**common | settings | changes), rules=rules, warn=warn
        ) as controller:
            yield controller


@contextmanager
def invoking(account):
    invoker = Invoker(account, connections=40, seconds=20)
    try:
        yield invoker
    finally:
        invoker.close()


def run_script(fate, credentials, work, *, uncalled=0, **how):
    """Do all the work with scripted calls; return the calls and what was counted when all had returned.

    `uncalled` invocations are counted that never become a call.
    """
    calls = Scripted(fate)
    try:
        with controlling(calls, credentials, **how) as controller:
            work.submit(controller)
            work.wait()
            calls.over.set()
            controller.close()  # waits for calls under way
            account = controller.account()
    finally:
        calls.over.set()
        calls.close()
    work.check()
    assert_adds_up(account, len(work.tasks))
    assert account.invocations == calls.fates.total() + uncalled
    assert account.throttles == calls.fates["throttle"]
    assert account.duplicates_refused == calls.refused
    return calls, account


# ---- results


@pytest.mark.parametrize("tls", [True, False])
def test_workers_results_are_those_of_this_process(credentials, tls):
    work = Work(40)
    calls, account = run_script(lambda number: "work", credentials if tls else None, work)
    assert work.elsewhere == account.invocations == account.invoked == 40
    assert (account.failures, account.timeouts, account.fallbacks, account.broken) == (0, 0, 0, "")
    assert 1 <= account.concurrency <= 4
    assert account.gb_seconds == pytest.approx(40 * 0.008 * 1769 / 1024)
    sent = sum(array.nbytes for task in work.tasks for array in task.inputs.values())
    assert account.kept > 0 and 0.5 * sent < account.bytes_sent < sent + 40 * 100
    assert account.worker_seconds["total"] > account.worker_seconds["compute"] > 0


def test_the_local_services_results_are_those_of_this_process(credentials, service):
    work = Work(40)
    before = service.statistics()["invocations"]
    with invoking(account_of(service)) as invoker, controlling(invoker, credentials) as controller:
        work.submit(controller)
        work.wait()
        controller.close()
        account = controller.account()
    work.check()
    assert_adds_up(account, 40)
    assert work.elsewhere == account.invocations == service.statistics()["invocations"] - before == 40
    assert account.cold_starts <= 4 and account.gb_seconds > 0


def test_without_rows_nothing_is_called(credentials):
    work = Work(3, rows=[0])
    calls = Scripted(lambda number: "work")
    with controlling(calls, credentials) as controller:
        work.submit(controller)
        work.wait()
        assert controller.account().invocations == 0
    work.check()
    assert not calls.fates and work.elsewhere == 0


def test_what_finish_raises_ends_the_task_with_it(credentials):
    work = Work(1)
    calls = Scripted(lambda number: "work")
    broken = DenseTask(**vars(work.tasks[0]) | {"finish": lambda *_: 1 / 0})
    with controlling(calls, credentials) as controller:
        controller.submit(broken, lambda error: work.ended.put((0, error)))
        _, error = work.ended.get(timeout=HANGS)
    calls.close()
    assert isinstance(error, ZeroDivisionError)


# ---- calls that go wrong


@pytest.mark.parametrize("fate", ["crash_before", "crash_after", "throttle", "twice"])
def test_every_other_call_meets_its_fate(credentials, fate):
    work = Work(30)
    calls, account = run_script(
        lambda number: fate if number % 2 else "work", credentials, work, rules=replace(PATIENT, attempts=99)
    )
    bad = calls.fates[fate]
    assert bad >= 15 and account.fallbacks == account.timeouts == 0
    failed = bad if fate.startswith("crash") else 0
    assert account.failures == failed
    if fate != "crash_after":  # then the task was done, if nobody heard it
        assert work.elsewhere == 30
    assert account.retries == (bad if fate == "crash_before" else 0)
    assert account.duplicates_refused == (bad if fate == "twice" else 0)


@pytest.mark.parametrize("fate", ["lost", "late"])
def test_what_does_not_come_is_repeated(credentials, fate):
    work = Work(12)
    calls, account = run_script(lambda number: fate if number < 3 else "work", credentials, work, rules=HASTY)
    assert account.timeouts >= 3 and account.retries + account.fallbacks >= 3
    assert calls.fates[fate] == 3
    if fate == "late":
        assert calls.refused >= 3


@pytest.mark.parametrize("seed", range(6))
def test_whatever_becomes_of_calls_the_results_are_the_same(credentials, seed):
    rates = {"work": 5, "lost": 1, "late": 1, "crash_before": 1, "crash_after": 1, "throttle": 2, "twice": 1}
    rng = random.Random(seed)
    script = rng.choices(list(rates), list(rates.values()), k=10**4)
    work = Work(60, chunk=[0, 7][seed % 2], seed=seed)
    calls, account = run_script(script.__getitem__, credentials, work, rules=HASTY, workers=6, most_workers=6)
    assert len(calls.fates) == len(rates)
    assert account.failures >= calls.fates["crash_before"] + calls.fates["crash_after"] + calls.fates["lost"]


def test_what_always_fails_is_done_here(credentials):
    work = Work(10)
    calls, account = run_script(lambda number: "crash_before", credentials, work)
    assert work.elsewhere == 0
    assert (account.invocations, account.retries, account.fallbacks) == (40, 30, 10)


def test_a_row_of_failures_is_told_once(credentials):
    told = []
    work = Work(20)
    _, account = run_script(
        lambda number: "crash_before",
        credentials,
        work,
        rules=Rules(floor=HANGS, breaker=5),
        warn=told.append,
    )
    assert account.fallbacks == 20 and account.invocations < 12
    assert told == ["Lambda: the sandbox crashed: dense tasks run on this server's cores"]


def test_the_budget_ends_invocations(credentials):
    told = []
    work = Work(10)
    calls, account = run_script(
        lambda number: "work", credentials, work, workers=1, budget=2.5, price_request=1.0, warn=told.append
    )
    assert work.elsewhere == account.invocations == 3 and account.fallbacks == 7
    assert account.broken == "the budget is spent" and len(told) == 1


def test_the_seconds_of_the_budget_count(credentials):
    work = Work(10)
    _, account = run_script(
        lambda number: "work", credentials, work, workers=1, budget=1.0, price_gb_second=30.0
    )  # a call: 0.008 s x 1.73 GB x 30 = 0.41
    assert work.elsewhere == account.invocations == 3


def test_more_workers_than_at_first(credentials):
    """Two calls are under way, and hang; only with a third is anything done."""
    work = Work(3)
    calls = Scripted(lambda number: "late" if number < 2 else "work")
    with controlling(calls, credentials, workers=2) as controller:
        work.submit(controller)
        for _ in range(2):
            calls.begun.get(timeout=HANGS)
        assert work.ended.empty()
        controller.limit(3)
        work.wait(1)
        assert controller.account().concurrency == 3
        calls.over.set()
        work.wait(2)
    calls.close()
    work.check()


# ---- what cannot get better


@pytest.mark.parametrize("what", ["inputs", "program"])
def test_a_task_that_cannot_travel_is_done_here(credentials, what):
    told = []
    work = Work(3)
    task = work.tasks[1]
    if what == "inputs":
        wide = np.repeat(task.inputs["x"], 2, axis=1)[:, ::2]
        spoiled = {"inputs": dict(task.inputs) | {"x": wide}}
    else:
        op = ["softmax_cross_entropy", {"scale": np.float32(0.1)}, *PROGRAM[2][2:]]
        spoiled = {"program": [*PROGRAM[:2], op, *PROGRAM[3:]]}
    work.tasks[1] = replace(task, **spoiled)
    _, account = run_script(lambda number: "work", credentials, work, workers=1, warn=told.append, uncalled=1)
    assert work.elsewhere == 1 and account.fallbacks == 2
    assert {"inputs": "ValueError: an input must be C-", "program": "TypeError: "}[what] in told[0]


RAISES = """
def handler(event, context=None):
    if event.get("hello"):
        return {"protocol": "2"}
    raise KeyError("out of order")
"""


def falls_back(account, credentials, tasks=20):
    """Do work that no worker does; return what was counted."""
    work = Work(tasks)
    with (
        invoking(account) as invoker,
        controlling(invoker, credentials, rules=Rules(pause=0.001, longest_pause=0.01)) as controller,
    ):
        work.submit(controller)
        work.wait()
        controller.close()
        counted = controller.account()
    work.check()
    assert_adds_up(counted, tasks)
    assert work.elsewhere == 0 and counted.fallbacks == tasks
    return counted


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"function": "nobody"}, "Function not found"),
        ({"secret_key": "wrong"}, "signature"),
        ({"access_key": "AKIANOBODY"}, "security token"),
    ],
)
def test_a_call_that_is_refused_ends_invocations_at_once(credentials, service, changes, told):
    account = account_of(service, **changes)
    counted = falls_back(account, credentials)
    assert counted.invocations <= 4  # those under way when the first was refused
    assert told in counted.broken
    with invoking(account) as invoker, pytest.raises(InputError, match=told):
        invoker.check()


def test_an_endpoint_that_refuses(credentials, service):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    account = account_of(service, endpoint_url=url)
    counted = falls_back(account, credentials)
    assert "Could not connect to the endpoint URL" in counted.broken
    with invoking(account) as invoker, pytest.raises(InputError, match="Could not connect"):
        invoker.check()


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("__init__.py", VERSION_0, "VersionError: the task has protocol '2', this archive has '0'"),
        ("handler.py", RAISES, "KeyError: 'out of order'"),
        ("handler.py", "import nothing_of_this_name\n", "Runtime.ImportModuleError"),
    ],
    ids=["version", "raises", "import"],
)
def test_an_archive_that_does_not_do(credentials, tmp_path, name, text, told):
    archive = other_archive(tmp_path / "archive", name, text)
    with LocalService(LocalSettings(archive=archive, concurrency=4)) as other:
        account = account_of(other)
        counted = falls_back(account, credentials)
        with invoking(account) as invoker:
            if name == "__init__.py":
                with pytest.raises(InputError, match="speaks protocol '0', this version '2': deploy"):
                    invoker.check()
            elif text == RAISES:
                assert invoker.check().answer == {"protocol": "2"}
            else:
                with pytest.raises(InputError, match="cannot be used: Runtime.ImportModuleError"):
                    invoker.check()
    assert told in counted.broken
    shutil.rmtree(archive)


def test_a_service_that_dies(credentials):
    """It dies with calls under way; the cores of this process go on, and its sandboxes end."""
    work = Work(60)
    with LocalService(LocalSettings(concurrency=4)) as mortal:
        with (
            invoking(account_of(mortal)) as invoker,
            controlling(invoker, credentials, rules=Rules()) as controller,
        ):
            work.submit(controller, range(20))
            work.wait(20)
            pids = mortal.statistics()["pids"]
            sandboxes = [psutil.Process(pid) for pid in pids["busy"] + pids["idle"]]
            assert sandboxes
            work.submit(controller, range(20, 60))
            os.kill(mortal.pid, signal.SIGKILL)
            work.wait(40)
            account = controller.account()
        work.check()
        assert_adds_up(account, 60)
        assert account.broken and 0 < work.elsewhere < 60
        assert psutil.wait_procs(sandboxes, timeout=HANGS)[1] == []
        assert not mortal.alive()


# ---- the end


def test_nothing_is_left(credentials, service):
    def left():
        kinds = psutil.Process().net_connections("all")
        return set(threading.enumerate()), {(one.laddr, one.raddr) for one in kinds}

    before = left()
    work = Work(20)
    with invoking(account_of(service)) as invoker, controlling(invoker, credentials) as controller:
        work.submit(controller)
        work.wait()
        assert len(left()[0]) > len(before[0]) and len(left()[1]) > len(before[1])
        controller.close()
        controller.close()
    assert left() == before


def test_calls_that_never_return_are_paid(credentials, monkeypatch):
    """They are billed, too: until the end of the run, or for the function's time limit if that is less."""
    monkeypatch.setattr("dorylus_hpc.serverless.controller._LAST_WAIT", 0.1)
    work = Work(2)
    calls = Scripted(lambda number: "lost")
    with controlling(calls, credentials, timeout=0.05, memory_mb=2048) as controller:
        work.submit(controller)
        for _ in range(2):
            calls.begun.get(timeout=HANGS)
        account = controller.account()
        controller.close()
        assert account.gb_seconds == pytest.approx(2 * 0.05 * 2) and account.call_seconds >= 0.2
        paid = account.gb_seconds, account.call_seconds
        calls.over.set()
        until_calls_ended()
        account = controller.account()
        assert (account.gb_seconds, account.call_seconds) == paid  # what comes later is not counted again


def until_calls_ended():
    for thread in threading.enumerate():
        if thread.name.startswith("calls_"):
            thread.join(HANGS)


def test_closing_with_work_under_way_ends(credentials):
    """Calls hang and tasks wait: nobody is told of an end, nothing is written any more."""
    work = Work(12)
    calls = Scripted(lambda number: "late")
    with controlling(calls, credentials, workers=4) as controller:
        work.submit(controller)
        for _ in range(4):
            calls.begun.get(timeout=HANGS)
        closing = threading.Thread(target=controller.close)
        closing.start()
        calls.over.set()
        closing.join(HANGS)
        assert not closing.is_alive()
        assert not [one for one in threading.enumerate() if one.name.startswith("calls_")]
    calls.close()
    assert calls.fates.total() == 4
