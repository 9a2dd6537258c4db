"""Runs the tasks of this rank on its threads.

Kernels and BLAS release the GIL, so plain threads do. Inside a task everything runs on one thread, kernels
and BLAS alike: parallel work is in the intervals, a result never depends on the number of threads, and no
second pool of threads waits (and spins) beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from types import TracebackType

from threadpoolctl import threadpool_limits


class Executor:
    """A pool of threads; use as a context manager.

    Parameters
    ----------
    threads
        At least 1. The calling thread, which drives the schedule and MPI, is not one of them.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="task")
        self._blas = threadpool_limits(limits=1, user_api="blas")
        self._ended: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()

    def start(self, number: int, task: Callable[[], object]) -> None:
        """Give a task to a thread; `wait` tells its number when it has ended."""

        def run() -> None:
            try:
                task()
            except BaseException as error:
                self._ended.put((number, error))
            else:
                self._ended.put((number, None))

        self._pool.submit(run)

    def wait(self, seconds: float | None) -> int | None:
        """Sleep until a task ends, and return its number; None if none has after so many seconds.

        Raises
        ------
        BaseException
            What the task raised.
        """
        try:
            number, error = self._ended.get(timeout=seconds)
        except Empty:
            return None
        if error is not None:
            raise error
        return number

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
        self._pool.shutdown(cancel_futures=True)
        self._blas.restore_original_limits()
