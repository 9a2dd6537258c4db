"""The benchmark of the modes' epochs: smoothing, epochs to the target, the table, and what it starts."""

from __future__ import annotations

import json

import pytest

from bench import staleness
from bench.staleness import EXACT, MODES, Run, epochs_to, late, line_of, rows_of, smoothed


def made(mode, seed, values, test=0.5):
    return Run(
        "cora",
        mode,
        seed,
        epochs=list(range(1, len(values) + 1)),
        val_accuracy=values,
        loss=[1.0] * len(values),
        best_epoch=1,
        test_accuracy=test,
        staleness={"bound": 0, "max_lead": 0, "max_read_age": 0},
        config={"intervals": 3},
    )


def steps(*lengths_and_values):
    """A curve of plateaus: how many epochs, at which value."""
    return [value for length, value in lengths_and_values for _ in range(length)]


# ---- curves ----


def test_smoothed():
    assert smoothed([]) == []
    assert smoothed([4.0]) == [4.0]
    assert smoothed([0.0, 1.0, 5.0, 2.0, 9.0, 3.0, 0.0]) == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 3.0]


def test_a_spike_is_not_a_rise():
    values = steps((10, 0.25), (2, 0.75), (10, 0.25))
    assert smoothed(values) == [0.25] * 22
    assert epochs_to(0.5, range(1, 23), values) is None


def test_epochs_to():
    values = steps((10, 0.25), (10, 0.75))
    epochs = range(1, 21)
    assert epochs_to(0.5, epochs, values) == 13  # the third of five makes the median
    assert epochs_to(0.75, epochs, values) == 13  # at the target counts
    assert epochs_to(0.25, epochs, values) == 1
    assert epochs_to(0.76, epochs, values) is None
    assert epochs_to(0.5, range(10, 210, 10), values) == 130  # by number, not by place


# ---- rows ----


def runs_of_two_seeds():
    """Best of pipe: 0.5 (seed 0), 0.75 (seed 1); at a half, the targets are 0.25 and 0.375."""
    exact, slow, partly = MODES
    return [
        made(exact, 0, steps((8, 0.0), (12, 0.5)), 0.5),
        made(slow, 0, steps((18, 0.0), (12, 0.25)), 0.25),
        made(partly, 0, steps((18, 0.0), (12, 0.25)), 0.25),
        made(exact, 1, steps((18, 0.0), (12, 0.75)), 0.75),
        made(slow, 1, steps((28, 0.0), (12, 0.5)), 0.75),
        made(partly, 1, steps((30, 0.25)), 0.75),
    ]


def test_rows():
    exact, slow, partly = rows_of(runs_of_two_seeds(), 0.5)
    assert [row["mode"] for row in (exact, slow, partly)] == list(MODES)
    assert {row["target"] for row in (exact, slow, partly)} == {0.3125}
    assert exact["epochs_to_target"] == [11, 21]
    assert (exact["mean"], exact["deviation"], exact["ratio"], exact["never"]) == (16, 5, 1, 0)
    assert exact["test_accuracy"] == {"mean": 0.625, "deviation": 0.125}
    assert slow["epochs_to_target"] == [21, 31]
    assert (slow["mean"], slow["deviation"], slow["ratio"], slow["never"]) == (26, 5, 26 / 16, 0)
    assert slow["test_accuracy"] == {"mean": 0.5, "deviation": 0.25}
    # Compared over the one seed that reached the target.
    assert partly["epochs_to_target"] == [21, None]
    assert (partly["mean"], partly["deviation"], partly["ratio"], partly["never"]) == (21, 0, 21 / 11, 1)


def test_pipe_always_reaches_the_whole_of_its_best():
    row = rows_of([made(EXACT, 0, [0.1, 0.3, 0.2, 0.7, 0.6, 0.9, 0.1])], 1.0)[0]
    assert (row["epochs_to_target"], row["target"]) == ([6], 0.6)


def test_lines():
    exact, slow, partly = map(line_of, rows_of(runs_of_two_seeds(), 0.5))
    assert exact.split() == "cora 3 50 % 31.25 % pipe 16.0 +- 5.0 0/2 62.50 +- 12.50 %".split()
    assert slow.split() == "cora 3 50 % 31.25 % async S=0 26.0 +- 5.0 +62.5 % 0/2 50.00 +- 25.00 %".split()
    assert partly.split() == "cora 3 50 % 31.25 % async S=1 21.0 +- 0.0 +90.9 % 1/2 50.00 +- 25.00 %".split()
    assert {len(line) for line in (exact, slow, partly)} == {len(staleness.HEAD)}


def test_line_of_a_mode_that_never_arrives():
    runs = [made(EXACT, 0, [1.0] * 9), made("async S=1", 0, [0.5] * 9)]
    row = rows_of(runs, 0.99)[1]
    assert (row["mean"], row["deviation"], row["ratio"], row["never"]) == (None, None, None, 1)
    assert line_of(row).split() == "cora 3 99 % 99.00 % async S=1 - - 1/1 50.00 +- 0.00 %".split()


def test_late_targets_are_told():
    rows = rows_of(runs_of_two_seeds(), 0.5)
    assert late(rows, 32) == []
    (line,) = late(rows, 20)
    assert "needs 16 of 20 epochs" in line and "more than 25 % above" in line


# ---- the command ----


@pytest.fixture
def data(tmp_path):
    for name in ("cora", "amazon_photo"):
        (tmp_path / f"{name}.npz").touch()
    return tmp_path


@pytest.fixture
def trained(monkeypatch):
    """Record the calls of train; the smoothed curves reach one half after 10 epochs (pipe), 20, 30."""
    calls = []

    def train(ranks, run_dir, options, extra):
        calls.append((ranks, options, extra))
        start = 18 + 10 * options.get("staleness", -1)
        values = steps((start - 1, 0.0), (40, 0.5))[: options["epochs"]]
        lines = [
            {"epoch": epoch, "val_accuracy": value, "loss": 2.0} for epoch, value in enumerate(values, 1)
        ]
        lines.append({"epoch": len(values) + 1, "val_accuracy": None, "loss": 2.0})
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
        return {
            "best_epoch": start,
            "test_accuracy": {"best_validation": 0.75, "last": 0.5},
            "staleness": {"bound": options.get("staleness", 0)},
            "config": {"intervals": 2},
        }

    monkeypatch.setattr(staleness, "train", train)
    return calls


def test_main(data, trained, capsys):
    output = data / "folder" / "out.json"
    arguments = ["--data-dir", data, "--graphs", "cora", "amazon_photo", "--seeds", "2", "--epochs", "40"]
    more = ["--shares", "0.5", "--json", output, "--", "--intervals", "2"]
    assert staleness.main([*map(str, [*arguments, *more])]) == 0
    assert len(trained) == 2 * 2 * 3
    assert {(ranks, tuple(extra)) for ranks, _, extra in trained} == {(2, ("--intervals", "2"))}
    first, amazon = trained[0][1], trained[-1][1]
    wanted = {"data": data / "cora.npz", "hidden": 16, "feature-norm": "row", "epochs": 40, "eval-every": 1}
    assert wanted.items() <= first.items() and "staleness" not in first
    wanted = {"hidden": 64, "weight-decay": 5e-4, "seed": 1, "mode": "async", "staleness": 1}
    assert wanted.items() <= amazon.items()
    written = json.loads(output.read_text())
    assert [row["mean"] for row in written["rows"]] == [10, 20, 30] * 2
    assert [row["ratio"] for row in written["rows"]] == [1, 2, 3] * 2
    run = written["runs"][1]
    assert (run["graph"], run["mode"], run["seed"], run["best_epoch"]) == ("cora", "async S=0", 0, 18)
    assert run["epochs"] == list(range(1, 41)) and run["val_accuracy"] == steps((17, 0.0), (23, 0.5))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == staleness.HEAD
    assert "+100.0 %" in lines[2] and "+200.0 %" in lines[3]


def test_quick(data):
    options = staleness.parse(["--data-dir", str(data), "--quick", "--seeds", "1"])
    assert (options.graphs, options.seeds, options.epochs, options.ranks) == (["cora"], 1, 60, 2)


@pytest.mark.parametrize(
    "option",
    [
        ["--graphs", "nowhere"],
        ["--graphs", "citeseer"],
        ["--seeds", "0"],
        ["--shares", "0"],
        ["--shares", "2"],
    ],
)
def test_refused_options(data, option):
    with pytest.raises(SystemExit) as ended:
        staleness.parse(["--data-dir", str(data), "--quick", *option])
    assert ended.value.code == 2


def test_plot_without_matplotlib_is_refused_before_any_run(data, monkeypatch, capsys):
    monkeypatch.setattr(staleness, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        staleness.parse(["--data-dir", str(data), "--quick", "--plot", "curves.png"])
    assert "matplotlib is not installed" in capsys.readouterr().err


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [made(mode, seed, [0.1 * seed, 0.5, 0.75]) for seed in (0, 1) for mode in MODES]
    staleness.plot(runs, tmp_path / "folder" / "curves")
    assert (tmp_path / "folder" / "curves").read_bytes()[:4] == b"\x89PNG"
