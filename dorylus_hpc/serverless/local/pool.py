"""Which sandbox gets a call: cold and warm starts, reserved concurrency, idle sandboxes, injected faults."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections import Counter
from typing import Any, BinaryIO

from dorylus_hpc.serverless.local.faults import Fate, Fault
from dorylus_hpc.serverless.local.folders import Folders
from dorylus_hpc.serverless.local.limits import Limits, sandbox_name
from dorylus_hpc.serverless.local.sandbox import Outcome, Sandbox, killed
from dorylus_hpc.serverless.local.settings import LocalSettings

_CLEAN_UPS = 100  # of hundredths of a second


class Throttled(Exception):
    """The concurrency is used up, or a fault says so."""


class Dropped(Exception):
    """A fault swallowed the call; nobody will answer."""


class Pool:
    """The sandboxes of the function.

    Parameters
    ----------
    settings, folders
        Of the service.
    log
        For what sandboxes print.
    """

    def __init__(self, settings: LocalSettings, folders: Folders, log: BinaryIO | None) -> None:
        self._settings = settings
        self._folders = folders
        self._log = log
        self._limits = Limits(settings.limits, settings.memory_mb)
        self._idle: list[Sandbox] = []  # the most recently used last
        self._all: set[Sandbox] = set()
        self._busy = 0
        self._numbers = 0
        self._made = 0
        self._counts: Counter[str] = Counter()
        self._injected: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reaper = asyncio.get_running_loop().create_task(self._reap())

    async def invoke(self, request_id: str, payload: bytes) -> Outcome:
        """Run the handler in a sandbox.

        Raises
        ------
        Throttled, Dropped
        """
        fault = self._settings.faults.decide(self._numbers)
        self._numbers += 1
        self._counts["invocations"] += 1
        if fault.throttle:
            self._injected["throttle"] += 1
            raise self._throttled()
        if fault.fate is not Fate.RUNS:
            self._injected[fault.fate.value] += 1
        if fault.fate is Fate.DROP:
            raise Dropped
        if fault.delay:
            self._injected["delay"] += 1
            await asyncio.sleep(fault.delay)
        if not self._idle and self._busy >= self._settings.concurrency:
            raise self._throttled()
        if fault.duplicate:
            self._injected["duplicate"] += 1
            self._keep(self._run_duplicate(payload))
        self._busy += 1
        try:
            outcome = await self._run(request_id, payload, fault)
        finally:
            self._busy -= 1
        self._count(outcome)
        return outcome

    def statistics(self) -> dict[str, Any]:
        """Count of what happened so far."""
        names = (
            "invocations",
            "completed",
            "cold_starts",
            "throttles",
            "function_errors",
            "timeouts",
            "crashes",
        )
        billed = self._counts["billed_ms"] / 1000
        return {
            **{name: self._counts[name] for name in names},
            "billed_seconds": billed,
            "gb_seconds": billed * self._settings.memory_mb / 1024,
            "sandboxes": {"busy": len(self._all) - len(self._idle), "idle": len(self._idle)},
            "pids": {"busy": self._pids(self._all - set(self._idle)), "idle": self._pids(self._idle)},
            "injected": {
                name: self._injected[name]
                for name in (
                    "drop",
                    "crash_before",
                    "crash_after",
                    "delay",
                    "duplicate",
                    "throttle",
                    "slow_start",
                )
            },
            "limits": self._limits.kind,
        }

    async def close(self) -> None:
        """End all sandboxes."""
        for task in (self._reaper, *self._tasks):
            task.cancel()
        sandboxes = list(self._all)
        for sandbox in sandboxes:
            sandbox.kill()
        await asyncio.gather(*(sandbox.finished.wait() for sandbox in sandboxes))
        for _ in range(_CLEAN_UPS):
            if self._limits.clean_up():
                break
            await asyncio.sleep(0.01)

    def _throttled(self) -> Throttled:
        self._counts["throttles"] += 1
        return Throttled()

    async def _run(self, request_id: str, payload: bytes, fault: Fault) -> Outcome:
        sandbox = self._take(fault)
        try:
            outcome = await sandbox.call(request_id, payload, crash=fault.fate is Fate.CRASH_BEFORE)
        except BaseException:
            sandbox.kill()
            self._all.discard(sandbox)
            raise
        self._counts["billed_ms"] += outcome.billed_ms
        if fault.fate is Fate.CRASH_AFTER:  # the handler has answered, and nobody will hear it
            sandbox.kill()
            return dataclasses.replace(outcome, **killed(request_id))
        if sandbox.alive:
            self._idle.append(sandbox)
        return outcome

    def _take(self, fault: Fault) -> Sandbox:
        if self._idle:
            return self._idle.pop()
        self._counts["cold_starts"] += 1
        if fault.slow_start:
            self._injected["slow_start"] += 1
        self._made += 1
        name = sandbox_name(self._made)
        sandbox = Sandbox(
            name,
            self._settings,
            self._folders,
            self._limits.bounds(name),
            log=self._log,
            start_delay=self._settings.cold_start + fault.slow_start,
            ended=self._forget,
        )
        self._all.add(sandbox)
        return sandbox

    async def _run_duplicate(self, payload: bytes) -> None:
        """In a sandbox beyond the reserved concurrency: the function's owner did not ask for this."""
        await self._run(str(uuid.uuid4()), payload, Fault())

    def _count(self, outcome: Outcome) -> None:
        self._counts["completed"] += 1
        if outcome.error == "Sandbox.Timedout":
            self._counts["timeouts"] += 1
        elif outcome.error == "Runtime.ExitError":
            self._counts["crashes"] += 1
        elif outcome.error is not None:
            self._counts["function_errors"] += 1

    def _forget(self, sandbox: Sandbox) -> None:
        self._all.discard(sandbox)
        if sandbox in self._idle:
            self._idle.remove(sandbox)

    async def _reap(self) -> None:
        """End sandboxes that had nothing to do for long, the longest first."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(self._settings.idle_seconds / 4, 5.0))
            oldest = loop.time() - self._settings.idle_seconds
            for sandbox in [one for one in self._idle if one.idle_since < oldest]:
                self._idle.remove(sandbox)
                sandbox.kill()
            self._limits.clean_up()

    def _keep(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _pids(sandboxes: set[Sandbox] | list[Sandbox]) -> list[int]:
        return sorted(sandbox.pid for sandbox in sandboxes if sandbox.pid is not None)
