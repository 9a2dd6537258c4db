"""Who trains in `bench.epoch`, what, and how: one run of this project, or of a library."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bench.launch import Layout, epochs_of, train
from bench.machine import busy_of_others, busy_seconds
from dorylus_hpc.config import TrainConfig

PEER = Path(__file__).with_name("peer_epoch.py")
OURS = "ours"
ANEW, ONCE = "A X anew", "A X once"
DROPPED = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "PYTHONPATH", "VIRTUAL_ENV")

MODELS: dict[str, dict[str, Any]] = {
    "gcn-16": {"model": "gcn", "hidden": 16},
    "gcn-128": {"model": "gcn", "hidden": 128},
    "sage-128": {"model": "sage", "aggregator": "mean", "hidden": 128},
    "gat-4x16": {"model": "gat", "hidden": 16, "heads": 4, "output-heads": 1},
}
DROPOUTS = {"hidden": (0.5, 0.0), "input": (0.5, 0.5)}


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
