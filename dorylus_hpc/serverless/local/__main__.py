"""``python -m dorylus_hpc.serverless.local``: the local Lambda service as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dorylus_hpc.errors import InputError
from dorylus_hpc.serverless.local.settings import CommandLine, parse

ACCESS_KEY, SECRET_KEY = "DORYLUS_LOCAL_ACCESS_KEY", "DORYLUS_LOCAL_SECRET_KEY"
_PARENT_LOOK = 0.5  # seconds
_DESCRIPTORS = 65536


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service until it is told to end.

    Parameters
    ----------
    argv
        Arguments; by default those of the process.

    Returns
    -------
    int
        Exit status: 0, or 2 for wrong input.
    """
    parent = os.getppid()
    try:
        line = parse(argv)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # until the loop has its own
        _leave_cores()
        _take_descriptors()
        with tempfile.TemporaryDirectory(prefix="dorylus-lambda-", ignore_cleanup_errors=True) as folder:
            asyncio.run(_serve(line, Path(folder), parent))
    except InputError as error:
        print(f"local: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"local: error: {error.name} is not installed: pip install {error.name}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"local: error: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(line: CommandLine, folder: Path, parent: int) -> None:
    from dorylus_hpc.serverless.local.folders import lay_out
    from dorylus_hpc.serverless.local.pool import Pool
    from dorylus_hpc.serverless.local.sandbox import open_log
    from dorylus_hpc.serverless.local.service import Service
    from dorylus_hpc.serverless.local.signature import Verifier

    stop = _stop_event(parent if line.with_parent else None)
    settings = line.settings
    access_key = os.environ.pop(ACCESS_KEY, "") or "AKIA" + secrets.token_hex(8).upper()
    secret_key = os.environ.pop(SECRET_KEY, "") or secrets.token_urlsafe(30)
    folders = lay_out(folder, settings.archive)
    pool = Pool(settings, folders, open_log(settings.log))
    service = Service(settings, folders, pool, Verifier(access_key, secret_key, settings.region))
    try:
        port = await service.open()
        ready = {
            "endpoint_url": f"http://127.0.0.1:{port}",
            "access_key": access_key,
            "secret_key": secret_key,
            "region": settings.region,
            "pid": os.getpid(),
            "folder": str(folder),
        }
        _say_ready(json.dumps(ready), line.ready_file)
        await stop.wait()
    finally:
        service.close()  # callers see that it ends, not what becomes of the sandboxes
        await pool.close()


def _say_ready(text: str, path: Path | None) -> None:
    if path is None:
        print(text, flush=True)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")
    os.replace(temporary, path)


def _stop_event(parent: int | None) -> asyncio.Event:
    """Make the event that ends the service: a signal, or the end of the parent if one is given."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    if parent is None:
        return stop

    def stdin_readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    def look() -> None:
        # Whatever else holds the pipe open, a process that lost its parent has another one.
        if os.getppid() != parent:
            stop.set()
        else:
            loop.call_later(_PARENT_LOOK, look)

    loop.add_reader(0, stdin_readable)
    look()
    return stop


def _leave_cores() -> None:
    """Use all cores: an MPI rank may be bound to one, its workers at AWS would not be."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _take_descriptors() -> None:
    """Allow as many open files as may be: a sandbox takes about six."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


if __name__ == "__main__":
    sys.exit(main())
