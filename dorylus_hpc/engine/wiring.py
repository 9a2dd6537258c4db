"""From a program and a partition to what the schedule knows: tables, groups, who reads whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dorylus_hpc.comm.blocks import Block, BlockPlan
from dorylus_hpc.engine.schedule import Direction, Group, Reads, Table, Topology, Unit
from dorylus_hpc.nn.operands import PartOperands
from dorylus_hpc.nn.program import Program, Stage

GHOSTS = -1  # interval number of the rows of a part's ghosts
KINDS = ("train", "evaluate", "setup")
GRAPH, LOADING = "cpu", "io"  # resources of gathers, and of what reads files


@dataclass(frozen=True)
class Wiring:
    """What the schedules of all passes share.

    Attributes
    ----------
    tables
        Row tensors that gathers read.
    groups
        By kind of pass.
    stages
        By kind of pass: the stages of each group.
    exchanged
        By kind of pass: the tables whose ghosts travel in it.
    topology
        Units and who reads whom.
    rows
        Local rows of each unit.
    blocks
        By direction: the ghost blocks, in the order of their numbers.
    reads
        Derived from the above.
    """

    tables: tuple[Table, ...]
    groups: Mapping[str, tuple[Group, ...]]
    stages: Mapping[str, tuple[tuple[Stage, ...], ...]]
    exchanged: Mapping[str, tuple[int, ...]]
    topology: Topology
    rows: tuple[tuple[int, int], ...]
    blocks: Mapping[Direction, tuple[Block, ...]]
    reads: Reads


def wire(
    program: Program,
    parts: Mapping[int, PartOperands],
    intervals: Mapping[int, Sequence[tuple[int, int]]],
    plans: Mapping[Direction, BlockPlan],
    *,
    peers: Sequence[int] = (),
    dense: str = "cpu",
    fuse: bool = True,
) -> Wiring:
    """Derive the wiring of one graph server.

    Parameters
    ----------
    program
        The model.
    parts
        The hosted parts.
    intervals
        Their intervals; an empty part has one, of no rows.
    plans
        Ghost blocks of each direction; of ``all``, where a stage adds up sums of all intervals, from
        `dorylus_hpc.comm.blocks.sums_plan`.
    peers
        The other graph servers.
    dense
        Resource of the dense stages. Where it is not that of the gathers, a gather and what follows it are
        two tasks.
    fuse
        False makes dense forward and backward two tasks there, too.
    """
    passes = {
        "train": program.training_groups(),
        "evaluate": program.evaluation_groups(),
        "setup": program.setup_groups(),
    }
    tables: list[Table] = []
    groups, stages, exchanged = {}, {}, {}
    for kind, fused in passes.items():
        groups[kind], stages[kind] = _groups(fused, tables, dense, fuse=fuse)
        exchanged[kind] = tuple(
            {g.reads: None for g in groups[kind] if g.reads is not None and tables[g.reads].exchanged}
        )
    units, rows = [], []
    for part, cut in sorted(intervals.items()):
        units += [Unit(part, number) for number in range(len(cut))]
        rows += list(cut)
        if parts[part].n_in_ghosts:
            units.append(Unit(part, GHOSTS))
            rows.append((parts[part].n_own, parts[part].n_own + parts[part].n_in_ghosts))
    blocks: dict[Direction, tuple[Block, ...]] = {way: plan.blocks for way, plan in plans.items()}
    reads, ghost_reads = {}, {}
    for way, plan in plans.items():
        reads[way], ghost_reads[way] = _who_reads_whom(way, units, rows, parts, intervals, plan)
    sends = {
        way: [(unit.part, unit.interval) in {*plan.outgoing, *plan.copies} for unit in units]
        for way, plan in plans.items()
    }
    topology = Topology(
        units=tuple(units),
        reads=reads,
        blocks={way: len(known) for way, known in blocks.items()},
        ghost_reads=ghost_reads,
        sends=sends,
        peers=tuple(peers),
    )
    return Wiring(
        tuple(tables), groups, stages, exchanged, topology, tuple(rows), blocks, Reads(topology, tables)
    )


def _groups(
    fused: Iterable[tuple[Stage, ...]], tables: list[Table], dense: str, *, fuse: bool
) -> tuple[tuple[Group, ...], tuple[tuple[Stage, ...], ...]]:
    """Turn fused stages into groups; the tables that they read and write are added to the list."""
    kept: list[tuple[Stage, ...]] = []
    reads: list[int | None] = []
    exchanged = False
    for stages in fused:
        if stages[0].run is None:
            exchanged = True
            continue
        table = None
        reduces = stages[0].kind == "RD"
        if reduces or (_gathers(stages[0]) and (exchanged or (kept and kept[-1][-1].covers_ghosts))):
            way: Direction = "all" if reduces else "out" if stages[0].kind == "dGA" else "in"
            found = Table(stages[0].tensor, way, exchanged or reduces, stages[0].layer)
            if found not in tables:
                tables.append(found)
            table = tables.index(found)
        for piece in split_by_place(stages, fuse=fuse) if dense != GRAPH else (stages,):
            kept.append(piece)
            reads.append(table)
            table = None
        exchanged = False
    groups = []
    for place, stages in enumerate(kept):
        completes = place + 1 < len(kept) and reads[place + 1] is not None
        groups.append(
            Group(
                name="+".join(f"{stage.kind}{stage.layer}" for stage in stages),
                resource=_resource(stages[0], dense),
                reads=reads[place],
                writes=reads[place + 1] if completes else None,
                weights=any(
                    stage.weighted or (stage.kind in ("AV", "dAV") and not stage.weightless)
                    for stage in stages
                ),
                covers_ghosts=stages[0].covers_ghosts,
            )
        )
    return tuple(groups), tuple(kept)


def _gathers(stage: Stage) -> bool:
    """Whether it reads neighbours' rows, or waits for them."""
    return stage.kind in ("GA", "dGA") or (stage.kind == "LD" and bool(stage.tensor))


def _resource(stage: Stage, dense: str) -> str:
    if stage.kind == "LD" and not stage.tensor:
        return LOADING
    return GRAPH if _on_server(stage) else dense


def _on_server(stage: Stage) -> bool:
    stays = stage.kind in ("LD", "RD") or (stage.kind in ("AE", "dAE") and stage.ops is None)
    return _gathers(stage) or stage.on_server or stays


def split_by_place(stages: tuple[Stage, ...], *, fuse: bool = True) -> Iterable[tuple[Stage, ...]]:
    """Cut fused stages where work goes from the graph server elsewhere, or back.

    Parameters
    ----------
    stages
        Fused ones.
    fuse
        False also cuts between dense stages of the forward and of the backward.
    """

    def place(stage: Stage) -> tuple[bool, bool]:
        return _on_server(stage), not fuse and stage.kind == "dAV"

    return (tuple(piece) for _, piece in groupby(stages, place))


def _who_reads_whom(
    way: Direction,
    units: Sequence[Unit],
    rows: Sequence[tuple[int, int]],
    parts: Mapping[int, PartOperands],
    intervals: Mapping[int, Sequence[tuple[int, int]]],
    plan: BlockPlan,
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """For each unit, the units and the blocks whose rows its gathers read. O(edges), once."""
    if way == "all":
        known = [number for number, unit in enumerate(units) if unit.interval != GHOSTS]
        others = [tuple(one for one in known if one != number) for number in range(len(units))]
        return others, [tuple(range(len(plan.blocks)))] * len(units)
    place_of = {(unit.part, unit.interval): number for number, unit in enumerate(units)}
    sources = {part: _source_of_rows(way, parts[part], cut, plan) for part, cut in intervals.items()}
    reads: list[tuple[int, ...]] = []
    ghost_reads: list[tuple[int, ...]] = []
    for unit, (start, stop) in zip(units, rows, strict=True):
        if unit.interval == GHOSTS or start == stop:
            reads.append(())
            ghost_reads.append(())
            continue
        edges = parts[unit.part].in_edges if way == "in" else parts[unit.part].out_edges
        indices = edges.indices[edges.indptr[start] : edges.indptr[stop]]
        n_intervals = len(intervals[unit.part])
        found = np.flatnonzero(np.bincount(sources[unit.part][indices], minlength=1)).tolist()
        own = [place_of[unit.part, one] for one in found if one < n_intervals and one != unit.interval]
        reads.append(tuple(own))
        ghost_reads.append(tuple(one - n_intervals for one in found if one >= n_intervals))
    return reads, ghost_reads


def _source_of_rows(
    way: Direction, part: PartOperands, cut: Sequence[tuple[int, int]], plan: BlockPlan
) -> np.ndarray:
    """For each local row of a part: its interval, or (behind the intervals) the block that brings it."""
    n_ghosts = part.n_in_ghosts if way == "in" else part.n_out_ghosts
    source = np.empty(part.n_own + n_ghosts, np.int64)
    for interval, (start, stop) in enumerate(cut):
        source[start:stop] = interval
    for number, block in enumerate(plan.blocks):
        for receiver, (first, last) in plan.ghosts(block):
            if receiver == part.index:
                source[part.n_own + first : part.n_own + last] = len(cut) + number
    return source
