"""The local service as a child process of whoever needs it."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dorylus_hpc.errors import InputError
from dorylus_hpc.serverless.local.settings import LocalSettings

_END_SECONDS = 10.0
_LAST_LINES = 5


class LocalService:
    """A local Lambda service, from `start` to `stop`; or a context manager.

    It ends with this process too, however this one ends, and its sandboxes with it.

    Parameters
    ----------
    settings
        What to run.
    ready_seconds
        How long the start may take.

    Attributes
    ----------
    endpoint_url, access_key, secret_key, region
        What a client needs.
    pid
        Of the service.
    """

    def __init__(self, settings: LocalSettings | None = None, *, ready_seconds: float = 60.0) -> None:
        self.settings = settings or LocalSettings()
        self.endpoint_url = self.access_key = self.secret_key = ""
        self.region = self.settings.region
        self.pid = 0
        self._ready_seconds = ready_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._folder = ""

    def __enter__(self) -> LocalService:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> LocalService:
        """Start the service and wait until it takes calls.

        Raises
        ------
        InputError
            If it does not start; the message has the last lines that it printed.
        """
        self._errors = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __package__, "--with-parent", *self.settings.arguments()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(),
                start_new_session=True,  # an interrupt from the keyboard is for us
            )
            self._read_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the service and its sandboxes; does nothing if it has ended."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # its sandboxes end with it
                process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            if self._folder:  # still there if it was killed
                shutil.rmtree(self._folder, ignore_errors=True)
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def alive(self) -> bool:
        """Whether the service runs."""
        return self._process is not None and self._process.poll() is None

    def client(self, **config: Any) -> Any:
        """Make a boto3 client of the service.

        Parameters
        ----------
        **config
            For `botocore.config.Config`; by default there are no retries.
        """
        from botocore.config import Config

        from dorylus_hpc.serverless.invoker import Account, proxies_to, session_of

        account = Account(self.settings.function, self.region, self.endpoint_url, self.access_key)
        defaults = {"retries": {"total_max_attempts": 1}, "proxies": proxies_to(self.endpoint_url)}
        return session_of(account).client(
            "lambda",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=Config(**{**defaults, **config}),
        )

    def statistics(self) -> dict[str, Any]:
        """What the service counted so far: invocations, cold starts, injected faults, billed seconds."""
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        request = AWSRequest("GET", f"{self.endpoint_url}/local/statistics", data=b"")
        SigV4Auth(Credentials(self.access_key, self.secret_key), "lambda", self.region).add_auth(request)
        signed = urllib.request.Request(request.url, headers=dict(request.headers))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(signed, timeout=10) as response:
            return json.loads(response.read())

    def _read_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        handle, received = process.stdout.fileno(), b""
        deadline = time.monotonic() + self._ready_seconds
        while not received.endswith(b"\n"):
            if not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise InputError(
                    f"the local Lambda service was not ready within {self._ready_seconds:g} s{self._said()}"
                )
            data = os.read(handle, 4096)
            if not data:
                status = process.wait()
                how = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
                raise InputError(f"the local Lambda service ended with {how} at its start{self._said()}")
            received += data
        ready = json.loads(received)
        self.endpoint_url, self.pid = ready["endpoint_url"], ready["pid"]
        self._folder = ready["folder"]
        self.access_key, self.secret_key = ready["access_key"], ready["secret_key"]

    def _said(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        last = [line for line in lines if line][-_LAST_LINES:]
        return "; it said: " + " | ".join(last) if last else ""


def _environment() -> dict[str, str]:
    """Ours, and where this package is; nothing of MPI, which would take the service for a rank."""
    root = str(Path(__file__).resolve().parents[3])
    foreign = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPI_", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
