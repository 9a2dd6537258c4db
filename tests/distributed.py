"""What the tests of tests/mpi share: groups of ranks, prepared folders, both sides of a comparison.

The engine's side runs over the ranks of a group; the oracle's side needs only the graph in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from dorylus_hpc.api import fit
from dorylus_hpc.comm.waiting import wait_all
from dorylus_hpc.config import make_config
from dorylus_hpc.engine.executor import Executor
from dorylus_hpc.engine.loading import LoadSettings, load_graph
from dorylus_hpc.engine.model import build_program, load_settings, resolve_intervals
from dorylus_hpc.engine.runner import Runner
from dorylus_hpc.graph.manifest import read_manifest
from dorylus_hpc.graph.preparation import prepare_folder
from dorylus_hpc.nn.objective import Objective
from dorylus_hpc.nn.oracle import GcnOracle, OracleSettings, train_oracle
from dorylus_hpc.nn.oracle_gat import NAMES as GAT_NAMES
from dorylus_hpc.nn.oracle_gat import gat_oracle, gatv2_oracle
from dorylus_hpc.nn.oracle_gin import NAMES as GIN_NAMES
from dorylus_hpc.nn.oracle_gin import GinOracle
from dorylus_hpc.nn.oracle_sage import NAMES as SAGE_NAMES
from dorylus_hpc.nn.oracle_sage import sage_oracle
from dorylus_hpc.nn.params import plan_layout

MOST_GRAPH_SERVERS, MOST_SERVERS = 4, 2

# (graph servers, parameter servers): those that do not fit in the job are deselected.
GROUPS = [
    pytest.param(graph_servers, servers, id=f"{graph_servers}+{servers}", marks=pytest.mark.ranks(need))
    for graph_servers in range(1, MOST_GRAPH_SERVERS + 1)
    for servers in range(MOST_SERVERS + 1)
    if (need := graph_servers + servers)
]
# Parameter servers of a job in which all the other ranks are graph servers.
SERVERS = [pytest.param(p, id=f"servers{p}", marks=pytest.mark.ranks(p + 1)) for p in range(MOST_SERVERS + 1)]


def all_ranks(comm, servers=0):
    """Return (graph servers, parameter servers) for the whole job, the most if it is a large one."""
    return min(comm.size - servers, MOST_GRAPH_SERVERS), servers


def fitting(size):
    """Return the groups (graph servers, parameter servers) that `size` ranks have room for."""
    return [group.values for group in GROUPS if sum(group.values) <= size]


def rejoin(comm):
    """Wait for all ranks, asleep: those with work to do need the cores."""
    wait_all([comm.Ibarrier()])


@contextmanager
def first_ranks(comm, n) -> Iterator:
    """Give the first n ranks a communicator of their own, the others None; all meet at the end."""
    group = comm.Create(comm.Get_group().Incl(range(n)))
    yield group if comm.rank < n else None
    if comm.rank < n:
        group.Free()
    rejoin(comm)


def prepare(comm, graph, folder, *, owner=None, **options):
    """Prepare a graph on rank 0, `owner` being an array of parts by vertex; return the folder."""
    if comm.rank == 0:
        if owner is not None:
            file = Path(folder).with_suffix(".owner.npy")
            np.save(file, owner)
            options["partitioner"] = f"file:{file}"
        prepare_folder(graph, folder, report=lambda line: None, **options)
    rejoin(comm)
    return folder


def train(comm, graph_servers, servers, folder, run_dir, **options):
    """Train on the first ranks of `comm`; return the result there, None elsewhere."""
    with first_ranks(comm, graph_servers + servers) as group:
        if group is None:
            return None
        return fit(folder, comm=group, run_dir=run_dir, **{"servers": servers, "threads": 1, **options})


@contextmanager
def engine(comm, folder, program, settings, *, intervals=1, threads=1, **options) -> Iterator:
    """Give a Runner over the ranks of `comm`, and what it runs on."""
    manifest = read_manifest(folder)
    with Executor(threads) as executor:
        graph = load_graph(comm, folder, manifest, settings, executor=executor)
        runner = Runner(
            graph,
            program,
            plan_layout(program.params, 1),
            executor,
            dtype=settings.dtype,
            intervals=intervals,
            n_labelled=manifest.train,
            objective=Objective(manifest.several_classes),
            **options,
        )
        yield runner, graph
        runner.close()


def gather_vertices(comm, runner, graph):
    """Return the logits of all vertices in the order of the input, on rank 0."""
    pieces = comm.gather([(part.gids, runner.logits(part.index)) for part in graph.parts])
    if pieces is None:
        return None
    pieces = [piece for rank in pieces for piece in rank]
    gids = np.concatenate([gid for gid, _ in pieces])
    np.testing.assert_array_equal(np.sort(gids), np.arange(len(gids)))
    return np.concatenate([rows for _, rows in pieces])[np.argsort(gids)]


def forward(comm, graph_servers, folder, tensors, **options):
    """Return the logits of the engine's forward without dropout, on rank 0 of `comm`; None elsewhere."""
    with first_ranks(comm, graph_servers) as group:
        if group is None:
            return None
        config, manifest = make_config(options), read_manifest(folder)
        program = build_program(
            config,
            n_features=manifest.features,
            n_classes=manifest.classes,
            sparse_features=manifest.feature_kind == "csr",
        )
        intervals = resolve_intervals(config, manifest, program)
        with engine(group, folder, program, load_settings(config), intervals=intervals, trains=False) as (
            runner,
            graph,
        ):
            runner.evaluate(tensors)
            return gather_vertices(group, runner, graph)


# ---- the oracle's side ----

DEFAULTS = {name: getattr(make_config({}), name) for name in OracleSettings.__dataclass_fields__}
ORACLES = {"gcn": GcnOracle, "sage": sage_oracle, "gin": GinOracle, "gat": gat_oracle, "gatv2": gatv2_oracle}
NOT_THE_ORACLES = (
    "intervals",
    "threads",
    "servers",
    "mode",
    "layer_order",
    "constant_aggregate",
    "ghost_products",
    "save_memory",
)  # options that may change no result


def adjacency_of(graph, *, duplicates="merge", undirected=False):
    """Return the matrix that preparation should make of a graph, loops left to the oracle.

    Repeated arcs are merged, added up ("keep"), or stay entries of their own ("apart").
    """
    weights = np.ones(graph.n_edges) if graph.weights is None else graph.weights
    arcs = sp.coo_array((weights, (graph.edges.rows(), graph.indices)), shape=(graph.n, graph.n))
    if duplicates == "apart":
        return arcs
    matrix = arcs.tocsr()
    if duplicates == "merge" and graph.weights is None:
        matrix.data[:] = 1
    return matrix.maximum(matrix.T).tocsr() if undirected else matrix


def oracle_of(graph, adjacency=None, **options):
    """Train the oracle with the engine's options, its defaults where none is given."""
    model = options.pop("model", "gcn")
    settings = {name: value for name, value in options.items() if name not in NOT_THE_ORACLES}
    settings = OracleSettings(**{**DEFAULTS, **settings})
    dropped = settings.input_dropout > 0 or (settings.dropout > 0 and settings.layers > 1)
    dropped |= settings.attention_dropout > 0
    if not dropped:  # the training forward is an evaluation too, so every epoch has one
        settings = replace(settings, eval_every=1)
    adjacency = adjacency_of(graph) if adjacency is None else adjacency
    return train_oracle(
        adjacency,
        graph.features,
        graph.labels,
        graph.split,
        graph.n_classes,
        settings,
        ORACLES[model],
    )


def named(params, **options):
    """Return the oracle's tensors by name, of a model of these options."""
    model, aggregator, epsilon = (
        options.get(name, default)
        for name, default in (("model", "gcn"), ("aggregator", "mean"), ("epsilon", "learned"))
    )
    kinds = {"gcn": "Wb", "sage": SAGE_NAMES[aggregator], "gin": GIN_NAMES[epsilon], **GAT_NAMES}[model]
    return {
        f"{kind}{layer}": tensor
        for layer, tensors in enumerate(params, start=1)
        for kind, tensor in zip(kinds, tensors, strict=True)
    }


def settings_of(dtype="float64", **options):
    return LoadSettings(np.dtype(dtype), **options)


# ---- comparison ----


def distance(got, want, scale=None):
    """Return max |got - want| / scale, by default max |want|; a NaN or Inf is infinitely far."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    if want.size == 0:
        return 0.0
    scale = np.abs(want).max() if scale is None else scale
    apart = np.abs(got.astype(np.float64) - want).max()
    far = np.inf if apart else 0.0
    apart = apart / scale if scale else far
    return float(apart) if np.isfinite(apart) else np.inf


def assert_close(what, got, want, tolerance, scale=None):
    """Assert that two arrays are equal normwise."""
    apart = distance(got, want, scale)
    assert apart <= tolerance, f"{what}: {apart:.3g} apart, allowed are {tolerance:g}"


def assert_tensors_close(what, got, want, tolerance):
    """Assert that tensors by name are equal normwise, each by itself."""
    assert list(got) == list(want)
    for name in want:
        assert_close(f"{what} {name}", got[name], want[name], tolerance)


def assert_accuracies(summary, oracle):
    """Assert that the metric of all sets, and the choice of the best weights, are the oracle's."""
    best, last = oracle.best_version, max(oracle.accuracies)
    assert summary["best_epoch"] == best
    for role in ("train", "val", "test"):
        for which, version in (("best_validation", best), ("last", last)):
            want = oracle.accuracies[version][role]
            found = summary["metric"][role][which]
            if np.isnan(want):
                assert found is None, (role, which)
                continue
            assert found == pytest.approx(want, rel=1e-12), (role, which)
            if summary["metric"]["name"] == "accuracy":
                assert summary[f"{role}_accuracy"][which] == found == want, (role, which)


def assert_equals_oracle(comm, graph, folder, result, group, tolerance=1e-12, adjacency=None, **options):
    """Assert that a float64 run, its weights, accuracies and predictions are the oracle's. Collective.

    Parameters
    ----------
    result, group
        From `train`, and its (graph servers, parameter servers).
    adjacency
        If not what `adjacency_of` makes of the graph.
    **options
        Of the run.
    """
    tensors = comm.bcast(result.weights["last"] if comm.rank == 0 else None)
    logits = forward(comm, group[0], folder, tensors, **options)
    if comm.rank == 0:
        oracle = oracle_of(graph, adjacency, **options)
        assert_close("losses", result.summary["loss"], oracle.losses, tolerance)
        assert_tensors_close("weights", result.weights["last"], named(oracle.params, **options), tolerance)
        assert_close("logits", logits, oracle.logits, tolerance)
        assert_accuracies(result.summary, oracle)
    rejoin(comm)
