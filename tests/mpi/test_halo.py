"""The halo exchange by itself: every ghost row becomes its owner's, and each row travels once to a rank."""

from __future__ import annotations

import graphs
import numpy as np
import pytest
import scipy.sparse as sp
from distributed import prepare, settings_of

from dorylus_hpc.comm import features
from dorylus_hpc.comm.features import exchange_csr
from dorylus_hpc.comm.halo import HaloExchange, plan_halo
from dorylus_hpc.comm.roles import Placement
from dorylus_hpc.comm.tags import Kind
from dorylus_hpc.engine.loading import load_graph
from dorylus_hpc.graph.manifest import read_manifest
from dorylus_hpc.graph.partition import build_parts
from dorylus_hpc.graph.store import read_part

pytestmark = pytest.mark.spread

KINDS = {"in": Kind.HALO_IN, "out": Kind.HALO_OUT}


class Wire:
    """A communicator that notes what is sent, and to whom."""

    def __init__(self, comm):
        self.comm, self.sent = comm, []

    def Isend(self, message, dest, tag):  # noqa: N802 (mpi4py's name)
        self.sent.append((dest, message))
        return self.comm.Isend(message, dest=dest, tag=tag)

    def Irecv(self, message, source, tag):  # noqa: N802
        return self.comm.Irecv(message, source=source, tag=tag)


class Side:
    """One direction of a graph cut into parts, as this rank sees it."""

    def __init__(self, comm, parts, direction):
        self.placement = Placement(len(parts), comm.size)
        self.all = {p.index: p.in_edges if direction == "in" else p.out_edges for p in parts}
        self.gids = {p.index: p.gid for p in parts}
        self.hosted = list(self.placement.hosted(comm.rank))
        self.wire = Wire(comm)
        self.plan = plan_halo(comm.rank, self.placement, {p: self.all[p] for p in self.hosted})
        self.exchange = HaloExchange(self.wire, self.plan, KINDS[direction])

    def local_gids(self, part):
        return np.concatenate([self.gids[part], self.all[part].ghost_gid])

    def arrays(self, width, dtype=np.float64, version=0):
        """Return row tensors with own rows filled in, and NaN for ghosts."""
        made = {}
        for part in self.hosted:
            made[part] = rows_of(self.local_gids(part), width, dtype, version)
            made[part][len(self.gids[part]) :] = np.nan
        return made

    def check(self, arrays, version=0):
        for part, array in arrays.items():
            want = rows_of(self.local_gids(part), array.shape[1], array.dtype, version)
            np.testing.assert_array_equal(array, want)


def rows_of(gids, width, dtype, version):
    """Return rows that tell vertex, column and version; exact in float32."""
    return (gids[:, None] * 64 + np.arange(width) + version * 10_000).astype(dtype)


def cut(n_parts, seed, n=50):
    """Cut a directed graph at random; the last of many parts stays empty."""
    graph = graphs.directed_random(n, 5 * n, seed=seed)
    filled = n_parts - 1 if n_parts > 3 else n_parts
    owner = np.random.default_rng(seed).integers(0, filled, n)
    return list(build_parts(graph, owner, parts=n_parts))


@pytest.fixture(params=["one part a rank", "several parts a rank", "a part for some, two for others"])
def n_parts(request, comm):
    size = comm.size
    return {"o": size, "s": 3 * size + 1, "a": size + (size + 1) // 2}[request.param[0]]


@pytest.fixture(params=["in", "out"])
def side(request, comm, n_parts):
    return Side(comm, cut(n_parts, seed=n_parts), request.param)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 7])
def test_ghosts_become_their_owners_rows(side, width, dtype):
    for version in range(3):  # a buffer that is used again holds what it held before
        arrays = side.arrays(width, dtype, version)
        pending = side.exchange.begin(arrays, epoch=version, layer=1)
        assert pending.end() >= 0
        side.check(arrays, version)


def test_other_graphs(comm):
    for seed in range(8):
        n = 5 + 9 * seed
        parts = cut(comm.size + seed % 5, seed, n)
        for direction in KINDS:
            side = Side(comm, parts, direction)
            arrays = side.arrays(2)
            side.exchange.begin(arrays).end()
            side.check(arrays)


def test_rows_travel_once(comm, side):
    arrays = side.arrays(3)
    side.exchange.begin(arrays).end()
    mine = np.concatenate([side.gids[part] for part in side.hosted])
    want = {}
    for peer in range(comm.size):
        wanted = [side.all[part].ghost_gid for part in side.placement.hosted(peer)]
        count = np.isin(mine, np.concatenate(wanted)).sum()
        if peer != comm.rank and count:
            want[peer] = count
    got = {}
    for peer, (_, rows, _) in side.wire.sent:
        assert rows > 0
        got[peer] = got.get(peer, 0) + rows
    assert got == want
    assert side.plan.rows_sent() == sum(want.values())
    assert side.exchange.row_bytes(3, 8) == sum(want.values()) * 3 * 8


def test_plans_agree(comm, side):
    """What a rank sends, vertex by vertex, is what the other expects, message by message."""
    sends = [(m.rank, m.source, side.gids[m.source][m.lids].tolist()) for m in side.plan.outgoing]
    expects = []
    for message in side.plan.incoming:
        gids = np.full(message.n_rows, -1)
        for delivery in message.deliveries:
            ghosts = side.all[delivery.part].ghost_gid[slice(*delivery.ghosts)]
            pick = slice(None) if delivery.pick is None else delivery.pick
            assert np.isin(gids[pick], [-1, *ghosts]).all()
            gids[pick] = ghosts
        expects.append((message.rank, message.source, gids.tolist()))
    all_sends, all_expects = comm.allgather(sends), comm.allgather(expects)
    for a in range(comm.size):
        for b in range(comm.size):
            sent = [message[1:] for message in all_sends[a] if message[0] == b]
            expected = [message[1:] for message in all_expects[b] if message[0] == a]
            assert sent == expected
            assert a != b or not sent
    for _, _, gids in sends:
        assert len(set(gids)) == len(gids)


def test_ghosts_are_filled_once(side):
    for part in side.hosted:
        ranges = [d.ghosts for m in side.plan.incoming for d in m.deliveries if d.part == part]
        ranges += [copy.ghosts for copy in side.plan.copies if copy.part == part]
        filled = [ghost for start, stop in ranges for ghost in range(start, stop)]
        assert sorted(filled) == list(range(side.all[part].n_ghost))


def test_nothing_to_send(comm):
    """A graph without ghosts, in several parts: no message, and no wait for one."""
    parts = list(build_parts(graphs.edgeless(), np.arange(9) % comm.size, parts=comm.size + 1))
    side = Side(comm, parts, "in")
    arrays = side.arrays(4)
    side.exchange.begin(arrays).end()
    side.check(arrays)
    assert side.wire.sent == []


def test_both_directions_at_once(comm, n_parts):
    """Neither exchange reads the other's messages, whichever begins or ends first on a rank."""
    parts = cut(n_parts, seed=4)
    sides = [Side(comm, parts, direction) for direction in KINDS]
    for turn in range(4):
        arrays = [side.arrays(5, version=turn + 10 * k) for k, side in enumerate(sides)]
        order = [0, 1] if (comm.rank + turn) % 2 else [1, 0]
        pending = {k: sides[k].exchange.begin(arrays[k], epoch=turn, layer=2) for k in order}
        for k in order if turn % 2 else reversed(order):
            pending[k].end()
            sides[k].check(arrays[k], version=turn + 10 * k)


def test_a_loaded_graph_has_both_directions(comm, shared_tmp_path):
    """The exchanges that a run works with may overlap too, begun in either order."""
    folder, graph = shared_tmp_path / "graph", graphs.directed_random(50, 250)
    prepare(comm, graph, folder, parts=comm.size + 1, partitioner="hash")
    manifest = read_manifest(folder)
    loaded = load_graph(comm, folder, manifest, settings_of())
    parts = [read_part(folder, manifest, index) for index in loaded.placement.hosted(comm.rank)]
    ways = [(loaded.halo_in, "in_edges"), (loaded.halo_out, "out_edges")]
    wanted, arrays = [], []
    for k, (_, edges) in enumerate(ways):
        gids = {part.index: np.concatenate([part.gid, getattr(part, edges).ghost_gid]) for part in parts}
        wanted.append({index: rows_of(gid, 3, np.float64, k) for index, gid in gids.items()})
        arrays.append({index: rows.copy() for index, rows in wanted[k].items()})
        for part in parts:
            arrays[k][part.index][part.n_own :] = np.nan
    order = [0, 1] if comm.rank % 2 else [1, 0]
    pending = [ways[k][0].begin(arrays[k]) for k in order]
    for exchange in pending:
        exchange.end()
    for got, want in zip(arrays, wanted, strict=True):
        for index, rows in want.items():
            np.testing.assert_array_equal(got[index], rows)


def test_two_layers_at_once(side):
    """Exchanges of rows of another width may overlap, and end in the other order."""
    narrow, wide = side.arrays(2, version=1), side.arrays(6, version=2)
    first = side.exchange.begin(narrow, epoch=1, layer=1)
    second = side.exchange.begin(wide, epoch=1, layer=2)
    second.end()
    first.end()
    side.check(narrow, version=1)
    side.check(wide, version=2)


# ---- input features ----


def sparse_rows(gids, dtype):
    """Return CSR rows of random lengths (empty ones, too), a function of the vertex alone."""
    dense = np.zeros((len(gids), 11), dtype)
    for row, gid in enumerate(gids):
        rng = np.random.default_rng(gid)
        columns = rng.permutation(11)[: rng.integers(0, 9) * (gid % 4 > 0)]
        dense[row, columns] = rng.standard_normal(len(columns))
    return sp.csr_array(dense)


@pytest.mark.parametrize("chunk", [3, 1 << 28])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sparse_and_dense_features_agree(side, monkeypatch, dtype, chunk):
    monkeypatch.setattr(features, "_CHUNK", chunk)  # elements a message
    n_ghosts = {part: side.all[part].n_ghost for part in side.hosted}
    own = {part: sparse_rows(side.gids[part], dtype) for part in side.hosted}
    got = exchange_csr(side.exchange, n_ghosts, own)
    dense = {
        part: np.vstack([rows.toarray(), np.full((n_ghosts[part], 11), np.nan)]) for part, rows in own.items()
    }
    dense = {part: rows.astype(dtype) for part, rows in dense.items()}
    side.exchange.begin(dense).end()
    for part in side.hosted:
        want = sparse_rows(side.local_gids(part), dtype)
        assert got[part].dtype == dense[part].dtype == dtype
        np.testing.assert_array_equal(dense[part], want.toarray())
        np.testing.assert_array_equal(got[part].indptr, want.indptr)
        np.testing.assert_array_equal(got[part].indices, want.indices)
        np.testing.assert_array_equal(got[part].data, want.data)
