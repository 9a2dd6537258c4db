"""The benchmark of overlap: its figures follow from what runs leave, by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import overlap
from bench.overlap import Run, Span
from dorylus_hpc.engine.bounds import Bound, epoch_bound
from dorylus_hpc.engine.schedule import Group
from dorylus_hpc.engine.simulator import Cluster

NAMES = ("AV1+AV2", "GA2", "AV2+AV2+dAV2", "dGA2", "dAV2+dAV1+dAV1")
GROUPS = tuple(Group(name, "cpu" if "GA" in name else "dense") for name in NAMES)
TIMES = dict(zip(NAMES, (1.0, 0.0625, 1.0, 0.0625, 1.0), strict=True))  # gathers: 1 + 1 an epoch


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A band of 20 vertices an interval, and a reach of 10: two servers of 16 intervals."""
    folder = tmp_path_factory.mktemp("band")
    overlap.prepare(640, 10, folder / "graph")
    return overlap.cluster_of(folder / "graph")


def spans(rank: int, epoch: int, begin: float, gathers: tuple[float, float]) -> list[Span]:
    """An interval of its own part: stages of 0.5 s, gathers at given times, of 1 and 2 s."""
    kinds = ("AV", "AV", "GA", "AV", "AV", "dAV", "dGA", "dAV", "dAV", "dAV")
    found, now = [], begin
    for kind in kinds:
        if kind in ("GA", "dGA"):
            now = gathers[kind == "dGA"]
        length = {"GA": 1.0, "dGA": 2.0}.get(kind, 0.5)
        found.append(Span(rank, epoch, rank, 0, kind, now, now + length))
        now += length
    return found


def test_intervals_of_the_band_read_their_neighbours(cluster: Cluster) -> None:
    assert [group.name for group in cluster.groups["train"]] == list(NAMES)
    assert [(group.resource, group.reads, group.writes) for group in cluster.groups["train"]] == [
        ("dense", None, 0),
        ("cpu", 0, None),
        ("dense", None, 1),
        ("cpu", 1, None),
        ("dense", None, None),
    ]
    for topology in cluster.topologies:
        assert [unit.interval for unit in topology.units] == [*range(16), -1]
        for way in ("in", "out"):
            assert topology.blocks[way] == 2  # the first and the last interval of the other part
            inner = [(one - 1, one + 1) for one in range(1, 15)]
            assert topology.reads[way] == [(1,), *inner, (14,), ()]
            assert topology.ghost_reads[way] == [(1,), *[()] * 14, (0,), ()]
    for server, routes in enumerate(cluster.routes):
        for way in ("in", "out"):
            assert routes[way] == [[(1 - server, 0)], *[[]] * 14, [(1 - server, 1)], []]


def test_bounds_and_simulations_of_the_band(cluster: Cluster) -> None:
    # The chain of an interval is 3.125. The thread has 2 to do, between the first delay and the last.
    assert epoch_bound(cluster, overlap.seconds_of(TIMES)) == Bound(2.0, 3.125, 4.0)
    assert overlap.simulated(cluster, "nopipe", TIMES) == 5.0
    assert overlap.steady_bound(cluster, "pipe", TIMES) == 4.0
    assert overlap.steady_bound(cluster, "async S=0", TIMES) == 4.0
    assert overlap.steady_bound(cluster, "async S=1", TIMES) == 3.125
    # The first dGA waits for the task behind the first GA; in pipe for those of neighbours, and intervals 0
    # and 15 for each other, across the servers.
    assert overlap.simulated(cluster, "async S=0", TIMES) == 4.0625
    assert overlap.simulated(cluster, "pipe", TIMES) == 4.1875
    assert 3.125 <= overlap.simulated(cluster, "async S=1", TIMES) < 3.5
    slow = overlap.simulated(cluster, "pipe", TIMES, straggler=2.0)
    assert slow > overlap.simulated(cluster, "pipe", TIMES)


def test_rows(cluster: Cluster) -> None:
    measured = {"nopipe": 5.2, "pipe": 4.3, "async S=0": 4.0, "async S=1": 4.1625}
    longer = {name: 1.1 * seconds for name, seconds in TIMES.items()}
    quicker = {name: 0.5 * seconds for name, seconds in TIMES.items()}
    own = {"pipe": longer, "async S=0": TIMES, "async S=1": longer}
    rows = {row["mode"]: row for row in overlap.rows_of(cluster, TIMES, quicker, own, measured)}
    assert rows["nopipe"]["arithmetic_seconds"] == 5.0
    assert rows["nopipe"]["of_arithmetic"] == pytest.approx(1.04)
    assert {mode: row["bound_seconds"] for mode, row in rows.items() if mode != "nopipe"} == {
        "pipe": 4.0,
        "async S=0": 4.0,
        "async S=1": 3.125,
    }
    assert {row["path_or_resource_seconds"] for mode, row in rows.items() if mode != "nopipe"} == {3.125}
    shares = [rows[mode]["gain_share"] for mode in overlap.OVERLAPPING]
    assert shares == pytest.approx([0.75, 1.0, 0.5])
    bounds = [rows[mode]["apart_bound_seconds"] for mode in overlap.OVERLAPPING]
    assert bounds == [2.0, 2.0, 1.5625]
    assert rows["pipe"]["apart_gain_share"] == pytest.approx(0.9 / 3.2)
    bounds = [rows[mode]["own_bound_seconds"] for mode in overlap.OVERLAPPING]
    assert bounds == pytest.approx([4.4, 4.0, 3.4375])
    shares = [rows[mode]["own_gain_share"] for mode in overlap.OVERLAPPING]
    assert shares == pytest.approx([0.9 / 0.8, 1.0, 1.0375 / 1.7625])
    assert [row["reached"] for row in rows.values()] == [True, True, True, False]
    text = overlap.table(list(rows.values()))
    assert "75.0%" in text[3] and "28.1%" in text[3] and "112.5%" in text[3]
    assert ["missed" in line for line in text[2:]] == [False, False, False, True]


def test_other_work_of_the_core_is_the_threads(cluster: Cluster) -> None:
    found = overlap.on_these_cores(cluster, TIMES, 0.5)  # beside the 2 of gathers
    assert found == TIMES | {"GA2": 0.078125, "dGA2": 0.078125}
    assert epoch_bound(cluster, overlap.seconds_of(found)).busiest_resource == 2.5
    assert overlap.on_these_cores(cluster, TIMES, 0.0) == TIMES


def test_share_of_the_possible_gain() -> None:
    assert overlap.gain_share(3.0, 2.0, 1.0) == 0.5
    assert overlap.gain_share(3.0, 1.0, 1.0) == 1.0
    assert overlap.gain_share(3.0, 4.0, 1.0) == -0.5


def test_losses(cluster: Cluster) -> None:
    without = {"pipe": 4.0, "async S=0": 4.0, "async S=1": 3.0}
    slowed = {"pipe": 6.0, "async S=0": 5.5, "async S=1": 3.5}
    rows = overlap.losses_of(cluster, TIMES, 2.0, without, slowed)
    assert [row["lost_seconds"] for row in rows] == [2.0, 1.5, 0.5]
    assert [row["of_pipe"] for row in rows] == [1.0, 0.75, 0.25]
    assert rows[0]["simulated_of_pipe"] == 1.0
    assert "missed" not in "".join(overlap.straggler_table(rows))


def test_times_of_groups() -> None:
    found = [*spans(0, 1, 0.0, (2.0, 5.0)), *spans(1, 1, 0.0, (3.0, 9.0))]
    assert overlap.group_seconds(found, GROUPS) == dict(zip(NAMES, (1.0, 1.0, 1.5, 2.0, 1.5), strict=True))
    with pytest.raises(ValueError, match="10 stages, the timeline 9"):
        overlap.group_seconds(found[:-1], GROUPS)


def test_where_the_thread_idles() -> None:
    found = [*spans(0, 1, 0.0, (2.0, 5.0)), *spans(0, 2, 9.0, (10.0, 14.0))]
    # Epoch 1: 0 .. 2, gathers 2 .. 7 with a gap of 2, until 8.5; epoch 2 from 9: 10, 16 with a gap of 3, 17.5
    assert overlap.profile(found) == {"head": 1.5, "work": 3.0, "gaps": 2.5, "tail": 1.5, "turn": 0.5}


def test_seconds_of_an_epoch() -> None:
    runs = [Run([1.0, 1.0, 4.0], []), Run([2.0, 2.0, 2.0], []), Run([3.0, 3.0, 3.0], [])]
    assert overlap.epoch_seconds("pipe", runs) == 2.0
    runs = [Run([1.0, 1.0, 4.0], []), Run([1.0, 1.0, 1.0], []), Run([5.0], [])]
    assert overlap.epoch_seconds("async S=1", runs) == 2.0
    assert overlap.epoch_seconds("pipe", runs) == 1.0
    assert overlap.epoch_seconds("pipe", runs, mean=True) == 2.0


def test_spans_are_those_of_training(tmp_path: Path) -> None:
    def event(category: str, epoch: int) -> dict[str, object]:
        place = {"epoch": epoch, "layer": 2, "part": 1, "interval": 3}
        return {"ph": "X", "cat": category, "pid": 1, "tid": 0, "ts": 2e6, "dur": 5e5, "args": place}

    events = [{"ph": "M", "args": {}}, event("GA", 1), event("GA", 2), event("eval", 2), event("SC", 2)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert overlap.read_spans(tmp_path / "trace.json", 2) == [Span(1, 2, 1, 3, "GA", 2.0, 2.5)]


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--vertices", "100"], ["--straggler", "0.5"]])
def test_wrong_sizes_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overlap.parse(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_without_matplotlib_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    overlap.plot([], tmp_path / "overlap.png")
    assert "matplotlib is not installed" in capsys.readouterr().out
