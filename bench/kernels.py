r"""Speed of the kernels, beside SciPy, PyTorch, DGL and the machine's own limits.

    python -m bench.kernels [--quick] [--graphs uniform rmat] [--widths 16 64] [--kernels gather_sum gcn] ...

Correctness comes first: every candidate, ours and the peers', must agree with `cython_kernels.reference` on a
small awkward graph and again on the input that is measured; exit status 1 if one does not. Candidates take
turns, all of them in every round, so that a busy moment of the machine falls on all alike.

PyTorch and DGL take part where they can be imported. DGL wants an environment of its own (Python 3.11), in
which the package itself can't be installed (it wants NumPy 2); in the folder of the clone it need not be. The
kernels must be built there for that Python, for which a C++ compiler, setuptools and Cython are enough. Where
`pip install -e .` or mpirun.sh has built them with the same version of Python, leave the building out:

    python3.11 -m venv peers
    peers/bin/pip install torch==2.2.1 dgl==2.1.0 'numpy<2' torchdata==0.7.1 pandas pydantic pyyaml \
        'scipy<1.14' threadpoolctl matplotlib
    peers/bin/pip install 'setuptools>=77' 'cython>=3.1,<4'
    peers/bin/python setup.py build_ext --inplace
    peers/bin/python -m bench.kernels

How to read the table:

- A row is one candidate with one number of threads. Graph "none" is no graph: these kernels pass over rows.
- GFLOP/s counts a multiplication and an addition an entry and column, whether or not there are weights.
- GB/s are the bytes of the rows that entries name (passes: of all arrays), from wherever they come; "of
  limit" holds them against the random-row bandwidth of the main memory (passes: the sequential one). Rows
  that are found in a cache cost less: more than 100 % is no mistake.
- "scaling" is how many times faster than the same candidate with the least number of threads.
- "auto" is what a user gets, with the layout that `choose_layout` picks ([rows] or [tiles] at the end of a
  line of gather_sum); "auto, new" makes its result anew, as peers do. "rows" and "tiles" force a layout of
  the same row-major features: in "tiles" the copy into tiles counts. In "Tiles" the features are `Tiles`,
  made before; in "bf16 ..." they are stored as bfloat16.
- In gather_adjoint "auto" is given the transposed matrix, made before and not counted, as PyTorch and DGL
  are. "no transpose" has the matrix alone, as SciPy has: what a call costs where nothing was prepared.
- In narrow_product rows of 602 features are multiplied by a matrix of few columns, or, transposed, by as
  many rows.
- "x peer" is how many times faster than the fastest peer with as many threads; SciPy and NumPy use one thread
  whatever they are given. So the geometric mean at the end compares "auto" with the most threads with peers
  that use as many, or one.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import attention, cases, graphs, machine, passes
from bench.cases import MAIN, Candidate, Case, Inputs
from bench.checking import WrongResult
from bench.peers import NAMES, Peers
from bench.table import HEAD, PLOTTED, line_of, plot, unplottable, verdict

READING = "How to read the table:" + (__doc__ or "").partition("How to read the table:")[2]
BUILDERS = cases.KERNELS | passes.PASSES | attention.KERNELS
WIDTHS = [16, 32, 64, 128, 256, 602]
SMALL_WIDTH = 21  # of the first check: a tile and a piece of one
LEAST = 0.01  # seconds that a candidate runs in a round, at least: short calls are repeated
FEWEST = 3  # rounds
ONE_WIDTH = dict.fromkeys(("gather_float64", *attention.KERNELS), attention.WIDTH) | dict.fromkeys(
    ("narrow_product", "narrow_product_adjoint"), passes.UNITS
)
QUIET = 0.1  # cores that others may use without a warning
PAUSE = 0.002  # seconds, in which waiting threads of the candidate before fall asleep
QUICK = {"graphs": ["uniform", "rmat"], "widths": [64], "repeats": 3, "seconds": 1.0, "scale": 0.1}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults at the options; what stands around them as it is."""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels",
        description="Speed of the kernels, beside their peers and the machine's own limits.",
        epilog=READING,
        formatter_class=HelpFormatter,
    )
    add, all_graphs, all_threads = parser.add_argument, list(graphs.GENERATED), sorted({1, machine.cores()})
    add("--graphs", nargs="+", metavar="NAME", default=all_graphs, help="generated, or of --data-dir")
    add("--data-dir", type=Path, metavar="DIR", help="folder of cora.npz, ...: all, or those of --graphs")
    add("--widths", type=int, nargs="+", default=WIDTHS, help="columns")
    add("--kernels", nargs="+", choices=BUILDERS, metavar="NAME", default=list(BUILDERS), help="which")
    add("--threads", type=int, nargs="+", default=all_threads, help="numbers of threads")
    add("--peers", nargs="*", choices=NAMES, default=list(NAMES), help="which, where they can be imported")
    add("--repeats", type=int, default=9, help="rounds after the warm-up")
    add("--seconds", type=float, default=30.0, help=f"a case; fewer rounds then, but at least {FEWEST}")
    add("--quick", action="store_true", help="small graphs, few widths and rounds: under a minute")
    add("--scale", type=float, default=1.0, help=argparse.SUPPRESS)  # of vertices and entries
    add("--plot", type=Path, metavar="FILE", help=f"picture of {PLOTTED}; needs matplotlib")
    default = machine.RESULTS / "kernels.json"
    add("-o", "--output", type=Path, default=default, metavar="FILE", help="for the results")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; --quick replaces the defaults of what was not given."""
    accepting = parser()
    options = accepting.parse_args(argv)
    if options.quick:
        accepting.set_defaults(**QUICK)
        options = accepting.parse_args(argv)
    files = sorted(path.stem for path in options.data_dir.glob("*.npz")) if options.data_dir else []
    if options.graphs == accepting.get_default("graphs"):
        options.graphs = options.graphs + files
    known = [*graphs.GENERATED, *files]
    if unknown := [name for name in options.graphs if name not in known]:
        accepting.error(f"--graphs {' '.join(unknown)}: known are {', '.join(known)}")
    if min(*options.widths, *options.threads, options.repeats) < 1 or options.scale <= 0:
        accepting.error("--widths, --threads and --repeats must be at least 1")
    return options


def refusal(options: argparse.Namespace) -> str | None:
    """Say what would lose the results at the end; None if nothing would."""
    if problem := machine.unwritable(options.output):
        return problem
    if not options.plot:
        return None
    if PLOTTED not in options.kernels:
        return f"--plot draws {PLOTTED}, which is not among --kernels"
    return unplottable(options.plot) or machine.unwritable(options.plot)


# ---- correctness ----


def check(case: Case, candidate: Candidate, threads: int) -> float:
    """Run a candidate once, on nothing of another's, and refuse a wrong result. Gives its seconds."""
    case.reset()
    start = time.perf_counter()
    result = candidate.run(threads)
    seconds = time.perf_counter() - start
    try:
        candidate.check(result)
    except WrongResult as error:
        where = f"{case.kernel} on {case.graph}, width {case.width}, {threads} threads"
        raise WrongResult(f"{candidate.name}: {where}: {error}") from None
    return seconds


def check_small(kernels: Sequence[str], threads: Sequence[int], peers: Peers) -> int:
    """Check all candidates on a small awkward graph; how many results were right."""
    small = graphs.awkward()
    count = 0
    for kernel in kernels:
        case = BUILDERS[kernel](Inputs(small, SMALL_WIDTH, peers))
        for candidate, used in runs(case, threads):
            peers.set_threads(used)
            check(case, candidate, used)
            count += 1
    return count


# ---- time ----


def runs(case: Case, threads: Sequence[int]) -> list[tuple[Candidate, int]]:
    """Every candidate with every number of threads, or once if it uses one thread anyway."""
    return [
        (candidate, used if candidate.threaded else 1)
        for number, used in enumerate(threads)
        for candidate in case.candidates
        if candidate.threaded or number == 0
    ]


def measure(
    case: Case, threads: Sequence[int], peers: Peers, *, repeats: int, seconds: float
) -> dict[tuple[str, int], list[float]]:
    """Seconds of a call in each round, after a round that warms up and is checked."""
    turns = []
    for candidate, used in runs(case, threads):
        peers.set_threads(used)
        first = check(case, candidate, used)
        turns.append((candidate, used, max(1, round(LEAST / first))))
    found: dict[tuple[str, int], list[float]] = {(candidate.name, used): [] for candidate, used, _ in turns}
    order = random.Random(0)
    end = time.perf_counter() + seconds
    for number in range(repeats):
        if number >= FEWEST and time.perf_counter() > end:
            break
        order.shuffle(turns)  # or the one behind a certain other would find what that left in the caches
        for candidate, used, calls in turns:
            peers.set_threads(used)
            time.sleep(PAUSE)
            start = time.perf_counter()
            for _ in range(calls):
                candidate.run(used)
            found[candidate.name, used].append((time.perf_counter() - start) / calls)
    return found


def rows_of(case: Case, found: dict[tuple[str, int], list[float]], limits: dict[int, dict]) -> list[dict]:
    """What is told of each candidate and number of threads."""
    median = {key: statistics.median(times) for key, times in found.items()}
    candidates = {candidate.name: candidate for candidate in case.candidates}
    least_threads = min(threads for _, threads in median)
    rows = []
    for (name, threads), seconds in median.items():
        candidate = candidates[name]
        moved = case.moved * candidate.itemsize / seconds / 1e9
        row = {
            "kernel": case.kernel,
            "graph": case.graph,
            "width": case.width,
            "candidate": name,
            "peer": candidate.peer,
            "threads": threads,
            "seconds": {"median": seconds, "min": min(found[name, threads])},
            "rounds": len(found[name, threads]),
            "gflops": case.flops / seconds / 1e9 if case.flops else None,
            "ns_per_value": None if case.flops else seconds / case.values * 1e9,
            "gb_per_second": moved,
            "limit": case.limit,
            "share_of_limit": moved / limits[threads][case.limit] if threads in limits else None,
            "scaling": median.get((name, least_threads), seconds) / seconds,
        }
        others = {
            key: time
            for key, time in median.items()
            if candidates[key[0]].peer and (key[1] == threads or not candidates[key[0]].threaded)
        }
        if not candidate.peer and others:
            fastest = min(others, key=others.__getitem__)
            row |= {"fastest_peer": fastest[0], "times_fastest_peer": others[fastest] / seconds}
            least = min(min(found[key]) for key in others)
            row["times_fastest_peer_by_min"] = least / min(found[name, threads])
        rows.append(row | (case.notes if name == MAIN else {}))
    return rows


# ---- the whole ----


def plan(kernels: Sequence[str], widths: Sequence[int]) -> dict[int, list[str]]:
    """Which kernels to measure at which width."""
    found: dict[int, list[str]] = {}
    for kernel in kernels:
        for width in [ONE_WIDTH[kernel]] if kernel in ONE_WIDTH else widths:
            found.setdefault(width, []).append(kernel)
    return dict(sorted(found.items()))


def graphs_of(options: argparse.Namespace) -> Iterator[tuple[graphs.Graph, list[str]]]:
    """Each graph with the kernels that are measured on it; the last one has no entries, only rows."""
    over_graphs = [kernel for kernel in options.kernels if kernel not in passes.PASSES]
    for name in options.graphs if over_graphs else []:
        if name in graphs.GENERATED:
            yield graphs.GENERATED[name](options.scale), over_graphs
        else:
            yield graphs.real(options.data_dir / f"{name}.npz"), over_graphs
    if others := [kernel for kernel in options.kernels if kernel in passes.PASSES]:
        yield passes.no_graph(options.scale), others


def run(options: argparse.Namespace, peers: Peers) -> dict[str, Any]:
    """Check, measure and print; give the results."""
    doubts = machine.warnings()
    for doubt in doubts:
        print(f"warning: {doubt}", file=sys.stderr)
    about = machine.kernel_surroundings()
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    print(f"kernels: {about['instructions']}; peers: {', '.join(peers.names) or 'none'} ({versions})")
    for name, reason in peers.missing.items():
        print(f"no {name}: {reason.splitlines()[0]}")
    print(f"{check_small(options.kernels, options.threads, peers)} results on a small graph are right")
    limits = {count: machine.limits(count, min(1.0, 10 * options.scale)) for count in options.threads}
    for count, found in limits.items():
        told = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in found.items())
        print(f"GB/s read by {count} thread{'s' * (count > 1)}: {told}")
    print(HEAD)
    results: list[dict[str, Any]] = []
    described, memory = [], {}
    start = machine.busy_seconds()
    for graph, kernels in graphs_of(options):
        described.append(graph.describe())
        for width, chosen in plan(kernels, options.widths).items():
            inputs = Inputs(graph, width, peers)
            for kernel in chosen:
                case = BUILDERS[kernel](inputs)
                if not case.candidates:
                    continue
                times = measure(
                    case, options.threads, peers, repeats=options.repeats, seconds=options.seconds
                )
                rows = rows_of(case, times, limits)
                results += rows
                for row in rows:
                    print(line_of(row), flush=True)
        if "attention_training" in kernels:
            memory[graph.name] = attention.memory(graph, max(options.threads), peers)
            told = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in memory[graph.name].items())
            print(f"{graph.name}: attention, forward and backward, peak beyond inputs: {told}", flush=True)
    others = machine.busy_of_others(start)
    if others is not None and others > QUIET:
        doubts.append(f"the machine was busy: others used {others:.1f} cores on average")
        print(f"warning: {doubts[-1]}", file=sys.stderr)
    for line in verdict(results):
        print(line)
    return {
        **about,
        "warnings": doubts,
        "threads": options.threads,
        "scale": options.scale,
        "limits_gb_per_second": limits,
        "cores_used_by_others": others,
        "graphs": described,
        "attention_peak_bytes": memory,
        "results": results,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a result is wrong, 2 if the results could not be written."""
    options = parse(argv)
    if argv is None and "OMP_WAIT_POLICY" not in os.environ:
        # Each library has OpenMP threads of its own, and those of the last one would spin beside the next.
        again = [sys.executable, "-m", "bench.kernels", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | {"OMP_WAIT_POLICY": "passive"})
    if problem := refusal(options):
        print(f"bench.kernels: {problem}", file=sys.stderr)
        return 2
    try:
        results = run(options, Peers(options.peers))
    except WrongResult as error:
        print(f"WRONG: {error}", file=sys.stderr)
        return 1
    machine.write_results(options.output, results)
    if options.plot:
        plot(results["results"], options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
