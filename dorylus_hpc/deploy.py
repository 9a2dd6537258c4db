"""Entry point: ``python -m dorylus_hpc.deploy up|status|down|policy``: the function at AWS Lambda."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dorylus_hpc.config import make_parser
from dorylus_hpc.errors import InputError

if TYPE_CHECKING:
    from dorylus_hpc.serverless.aws import Aws
    from dorylus_hpc.serverless.functions import Deployment, Settings
    from dorylus_hpc.serverless.upload import Archive

PROGRAM = "python -m dorylus_hpc.deploy"
COMMANDS = ("up", "status", "down", "policy")

# Options that not all commands have.
_ONLY_FOR = {
    **dict.fromkeys(
        ("memory_mb", "timeout", "arch", "python", "concurrency", "vpc_subnets", "vpc_security_groups"),
        ("up", "status"),
    ),
    **dict.fromkeys(("role", "log_days", "archive"), ("up", "status")),
    "s3_bucket": ("up",),
    "dry_run": ("up", "down"),
    "wait": ("down",),
    "of": ("policy",),
}
_DEFAULT_WAIT = 1800.0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = make_parser(
        PROGRAM,
        "Make the AWS Lambda function for `train --backend lambda`: up creates it or changes what differs, "
        "status shows it, down removes it and all that belongs to it, policy prints what somebody "
        "needs for it. Options not given leave a function as it is; the defaults are for a new one.",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="|".join(COMMANDS), help="what to do")
    parser.add_argument(
        "--function", default="dorylus-hpc", metavar="NAME", help="name of the function; default dorylus-hpc"
    )
    parser.add_argument("--region", metavar="R", help="default: of the AWS configuration")
    parser.add_argument(
        "--dry-run", action="store_true", default=None, help="print the calls, change nothing"
    )
    parser.add_argument(
        "--memory-mb",
        type=_number(128, 10240),
        metavar="M",
        help="memory, and CPU in proportion; default 1769: one CPU",
    )
    parser.add_argument(
        "--timeout", type=_number(1, 900), metavar="S", help="seconds a task may take; default 60"
    )
    parser.add_argument("--arch", choices=("x86_64", "arm64"), help="processor; default x86_64")
    parser.add_argument("--python", choices=("3.11", "3.12", "3.13", "3.14"), help="runtime; default 3.13")
    parser.add_argument(
        "--concurrency",
        type=_concurrency,
        metavar="N",
        help="invocations at a time reserved for the function, and its limit; none (default): neither",
    )
    parser.add_argument(
        "--vpc-subnets",
        type=_ids("subnet"),
        metavar="ID,ID",
        help="subnets from which it reaches the graph servers; none: out of any VPC",
    )
    parser.add_argument("--vpc-security-groups", type=_ids("sg"), metavar="ID,ID", help="its security groups")
    parser.add_argument("--role", type=_role, metavar="ARN", help="a role that exists; default: one is made")
    parser.add_argument("--log-days", type=int, metavar="D", help="days that logs are kept; default 14")
    parser.add_argument(
        "--archive", type=Path, metavar="FILE.zip", help="code to upload; default: it is built"
    )
    parser.add_argument(
        "--s3-bucket", metavar="NAME", help="through which an archive goes that is too large for a call"
    )
    parser.add_argument(
        "--wait",
        type=_number(0, 24 * 3600),
        metavar="S",
        help=f"seconds for Lambda to give back network interfaces; default {_DEFAULT_WAIT:.0f}",
    )
    parser.add_argument(
        "--of",
        choices=("graph-servers", "deployer"),
        help="whose IAM policy to print: theirs who call the function (default) or theirs who deploy it",
    )
    parser.add_argument("--endpoint-url", metavar="U", help="of all services, where it is not AWS")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv
        Arguments; by default those of the process.

    Returns
    -------
    int
        Exit status: 0, 1 if AWS refused or failed, or 2 for wrong input.
    """
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        try:
            from dorylus_hpc.serverless.aws import Aws, AwsError
        except ImportError as error:
            raise InputError(f"{error}: pip install 'dorylus_hpc[lambda]'") from error
        calls = Aws(
            options.region,
            endpoint_url=options.endpoint_url,
            dry_run=options.command == "status" or bool(options.dry_run),
            say=_quiet if options.command == "status" else _print,
        )
    except InputError as error:
        return _fail(str(error), 2)
    try:
        with calls:
            _run(calls, options)
    except (AwsError, InputError) as error:
        status = 2 if isinstance(error, InputError) and not calls.changes else 1
        return _fail(str(error) + _afterwards(calls, options), status)
    except KeyboardInterrupt:
        return _fail("stopped" + _afterwards(calls, options), 130)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line.

    Raises
    ------
    InputError
        Anything is wrong with them.
    SystemExit
        Help was asked for (status 0, after printing it).
    """
    options = build_parser().parse_args(arguments)
    for name, commands in _ONLY_FOR.items():
        if getattr(options, name) is not None and options.command not in commands:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} is for {' and '.join(commands)}, not for {options.command}")
    subnets, groups = options.vpc_subnets, options.vpc_security_groups
    if subnets and not groups or groups and not subnets:
        raise InputError("--vpc-subnets and --vpc-security-groups go together")
    return options


def _number(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text!r}")
        return int(text)

    return number


def _concurrency(text: str) -> int:
    if text == "none":
        return 0
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1 or none, got {text!r}")
    return int(text)


def _ids(kind: str) -> Callable[[str], tuple[str, ...]]:
    def ids(text: str) -> tuple[str, ...]:
        if text == "none":
            return ()
        found = tuple(text.split(","))
        for one in found:
            if not re.fullmatch(rf"{kind}-[0-9a-f]+", one):
                raise argparse.ArgumentTypeError(f"must be {kind}-... ids with commas between, got {one!r}")
        return found

    return ids


def _role(text: str) -> str:
    if not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/\S+", text):
        raise argparse.ArgumentTypeError(f"must be arn:aws:iam::ACCOUNT:role/NAME, got {text!r}")
    return text


def _run(calls: Aws, options: argparse.Namespace) -> None:
    from dorylus_hpc.serverless.functions import Deployment
    from dorylus_hpc.serverless.policies import caller_policy, deployer_policy

    deployment = Deployment(calls, _settings(options))
    if options.command == "up":
        _up(calls, deployment, options)
    elif options.command == "status":
        _status(calls, deployment, options)
    elif options.command == "down":
        _down(calls, deployment, options)
    else:
        policy = deployer_policy if options.of == "deployer" else caller_policy
        _print(json.dumps(policy(deployment.names), indent=2))


def _settings(options: argparse.Namespace) -> Settings:
    from dorylus_hpc.serverless.deployed import Vpc
    from dorylus_hpc.serverless.functions import LOG_DAYS, Settings

    if options.log_days is not None and options.log_days not in LOG_DAYS:
        raise InputError(f"--log-days must be one of {', '.join(map(str, LOG_DAYS))}, got {options.log_days}")
    return Settings(
        options.function,
        memory_mb=options.memory_mb,
        timeout=options.timeout,
        arch=options.arch,
        python=options.python,
        concurrency=options.concurrency,
        vpc=None
        if options.vpc_subnets is None
        else Vpc(options.vpc_subnets, options.vpc_security_groups or ()),
        role=options.role,
        log_days=options.log_days,
    )


def _up(calls: Aws, deployment: Deployment, options: argparse.Namespace) -> None:
    def archive(settings: Settings) -> Archive:
        return _read(options.archive) if options.archive else _built(settings)

    deployment.up(archive, s3_bucket=options.s3_bucket)
    name = options.function
    if not calls.changes:
        _print(f"nothing to change: function {name} is as wanted")
    elif not options.dry_run:
        _print(f"function {name} is ready: {deployment.names.function_arn}")


def _read(path: Path) -> Archive:
    from dorylus_hpc.serverless.upload import read_archive

    return read_archive(path)


def _built(settings: Settings) -> Archive:
    from dorylus_hpc.serverless import archive

    assert settings.arch is not None and settings.python is not None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "archive.zip"
        wheel = archive.download_wheel(folder, arch=settings.arch, python=settings.python)
        archive.build(target, source=wheel)
        return _read(target)


def _status(calls: Aws, deployment: Deployment, options: argparse.Namespace) -> None:
    from dorylus_hpc.serverless.deployed import describe, find

    found = find(calls, deployment.names)
    for line in describe(found, deployment.names):
        _print(line)
    if found.foreign(deployment.names):
        return
    deployment.up(lambda settings: _read(options.archive) if options.archive else None)
    for change in calls.changes:
        _print(f"up would {change.text}")
    if not calls.changes:
        _print("up would change nothing" + ("" if options.archive else " (code not compared: no --archive)"))
    calls.changes.clear()


def _down(calls: Aws, deployment: Deployment, options: argparse.Namespace) -> None:
    wait = _DEFAULT_WAIT if options.wait is None else float(options.wait)
    for thing in deployment.down(wait=wait):
        _print(f"left alone, since somebody else made it: {thing}")
    if not calls.changes:
        _print(f"nothing to remove: function {options.function} and what belongs to it are not there")
    elif not options.dry_run:
        _print(f"function {options.function} and what belonged to it are gone")


def _afterwards(calls: Aws, options: argparse.Namespace) -> str:
    """Say what was done before a failure, and how to clean up or go on."""
    if options.command not in ("up", "down"):
        return ""
    if not calls.changes or calls.dry_run:
        return "; nothing was changed"
    done = ", ".join(change.text for change in calls.changes)
    command = f"{PROGRAM} down --function {options.function} --region {calls.region}"
    if options.endpoint_url:
        command += f" --endpoint-url {shlex.quote(options.endpoint_url)}"
    purpose = "to remove all of it" if options.command == "up" else "to go on"
    return f"; done before: {done}; {purpose}: {command}"


def _print(line: str) -> None:
    print(line, flush=True)


def _quiet(line: str) -> None:
    """Say nothing."""


def _fail(message: str, status: int) -> int:
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
