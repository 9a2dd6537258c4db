"""The benchmark of scaling: the least bytes by hand, its figures, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from bench import scaling, tasks
from bench.launch import Layout
from bench.scaling import Run
from dorylus_hpc.graph.preparation import prepare_folder
from dorylus_hpc.graph.readers import from_arrays

ONE, TWO = Layout(1, 1), Layout(2, 1)


def made(layout, seconds, **more):
    run = Run(
        layout, "parts-1", list(seconds), [2.0] * len(seconds), [100] * layout.ranks, 80, {"GA": 0.5}, 1.0, 4,
        "abc", None,
    )  # fmt: skip
    return replace(run, **more)


def path_graph(n):
    """Vertices in a row."""
    pairs = tasks.symmetric(n, np.arange(n - 1), np.arange(1, n))
    return from_arrays(pairs, np.ones((n, 3), np.float32), np.arange(n) % 2, n_classes=2, seed=0)


def test_boundary_rows():
    graph = path_graph(6)
    assert scaling.boundary_rows(graph, np.zeros(6, int)) == 0
    assert scaling.boundary_rows(graph, np.array([0, 0, 0, 1, 1, 1])) == 2
    assert scaling.boundary_rows(graph, np.array([0, 1, 2, 2, 2, 2])) == 4
    # A hub is sent to each of two servers once, however many neighbours it has there.
    star = from_arrays(
        tasks.symmetric(5, np.zeros(4, int), np.arange(1, 5)), np.ones((5, 3)), np.arange(5) % 2, seed=0
    )
    assert scaling.boundary_rows(star, np.array([0, 1, 1, 2, 2])) == 2 + 4


def test_least_bytes():
    # Three layers: nothing for the first, 8 columns of the second, 5 of the third, forward and backward.
    assert scaling.least_bytes(10, [100, 16, 8, 5]) == 2 * 10 * 4 * (8 + 5)
    assert scaling.least_bytes(10, [100, 5]) == 0


def test_owners(tmp_path):
    graph = path_graph(6)
    np.save(tmp_path / "owner.npy", np.array([0, 1, 2, 2, 1, 0]))
    prepare_folder(graph, tmp_path / "parts", parts=3, partitioner=f"file:{tmp_path / 'owner.npy'}",
                   report=lambda line: None)  # fmt: skip
    assert scaling.owners(tmp_path / "parts", 3).tolist() == [0, 1, 2, 2, 1, 0]
    assert scaling.owners(tmp_path / "parts", 2).tolist() == [0, 1, 1, 1, 1, 0]
    assert scaling.owners(tmp_path / "parts", 1).tolist() == [0] * 6


def test_half_of():
    graph = tasks.generate("uniform", 0.01)
    half = scaling.half_of(graph)
    whole, found = graph.edges.matrix(graph.n).toarray(), half.edges.matrix(graph.n).toarray()
    assert np.array_equal(found, found.T) and not (found > whole).any()
    assert half.n_edges / graph.n_edges == pytest.approx(0.5, abs=0.02)
    assert half.indptr.dtype == np.int64 and half.indptr[-1] == half.n_edges


def test_row():
    base = [made(ONE, [9, 4, 6]), made(ONE, [9, 8, 8])]
    mine = [made(TWO, [9, 2, 3]), made(TWO, [9, 2, 2], peak_rss_bytes=[100, 300])]
    row = scaling.row_of(TWO, mine, base, 40, 1000, 1)
    assert row["epoch_seconds"] == {"median": 2.25, "min": 2, "of_runs": [2.5, 2]}
    assert row["times_as_fast"] == 6.5 / 2.25 and row["times_as_fast_range"] == [2, 4]
    assert row["peak_rss_bytes"] == {"largest": 200, "all": 300}
    assert (row["ghost_ratio"], row["arcs_per_second"]) == (2, 1000 / 2.25)
    assert scaling.too_few(row) == []
    (told,) = scaling.too_few(row | {"ghost_bytes_per_epoch": 39})
    assert told == "2x1 has sent 39 bytes an epoch, 40 are needed"
    assert scaling.line_of(row).split()[:5] == ["2x1", "2.2500", "2.0000", "2.89", "(2.00-4.00)"]
    assert scaling.row_of(ONE, base, base, 0, 1000, 1)["ghost_ratio"] is None


def test_complaints():
    first = made(ONE, [1.0])
    same = made(Layout(1, 2), [1.0])
    assert scaling.complaints([first, same, replace(first, folder="parts-2", weights_sha256="x")]) == []
    assert scaling.complaints([first, replace(same, intervals=8, weights_sha256="x")]) == []
    (told,) = scaling.complaints([first, replace(same, weights_sha256="x")])
    assert told == "parts-1, 4 intervals: runs end with 2 different weights"
    (told,) = scaling.complaints([first, made(TWO, [1.0], loss=[2.001])])
    assert told.startswith("losses of 2x1 (parts-1) are 0.0005 from those of 1x1")
    assert scaling.complaints([first, made(TWO, [1.0], loss=[2.0001])]) == []
    assert scaling.complaints([first, made(TWO, [1.0], loss=[float("nan")])]) != []


@pytest.mark.parametrize(
    "option",
    [["--scale", "0"], ["--layouts", "2"], ["--epochs", "0"], ["--graphs", "no"], ["--parts", "2"]],
)
def test_refused_options(option, capsys):
    with pytest.raises(SystemExit) as ended:
        scaling.parse(option)
    assert ended.value.code == 2


@pytest.mark.slow
def test_tiny_runs(tmp_path):
    output = tmp_path / "scaling.json"
    options = [
        "--graphs",
        "communities",
        "--scale",
        "0.005",
        "--layouts",
        "1x2",
        "1x1",
        "2x1",
        "--repetitions",
        "1",
    ]
    assert scaling.main([*options, "--epochs", "2", "--warm-up", "1", "-o", str(output)]) == 0
    found = json.loads(output.read_text())["graphs"]["communities"]
    assert [(row["ranks"], row["threads"]) for row in found["strong"]] == [(1, 2), (1, 1), (2, 1)]
    assert [(row["ranks"], row["threads"]) for row in found["weak"]] == [(1, 1), (2, 1)]
    assert found["weak"][0]["arcs"] == pytest.approx(found["arcs"] / 2, rel=0.1)
    one, _, two = found["strong"]
    assert one["ghost_bytes_per_epoch"] == one["least_ghost_bytes"] == 0
    assert two["ghost_bytes_per_epoch"] == two["least_ghost_bytes"] > 0  # nothing is sent that need not be
    assert len({row["weights_sha256"] for row in found["strong"][:2]}) == 1
    assert found["memory"]["arcs"]["half"] < found["memory"]["arcs"]["whole"]


def test_weights_that_differ_end_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "prepare", lambda graph, folder, *_: folder)
    monkeypatch.setattr(scaling, "bound", lambda *_: 80)
    digests = iter("ab")
    monkeypatch.setattr(
        scaling, "run", lambda layout, *_: made(layout, [1.0] * 13, weights_sha256=next(digests))
    )
    options = ["--scale", "0.001", "--graphs", "uniform", "--kinds", "strong", "--repetitions", "1"]
    options += ["--layouts", "1x1", "1x2", "-o", str(tmp_path / "out.json")]
    assert scaling.main(options) == 1
    assert "WRONG: uniform: parts-1, 4 intervals" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "out.json").read_text())["wrong"]) == 1
