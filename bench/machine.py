"""Where a measurement ran: code, CPU, libraries, environment, and how fast this machine reads memory.

Imports NumPy and the kernels only, so that it runs in an environment made for the peers.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import cython_kernels as ck
from cython_kernels.dispatch import instruction_set
from cython_kernels.layout import empty, last_level_cache

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("runs", "bench")

SLOWING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # choose slower products for NumPy than the CPU can do
TOLD = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_")
LINE, ROW = 64, 512  # bytes
PER_OUTPUT = 64  # random rows that one row of the output sums: its own traffic is then small


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def surroundings() -> dict[str, Any]:
    """What a number means nothing without: the code and the machine."""
    return {
        "commit": _git("rev-parse", "HEAD") or "unknown",
        "changed_files": len(_git("status", "--porcelain").splitlines()),
        "machine": platform.platform(),
        "cpu": _cpu(),
        "cores": cores(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "scipy": version("scipy"),
    }


def kernel_surroundings() -> dict[str, Any]:
    """What the speed of a kernel, or of a peer, depends on besides."""
    return {
        "instructions": instruction_set(),
        "caches": _caches(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "versions": {name: found for name in ("torch", "dgl", "threadpoolctl") if (found := _version(name))},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(TOLD)},
    }


def warnings(*, products: bool = True) -> list[str]:
    """What makes the numbers of this process doubtful; `products`: it computes NumPy's products itself."""
    found = [
        f"{name}={os.environ[name]} slows NumPy's products: unset it"
        for name in SLOWING
        if products and name in os.environ
    ]
    if not _version("threadpoolctl"):
        found.append("threadpoolctl is not installed: NumPy's products use as many threads as they like")
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5:
        found.append(
            f"the machine is busy: load average {os.getloadavg()[0]:.1f} at the start; threads that wait "
            "disturb less with OMP_WAIT_POLICY=passive"
        )
    return found


def unwritable(path: Path) -> str | None:
    """Say why no file can be written there; None if one can. Makes the folder, as `write_results` does."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        return f"cannot write {path}: {error.strerror or error}"
    if path.is_dir():
        return f"cannot write {path}: it is a folder"
    if path.exists() and not os.access(path, os.W_OK):
        return f"cannot write {path}: it is there and read-only"
    return None


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write the results as JSON, with the surroundings in front. The file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(surroundings() | dict(results), indent=1) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"written to {path}")


@contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """Let NumPy's products use so many threads inside a ``with`` block, where threadpoolctl is installed."""
    if not _version("threadpoolctl"):
        yield
        return
    from threadpoolctl import threadpool_limits

    with threadpool_limits(count, user_api="blas"):
        yield


# ---- memory ----


def limits(threads: int, scale: float = 1.0, repeats: int = 5) -> dict[str, float]:
    """Measure how many GB/s this machine reads: in order, and by rows that stand in a random order.

    Rows are read by our own gather, 64 distinct ones for each row it writes, so these are limits of
    this kernel on this memory, not of the memory. No row is read twice before all others: what a gather
    over a graph with locality or hubs takes from caches comes on top, and can exceed them.

    - ``sequential``: a large array, once from end to end (NumPy's exclusive or)
    - ``random_rows``: rows of 512 bytes of a large array
    - ``cached_lines``: rows of 64 bytes of an array half as large as the last-level cache

    "Large" is eight times the last-level cache, but no less than 256 MiB (times `scale`).
    """
    large = int(max(256 << 20, 8 * last_level_cache()) * scale)
    words = np.arange(large // 4, dtype=np.uint32)
    parts = np.array_split(words, threads)
    with ThreadPoolExecutor(threads) as pool:
        sequential = best(lambda: list(pool.map(np.bitwise_xor.reduce, parts)), repeats)
    return {
        "sequential": words.nbytes / sequential / 1e9,
        "random_rows": _rows_per_second(large, ROW, threads, repeats) * ROW / 1e9,
        "cached_lines": _rows_per_second(last_level_cache() // 2, LINE, threads, repeats) * LINE / 1e9,
    }


def _rows_per_second(size: int, row: int, threads: int, repeats: int) -> float:
    n = max(1, size // row // PER_OUTPUT) * PER_OUTPUT
    x = empty((n, row // 4), np.float32)
    x[...] = 1
    order = np.random.default_rng(0).permutation(n).astype(np.int32)
    indptr = np.arange(0, n + 1, PER_OUTPUT, dtype=np.int64)
    out = empty((n // PER_OUTPUT, row // 4), np.float32)
    seconds = best(
        lambda: ck.gather(indptr, order, None, x, out, layout="rows", num_threads=threads, validate=False),
        repeats,
    )
    return n / seconds


def best(run: Callable[[], object], repeats: int) -> float:
    """The least seconds of some calls after a first one."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def forget_peak() -> None:
    """Let the peak of this process's memory begin anew, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_bytes() -> int:
    """The most memory that this process has had, since `forget_peak` or ever."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def busy_seconds() -> tuple[float, float, float] | None:
    """Seconds by the clock, and that all cores, and this process and its children, have worked."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    ticks = [int(word) for word in words]
    worked = sum(ticks[:8]) - ticks[3] - ticks[4]  # but for idle and iowait
    own = os.times()
    return time.perf_counter(), worked / os.sysconf("SC_CLK_TCK"), sum(own[:4])


def busy_of_others(start: tuple[float, float, float] | None) -> float | None:
    """How many cores others have used on average since `busy_seconds` gave `start`; None if unknown."""
    end = busy_seconds()
    if start is None or end is None:
        return None
    clock, all_cores, own = (after - before for after, before in zip(end, start, strict=True))
    return max(0.0, all_cores - own) / clock


def resident_bytes() -> int:
    """The memory that this process has now; its peak where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_bytes()


# ---- the parts ----


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _caches() -> dict[str, str]:
    """Sizes of the caches that the first core sees."""
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        found[f"L{level} {kind.lower()}"] = size
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
