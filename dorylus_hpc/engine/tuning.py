"""Lets the autotuner see a run, and does what it decides."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dorylus_hpc.engine.pipeline import Line, Loop
from dorylus_hpc.engine.runner import DENSE
from dorylus_hpc.report.trace import Tracer
from dorylus_hpc.serverless.autotuner import Autotuner, Integrals

if TYPE_CHECKING:
    from dorylus_hpc.serverless.controller import Controller


class Tuning:
    """Observes the training line of a graph server, and sets the number of its Lambda workers.

    Parameters
    ----------
    loop, line
        Of the graph server; the line has its first schedule.
    controller
        Whose workers they are.
    tuner
        Decides.
    tracer
        Takes the decisions.
    """

    def __init__(
        self, loop: Loop, line: Line, controller: Controller, tuner: Autotuner, tracer: Tracer
    ) -> None:
        self._loop, self._line, self._controller = loop, line, controller
        self._tuner, self._tracer = tuner, tracer
        self._integrals = Integrals(loop.threads, time.perf_counter())
        loop.observe(self._see)

    def _see(self, dense_ended: int) -> None:
        """Take note of what runs and waits now."""
        schedule, threads = self._line.schedule, self._loop.threads
        if schedule is None:
            return
        self._integrals.dense_ended += dense_ended
        at_cores = self._loop.at_cores
        self._integrals.note(
            time.perf_counter(),
            dense_running=schedule.running(DENSE),
            dense_ready=schedule.ready(DENSE),
            cpu_running=min(at_cores, threads),
            cpu_ready=max(0, at_cores - threads),
        )

    def end_epoch(self) -> None:
        """Let the autotuner decide, after an epoch."""
        now = time.perf_counter()
        before = self._tuner.workers
        decision = self._tuner.observe(self._integrals.take(now))
        self._tracer.note(now, "Lambda workers", decision.workers, decision.reason)
        if decision.workers == before:
            return
        self.resize(decision.workers)

    def resize(self, workers: int) -> None:
        """Use another number of workers from now on."""
        self._controller.limit(workers)
        self._loop.resize(self._line, DENSE, workers)
