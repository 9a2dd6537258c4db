"""Loading beside the set-up: every bit as if all had been read first, and the same errors on all ranks."""

from __future__ import annotations

import json
import time

import graphs
import numpy as np
import pytest
from distributed import all_ranks, engine, fitting, prepare, rejoin, settings_of, train

from dorylus_hpc.api import fit
from dorylus_hpc.comm.failure import AgreedError
from dorylus_hpc.config import make_config
from dorylus_hpc.engine import feature_loader
from dorylus_hpc.engine.model import build_program, load_settings
from dorylus_hpc.graph.feature_norm import (
    column_sums,
    normalise_rows,
    squared_deviations,
    standardise,
    statistics,
)
from dorylus_hpc.graph.manifest import read_manifest
from dorylus_hpc.graph.part_file import StoredFeatures

pytestmark = pytest.mark.spread

FIRST_LAYERS = {
    "constant aggregate": {"input_dropout": 0.0, "hidden": 6},
    "aggregate-first": {"input_dropout": 0.3, "hidden": 30},
    "transform-first": {"input_dropout": 0.3, "hidden": 2},
}


def normalised(graph, kind):
    """Return what the engine should hold, by vertex, in float64."""
    if kind == "row":
        return normalise_rows(graph.features)
    if kind == "none":
        return graph.features
    sums = column_sums(graph.features)
    squares = squared_deviations(graph.features, sums[1:] / sums[0])
    return standardise(graph.features, statistics(sums[0], sums[1:], squares))


@pytest.mark.parametrize("slice_bytes", [1, 1 << 23])
@pytest.mark.parametrize("norm", ["none", "row", "standard"])
@pytest.mark.parametrize("first", FIRST_LAYERS)
def test_own_and_ghost_rows_are_there(comm, shared_tmp_path, monkeypatch, first, norm, slice_bytes):
    monkeypatch.setattr(feature_loader, "SLICE_BYTES", slice_bytes)
    graph, folder = graphs.directed_random(70, 300, features=9), shared_tmp_path / "graph"
    prepare(comm, graph, folder, parts=comm.size + 2, partitioner="hash")
    manifest = read_manifest(folder)
    program = build_program(
        make_config(FIRST_LAYERS[first]), n_features=9, n_classes=manifest.classes, sparse_features=False
    )
    settings = settings_of(feature_norm=norm)
    with engine(comm, folder, program, settings, intervals=3, saves_memory=False) as (_, loaded):
        want = normalised(graph, norm)
        for part in loaded.parts:
            assert part.n_in_ghosts
            if norm == "standard":  # sums of parts are added in another order
                np.testing.assert_allclose(part.features.x, want[part.features.gids], rtol=1e-12)
            else:
                np.testing.assert_array_equal(part.features.x, want[part.features.gids])


@pytest.mark.parametrize("width", [1, 15, 16, 17, 45])
def test_aggregate_takes_the_place_of_the_features(comm, shared_tmp_path, width):
    """Bit for bit what is made beside them, for any number of columns; none of them are left."""
    graph = graphs.directed_random(70, 300, features=width)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=comm.size + 2, partitioner="hash")
    manifest = read_manifest(folder)
    for options in ({}, {"model": "gin", "epsilon": "fixed", "dtype": "float64"}):
        config = make_config(options)
        program = build_program(config, n_features=width, n_classes=manifest.classes, sparse_features=False)
        assert program.replaces_input == "M1"
        settings = load_settings(config)
        kept = {}
        with engine(comm, folder, program, settings, intervals=3, saves_memory=False) as (runner, loaded):
            for part in loaded.parts:
                kept[part.index] = runner.tensors.own[part.index]["M1"]
                assert len(part.features.x) == part.n_own + part.n_in_ghosts
        with engine(comm, folder, program, settings, intervals=3, threads=2) as (runner, loaded):
            for part in loaded.parts:
                own = runner.tensors.own[part.index]
                assert own["M1"].any()
                np.testing.assert_array_equal(own["M1"], kept[part.index])
                assert "X" not in own
                assert part.features.shape == (0, width)


@pytest.mark.parametrize("mode", ["nopipe", "pipe"])
@pytest.mark.parametrize("norm", ["row", "standard"])
def test_slices_and_ranks_change_no_bit(comm, shared_tmp_path, monkeypatch, norm, mode):
    graph = graphs.directed_random(90, 500, features=20)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=4)
    want = None
    for number, (graph_servers, servers) in enumerate([*fitting(comm.size), all_ranks(comm)]):
        monkeypatch.setattr(feature_loader, "SLICE_BYTES", [1, 300, 1 << 20][number % 3])
        run_dir = shared_tmp_path / f"run{number}"
        how = {"epochs": 4, "intervals": 3, "mode": mode, "feature_norm": norm, "hidden": 5}
        result = train(comm, graph_servers, servers, folder, run_dir, **how)
        if result is not None:
            want = want or result.summary["weights_sha256"]
            assert result.summary["weights_sha256"] == want


def message_of(comm, folder, run_dir, **options):
    """Return what all ranks are told alike, before anything of the run was written."""
    with pytest.raises(AgreedError) as caught:
        fit(folder, comm=comm, run_dir=run_dir, epochs=1, **options)
    messages = comm.allgather(str(caught.value))
    assert len(set(messages)) == 1
    assert not (run_dir / "metrics.jsonl").read_text()
    assert not (run_dir / "checkpoint.h5").exists()
    return messages[0]


@pytest.mark.parametrize("norm", ["none", "row", "standard"])
@pytest.mark.parametrize("sparse", [False, True])
def test_damage_and_large_values_in_the_last_slice(comm, shared_tmp_path, monkeypatch, norm, sparse):
    if sparse and norm == "standard":
        return
    monkeypatch.setattr(feature_loader, "SLICE_BYTES", 64)
    graph = graphs.directed_random(50, 250, features=8, sparse=sparse)
    stored = graph.features.data if sparse else graph.features.reshape(-1)
    stored[-1] = 1e300
    last = comm.size
    owner = np.minimum(np.arange(50) * (last + 1) // 50, last)
    folder = prepare(
        comm, graph, shared_tmp_path / "graph", parts=int(owner.max()) + 1, owner=owner, order="none"
    )
    options = {"intervals": 4, "feature_norm": norm}
    told = message_of(comm, folder, shared_tmp_path / "run", **options)
    assert told == f"{folder}: a feature of part {last} does not fit in float32: use --dtype float64"
    entry = read_manifest(folder).parts[last]
    if comm.rank == 0:
        content = bytearray((folder / entry.file).read_bytes())
        content[entry.feature_bytes[-1] - 8] ^= 1
        (folder / entry.file).write_bytes(content)
    rejoin(comm)
    assert f"{entry.file}: checksum is" in message_of(comm, folder, shared_tmp_path / "run", **options)


def test_reading_goes_on_while_intervals_are_gathered(comm, shared_tmp_path, monkeypatch):
    monkeypatch.setattr(feature_loader, "SLICE_BYTES", 64)
    read = StoredFeatures.read

    def slowly(*arguments):
        time.sleep(0.02)
        read(*arguments)

    monkeypatch.setattr(StoredFeatures, "read", slowly)
    owner = np.arange(200 * comm.size) // 200
    folder = prepare(
        comm,
        graphs.path(200 * comm.size),
        shared_tmp_path / "graph",
        parts=int(owner.max()) + 1,
        owner=owner,
        order="none",
    )
    run_dir = shared_tmp_path / "run"
    how = {"epochs": 1, "intervals": 8, "trace_events": 10**5, "save_memory": "off"}
    train(comm, *all_ranks(comm), folder, run_dir, **how)
    if comm.rank:
        return
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    beside = []
    for rank in range(min(comm.size, 4)):
        spans = {"LD": [], "GA1": []}
        for event in events:
            if event["name"] in spans and event["pid"] == rank and event["args"]["epoch"] == 0:
                span = (event["ts"], event["ts"] + event["dur"], event["args"]["interval"])
                spans[event["name"]].append(span)
                lane = names[rank, event["tid"]]
                assert lane == ("io_0" if event["name"] == "LD" else "cpu_0")
        assert {interval for *_, interval in spans["LD"]} == {-1, *range(8)}
        loaded = {interval: stop for _, stop, interval in spans["LD"]}
        for begin, _, interval in spans["GA1"]:  # vertices of a path read those before and after
            assert all(
                begin >= loaded[one] for one in (interval - 1, interval, interval + 1) if one in range(8)
            )
        beside += [
            interval
            for begin, stop, interval in spans["GA1"]
            if any(start < stop and begin < end for start, end, _ in spans["LD"])
        ]
    assert beside  # on a busy machine a rank may be late
