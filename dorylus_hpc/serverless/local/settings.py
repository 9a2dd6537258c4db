"""What can be chosen about the local service, in Python and on the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from dorylus_hpc.errors import InputError
from dorylus_hpc.serverless.archive import HANDLER
from dorylus_hpc.serverless.local.faults import Faults

LIMITS = ("auto", "cgroup", "watchdog", "none")
# Near AWS: what one function gets, and a round trip inside a region.
AWS_LATENCY, AWS_BANDWIDTH = 0.001, 75e6
_LAST_PORT = 65535
_LONGEST_TIMEOUT = 900


def _option(default: Any, help: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True)
class LocalSettings:
    """Settings of the local service. On the command line the network is modelled by default, here not.

    Attributes
    ----------
    function, handler, archive
        Name of the function, what is called, and its code: a zip, a folder, or None for `lambda_pkg` and
        the installed NumPy.
    memory_mb, timeout, concurrency
        The function's memory, time limit in seconds, and reserved concurrency.
    idle_seconds
        A sandbox without a call for so long is ended.
    cold_start
        Seconds added to each start of a sandbox.
    init_seconds
        How long the start of the runtime may take. AWS allows 10; here sandboxes share few processors.
    latency, bandwidth
        Round trip in seconds, and bytes a second in each direction, of each sandbox's line; 0: not modelled.
    faults
        What is made to go wrong.
    limits
        How memory and processor are bounded: ``cgroup``, ``watchdog``, ``none``, or ``auto``: the first
        of the first two that works.
    region, port
        Region in names and signatures; port of the endpoint on 127.0.0.1, 0 for any.
    log
        A file to which everything that sandboxes print is appended, or None.
    """

    function: str = _option("dorylus-hpc", "name of the function", "NAME")
    handler: str = _option(HANDLER, "what is called", "MODULE.FUNCTION")
    archive: Path | None = _option(None, "zip or folder; default: lambda_pkg and the installed NumPy", "PATH")
    memory_mb: int = _option(1769, "memory; 1769 MB have one processor", "MB")
    timeout: float = _option(60.0, "time limit of a call", "SECONDS")
    concurrency: int = _option(100, "reserved concurrency", "N")
    idle_seconds: float = _option(300.0, "a sandbox without a call for so long is ended", "SECONDS")
    cold_start: float = _option(0.0, "added to each start of a sandbox", "SECONDS")
    init_seconds: float = _option(30.0, "how long a start may take", "SECONDS")
    latency: float = _option(0.0, "round trip of a sandbox's line; 0: not modelled", "SECONDS")
    bandwidth: float = _option(0.0, "of a sandbox's line, each direction; 0: not modelled", "BYTES/S")
    faults: Faults = _option(Faults(), "what is made to go wrong, such as drop=0.1,seed=3", "RATES")
    limits: str = _option("auto", f"of memory and processor: {', '.join(LIMITS)}", "KIND")
    region: str = _option("us-east-1", "in names and signatures", "NAME")
    port: int = _option(0, "on 127.0.0.1; 0: any", "PORT")
    log: Path | None = _option(None, "append what sandboxes print to this file", "FILE")

    def __post_init__(self) -> None:
        for name, least in (("memory_mb", 128), ("concurrency", 1), ("port", 0)):
            if getattr(self, name) < least:
                raise InputError(f"--{_flag(name)} {getattr(self, name)}: at least {least} is needed")
        if self.port > _LAST_PORT:
            raise InputError(f"--port {self.port}: at most {_LAST_PORT} is needed")
        for name in ("timeout", "idle_seconds", "init_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"--{_flag(name)} {getattr(self, name)}: a positive number is needed")
        for name in ("cold_start", "latency", "bandwidth"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"--{_flag(name)} {getattr(self, name)}: a number, at least 0, is needed")
        if self.timeout > _LONGEST_TIMEOUT:
            raise InputError(f"--timeout {self.timeout}: at most {_LONGEST_TIMEOUT} is needed, as at AWS")
        if self.limits not in LIMITS:
            raise InputError(f"--limits {self.limits}: choose one of {', '.join(LIMITS)}")
        if "." not in self.handler:
            raise InputError(f"--handler {self.handler}: MODULE.FUNCTION is needed")
        if self.archive is not None and not self.archive.exists():
            raise InputError(f"--archive {self.archive} does not exist")

    @property
    def has_network(self) -> bool:
        """Whether a line is modelled."""
        return self.latency > 0 or self.bandwidth > 0

    @property
    def arn(self) -> str:
        """The function's name in full; the account is made up."""
        return f"arn:aws:lambda:{self.region}:000000000000:function:{self.function}"

    def arguments(self) -> list[str]:
        """The command line that `parse` makes the same settings of."""
        given = ((one.name, getattr(self, one.name)) for one in fields(self))
        return [f"--{_flag(name)}={value}" for name, value in given if value is not None]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"local: error: {message} (see local --help)\n")


@dataclass(frozen=True)
class CommandLine:
    """A command line, read.

    Attributes
    ----------
    settings
        Of the service.
    ready_file
        Where the line that says how to reach it goes; None: standard output.
    with_parent
        Whether to end when standard input closes or the parent process ends.
    """

    settings: LocalSettings
    ready_file: Path | None
    with_parent: bool


def parse(argv: Sequence[str] | None) -> CommandLine:
    """Read a command line.

    Raises
    ------
    InputError
        If a value is out of range.
    """
    parser = _Parser(
        prog="local",
        description="A local AWS Lambda on 127.0.0.1. Says in one line of JSON how to reach it.",
        epilog="The keys are random, or DORYLUS_LOCAL_ACCESS_KEY and DORYLUS_LOCAL_SECRET_KEY.",
        allow_abbrev=False,
    )
    defaults: dict[str, Any] = {"latency": AWS_LATENCY, "bandwidth": AWS_BANDWIDTH}
    kinds: dict[str, Any] = {"int": int, "float": float, "str": str, "Path | None": _path, "Faults": str}
    for one in fields(LocalSettings):
        default = defaults.get(one.name, str(one.default) if one.name == "faults" else one.default)
        help_text = one.metadata["help"]
        if default not in (None, "") and "default" not in help_text:
            help_text += "; default: %(default)s"
        parser.add_argument(
            f"--{_flag(one.name)}",
            type=kinds[str(one.type)],
            default=default,
            metavar=one.metadata["metavar"],
            help=help_text,
        )
    parser.add_argument(
        "--ready-file", type=_path, metavar="FILE", help="for the line; default: standard output"
    )
    parser.add_argument(
        "--with-parent", action="store_true", help="end when standard input closes or the parent ends"
    )
    options = vars(parser.parse_args(argv))
    rest = {name: options.pop(name) for name in ("ready_file", "with_parent")}
    if rest["ready_file"] is not None and rest["ready_file"].is_dir():
        raise InputError(f"--ready-file {rest['ready_file']} is a folder")
    options["faults"] = Faults.parse(options["faults"])
    return CommandLine(LocalSettings(**options), **rest)


def _path(text: str) -> Path:
    """Return a path; an empty text, from a variable that is not set, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return Path(text)


def _flag(name: str) -> str:
    return name.replace("_", "-")
