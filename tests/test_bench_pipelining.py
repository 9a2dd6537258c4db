"""The benchmark of pipelining in virtual time: it runs, and its model adds up."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import pipelining
from dorylus_hpc.engine.bounds import epoch_bound, nopipe_seconds

TINY = [
    *("--servers", "2", "--intervals", "4", "7", "--turns", "1", "3", "--epochs", "4"),
    *("--straggler-intervals", "4", "--seeds", "2", "--processes", "1"),
]


def test_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "folder" / "pipelining.json"
    assert pipelining.main([*TINY, "--json", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "times nopipe" in printed and "of what pipe loses" in printed
    written = json.loads(output.read_text())
    assert len(written["pipelining"]) == 2 * 2 * 4 and len(written["straggler"]) == 2 * 2 * 4
    ratios = {(row["turns"], row["intervals"], row["mode"]): row["ratio"] for row in written["pipelining"]}
    for row in written["pipelining"]:
        assert row["nopipe_seconds"] == pytest.approx(14.3)
        assert row["best_ratio"] >= 14.3 / 7.2 - 1e-9  # more where the last turn is not full
        assert row["seconds"] >= row["bound_seconds"] - 1e-9
        assert row["ratio"] <= row["best_ratio"] + 1e-9
        if row["mode"] == "nopipe":
            assert row["ratio"] == pytest.approx(1)  # the simulator's nopipe is that of the arithmetic
    for case in {key[:2] for key in ratios}:
        assert 1 < ratios[*case, "pipe"] < ratios[*case, "async S=0"] < ratios[*case, "async S=1"]
    assert all(row["lost_seconds"] > 0 for row in written["straggler"])


@pytest.mark.parametrize(("intervals", "turns"), [(8, 1), (8, 4), (7, 3), (3, 16)])
def test_stage_by_stage_the_model_takes_the_papers_times(intervals: int, turns: int) -> None:
    cluster = pipelining.cluster_of(pipelining.Job("nopipe", 3, intervals, turns, 1))

    def of(server: int, group: object) -> float:
        return pipelining.task_seconds(cluster, group)  # type: ignore[arg-type]

    assert nopipe_seconds(cluster, of) == pytest.approx(sum(pipelining.STAGES.values()))
    assert epoch_bound(cluster, of).busiest_resource <= 7.2 + 1e-9


def test_many_intervals_with_a_lead_reach_the_papers_ratio() -> None:
    job = pipelining.Job("async S=1", 2, 32, 4, 20)
    assert 14.3 * job.epochs / pipelining.run(job) > pipelining.PAPER_RATIO


def test_a_seed_replays_a_straggler_and_another_does_not() -> None:
    job = pipelining.Job("pipe", 2, 4, 1, 3, slow=(0.25, 0.0), seed=1)
    assert pipelining.run(job) == pipelining.run(job) != pipelining.run(replace(job, seed=2))


def test_without_matplotlib_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    pipelining.plot([], tmp_path / "ratios.png")
    assert "matplotlib is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--epochs", "1"], ["--turns", "0"], ["--seeds", "0"]])
def test_wrong_sizes_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pipelining.main([*TINY, *wrong])
    assert "at least" in capsys.readouterr().err
