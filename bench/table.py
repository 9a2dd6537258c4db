"""The results of bench.kernels for the eye: a table, a verdict and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cases import MAIN
from bench.peers import SINGLE

COLUMNS = (
    ("graph", 17), ("kernel", 21), ("width", 5), ("candidate", 12), ("thr", 3), ("median ms", 9),
    ("min ms", 9), ("rate", 15), ("GB/s", 7), ("of limit", 8), ("scaling", 7), ("x peer", 0),
)  # fmt: skip
PLOTTED = "gather_sum"
LEFT = {"graph", "kernel", "candidate", "x peer"}


def aligned(cells: Sequence[str]) -> str:
    """One line of the table."""
    line = (
        f"{cell:<{width}}" if name in LEFT else f"{cell:>{width}}"
        for (name, width), cell in zip(COLUMNS, cells, strict=True)
    )
    return "  ".join(line).rstrip()


HEAD = aligned([name for name, _ in COLUMNS])


def line_of(row: dict[str, Any]) -> str:
    """The line of one result."""
    seconds, share = row["seconds"], row["share_of_limit"]
    rate = f"{row['ns_per_value']:.3f} ns/value" if row["gflops"] is None else f"{row['gflops']:.1f} GFLOP/s"
    peer = f"{row['times_fastest_peer']:.2f} {row['fastest_peer']}" if "fastest_peer" in row else ""
    layout = f"  [{row['layout']}]" if "layout" in row else ""
    return aligned(
        [
            row["graph"],
            row["kernel"],
            str(row["width"]),
            row["candidate"],
            str(row["threads"]),
            f"{seconds['median'] * 1e3:.2f}",
            f"{seconds['min'] * 1e3:.2f}",
            rate,
            f"{row['gb_per_second']:.1f}",
            "" if share is None else f"{100 * share:.0f} %",
            f"{row['scaling']:.2f}" if row["threads"] > 1 else "",
            peer + layout,
        ]
    )


def verdict(results: Sequence[dict[str, Any]]) -> list[str]:
    """Lines that say how what a user gets compares with the fastest peer, at the most threads."""
    most = max((row["threads"] for row in results), default=0)
    compared = [
        row
        for row in results
        if row["candidate"] == MAIN and row["threads"] == most and "fastest_peer" in row
    ]
    if not compared:
        return []
    slower = [row for row in compared if row["times_fastest_peer"] < 1]
    ratios = [row["times_fastest_peer"] for row in compared]
    by_least = statistics.geometric_mean(row["times_fastest_peer_by_min"] for row in compared)
    lines = [
        f"{MAIN} with {most} threads against the fastest peer with its own number of them "
        f"({' and '.join(SINGLE)}: 1, others: {most}), {len(compared)} cases: "
        f"geometric mean {statistics.geometric_mean(ratios):.2f} ({by_least:.2f} by least times), "
        f"least {min(ratios):.2f}, greatest {max(ratios):.2f}; slower in {len(slower)}"
    ]
    return lines + [
        f"  slower: {row['graph']} {row['kernel']} {row['width']}: "
        f"{row['times_fastest_peer']:.2f} of {row['fastest_peer']}"
        for row in slower
    ]


def unplottable(path: Path) -> str | None:
    """Say why no picture can be drawn into such a file; None if one can."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        return f"--plot needs matplotlib (pip install -e '.[bench]', or pip install matplotlib): {error}"
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        return f"cannot draw {path}: known endings are {', '.join(sorted(known))}"
    return None


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the rate of the plain sum over the width, for each graph, at the most threads."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = [row for row in results if row["kernel"] == PLOTTED]
    most = max(row["threads"] for row in shown)
    shown = [row for row in shown if row["threads"] == most or row["candidate"] in SINGLE]
    names = list(dict.fromkeys(row["graph"] for row in shown))
    candidates = {row["candidate"]: row["peer"] for row in shown}
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(2 + 4 * len(names), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], names, strict=True):
        for number, (candidate, peer) in enumerate(candidates.items()):
            rows = [row for row in shown if (row["graph"], row["candidate"]) == (name, candidate)]
            axis.plot(
                [row["width"] for row in rows],
                [row["gflops"] for row in rows],
                label=candidate,
                color=pyplot.get_cmap("tab20")(number),
                marker="x" if peer else "o",
                linestyle="--" if peer else "-",
                linewidth=3 if candidate == MAIN else 1.2,
            )
        widths = sorted({row["width"] for row in shown})
        axis.set(title=name, xlabel="columns", xscale="log", ylim=(0, None))
        axis.set_xticks(widths, [str(width) for width in widths])
        axis.minorticks_off()
    axes[0][0].set_ylabel(f"GFLOP/s, {most} threads")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"drawn in {path}")
