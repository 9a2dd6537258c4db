"""From programs and partitions to what the schedule knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dorylus_hpc.comm.blocks import BlockPlan, LocalCopy, Received, cut_plan
from dorylus_hpc.comm.halo import Copy, Delivery, HaloPlan, Incoming, Outgoing
from dorylus_hpc.engine.schedule import Unit
from dorylus_hpc.engine.wiring import GHOSTS, wire
from dorylus_hpc.nn.gcn import gcn_program

I32 = np.int32


def program(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "n_features": 4,
        "hidden": [3],
        "n_classes": 2,
        "sparse_features": True,
        "dropout": 0.5,
        "input_dropout": 0.5,
        "weight_decay": 0.0,
        "decay_scope": "all",
        "seed": 0,
    }
    return gcn_program(**settings | changes)


def part(index: int, rows: list[list[int]], n_ghosts: int) -> Any:
    """A part with these in- and out-edges, by local row."""
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    edges = SimpleNamespace(indptr=indptr, indices=np.array(sum(rows, []), I32))
    return SimpleNamespace(
        index=index,
        n_own=len(rows),
        n_in_ghosts=n_ghosts,
        n_out_ghosts=n_ghosts,
        in_edges=edges,
        out_edges=edges,
    )


# Part 0: rows 0 1 | 2 3, ghosts 4 5 from part 1 (its intervals 0 and 2) and 6 from part 2 (its interval 0).
PART = part(0, [[1, 4], [0], [3, 6], [2, 5]], 3)
CUTS = {0: ((0, 2), (2, 4)), 1: ((0, 3), (3, 5), (5, 9)), 2: ((0, 8),)}
PLAN = HaloPlan(
    {0: 4},
    (Outgoing(0, 1, np.array([0, 2, 3], I32)), Outgoing(0, 2, np.array([1], I32))),
    (
        Incoming(1, 1, np.array([1, 7], I32), (Delivery(0, (0, 2), None),)),
        Incoming(2, 2, np.array([5], I32), (Delivery(0, (2, 3), None),)),
    ),
    (),
)


def plans() -> dict[Any, BlockPlan]:
    return {"in": cut_plan(PLAN, CUTS), "out": cut_plan(PLAN, CUTS)}


def test_messages_are_cut_at_the_intervals() -> None:
    plan = plans()["in"]
    assert plan.blocks == ((1, 0), (1, 2), (2, 0))
    assert [(plan.incoming[block].rank, plan.incoming[block].n_rows) for block in plan.blocks] == [
        (1, 1),
        (1, 1),
        (2, 1),
    ]
    assert [plan.ghosts(block) for block in plan.blocks] == [[(0, (0, 1))], [(0, (1, 2))], [(0, (2, 3))]]
    sent = {block: [(rank, lids.tolist()) for rank, lids in ways] for block, ways in plan.outgoing.items()}
    assert sent == {(0, 0): [(1, [0]), (2, [1])], (0, 1): [(1, [2, 3])]}


def test_a_message_for_two_parts_is_cut_with_its_picks() -> None:
    # Rows 1 4 6 8 of part 9; hosted part 0 takes 1 6 8 as its ghosts 5.., part 1 takes 4 8 as its ghosts 0..
    incoming = Incoming(
        9,
        3,
        np.array([1, 4, 6, 8], I32),
        (Delivery(0, (5, 8), np.array([0, 2, 3], I32)), Delivery(1, (0, 2), np.array([1, 3], I32))),
    )
    copy = Copy(0, np.array([2, 3, 7], I32), 1, (10, 13))
    plan = cut_plan(
        HaloPlan({0: 8, 1: 2}, (), (incoming,), (copy,)), {9: ((0, 5), (5, 7), (7, 9)), 0: ((0, 3), (3, 8))}
    )
    received: list[Received] = [plan.incoming[9, interval] for interval in range(3)]
    assert [one.n_rows for one in received] == [2, 1, 1]
    told = [
        [(one.part, one.ghosts, None if one.pick is None else one.pick.tolist()) for one in piece.deliveries]
        for piece in received
    ]
    assert told == [
        [(0, (5, 6), [0]), (1, (0, 1), [1])],
        [(0, (6, 7), [0])],
        [(0, (7, 8), [0]), (1, (1, 2), [0])],
    ]
    copies: dict[tuple[int, int], list[LocalCopy]] = plan.copies
    assert {
        block: [(one.lids.tolist(), one.part, one.ghosts) for one in ways] for block, ways in copies.items()
    } == {
        (0, 0): [([2], 1, (10, 11))],
        (0, 1): [([3, 7], 1, (11, 13))],
    }


def test_who_reads_whom() -> None:
    wiring = wire(program(), {0: PART}, {0: CUTS[0]}, plans())
    assert wiring.topology.units == (Unit(0, 0), Unit(0, 1), Unit(0, GHOSTS))
    assert wiring.rows == ((0, 2), (2, 4), (4, 7))
    assert wiring.topology.reads["in"] == [(), (), ()]  # rows 0 1 and 2 3 read each other within an interval
    assert wiring.topology.ghost_reads["in"] == [(0,), (1, 2), ()]
    assert wiring.topology.sends["out"] == [True, True, False]
    crossing = part(0, [[2], [0], [3], [1]], 0)
    none = {
        "in": cut_plan(HaloPlan({0: 4}, (), (), ()), CUTS),
        "out": cut_plan(HaloPlan({0: 4}, (), (), ()), CUTS),
    }
    wiring = wire(program(), {0: crossing}, {0: CUTS[0]}, none)  # type: ignore[arg-type]
    assert wiring.topology.reads["out"] == [(1,), (0,)]
    assert wiring.topology.units == (Unit(0, 0), Unit(0, 1))


def test_tables_and_groups_of_a_program() -> None:
    wiring = wire(program(), {0: PART}, {0: CUTS[0]}, plans())
    names = [(table.name, table.direction, table.exchanged) for table in wiring.tables]
    assert names == [
        ("Y1", "in", False),
        ("Y2", "in", True),
        ("dH2", "out", True),
        ("dH1", "out", True),
    ]
    assert [(g.name, g.reads, g.writes, g.covers_ghosts) for g in wiring.groups["train"]] == [
        ("AV1+AV1", None, 0, True),
        ("GA1+AV1+AV2", 0, 1, False),
        ("GA2+AV2+AV2+dAV2", 1, 2, False),
        ("dGA2+dAV2+dAV1", 2, 3, False),
        ("dGA1+dAV1", 3, None, False),
    ]
    assert [(g.name, g.reads, g.writes) for g in wiring.groups["evaluate"]] == [
        ("AV1", None, 0),
        ("GA1+AV1+AV2", 0, 1),
        ("GA2+AV2", 1, None),
    ]
    assert wiring.exchanged == {"train": (1, 2, 3), "evaluate": (1,), "setup": ()}
    assert wiring.groups["setup"] == ()


def test_dense_work_elsewhere_makes_tasks_of_its_own() -> None:
    model = program(hidden=[3], n_classes=5)  # layer 2 gathers H1 as it is
    wiring = wire(model, {0: PART}, {0: CUTS[0]}, plans(), dense="dense", peers=(1, 2))
    names = [table.name for table in wiring.tables]
    assert names == ["Y1", "H1", "dM2", "dH1"]
    got = [(g.name, g.resource, g.reads, g.writes, g.weights) for g in wiring.groups["train"]]
    assert got == [
        ("AV1+AV1", "cpu", None, 0, True),  # sparse features stay where they are
        ("GA1", "cpu", 0, None, False),
        ("AV1", "dense", None, 1, True),
        ("GA2", "cpu", 1, None, False),
        ("AV2+AV2+dAV2+dAV2", "dense", None, 2, True),
        ("dGA2", "cpu", 2, None, False),
        ("dAV1", "dense", None, 3, True),
        ("dGA1+dAV1", "cpu", 3, None, True),
    ]
    assert wiring.topology.peers == (1, 2)


@pytest.mark.parametrize("layers", [1, 3])
def test_constant_features_are_gathered_before_the_first_epoch(layers: int) -> None:
    model = program(sparse_features=False, input_dropout=0.0, hidden=[3] * (layers - 1))
    wiring = wire(model, {0: PART}, {0: CUTS[0]}, plans())
    table = next(number for number, table in enumerate(wiring.tables) if table.name == "X")
    assert wiring.tables[table].exchanged
    assert wiring.exchanged["setup"] == (table,)
    assert [(g.name, g.resource, g.reads, g.writes) for g in wiring.groups["setup"]] == [
        ("LD1", "io", None, table),
        ("GA1", "cpu", table, None),
    ]
    assert wiring.groups["train"][0].reads is None
    assert not wiring.groups["train"][0].name.startswith("GA1")
