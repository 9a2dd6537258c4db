"""Opens and closes what a run on Lambda needs, on every graph server.

rank 0          makes the run's certificates, which all get
a rank a node   starts the local service, if it is to be used
every rank      checks that the function can be called; has a tensor server and a controller of its own
"""

from __future__ import annotations

import importlib.util
import secrets
import socket
import ssl
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import numpy as np

from dorylus_hpc.comm.failure import together, write_line
from dorylus_hpc.comm.launch import start_mpi
from dorylus_hpc.config import TrainConfig
from dorylus_hpc.engine.dense_tasks import Offload
from dorylus_hpc.errors import InputError
from dorylus_hpc.report.cost import DEFAULT_REGION, Prices, load_prices

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from dorylus_hpc.serverless.controller import Controller, LambdaAccount
    from dorylus_hpc.serverless.invoker import Account
    from dorylus_hpc.serverless.local import LocalService
    from dorylus_hpc.serverless.tensor_server import TensorServer

_NEEDED = {
    "lambda": ("boto3", "cryptography"),
    "lambda-local": ("boto3", "cryptography", "awslambdaric", "aiohttp"),
}


def check_packages(config: TrainConfig) -> None:
    """Refuse a back end whose packages are not installed.

    Raises
    ------
    InputError
        With the command that installs them.
    """
    missing = [name for name in _NEEDED.get(config.backend, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"--backend {config.backend} needs packages: {sys.executable} -m pip install {' '.join(missing)}"
        )


def check_backend(config: TrainConfig) -> Prices:
    """Refuse, before anything is prepared, what the back end's options get wrong.

    Returns
    -------
    Prices
        Of the region.

    Raises
    ------
    InputError
        Packages are missing, there are no prices, or faults are not understood.
    """
    check_packages(config)
    region = config.region
    if config.backend == "lambda" and not region:
        from dorylus_hpc.serverless.invoker import default_region

        region = default_region()
        if not region:
            raise InputError("--backend lambda needs an AWS region: give --region, or set AWS_DEFAULT_REGION")
    prices = load_prices(Path(config.prices) if config.prices else None, region=region or DEFAULT_REGION)
    if config.instance_type:
        prices.instance(config.instance_type)
    if config.local_faults:
        from dorylus_hpc.serverless.local import Faults

        Faults.parse(config.local_faults)
    return prices


def offload_of(config: TrainConfig) -> Offload | None:
    """Return how dense tasks travel; None if they run here."""
    if config.backend == "cpu":
        return None
    return Offload(
        fuse=config.task_fusion == "on",
        rematerialise=config.rematerialisation == "on",
        chunk=config.stream_rows,
    )


class LambdaBackend:
    """Workers in Lambda for one graph server. A context manager. Collective over the graph servers.

    Parameters
    ----------
    comm
        The graph servers.
    config
        Resolved.
    workers
        Invocations at once, at first.
    prices
        Of Lambda, for the budget.

    Raises
    ------
    AgreedError
        The function can't be called, on any rank.

    Attributes
    ----------
    workers : int
        As given.
    controller : Controller
    architecture : str
        Of the function's processors.
    """

    def __init__(self, comm: Intracomm, config: TrainConfig, *, workers: int, prices: Prices) -> None:
        self._comm, self._config, self.workers, self._prices = comm, config, workers, prices
        self._stack = ExitStack()
        self._node: Intracomm | None = None
        self._service: LocalService | None = None
        self.controller: Controller
        self.architecture = "x86_64"

    def __enter__(self) -> Self:
        """Open everything."""
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close everything."""
        self._stack.close()

    def finish(self) -> LambdaAccount:
        """End all invocations after a whole run, and return what was used. Collective."""
        account = self.controller.account()
        if self._node is not None:
            self._node.Barrier()  # others of the node may still use the service
            self._node.Free()
            self._node = None
        if self._service is not None:
            self._service.stop()  # calls that hang end with it
        self.controller.close()
        return account

    def _open(self, stack: ExitStack) -> None:
        from dorylus_hpc.serverless.certificates import make_credentials
        from dorylus_hpc.serverless.controller import Controller, Settings
        from dorylus_hpc.serverless.invoker import Invoker

        comm, config = self._comm, self._config
        first = comm.Get_rank() == 0
        run = comm.bcast(secrets.token_hex(8) if first else "")
        credentials = None
        if config.tls == "on":
            credentials = comm.bcast(make_credentials(run) if first else None)
        self._node = cast("Intracomm", comm.Split_type(start_mpi().COMM_TYPE_SHARED))
        account = self._account(stack)
        connections = 4 * config.max_workers + 8
        invoker = together(
            comm, lambda: Invoker(account, connections=connections, seconds=config.function_timeout)
        )
        stack.callback(invoker.close)
        checked = together(comm, invoker.check)
        there = checked.answer or {}
        if first and there.get("numpy") != np.__version__:
            write_line(
                f"Lambda function {config.function} has NumPy {there.get('numpy')}, this machine "
                f"{np.__version__}: results may differ in their last bits between runs"
            )
        self.architecture = "arm64" if there.get("machine") in ("aarch64", "arm64") else "x86_64"
        memory = there.get("memory_mb") or config.memory_mb
        if first and memory != config.memory_mb:
            write_line(
                f"Lambda function {config.function} has {memory} MB, not --memory-mb {config.memory_mb}: "
                "cost is counted with what it has"
            )
        server = together(comm, lambda: self._tensor_server(credentials and credentials.server_context()))
        stack.enter_context(server)
        settings = Settings(
            run=run,
            host=self._host(),
            tls=credentials.descriptor() if credentials else None,
            workers=self.workers,
            most_workers=config.max_workers,
            threads=config.threads,
            memory_mb=memory,
            seconds=config.function_timeout,
            timeout=config.function_timeout,
            budget=config.budget_usd / comm.Get_size(),
            price_gb_second=self._prices.gb_second[self.architecture],
            price_request=self._prices.per_million_requests / 1e6,
        )
        rank = comm.Get_rank()
        self.controller = stack.enter_context(
            Controller(
                invoker,
                server,
                settings,
                warn=lambda text: write_line(f"graph server {rank}: {text}"),
                seed=rank,
            )
        )
        self.controller.count(checked)

    def _tensor_server(self, context: ssl.SSLContext | None) -> TensorServer:
        from dorylus_hpc.serverless.tensor_server import TensorServer

        assert self._node is not None
        config = self._config
        local = config.backend == "lambda-local" or not context
        port = config.tensor_port + self._node.Get_rank() if config.tensor_port else 0
        try:
            return TensorServer("127.0.0.1" if local else "0.0.0.0", port, context=context, seconds=30.0)
        except (OSError, OverflowError) as error:  # the latter where ports end before the node's ranks do
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"--tensor-port {port}: cannot listen there: {reason}") from error

    def _account(self, stack: ExitStack) -> Account:
        """Return where the function is; a rank of each node starts the local service first."""
        from dorylus_hpc.serverless.invoker import Account

        config, node = self._config, self._node
        assert node is not None
        if config.backend == "lambda":
            return Account(config.function, config.region, config.endpoint_url)
        if node.Get_rank() == 0:
            service = together(self._comm, self._start_service)
            stack.enter_context(service)
            self._service = service
            found = (service.endpoint_url, service.access_key, service.secret_key, service.region)
        else:
            together(self._comm, lambda: None)
            found = ("", "", "", "")
        url, access, secret, region = node.bcast(found)
        return Account(config.function, region, url, access, secret)

    def _start_service(self) -> LocalService:
        from dorylus_hpc.serverless.local import Faults, LocalService, LocalSettings

        config, node = self._config, self._node
        assert node is not None
        settings = LocalSettings(
            function=config.function,
            memory_mb=config.memory_mb,
            timeout=config.function_timeout,
            concurrency=config.max_workers * node.Get_size(),
            latency=config.local_latency,
            bandwidth=config.local_bandwidth,
            faults=Faults.parse(config.local_faults),
        )
        return LocalService(settings)

    def _host(self) -> str:
        """Return the address under which workers reach this rank."""
        if self._config.tensor_host:
            return self._config.tensor_host
        if self._config.backend == "lambda-local" or self._config.tls == "off":
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("198.51.100.1", 9))  # sends nothing; tells which interface leads out
                return str(probe.getsockname()[0])
            except OSError:
                return socket.gethostbyname(socket.gethostname())
