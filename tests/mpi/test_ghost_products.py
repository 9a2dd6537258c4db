"""Products of ghosts, exchanged or computed: the same results, what is sent, and what is held in memory."""

from __future__ import annotations

import graphs
import numpy as np
import pytest
from distributed import all_ranks, assert_tensors_close, engine, prepare, rejoin, train

from dorylus_hpc.comm.roles import Placement
from dorylus_hpc.config import make_config
from dorylus_hpc.engine.model import build_program, load_settings
from dorylus_hpc.graph.manifest import read_manifest
from dorylus_hpc.graph.store import read_part

pytestmark = pytest.mark.spread

FEATURES, CLASSES, HIDDEN = 9, 3, 4
MODELS = {
    "gat": {"model": "gat", "heads": 3, "output_heads": 2, "attention_dropout": 0.3},
    "gatv2": {"model": "gatv2", "heads": 2, "output_heads": 3},
}
# Numbers that a row of a layer takes over ranks, of so many heads and so many columns in all.
FORWARD = {"gat": lambda heads, width: width + heads, "gatv2": lambda heads, width: width}
BACKWARD = {
    "gat": lambda heads, width: width + 4 * heads,
    "gatv2": lambda heads, width: 2 * width + 3 * heads,
}


def rows_between_ranks(folder, size, direction):
    """Count, from the part files alone, the rows that go to another rank in one exchange."""
    manifest = read_manifest(folder)
    placement, sent = Placement(len(manifest.parts), size), set()
    for index in range(len(manifest.parts)):
        part, host = read_part(folder, manifest, index), placement.host(index)
        edges = part.in_edges if direction == "in" else part.out_edges
        for gid, owner in zip(edges.ghost_gid.tolist(), edges.ghost_part.tolist(), strict=True):
            if placement.host(owner) != host:
                sent.add((host, gid))
    return len(sent)


@pytest.mark.parametrize("input_dropout", [0.0, 0.3])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("model", MODELS)
def test_results_and_bytes(comm, shared_tmp_path, model, sparse, input_dropout):
    graph = graphs.directed_random(80, 400, features=FEATURES, classes=CLASSES, sparse=sparse)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=comm.size + 1, partitioner="hash")
    options = {"dtype": "float64", "epochs": 4, "hidden": HIDDEN, "intervals": 3, "dropout": 0.2}
    options |= {"input_dropout": input_dropout, **MODELS[model]}
    results = {
        how: train(comm, *all_ranks(comm), folder, shared_tmp_path / how, ghost_products=how, **options)
        for how in ("compute", "exchange")
    }
    if comm.rank == 0:
        computed, exchanged = results["compute"], results["exchange"]
        np.testing.assert_allclose(computed.summary["loss"], exchanged.summary["loss"], rtol=1e-12)
        assert_tensors_close("weights", computed.weights["last"], exchanged.weights["last"], 1e-11)
        rows = {way: rows_between_ranks(folder, comm.size, way) for way in ("in", "out")}
        assert all(rows.values()) == (comm.size > 1)
        layers = [(options["heads"], options["heads"] * HIDDEN)]
        layers.append((options["output_heads"], options["output_heads"] * CLASSES))
        forward, backward = (
            [8 * columns[model](*layer) for layer in layers] for columns in (FORWARD, BACKWARD)
        )
        every = rows["in"] * forward[1] + rows["out"] * sum(backward)
        sent = {how: result.summary["ghost_bytes_per_epoch"] for how, result in results.items()}
        assert sent["compute"] == every
        assert sent["exchange"] == every + rows["in"] * forward[0]
    rejoin(comm)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("norm", ["none", "row"])
def test_features_of_ghosts_are_not_held(comm, shared_tmp_path, norm, sparse):
    graph = graphs.directed_random(70, 300, features=FEATURES, sparse=sparse)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=comm.size + 2, partitioner="hash")
    for how, ghosts in (("compute", 1), ("exchange", 0)):
        config = make_config({"model": "gat", "ghost_products": how, "feature_norm": norm})
        program = build_program(config, n_features=FEATURES, n_classes=4, sparse_features=sparse)
        settings = load_settings(config, program=program)
        with engine(comm, folder, program, settings, intervals=3) as (_, loaded):
            for part in loaded.parts:
                assert part.n_in_ghosts
                assert part.features.shape == (part.n_own + ghosts * part.n_in_ghosts, FEATURES)
