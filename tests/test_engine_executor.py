"""The executor: tasks that end, exceptions of threads, one BLAS thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from dorylus_hpc.engine.executor import Executor


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


def test_blas_has_one_thread_inside_and_its_own_again_outside() -> None:
    def blas() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    np.ones((2, 2)) @ np.ones((2, 2))
    before = blas()
    with Executor(1):
        assert set(blas()) == {1}
    assert blas() == before
