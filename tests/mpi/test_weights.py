"""Weights: who owns what, the order of sums, and that every graph server sees the same version."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from distributed import GROUPS, first_ranks

from dorylus_hpc.comm.mailbox import Letters, Mailbox
from dorylus_hpc.comm.roles import Placement, assign_roles
from dorylus_hpc.engine.weights import Service, Verdict, WeightClient, WeightServer, WeightShard
from dorylus_hpc.nn.optim import make_optimizer
from dorylus_hpc.nn.params import ParamSpec, plan_layout
from dorylus_hpc.report.trace import Tracer

MODELS = {
    "one tensor": (ParamSpec("W1", 1, (7, 5), 0.1),),
    "two layers": (
        ParamSpec("W1", 1, (7, 5), 0.1),
        ParamSpec("b1", 1, (5,)),
        ParamSpec("W2", 2, (5, 3)),
        ParamSpec("b2", 2, (3,)),
    ),
    "alike": tuple(ParamSpec(f"W{k}", k, (4, 4), 0.01 * k) for k in range(1, 7)),
}


def partial_gradient(layout, epoch, part, dtype=np.float32):
    """Return a flat gradient whose sum over parts depends, in its bits, on the order."""
    flat = np.zeros(layout.size, dtype)
    for name, view in layout.views(flat).items():
        rng = np.random.default_rng([epoch, part, *name.encode()])
        view[...] = rng.standard_normal(view.shape) * 10.0 ** rng.integers(-3, 4, view.shape)
    return flat


def optimizer(kind):
    return make_optimizer(kind, lr=0.01)


def expected(specs, kind, n_parts, epochs):
    """Return the tensors of every version, each tensor stepped whole by one owner, sums in part order."""
    layout = plan_layout(specs, 1)
    flat, step = layout.initial(5, np.float32), optimizer(kind)
    states = {spec.name: step.init(spec.shape, flat.dtype) for spec in specs}
    versions = [flat.copy()]
    for epoch in range(1, epochs + 1):
        total = np.zeros_like(flat)
        for part in range(n_parts):
            total += partial_gradient(layout, epoch, part)
        for spec in specs:
            gradient = layout.views(total)[spec.name]
            tensor = layout.views(flat)[spec.name]
            step.step(tensor, gradient, states[spec.name], epoch, weight_decay=spec.decay)
        versions.append(flat.copy())
    return [layout.views(version) for version in versions]


def assert_same_bits(got, want):
    assert list(got) == list(want)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


# ---- layout ----


@pytest.mark.parametrize("n_owners", range(1, 9))
@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_has_one_owner(model, n_owners):
    specs = MODELS[model]
    layout = plan_layout(specs, n_owners)
    assert layout == plan_layout(specs, n_owners)
    assert len(layout.segments) == n_owners
    bounds = [bound for segment in layout.segments for bound in segment]
    assert bounds[0] == 0 and bounds[-1] == layout.size
    assert bounds[1:-1:2] == bounds[2::2]  # one after the other, without gaps
    used = np.zeros(layout.size, int)
    for spec, offset, owner in zip(specs, layout.offsets, layout.owners, strict=True):
        start, stop = layout.segments[owner]
        assert start <= offset and offset + spec.size <= stop
        used[offset : offset + spec.size] += 1
    assert used.max() == 1 and used.sum() == sum(spec.size for spec in specs)
    owning = [start < stop for start, stop in layout.segments]
    assert sum(owning) == min(n_owners, len(specs))
    flat = np.arange(layout.size, dtype=np.float32)
    for spec, view in zip(specs, layout.views(flat).values(), strict=True):
        assert view.shape == spec.shape and np.shares_memory(view, flat)


@pytest.mark.parametrize("n_owners", range(2, 8))
@pytest.mark.parametrize("model", MODELS)
def test_start_weights_do_not_depend_on_owners(model, n_owners):
    layouts = [plan_layout(MODELS[model], owners) for owners in (1, n_owners)]
    want, got = (layout.views(layout.initial(3, np.float32)) for layout in layouts)
    assert_same_bits(got, want)


# ---- updates ----


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("n_owners", [1, 2, 3, 7])
def test_shards_add_in_part_order(kind, n_owners):
    specs, n_parts, epochs = MODELS["two layers"], 6, 3
    layout = plan_layout(specs, n_owners)
    want = expected(specs, kind, n_parts, epochs)[epochs]
    initial = layout.initial(5, np.float32)
    tensors = {}
    backwards = {}
    for order, collected in ((range(n_parts), tensors), (range(n_parts)[::-1], backwards)):
        for owner, segment in enumerate(layout.segments):
            shard = WeightShard(layout, owner, optimizer(kind), initial)
            for epoch in range(1, epochs + 1):
                rows = [partial_gradient(layout, epoch, part)[slice(*segment)] for part in order]
                shard.apply(np.array(rows))
            assert shard.steps == epochs
            for spec, tensor_owner in zip(specs, layout.owners, strict=True):
                if tensor_owner == owner:
                    collected[spec.name] = layout.views(shard.flat)[spec.name]
                else:
                    start = layout.views(initial)[spec.name]
                    np.testing.assert_array_equal(layout.views(shard.flat)[spec.name], start)
    assert_same_bits({spec.name: tensors[spec.name] for spec in specs}, want)
    assert any((backwards[name] != tensors[name]).any() for name in want)  # the order does show
    np.testing.assert_array_equal(initial, layout.initial(5, np.float32))


# ---- service ----


class Rank:
    """A rank of a run without a graph: a weight server, a client, or both, acting on letters."""

    def __init__(self, group, servers, specs, epochs, *, kind="adam", judged=False):
        self.roles = assign_roles(group, servers)
        self.placement = Placement(2 * self.roles.n_graph + 1, self.roles.n_graph)
        self.layout = plan_layout(specs, len(self.roles.weight_ranks))
        self.service = Service(
            servers=tuple(self.roles.weight_ranks),
            clients=tuple(range(self.roles.n_graph)),
            layout=self.layout,
            n_parts=self.placement.n_parts,
            n_intervals=self.placement.n_parts,
            epochs=epochs,
            readers=lambda version: range(self.roles.n_graph),
            judged=lambda version: judged,
        )
        self.mailbox = Mailbox(group, np.dtype(np.float32))
        self.server = self.client = None
        if self.roles.owns_weights:
            owner = self.service.servers.index(self.roles.rank)
            shard = WeightShard(self.layout, owner, optimizer(kind), self.layout.initial(5, np.float32))
            self.server = WeightServer(self.mailbox, self.service, shard, Tracer(0.0))
        if self.roles.is_graph_server:
            self.client = WeightClient(self.mailbox, self.service)
        self.granted, self.refused, self.snapshots, self.final = set(), set(), {}, None

    def handle(self, letter):
        match letter.kind:
            case Letters.GRANT:
                units, has = self.client.granted(letter)
                (self.granted if has else self.refused).update(units)
            case Letters.SNAPSHOT:
                self.snapshots[letter.numbers[0]] = letter.data
            case Letters.FINAL:
                self.final = (letter.numbers[0], letter.numbers[1], letter.data)
            case _:
                self.server.handle(letter)

    def wait(self, until):
        self.mailbox.listen(self.handle, until)

    def bind(self, units, least, *, exact=False):
        """Ask for weights for units; return the flat weights that each got, None if refused."""
        self.granted -= set(units)
        self.refused -= set(units)
        for unit in units:
            if self.client.ask(unit, least, exact=exact):
                self.granted.add(unit)
        self.wait(lambda: set(units) <= self.granted | self.refused)
        return [self.client.weights(unit) if unit in self.granted else None for unit in units]

    def push(self, epoch, parts):
        for part in parts:
            self.client.push(epoch, part, partial_gradient(self.layout, epoch, part))

    def end(self, done):
        """End the phase; a rank that serves goes on until all have."""
        if self.client:
            self.client.end(done)
        self.wait(lambda: (not self.client or self.final) and (not self.server or self.server.finished))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("graph_servers, servers", GROUPS)
def test_every_graph_server_sees_the_same_versions(comm, graph_servers, servers, model):
    """Pushed late, and last part first: the bits are those of one owner that adds in part order."""
    exact = model != "alike"  # units of a rank share a binding
    specs, epochs = MODELS[model], 3
    with first_ranks(comm, graph_servers + servers) as group:
        if group is None:
            return
        rank = Rank(group, servers, specs, epochs)
        want = expected(specs, "adam", rank.placement.n_parts, epochs)
        if rank.server:
            rank.server.begin(exact=True, at_once=False)
        if rank.client:
            for epoch in range(1, epochs + 1):
                for got in rank.bind(range(3), epoch - 1, exact=exact):
                    assert_same_bits(got, want[epoch - 1])
                time.sleep(0.003 * ((rank.roles.rank + epoch) % 3))
                for unit in range(3):
                    rank.client.release(unit)
                rank.push(epoch, reversed(rank.placement.hosted(rank.roles.rank)))
        rank.end(epochs)
        if rank.server:
            assert rank.server.most_versions <= 2
        if rank.client:
            assert rank.final[:2] == (epochs, Verdict.GO_ON)
            assert_same_bits(rank.layout.views(rank.final[2]), want[epochs])
            assert sorted(rank.snapshots) == list(range(epochs))
            for version, flat in rank.snapshots.items():
                assert_same_bits(rank.layout.views(flat), want[version])
        rank.mailbox.close()


@pytest.mark.parametrize("graph_servers, servers", GROUPS)
def test_a_version_is_kept_while_somebody_is_bound_to_it(comm, graph_servers, servers):
    """Unit 0 of every graph server holds version 0 while epochs go by; each keeps what it was given."""
    specs, epochs = MODELS["two layers"], 4
    with first_ranks(comm, graph_servers + servers) as group:
        if group is None:
            return
        rank = Rank(group, servers, specs, epochs)
        want = expected(specs, "adam", rank.placement.n_parts, epochs)
        if rank.server:
            rank.server.begin(exact=False, at_once=False)
        if rank.client:
            (held,) = rank.bind([0], 0)
            for epoch in range(1, epochs + 1):
                (got,) = rank.bind([1], epoch - 1)
                assert_same_bits(got, want[epoch - 1])
                rank.push(epoch, rank.placement.hosted(rank.roles.rank))
                rank.client.release(1)
                assert_same_bits(rank.client.weights(0), want[0])
            assert_same_bits(held, want[0])
            rank.client.release(0)
        rank.end(epochs)
        kept = max(group.allgather(rank.server.most_versions if rank.server else 0))
        assert kept == 3 if graph_servers == 1 and servers < 2 else kept in (2, 3)  # first, in use, newest
        rank.mailbox.close()


@pytest.mark.parametrize("graph_servers, servers", GROUPS)
def test_gradients_applied_at_once(comm, graph_servers, servers):
    """Plain descent: whatever the order, the last weights are the first less the sum of all gradients."""
    specs, epochs = MODELS["alike"], 3
    with first_ranks(comm, graph_servers + servers) as group:
        if group is None:
            return
        rank = Rank(group, servers, [replace(spec, decay=0.0) for spec in specs], epochs, kind="sgd")
        if rank.server:
            rank.server.begin(exact=False, at_once=True)
        if rank.client:
            for epoch in range(1, epochs + 1):
                for part in rank.placement.hosted(rank.roles.rank):
                    (got,) = rank.bind([part], 99)  # whatever is there will do
                    assert got is not None
                    rank.push(epoch, [part])
                    rank.client.release(part)
        rank.end(epochs)
        if rank.client:
            layout, n_parts = rank.layout, rank.placement.n_parts
            total = sum(
                partial_gradient(layout, epoch, part, np.float64)
                for epoch in range(1, epochs + 1)
                for part in range(n_parts)
            )
            want = layout.initial(5, np.float32) - 0.01 * total
            assert rank.final[0] == epochs
            np.testing.assert_allclose(rank.final[2], want, rtol=1e-4, atol=1e-4)
        rank.mailbox.close()


@pytest.mark.parametrize("graph_servers, servers", GROUPS)
def test_rank_0_holds_a_run_back_and_stops_it(comm, graph_servers, servers):
    """An exact epoch waits for the judgement of the weights before the last update; then nobody goes on."""
    specs, epochs = MODELS["two layers"], 9
    with first_ranks(comm, graph_servers + servers) as group:
        if group is None:
            return
        rank = Rank(group, servers, specs, epochs, judged=True)
        if rank.server:
            rank.server.begin(exact=True, at_once=False)
        done = 0
        if rank.client:
            while True:
                if rank.roles.rank == 0 and done:
                    rank.client.ask(7, done, exact=False)
                    began = time.monotonic()
                    rank.wait(lambda began=began: time.monotonic() > began + 0.02)
                    assert 7 not in rank.granted | rank.refused  # nobody has judged yet
                    verdict = Verdict.STOP if done == 2 else Verdict.GO_ON
                    for server in rank.service.servers:
                        rank.mailbox.send(server, Letters.VERDICT, done - 1, int(verdict))
                    rank.wait(lambda: 7 in rank.granted | rank.refused)
                    if 7 in rank.granted:
                        rank.client.release(7)
                        rank.granted.clear()
                (got,) = rank.bind([1], done)
                if got is None:
                    break
                rank.client.release(1)
                done += 1
                rank.push(done, rank.placement.hosted(rank.roles.rank))
            assert done == 2
        rank.end(done)
        if rank.client:
            want = expected(specs, "adam", rank.placement.n_parts, 2)
            assert rank.final[:2] == (2, Verdict.STOP)
            assert_same_bits(rank.layout.views(rank.final[2]), want[2])
        rank.mailbox.close()


@pytest.mark.parametrize("graph_servers, servers", GROUPS)
def test_who_is_late_runs_the_epoch_that_others_run_when_the_run_is_stopped(comm, graph_servers, servers):
    """Rank 0 has weights of version 1 and stops the run before the others ask for them."""
    specs, epochs = MODELS["two layers"], 9
    with first_ranks(comm, graph_servers + servers) as group:
        if group is None:
            return
        rank = Rank(group, servers, specs, epochs, judged=True)
        hosted = rank.placement.hosted(rank.roles.rank)
        if rank.server:
            rank.server.begin(exact=True, at_once=False)
        if rank.client:
            rank.bind([1], 0)
            rank.client.release(1)
            rank.push(1, hosted)
            if rank.roles.rank == 0:
                for server in rank.service.servers:
                    rank.mailbox.send(server, Letters.VERDICT, 0, int(Verdict.GO_ON))
                (got,) = rank.bind([1], 1)
                assert got is not None
                for server in rank.service.servers:
                    rank.mailbox.send(server, Letters.VERDICT, 1, int(Verdict.STOP))
                rank.client.release(1)
            else:
                began = time.monotonic()
                rank.wait(lambda: time.monotonic() > began + 0.1)  # the verdict comes first
            for unit in (2, 3):
                (got,) = rank.bind([unit], 1)
                assert got is not None
                rank.client.release(unit)
            rank.push(2, hosted)
            assert rank.bind([4], 2) == [None]
        rank.end(2)
        if rank.client:
            assert rank.final[:2] == (2, Verdict.STOP)
        rank.mailbox.close()


@pytest.mark.ranks(1)
def test_what_must_not_happen_is_told(comm):
    with first_ranks(comm, 1) as group:
        if group is None:
            return
        rank = Rank(group, 0, MODELS["one tensor"], 3)
        rank.server.begin(exact=True, at_once=False)
        rank.push(1, [0])
        rank.push(1, [1])
        with pytest.raises(RuntimeError, match="gradients of epoch 3 of part 0 came twice"):
            for _ in range(4):
                rank.push(3, [0])
            rank.wait(lambda: False)
        rank.push(1, [2])
        rank.bind([0], 0)
        rank.client.end(1)
        with pytest.raises(RuntimeError, match="1 intervals are still bound to weights after the end"):
            rank.wait(lambda: rank.final)
        rank.mailbox.close()
