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
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.epoch_systems import (
    DROPOUTS,
    MODELS,
    OURS,
    Case,
    Failure,
    How,
    Run,
    System,
    find_peers,
    offers,
    run,
    run_ours,
    systems_of,
)
from bench.launch import Layout, not_passed_on
from bench.machine import RESULTS, cores, kernel_surroundings, unwritable, warnings, write_results
from bench.peer_epoch import LIBRARIES
from bench.table import unplottable
from bench.tasks import PRESETS, from_file, generate, write_arrays
from dorylus_hpc.engine.checkpoint import CHECKPOINT, load_model
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.preparation import prepare_folder

WAITS = {"unset": "", "passive": "passive"}
CHECKED, TOLERANCE = 5, 1e-4  # epochs, relative
# Adam makes a whole step of a gradient that is nothing but rounding; small steps keep that out of the losses.
CHECK_LR = 0.001
BUSY = 0.1  # cores of others from which a run is doubtful
STANDS_STILL = 1e-30  # a learning rate that changes no weight


class WrongLoss(Exception):
    """Two systems do not compute the same."""


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
    for line in [*not_passed_on(), *warnings(products=False)]:
        print(f"note: {line}")
    results: dict[str, Any] = {"graphs": {}, "checks": [], "missing": [], "rows": [], "runs": []}
    status = 0
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
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
