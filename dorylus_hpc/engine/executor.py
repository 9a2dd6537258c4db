"""Runs the tasks of this rank on its threads.

Kernels and BLAS release the GIL, so plain threads do. Inside a task everything runs on one thread, kernels
and BLAS alike: parallel work is in the intervals, a result never depends on the number of threads, and no
second pool of threads waits (and spins) beside this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from types import TracebackType

from threadpoolctl import threadpool_limits

from dorylus_hpc.serverless.tasks import DenseTask, Remote

CPU, IO = "cpu", "io"


class _Threads:
    """Threads that do jobs in the order in which they were given.

    A queue without anything else: `ThreadPoolExecutor` makes a future of every job and looks for idle
    threads, which takes longer than some tasks.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None] | None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None], future: Future[None] | None = None) -> None:
        """Have a job done, which raises nothing; the future is cancelled if it never begins."""
        self._jobs.put((job, future))

    def close(self) -> None:
        """Drop what has not begun, and wait for what has."""
        while True:
            try:
                left = self._jobs.get_nowait()
            except Empty:
                break
            if left is not None and left[1] is not None:
                left[1].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (one := self._jobs.get()) is not None:
            job, _ = one
            del one  # what it holds is not kept until the next one comes
            job()
            del job


class Executor:
    """Threads for each kind of worker; use as a context manager.

    Parameters
    ----------
    threads
        At least 1, for the work on this server's cores. The calling thread, which drives the schedule and
        MPI, is not one of them.
    others
        Workers of other kinds, by name: threads that mostly wait for somebody far away. There is always one
        called ``io``, which reads files.
    remotes
        Workers elsewhere, by name, and how many; they take `DenseTask`.
    """

    def __init__(
        self,
        threads: int,
        others: Mapping[str, int] | None = None,
        remotes: Mapping[str, tuple[Remote, int]] | None = None,
    ) -> None:
        self.threads = threads
        counts = {CPU: threads, IO: 1, **(others or {})}
        self._remotes = {name: remote for name, (remote, _) in (remotes or {}).items()}
        self.workers = counts | {name: count for name, (_, count) in (remotes or {}).items()}
        self._pools = {name: _Threads(count, name) for name, count in counts.items()}
        self._blas = threadpool_limits(limits=1, user_api="blas")
        self._ended: SimpleQueue[tuple[Hashable, BaseException | None]] = SimpleQueue()

    def start(self, name: Hashable, task: Callable[[], object] | DenseTask, resource: str = CPU) -> None:
        """Give a task to a thread, or elsewhere; `wait` tells its name when it has ended."""
        if isinstance(task, DenseTask):
            self._remotes[resource].submit(task, lambda error: self._ended.put((name, error)))
            return

        def run() -> None:
            try:
                task()
            except BaseException as error:
                self._ended.put((name, error))
            else:
                self._ended.put((name, None))

        self._pools[resource].submit(run)

    def background(self, job: Callable[[], None], resource: str) -> Future[None]:
        """Have a job done beside the tasks; `wait` tells nothing of it. It may never begin if this ends."""
        future: Future[None] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._pools[resource].submit(run, future)
        return future

    def wait(self, seconds: float | None) -> Hashable | None:
        """Sleep until a task ends, and return its name; None if none has after so many seconds.

        Raises
        ------
        BaseException
            What the task raised.
        """
        try:
            if seconds == 0:
                name, error = self._ended.get_nowait()
            else:
                name, error = self._ended.get(timeout=seconds)
        except Empty:
            return None
        if error is not None:
            raise error
        return name

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
        for pool in self._pools.values():
            pool.close()
        self._blas.restore_original_limits()


def lane_name() -> str:
    """Return the name of the thread that runs this: ``cpu_0``, ``dense_3`` ..."""
    return threading.current_thread().name
