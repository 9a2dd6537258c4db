"""Runs the tasks of this rank on its threads.

Kernels and BLAS release the GIL, so plain threads do. Inside a task everything runs on one thread, kernels
and BLAS alike: parallel work is in the intervals, a result never depends on the number of threads, and no
second pool of threads waits (and spins) beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from threadpoolctl import threadpool_limits

_T = TypeVar("_T")


class Executor:
    """A pool of threads; use as a context manager.

    Parameters
    ----------
    threads
        At least 1. With one, tasks run in the calling thread.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="task") if threads > 1 else None
        self._blas = threadpool_limits(limits=1, user_api="blas")

    def run(self, tasks: Sequence[Callable[[], _T]]) -> list[_T]:
        """Run all tasks, in any order, and return their results in the order given.

        Raises
        ------
        BaseException
            The first task's exception, after all tasks have ended.
        """
        if self._pool is None or len(tasks) < 2:
            return [task() for task in tasks]
        futures = [self._pool.submit(task) for task in tasks]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def __enter__(self) -> Executor:
        """Return the executor."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the threads and give BLAS its own back."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._blas.restore_original_limits()
