"""Epochs that the modes need for the same validation accuracy, and the accuracy that they end at.

    python -m bench.staleness --data-dir DIR [--graphs cora ...] [--ranks 2] [--seeds 5] [--plot FILE.png]

Trains every graph in every mode from the same seeds. The curve of a run is its validation accuracy, each
epoch replaced by the median of the last five (of fewer at the start). The target, for each graph and seed,
is a share of the best value that the curve of `pipe`, the exact mode, reaches in so many epochs; it is
reported for several shares, since the last percent is won on a plateau, where noise decides when. Epochs to
the target are the first epoch at which the curve of a mode is at the target or above.

- ``epochs``: mean and deviation over the seeds that reached the target
- ``to pipe``: the ratio of that mean to the mean of `pipe`, over the same seeds
- ``never``: seeds that did not reach the target; then the two figures before are too good
- ``test``: accuracy of the weights with the best validation accuracy, over all seeds

Deviations are those of the seeds themselves: divided by their number. Asynchronous runs depend on timing,
and so on the machine and on what else it does; on the number of intervals too (``-- --intervals 8`` sets it
for all modes).

The paper (J. Thorpe et al., Dorylus, OSDI 2021) observed, against its pipe, 0 to 14 % more epochs with
S = 0 and 7 to 58 % more with S = 1, at the same final accuracy. What is measured here is printed as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.accuracy import CASES, PUBLISHED
from bench.launch import train
from bench.machine import RESULTS, write_results

EXACT = "pipe"
MODES: dict[str, dict[str, Any]] = {
    EXACT: {"mode": "pipe"},
    "async S=0": {"mode": "async", "staleness": 0},
    "async S=1": {"mode": "async", "staleness": 1},
}
OPTIONS: dict[str, dict[str, Any]] = {name: case.options for name, case in CASES.items()} | {
    "amazon_photo": PUBLISHED | {"hidden": 64, "input-dropout": 0, "feature-norm": "none"},
}
WINDOW = 5  # epochs
QUICK = {"graphs": ["cora"], "seeds": 2, "epochs": 60}


@dataclass(frozen=True)
class Run:
    """What is kept of one training; the three lists have a value for each epoch with an evaluation."""

    graph: str
    mode: str
    seed: int
    epochs: list[int]
    val_accuracy: list[float]
    loss: list[float]
    best_epoch: int
    test_accuracy: float
    staleness: dict[str, int]
    config: dict[str, Any]


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.staleness",
        description="Epochs that the modes need for the same validation accuracy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of cora.npz, amazon_photo.npz, ...",
    )
    graphs = ["cora", "amazon_photo", "debian12_packages"]
    add("--graphs", nargs="+", choices=OPTIONS, default=graphs, help="which")
    add("--ranks", type=int, default=2, help="graph servers")
    add("--seeds", type=int, default=5, help="how many seeds: 0, 1, ...")
    add("--epochs", type=int, default=300, help="epochs of every run")
    add("--shares", type=float, nargs="+", default=[0.95, 0.99], help=f"targets, of the best of {EXACT}")
    add("--json", type=Path, default=RESULTS / "staleness.json", metavar="FILE", help="for the results")
    add("--plot", type=Path, metavar="FILE", help="PNG of the curves; needs matplotlib")
    add("--quick", action="store_true", help="cora only, 2 seeds, 60 epochs")
    add("train", nargs="*", metavar="-- ARGUMENTS", help="more arguments for train")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; --quick replaces the defaults of what was not given."""
    accepting = parser()
    options = accepting.parse_args(argv)
    if options.quick:
        accepting.set_defaults(**QUICK)
        options = accepting.parse_args(argv)
    options.graphs = list(dict.fromkeys(options.graphs))
    if min(options.ranks, options.seeds, options.epochs) < 1:
        accepting.error("--ranks, --seeds and --epochs must be at least 1")
    if not all(0 < share <= 1 for share in options.shares):
        accepting.error(f"--shares must be above 0 and at most 1, got {options.shares}")
    for name in options.graphs:
        if not (path := options.data_dir / f"{name}.npz").is_file():
            accepting.error(f"--graphs {name}: {path} is not there")
    if options.plot and find_spec("matplotlib") is None:
        accepting.error(f"--plot {options.plot}: matplotlib is not installed: pip install matplotlib")
    return options


# ---- runs ----


def measure(name: str, options: argparse.Namespace, work: Path) -> list[Run]:
    """Train one graph in every mode from every seed."""
    common = OPTIONS[name] | {
        "data": (options.data_dir / f"{name}.npz").resolve(),
        "epochs": options.epochs,
        "eval-every": 1,
    }
    runs = []
    for seed in range(options.seeds):
        for number, (mode, flags) in enumerate(MODES.items()):
            run_dir = work / f"{name}-{seed}-{number}"
            summary = train(options.ranks, run_dir, common | {"seed": seed} | flags, options.train)
            runs.append(run_of(name, mode, seed, summary, run_dir / "metrics.jsonl"))
    return runs


def run_of(graph: str, mode: str, seed: int, summary: dict[str, Any], metrics: Path) -> Run:
    """Read what a run has left."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    evaluated = sorted(
        (line for line in lines if line["val_accuracy"] is not None), key=lambda line: line["epoch"]
    )
    return Run(
        graph,
        mode,
        seed,
        epochs=[line["epoch"] for line in evaluated],
        val_accuracy=[line["val_accuracy"] for line in evaluated],
        loss=[line["loss"] for line in evaluated],
        best_epoch=summary["best_epoch"],
        test_accuracy=summary["test_accuracy"]["best_validation"],
        staleness=summary["staleness"],
        config=summary["config"],
    )


# ---- from curves to a table ----


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the median of each value and those before it, `WINDOW` in all, fewer at the start."""
    return [statistics.median(values[max(0, stop - WINDOW) : stop]) for stop in range(1, len(values) + 1)]


def epochs_to(target: float, epochs: Sequence[int], values: Sequence[float]) -> int | None:
    """Return the first epoch at which the smoothed curve is at the target or above; None if never."""
    curve = zip(epochs, smoothed(values), strict=True)
    return next((epoch for epoch, value in curve if value >= target), None)


def rows_of(runs: Sequence[Run], share: float) -> list[dict[str, Any]]:
    """Return a row for each mode of one graph, all with the same seeds, for one share of the best of pipe."""
    targets = {run.seed: share * max(smoothed(run.val_accuracy)) for run in runs if run.mode == EXACT}
    found: dict[str, dict[int, int | None]] = {}
    for run in runs:
        reached = epochs_to(targets[run.seed], run.epochs, run.val_accuracy)
        found.setdefault(run.mode, {})[run.seed] = reached
    rows = []
    for mode, by_seed in found.items():
        pairs = [(n, found[EXACT][seed]) for seed, n in by_seed.items() if n is not None]
        own, exact = [n for n, _ in pairs], [n for _, n in pairs if n is not None]
        mine = [run for run in runs if run.mode == mode]
        test = [run.test_accuracy for run in mine]
        rows.append(
            {
                "graph": mine[0].graph,
                "intervals": mine[0].config["intervals"],
                "share": share,
                "target": statistics.fmean(targets.values()),
                "mode": mode,
                "epochs_to_target": list(by_seed.values()),
                "mean": statistics.fmean(own) if own else None,
                "deviation": statistics.pstdev(own) if own else None,
                "ratio": statistics.fmean(own) / statistics.fmean(exact) if own else None,
                "never": len(by_seed) - len(own),
                "test_accuracy": {
                    "mean": statistics.fmean(test),
                    "deviation": statistics.pstdev(test),
                },
            }
        )
    return rows


HEAD = (
    f"{'graph':18} {'intervals':>9} {'share':>6} {'target':>8}  {'mode':10} {'epochs':>15} {'to pipe':>9} "
    f"{'never':>6} {'test accuracy':>17}"
)


def line_of(row: dict[str, Any]) -> str:
    """The line of a row."""
    epochs, ratio = "-", "-"
    if row["mean"] is not None:
        epochs = f"{row['mean']:.1f} +- {row['deviation']:.1f}"
        ratio = "" if row["mode"] == EXACT else f"{100 * (row['ratio'] - 1):+.1f} %"
    test = "{mean:.2f} +- {deviation:.2f} %".format(
        **{name: 100 * value for name, value in row["test_accuracy"].items()}
    )
    never = f"{row['never']}/{len(row['epochs_to_target'])}"
    share, target = f"{100 * row['share']:.4g} %", f"{100 * row['target']:.2f} %"
    return (
        f"{row['graph']:18} {row['intervals']:>9} {share:>6} {target:>8}  "
        f"{row['mode']:10} {epochs:>15} {ratio:>9} {never:>6} {test:>17}"
    )


def late(rows: Sequence[dict[str, Any]], epochs: int) -> list[str]:
    """Lines about targets that come so late that a slower mode has no time left to reach them."""
    return [
        f"{row['graph']}, {100 * row['share']:.4g} %: {EXACT} itself needs {row['mean']:.0f} of {epochs} "
        f"epochs; more than {100 * (epochs / row['mean'] - 1):.0f} % above that cannot be seen"
        for row in rows
        if row["mode"] == EXACT and row["mean"] > epochs / 2
    ]


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draw the mean validation accuracy over the epochs, with a band of one deviation over the seeds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(run.graph for run in runs))
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(1 + 5 * len(names), 4), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], names, strict=True):
        for mode in MODES:
            mine = [run for run in runs if (run.graph, run.mode) == (name, mode)]
            by_epoch = list(zip(*(run.val_accuracy for run in mine), strict=True))
            mean = [100 * statistics.fmean(values) for values in by_epoch]
            spread = [100 * statistics.pstdev(values) for values in by_epoch]
            (line,) = axis.plot(mine[0].epochs, mean, label=mode, linewidth=1.2)
            axis.fill_between(
                mine[0].epochs,
                [middle - half for middle, half in zip(mean, spread, strict=True)],
                [middle + half for middle, half in zip(mean, spread, strict=True)],
                color=line.get_color(),
                alpha=0.2,
                linewidth=0,
            )
        axis.set(title=name, xlabel="epoch")
    axes[0][0].set_ylabel("validation accuracy, %")
    axes[0][0].legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
    print(f"drawn in {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse(argv)
    runs: list[Run] = []
    rows: list[dict[str, Any]] = []
    print(HEAD)
    with tempfile.TemporaryDirectory() as work:
        for name in options.graphs:
            found = measure(name, options, Path(work))
            runs += found
            for share in options.shares:
                rows += (new := rows_of(found, share))
                print("\n".join(map(line_of, new)), flush=True)
    for line in late(rows, options.epochs):
        print(line)
    results = {
        "ranks": options.ranks,
        "seeds": options.seeds,
        "epochs": options.epochs,
        "median_window": WINDOW,
        "modes": MODES,
        "rows": rows,
        "runs": [asdict(run) for run in runs],
    }
    write_results(options.json, results)
    if options.plot:
        plot(runs, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
