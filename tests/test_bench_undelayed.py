"""The benchmark of pipelining without delays: its graphs, and what it calls reached."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import undelayed
from bench.launch import Layout


def test_graphs() -> None:
    band = undelayed.band(10, 30).toarray()
    assert band.sum() == 30 and np.flatnonzero(band[8]).tolist() == [0, 1, 9]
    uniform = undelayed.uniform(100, 400)
    assert uniform.shape == (100, 100) and 350 < uniform.nnz <= 400 and set(uniform.data) == {1}


@pytest.mark.parametrize(
    ("layout", "pipe", "reached"),
    [(Layout(1, 2), 2.06, True), (Layout(1, 2), 2.08, False), (Layout(2, 1), 1.99, True)]
    + [(Layout(2, 1), 2.0, False)],
)
def test_rows(layout: Layout, pipe: float, reached: bool) -> None:
    row = undelayed.row_of("band", layout, {"nopipe": [2.0, 1.0, 3.0], "pipe": [pipe, 1.0, 9.0]})
    assert row["ratio"] == pytest.approx(pipe / 2) and row["ratios"] == [pytest.approx(pipe / 2), 1.0, 3.0]
    assert row["reached"] is reached and ("missed" in undelayed.line_of(row)) is not reached


def test_a_small_run(tmp_path, capsys) -> None:
    small = ["--vertices", "60", "--edges", "200", "--rounds", "1", "--epochs", "2", "--warm-up", "1"]
    file = tmp_path / "out.json"
    assert undelayed.main([*small, "--graphs", "uniform", "--ours", "2x1", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["graph"] == "uniform" and row["layout"] == "2x1"
    assert row["ratio"] == row["pipe_seconds"] / row["nopipe_seconds"] > 0
    assert "uniform" in capsys.readouterr().out
