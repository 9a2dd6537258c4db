"""How long a dense task takes from a tensor server to a worker and back, over loopback, one at a time.

    python -m bench.tensor_server [--plain] [--tasks N] [--chunk ROWS]

The server is this process, the worker another one, which gets descriptors through a pipe: what is measured is
what a task costs besides its invocation. Every task is a product of 1024 x 256 by 256 x 16 in float32; the
weights travel each time (a key that changes) unless ``--keep``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from dorylus_hpc.serverless.certificates import make_credentials
from dorylus_hpc.serverless.claim import Claim
from dorylus_hpc.serverless.tensor_server import Block, TensorServer

ROWS, F_IN, F_OUT = 1024, 256, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plain", action="store_true", help="without TLS")
    parser.add_argument("--keep", action="store_true", help="the worker keeps the weights")
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--chunk", type=int, default=0, help="rows a chunk; 0: all at once")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
    else:
        measure(options)


def work() -> None:
    """Do the tasks that come in lines, and answer in lines."""
    from lambda_pkg.handler import handler

    for line in sys.stdin:
        report = handler(json.loads(line))
        print(json.dumps({**report, "cpu": time.process_time()}), flush=True)


def measure(options: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    h = rng.random((ROWS, F_IN), dtype=np.float32)
    w = rng.random((F_IN, F_OUT), dtype=np.float32)
    credentials = None if options.plain else make_credentials("bench")
    context = credentials.server_context() if credentials else None
    command = [sys.executable, "-m", "bench.tensor_server", "--worker"]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with (
        TensorServer(context=context) as server,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as worker,
    ):
        assert worker.stdin and worker.stdout
        rows: list[dict[str, Any]] = []
        for number in range(options.tasks + 20):
            out = np.zeros((ROWS, F_OUT), np.float32)
            began, cpu = time.perf_counter(), time.process_time()
            claim = Claim(lambda: None)
            token = server.offer([Block(h, True), Block(w, False)], [out], options.chunk, claim)
            event = {
                "protocol": "1",
                "run": "bench",
                "server": dict(zip(("host", "port"), server.address, strict=True)),
                "tls": credentials.descriptor() if credentials else None,
                "token": token,
                "ops": [["apply_vertex", {}, ["h", "w"], ["z"]]],
                "inputs": [
                    {"name": "h", "dtype": "<f4", "shape": h.shape, "rows": True, "key": None},
                    {
                        "name": "w",
                        "dtype": "<f4",
                        "shape": w.shape,
                        "rows": False,
                        "key": f"w@{0 if options.keep else number}",
                    },
                ],
                "outputs": [{"name": "z", "dtype": "<f4", "shape": out.shape, "rows": True}],
                "chunk": options.chunk,
                "seconds": 30.0,
            }
            worker.stdin.write(json.dumps(event) + "\n")
            worker.stdin.flush()
            report = json.loads(worker.stdout.readline())
            server.withdraw(token)
            spent = {"wall": time.perf_counter() - began, "server_cpu": time.process_time() - cpu}
            rows.append({**report, **spent})
            assert report["accepted"] and claim.taken
            if number == 0:
                np.testing.assert_allclose(out, h @ w, rtol=1e-5)
        worker.stdin.close()
    warm = rows[20:]
    cpu_seconds = warm[-1]["cpu"] - rows[19]["cpu"]
    print(f"wall        {1e3 * statistics.median(row['wall'] for row in warm):.2f} ms (median)")
    print(f"server CPU  {1e3 * statistics.mean(row['server_cpu'] for row in warm):.2f} ms (mean)")
    print(f"worker CPU  {1e3 * cpu_seconds / len(warm):.2f} ms (mean)")
    for name in ("connect", "fetch", "compute", "send", "total"):
        seconds = statistics.median(row["seconds"][name] for row in warm)
        print(f"  {name:8}  {1e3 * seconds:.2f} ms")


if __name__ == "__main__":
    main()
