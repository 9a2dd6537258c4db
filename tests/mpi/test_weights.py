"""Weights: who owns what, the order of sums, and that every graph server sees the same version."""

from __future__ import annotations

import time

import numpy as np
import pytest
from distributed import GROUPS, first_ranks

from dorylus_hpc.comm.roles import Placement, assign_roles
from dorylus_hpc.comm.weights import WeightClient, WeightServer
from dorylus_hpc.engine.weights import WeightService, WeightShard
from dorylus_hpc.nn.optim import make_optimizer
from dorylus_hpc.nn.params import ParamSpec, plan_layout

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
            assert shard.version == epochs
            for spec, tensor_owner in zip(specs, layout.owners, strict=True):
                if tensor_owner == owner:
                    collected[spec.name] = layout.views(shard.flat)[spec.name]
                else:
                    start = layout.views(initial)[spec.name]
                    np.testing.assert_array_equal(layout.views(shard.flat)[spec.name], start)
    assert_same_bits({spec.name: tensors[spec.name] for spec in specs}, want)
    assert any((backwards[name] != tensors[name]).any() for name in want)  # the order does show
    np.testing.assert_array_equal(initial, layout.initial(5, np.float32))


# ---- transport ----


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("graph_servers, servers", GROUPS)
def test_every_graph_server_sees_the_same_versions(comm, graph_servers, servers, model):
    """Pushed late, and last part first: the bits are those of one owner that adds in part order."""
    specs, epochs = MODELS[model], 3
    with first_ranks(comm, graph_servers + servers) as group:
        if group is None:
            return
        roles, placement = assign_roles(group, servers), Placement(2 * graph_servers + 1, graph_servers)
        layout = plan_layout(specs, len(roles.weight_ranks))
        service = None
        if roles.owns_weights:
            transport = WeightServer(roles, layout, placement, np.dtype(np.float32))
            initial = layout.initial(5, np.float32)
            shard = WeightShard(layout, transport.owner, optimizer("adam"), initial)
            service = WeightService(shard, transport)
        if not roles.is_graph_server:
            service.serve(epochs)
            return
        client = WeightClient(roles, layout, np.dtype(np.float32))
        versions = []
        for epoch in range(1, epochs + 1):
            if service:
                service.begin_epoch(epoch)
            flat, waited = client.pull(epoch - 1)
            assert waited >= 0
            versions.append(flat.copy())
            time.sleep(0.003 * ((roles.rank + epoch) % 3))
            for part in reversed(placement.hosted(roles.rank)):
                client.push(epoch, part, partial_gradient(layout, epoch, part))
            if service:
                service.end_epoch(epoch)
            client.flush()
        if service:
            service.begin_last(epochs)
        versions.append(client.pull(epochs)[0].copy())
        if service:
            service.end_last()
        want = expected(specs, "adam", placement.n_parts, epochs)
        for version, flat in enumerate(versions):
            assert_same_bits(layout.views(flat), want[version])
