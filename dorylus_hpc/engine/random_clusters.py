"""Clusters drawn from a seed, for the tests and the campaign of simulated schedules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from dorylus_hpc.engine.schedule import Direction, Group, Mode, Round, Table, Topology, Unit
from dorylus_hpc.engine.simulator import Cluster

DIRECTIONS: tuple[Direction, ...] = ("in", "out")
Routes = dict[Direction, list[list[tuple[int, int]]]]


def random_cluster(
    seed: int,
    *,
    mode: Mode | None = None,
    staleness: int | None = None,
    epochs: int | None = None,
    stops: float = 0.3,
    resizes: float = 0.0,
    reduces: float = 0.0,
) -> Cluster:
    """Draw servers, parts, intervals, who reads whom, depth, workers and rounds.

    Parameters
    ----------
    seed
        Decides everything that is not given.
    mode, staleness, epochs
        Given instead of drawn.
    stops
        Share of asynchronous runs that are told to stop at some time.
    resizes
        Share of runs in which numbers of workers change now and then; all else is drawn as without.
    reduces
        Share of runs in an exact mode whose epochs have sums over all intervals; all else is as without.

    Returns
    -------
    Cluster
        1 to 4 servers of 1 or 2 parts, 1 to 6 intervals a part, 1 to 4 layers, 0 to 2 parameter servers
        (0 of them count as one that a graph server plays), with or without evaluations in exact modes.
    """
    rng = random.Random(seed)
    modes: tuple[Mode, ...] = ("nopipe", "pipe", "async")
    chosen: Mode = rng.choice(modes) if mode is None else mode
    staleness = (rng.randint(0, 3) if staleness is None else staleness) if chosen == "async" else 0
    tables, groups = _program(rng, rng.randint(1, 4), split=rng.random() < 0.5)
    hosts = _units(rng)
    topologies, routes = _topology(rng, hosts)
    count = rng.randint(1, 4) if epochs is None else epochs
    evaluates = chosen != "async" and rng.random() < 0.5
    rounds: list[Round] = []
    for epoch in range(1, count + 1):
        rounds.append(Round("train", epoch))
        if evaluates and rng.random() < 0.7:
            rounds.append(Round("evaluate", epoch, trains=False))
    if chosen != "async" and random.Random(f"reduces of {seed}").random() < reduces:
        tables, groups = _with_sums(random.Random(f"sums of {seed}"), tables, groups)
        topologies, routes = _reading_all(topologies, routes)
    return Cluster(
        topologies=topologies,
        routes=routes,
        tables=tables,
        groups=groups,
        rounds=rounds,
        mode=chosen,
        staleness=staleness,
        workers={"cpu": rng.randint(1, 3), "dense": rng.choice((1, 2, 100))},
        parameter_servers=rng.randint(1, 2),
        update=rng.choice(("epoch", "interval")) if chosen == "async" else "epoch",
        stop_at=rng.uniform(0, 40) if chosen == "async" and rng.random() < stops else None,
        resizes=_resizes(random.Random(f"resizes of {seed}"), len(hosts), resizes),
    )


def _resizes(rng: random.Random, servers: int, share: float) -> tuple[tuple[float, int, str, int], ...]:
    if rng.random() >= share:
        return ()
    return tuple(
        (
            rng.uniform(0, 40),
            rng.randrange(servers),
            rng.choice(("cpu", "dense")),
            rng.choice((1, 1, 2, 3, 100)),
        )
        for _ in range(rng.randint(1, 12))
    )


def _program(
    rng: random.Random, layers: int, *, split: bool
) -> tuple[tuple[Table, ...], dict[str, tuple[Group, ...]]]:
    """A GCN-like program: forward and backward gathers, dense tasks apart from them or fused with them."""
    dense = "dense" if split else "cpu"
    tables: list[Table] = []
    forward: list[Group] = []
    covers = rng.random() < 0.5  # layer 1 transforms the rows of ghosts itself
    for layer in range(1, layers + 1):
        if layer > 1 or rng.random() < 0.7:
            tables.append(Table(f"Y{layer}", "in", exchanged=layer > 1 or not covers))
            number = len(tables) - 1
            if layer == 1:
                forward.append(Group("AV1", dense, writes=number, weights=True, covers_ghosts=covers))
            else:
                forward[-1] = Group(
                    forward[-1].name, forward[-1].resource, forward[-1].reads, number, forward[-1].weights
                )
            forward += _gather(f"{layer}", number, split=split)
        else:
            forward.append(Group("AV1", dense, weights=True))
    evaluate = tuple(forward)
    backward: list[Group] = []
    chain = list(forward)
    for layer in range(layers, 0, -1):
        if layer == 1 and rng.random() < 0.5:
            break
        tables.append(Table(f"dY{layer}", "out", exchanged=True))
        number = len(tables) - 1
        last = (backward or chain)[-1]
        marked = Group(last.name, last.resource, last.reads, number, last.weights)
        if backward:
            backward[-1] = marked
        else:
            chain[-1] = marked
        backward += _gather(f"d{layer}", number, split=split)
    return tuple(tables), {"train": (*chain, *backward), "evaluate": evaluate}


def _with_sums(
    rng: random.Random, tables: Sequence[Table], groups: dict[str, tuple[Group, ...]]
) -> tuple[tuple[Table, ...], dict[str, tuple[Group, ...]]]:
    """Let some groups of an epoch write sums, and others behind them read those; evaluations have none."""
    made, chain = list(tables), list[Group]()
    for group in groups["train"]:
        chain.append(group)
        if group.covers_ghosts or rng.random() < 0.3:
            continue
        number = len(made)
        made.append(Table(f"B{number}", "all", exchanged=True))
        chain[-1] = replace(group, writes=number)
        chain.append(Group(f"RD{number}", reads=number, writes=group.writes, weights=rng.random() < 0.5))
    return tuple(made), {**groups, "train": tuple(chain)}


def _reading_all(
    topologies: Sequence[Topology], routes: Sequence[Routes]
) -> tuple[list[Topology], list[Routes]]:
    """Add the direction in which everyone reads a row of every interval."""
    owners = [
        (server, unit)
        for server, one in enumerate(topologies)
        for unit, what in enumerate(one.units)
        if what.interval >= 0
    ]
    made, ways = [], [{**of, "all": [list[tuple[int, int]]() for _ in of["in"]]} for of in routes]
    for server, one in enumerate(topologies):
        mine = [unit for owner, unit in owners if owner == server]
        others = [owner for owner in owners if owner[0] != server]
        units = range(len(one.units))
        made.append(
            replace(
                one,
                reads={**one.reads, "all": [tuple(unit for unit in mine if unit != own) for own in units]},
                blocks={**one.blocks, "all": len(others)},
                ghost_reads={**one.ghost_reads, "all": [tuple(range(len(others)))] * len(units)},
                sends={**one.sends, "all": [unit in mine and len(topologies) > 1 for unit in units]},
            )
        )
        for block, (owner, unit) in enumerate(others):
            ways[owner]["all"][unit].append((server, block))
    return made, ways


def _gather(name: str, table: int, *, split: bool) -> list[Group]:
    if split:
        return [Group(f"GA{name}", reads=table), Group(f"AV{name}", "dense", weights=True)]
    return [Group(f"GA{name}+AV{name}", reads=table, weights=True)]


def _units(rng: random.Random) -> list[list[Unit]]:
    hosts, part = [], 0
    for _ in range(rng.randint(1, 4)):
        units = []
        for _ in range(rng.randint(1, 2)):
            units += [Unit(part, interval) for interval in range(rng.randint(1, 6))]
            if rng.random() < 0.7:
                units.append(Unit(part, -1))
            part += 1
        hosts.append(units)
    return hosts


def _topology(rng: random.Random, hosts: Sequence[Sequence[Unit]]) -> tuple[list[Topology], list[Routes]]:
    """Who reads whom; a ghost block is an interval of one part seen from one server, its own included."""
    density = rng.choice((0.1, 0.5, 1.0))
    reads: list[dict[Direction, list[tuple[int, ...]]]] = [{way: [] for way in DIRECTIONS} for _ in hosts]
    ghost_reads: list[dict[Direction, list[tuple[int, ...]]]] = [
        {way: [] for way in DIRECTIONS} for _ in hosts
    ]
    blocks: list[dict[Direction, int]] = [dict.fromkeys(DIRECTIONS, 0) for _ in hosts]
    routes: list[Routes] = [{way: [[] for _ in units] for way in DIRECTIONS} for units in hosts]
    for way in DIRECTIONS:
        for server, units in enumerate(hosts):
            numbers: dict[tuple[int, int], int] = {}
            for unit in units:
                own, ghosts = [], []
                for other_server, others in enumerate(hosts):
                    for place, other in enumerate(others):
                        if unit.interval < 0 or other.interval < 0 or rng.random() > density or unit == other:
                            continue
                        if other.part == unit.part:
                            own.append(place)
                            continue
                        key = (other_server, place)
                        if key not in numbers:
                            numbers[key] = len(numbers)
                            routes[other_server][way][place].append((server, numbers[key]))
                        ghosts.append(numbers[key])
                reads[server][way].append(tuple(own))
                ghost_reads[server][way].append(tuple(ghosts))
            blocks[server][way] = len(numbers)
    peers = range(len(hosts))
    topologies = [
        Topology(
            units=tuple(units),
            reads=reads[server],
            blocks=blocks[server],
            ghost_reads=ghost_reads[server],
            sends={
                way: [bool(routes[server][way][place]) for place in range(len(units))] for way in DIRECTIONS
            },
            peers=tuple(peer for peer in peers if peer != server),
        )
        for server, units in enumerate(hosts)
    ]
    return topologies, routes
