"""What is made to go wrong: a pure function of a seed and the number of the invocation."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields
from enum import Enum
from typing import NamedTuple

from dorylus_hpc.errors import InputError


class Fate(Enum):
    """What becomes of an invocation; one of these."""

    RUNS = "runs"
    DROP = "drop"  # swallowed: it never runs, and its caller is left waiting
    CRASH_BEFORE = "crash_before"  # the sandbox is killed in place of getting the event
    CRASH_AFTER = "crash_after"  # the sandbox is killed when it has answered; the answer is lost


class Fault(NamedTuple):
    """What happens to one invocation.

    Attributes
    ----------
    fate
        What becomes of it.
    delay
        Seconds that it is held before it runs.
    duplicate
        Whether it also runs in a second sandbox, whose answer is thrown away.
    throttle
        Whether it is refused with 429, which comes before everything else.
    slow_start
        Seconds that the start of a sandbox takes longer, if one is started.
    """

    fate: Fate = Fate.RUNS
    delay: float = 0.0
    duplicate: bool = False
    throttle: bool = False
    slow_start: float = 0.0


@dataclass(frozen=True)
class Faults:
    """Rates of faults, in [0, 1], and what goes with them.

    Attributes
    ----------
    seed
        Of all decisions.
    drop, crash_before, crash_after
        Shares of the invocations that end so (`Fate`); together at most 1.
    delay, delay_seconds
        Share of the invocations that are held, and how long.
    duplicate
        Share that runs twice.
    throttle, throttle_calls
        Share that begins a burst of 429, and how many calls in a row a burst refuses.
    slow_start, slow_start_seconds
        Share of the invocations whose sandbox, if one is started, starts so much later.
    """

    seed: int = 0
    drop: float = 0.0
    crash_before: float = 0.0
    crash_after: float = 0.0
    delay: float = 0.0
    delay_seconds: float = 1.0
    duplicate: float = 0.0
    throttle: float = 0.0
    throttle_calls: int = 5
    slow_start: float = 0.0
    slow_start_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name in ("drop", "crash_before", "crash_after", "delay", "duplicate", "throttle", "slow_start"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"faults: {name}={getattr(self, name)}: a share in [0, 1] is needed")
        for name in ("delay_seconds", "slow_start_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"faults: {name}={getattr(self, name)}: seconds, at least 0, are needed")
        if self.throttle_calls < 1:
            raise InputError(f"faults: throttle_calls={self.throttle_calls}: at least 1 is needed")
        if self.drop + self.crash_before + self.crash_after > 1:
            raise InputError("faults: drop, crash_before and crash_after together are more than 1")

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Read ``drop=0.1,seed=3``; an empty text is no faults.

        Raises
        ------
        InputError
            If a name is unknown or a value does not fit.
        """
        kinds = {one.name: int if one.type == "int" else float for one in fields(cls)}
        values: dict[str, float] = {}
        for item in filter(None, (item.strip() for item in text.split(","))):
            name, _, value = item.partition("=")
            if name not in kinds:
                raise InputError(f"faults: {item!r}: {name!r} is none of {', '.join(kinds)}")
            if name in values:
                raise InputError(f"faults: {item!r}: {name} is given twice")
            try:
                values[name] = kinds[name](value)
            except ValueError:
                raise InputError(f"faults: {item!r}: {value!r} is no {kinds[name].__name__}") from None
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The text that `parse` reads; only what differs from the defaults."""
        given = ((one.name, getattr(self, one.name), one.default) for one in fields(self))
        return ",".join(f"{name}={value!r}" for name, value, default in given if value != default)

    def decide(self, number: int) -> Fault:
        """What happens to invocation `number` (from 0), whatever happened to others."""
        if not any((self.drop, self.crash_before, self.crash_after, self.delay, self.duplicate,
                    self.throttle, self.slow_start)):  # fmt: skip
            return Fault()
        fate, delay, duplicate, slow_start, _ = self._draws(number)
        first = max(number - self.throttle_calls + 1, 0)
        return Fault(
            self._fate(fate),
            self.delay_seconds if delay < self.delay else 0.0,
            duplicate < self.duplicate,
            self.throttle > 0
            and any(self._draws(one)[4] < self.throttle for one in range(first, number + 1)),
            self.slow_start_seconds if slow_start < self.slow_start else 0.0,
        )

    def _draws(self, number: int) -> list[float]:
        generator = random.Random(f"{self.seed}:{number}")
        return [generator.random() for _ in range(5)]

    def _fate(self, draw: float) -> Fate:
        for fate in (Fate.DROP, Fate.CRASH_BEFORE, Fate.CRASH_AFTER):
            share = getattr(self, fate.value)
            if draw < share:
                return fate
            draw -= share
        return Fate.RUNS
