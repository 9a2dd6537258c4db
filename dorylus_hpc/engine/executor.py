"""Runs the tasks of this rank on its threads.

Kernels and BLAS release the GIL, so plain threads do. Inside a task everything runs on one thread, kernels
and BLAS alike: parallel work is in the intervals, a result never depends on the number of threads, and no
second pool of threads waits (and spins) beside this one.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NamedTuple

from threadpoolctl import threadpool_limits

from dorylus_hpc.errors import InputError
from dorylus_hpc.serverless.tasks import DenseTask, Remote

CPU, IO = "cpu", "io"


class Delayed(NamedTuple):
    """A task whose worker is far away: it begins no earlier than so many seconds after it was given."""

    run: Callable[[], object]
    seconds: float


class _Threads:
    """Threads that do jobs in the order in which they were given.

    A queue without anything else: `ThreadPoolExecutor` makes a future of every job and looks for idle
    threads, which takes longer than some tasks.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], Future[None] | None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        _start_threads(self, count, name)

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


class _Far:
    """Threads that do each job when its time has come, and those that are due in the order of their times.

    Workers far away are many, the threads few: what all of them compute here would else wake as many threads
    at once, each of which ends late because all others take their turns.
    """

    def __init__(self, count: int, name: str) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._given, self._closed = 0, False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        _start_threads(self, count, name)

    def submit(self, job: Callable[[], None], seconds: float) -> None:
        """Have a job done after so many seconds."""
        with self._changed:
            self._given += 1
            heapq.heappush(self._due, (time.perf_counter() + seconds, self._given, job))
            if self._due[0][1] == self._given:  # due before what a thread sleeps for
                self._changed.notify()

    def close(self) -> None:
        """Drop what has not begun, and wait for what has."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._closed:
                left = self._due[0][0] - time.perf_counter() if self._due else None
                if left is not None and left <= 0:
                    job = heapq.heappop(self._due)[2]
                    if self._due:
                        self._changed.notify()
                    return job
                self._changed.wait(left)
        return None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job()
            del job  # what it holds is not kept until the next one comes


def _start_threads(pool: _Threads | _Far, count: int, name: str) -> None:
    """Start the threads of a pool, or none where the system does not allow that many."""
    try:
        for number in range(count):
            thread = threading.Thread(target=pool._work, name=f"{name}_{number}", daemon=True)
            thread.start()
            pool._threads.append(thread)
    except RuntimeError as error:
        started = len(pool._threads)
        pool.close()
        raise InputError(
            f"--threads {count}: the system started only {started} of them ({error}): use fewer"
        ) from error


class Executor:
    """Threads for each kind of worker; use as a context manager.

    Parameters
    ----------
    threads
        At least 1, for the work on this server's cores. The calling thread, which drives the schedule and
        MPI, is not one of them.
    far
        Workers far away, by name, and how many; they take `Delayed` tasks, and compute here, on as many
        threads as there are for other work.
    remotes
        Workers elsewhere, by name, and how many; they take `DenseTask`.

    Raises
    ------
    InputError
        More threads than the system allows.
    """

    def __init__(
        self,
        threads: int,
        far: Mapping[str, int] | None = None,
        remotes: Mapping[str, tuple[Remote, int]] | None = None,
    ) -> None:
        self.threads = threads
        counts = {CPU: threads, IO: 1}  # a thread reads files
        self._remotes = {name: remote for name, (remote, _) in (remotes or {}).items()}
        self.workers = (
            counts | dict(far or {}) | {name: count for name, (_, count) in (remotes or {}).items()}
        )
        self._pools = {name: _Threads(count, name) for name, count in counts.items()}
        self._far = {name: _Far(threads, name) for name in far or {}}
        self._blas = threadpool_limits(limits=1, user_api="blas")
        self._ended: SimpleQueue[tuple[Hashable, BaseException | None]] = SimpleQueue()

    def start(
        self, name: Hashable, task: Callable[[], object] | Delayed | DenseTask, resource: str = CPU
    ) -> None:
        """Give a task to a thread, or elsewhere; `wait` tells its name when it has ended."""
        if isinstance(task, DenseTask):
            self._remotes[resource].submit(task, lambda error: self._ended.put((name, error)))
            return

        work = task.run if isinstance(task, Delayed) else task

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._ended.put((name, error))
            else:
                self._ended.put((name, None))

        if isinstance(task, Delayed):
            self._far[resource].submit(run, task.seconds)
        else:
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
        for far in self._far.values():
            far.close()
        for pool in self._pools.values():
            pool.close()
        self._blas.restore_original_limits()


def lane_name() -> str:
    """Return the name of the thread that runs this: ``cpu_0``, ``dense_3`` ..."""
    return threading.current_thread().name
