"""The executor: order of results, exceptions of threads, one BLAS thread."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from dorylus_hpc.engine.executor import Executor


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_come_in_the_order_of_the_tasks(threads: int) -> None:
    def task(k: int) -> int:
        time.sleep(0.002 * (5 - k))
        return k

    with Executor(threads) as executor:
        assert executor.run([lambda k=k: task(k) for k in range(6)]) == list(range(6))
        assert executor.run([]) == []


def test_tasks_really_run_at_once() -> None:
    meeting = threading.Barrier(2, timeout=10)
    with Executor(2) as executor:
        assert sorted(executor.run([meeting.wait, meeting.wait])) == [0, 1]


@pytest.mark.parametrize("threads", [1, 2])
def test_an_exception_of_a_task_reaches_the_caller(threads: int) -> None:
    def fails() -> None:
        raise ZeroDivisionError("in a task")

    with Executor(threads) as executor, pytest.raises(ZeroDivisionError, match="in a task"):
        executor.run([lambda: None, fails, lambda: None])


def test_blas_has_one_thread_inside_and_its_own_again_outside() -> None:
    def blas() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    np.ones((2, 2)) @ np.ones((2, 2))
    before = blas()
    with Executor(1):
        assert set(blas()) == {1}
    assert blas() == before
