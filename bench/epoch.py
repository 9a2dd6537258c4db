"""Whole training epochs, beside DGL and PyTorch Geometric on the same graph with the same model.

    python -m bench.epoch --peer-python PATH [--graphs 58k 500k] [--models gcn-16 gcn-128 sage-128 gat-4x16]
                          [--dropouts hidden input] [--ours 1x2 2x1] [--repetitions 5] [--scale 0.01] ...

Graphs are those of `bench.tasks`. A system is this project on so many ranks and threads, or a library that
one of the given Pythons can import (`bench/peer_epoch.py` has its models). All read the same arrays, use the
same number of cores, and train on the whole graph with Adam; nothing is evaluated in epochs that are timed.

**First a check.** Without dropout and from the same start weights, which a run of this project leaves, the
losses of the first epochs must be the same in all systems (relative difference at most 1e-4). If they are
not, the bench says so and ends with status 1: times of different computations tell nothing. A library runs
with OMP_WAIT_POLICY unset and passive here, and from then on with what was faster (on a busy machine chance
decides: ``--peer-waits passive``).

**Then the times.** Each measurement is a process (a job of ranks) of its own; one is alive at a time, and
the systems take turns: A B C A B C ... Of a run the median of the epochs after the warm-up counts, of the
runs of a system the median again. Memory is the most that a process has held, set-up included.

Systems are also measured the other way about where features never change: this project, which then
aggregates them once, with ``--constant-aggregate off`` ("A X anew"), and a library that is given the
aggregate, as a user could do by hand ("A X once"). ``--usual`` leaves these out.

With ``--target-accuracy`` runs follow in which every epoch is evaluated, until the accuracy on the
validation set is reached. This project evaluates the weights of the epoch before while an epoch goes on, and
so stops one later than a library with the same curve. The uniform graphs have little to learn: take
``--graphs communities``, or ``--file`` for one of your own.

How to read the table: ``x`` is how many times as long as the first of our systems, over medians, and in
brackets the least and the greatest of the ratios between runs that followed each other.

`bench.kernels` says how to make an environment that has DGL; the kernels need not be built in it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.launch import Layout, drop_slowing, epochs_of, train
from bench.machine import (
    RESULTS,
    busy_of_others,
    busy_seconds,
    cores,
    kernel_surroundings,
    unwritable,
    warnings,
    write_results,
)
from bench.peer_epoch import LIBRARIES
from bench.table import unplottable
from bench.tasks import PRESETS, from_file, generate, write_arrays
from dorylus_hpc.config import TrainConfig
from dorylus_hpc.engine.checkpoint import CHECKPOINT, load_model
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.preparation import prepare_folder

PEER = Path(__file__).with_name("peer_epoch.py")
OURS = "ours"
ANEW, ONCE = "A X anew", "A X once"
WAITS = {"unset": "", "passive": "passive"}
CHECKED, TOLERANCE = 5, 1e-4  # epochs, relative
# Adam makes a whole step of a gradient that is nothing but rounding; small steps keep that out of the losses.
CHECK_LR = 0.001
BUSY = 0.1  # cores of others from which a run is doubtful
STANDS_STILL = 1e-30  # a learning rate that changes no weight
DROPPED = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "PYTHONPATH", "VIRTUAL_ENV")

MODELS: dict[str, dict[str, Any]] = {
    "gcn-16": {"model": "gcn", "hidden": 16},
    "gcn-128": {"model": "gcn", "hidden": 128},
    "sage-128": {"model": "sage", "aggregator": "mean", "hidden": 128},
    "gat-4x16": {"model": "gat", "hidden": 16, "heads": 4, "output-heads": 1},
}
DROPOUTS = {"hidden": (0.5, 0.0), "input": (0.5, 0.5)}


class WrongLoss(Exception):
    """Two systems do not compute the same."""


# ---- what is measured ----


@dataclass(frozen=True)
class System:
    """Who trains.

    Attributes
    ----------
    library
        `OURS`, or a name of `peer_epoch.LIBRARIES`.
    layout
        Ranks and threads; a library has one rank.
    usual
        The aggregate of constant features is dealt with as it comes; else as `name` says.
    python
        Of a library.
    wait
        OMP_WAIT_POLICY of a library; empty: not set. PyTorch and DGL each have an OpenMP of their own, and
        threads of the one that wait in a loop can take the cores from those of the other.
    number
        To tell the same library of several Pythons apart.
    """

    library: str
    layout: Layout
    usual: bool = True
    python: str = ""
    number: int = 1
    wait: str = ""

    @property
    def name(self) -> str:
        name = f"{OURS} {self.layout}" if self.library == OURS else self.library
        name += f" ({self.number})" if self.number > 1 else ""
        return name if self.usual else f"{name}, {ANEW if self.library == OURS else ONCE}"


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes
    ----------
    graph, model, dropouts
        Names.
    work
        Folder with the prepared graph for each number of ranks, ``graph.npz``, and ``MODEL.npz``.
    lr
        Of Adam.
    """

    graph: str
    model: str
    dropouts: str
    work: Path
    lr: float

    @property
    def kind(self) -> str:
        return MODELS[self.model]["model"]

    @property
    def title(self) -> str:
        dropout, features = DROPOUTS[self.dropouts]
        return f"{self.model}, dropout {dropout:g}" + (f", of features {features:g}" if features else "")


@dataclass(frozen=True)
class How:
    """How long a run trains, and with which dropout."""

    epochs: int
    dropout: float = 0.0
    input_dropout: float = 0.0
    target: float = 0.0


@dataclass(frozen=True)
class Run:
    """What one process, or job of ranks, has left.

    Attributes
    ----------
    loss, seconds
        Of each epoch.
    val_accuracy
        Of each epoch, None where it is not known.
    peak_rss_bytes
        Of each rank.
    busy_others
        How many cores others have used meanwhile; None if unknown.
    """

    system: str
    loss: list[float]
    seconds: list[float]
    val_accuracy: list[float | None]
    peak_rss_bytes: list[int]
    setup_seconds: float
    busy_others: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def median(self, warm_up: int) -> float:
        """Seconds of an epoch."""
        return statistics.median(self.seconds[warm_up:])

    def arrival(self, target: float) -> tuple[int, float] | None:
        """Epochs and seconds until the validation accuracy was that or more; None if it never was."""
        spent = 0.0
        for epoch, (seconds, seen) in enumerate(zip(self.seconds, self.val_accuracy, strict=True), 1):
            spent += seconds
            if seen is not None and seen >= target:
                return epoch, spent
        return None


class Failure(Exception):
    """A library could not train; the rest goes on."""


def offers(option: str, value: str | None = None) -> bool:
    """Tell if this version's ``train`` has an option, and a value of it."""
    known = {field.name: field.metadata["choices"] for field in fields(TrainConfig)}
    name = option.replace("-", "_")
    return name in known and (value is None or known[name] is None or value in known[name])


def run_ours(case: Case, system: System, how: How, folder: Path) -> Run:
    """Train with this project."""
    flags: dict[str, Any] = {
        **MODELS[case.model],
        "data": case.work / f"parts-{system.layout.ranks}",
        "threads": system.layout.threads,
        "epochs": how.epochs,
        "dropout": how.dropout,
        "input-dropout": how.input_dropout,
        "lr": case.lr,
        "weight-decay": 0,
        "seed": 0,
        "eval-every": 1 if how.target else how.epochs,
    }
    if how.target:
        flags["target-accuracy"] = how.target
    if not system.usual:
        flags["constant-aggregate"] = "off"
    if case.kind == "gat" and offers("attention-dropout"):
        flags["attention-dropout"] = 0
    start = busy_seconds()
    summary = train(system.layout.ranks, folder, flags)
    lines = epochs_of(folder)
    return Run(
        system.name,
        loss=[line["loss"] for line in lines],
        seconds=[line["seconds"] for line in lines],
        val_accuracy=[line["val_accuracy"] for line in lines],
        peak_rss_bytes=summary["peak_rss_bytes"],
        setup_seconds=summary["setup_seconds"],
        busy_others=busy_of_others(start),
        details={"ghost_bytes_per_epoch": summary["ghost_bytes_per_epoch"], "config": summary["config"]},
    )


def run_peer(case: Case, system: System, how: How, folder: Path, seed: int = 0) -> Run:
    """Train with a library.

    Raises
    ------
    Failure
        It ended with an error, such as too little memory.
    """
    flags: dict[str, Any] = {
        "library": system.library,
        "data": case.work / "graph.npz",
        "weights": case.work / f"{case.model}.npz",
        "model": case.kind,
        "dropout": how.dropout,
        "input-dropout": how.input_dropout,
        "lr": case.lr,
        "epochs": how.epochs,
        "target-accuracy": how.target,
        "threads": system.layout.threads,
        "seed": seed,
    }
    flags |= {name: MODELS[case.model][name] for name in ("heads", "output-heads") if case.kind == "gat"}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    start = busy_seconds()
    words += [] if system.usual else ["--constant"]
    result = start_peer(system.python, words, folder, system.layout.threads, system.wait)
    known = {name: result.pop(name) for name in ("loss", "seconds", "val_accuracy", "setup_seconds")}
    peak = [result.pop("peak_rss_bytes")]
    known["val_accuracy"] = known["val_accuracy"] or [None] * len(known["loss"])
    return Run(system.name, **known, peak_rss_bytes=peak, busy_others=busy_of_others(start), details=result)


def start_peer(
    python: str, arguments: Sequence[str], folder: Path, threads: int, wait: str = ""
) -> dict[str, Any]:
    """Run bench/peer_epoch.py with another Python, and read what it writes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    # Neither what stands beside the script nor this project may hide a module of the peer's.
    environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"}
    environment |= {"OMP_WAIT_POLICY": wait} if wait else {}
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "result.json"
    command = [python, str(PEER), *arguments, "-o", str(output)]
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as error:
        raise Failure(f"{python} cannot be started: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        reason = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        raise Failure(f"{reason}: {said[-1] if said else 'nothing said'}")
    return json.loads(output.read_text())


def run(case: Case, system: System, how: How, folder: Path, seed: int = 0) -> Run:
    """Train once."""
    if system.library == OURS:
        return run_ours(case, system, how, folder)
    return run_peer(case, system, how, folder, seed)


# ---- which systems ----


def find_peers(pythons: Sequence[str], wanted: Sequence[str], work: Path) -> tuple[list[System], list[dict]]:
    """Ask each Python for the libraries; return one system a library and Python, and all answers."""
    systems, answers = [], []
    for at, python in enumerate(pythons):
        try:
            answer = start_peer(python, ["--probe"], work / f"probe-{at}", 1)
        except Failure as failure:
            answers.append({"executable": python, "error": str(failure)})
            continue
        answers.append({"executable": python, **answer})
        for library in wanted:
            if "version" in answer[library]:
                number = 1 + sum(known.library == library for known in systems)
                systems.append(System(library, Layout(1, 1), python=python, number=number))
    return systems, answers


def systems_of(
    case: Case, ours: Sequence[Layout], peers: Sequence[System], usual_only: bool
) -> tuple[list[System], list[str]]:
    """Return the systems for a case, ours first, and what cannot be measured.

    A library gets as many threads as our first layout uses cores.
    """
    missing = []
    systems = [System(OURS, layout) for layout in ours]
    threads = Layout(1, ours[0].ranks * ours[0].threads)
    theirs = [System(peer.library, threads, True, peer.python, peer.number) for peer in peers]
    if not usual_only and case.kind != "gat" and not DROPOUTS[case.dropouts][1]:
        if offers("constant-aggregate", "off"):
            systems.append(System(OURS, ours[0], usual=False))
        else:
            missing.append(f"{OURS}, {ANEW}: --constant-aggregate off is not available in this version")
        theirs += [System(peer.library, threads, False, peer.python, peer.number) for peer in peers]
    return systems + theirs, missing


# ---- the check ----


def start_weights(case: Case) -> None:
    """Write the start weights of a model: a run whose learning rate changes none leaves them."""
    frozen = replace(case, lr=STANDS_STILL)
    folder = case.work / f"start-{case.model}"
    run_ours(frozen, System(OURS, Layout(1, 1)), How(1), folder)
    weights = load_model(folder / CHECKPOINT).weights["last"]
    # A bias of zero has moved by about the learning rate.
    kept = {name: np.where(np.abs(value) < 1e-20, 0, value) for name, value in weights.items()}
    np.savez(case.work / f"{case.model}.npz", **kept)


def differ(first: Sequence[float], second: Sequence[float]) -> float:
    """The greatest relative difference of two curves; infinite where they cannot be compared."""
    if len(first) != len(second) or not np.isfinite([*first, *second]).all():
        return float("inf")
    return max(abs(a - b) / abs(a) for a, b in zip(first, second, strict=True))


def check(
    case: Case, systems: Sequence[System], waits: Sequence[str] = tuple(WAITS)
) -> tuple[dict[str, Any], list[System], dict[str, str]]:
    """Hold the losses of all systems to those of the first.

    Libraries are tried with each of some `WAITS`.

    Returns
    -------
    found
        Losses, differences, and the seconds of an epoch by wait policy.
    ready
        The systems that can train, libraries with the faster policy.
    failed
        Why others cannot.

    Raises
    ------
    WrongLoss
        Losses are not the same.
    """
    start_weights(case)
    case = replace(case, lr=CHECK_LR)
    wanted: list[float] = []
    apart: dict[str, float] = {}
    ready, failed, seconds = [], {}, {}
    for at, system in enumerate(systems):
        tried = [system] if system.library == OURS else [replace(system, wait=WAITS[name]) for name in waits]
        found = {}
        try:
            for one in tried:
                found[one] = run(case, one, How(CHECKED), case.work / f"check-{case.model}-{at}{one.wait}")
        except Failure as failure:
            failed[system.name] = str(failure)
            continue
        for one in found.values():
            wanted = wanted or one.loss
            apart[system.name] = max(apart.get(system.name, 0.0), differ(wanted, one.loss))
            if not apart[system.name] <= TOLERANCE:
                raise WrongLoss(
                    f"{case.model} on {case.graph}: the losses of {system.name} are {one.loss}, those of "
                    f"{systems[0].name} {wanted}: {apart[system.name]:.2g} apart, allowed is {TOLERANCE:g}"
                )
        ready.append(min(found, key=lambda one: found[one].median(1)))
        seconds[system.name] = {one.wait or "unset": found[one].median(1) for one in found}
    return (
        {
            "graph": case.graph,
            "model": case.model,
            "loss": wanted,
            "differences": apart,
            "seconds_by_wait_policy": seconds,
        },
        ready,
        failed,
    )


# ---- measuring ----


def measure(
    case: Case, systems: Sequence[System], how: How, repetitions: int, failed: dict[str, str]
) -> list[Run]:
    """Let the systems take turns; those that have failed are left out from then on."""
    runs = []
    for repetition in range(repetitions):
        for at, system in enumerate(systems):
            if system.name in failed:
                continue
            folder = case.work / f"{case.model}-{case.dropouts}-{bool(how.target)}-{repetition}-{at}"
            try:
                runs.append(run(case, system, how, folder, seed=repetition))
            except Failure as failure:
                failed[system.name] = str(failure)
                continue
            print(f"    {system.name}: {runs[-1].median(0):.4f} s", file=sys.stderr, flush=True)
    return runs


def rows_of(case: Case, systems: Sequence[System], runs: Sequence[Run], warm_up: int) -> list[dict[str, Any]]:
    """Return a row for each system that has run; `times` are over the first of them."""
    by_system = {
        system.name: mine
        for system in systems
        if (mine := [one for one in runs if one.system == system.name])
    }
    medians = {name: [one.median(warm_up) for one in mine] for name, mine in by_system.items()}
    rows = []
    for name, mine in by_system.items():
        base = medians[systems[0].name]
        ratios = [a / b for a, b in zip(medians[name], base, strict=False)]
        rows.append(
            {
                "graph": case.graph,
                "model": case.model,
                "dropouts": case.dropouts,
                "system": name,
                "runs": len(mine),
                "epoch_seconds": {
                    "median": statistics.median(medians[name]),
                    "min": min(min(one.seconds[warm_up:]) for one in mine),
                    "of_runs": medians[name],
                },
                "times": statistics.median(medians[name]) / statistics.median(base),
                "times_range": [min(ratios), max(ratios)],
                "peak_rss_bytes": {
                    "largest": statistics.median(max(one.peak_rss_bytes) for one in mine),
                    "all": statistics.median(sum(one.peak_rss_bytes) for one in mine),
                },
                "setup_seconds": statistics.median(one.setup_seconds for one in mine),
                "busy_others": max((one.busy_others or 0.0 for one in mine), default=0.0),
            }
        )
    return rows


def arrivals_of(systems: Sequence[System], runs: Sequence[Run], target: float) -> dict[str, dict[str, Any]]:
    """Return epochs and seconds to an accuracy by system: medians of the runs that came there."""
    found = {}
    for system in systems:
        mine = [one.arrival(target) for one in runs if one.system == system.name]
        came = [one for one in mine if one is not None]
        if mine:
            found[system.name] = {
                "never": len(mine) - len(came),
                "epochs": statistics.median(epochs for epochs, _ in came) if came else None,
                "seconds": statistics.median(seconds for _, seconds in came) if came else None,
            }
    return found


# ---- for the eye ----


HEAD = (
    f"  {'system':22} {'epoch s':>9} {'least s':>9} {'x':>6} {'(range)':>14} {'MB a process':>13} "
    f"{'MB of all':>10} {'set-up s':>9}"
)


def line_of(row: Mapping[str, Any]) -> str:
    """The line of a row."""
    seconds, peak = row["epoch_seconds"], row["peak_rss_bytes"]
    spread = "({:.2f}-{:.2f})".format(*row["times_range"])
    line = (
        f"  {row['system']:22} {seconds['median']:>9.4f} {seconds['min']:>9.4f} {row['times']:>6.2f} "
        f"{spread:>14} {peak['largest'] / 1e6:>13.0f} {peak['all'] / 1e6:>10.0f} {row['setup_seconds']:>9.1f}"
    )
    return line + ("  (others were busy)" if row["busy_others"] > BUSY else "")


def line_of_arrival(name: str, found: Mapping[str, Any], target: float) -> str:
    """The line of a system's way to an accuracy."""
    if found["epochs"] is None:
        return f"  {name:22} never at {100 * target:g} %"
    never = f" ({found['never']} runs never)" if found["never"] else ""
    return f"  {name:22} {100 * target:g} % after {found['epochs']:g} epochs, {found['seconds']:.3f} s{never}"


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the seconds of an epoch: a panel a graph, a group of bars a model, a bar a system."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    graphs = list(dict.fromkeys(row["graph"] for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(graphs), figsize=(2 + 5 * len(graphs), 4), squeeze=False, layout="constrained"
    )
    for axis, graph in zip(axes[0], graphs, strict=True):
        mine = [row for row in rows if row["graph"] == graph]
        groups = list(dict.fromkeys((row["model"], row["dropouts"]) for row in mine))
        for number, system in enumerate(systems):
            bars = [row for row in mine if row["system"] == system]
            width = 0.8 / len(systems)
            axis.bar(
                [
                    groups.index((row["model"], row["dropouts"])) + (number + 0.5) * width - 0.4
                    for row in bars
                ],
                [row["epoch_seconds"]["median"] for row in bars],
                width,
                label=system,
                color=pyplot.get_cmap("tab20")(number),
            )
        axis.set_xticks(range(len(groups)), [f"{model}\n{dropouts}" for model, dropouts in groups])
        axis.set(title=graph)
    axes[0][0].set_ylabel("seconds an epoch")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"drawn in {path}")


# ---- command line ----


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.epoch",
        description="Training epochs of this project, of DGL and of PyTorch Geometric.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, both = parser.add_argument, max(2, cores())
    add("--graphs", nargs="*", choices=PRESETS, default=["58k", "500k"], metavar="NAME",
        help=f"generated graphs ({', '.join(PRESETS)})")  # fmt: skip
    add("--file", type=Path, nargs="+", default=[], metavar="FILE.npz", help="graphs of files, besides")
    add("--scale", type=float, default=1.0, help="of generated graphs: less for trying it out")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL",
        help=f"of 2 layers ({', '.join(MODELS)})")  # fmt: skip
    add(
        "--dropouts",
        nargs="+",
        choices=DROPOUTS,
        default=["hidden"],
        help="0.5 on hidden values; features too",
    )
    add("--ours", type=Layout.parse, nargs="+", default=[Layout(1, both), Layout(2, both // 2)],
        metavar="RxT", help="ranks and threads of this project; the first one is compared with")  # fmt: skip
    add("--peer-python", nargs="+", action="extend", metavar="PATH",
        help="Pythons to ask for the libraries; default: this one")  # fmt: skip
    add("--peers", nargs="*", choices=LIBRARIES, default=list(LIBRARIES), help="libraries")
    add("--peer-waits", nargs="+", choices=WAITS, default=list(WAITS), help="OMP_WAIT_POLICY to choose from")
    add("--usual", action="store_true", help="each system only as it comes, see above")
    add("--repetitions", type=int, default=5, help="runs of each system, in turns")
    add("--epochs", type=int, default=10, help="epochs of a run that count")
    add("--warm-up", type=int, default=3, help="epochs before them")
    add("--lr", type=float, default=0.01, help="learning rate")
    add("--target-accuracy", type=float, default=0.0, metavar="A", help="of validation, to be timed; 0: not")
    add("--limit", type=int, default=200, help="epochs in which to reach it")
    add("--partitioner", default="metis", help="for our ranks")
    add("--work", type=Path, metavar="DIR", help="for the prepared graphs, some GB; default: temporary")
    add("-o", "--output", type=Path, default=RESULTS / "epoch.json", metavar="FILE", help="for the results")
    add("--plot", type=Path, metavar="FILE", help="picture of the times; needs matplotlib")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and refuse what cannot be run."""
    accepting = parser()
    options = accepting.parse_args(argv)
    if min(options.repetitions, options.epochs, options.warm_up, options.limit) < 1:
        accepting.error("--repetitions, --epochs, --warm-up and --limit must be at least 1")
    if not 0 < options.scale <= 10:
        accepting.error(f"--scale must be more than 0 and at most 10, got {options.scale}")
    if not 0 <= options.target_accuracy <= 1:
        accepting.error(f"--target-accuracy must be in [0, 1], got {options.target_accuracy}")
    if not options.graphs and not options.file:
        accepting.error("--graphs is empty, and there is no --file")
    for path in options.file:
        if not path.is_file():
            accepting.error(f"--file {path}: no such file")
    options.peer_python = options.peer_python or [sys.executable]
    problem = unwritable(options.output)
    if options.plot:
        problem = problem or unplottable(options.plot) or unwritable(options.plot)
    if problem:
        accepting.error(problem)
    return options


def load(options: argparse.Namespace) -> list[tuple[str, Any]]:
    """Name all graphs, with what makes each."""
    made = [(name, lambda name=name: generate(name, options.scale)) for name in options.graphs]
    return made + [(path.stem, lambda path=path: from_file(path)) for path in options.file]


def prepare(graph: GraphData, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Write a graph for all systems; return what it is."""
    work.mkdir(parents=True, exist_ok=True)
    for ranks in sorted({1, *(layout.ranks for layout in options.ours)}):
        prepare_folder(
            graph, work / f"parts-{ranks}", parts=ranks, partitioner=options.partitioner,
            report=lambda line: None,
        )  # fmt: skip
    write_arrays(graph, work / "graph.npz")
    return {
        "vertices": graph.n,
        "arcs": graph.n_edges,
        "features": graph.n_features,
        "classes": graph.n_classes,
    }


def measure_case(
    case: Case,
    peers: Sequence[System],
    options: argparse.Namespace,
    results: dict[str, Any],
    ready: Sequence[System],
    failed: dict[str, str],
) -> None:
    """Measure a case, tell it, and add it to the results; `ready` and `failed` as `check` gives them."""
    systems, missing = systems_of(case, options.ours, peers, options.usual)
    chosen = {one.name: one for one in ready}
    systems = [chosen.get(one.name, one) for one in systems]
    print(f"{case.title}, {case.graph}")
    dropout, input_dropout = DROPOUTS[case.dropouts]
    how = How(options.warm_up + options.epochs, dropout, input_dropout)
    runs = measure(case, systems, how, options.repetitions, failed)
    rows = rows_of(case, systems, runs, options.warm_up)
    print("\n".join([HEAD, *map(line_of, rows)]), flush=True)
    if options.target_accuracy:
        how = How(options.limit, dropout, input_dropout, options.target_accuracy)
        arriving = measure(case, systems, how, options.repetitions, failed)
        for name, found in arrivals_of(systems, arriving, how.target).items():
            print(line_of_arrival(name, found, how.target), flush=True)
            row = next(row for row in rows if row["system"] == name)
            row["to_target"] = found | {"accuracy": how.target}
        runs += arriving
    missing += [f"{name}: {reason}" for name, reason in failed.items()]
    for line in missing:
        print(f"  not measured: {line}", flush=True)
    place = {"graph": case.graph, "model": case.model, "dropouts": case.dropouts}
    results["missing"] += [place | {"what": line} for line in missing]
    results["rows"] += rows
    results["runs"] += [place | asdict(one) for one in runs]


def measure_all(options: argparse.Namespace, work: Path, results: dict[str, Any]) -> None:
    """Measure every graph, model and dropout."""
    peers, results["peers"] = find_peers(options.peer_python, options.peers, work)
    for answer in results["peers"]:
        told = {name: answer[name] for name in LIBRARIES if name in answer} or answer
        print(f"{answer['executable']}: {json.dumps(told)}")
    for name, make in load(options):
        folder = work / name
        results["graphs"][name] = prepare(make(), options, folder)
        print("{}: {vertices} vertices, {arcs} arcs, {features} features, {classes} classes".format(
            name, **results["graphs"][name]))  # fmt: skip
        for model in options.models:
            if not offers("model", MODELS[model]["model"]):
                print(f"{model}: --model {MODELS[model]['model']} is not available in this version")
                results["missing"].append({"graph": name, "model": model, "what": "not available"})
                continue
            cases = {dropouts: Case(name, model, dropouts, folder, options.lr) for dropouts in DROPOUTS}
            # Without dropout of features there are the most systems: all of them are checked.
            systems, _ = systems_of(cases["hidden"], options.ours, peers, options.usual)
            found, ready, failed = check(cases["hidden"], systems, options.peer_waits)
            results["checks"].append(found)
            for dropouts in options.dropouts:
                measure_case(cases[dropouts], peers, options, results, ready, failed)
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 if all systems compute the same."""
    options = parse(argv)
    for line in [*drop_slowing(), *warnings()]:
        print(f"note: {line}")
    results: dict[str, Any] = {"graphs": {}, "checks": [], "missing": [], "rows": [], "runs": []}
    status = 0
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        try:
            measure_all(options, Path(work).resolve(), results)
        except InputError as error:
            parser().error(str(error))
        except WrongLoss as error:
            print(f"WRONG: {error}", file=sys.stderr)
            results["wrong"], status = str(error), 1
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "plot")}
    told = kernel_surroundings() | {"options": json.loads(json.dumps(settings, default=str))}
    write_results(options.output, told | results)
    if options.plot and results["rows"]:
        plot(results["rows"], options.plot)
    return status


if __name__ == "__main__":
    sys.exit(main())
