"""Drives the schedule: one thread for it and for MPI, the executor's for the tasks.

The loop sleeps until a task ends. While messages are under way it also looks at MPI now and then, at
intervals that grow to a millisecond: that is what moves large messages while kernels run, and it spins
on nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dorylus_hpc.comm.blocks import BlockExchange
from dorylus_hpc.engine.executor import Executor
from dorylus_hpc.engine.schedule import Action, Install, Mode, Round, Run, Schedule, Send
from dorylus_hpc.engine.wiring import Wiring

_SHORTEST, _LONGEST = 20e-6, 1e-3  # seconds between two looks at MPI


class Pipeline:
    """Runs passes over the hosted parts, one after the other.

    Parameters
    ----------
    wiring
        Tables, groups and topology.
    exchange
        Moves ghost blocks.
    executor
        Threads to run on.

    Attributes
    ----------
    sent_bytes : int
        Bytes of ghost rows sent.
    seconds : dict
        ``SC`` and ``dSC``: packing, sending and placing rows; ``wait``: no task ran here.
    """

    def __init__(self, wiring: Wiring, exchange: BlockExchange, executor: Executor) -> None:
        self.sent_bytes = 0
        self.seconds = {"SC": 0.0, "dSC": 0.0, "wait": 0.0}
        self._wiring, self._exchange, self._executor = wiring, exchange, executor
        self._numbers = {
            way: {block: number for number, block in enumerate(blocks)}
            for way, blocks in wiring.blocks.items()
        }

    def run(self, mode: Mode, kind: str, start: Callable[[int, int], Callable[[], object]]) -> None:
        """Run one pass. Collective over graph servers.

        Parameters
        ----------
        mode
            ``nopipe`` or ``pipe``.
        kind
            Of the pass: ``train``, ``evaluate`` or ``setup``.
        start
            Makes the task of (unit, group).
        """
        wiring, exchange = self._wiring, self._exchange
        schedule = Schedule(
            mode,
            wiring.topology,
            wiring.tables,
            wiring.groups,
            [Round(kind, 1)],
            workers={"cpu": self._executor.threads},
            reads=wiring.reads,
        )
        running = self._act(schedule, schedule.start(), start)
        for table, block in exchange.begin_pass(wiring.exchanged[kind]):
            running += self._arrive(schedule, table, block, start)
        pause = _SHORTEST
        while running or exchange.busy or not schedule.finished:
            began = time.perf_counter()
            unit = self._executor.wait(pause if exchange.busy else None) if running else None
            if unit is not None:
                running += self._act(schedule, schedule.task_done(unit), start) - 1
                pause = _SHORTEST
            elif not running:
                time.sleep(pause)
                self.seconds["wait"] += time.perf_counter() - began
            if exchange.busy:
                arrived = exchange.poll()
                for table, block in arrived:
                    running += self._arrive(schedule, table, block, start)
                pause = _SHORTEST if arrived else min(1.5 * pause, _LONGEST)

    def _arrive(
        self,
        schedule: Schedule,
        table: int,
        block: tuple[int, int],
        start: Callable[[int, int], Callable[[], object]],
    ) -> int:
        number = self._numbers[self._wiring.tables[table].direction][block]
        return self._act(schedule, schedule.block_arrived(table, number, 1), start)

    def _act(
        self, schedule: Schedule, actions: list[Action], start: Callable[[int, int], Callable[[], object]]
    ) -> int:
        """Do what the schedule wants; return how many tasks were started."""
        started = 0
        for action in actions:
            if isinstance(action, Run):
                self._executor.start(action.unit, start(action.unit, action.group))
                started += 1
            elif isinstance(action, Send):
                started += self._send(schedule, action, start)
            elif isinstance(action, Install):
                began = time.perf_counter()
                table = self._wiring.tables[action.table]
                block = action.entry - len(self._wiring.topology.units)
                self._exchange.install(action.table, self._wiring.blocks[table.direction][block])
                self._note(action.table, began)
        return started

    def _send(
        self, schedule: Schedule, action: Send, start: Callable[[int, int], Callable[[], object]]
    ) -> int:
        began = time.perf_counter()
        unit = self._wiring.topology.units[action.unit]
        block = (unit.part, unit.interval)
        self.sent_bytes += self._exchange.send(action.table, block)
        self._note(action.table, began)
        # What other parts of this rank need is there at once.
        if block in self._numbers[self._wiring.tables[action.table].direction]:
            return self._arrive(schedule, action.table, block, start)
        return 0

    def _note(self, table: int, began: float) -> None:
        kind = "SC" if self._wiring.tables[table].direction == "in" else "dSC"
        self.seconds[kind] += time.perf_counter() - began
