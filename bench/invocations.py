"""What one warm invocation costs: from the call in boto3 to the result accepted, and how many a second.

    python -m bench.invocations [--tasks 300] [--workers 1 2 4 8] [--plain]

A task is a product of 1024 x 256 with 256 x 16 in float32 on the local Lambda service, without a network
model: what is measured is boto3, the service, the runtime client, TLS and the worker. Weights have a new key
each time, so that they travel too. Before timing, results are compared with NumPy's, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import time
from pathlib import Path

import numpy as np

from dorylus_hpc.serverless.certificates import make_credentials
from dorylus_hpc.serverless.controller import Controller, Settings
from dorylus_hpc.serverless.invoker import Account, Invoker
from dorylus_hpc.serverless.local import LocalService, LocalSettings
from dorylus_hpc.serverless.tasks import DenseTask
from dorylus_hpc.serverless.tensor_server import TensorServer
from lambda_pkg.ops import OutputSpec


def make_task(x: np.ndarray, w: np.ndarray, out: np.ndarray, number: int, note) -> DenseTask:
    return DenseTask(
        kind="product",
        priority=(number,),
        program=[("apply_vertex", {}, ["x", "w"], ["y"])],
        inputs={"x": x, "w": w},
        rows=frozenset({"x"}),
        keys={"w": f"w@{number}"},
        outputs={"y": OutputSpec(out.shape, out.dtype.str, True)},
        buffers={"y": out},
        chunk=0,
        finish=note,
    )


def measure(controller: Controller, x, w, out, *, tasks: int, workers: int) -> tuple[list[float], float]:
    """Run tasks, so many at once; return the seconds of each and of all."""
    ended: queue.SimpleQueue = queue.SimpleQueue()
    controller.limit(workers)
    times: list[float] = []
    started: dict[int, float] = {}

    def submit(number: int) -> None:
        started[number] = time.perf_counter()

        def end(error: BaseException | None) -> None:
            if error:
                raise error
            times.append(time.perf_counter() - started[number])
            ended.put(number)

        slot = out[number % len(out)]
        controller.submit(make_task(x, w, slot, number, lambda *_: None), end)

    began = time.perf_counter()
    for number in range(min(workers, tasks)):
        submit(number)
    for number in range(workers, tasks + workers):
        ended.get(timeout=60)
        if number < tasks:
            submit(number)
    return times, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.invocations", description=__doc__)
    parser.add_argument("--tasks", type=int, default=300, help="tasks a measurement (300)")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2, 4, 8], help="calls at once (1 2 4 8)"
    )
    parser.add_argument("--plain", action="store_true", help="without TLS")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "1"
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1024, 256)).astype(np.float32)
    w = rng.normal(size=(256, 16)).astype(np.float32)
    out = [np.zeros((1024, 16), np.float32) for _ in range(64)]
    most = max(options.workers)
    credentials = None if options.plain else make_credentials("bench")
    rows = []
    with (
        LocalService(LocalSettings(concurrency=most + 2)) as service,
        TensorServer(context=credentials.server_context() if credentials else None) as server,
    ):
        account = Account(
            "dorylus-hpc", service.region, service.endpoint_url, service.access_key, service.secret_key
        )
        invoker = Invoker(account, connections=4 * most + 8, seconds=60)
        settings = Settings(
            run="bench", host="127.0.0.1", tls=credentials.descriptor() if credentials else None,
            workers=1, most_workers=most, threads=1, memory_mb=1769, seconds=60,
        )  # fmt: skip
        with Controller(invoker, server, settings) as controller:
            for workers in options.workers:
                measure(controller, x, w, out, tasks=20 + 5 * workers, workers=workers)  # warm
                if not all((slot == x @ w).all() for slot in out[:20]):
                    print("results differ from NumPy's", file=sys.stderr)
                    return 1
                busy = time.process_time()
                times, total = measure(controller, x, w, out, tasks=options.tasks, workers=workers)
                rows.append(
                    {
                        "workers": workers,
                        "median_ms": 1e3 * float(np.median(times)),
                        "p99_ms": 1e3 * float(np.quantile(times, 0.99)),
                        "tasks_per_second": options.tasks / total,
                        "server_cpu_ms": 1e3 * (time.process_time() - busy) / options.tasks,
                    }
                )
        used = controller.account()
        invoker.close()
    print(f"{'at once':>8}{'median ms':>12}{'99 % ms':>10}{'tasks/s':>10}{'CPU ms, this process':>22}")
    for row in rows:
        print(
            f"{row['workers']:8}{row['median_ms']:12.2f}{row['p99_ms']:10.2f}{row['tasks_per_second']:10.1f}"
            f"{row['server_cpu_ms']:22.2f}"
        )
    print(f"retries {used.retries}, fall-backs {used.fallbacks}, failures {used.failures}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
