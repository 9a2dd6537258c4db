"""Messages that come late, early and in another order than they were sent: only times may change."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from functools import partial

import graphs
import pytest
from distributed import all_ranks, assert_equals_oracle, engine, first_ranks, prepare, train

from dorylus_hpc.comm.blocks import BlockExchange
from dorylus_hpc.comm.mailbox import Mailbox
from dorylus_hpc.config import make_config
from dorylus_hpc.engine.model import build_program, load_settings
from dorylus_hpc.graph.manifest import read_manifest
from dorylus_hpc.nn.program import INPUT

directed = partial(graphs.directed_random, 60, 300)


class Late:
    """A communicator whose messages leave later than asked, in any order that MPI allows.

    Messages of one key keep their order, as MPI keeps it: those with one tag, or to one rank.
    """

    def __init__(self, comm, seed, key):
        self._comm, self._rng, self._key = comm, random.Random(seed), key
        self._held = defaultdict(deque)
        self.reordered = 0
        self._serial = 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, buffer, dest, tag):
        self._serial += 1
        request = LateRequest(self, lambda: self._comm.Isend(buffer, dest=dest, tag=tag), self._serial)
        self._held[self._key(dest, tag)].append(request)
        return request

    def Improbe(self, **options):
        self.let_go(0.3)
        return self._comm.Improbe(**options)

    def let_go(self, share):
        """Send some of what is held."""
        keys = [key for key, held in self._held.items() if held]
        self._rng.shuffle(keys)
        for key in keys:
            if self._rng.random() < share:
                request = self._held[key].popleft()
                waiting = [held[0].serial for held in self._held.values() if held]
                self.reordered += bool(waiting) and min(waiting) < request.serial
                request.send()


class LateRequest:
    def __init__(self, comm, send, serial):
        self._comm, self._send, self.serial, self._request = comm, send, serial, None

    def send(self):
        self._request = self._send()

    def Test(self):
        self._comm.let_go(0.1)
        return self._request is not None and self._request.Test()

    @staticmethod
    def Testsome(requests):
        return [place for place, request in enumerate(requests) if request.Test()]


@pytest.fixture
def late(monkeypatch, comm):
    """Make all blocks and letters late; return the communicators that do it."""
    made = []

    def patch(owner, key):
        original = owner.__init__

        def init(self, *arguments, **options):
            original(self, *arguments, **options)
            self._comm = Late(self._comm, 100 * len(made) + comm.rank, key)
            made.append(self._comm)

        monkeypatch.setattr(owner, "__init__", init)

    patch(BlockExchange, lambda dest, tag: (dest, tag))
    patch(Mailbox, lambda dest, tag: dest)
    return made


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["pipe", "nopipe"])
@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_exact_modes_do_not_mind(comm, shared_tmp_path, late, layers, servers, mode):
    graph, group = directed(features=7), all_ranks(comm, servers)
    options = {"dtype": "float64", "layers": layers, "hidden": 5, "intervals": 4, "epochs": 8, "dropout": 0.3}
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=5)
    result = train(comm, *group, folder, shared_tmp_path / "run", mode=mode, threads=2, **options)
    assert_equals_oracle(comm, graph, folder, result, group, **options)
    if comm.rank < group[0] and group[0] > 1 and layers > 1:
        assert sum(one.reordered for one in late) > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("weight_update", ["epoch", "interval"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_bound_holds(comm, shared_tmp_path, late, staleness, weight_update):
    folder = prepare(comm, directed(features=7), shared_tmp_path / "graph", parts=5)
    options = {"layers": 3, "hidden": 5, "intervals": 4, "epochs": 15, "dropout": 0.0, "weight_decay": 0.0}
    options["lr"] = 0.03 if weight_update == "epoch" else 0.003
    how = {"mode": "async", "staleness": staleness, "weight_update": weight_update, "straggler": 3.0}
    result = train(comm, *all_ranks(comm), folder, shared_tmp_path / "run", threads=2, **how, **options)
    summary = result.summary
    assert summary["epochs"] == 15
    assert summary["staleness"]["max_lead"] <= staleness
    assert summary["staleness"]["max_read_age"] <= staleness + 1
    assert summary["loss"][-1] < summary["loss"][0]


@pytest.mark.ranks(2)
def test_blocks_that_nobody_waits_for_are_taken_before_a_rank_leaves(comm, shared_tmp_path):
    """They are too large to leave their sender before: it would wait for ever for one that has gone."""
    folder = prepare(comm, directed(features=7), shared_tmp_path / "graph", parts=2)
    config = make_config({"hidden": 3000})
    program = build_program(
        config, n_features=7, n_classes=read_manifest(folder).classes, sparse_features=False
    )
    with first_ranks(comm, 2) as group:
        if group is None:
            return
        with engine(group, folder, program, load_settings(config), intervals=2) as (runner, _):
            exchange, sent = runner.training.exchange, 0
            for table, channel in enumerate(exchange._channels):
                here = group.rank == 0 and channel.name != INPUT
                for block in channel.plan.outgoing if here else ():
                    exchange.send(table, block)
                    sent += 1
            runner.leave()
            assert not exchange.sending
            assert len(runner.training._early) == group.bcast(sent) * group.rank
            assert sent > 0 or group.rank


@pytest.mark.parametrize("seed", range(8))
def test_random_runs_equal_the_oracle(comm, shared_tmp_path, late, seed):
    """Servers, parts, intervals, partitioner, depth, widths, threads and mode are drawn."""
    rng = random.Random(seed)
    servers = rng.randint(0, min(2, comm.size - 1))
    n = rng.randint(30, 120)
    graph = graphs.directed_random(
        n, rng.randint(n, 6 * n), features=rng.randint(3, 20), classes=rng.randint(2, 9), seed=seed
    )
    options = {
        "dtype": "float64",
        "layers": rng.randint(1, 4),
        "hidden": rng.randint(2, 12),
        "intervals": rng.randint(1, 40),
        "epochs": rng.randint(2, 8),
        "dropout": rng.choice((0.0, 0.4)),
        "input_dropout": rng.choice((0.0, 0.3)),
        "eval_every": rng.randint(1, 3),
    }
    mode, threads = rng.choice(("pipe", "nopipe")), rng.randint(1, 3)
    group = all_ranks(comm, servers)
    partitioner = rng.choice(("metis", "range", "hash"))
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=rng.randint(4, 7), partitioner=partitioner)
    result = train(comm, *group, folder, shared_tmp_path / "run", mode=mode, threads=threads, **options)
    assert_equals_oracle(comm, graph, folder, result, group, **options)
