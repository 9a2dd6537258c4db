"""The executor: tasks that end, exceptions of threads, one BLAS thread."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from dorylus_hpc.engine.executor import Delayed, Executor
from dorylus_hpc.errors import InputError


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_task_runs_once_and_tells_its_number(threads: int) -> None:
    ran: list[int] = []
    with Executor(threads) as executor:
        for number in range(20):
            executor.start(number, lambda number=number: ran.append(number))
        assert sorted(executor.wait(None) for _ in range(20)) == list(range(20))
        assert executor.wait(0) is None
    assert sorted(ran) == list(range(20))


def test_tasks_really_run_at_once() -> None:
    meeting = threading.Barrier(3, timeout=10)
    with Executor(2) as executor:
        executor.start(0, meeting.wait)
        executor.start(1, meeting.wait)
        assert executor.wait(0.01) is None
        meeting.wait()  # the calling thread is not one of the two
        assert {executor.wait(10), executor.wait(10)} == {0, 1}


@pytest.mark.parametrize("threads", [1, 2])
def test_an_exception_of_a_task_reaches_the_caller(threads: int) -> None:
    def fails() -> None:
        raise ZeroDivisionError("in a task")

    with Executor(threads) as executor:
        executor.start(1, fails)
        with pytest.raises(ZeroDivisionError, match="in a task"):
            executor.wait(10)


@pytest.mark.parametrize("threads", [1, 3])
def test_tasks_far_away_begin_when_they_are_due_in_that_order(threads: int) -> None:
    ran: list[tuple[int, float]] = []
    delays = [0.08, 0.02, 0.05, 0.0, 0.02, 0.11]
    with Executor(threads, {"far": 100}) as executor:
        assert executor.workers == {"cpu": threads, "io": 1, "far": 100}
        began = time.perf_counter()
        for number, seconds in enumerate(delays):
            run = lambda number=number: ran.append((number, time.perf_counter() - began))  # noqa: E731
            executor.start(number, Delayed(run, seconds), "far")
        ended = [executor.wait(10) for _ in delays]
        assert sorted(ended) == list(range(6))
    assert all(at >= delays[number] for number, at in ran)
    if threads == 1:
        assert [number for number, _ in ran] == ended == [3, 1, 4, 2, 0, 5]


def test_tasks_far_away_that_are_due_at_once_do_not_wait_for_each_other() -> None:
    meeting = threading.Barrier(2, timeout=10)
    with Executor(2, {"far": 2}) as executor:
        for number in range(2):
            executor.start(number, Delayed(meeting.wait, 0.01), "far")
        assert {executor.wait(10), executor.wait(10)} == {0, 1}


def test_what_is_not_due_at_the_end_is_dropped_and_errors_are_raised() -> None:
    ran = []
    with Executor(1, {"far": 1}) as executor:
        executor.start(0, Delayed(lambda: ran.append(0), 60.0), "far")
        executor.start(1, Delayed(lambda: 1 / 0, 0.001), "far")
        with pytest.raises(ZeroDivisionError):
            executor.wait(10)
    assert ran == []


def test_blas_has_one_thread_inside_and_its_own_again_outside() -> None:
    def blas() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    np.ones((2, 2)) @ np.ones((2, 2))
    before = blas()
    with Executor(1):
        assert set(blas()) == {1}
    assert blas() == before


@pytest.mark.parametrize("far", [{}, {"dense": 4}])
def test_more_threads_than_the_system_allows_are_refused(
    monkeypatch: pytest.MonkeyPatch, far: dict[str, int]
) -> None:
    """None of those that were started in the same pool is left."""
    original = threading.Thread.start
    started: list[threading.Thread] = []

    def start(self: threading.Thread) -> None:
        if self.name.startswith("dense" if far else "cpu"):
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            started.append(self)
        original(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(InputError, match=r"--threads 3: the system started only 2 of them .*: use fewer"):
        Executor(3, far)
    assert not any(thread.is_alive() for thread in started)
