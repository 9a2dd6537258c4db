"""How much of the time that dense workers are far away each mode hides, against a lower bound.

    python -m bench.overlap [--delay 0.05] [--straggler 2] [--rounds 2] [--epochs 16] [--json F] [--plot F]

Two graph servers of 16 intervals and one thread each train a GCN of two layers; every dense task takes
`--delay` seconds longer, as if its worker were far away. The graph is a band: a vertex is joined to all
within `--reach`, so an interval reads itself and its next neighbours only. The reach is adjusted until the
gathers of an epoch take a server three delays, within 20 %. Groups of an epoch::

    dense  AV1 AV2 | cpu  GA2 | dense  AV2 dAV2 | cpu  dGA2 | dense  dAV2 dAV1

- ``nopipe`` needs three delays and all gathers one after the other.
- ``pipe``, and ``async`` with S = 0, hide the delay between the gathers behind them. At the head and the
  tail of an epoch the thread has nothing to do, whatever the order of tasks.
- ``async`` with S = 1 hides these as well, down to the chain of an interval's own tasks.

Runs of all modes take turns, in an order drawn anew each round. Seconds of an epoch, after a warm-up: the
median in exact modes, the mean in ``async``, whose epochs overlap; then the median over the rounds. The
bounds and the simulations (`dorylus_hpc.engine.bounds`, `simulator`) have the wiring of these very runs and
fixed task times. Messages, weights and the schedule itself take no time there. The share of the possible gain
is ::

    (nopipe measured - mode measured) / (nopipe measured - bound of the mode)

and is given with three sets of task times:

- "own", for which the targets are: the means of the mode's own runs. How well its schedule hides the delays
  behind the tasks as they were. Tasks that run at once share the cores and caches of this machine, so that
  gathers take longer than in ``nopipe``.
- "nopipe": gathers as in those runs, and what dense tasks compute (the median where no other task runs
  beside) as work of the servers' threads, as far as there are not two cores for each, as in
  `bench.lambda_overlap`. So is it in the arithmetic of ``nopipe``.
- "apart": as "nopipe", with dense tasks that compute on cores of their own. That is not so here.

With ``--straggler`` a quarter of the tasks of the last server take so many times as long. Lost are the
seconds an epoch beside the same mode without, both as means.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from bench.launch import train
from bench.machine import busy_of_others, busy_seconds, cores, write_results
from dorylus_hpc.comm.blocks import BlockPlan, cut_plan
from dorylus_hpc.comm.halo import plan_halo
from dorylus_hpc.comm.roles import Placement
from dorylus_hpc.engine.bounds import SecondsOf, epoch_bound, nopipe_seconds, run_bound
from dorylus_hpc.engine.intervals import cut_intervals
from dorylus_hpc.engine.runner import DENSE, Experiment
from dorylus_hpc.engine.schedule import Direction, Group, Mode, Round
from dorylus_hpc.engine.simulator import Cluster, simulate
from dorylus_hpc.engine.wiring import GRAPH, Wiring, wire
from dorylus_hpc.graph.manifest import read_manifest
from dorylus_hpc.graph.partition import Adjacency
from dorylus_hpc.graph.preparation import prepare_folder
from dorylus_hpc.graph.readers import from_arrays
from dorylus_hpc.graph.store import read_part
from dorylus_hpc.nn.gcn import gcn_program
from dorylus_hpc.nn.operands import DenseFeatures, EdgeOperand, PartOperands

SERVERS, INTERVALS, FEATURES, WIDTH = 2, 16, 8, 16
DELAYS = 3  # dense groups of an epoch
WITHIN = 0.2  # how far the gathers may be from three delays
ATTEMPTS = 3
MODES: dict[str, tuple[Mode, int]] = {
    "nopipe": ("nopipe", 0),
    "pipe": ("pipe", 0),
    "async S=0": ("async", 0),
    "async S=1": ("async", 1),
}
OVERLAPPING = ("pipe", "async S=0", "async S=1")
TARGETS = {"nopipe": 1.05, "pipe": 0.85, "async S=0": 0.85, "async S=1": 0.80}
TARGET_LOST = 0.5  # of what pipe loses to a straggler
STEADY = 10, 40  # epochs: what lies between two runs is the steady state
SEEDS = 5  # simulations with a straggler
MANY = 10_000  # dense workers


# ---- the graph ----


def prepare(vertices: int, reach: int, folder: Path, *, width: int = WIDTH, parts: int = SERVERS) -> None:
    """Prepare the band, in a part a server. Nothing is to be learned from it."""
    rng = np.random.default_rng(0)
    ends = (np.arange(vertices)[:, None] + np.arange(1, reach + 1)) % vertices
    indptr = np.arange(0, vertices * reach + 1, reach)
    values = np.ones(vertices * reach, np.int8)
    graph = from_arrays(
        sp.csr_array((values, ends.astype(np.int32).reshape(-1), indptr), shape=(vertices, vertices)),
        rng.standard_normal((vertices, FEATURES), dtype=np.float32),
        rng.integers(width, size=vertices),
        n_classes=width,
        name="band",
        seed=0,
    )
    prepare_folder(
        graph, folder, parts=parts, partitioner="range", undirected=True, order="none",
        report=lambda line: None,
    )  # fmt: skip


def cluster_of(
    folder: Path, *, intervals: int = INTERVALS, dense_workers: int = MANY, width: int = WIDTH
) -> Cluster:
    """The cluster of runs on this graph, wired as the graph servers do it; in mode pipe, of one epoch."""
    placement = Placement(SERVERS, SERVERS)
    parts = [read_part(folder, read_manifest(folder), index).without_loops() for index in range(SERVERS)]
    cuts = {part.index: cut_intervals(part.in_edges.indptr, intervals) for part in parts}
    program = gcn_program(
        n_features=FEATURES, hidden=[width], n_classes=width, sparse_features=False, dropout=0.0,
        input_dropout=0.0, weight_decay=0.0, decay_scope="all", seed=0,
    )  # fmt: skip
    wirings: list[Wiring] = []
    plans: list[dict[Direction, BlockPlan]] = []
    for server, part in enumerate(parts):
        edges: dict[Direction, Adjacency] = {"in": part.in_edges, "out": part.out_edges}
        plans.append(
            {
                way: cut_plan(plan_halo(server, placement, {part.index: one}), cuts)
                for way, one in edges.items()
            }
        )
        none = np.empty(0, np.float32)  # only who reads whom counts
        operands = {way: EdgeOperand(one.indptr, one.indices, None, none, none) for way, one in edges.items()}
        hosted = PartOperands(
            index=part.index,
            gids=part.gid,
            in_edges=operands["in"],
            out_edges=operands["out"],
            n_in_ghosts=part.in_edges.n_ghost,
            n_out_ghosts=part.out_edges.n_ghost,
            features=DenseFeatures(part.features, part.gid),
            labels=part.labels,
            split=part.split,
            train_mask=np.zeros(part.n_own, np.uint8),
        )
        peers = [other for other in range(SERVERS) if other != server]
        wirings.append(
            wire(program, {part.index: hosted}, {part.index: cuts[part.index]}, plans[-1], peers=peers,
                 dense=DENSE)
        )  # fmt: skip
    return Cluster(
        topologies=[one.topology for one in wirings],
        routes=routes_of(wirings, plans),
        tables=wirings[0].tables,
        groups=wirings[0].groups,
        rounds=[Round("train", 1)],
        mode="pipe",
        workers={GRAPH: 1, DENSE: dense_workers},
    )


def routes_of(
    wirings: Sequence[Wiring], plans: Sequence[Mapping[Direction, BlockPlan]]
) -> list[dict[Direction, list[list[tuple[int, int]]]]]:
    """For each server, direction and unit: (server, block) of each place where its rows are ghosts."""
    numbers = [
        {way: {block: number for number, block in enumerate(plan.blocks)} for way, plan in server.items()}
        for server in plans
    ]
    return [
        {
            way: [
                [
                    (other, known[way][unit.part, unit.interval])
                    for other, known in enumerate(numbers)
                    if (unit.part, unit.interval) in known[way]
                ]
                for unit in wiring.topology.units
            ]
            for way in wiring.topology.blocks
        }
        for wiring in wirings
    ]


# ---- what a run leaves ----


@dataclass(frozen=True)
class Span:
    """A stage of a task that a worker ran; times in seconds.

    Attributes
    ----------
    rank, epoch, part, interval
        Where and of what.
    kind
        As ``GA``, without the layer.
    begin, end
        On the timeline of the run.
    """

    rank: int
    epoch: int
    part: int
    interval: int
    kind: str
    begin: float
    end: float


def read_spans(path: Path, first_epoch: int) -> list[Span]:
    """Read the training tasks of a timeline, from some epoch on."""
    events = json.loads(path.read_text())["traceEvents"]
    return [
        Span(
            event["pid"], args["epoch"], args["part"], args["interval"], event["cat"],
            1e-6 * event["ts"], 1e-6 * (event["ts"] + event["dur"]),
        )
        for event in events
        if event.get("cat") in ("GA", "AV", "dGA", "dAV") and (args := event["args"])["epoch"] >= first_epoch
    ]  # fmt: skip


def group_seconds(
    spans: Iterable[Span],
    groups: Sequence[Group],
    average: Callable[[Sequence[float]], float] = statistics.fmean,
    *,
    whole: bool = False,
) -> dict[str, float]:
    """Mean time of a task of each group, by its name. The stages of an interval run in their order.

    `whole`: the timeline has one entry a dense task, not one a stage.
    """
    chains: defaultdict[tuple[int, int, int], list[Span]] = defaultdict(list)
    for span in spans:
        chains[span.epoch, span.part, span.interval].append(span)
    sizes = [1 if whole and group.resource == DENSE else len(group.name.split("+")) for group in groups]
    found: dict[str, list[float]] = {group.name: [] for group in groups}
    for chain in chains.values():
        chain.sort(key=lambda span: (span.begin, span.end))
        if len(chain) != sum(sizes):
            raise ValueError(f"an epoch of an interval has {sum(sizes)} stages, the timeline {len(chain)}")
        lengths = iter([span.end - span.begin for span in chain])
        for group, size in zip(groups, sizes, strict=True):
            found[group.name].append(sum(next(lengths) for _ in range(size)))
    return {name: average(lengths) for name, lengths in found.items()}


def profile(spans: Sequence[Span]) -> dict[str, float]:
    """What the threads of gathers did in exact epochs: mean seconds an epoch and rank.

    `head` is from the first start of a task of the epoch to the first gather, `work` gathers, `gaps` the
    time between them, `tail` from the last to the end of the last task, and `turn` from there to the first
    start in the next epoch.
    """
    parts: dict[str, list[float]] = {name: [] for name in ("head", "work", "gaps", "tail", "turn")}
    for rank in sorted({span.rank for span in spans}):
        mine = [span for span in spans if span.rank == rank]
        before: float | None = None
        for epoch in sorted({span.epoch for span in mine}):
            tasks = [span for span in mine if span.epoch == epoch]
            gathers = [span for span in tasks if span.kind in ("GA", "dGA")]
            start, stop = min(span.begin for span in tasks), max(span.end for span in tasks)
            first, last = min(span.begin for span in gathers), max(span.end for span in gathers)
            work = sum(span.end - span.begin for span in gathers)
            parts["head"].append(first - start)
            parts["work"].append(work)
            parts["gaps"].append(last - first - work)
            parts["tail"].append(stop - last)
            if before is not None:
                parts["turn"].append(start - before)
            before = stop
    return {name: statistics.fmean(found) for name, found in parts.items() if found}


@dataclass(frozen=True)
class Run:
    """One training: seconds of its epochs after the warm-up, and the timeline from there on."""

    seconds: list[float]
    spans: list[Span]


def run(
    work: Path,
    mode: str,
    options: argparse.Namespace,
    *,
    intervals: int = INTERVALS,
    width: int = WIDTH,
    **flags: Any,
) -> Run:
    """Train in a mode."""
    name, staleness = MODES[mode]
    epochs = options.warm_up + options.epochs
    fixed = {
        "data": work / "graph", "layers": 2, "hidden": width, "dropout": 0, "intervals": intervals,
        "threads": 1, "epochs": epochs, "eval-every": epochs, "mode": name, "staleness": staleness,
        "trace-events": 1000 + 50 * intervals * epochs,
    }  # fmt: skip
    run_dir = work / "run"
    train(SERVERS, run_dir, fixed | flags)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Run(
        [line["seconds"] for line in lines][options.warm_up :],
        read_spans(run_dir / "trace.json", options.warm_up + 1),
    )


# ---- figures ----


def seconds_of(times: Mapping[str, float]) -> SecondsOf:
    """Times of tasks by the name of their group, equal on all servers."""
    return lambda server, group: times[group.name]


def in_mode(cluster: Cluster, mode: str, epochs: int) -> Cluster:
    """The same cluster in a mode, for so many epochs."""
    name, staleness = MODES[mode]
    return replace(
        cluster, mode=name, staleness=staleness, rounds=[Round("train", epoch + 1) for epoch in range(epochs)]
    )


def steady_bound(cluster: Cluster, mode: str, times: Mapping[str, float]) -> float:
    """What one more epoch adds to the bound of a run."""
    few, many = (run_bound(in_mode(cluster, mode, epochs), seconds_of(times)) for epochs in STEADY)
    return (many - few) / (STEADY[1] - STEADY[0])


def simulated(
    cluster: Cluster, mode: str, times: Mapping[str, float], *, straggler: float = 1.0, seed: int = 0
) -> float:
    """Seconds that one more epoch takes in virtual time."""
    slow, last = Experiment(straggler=straggler), len(cluster.topologies) - 1

    def draw(rng: random.Random, server: int, group: Group) -> float:
        straggles = server == last and rng.random() < slow.straggling
        return times[group.name] * (slow.straggler if straggles else 1.0)

    few, many = (
        simulate(
            in_mode(cluster, mode, epochs), seed=seed, task_seconds=draw, message_seconds=lambda *_: 0.0,
            check_idle=False,
        ).seconds
        for epochs in STEADY
    )  # fmt: skip
    return (many - few) / (STEADY[1] - STEADY[0])


def gain_share(nopipe: float, mode: float, bound: float) -> float:
    """The share of the possible gain over nopipe that a mode has."""
    return (nopipe - mode) / (nopipe - bound)


def epoch_seconds(mode: str, runs: Sequence[Run], *, mean: bool = False) -> float:
    """Seconds of an epoch: the median over runs of the median, or of the mean where epochs overlap."""
    of = statistics.fmean if mean or MODES[mode][0] == "async" else statistics.median
    return statistics.median(of(one.seconds) for one in runs)


def rows_of(
    cluster: Cluster,
    times: Mapping[str, float],
    apart: Mapping[str, float],
    own: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, float],
) -> list[dict[str, Any]]:
    """For each mode: what was measured, bounds, simulation, and share of the possible gain.

    `times` and `apart` are those of all modes, `own` those of the runs of each that overlaps.
    """
    rows: list[dict[str, Any]] = []
    for mode, seconds in measured.items():
        row: dict[str, Any] = {"mode": mode, "seconds": seconds, "target": TARGETS[mode]}
        row["simulated_seconds"] = simulated(cluster, mode, times)
        if mode == "nopipe":
            row["arithmetic_seconds"] = nopipe_seconds(in_mode(cluster, mode, 1), seconds_of(times))
            row["of_arithmetic"] = seconds / row["arithmetic_seconds"]
            row["reached"] = row["of_arithmetic"] <= TARGETS[mode]
        else:
            for name, which in (("", times), ("apart_", apart), ("own_", own[mode])):
                least = (
                    steady_bound(cluster, mode, which)
                    if mode == "async S=1"
                    else epoch_bound(cluster, seconds_of(which)).exact
                )
                row[f"{name}bound_seconds"] = least
                row[f"{name}gain_share"] = gain_share(measured["nopipe"], seconds, least)
            bound = epoch_bound(cluster, seconds_of(times))
            row["path_or_resource_seconds"] = max(bound.busiest_resource, bound.critical_path)
            row["gain_share_of_simulated"] = gain_share(measured["nopipe"], seconds, row["simulated_seconds"])
            row["reached"] = row["own_gain_share"] >= TARGETS[mode]
        rows.append(row)
    return rows


def on_these_cores(cluster: Cluster, times: Mapping[str, float], extra: float) -> dict[str, float]:
    """Task times where a server's thread has `extra` seconds of other work an epoch beside its gathers."""
    groups = cluster.groups["train"]
    gathers = [one.name for one in groups if one.resource == GRAPH]
    intervals = sum(unit.interval >= 0 for unit in cluster.topologies[0].units)
    factor = 1.0 + extra / (intervals * sum(times[name] for name in gathers))
    return {name: value * (factor if name in gathers else 1.0) for name, value in times.items()}


def losses_of(
    cluster: Cluster,
    times: Mapping[str, float],
    straggler: float,
    without: Mapping[str, float],
    slowed: Mapping[str, float],
) -> list[dict[str, Any]]:
    """For each mode: seconds an epoch lost to the straggler, measured and simulated, and beside pipe's."""
    rows: list[dict[str, Any]] = []
    for mode in OVERLAPPING:
        plain = simulated(cluster, mode, times)
        slow = [simulated(cluster, mode, times, straggler=straggler, seed=seed) for seed in range(SEEDS)]
        row: dict[str, Any] = {
            "mode": mode,
            "seconds": without[mode],
            "slowed_seconds": slowed[mode],
            "lost_seconds": slowed[mode] - without[mode],
            "simulated_lost_seconds": statistics.fmean(slow) - plain,
        }
        pipe = rows[0] if rows else row
        row["of_pipe"] = row["lost_seconds"] / pipe["lost_seconds"]
        row["simulated_of_pipe"] = row["simulated_lost_seconds"] / pipe["simulated_lost_seconds"]
        rows.append(row)
    return rows


# ---- the experiment ----


def calibrate(options: argparse.Namespace, work: Path) -> tuple[Cluster, dict[str, float], int]:
    """Find a reach with which gathers take three delays; prepare that graph.

    Returns
    -------
    cluster, times, reach
        Its wiring; time of a task of each group, without delay and without others beside it.

    Raises
    ------
    SystemExit
        None was found.
    """
    wanted, reach = DELAYS * options.delay, options.reach
    brief = argparse.Namespace(warm_up=2, epochs=6)
    for _ in range(ATTEMPTS):
        prepare(options.vertices, reach, work / "graph", width=options.width)
        cluster = cluster_of(work / "graph", width=options.width)
        times = group_seconds(
            run(work, "nopipe", brief, width=options.width).spans, cluster.groups["train"], statistics.median
        )
        graph = INTERVALS * sum(times[one.name] for one in cluster.groups["train"] if one.resource == GRAPH)
        print(
            f"{options.vertices} vertices, reach {reach}: gathers take a server {1e3 * graph:.0f} ms "
            f"an epoch, wanted {1e3 * wanted:.0f} ms",
            flush=True,
        )
        if abs(graph / wanted - 1) <= WITHIN:
            return cluster, times, reach
        reach = min(max(1, round(reach * wanted / graph)), (options.vertices - 1) // 2)
    raise SystemExit(f"gathers were not within {WITHIN:.0%} of {wanted:g} s in {ATTEMPTS} attempts")


def measure(options: argparse.Namespace, work: Path) -> dict[tuple[str, bool], list[Run]]:
    """Runs by mode and whether there was a straggler; all take turns."""
    cases = [(mode, False) for mode in MODES]
    if options.straggler > 1:
        cases += [(mode, True) for mode in OVERLAPPING]
    runs: dict[tuple[str, bool], list[Run]] = {case: [] for case in cases}
    rng = random.Random(options.seed)
    for _ in range(options.rounds):
        for mode, slow in rng.sample(cases, len(cases)):
            flags = {"dense-delay": options.delay} | ({"straggler": options.straggler} if slow else {})
            runs[mode, slow].append(run(work, mode, options, width=options.width, **flags))
    return runs


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines for people, times in milliseconds."""
    lines = [
        f"{'':<10} {'':>9} {'':>10} {'':>14}" + "".join(f"{name:>16}" for name in ("own", "nopipe", "apart")),
        f"{'mode':<10} {'measured':>9} {'simulated':>10} {'path/resource':>14}"
        + 3 * f"{'bound':>8} {'share':>7}"
        + "  target",
    ]
    for row in rows:
        ms = {name: 1e3 * value for name, value in row.items() if name.endswith("seconds")}
        start = f"{row['mode']:<10} {ms['seconds']:9.1f} {ms['simulated_seconds']:10.1f}"
        verdict = "" if row["reached"] else " missed"
        if row["mode"] == "nopipe":
            text = f"{row['of_arithmetic']:.3f} x arithmetic {ms['arithmetic_seconds']:.1f}"
            lines.append(f"{start} {text:<62}  <= {row['target']:.2f}{verdict}")
        else:
            shares = "".join(
                f"{ms[f'{name}bound_seconds']:8.1f} {row[f'{name}gain_share']:7.1%}"
                for name in ("own_", "", "apart_")
            )
            lines.append(
                f"{start} {ms['path_or_resource_seconds']:14.1f}{shares}  >= {row['target']:.0%}{verdict}"
            )
    return lines


def straggler_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines for people, times in milliseconds."""
    lines = [
        f"{'mode':<10} {'without':>8} {'with':>8} {'lost':>7} {'of pipe':>8}   "
        "simulated: lost, of pipe   target"
    ]
    for row in rows:
        target = ""
        if row["mode"] == "async S=1":
            target = f"<= {TARGET_LOST:.2f}" + ("" if row["of_pipe"] <= TARGET_LOST else "  missed")
        lines.append(
            f"{row['mode']:<10} {1e3 * row['seconds']:8.1f} {1e3 * row['slowed_seconds']:8.1f} "
            f"{1e3 * row['lost_seconds']:7.1f} {row['of_pipe']:8.2f}   "
            f"{1e3 * row['simulated_lost_seconds']:15.1f} {row['simulated_of_pipe']:8.2f}   {target}"
        )
    return lines


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw measured, simulated and least seconds of an epoch, by mode."""
    try:
        import matplotlib
    except ImportError:
        print(f"no {path}: matplotlib is not installed")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    bars = {
        "measured": [row["seconds"] for row in rows],
        "simulated": [row["simulated_seconds"] for row in rows],
        "lower bound (nopipe: arithmetic)": [
            row.get("bound_seconds", row.get("arithmetic_seconds")) for row in rows
        ],
    }
    for number, (name, values) in enumerate(bars.items()):
        places = [place + 0.27 * (number - 1) for place in range(len(rows))]
        axis.bar(places, [1e3 * value for value in values], width=0.25, label=name)
    axis.set_xticks(range(len(rows)), [row["mode"] for row in rows])
    axis.set_ylabel("ms an epoch")
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"drawn in {path}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.overlap",
        description="How much of the delay of dense tasks each mode hides, against a lower bound.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--delay", type=float, default=0.05, help="seconds added to each dense task")
    add("--straggler", type=float, default=2.0, help="times as long slow tasks take; 1: no such runs")
    add("--vertices", type=int, default=52_000, help="of the graph")
    add("--reach", type=int, default=1_500, help="at first; it is adjusted")
    add("--width", type=int, default=WIDTH, help="of the hidden layer, and classes")
    add("--epochs", type=int, default=16, help="epochs that count")
    add("--warm-up", type=int, default=4, help="epochs before them")
    add("--rounds", type=int, default=2, help="runs of each kind")
    add("--seed", type=int, default=0, help="of the order of runs")
    add("--json", type=Path, metavar="FILE", help="for the results")
    add("--plot", type=Path, metavar="FILE", help="PNG of the epochs; needs matplotlib")
    options = parser.parse_args(arguments)
    if min(options.epochs, options.warm_up, options.rounds, options.reach) < 1 or options.delay <= 0:
        parser.error("--epochs, --warm-up, --rounds and --reach must be at least 1, --delay above 0")
    if options.vertices < max(2 * options.reach + 1, SERVERS * INTERVALS):
        parser.error(f"--vertices {options.vertices} are too few for --reach {options.reach}")
    if options.straggler < 1:
        parser.error(f"--straggler must be at least 1, got {options.straggler}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment; 0 whatever was found."""
    options = parse(arguments)
    load = [list(os.getloadavg())]
    busy = busy_seconds()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        cluster, alone, reach = calibrate(options, work)
        runs = measure(options, work)
    load.append(list(os.getloadavg()))
    others = busy_of_others(busy)
    groups = cluster.groups["train"]
    beside = group_seconds_of_runs(runs["nopipe", False], groups)
    apart = {
        one.name: beside[one.name] if one.resource == GRAPH else options.delay + alone[one.name]
        for one in groups
    }
    computing = INTERVALS * sum(alone[one.name] for one in groups if one.resource == DENSE)
    shared = min(1.0, max(0.0, 2.0 - cores() / SERVERS))  # of the computing is on the cores of gathers
    times = on_these_cores(cluster, apart, shared * computing)
    own = {mode: group_seconds_of_runs(runs[mode, False], groups) for mode in OVERLAPPING}
    print("task times, ms: " + ", ".join(f"{name} {1e3 * value:.2f}" for name, value in apart.items()))
    print(
        f"dense tasks compute {1e3 * computing:.1f} ms an epoch and server, {shared:.0%} of it on the cores "
        f"of the gathers; with it, ms: "
        + ", ".join(f"{one.name} {1e3 * times[one.name]:.2f}" for one in groups if one.resource == GRAPH)
    )
    gathers = {mode: gather_seconds(runs[mode, False]) for mode in MODES}
    print(
        "gathers beside other tasks, ms: "
        + ", ".join(
            f"{mode} {' '.join(f'{1e3 * value:.2f}' for value in found.values())}"
            for mode, found in gathers.items()
        )
    )
    print(
        f"load average {load[0][0]:.1f} before, {load[1][0]:.1f} after"
        + ("" if others is None else f"; others used {others:.1f} cores")
    )
    measured = {mode: epoch_seconds(mode, runs[mode, False]) for mode in MODES}
    rows = rows_of(cluster, times, apart, own, measured)
    print("milliseconds an epoch\n" + "\n".join(table(rows)))
    profiles = {mode: profile_of_runs(runs[mode, False]) for mode in MODES if MODES[mode][0] != "async"}
    for mode, parts in profiles.items():
        print(
            f"gathers' thread in {mode}, ms an epoch: "
            + ", ".join(f"{name} {1e3 * value:.1f}" for name, value in parts.items())
        )
    losses = []
    if options.straggler > 1:
        means = [
            {mode: epoch_seconds(mode, runs[mode, slow], mean=True) for mode in OVERLAPPING}
            for slow in (False, True)
        ]
        losses = losses_of(cluster, times, options.straggler, *means)
        print(
            f"\na quarter of the last server's tasks {options.straggler:g} times as long\n"
            + "\n".join(straggler_table(losses))
        )
    if options.json:
        results = {
            "options": {name: value for name, value in vars(options).items() if name not in ("json", "plot")},
            "reach": reach,
            "load_average": load,
            "cores_used_by_others": others,
            "task_seconds": times,
            "task_seconds_apart": apart,
            "own_task_seconds": own,
            "task_seconds_without_delay": alone,
            "gather_seconds": gathers,
            "modes": rows,
            "gathers_thread": profiles,
            "straggler": losses,
            "epoch_seconds": {
                f"{mode}{' straggler' if slow else ''}": [one.seconds for one in found]
                for (mode, slow), found in runs.items()
            },
        }
        write_results(options.json, results)
    if options.plot:
        plot(rows, options.plot)
    return 0


def group_seconds_of_runs(runs: Sequence[Run], groups: Sequence[Group]) -> dict[str, float]:
    """Median over runs of the mean time of a task, by name of its group."""
    found = [group_seconds(one.spans, groups) for one in runs]
    return {group.name: statistics.median(times[group.name] for times in found) for group in groups}


def profile_of_runs(runs: Sequence[Run]) -> dict[str, float]:
    """Median over runs of each part."""
    found = [profile(one.spans) for one in runs]
    return {name: statistics.median(parts[name] for parts in found) for name in found[0]}


def gather_seconds(runs: Sequence[Run]) -> dict[str, float]:
    """Median over runs of the mean time of a gather, by kind."""
    return {
        kind: statistics.median(
            statistics.fmean(span.end - span.begin for span in one.spans if span.kind == kind) for one in runs
        )
        for kind in ("GA", "dGA")
    }


if __name__ == "__main__":
    sys.exit(main())
