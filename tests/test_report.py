"""What a run leaves: the numbers of summary.json and metrics.jsonl, each against another way to know it."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path

import graphs
import numpy as np
import pytest
from jobs import run_table, write_ring

from dorylus_hpc.files import atomic_path
from dorylus_hpc.graph.data import TEST, TRAIN, VALIDATION
from dorylus_hpc.graph.preparation import prepare_folder
from dorylus_hpc.graph.store import read_manifest, read_part
from dorylus_hpc.report.cost import load_prices
from dorylus_hpc.report.metrics import Evaluation, History, MetricsFile
from dorylus_hpc.report.progress import Progress
from dorylus_hpc.report.summary import write_json

# The keys are a contract; only more may be added.
KEYS = {
    "graph": "vertices edges features classes parts ghosts edge_cut",
    "config": "",
    "ranks": "graph_servers parameter_servers threads mpi",
    "epochs": "",
    "epoch_seconds": "median min mean",
    "setup_seconds": "",
    "loss": "",
    "best_epoch": "",
    "train_accuracy": "best_validation last",
    "val_accuracy": "best_validation last",
    "test_accuracy": "best_validation last",
    "metric": "name train val test",
    "report": "best_validation last",
    "task_seconds": "GA AV SC AE dGA dAV dSC dAE WU RD LD eval wait",
    "peak_rss_bytes": "",
    "ghost_bytes_per_epoch": "",
    "staleness": "bound max_lead max_read_age",
    "weight_versions": "",
    "overlap": "graph dense messages any graph_and_dense graph_and_messages dense_and_messages all_three"
    " fraction",
    "weights_sha256": "",
    "place": "ae by bytes_per_epoch transfer_seconds server_seconds",
    "lambda": "invocations retries throttles duplicates_refused timeouts cold_starts gb_seconds concurrency",
    "cost": "graph_servers parameter_servers lambda_compute lambda_requests total currency prices_dated",
}
SETS = {"train": TRAIN, "val": VALIDATION, "test": TEST}
CLASSES = 3


def noisy(**options):
    """A graph that can be learned a little: labels show in the features."""
    graph = graphs.directed_random(n=90, m=400, features=7, **options)
    graph.features[:, :CLASSES] += 1.5 * np.eye(CLASSES)[np.maximum(graph.labels, 0)]
    return graph


GRAPHS = {
    "symmetric": lambda: graphs.undirected_random(n=90, m=300, features=7, unlabelled=np.arange(5, 90, 7)),
    "directed": noisy,
    "sparse": lambda: graphs.directed_random(n=90, m=400, sparse=True, features=30),
    "training_only": lambda: graphs.make(30, [], [], train=np.arange(30)),
}
# By name: graph, parts, options. On 3 ranks.
RUNS = {
    "every": ("directed", 3, "--epochs 9"),
    "third": ("directed", 4, "--epochs 8 --eval-every 3 --servers 1 --input-dropout 0.1 --seed 1"),
    "rare": ("symmetric", 3, "--epochs 4 --eval-every 9"),
    "plain": ("directed", 3, "--epochs 7 --eval-every 3 --dropout 0"),
    "one_layer": ("symmetric", 3, "--epochs 6 --eval-every 3 --layers 1"),
    "deep": ("directed", 5, "--epochs 5 --layers 4 --dtype float64"),
    "sparse": ("sparse", 3, "--epochs 5"),
    "training_only": ("training_only", 3, "--epochs 3 --servers 2"),
    "diverse": ("symmetric", 3, "--epochs 5 --optimizer sgd --lr 0.5 --servers 1 --intervals 4 --threads 2"),
    "priced": ("directed", 3, "--epochs 6 --dropout 0.4 --servers 1 --instance-type c5n.2xlarge"),
    "own_prices": ("directed", 3, "--epochs 6 --dropout 0.3 --instance-type our.own --prices prices.toml"),
}
HIDDEN = 5
PRICES = """
dated = "2031-02"
[regions.us-east-1.ec2_hour]
"our.own" = 3600.0
"""
SERVER_HOUR = {"priced": 0.432, "own_prices": 3600.0}  # of one


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All runs and their predictions."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "prices.toml").write_text(PRICES)
    table = {}
    for name, (graph, parts, options) in RUNS.items():
        data = folder / f"{graph}{parts}"
        if not data.exists():
            prepare_folder(GRAPHS[graph](), data, parts=parts, partitioner="hash", report=lambda *words: None)
        words = [*options.split(), "--hidden", HIDDEN]
        words += [] if "--lr" in words else ["--lr", "0.1"]
        table[name] = ("train", ["--data", data, "--run-dir", name, *words])
        for which in ("best", "last"):
            output = f"{name}/{which}.npz"
            asked = ["--run-dir", name, "--data", data, "--weights", which, "-o", output]
            table[f"{which} of {name}"] = ("predict", asked)
    began = time.perf_counter()
    ended = run_table(3, table, folder)
    (folder / "seconds.json").write_text(json.dumps(time.perf_counter() - began))
    for name in table:
        assert name in ended, "the job ended, or hung, here"
        assert [rank.status for rank in ended[name]] == [0, 0, 0], ended[name][0].err
    return folder


@pytest.fixture(params=RUNS)
def run(request, folder):
    """(name, summary, lines of metrics) of each run."""
    path = folder / request.param
    summary = json.loads((path / "summary.json").read_text())
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return request.param, summary, [json.loads(line) for line in lines]


def option(name, flag, default):
    words = RUNS[name][2].split()
    return type(default)(words[words.index(flag) + 1]) if flag in words else default


# ---- the summary


def test_keys_are_those_of_the_contract(run):
    _, summary, _ = run
    for key, inner in KEYS.items():
        assert key in summary
        assert set(inner.split()) <= set(summary[key]) if inner else True
    assert set(summary) == set(KEYS)


def test_lengths_agree(run):
    name, summary, lines = run
    epochs = option(name, "--epochs", 0)
    assert summary["epochs"] == summary["config"]["epochs"] == len(summary["loss"]) == len(lines) == epochs
    assert [line["epoch"] for line in lines] == list(range(1, epochs + 1))
    assert [line["loss"] for line in lines] == summary["loss"]


def test_the_graph_is_that_of_the_manifest(run, folder):
    name, summary, _ = run
    graph, parts, _ = RUNS[name]
    manifest = read_manifest(folder / f"{graph}{parts}")
    for key in ("name", "vertices", "edges", "features", "classes", "ghosts", "edge_cut"):
        assert summary["graph"][key] == getattr(manifest, key)
    assert summary["graph"]["parts"] == parts


def test_ranks(run):
    name, summary, _ = run
    servers, ranks = option(name, "--servers", 0), summary["ranks"]
    assert (ranks["graph_servers"], ranks["parameter_servers"]) == (3 - servers, servers)
    assert ranks["threads"] == summary["config"]["threads"] == option(name, "--threads", ranks["threads"]) > 0
    assert ranks["mpi"]
    assert summary["config"]["intervals"] == option(name, "--intervals", 1)
    assert len(summary["peak_rss_bytes"]) == 3
    assert all(20e6 < peak < 2e9 for peak in summary["peak_rss_bytes"])


def test_times(run):
    _, summary, lines = run
    seconds = summary["epoch_seconds"]
    assert 0 <= seconds["min"] <= seconds["median"] and seconds["min"] <= seconds["mean"]
    assert summary["setup_seconds"] > 0
    own = [line["seconds"] for line in lines]  # rank 0's; those of the summary end with the last rank's
    assert seconds["mean"] >= statistics.fmean(own) * (1 - 1e-12)
    if summary["ranks"]["graph_servers"] == 1:
        assert seconds["median"] == pytest.approx(statistics.median(own))


def test_task_seconds_are_of_what_ran(run):
    name, summary, _ = run
    seconds = summary["task_seconds"]
    used = {"GA", "AV", "dAV", "WU", "eval", "wait"}
    exchanges = name != "one_layer" and summary["graph"]["ghosts"] > 0
    used |= {"SC", "dSC"} if exchanges else set()
    assert all(seconds[kind] > 0 for kind in used)
    assert all(seconds[kind] == 0 for kind in ("AE", "dAE", "RD"))
    if name == "one_layer":
        assert seconds["SC"] == seconds["dSC"] == seconds["dGA"] == 0


def test_what_a_run_does_not_use_is_zero(run):
    _, summary, _ = run
    assert summary["lambda"] == dict.fromkeys(KEYS["lambda"].split(), 0)
    assert summary["cost"]["lambda_compute"] == summary["cost"]["lambda_requests"] == 0.0
    assert set(summary["staleness"].values()) == {0}


# ---- cost


def test_machines_without_a_type_have_no_price(run):
    """A part must not be taken for the whole: then there is no total."""
    name, summary, lines = run
    cost = summary["cost"]
    assert cost["currency"] == "USD"
    assert cost["prices_dated"] == ("2031-02" if name == "own_prices" else load_prices().dated)
    if name in SERVER_HOUR:
        return
    assert cost["graph_servers"] is None and cost["total"] is None
    assert cost["parameter_servers"] == (None if summary["ranks"]["parameter_servers"] else 0.0)
    assert {line["cost"] for line in lines} == {line["total_cost"] for line in lines} == {0.0}


@pytest.mark.parametrize("name", SERVER_HOUR)
def test_machines_are_billed_by_the_second(folder, name):
    summary = json.loads((folder / name / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    cost, ranks, rate = summary["cost"], summary["ranks"], SERVER_HOUR[name] / 3600
    for kind in ("graph_servers", "parameter_servers"):
        if ranks[kind] == 0:
            assert cost[kind] == 0
            continue
        billed = cost[kind] / rate / ranks[kind]  # seconds: of the epochs at least, at most of the job
        assert billed >= sum(line["seconds"] for line in lines) * (1 - 1e-9)
        assert billed < json.loads((folder / "seconds.json").read_text())
    assert cost["total"] == cost["graph_servers"] + cost["parameter_servers"] > 0
    assert cost["parameter_servers"] == pytest.approx(
        cost["graph_servers"] * ranks["parameter_servers"] / ranks["graph_servers"], rel=1e-9
    )
    assert [line["total_cost"] for line in lines] == pytest.approx(
        list(itertools.accumulate(line["cost"] for line in lines)), rel=1e-9
    )
    totals = [line["total_cost"] for line in lines]
    spent = itertools.accumulate(line["seconds"] for line in lines)
    assert all(total >= 3 * rate * seconds * (1 - 1e-9) for total, seconds in zip(totals, spent, strict=True))
    assert all(line["cost"] > 0 for line in lines) and totals[-1] <= cost["total"] * (1 + 1e-9)


def test_prices_that_are_wrong_end_a_run_before_it_begins(tmp_path):
    write_ring(tmp_path / "ring.npz", n=60, features=5)
    (tmp_path / "prices.toml").write_text(PRICES)
    (tmp_path / "old.toml").write_text(PRICES.replace("dated", "date"))
    common = ["--data", "ring.npz", "--epochs", 2, "--instance-type"]
    cases = {
        "unknown": ("train", [*common, "c5n.2xlage"]),
        "only with the file": ("train", [*common, "our.own"]),
        "region": ("train", [*common, "c5.large", "--region", "eu-west-1"]),
        "no file": ("train", [*common, "c5.large", "--prices", "none.toml"]),
        "key": ("train", [*common, "c5.large", "--prices", "old.toml"]),
    }
    said = {
        "unknown": "--instance-type c5n.2xlage: no price in us-east-1 (near: c5n.2xlarge,",
        "only with the file": "--instance-type our.own: no price in us-east-1 (",
        "region": "--region eu-west-1: no prices for it in the packaged prices (",
        "no file": "prices none.toml: cannot be read: ",
        "key": "prices old.toml: unknown key 'date': did you mean 'dated'?",
    }
    ended = run_table(2, cases, tmp_path)
    for name, ranks in ended.items():
        assert [rank.status for rank in ranks] == [2, 2], name
        assert ranks[0].err.count("\n") == 1 and ranks[1].err == ""
        assert ranks[0].err.startswith(f"python -m dorylus_hpc.train: error: {said[name]}")


def rows_between_ranks(folder, name, direction):
    """Count, from the part files alone, the rows that go to another rank in one exchange."""
    graph, parts, _ = RUNS[name]
    manifest = read_manifest(folder / f"{graph}{parts}")
    servers = 3 - option(name, "--servers", 0)
    host = [max(s for s in range(servers) if s * parts // servers <= part) for part in range(parts)]
    sent = set()
    for index in range(parts):
        part = read_part(folder / f"{graph}{parts}", manifest, index)
        edges = part.in_edges if direction == "in" else part.out_edges
        owners = zip(edges.ghost_gid.tolist(), edges.ghost_part.tolist(), strict=True)
        sent |= {(host[index], gid) for gid, owner in owners if host[owner] != host[index]}
    return len(sent)


def test_ghost_bytes_by_hand(run, folder):
    """Two exchanges a layer above the first, of the narrower of its two widths; below, only what must be."""
    name, summary, _ = run
    graph, _, _ = RUNS[name]
    layers, size = option(name, "--layers", 2), 8 if "float64" in RUNS[name][2] else 4
    widths = [summary["graph"]["features"], *[HIDDEN] * (layers - 1), CLASSES]
    forward, backward = (rows_between_ranks(folder, name, direction) for direction in ("in", "out"))
    columns = sum(min(pair) for pair in itertools.pairwise(widths[1:]))
    expected = (forward + backward) * columns * size
    if graph == "sparse":
        expected += backward * widths[1] * size  # X W of ghosts is local, its gradient comes from outside
    assert summary["ghost_bytes_per_epoch"] == expected
    if name == "every":
        manifest = read_manifest(folder / "directed3")
        assert expected == (manifest.ghosts + sum(entry.out_ghosts for entry in manifest.parts)) * 3 * 4


# ---- evaluations


def evaluations(name, summary, lines):
    """Return (updates behind the weights, accuracies by set) of every evaluation of a run."""
    told = [(line["epoch"] - 1, {key: line[f"{key}_accuracy"] for key in SETS}) for line in lines]
    last = {key: summary[f"{key}_accuracy"]["last"] for key in SETS}
    return [(updates, seen) for updates, seen in told if seen["train"] is not None] + [(len(lines), last)]


def test_epochs_that_are_evaluated(run):
    name, summary, lines = run
    every = option(name, "--eval-every", 1)
    if name in ("plain", "one_layer"):
        every = 1  # no dropout anywhere: the training forward is an evaluation
    evaluated = [line["epoch"] for line in lines if line["train_accuracy"] is not None]
    assert evaluated == list(range(1, len(lines) + 1, every))


def test_the_best_is_the_best(run):
    name, summary, lines = run
    seen = evaluations(name, summary, lines)
    best = max(seen, key=lambda pair: (pair[1]["val"] or 0, -pair[0]))
    if name == "training_only":
        best = seen[-1]
    assert summary["best_epoch"] == best[0]
    assert {key: summary[f"{key}_accuracy"]["best_validation"] for key in SETS} == best[1]


@pytest.mark.parametrize("which", ["best", "last"])
def test_accuracies_are_those_of_the_predictions(run, folder, which):
    name, summary, _ = run
    graph = GRAPHS[RUNS[name][0]]()
    with np.load(folder / name / f"{which}.npz") as file:
        assert (file["ids"] == graph.ids).all()
        right = file["classes"] == graph.labels
    for key, value in SETS.items():
        members = (graph.split == value) & (graph.labels >= 0)
        accuracy = right[members].mean() if members.any() else None
        kind = "best_validation" if which == "best" else "last"
        assert summary[f"{key}_accuracy"][kind] == summary["metric"][key][kind] == accuracy
        assert summary["report"][kind].get(key, {}).get("accuracy") == accuracy


def test_the_runs_show_something(folder):
    """Or the tests above would compare trifles."""
    summaries = {name: json.loads((folder / name / "summary.json").read_text()) for name in RUNS}
    assert 0 < summaries["every"]["best_epoch"] < 9
    assert summaries["rare"]["best_epoch"] in (0, 4)
    assert summaries["every"]["loss"][-1] < summaries["every"]["loss"][0]
    assert summaries["training_only"]["val_accuracy"] == {"best_validation": None, "last": None}
    assert summaries["training_only"]["best_epoch"] == 3
    assert len({summary["weights_sha256"] for summary in summaries.values()}) == len(RUNS)


# ---- the pieces


def history(*values):
    made = History()
    for epoch, value in enumerate(values):
        seen = Evaluation(epoch, val=value)
        made.is_best(seen)
        made.evaluations.append(seen)
    return made


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([0.5], 0),
        ([0.1, 0.3, 0.2], 1),
        ([0.3, 0.3, 0.1], 0),  # the first of equals
        ([None, None, None], 2),  # without a validation set, the latest
        ([0.0, 0.0], 0),
    ],
)
def test_best(values, best):
    made = history(*values)
    assert (made.best.epoch, made.last.epoch) == (best, len(values) - 1)
    kept = None
    growing = History()
    for seen in made.evaluations:  # what is kept on the way is what is best at the end
        kept = seen.epoch if growing.is_best(seen) else kept
        growing.evaluations.append(seen)
    assert kept == best


def test_lines_are_whole_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("old\n")
    with MetricsFile(path) as metrics:
        for epoch in (1, 2):
            metrics.write(epoch=epoch, loss=0.5, val_accuracy=None)
            lines = path.read_text().splitlines(keepends=True)
            assert len(lines) == epoch and lines[-1].endswith("}\n")
    assert json.loads(lines[0]) == {"epoch": 1, "loss": 0.5, "val_accuracy": None}


def test_json_is_whole_or_not_there(tmp_path):
    path = tmp_path / "summary.json"
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert list(tmp_path.iterdir()) == []
    write_json(path, {"a": [1, None, "é"]})
    assert json.loads(path.read_text()) == {"a": [1, None, "é"]}


def test_progress_without_a_terminal_is_plain_lines(capfd):
    with Progress(3, shown=True) as progress:
        for epoch in (1, 2, 3):
            progress.epoch(epoch, loss=1 / epoch, val=0.5 if epoch == 3 else None)
    assert capfd.readouterr() == ("epoch 3/3  loss 0.3333  val 0.5000\n", "")
    with Progress(1, shown=False) as progress:
        progress.epoch(1, loss=1.0)
    assert capfd.readouterr() == ("", "")


def test_progress_on_a_terminal_is_a_bar(monkeypatch, capfd):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress(2, shown=True) as progress:
        progress.epoch(1, loss=0.25)
        progress.epoch(2, loss=0.125)
    out, err = capfd.readouterr()
    assert out == "" and "2/2" in err and "loss=0.1250" in err


def test_a_full_disk_is_told_with_the_file():
    """Once: closing the file must not fail at what could not be written."""
    with MetricsFile(Path("/dev/full")) as metrics, pytest.raises(OSError, match="No space .*: '/dev/full'"):
        metrics.write(epoch=1)


def test_a_full_disk_is_told_with_the_file_that_was_to_appear(tmp_path):
    def fill():
        with atomic_path(tmp_path / "summary.json") as temporary:
            temporary.touch()
            with open("/dev/full", "wb", buffering=0) as file:
                file.write(b"a")

    with pytest.raises(OSError, match=r"No space left on device: '.*summary\.json'"):
        fill()
    assert not list(tmp_path.iterdir())
