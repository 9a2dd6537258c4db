"""What a run costs: instances by the second, Lambda by the GB-second and the request.

Prices are in the dated `prices.toml` beside this module; a file of the user's overrides any of them. A
server whose instance type is not known has no price, and then the run has no total: a part must not be
taken for the whole.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from dorylus_hpc.errors import InputError

ARCHITECTURES = ("x86_64", "arm64")
DEFAULT_REGION = "us-east-1"
_MB_PER_GB = 1024
_SECONDS_PER_HOUR = 3600

# The keys of a file of prices; ANY stands for a name that is not fixed, float for a price.
_ANY = "*"
_KEYS: Mapping[str, Any] = {
    "dated": str,
    "currency": str,
    "regions": {
        _ANY: {
            "ec2_hour": {_ANY: float},
            "lambda": {"per_million_requests": float, "gb_second": dict.fromkeys(ARCHITECTURES, float)},
        }
    },
}


# ---- prices ----


@dataclass(frozen=True)
class Prices:
    """Prices of one region.

    Attributes
    ----------
    region
        As AWS names it.
    dated
        When they were looked up.
    currency
        Of all of them.
    ec2_hour
        An instance, by type.
    gb_second
        A GB-second of Lambda, by architecture.
    per_million_requests
        A million invocations of Lambda.
    """

    region: str
    dated: str
    currency: str
    ec2_hour: Mapping[str, float]
    gb_second: Mapping[str, float]
    per_million_requests: float

    def instance(self, kind: str) -> float:
        """Return the price of an hour of an instance type.

        Raises
        ------
        InputError
            It has no price here.
        """
        if kind not in self.ec2_hour:
            near = difflib.get_close_matches(kind, self.ec2_hour, n=3)
            some = [*self.ec2_hour][:: max(1, len(self.ec2_hour) // 8)]
            hint = f"near: {', '.join(near)}" if near else f"known: {', '.join(some)} ..."
            raise InputError(
                f"--instance-type {kind}: no price in {self.region} ({hint}); a --prices file can add it"
            )
        return self.ec2_hour[kind]


def load_prices(path: Path | None = None, *, region: str = DEFAULT_REGION) -> Prices:
    """Return the prices of a region.

    Parameters
    ----------
    path
        A TOML file with the keys of `prices.toml`. Its prices override the packaged ones one by one; with
        another currency it stands alone. It must say when it is from (`dated`).
    region
        As AWS names it.

    Raises
    ------
    InputError
        The file cannot be read or has an unknown key or a wrong value, or the region has no prices.
    """
    packaged = resources.files("dorylus_hpc.report").joinpath("prices.toml").read_text(encoding="utf-8")
    table = tomllib.loads(packaged)
    where = "the packaged prices"
    if path is not None:
        own = _read(path)
        table = own if own.get("currency", table["currency"]) != table["currency"] else _merged(table, own)
        where = f"{path} and {where}"
    try:
        found = table["regions"][region]
        return Prices(
            region=region,
            dated=table["dated"],
            currency=table["currency"],
            ec2_hour=found.get("ec2_hour", {}),
            gb_second={name: found["lambda"]["gb_second"][name] for name in ARCHITECTURES},
            per_million_requests=found["lambda"]["per_million_requests"],
        )
    except KeyError as error:
        known = ", ".join(table.get("regions", {})) or "none"
        missing = "no prices for it" if error.args[0] == region else f"no price {error.args[0]!r} for it"
        raise InputError(
            f"--region {region}: {missing} in {where} (regions there: {known}); a --prices file can add it"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    """Return the checked content of a user's file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prices {path}: cannot be read: {error}") from error
    except ValueError as error:
        raise InputError(f"prices {path}: not valid TOML: {error}") from error
    _check(table, _KEYS, str(path), ())
    if "dated" not in table:
        raise InputError(f'prices {path}: say when they are from, such as dated = "2026-11"')
    return table


def _check(value: Any, wanted: Any, file: str, keys: tuple[str, ...]) -> None:
    """Refuse an unknown key or a value of the wrong kind, by the keys that lead to it."""
    name = ".".join(keys)
    if isinstance(wanted, Mapping):
        if not isinstance(value, Mapping):
            raise InputError(f"prices {file}: {name} must be a table, got {value!r}")
        for key, inner in value.items():
            kind = wanted.get(key, wanted.get(_ANY))
            if kind is None:
                near = difflib.get_close_matches(key, wanted, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(wanted)}"
                raise InputError(f"prices {file}: unknown key {'.'.join((*keys, key))!r}: {hint}")
            _check(inner, kind, file, (*keys, key))
    elif wanted is str:
        if not isinstance(value, str) or not value:
            raise InputError(f"prices {file}: {name} must be text, got {value!r}")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InputError(f"prices {file}: {name} must be a number >= 0, got {value!r}")


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return one table with the values of another put over it."""
    result = dict(below)
    for key, value in above.items():
        inner = result.get(key)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        result[key] = _merged(inner, value) if both else value  # type: ignore[arg-type]
    return result


# ---- what is billed ----


def billed_seconds(seconds: float) -> float:
    """Return the time that Lambda bills for one invocation: whole milliseconds, rounded up.

    Parameters
    ----------
    seconds
        Of the handler, plus those of the sandbox's start for an invocation that had to start one.
    """
    return math.ceil(round(seconds * 1e3, 6)) / 1e3  # 0.007 s is 7 ms, not 7.000000000000001


def gb_seconds(memory_mb: int, seconds: float) -> float:
    """Return the GB-seconds that Lambda bills for one invocation; `seconds` as in `billed_seconds`."""
    return memory_mb / _MB_PER_GB * billed_seconds(seconds)


@dataclass(frozen=True)
class Fleet:
    """What is paid for.

    Attributes
    ----------
    graph_servers, parameter_servers
        Instances of each. A rank is an instance of its own; where several share one, count instances.
    graph_type, parameter_type
        Their types; None where not known.
    architecture
        Of the Lambda function.
    """

    graph_servers: int
    parameter_servers: int = 0
    graph_type: str | None = None
    parameter_type: str | None = None
    architecture: str = "x86_64"


@dataclass(frozen=True)
class Cost:
    """What something cost, by what was paid for; None where it has no price."""

    graph_servers: float | None
    parameter_servers: float | None
    lambda_compute: float
    lambda_requests: float

    @property
    def total(self) -> float | None:
        """All of it; None if a part has no price."""
        if self.graph_servers is None or self.parameter_servers is None:
            return None
        return self.priced

    @property
    def priced(self) -> float:
        """All that has a price: at least this was spent."""
        servers = (self.graph_servers or 0.0) + (self.parameter_servers or 0.0)
        return servers + self.lambda_compute + self.lambda_requests

    def __add__(self, other: Cost) -> Cost:
        """Return both together."""
        return Cost(
            _sum(self.graph_servers, other.graph_servers),
            _sum(self.parameter_servers, other.parameter_servers),
            self.lambda_compute + other.lambda_compute,
            self.lambda_requests + other.lambda_requests,
        )


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


class Bill:
    """Prices a fleet.

    Parameters
    ----------
    prices
        Of the region.
    fleet
        What is paid for.

    Raises
    ------
    InputError
        A type of instance has no price.
    """

    def __init__(self, prices: Prices, fleet: Fleet) -> None:
        self.prices = prices
        self.fleet = fleet
        self._graph = _servers_hour(prices, fleet.graph_servers, fleet.graph_type)
        self._parameter = _servers_hour(prices, fleet.parameter_servers, fleet.parameter_type)
        self._gb_second = prices.gb_second[fleet.architecture]

    def cost(self, seconds: float, *, gb_seconds: float = 0.0, requests: int = 0) -> Cost:
        """Return the cost of a stretch of time.

        Parameters
        ----------
        seconds
            For which the servers ran.
        gb_seconds
            That Lambda bills, all invocations together.
        requests
            Invocations, the failed ones too; AWS bills no throttled ones.
        """
        return Cost(
            None if self._graph is None else self._graph * seconds / _SECONDS_PER_HOUR,
            None if self._parameter is None else self._parameter * seconds / _SECONDS_PER_HOUR,
            self._gb_second * gb_seconds,
            self.prices.per_million_requests * requests / 1e6,
        )

    def summary(self, cost: Cost) -> dict[str, Any]:
        """Return a cost as `summary.json` has it."""
        return {
            "graph_servers": cost.graph_servers,
            "parameter_servers": cost.parameter_servers,
            "lambda_compute": cost.lambda_compute,
            "lambda_requests": cost.lambda_requests,
            "total": cost.total,
            "currency": self.prices.currency,
            "prices_dated": self.prices.dated,
        }

    def not_priced(self) -> str:
        """Say in a line what has no price and why; empty if all has one."""
        without = [
            name
            for name, hour in (("graph servers", self._graph), ("parameter servers", self._parameter))
            if hour is None
        ]
        return f"no price for {' and '.join(without)}: no instance type was given" if without else ""


def _servers_hour(prices: Prices, count: int, kind: str | None) -> float | None:
    """Return the price of an hour of some servers; None if there are some of unknown type."""
    if count == 0:
        return 0.0
    return None if kind is None else count * prices.instance(kind)


# ---- while a run goes on ----


@dataclass
class Meter:
    """Adds up a run's cost, epoch by epoch, from counters that only grow.

    Attributes
    ----------
    bill
        Prices the fleet.
    total
        Up to the last `advance`.
    """

    bill: Bill
    total: Cost = field(init=False)
    _seen: tuple[float, float, int] = field(default=(0.0, 0.0, 0), init=False)

    def __post_init__(self) -> None:
        """Start from nothing."""
        self.total = self.bill.cost(0.0)

    def advance(self, seconds: float, *, gb_seconds: float = 0.0, requests: int = 0) -> Cost:
        """Return the cost since the last call.

        Parameters
        ----------
        seconds, gb_seconds, requests
            As in `Bill.cost`, since the run began: setting up counts too.
        """
        now = (seconds, gb_seconds, requests)
        if any(new < old for new, old in zip(now, self._seen, strict=True)):
            raise ValueError(f"counters of a run only grow: {now} after {self._seen}")
        step = self.bill.cost(
            seconds - self._seen[0],
            gb_seconds=gb_seconds - self._seen[1],
            requests=requests - self._seen[2],
        )
        self._seen = now
        self.total += step
        return step


def value(seconds: float, cost: float | None) -> float | None:
    """Return what a run is worth, as Dorylus (section 7) has it: 1 / (time x cost).

    None where the cost is not known, or nothing.
    """
    return 1.0 / (seconds * cost) if cost and seconds else None
