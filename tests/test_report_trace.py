"""The timeline: what is written, and overlaps against known values and against a slow twin."""

from __future__ import annotations

import itertools
import json
import pickle
import threading
import time

import numpy as np
import pytest

from dorylus_hpc.report.trace import KINDS, Tracer, overlap, write_trace

GRAPH, DENSE = {"GA", "dGA", "AE", "dAE", "RD"}, {"AV", "dAV"}
ORIGIN = 50.0
FIGURES = "graph dense messages any graph_and_dense graph_and_messages dense_and_messages all_three fraction"
NOTHING = dict.fromkeys(FIGURES.split(), 0.0)


def rank_of(tasks=(), sent=(), arrived=()):
    """The record of a rank: tasks (kind, begin, end), blocks (time, number); times from the origin."""
    tracer = Tracer(ORIGIN)
    for kind, begin, end in tasks:
        tracer.task(kind, ORIGIN + begin, ORIGIN + end, tracer.lane("worker"))
    for at, number in sent:
        tracer.sent(ORIGIN + at, 0, 0, 0, number)
    for at, number in arrived:
        tracer.arrived(ORIGIN + at, 0, 0, 0, number)
    return tracer.record()


def written(tmp_path, records, roles=None):
    """The events of the file, by phase."""
    path = tmp_path / "trace.json"
    write_trace(path, records, roles or [f"graph server {rank}" for rank in range(len(records))])
    events = json.loads(path.read_text())["traceEvents"]
    return {phase: [event for event in events if event["ph"] == phase] for phase in "MXsf"}


# ---- the tracer


def test_a_record_has_what_was_noted():
    tracer = Tracer(ORIGIN)
    lane = tracer.lane("worker 1")
    tracer.task("dAV", 51.5, 52.25, lane, epoch=3, layer=1, part=7, interval=4, evaluation=True)
    tracer.task("wait", 53, 54, tracer.lane("messages"))
    tracer.sent(52, 5, 1, 2, 2**40, evaluation=True)
    tracer.arrived(52.5, 6, 2, 0, 9)
    record = tracer.record()
    assert record.tasks.tolist() == [
        (KINDS.index("dAV"), 1.5, 2.25, 0, 3, 1, 7, 4, True),
        (KINDS.index("wait"), 3.0, 4.0, 1, 0, 0, -1, -1, False),
    ]
    assert record.sent.tolist() == [(2.0, 5, 1, 2, 2**40, True)]
    assert record.arrived.tolist() == [(2.5, 6, 2, 0, 9, False)]
    assert record.lanes == ("worker 1", "messages")
    assert record.dropped == 0


def test_a_record_can_be_sent():
    record = rank_of([("GA", 0, 1)], [(0, 1)], [(1, 2)])
    copy = pickle.loads(pickle.dumps(record))
    for name in ("tasks", "sent", "arrived"):
        np.testing.assert_array_equal(getattr(copy, name), getattr(record, name))
    assert (copy.lanes, copy.dropped) == (record.lanes, record.dropped)


def test_a_record_may_be_taken_more_than_once():
    tracer = Tracer(ORIGIN)
    for count in range(3):
        assert len(tracer.record().tasks) == count
        tracer.task("WU", ORIGIN + count, ORIGIN + count + 1, 0)
    np.testing.assert_array_equal(tracer.record().tasks["begin"], [0, 1, 2])


def test_a_lane_keeps_its_number():
    tracer = Tracer(0)
    assert [tracer.lane(name) for name in ("a", "b", "a", "c", "b")] == [0, 1, 0, 2, 1]


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'AG'"):
        Tracer(0).task("AG", 0, 1, 0)


@pytest.mark.parametrize(("limit", "kept", "dropped"), [(0, 0, 6), (4, 4, 2), (6, 6, 0), (7, 6, 0)])
def test_events_beyond_the_limit_are_counted(limit, kept, dropped):
    tracer = Tracer(0, limit)
    for number in range(2):
        tracer.task("GA", number, number + 1, 0)
        tracer.sent(number, 0, 0, 0, number)
        tracer.arrived(number, 0, 0, 0, number)
    record = tracer.record()
    assert len(record.tasks) + len(record.sent) + len(record.arrived) == kept
    assert record.dropped == dropped
    assert np.array_equal(record.tasks["begin"], np.arange((kept + 2) // 3))  # the first are kept


def test_what_threads_add_at_the_same_time_is_cut_off():
    tracer = Tracer(0, 2)
    for number in range(3):
        tracer.task("GA", number, number + 1, 0)
    tracer._events.append(tracer._events[0])  # as by a thread that saw the length before the last one came
    record = tracer.record()
    assert (record.tasks["begin"].tolist(), record.dropped) == ([0, 1], 2)


@pytest.mark.parametrize("limit", [10**6, 30_000])
def test_threads_lose_nothing(limit):
    tracer, each, start = Tracer(0, limit), 4_000, threading.Barrier(4)

    def work(thread):
        start.wait()
        for number in range(each):
            lane = tracer.lane(f"lane {(number + thread) % 50}")
            tracer.task("GA", number, number + 1, lane, part=thread, interval=number)
            tracer.sent(number, thread, 0, 0, number)
            tracer.arrived(number, thread, 0, 0, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record = tracer.record()
    kept = len(record.tasks) + len(record.sent) + len(record.arrived)
    assert kept == min(limit, 12 * each)
    assert record.dropped == 12 * each - kept
    assert sorted(record.lanes) == sorted({f"lane {number}" for number in range(50)})
    names = np.array(record.lanes)[record.tasks["lane"]]
    right = (record.tasks["interval"] + record.tasks["part"]) % 50
    np.testing.assert_array_equal(names, [f"lane {number}" for number in right])
    for thread in range(4):
        mine = record.tasks["interval"][record.tasks["part"] == thread]
        np.testing.assert_array_equal(mine, np.arange(len(mine)))
    if not record.dropped:
        assert len(record.tasks) == len(record.sent) == len(record.arrived) == 4 * each


def test_noting_a_task_is_cheap():
    tracer, count, best = Tracer(0), 10_000, float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for number in range(count):
            tracer.task("GA", 0.0, 1.0, 0, epoch=1, layer=2, part=3, interval=number)
        best = min(best, time.perf_counter() - begin)
    assert best / count < 10e-6  # some 0.2 us; the bound is for busy machines


# ---- overlap


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param([], {}, id="no rank"),
        pytest.param([rank_of()], {}, id="empty"),
        pytest.param([rank_of([("wait", 0, 5), ("SC", 1, 2), ("WU", 0, 9), ("LD", 0, 1)])], {}, id="others"),
        pytest.param([rank_of([("GA", 1, 1), ("AV", 3, 2)])], {}, id="no length"),
        pytest.param([rank_of([("GA", 1, 3), ("AV", 3, 4)])], {"graph": 2, "dense": 1, "any": 3}, id="touch"),
        pytest.param(
            [rank_of([("GA", 0, 10), ("dAV", 2, 5)])],
            {"graph": 10, "dense": 3, "any": 10, "graph_and_dense": 3, "fraction": 0.3},
            id="nested",
        ),
        pytest.param(
            [rank_of([("dAE", 1, 3), ("AV", 1, 3)])],
            {"graph": 2, "dense": 2, "any": 2, "graph_and_dense": 2, "fraction": 1},
            id="identical",
        ),
        pytest.param(
            [rank_of([("GA", 0, 2), ("dGA", 1, 3), ("AE", 1, 3), ("AE", 4, 5), ("dGA", 3, 3.5)])],
            {"graph": 4.5, "any": 4.5},
            id="the same on several threads counts once",
        ),
        pytest.param(
            [rank_of(sent=[(1, 0), (2, 1)]), rank_of(arrived=[(4, 0), (5, 1)])],
            {"messages": 4, "any": 4},
            id="messages",
        ),
        pytest.param(
            [rank_of(sent=[(1, 0)]), rank_of(arrived=[(4, 0)]), rank_of(arrived=[(3, 0)])],
            {"messages": 5, "any": 5},
            id="one block to two ranks",
        ),
        pytest.param(
            [rank_of(sent=[(1, 0), (1, 1)]), rank_of(arrived=[(4, 2)]), rank_of(arrived=[(3, 3)])],
            {},
            id="unmatched",
        ),
        pytest.param([rank_of(sent=[(2, 0)]), rank_of(arrived=[(1, 0)])], {}, id="clocks differ"),
        pytest.param(
            [rank_of([("GA", 0, 9)], sent=[(1, 0)]), rank_of([("GA", 2, 3)], arrived=[(4, 0)])],
            {"graph": 10, "messages": 3, "any": 12, "graph_and_messages": 1, "fraction": 1 / 12},
            id="a block counts where it arrives",
        ),
        pytest.param(
            [
                rank_of(sent=[(0, 0)]),
                rank_of([("GA", 1, 6), ("AV", 3, 8), ("AV", 9, 10)], arrived=[(4, 0)]),
                rank_of([("AV", 0, 1)]),
            ],
            {
                "graph": 5, "dense": 7, "messages": 4, "any": 10, "graph_and_dense": 3,
                "graph_and_messages": 3, "dense_and_messages": 1, "all_three": 1, "fraction": 0.5,
            },
            id="all three",
        ),
    ],
)  # fmt: skip
def test_overlap_of_known_timelines(records, expected):
    assert overlap(records) == pytest.approx(NOTHING | expected)


def test_blocks_match_by_the_whole_key():
    keys = [dict(zip("tpin", key, strict=True)) for key in itertools.product(range(2), repeat=4)]
    sender, receiver = Tracer(0), Tracer(0)
    flights = np.zeros(4000, dtype=bool)
    for place, (key, evaluation) in enumerate(itertools.product(keys, (False, True))):
        words = (key["t"], key["p"], key["i"], key["n"])
        sender.sent(100 * place, *words, evaluation=evaluation)
        if place % 5:
            receiver.arrived(100 * place + place, *words, evaluation=evaluation)
            flights[100 * place : 100 * place + place] = True
    assert overlap([receiver.record(), sender.record()])["messages"] == flights.sum()


def test_the_first_of_equal_sends_counts():
    sender, receiver = rank_of(sent=[(3, 0), (1, 0), (2, 0)]), rank_of(arrived=[(5, 0)])
    assert overlap([sender, receiver])["messages"] == 4


@pytest.mark.parametrize("seed", range(20))
def test_overlap_of_random_timelines(seed):
    """Against a count of the cells of a grid, on which all bounds lie."""
    rng = np.random.default_rng(seed)
    cells, ranks = int(rng.integers(1, 300)), int(rng.integers(1, 5))
    tracers = [Tracer(0) for _ in range(ranks)]
    grid = np.zeros((ranks, 3, cells), dtype=bool)
    for _ in range(rng.integers(0, 60)):
        rank, kind = rng.integers(ranks), str(rng.choice(KINDS))
        begin, end = np.sort(rng.integers(0, cells + 1, 2)).tolist()
        tracers[rank].task(kind, begin, end, 0)
        if kind in GRAPH | DENSE:
            grid[rank, int(kind in DENSE), begin:end] = True
    for number in range(rng.integers(0, 40)):
        source, sent = rng.integers(ranks), int(rng.integers(0, cells + 1))
        key = (*rng.integers(0, 3, 3).tolist(), number, bool(rng.integers(2)))
        if rng.random() < 0.9:
            tracers[source].sent(sent, *key)
        else:
            sent = cells
        for rank in np.flatnonzero(rng.random(ranks) < 0.5):
            arrived = int(rng.integers(0, cells + 1))
            tracers[rank].arrived(arrived, *key)
            grid[rank, 2, sent:arrived] = True
    graph, dense, messages = grid.transpose(1, 0, 2)
    together = {
        "graph": graph,
        "dense": dense,
        "messages": messages,
        "any": graph | dense | messages,
        "graph_and_dense": graph & dense,
        "graph_and_messages": graph & messages,
        "dense_and_messages": dense & messages,
        "all_three": graph & dense & messages,
    }
    expected = {name: float(np.count_nonzero(state)) for name, state in together.items()}
    several = np.count_nonzero(grid.sum(axis=1) >= 2)
    expected["fraction"] = several / expected["any"] if expected["any"] else 0.0
    assert overlap([tracer.record() for tracer in tracers]) == expected


# ---- the file


def test_slices(tmp_path):
    tracer = Tracer(ORIGIN)
    tracer.task("GA", 50.5, 50.75, tracer.lane("worker 0"), epoch=3, layer=2, part=1, interval=4)
    tracer.task("dAV", 50.5, 50.500001, tracer.lane("worker 1"), epoch=3, layer=1, evaluation=True)
    tracer.task("wait", 51, 52, tracer.lane("worker 0"))
    slices = written(tmp_path, [rank_of([("WU", 0, 1)]), tracer.record()])["X"]
    shared = ("name", "cat", "pid", "tid", "ts", "dur")
    assert [tuple(event[key] for key in shared) for event in slices] == [
        ("WU", "WU", 0, 0, 0.0, 1e6),
        ("GA2", "GA", 1, 0, 500_000.0, 250_000.0),
        ("dAV1", "eval", 1, 1, 500_000.0, 1.0),
        ("wait", "wait", 1, 0, 1e6, 1e6),
    ]
    assert slices[1]["args"] == {"epoch": 3, "layer": 2, "part": 1, "interval": 4}


def test_a_kind_has_one_colour(tmp_path):
    tracer = Tracer(0)
    for layer, kind in itertools.product(range(2), KINDS):
        tracer.task(kind, layer, layer + 1, 0, layer=layer)
    slices = written(tmp_path, [tracer.record()])["X"]
    colours = {(event["cat"], event["cname"]) for event in slices}
    assert len(colours) == len({colour for _, colour in colours}) == len(KINDS)


def test_names(tmp_path):
    tracer = Tracer(0, limit=1)
    tracer.lane("worker 0"), tracer.lane('the "other"')
    tracer.arrived(1, 0, 0, 0, 0)
    tracer.arrived(1, 0, 0, 0, 1)
    roles = ["parameter server 0", "graph server é"]
    metadata = written(tmp_path, [rank_of(), tracer.record()], roles)["M"]
    found = {(event["pid"], event["tid"], event["name"]): [*event["args"].values()][0] for event in metadata}
    expected = {
        (0, 0, "process_name"): "parameter server 0",
        (0, 0, "process_sort_index"): 0,
        (1, 0, "process_name"): "graph server é",
        (1, 0, "process_sort_index"): 1,
        (1, 0, "process_labels"): "1 events dropped",
    }
    for tid, name in ((0, "worker 0"), (1, 'the "other"'), (3, "blocks arrived")):
        expected |= {(1, tid, "thread_name"): name, (1, tid, "thread_sort_index"): tid}
    assert found == expected
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["dropped"] == [0, 1]


def test_arrows(tmp_path):
    sender = rank_of([("GA", 0, 1)], sent=[(1, 0), (2, 1), (3, 2)])
    receivers = rank_of(arrived=[(4, 1), (5, 0), (2.5, 2), (6, 9)]), rank_of(arrived=[(7, 1)])
    events = written(tmp_path, [sender, *receivers])
    starts = {event["id"]: event for event in events["s"]}
    ends = {event["id"]: event for event in events["f"]}
    assert len(starts) == len(events["s"]) == len(events["f"]) and starts.keys() == ends.keys()
    drawn = set()
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"]) and end["bp"] == "e"
        drawn.add((start["pid"], start["tid"], start["ts"], end["pid"], end["tid"], end["ts"]))
    # Number 2 arrived before it left, and nobody sent number 9.
    assert drawn == {(0, 1, 2e6, 1, 1, 4e6), (0, 1, 1e6, 1, 1, 5e6), (0, 1, 2e6, 2, 1, 7e6)}
    marks = [event for event in events["X"] if event["name"] == "block0"]
    assert [(mark["pid"], mark["tid"], mark["ts"], mark["dur"]) for mark in marks] == [
        *((0, 1, ts, 1.0) for ts in (1e6, 2e6, 3e6)),
        *((1, 1, ts, 1.0) for ts in (4e6, 5e6, 2.5e6, 6e6)),
        (2, 1, 7e6, 1.0),
    ]
    assert [mark["args"].get("in_flight_us") for mark in marks[3:]] == [2e6, 4e6, -0.5e6, None, 5e6]
    assert marks[3]["args"] == {"table": 0, "part": 0, "interval": 0, "number": 1, "in_flight_us": 2e6}


def test_messages_of_an_evaluation(tmp_path):
    sender, receiver = Tracer(0), Tracer(0)
    for evaluation in (False, True):
        sender.sent(1, 3, 0, 0, 0, evaluation=evaluation)
    receiver.arrived(2, 3, 0, 0, 0, evaluation=True)
    events = written(tmp_path, [sender.record(), receiver.record()])
    assert [event["cat"] for event in events["X"]] == ["message", "eval", "eval"]
    assert len(events["s"]) == len(events["f"]) == 1


def test_marks_never_cross_and_each_arrow_has_its_own(tmp_path):
    """Viewers drop a slice that crosses another, and hang arrows on the innermost one."""
    rng = np.random.default_rng(0)
    times = rng.integers(0, 300, 100) / 1e7  # in steps of 100 ns, many of them equal
    sender = rank_of(sent=[(at, number) for number, at in enumerate(times)])
    receiver = rank_of(arrived=[(1 + at, number) for number, at in enumerate(times)])
    events = written(tmp_path, [sender, receiver])
    marks = {}
    for pid in (0, 1):
        mine = sorted(
            (round(1000 * event["ts"]), round(1000 * event["dur"]))
            for event in events["X"]
            if event["pid"] == pid
        )
        assert all(0 < length <= 1000 for _, length in mine)
        assert all(
            begin + length <= following for (begin, length), (following, _) in itertools.pairwise(mine)
        )
        marks[pid] = {begin for begin, _ in mine}
    for phase, pid in (("s", 0), ("f", 1)):
        ends = [round(1000 * event["ts"]) for event in events[phase]]
        assert len(ends) == len(times) and set(ends) == marks[pid]


def test_outer_slices_come_first_and_touching_ones_touch(tmp_path):
    bounds = [0.1, 0.2, 0.30000000001, 0.7]
    tasks = [("GA", *pair) for pair in itertools.pairwise(bounds)]
    slices = written(tmp_path, [rank_of([*tasks, ("eval", 0.1, 0.7)])])["X"]
    assert [event["name"] for event in slices] == ["eval", "GA0", "GA0", "GA0"]
    assert slices[0]["ts"] == 100_000  # the origin is 0 even if nothing happens there
    for before, after in itertools.pairwise(slices[1:]):
        assert round(1000 * before["ts"]) + round(1000 * before["dur"]) == round(1000 * after["ts"])


def test_no_time_is_negative(tmp_path):
    records = [rank_of([("LD", -2, -1)], sent=[(-1, 0)]), rank_of([("GA", 1, 2)], arrived=[(3, 0)])]
    events = written(tmp_path, records)
    assert [event["ts"] for event in events["X"]] == [0.0, 1e6, 3e6, 5e6]
    assert [event["ts"] for event in events["s"] + events["f"]] == [1e6, 5e6]


@pytest.mark.parametrize("records", [[], [rank_of()], [rank_of(arrived=[(0, 0)])]])
def test_awkward_runs_are_written(tmp_path, records):
    events = written(tmp_path, records)
    assert not events["s"] and not events["f"]
    assert len(events["X"]) == sum(len(record.arrived) for record in records)


def test_many_events_are_all_written(tmp_path):
    count = 40_000
    record = rank_of(
        [("AV", number, number + 1) for number in range(count)],
        sent=[(number, number) for number in range(count)],
        arrived=[(number + 0.5, number) for number in range(count)],
    )
    events = written(tmp_path, [record])
    assert [len(events[phase]) for phase in "Xsf"] == [3 * count, count, count]
    ends = {event["id"]: event["ts"] for event in events["f"]}
    assert all(ends[event["id"]] - event["ts"] == 500_000 for event in events["s"])


def test_roles_must_fit(tmp_path):
    with pytest.raises(ValueError, match="2 records need as many roles, not 1"):
        write_trace(tmp_path / "trace.json", [rank_of(), rank_of()], ["graph server 0"])
    assert not list(tmp_path.iterdir())


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old")
    with pytest.raises(AttributeError):
        write_trace(path, [rank_of([("GA", 0, 1)]), None], ["a", "b"])
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"] and path.read_text() == "old"
