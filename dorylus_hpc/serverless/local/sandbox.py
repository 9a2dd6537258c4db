"""One sandbox: a process that runs the real runtime client, and the runtime API that it talks to.

A sandbox starts, asks for its first event (this ends its start, the cold one), answers, asks again, and is
stopped by a signal between an answer and the next event, as a sandbox at AWS is frozen. It has one call at
a time, and ends with it if it crashes, takes too long or answers too much.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from aiohttp import web

from dorylus_hpc.serverless.local import bootstrap
from dorylus_hpc.serverless.local.folders import Folders
from dorylus_hpc.serverless.local.limits import Bounds
from dorylus_hpc.serverless.local.network import Line
from dorylus_hpc.serverless.local.settings import LocalSettings

MAX_REQUEST = 6 * 2**20  # bytes
MAX_RESPONSE = 6 * 2**20 + 100
_TAIL = 4096  # bytes of output that a caller may ask for
_API = "/2018-06-01/runtime/"
_ARITHMETIC = ("OPENBLAS_", "NPY_")  # what chooses among kernels of NumPy and its BLAS


@dataclass(frozen=True)
class Outcome:
    """How a call ended.

    Attributes
    ----------
    body
        JSON: the handler's answer, or what went wrong.
    error
        Its type as AWS names it, such as ``Runtime.ExitError``; None if all went well.
    billed_ms
        Billed milliseconds, the start included.
    tail
        The end of what the sandbox printed, and AWS's report.
    """

    body: bytes
    error: str | None
    billed_ms: int
    tail: bytes


@dataclass
class _Call:
    request_id: str
    payload: bytes
    crash: bool
    outcome: asyncio.Future[Outcome]
    began: float | None = None  # when the sandbox got the event
    timer: asyncio.TimerHandle | None = None


class Sandbox:
    """A sandbox; its process starts with the first call.

    Parameters
    ----------
    name
        Of its folder.
    settings, folders, log
        Of the service.
    bounds
        Of its memory and processor.
    start_delay
        Seconds before the process is started.
    ended
        Called once, when the process has ended.
    """

    def __init__(
        self,
        name: str,
        settings: LocalSettings,
        folders: Folders,
        bounds: Bounds,
        *,
        log: BinaryIO | None = None,
        start_delay: float = 0.0,
        ended: Callable[[Sandbox], None] = lambda sandbox: None,
    ) -> None:
        self.name = name
        self.idle_since = 0.0
        self.alive = True
        self.finished = asyncio.Event()
        self._settings = settings
        self._folders = folders
        self._home = folders.sandboxes / name
        self._bounds = bounds
        self._log = log
        self._start_delay = start_delay
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._server: asyncio.Server | None = None
        self._api: web.Server | None = None
        self._line = Line(settings.latency, settings.bandwidth) if settings.has_network else None
        self._output = bytearray()
        self._output_fd = self._exit_fd = -1
        self._call: _Call | None = None
        self._poll: asyncio.Future[_Call | None] | None = None  # the runtime waits for an event
        self._started = 0.0
        self._init_seconds: float | None = None
        self._init_reported = False
        self._init_timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, which leads its own group."""
        return None if self._process is None else self._process.pid

    async def call(self, request_id: str, payload: bytes, *, crash: bool = False) -> Outcome:
        """Run the handler once.

        Parameters
        ----------
        request_id
            Of the call.
        payload
            The event, JSON.
        crash
            Kill the sandbox in place of giving it the event.
        """
        call = self._call = _Call(request_id, payload, crash, self._loop.create_future())
        if self._process is None and self.alive:
            await self._start()
        if self._poll is not None:
            self._deliver()
        elif not self.alive and not call.outcome.done():
            self._fail("Runtime.ExitError", "Runtime exited without providing a reason")
        return await call.outcome

    def kill(self) -> None:
        """End the process and all that it started."""
        self.alive = False
        if self._process is not None and self._exit_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif self._process is None:
            self.finished.set()

    async def _start(self) -> None:
        if self._start_delay:
            await asyncio.sleep(self._start_delay)
        self._home.mkdir()
        (self._home / "tmp").mkdir()
        self._api = web.Server(self._answer, access_log=None, request_factory=_unlimited)
        self._server = await self._loop.create_server(self._api, "127.0.0.1", 0)
        environment = self._environment(self._server.sockets[0].getsockname()[1])
        if self._line is not None:
            environment[bootstrap.NETWORK] = f"{await self._line.open()}:{self._line.token.decode()}"
        if not self.alive:
            self._clean_up()
            return
        self._output_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(write_fd, True)
        self._started = self._loop.time()
        self._append(f"INIT_START Runtime Version: {_python()}\n".encode())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", bootstrap.__file__, self._settings.handler],
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                cwd=self._folders.task,
                env=environment,
                start_new_session=True,
            )
        except OSError:
            self.alive = False
            self._clean_up()
            raise
        finally:
            os.close(write_fd)
        self._bounds.hold(self._process.pid)
        self._exit_fd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._exit_fd, self._exited)
        self._loop.add_reader(self._output_fd, self._read_output)
        self._init_timer = self._loop.call_later(self._settings.init_seconds, self._start_timed_out)

    def _environment(self, port: int) -> dict[str, str]:
        """Everything that the process finds in its environment."""
        settings = self._settings
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        environment = {
            # Which kernels compute: those of the server's own cores, or results would differ in last bits.
            **{name: value for name, value in os.environ.items() if name.startswith(_ARITHMETIC)},
            "AWS_DEFAULT_REGION": settings.region,
            "AWS_EXECUTION_ENV": f"AWS_Lambda_python{version}",
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(settings.memory_mb),
            "AWS_LAMBDA_FUNCTION_NAME": settings.function,
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
            "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{settings.function}",
            "AWS_LAMBDA_LOG_STREAM_NAME": self.name,
            "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{port}",
            "AWS_REGION": settings.region,
            "HOME": str(self._home),
            "LAMBDA_RUNTIME_DIR": str(self._folders.runtime),
            "LAMBDA_TASK_ROOT": str(self._folders.task),
            "LANG": "en_US.UTF-8",
            # One thread, as everywhere dense work is done: the sum of a product must not depend on it.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "TMPDIR": str(self._home / "tmp"),
            "TZ": ":UTC",
            "_HANDLER": settings.handler,
            bootstrap.PARENT: str(os.getpid()),
            bootstrap.RUNTIME: str(self._folders.runtime),
        }
        if "LD_LIBRARY_PATH" in os.environ:  # some Pythons need it to find their own library
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        return environment

    # The runtime API.

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if not path.startswith(_API):
            return web.Response(status=404)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        what = path.removeprefix(_API)
        if request.method == "GET" and what == "invocation/next":
            return await self._next()
        body = await request.read()
        if request.method == "POST" and what == "init/error":
            self._init_failed(body)
        elif request.method == "POST" and what.startswith("invocation/"):
            _, request_id, kind = (what + "//").split("/")[:3]
            if self._call is None or self._call.request_id != request_id or self._call.began is None:
                return _refusal(400, "InvalidRequestID", f"no call {request_id} is running")
            if kind == "response" and len(body) > MAX_RESPONSE:
                message = (
                    f"Response payload size exceeded maximum allowed payload size ({MAX_RESPONSE} bytes)."
                )
                self._settle(
                    _error(message, "Function.ResponseSizeTooLarge"), "Function.ResponseSizeTooLarge"
                )
                self.kill()
                return _refusal(413, "RequestEntityTooLarge", message)
            if kind == "response":
                self._settle(body, None)
            elif kind == "error":
                self._settle(body, _error_type(body))
            else:
                return web.Response(status=404)
        else:
            return web.Response(status=404)
        return web.Response(status=202, body=b'{"status":"OK"}', content_type="application/json")

    async def _next(self) -> web.Response:
        if not self.alive:  # it asked before it was killed
            return web.Response(status=410)
        if self._init_seconds is None:
            self._init_seconds = self._loop.time() - self._started
            if self._init_timer is not None:
                self._init_timer.cancel()
        self._poll = self._loop.create_future()
        poll = self._poll
        if self._call is not None:
            self._deliver()
        else:
            self._signal(signal.SIGSTOP)  # frozen until the next call
        call = await poll
        if call is None:
            return web.Response(status=410)
        return web.Response(
            body=call.payload,
            content_type="application/json",
            headers={
                "Lambda-Runtime-Aws-Request-Id": call.request_id,
                "Lambda-Runtime-Deadline-Ms": str(int((time.time() + self._settings.timeout) * 1000)),
                "Lambda-Runtime-Invoked-Function-Arn": self._settings.arn,
            },
        )

    def _deliver(self) -> None:
        """Give the runtime, which waits, the call."""
        call, poll = self._call, self._poll
        assert call is not None and poll is not None
        call.began = self._loop.time()
        if call.crash:
            self.kill()
            return
        self._poll = None
        self._append(f"START RequestId: {call.request_id} Version: $LATEST\n".encode())
        self._bounds.begin()
        self._signal(signal.SIGCONT)
        call.timer = self._loop.call_later(self._settings.timeout, self._timed_out)
        poll.set_result(call)

    def _settle(self, body: bytes, error: str | None) -> None:
        """The call has ended like this."""
        call = self._call
        if call is None:
            return
        self._call = None
        if call.timer is not None:
            call.timer.cancel()
        self._bounds.end()
        now = self._loop.time()
        seconds = now - call.began if call.began is not None else 0.0
        init = 0.0
        if not self._init_reported:
            self._init_reported = True
            init = self._init_seconds if self._init_seconds is not None else now - self._started
        billed = math.ceil((seconds + init) * 1000)
        self._read_output()
        self._append(self._report(call.request_id, seconds, init, billed, error).encode())
        tail = bytes(self._output[-_TAIL:])
        self._output.clear()
        self.idle_since = now
        call.outcome.set_result(Outcome(body, error, billed, tail))

    def _fail(self, error: str, message: str) -> None:
        if self._call is not None:
            self._settle(_error(f"RequestId: {self._call.request_id} Error: {message}", error), error)

    def _report(self, request_id: str, seconds: float, init: float, billed: int, error: str | None) -> str:
        """The lines that AWS ends a call with."""
        parts = [
            f"REPORT RequestId: {request_id}",
            f"Duration: {seconds * 1000:.2f} ms",
            f"Billed Duration: {billed} ms",
            f"Memory Size: {self._settings.memory_mb} MB",
            f"Max Memory Used: {math.ceil(self._bounds.peak_bytes() / 2**20)} MB",
        ]
        if init:
            parts.append(f"Init Duration: {init * 1000:.2f} ms")
        if error == "Sandbox.Timedout":
            parts.append("Status: timeout")
        elif error is not None:
            parts.append(f"Status: error\tError Type: {error}")
        return f"END RequestId: {request_id}\n" + "\t".join(parts) + "\t\n"

    # What may go wrong.

    def _timed_out(self) -> None:
        self._fail("Sandbox.Timedout", f"Task timed out after {self._settings.timeout:.2f} seconds")
        self.kill()

    def _start_timed_out(self) -> None:
        self._fail(
            "Sandbox.Timedout", f"The runtime did not start within {self._settings.init_seconds:.2f} seconds"
        )
        self.kill()

    def _init_failed(self, body: bytes) -> None:
        self._settle(body, _error_type(body))
        self.kill()

    def _exited(self) -> None:
        """The process has ended, whoever ended it."""
        assert self._process is not None
        self.alive = False
        code = self._process.wait()
        if code < 0:
            why = f"Runtime exited with error: signal: {(signal.strsignal(-code) or str(-code)).lower()}"
        elif code > 0:
            why = f"Runtime exited with error: exit status {code}"
        else:
            why = "Runtime exited without providing a reason"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it started and left
        self._fail("Runtime.ExitError", why)
        self._clean_up()

    def _clean_up(self) -> None:
        for fd in (self._exit_fd, self._output_fd):
            if fd >= 0:
                self._loop.remove_reader(fd)
                os.close(fd)
        self._exit_fd = self._output_fd = -1
        if self._init_timer is not None:
            self._init_timer.cancel()
        if self._poll is not None and not self._poll.done():
            self._poll.set_result(None)
        self._poll = None
        if self._server is not None:
            self._server.close()
        if self._api is not None:
            for connection in self._api.connections:
                connection.force_close()
        if self._line is not None:
            self._line.close()
        self._bounds.close()
        shutil.rmtree(self._home, ignore_errors=True)
        self.finished.set()
        self._ended(self)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._exit_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    # Output.

    def _read_output(self) -> None:
        while self._output_fd >= 0:
            try:
                data = os.read(self._output_fd, 65536)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._output_fd)
                return
            self._append(data)
            if len(data) < 65536:
                return

    def _append(self, data: bytes) -> None:
        self._output += data
        if len(self._output) > 16 * _TAIL:
            del self._output[:-_TAIL]
        if self._log is not None:
            self._log.write(data)


def _unlimited(message, payload, protocol, writer, task):  # type: ignore[no-untyped-def]
    """Make a request whose body may have any size."""
    return web.BaseRequest(
        message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=0
    )


def _refusal(status: int, kind: str, message: str) -> web.Response:
    body = json.dumps({"errorMessage": message, "errorType": kind}).encode()
    return web.Response(status=status, body=body, content_type="application/json")


def _error(message: str, kind: str) -> bytes:
    return json.dumps({"errorType": kind, "errorMessage": message}).encode()


def _error_type(body: bytes) -> str:
    try:
        return str(json.loads(body)["errorType"])
    except (ValueError, KeyError, TypeError):
        return "Runtime.Unknown"


def killed(request_id: str) -> dict[str, Any]:
    """What an outcome says, whose sandbox was killed."""
    message = f"RequestId: {request_id} Error: Runtime exited with error: signal: killed"
    return {"body": _error(message, "Runtime.ExitError"), "error": "Runtime.ExitError"}


def _python() -> str:
    return f"python:{'.'.join(map(str, sys.version_info[:3]))}"


def open_log(path: Path | None) -> BinaryIO | None:
    """Open the file for what sandboxes print."""
    return None if path is None else open(path, "ab", buffering=0)
