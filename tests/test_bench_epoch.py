"""The benchmark of whole epochs: its graphs, what it runs and compares, and that it refuses wrong losses."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import epoch, epoch_systems, graphs, peer_epoch, tasks
from bench.epoch import WrongLoss
from bench.epoch_systems import ANEW, ONCE, OURS, Case, How, Run, System
from bench.launch import Layout

ONE, TWO = System(OURS, Layout(1, 2)), System(OURS, Layout(2, 1))
DGL = System("dgl", Layout(1, 2), python="python")
CASE = Case("58k", "gcn-16", "hidden", Path("work"), 0.01)


def made(system, seconds, *, loss=(1.0, 0.5), peak=(100,), accuracies=None, setup=1.0):
    seconds = list(seconds)
    return Run(system.name, list(loss), seconds, accuracies or [None] * len(seconds), list(peak), setup)


# ---- graphs ----


def test_symmetric():
    found = tasks.symmetric(4, np.array([0, 1, 1, 2, 0, 3]), np.array([1, 0, 0, 2, 3, 0])).toarray()
    assert np.array_equal(found, [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize("name", tasks.PRESETS)
def test_generated(name):
    graph, preset = tasks.generate(name, 0.001), tasks.PRESETS[name]
    matrix = graph.edges.matrix(graph.n).toarray()
    assert np.array_equal(matrix, matrix.T) and matrix.max() == 1 and not np.diag(matrix).any()
    assert graph.n == max(round(preset.vertices * 0.001), preset.classes) and graph.weights is None
    assert graph.features.shape == (graph.n, preset.features) and graph.features.dtype == np.float32
    assert graph.n_classes == preset.classes
    again = tasks.generate(name, 0.001)
    assert np.array_equal(graph.features, again.features) and np.array_equal(graph.indices, again.indices)


def test_neighbours_tell_the_class_in_communities_only():
    def alike(name):
        graph = tasks.generate(name, 0.05)
        rows = np.repeat(np.arange(graph.n), np.diff(graph.indptr))
        return np.mean(graph.labels[rows] == graph.labels[graph.indices])

    assert alike("communities") == pytest.approx(0.8, abs=0.05)
    assert alike("uniform") == pytest.approx(1 / 40, abs=0.01)


def test_communities_are_those_that_are_told():
    rows, columns, home = graphs.planted_pairs(2000, 5000, 0.0, np.random.default_rng(0))
    assert np.array_equal(home[rows], home[columns])
    assert np.bincount(home).tolist() == [500] * 4


def test_features_are_a_centre_and_noise():
    labels = np.repeat(np.arange(3), 20_000)
    x = tasks.noisy(labels, 3, 5, np.random.default_rng(0))
    means = np.array([x[labels == label].mean(0) for label in range(3)])
    assert np.abs(means).max() > 0.1 and np.std(x - means[labels]) == pytest.approx(1, abs=0.01)


def test_arrays_of_a_file(tmp_path):
    np.savez(tmp_path / "mine.npz", indptr=[0, 2, 3, 3], indices=[1, 0, 1], x=np.eye(3), y=[0, 1, -1],
             train_idx=[0], val_idx=[1])  # fmt: skip
    graph = tasks.from_file(tmp_path / "mine.npz")
    tasks.write_arrays(graph, tmp_path / "arrays.npz")
    with np.load(tmp_path / "arrays.npz") as found:
        assert found["indptr"].tolist() == [0, 1, 2, 2] and found["indices"].tolist() == [1, 0]
        assert found["y"].tolist() == [0, 1, -1] and found["x"].dtype == np.float32
        assert (found["train"].tolist(), found["validation"].tolist()) == ([0], [1])


# ---- layouts and systems ----


def test_layout():
    assert Layout.parse("12x3") == Layout(12, 3) and str(Layout(12, 3)) == "12x3"
    for wrong in ("2", "0x1", "1x0", "2x1x1", "ax1", "-1x2"):
        with pytest.raises(argparse.ArgumentTypeError, match="RANKSxTHREADS"):
            Layout.parse(wrong)


def test_systems(monkeypatch):
    monkeypatch.setattr(epoch_systems, "offers", lambda option, value=None: True)
    layouts = [Layout(1, 2), Layout(2, 1)]
    systems, missing = epoch.systems_of(CASE, layouts, [DGL], False)
    names = ["ours 1x2", "ours 2x1", f"ours 1x2, {ANEW}", "dgl", f"dgl, {ONCE}"]
    assert [one.name for one in systems] == names and missing == []
    assert {one.layout for one in systems if one.library == "dgl"} == {Layout(1, 2)}
    for case in (replace(CASE, dropouts="input"), replace(CASE, model="gat-4x16")):
        assert [one.name for one in epoch.systems_of(case, layouts, [DGL], False)[0]] == [
            "ours 1x2", "ours 2x1", "dgl"
        ]  # fmt: skip
    assert len(epoch.systems_of(CASE, layouts, [DGL], True)[0]) == 3
    monkeypatch.setattr(epoch_systems, "offers", lambda option, value=None: False)
    systems, (told,) = epoch.systems_of(CASE, layouts, [], False)
    assert systems == [ONE, TWO] and "not available" in told
    assert replace(DGL, number=2, usual=False).name == f"dgl (2), {ONCE}"


def test_offers():
    assert epoch.offers("model", "gcn") and epoch.offers("eval-every") and epoch.offers("data", "anything")
    assert not epoch.offers("no-such-thing") and not epoch.offers("model", "no-such-model")


# ---- figures ----


def test_rows():
    runs = [
        made(ONE, [9, 1, 2, 3], peak=[10, 20]), made(DGL, [9, 4, 6, 5], peak=[70]),
        made(ONE, [9, 4, 4, 4], peak=[10, 30]), made(DGL, [9, 8, 2, 9], peak=[90]),
    ]  # fmt: skip
    ours, dgl = epoch.rows_of(CASE, [ONE, TWO, DGL], runs, 1)
    assert ours["epoch_seconds"] == {"median": 3, "min": 1, "of_runs": [2, 4]}
    assert dgl["epoch_seconds"] == {"median": 6.5, "min": 2, "of_runs": [5, 8]}
    assert (ours["times"], dgl["times"]) == (1, 6.5 / 3)
    assert dgl["times_range"] == [2, 2.5] and ours["times_range"] == [1, 1]
    assert ours["peak_rss_bytes"] == {"largest": 25, "all": 35}
    assert (dgl["system"], dgl["graph"], dgl["model"], dgl["runs"]) == ("dgl", "58k", "gcn-16", 2)
    line = epoch.line_of(dgl).split()
    assert line[:5] == ["dgl", "6.5000", "2.0000", "2.17", "(2.00-2.50)"]
    assert "busy" not in epoch.line_of(dgl) and "busy" in epoch.line_of(dgl | {"busy_others": 0.5})


def test_arrival():
    run = made(ONE, [1, 2, 4], accuracies=[None, 0.5, 0.75])
    assert run.arrival(0.5) == (2, 3) and run.arrival(0.6) == (3, 7) and run.arrival(0.9) is None
    runs = [run, made(ONE, [1, 1, 1], accuracies=[0.1, 0.2, 0.3]), made(ONE, [8], accuracies=[0.9])]
    found = epoch.arrivals_of([ONE, TWO], runs, 0.6)
    assert found == {"ours 1x2": {"never": 1, "epochs": 2, "seconds": 7.5}}
    line = epoch.line_of_arrival("ours 1x2", found["ours 1x2"], 0.6)
    assert "60 % after 2 epochs, 7.500 s (1 runs never)" in line
    never = epoch.arrivals_of([ONE], runs[1:2], 0.6)["ours 1x2"]
    assert never == {"never": 1, "epochs": None, "seconds": None}
    assert "never at 60 %" in epoch.line_of_arrival("x", never, 0.6)


def test_differ():
    assert epoch.differ([2.0, 4.0], [2.0, 4.0]) == 0
    assert epoch.differ([2.0, 4.0], [2.1, 4.0]) == pytest.approx(0.05)
    assert epoch.differ([2.0], [2.0, 4.0]) == epoch.differ([2.0], [float("nan")]) == float("inf")


# ---- the check ----


@pytest.fixture
def runs(monkeypatch):
    """Replace runs; `losses` says what each system gives, or its failure."""
    losses: dict = {}
    calls: list = []
    known = argparse.Namespace(losses=losses, calls=calls, cases=[], fast="passive")

    def run(case, system, how, folder, seed=0):
        calls.append((system.name, how, seed))
        known.cases.append(case)
        slow = 10 if system.library != OURS and system.wait != known.fast else 1
        found = losses.get(system.name, [1.0, 0.5])
        if isinstance(found, str):
            raise epoch.Failure(found)
        seconds = [3.0 * slow, *[2.0 * slow] * (how.epochs - 1)]
        return made(system, seconds, loss=found, accuracies=[0.5, *[0.9] * (how.epochs - 1)])

    monkeypatch.setattr(epoch, "run", run)
    monkeypatch.setattr(epoch, "start_weights", lambda case: None)
    monkeypatch.setattr(
        epoch, "prepare", lambda *_: dict.fromkeys(("vertices", "arcs", "features", "classes"), 1)
    )
    monkeypatch.setattr(epoch, "find_peers", lambda *_: ([DGL], [{"executable": "python", "dgl": "1"}]))
    return known


def test_check(runs):
    runs.losses["dgl"] = [1.00005, 0.5]
    found, ready, failed = epoch.check(CASE, [ONE, DGL])
    assert found["differences"] == {"ours 1x2": 0, "dgl": pytest.approx(5e-5)} and failed == {}
    assert {how for _, how, _ in runs.calls} == {How(epoch.CHECKED)}
    assert {case.lr for case in runs.cases} == {epoch.CHECK_LR}
    runs.losses["dgl"] = [1.0, 0.5 * 1.0002]
    with pytest.raises(WrongLoss, match=r"gcn-16 on 58k: the losses of dgl .* 0.0002 apart"):
        epoch.check(CASE, [ONE, DGL])
    runs.losses["dgl"] = "signal 9: nothing said"
    found, ready, failed = epoch.check(CASE, [ONE, DGL])
    assert set(found["differences"]) == {"ours 1x2"} and ready == [ONE]
    assert failed == {"dgl": "signal 9: nothing said"}


@pytest.mark.parametrize("fast", epoch.WAITS.values())
def test_the_faster_wait_policy_is_kept(runs, fast):
    runs.fast = fast
    found, ready, _ = epoch.check(CASE, [ONE, DGL])
    assert ready == [ONE, replace(DGL, wait=fast)]
    slow = 20.0
    times = {"unset": slow, "passive": slow} | {fast or "unset": 2.0}
    assert found["seconds_by_wait_policy"]["dgl"] == times
    found, ready, _ = epoch.check(CASE, [ONE, DGL], ["passive"])
    assert ready == [ONE, replace(DGL, wait="passive")]
    assert list(found["seconds_by_wait_policy"]["dgl"]) == ["passive"]


def start(tmp_path, *more):
    output = tmp_path / "out.json"
    status = epoch.main(
        ["--scale", "0.0005", "--graphs", "58k", "--models", "gcn-16", "--usual", "-o", str(output), *more]
    )
    return status, json.loads(output.read_text())


def test_systems_take_turns(runs, tmp_path, capsys):
    status, written = start(
        tmp_path, "--repetitions", "2", "--epochs", "2", "--warm-up", "1", "--ours", "1x2"
    )
    assert status == 0
    assert [(name, how.dropout, seed) for name, how, seed in runs.calls] == [
        ("ours 1x2", 0, 0), ("dgl", 0, 0), ("dgl", 0, 0),
        ("ours 1x2", 0.5, 0), ("dgl", 0.5, 0), ("ours 1x2", 0.5, 1), ("dgl", 0.5, 1),
    ]  # fmt: skip
    assert [row["system"] for row in written["rows"]] == ["ours 1x2", "dgl"]
    assert len(written["runs"]) == 4 and written["options"]["ours"] == ["1x2"]
    assert "gcn-16, dropout 0.5, 58k" in capsys.readouterr().out


def test_target(runs, tmp_path, capsys):
    _, written = start(
        tmp_path, "--repetitions", "1", "--target-accuracy", "0.9", "--limit", "9", "--ours", "1x2"
    )
    assert [how for _, how, _ in runs.calls][-1] == How(9, 0.5, 0.0, 0.9)
    wanted = {"never": 0, "epochs": 2, "seconds": 5.0, "accuracy": 0.9}
    assert [row["to_target"] for row in written["rows"]] == [wanted, wanted]
    assert "90 % after 2 epochs, 5.000 s" in capsys.readouterr().out


def test_wrong_losses_end_it(runs, tmp_path, capsys):
    runs.losses["dgl"] = [1.0, 0.6]
    status, written = start(tmp_path)
    assert status == 1 and written["rows"] == [] and "dgl" in written["wrong"]
    assert "WRONG: gcn-16 on 58k" in capsys.readouterr().err


def test_a_library_that_fails_is_left_out_and_told(runs, tmp_path, capsys):
    runs.losses["dgl"] = "status 1: MemoryError"
    status, written = start(tmp_path, "--repetitions", "1", "--ours", "1x2", "2x1")
    assert status == 0 and {row["system"] for row in written["rows"]} == {"ours 1x2", "ours 2x1"}
    assert [one["what"] for one in written["missing"]] == ["dgl: status 1: MemoryError"]
    assert "not measured: dgl: status 1: MemoryError" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option",
    [["--scale", "0"], ["--graphs", "no"], ["--ours", "2"], ["--epochs", "0"], ["--file", "nowhere.npz"],
     ["--graphs"], ["--target-accuracy", "2"], ["--peers", "no"]],
)  # fmt: skip
def test_refused_options(option, capsys):
    with pytest.raises(SystemExit) as ended:
        epoch.parse(option)
    assert ended.value.code == 2


def test_a_python_without_libraries(tmp_path):
    import sys

    systems, (answer, gone) = epoch.find_peers([sys.executable, "no-such-python"], ["pyg"], tmp_path)
    assert "error" in gone and "cannot be started" in gone["error"]
    assert bool(systems) == ("version" in answer["pyg"]) and answer["python"] == sys.version.split()[0]


@pytest.mark.slow
def test_tiny_runs(tmp_path):
    """No library, but all else: prepared graphs, start weights, the check between numbers of ranks, times."""
    output = tmp_path / "epoch.json"
    options = ["--graphs", "communities", "--scale", "0.002", "--models", "gcn-16", "sage-128", "--peers"]
    options += ["--usual", "--ours", "1x2", "2x1", "--repetitions", "1", "--epochs", "2", "--warm-up", "1"]
    assert epoch.main([*options, "-o", str(output)]) == 0
    written = json.loads(output.read_text())
    assert [row["system"] for row in written["rows"]] == ["ours 1x2", "ours 2x1"] * 2
    for one in written["checks"]:
        assert len(one["loss"]) == epoch.CHECKED and one["differences"]["ours 2x1"] < 1e-4
    assert [len(one["peak_rss_bytes"]) for one in written["runs"]] == [1, 2] * 2
    assert all(len(one["seconds"]) == 3 for one in written["runs"])


# ---- the peers' side, without a library ----


def test_loops_are_added():
    indptr, indices = peer_epoch.with_loops(np.array([0, 2, 2, 3]), np.array([1, 2, 0], np.int32))
    assert indptr.tolist() == [0, 3, 4, 6] and indices.tolist() == [0, 1, 2, 1, 2, 0]
    assert indices.dtype == np.int32


def test_tensors_by_layer():
    weights = {"W1": np.ones((3, 4)), "b1": np.zeros(4), "W2": np.full((4, 2), 2.0), "b2": np.ones(2)}
    first, second = peer_epoch.split_layers("gcn", weights, [1, 1])
    assert first["W"] is weights["W1"] and second["W"] is weights["W2"] and second["b"] is weights["b2"]
    attention = {"W1": np.ones((3, 4)), "b1": np.zeros(4), "as1": np.arange(4.0), "at1": np.ones(4)}
    (layer,) = peer_epoch.split_layers("gat", attention, [2])
    assert layer["source"].tolist() == [[[0, 1], [2, 3]]] and layer["target"].shape == (1, 2, 2)
    with pytest.raises(ValueError, match=r"layer 1 of sage has the tensors \['W', 'b'\]"):
        peer_epoch.split_layers("sage", weights, [1, 1])


def test_what_a_peer_needs_is_asked_for(tmp_path, capsys):
    for wrong in ([], ["--library", "dgl", "--data", "a", "--weights", "b", "--model", "gat", "--constant"]):
        with pytest.raises(SystemExit) as ended:
            peer_epoch.main([*wrong, "-o", str(tmp_path / "out.json")])
        assert ended.value.code == 2
