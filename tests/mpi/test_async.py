"""The asynchronous mode over MPI: exact in its first epoch, within its bound after it, never torn."""

from __future__ import annotations

import json
from functools import partial

import graphs
import numpy as np
import pytest
from distributed import (
    SERVERS,
    all_ranks,
    assert_close,
    assert_tensors_close,
    named,
    oracle_of,
    prepare,
    train,
)

from dorylus_hpc.api import infer
from dorylus_hpc.graph.data import VALIDATION
from dorylus_hpc.nn.oracle import OracleSettings, start_params

pytestmark = pytest.mark.spread

directed = partial(graphs.directed_random, 60, 300)

# Every order of every layer, dense and sparse features.
MODELS = {
    "constant aggregate": (partial(directed, features=6), {"hidden": 8}),
    "transform first": (partial(directed, features=20, sparse=True), {"hidden": 5, "layers": 3}),
    "last layer widens": (partial(directed, features=9, classes=11), {"hidden": 4, "layers": 3}),
}
DROPOUTS = {"dropout": 0.4, "input_dropout": 0.3}


@pytest.mark.parametrize("weight_update", ["epoch", "interval"])
@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("model", MODELS)
def test_the_first_epoch_is_exact(comm, shared_tmp_path, model, servers, weight_update):
    build, options = MODELS[model]
    graph = build()
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=5)
    options = {"dtype": "float64", "epochs": 1, "intervals": 4, "optimizer": "sgd", **DROPOUTS, **options}
    options["lr"] = 1.0 if weight_update == "epoch" else 1e-7  # at once: later intervals see earlier steps
    how = {"mode": "async", "staleness": 2, "weight_update": weight_update, "threads": 2}
    result = train(
        comm, *all_ranks(comm, servers), folder, shared_tmp_path / "run", weight_decay=0.0, **how, **options
    )
    if result is not None and comm.rank == 0:
        oracle = oracle_of(graph, weight_decay=0.0, **options)
        assert result.summary["staleness"] == {"bound": 2, "max_lead": 0, "max_read_age": 0}
        tolerance = 1e-12 if weight_update == "epoch" else 1e-6
        assert_close("loss", result.summary["loss"], oracle.losses, tolerance)
        start = named(start_params(graph.n_features, graph.n_classes, settings(options)))
        got = {name: (start[name] - last) / options["lr"] for name, last in result.weights["last"].items()}
        gradients = named(oracle.first_gradients)
        assert_tensors_close("gradient of", got, gradients, 1e-11 if weight_update == "epoch" else 1e-5)


def settings(options):
    """Return the oracle's settings of a run's options."""
    known = OracleSettings.__dataclass_fields__
    return OracleSettings(**{name: value for name, value in options.items() if name in known})


@pytest.mark.parametrize(
    "model, staleness, weight_update",
    [
        ("constant aggregate", 0, "epoch"),
        ("constant aggregate", 1, "interval"),
        ("transform first", 1, "epoch"),
        ("transform first", 10**6, "interval"),
        ("last layer widens", 3, "epoch"),
        ("last layer widens", 0, "interval"),
    ],
)
def test_stale_rows_of_unchanged_weights_change_nothing(
    comm, shared_tmp_path, model, weight_update, staleness
):
    """Without dropout, and with steps too small to matter, every epoch is the first: torn rows would show."""
    build, options = MODELS[model]
    graph, servers = build(), min(1, comm.size - 1)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=max(4, comm.size))
    epochs, lr = 12, 1e-6
    options = {"dtype": "float64", "dropout": 0.0, "intervals": 5, "optimizer": "sgd", "lr": lr, **options}
    how = {"mode": "async", "staleness": staleness, "weight_update": weight_update, "threads": 2}
    result = train(
        comm,
        *all_ranks(comm, servers),
        folder,
        shared_tmp_path / "run",
        weight_decay=0.0,
        epochs=epochs,
        straggler=2.0,
        **how,
        **options,
    )
    if comm.rank == 0:
        oracle = oracle_of(graph, weight_decay=0.0, epochs=1, **options)
        summary = result.summary
        assert summary["epochs"] == epochs
        assert_close("losses", summary["loss"], np.repeat(oracle.losses, epochs), 1e-6)
        start = named(start_params(graph.n_features, graph.n_classes, settings(options)))
        moved = {name: (start[name] - last) / (lr * epochs) for name, last in result.weights["last"].items()}
        assert_tensors_close("gradient of", moved, named(oracle.first_gradients), 1e-5)
        assert 0 <= summary["staleness"]["max_lead"] <= staleness
        assert 0 <= summary["staleness"]["max_read_age"] <= staleness + 1
        if weight_update == "epoch":
            assert summary["weight_versions"] <= staleness + 2


@pytest.mark.parametrize("staleness", [0, 1])
def test_it_learns_what_pipe_learns(comm, shared_tmp_path, staleness):
    graph, group = graphs.directed_random(120, 700, features=12), all_ranks(comm)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=4)
    options = {"epochs": 150, "hidden": 16, "intervals": 4, "dropout": 0.0, "weight_decay": 0.0, "lr": 0.02}
    losses = {}
    for mode in ("pipe", "async"):
        how = {"mode": mode, "staleness": staleness}
        result = train(comm, *group, folder, shared_tmp_path / mode, **how, **options)
        losses[mode] = None if result is None else result.summary["loss"]
    if comm.rank == 0:
        assert losses["async"][0] == losses["pipe"][0]
        assert min(losses["async"][-30:]) < 0.5 * losses["async"][0]  # no two runs are alike


@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("sparse", [False, True])
def test_tasks_cut_for_workers_far_away_give_the_same_bits(comm, shared_tmp_path, sparse, servers):
    graph, group = directed(features=9, sparse=sparse), all_ranks(comm, servers)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=4)
    options = {"epochs": 3, "intervals": 3, "hidden": 5, "layers": 3, **DROPOUTS}
    seen = set()
    for number, how in enumerate([{}, {"dense_delay": 0.001}, {"dense_delay": 0.001, "mode": "nopipe"}]):
        result = train(comm, *group, folder, shared_tmp_path / f"run{number}", **how, **options)
        seen.add(result and result.summary["weights_sha256"])
    assert len(seen) == 1


# ---- a goal


def read_lines(run_dir):
    """Return what a run wrote of its epochs."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


GOAL = {"epochs": 60, "hidden": 8, "intervals": 3, "lr": 0.05, "dropout": 0.2}


@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize(
    "goal", [{"patience": 4}, {"target_accuracy": 0.3}, {"patience": 4, "eval_every": 3}]
)
def test_exact_runs_stop_at_the_same_epoch(comm, shared_tmp_path, goal, servers):
    """Where a run stops is a matter of its accuracies alone, known from the run that goes on."""
    graph = graphs.directed_random(90, 500, features=9)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=4)
    every = goal.get("eval_every", 1)
    group = all_ranks(comm, servers)
    whole = train(comm, *group, folder, shared_tmp_path / "whole", **{**GOAL, "eval_every": every})
    outcomes = []
    for mode in ("nopipe", "pipe"):
        result = train(comm, *group, folder, shared_tmp_path / mode, mode=mode, **{**GOAL, **goal})
        if result is not None:
            outcomes.append(result.summary)
    if comm.rank != 0 or whole is None:
        return
    lines = read_lines(shared_tmp_path / "whole")
    best, best_version, end = -1.0, 0, GOAL["epochs"]
    for line in lines:
        version, accuracy = line["epoch"] - 1, line["val_accuracy"]
        if accuracy is None:
            continue
        if accuracy > best:
            best, best_version = accuracy, version
        if accuracy >= goal.get("target_accuracy", 2.0) or version - best_version >= goal.get(
            "patience", 10**9
        ):
            end = line["epoch"]
            break
    assert end < GOAL["epochs"]
    for summary in outcomes:
        assert summary["epochs"] == end
        assert summary["loss"] == whole.summary["loss"][:end]
    assert outcomes[0]["weights_sha256"] == outcomes[1]["weights_sha256"]


@pytest.mark.parametrize("switch_margin", [0.0, 0.25])
@pytest.mark.parametrize("weight_update", ["epoch", "interval"])
@pytest.mark.parametrize("servers", SERVERS)
def test_an_asynchronous_run_stops_and_its_end_is_whole(
    comm, shared_tmp_path, servers, weight_update, switch_margin
):
    """Alone, or after it has gone on in pipe with evaluations of before still under way."""
    graph = graphs.directed_random(90, 500, features=9)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=4)
    how = {"mode": "async", "staleness": 2, "weight_update": weight_update, "target_accuracy": 0.3}
    how["switch_margin"] = switch_margin
    run_dir = shared_tmp_path / "run"
    result = train(comm, *all_ranks(comm, servers), folder, run_dir, **how, **{**GOAL, "epochs": 400})
    if comm.rank == 0 and result is not None:
        summary = result.summary
        lines = read_lines(run_dir)
        assert len(lines) == summary["epochs"] == len(summary["loss"]) < 400
        assert max(line["val_accuracy"] for line in lines) >= 0.3
        assert summary["val_accuracy"]["best_validation"] >= 0.3
        for which, key in (("best", "best_validation"), ("last", "last")):
            found = infer(run_dir, folder, weights=which)
            members = graph.split == VALIDATION
            right = found.classes[members] == graph.labels[members]
            assert right.mean() == pytest.approx(summary["val_accuracy"][key], abs=1e-12)


@pytest.mark.parametrize("weight_update", ["epoch", "interval"])
@pytest.mark.parametrize("servers", SERVERS)
def test_near_the_target_it_goes_on_in_pipe(comm, shared_tmp_path, servers, weight_update):
    """Unchanged weights again: after the switch the losses are still those of the first epoch."""
    graph = graphs.directed_random(90, 500, features=9)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=5)
    options = {
        "dtype": "float64",
        "dropout": 0.0,
        "hidden": 6,
        "intervals": 4,
        "optimizer": "sgd",
        "lr": 1e-9,
    }
    how = {"mode": "async", "staleness": 2, "weight_update": weight_update, "target_accuracy": 1.0}
    result = train(
        comm, *all_ranks(comm, servers), folder, shared_tmp_path / "run", epochs=40, weight_decay=0.0,
        switch_margin=1.0, **how, **options,
    )  # fmt: skip
    if comm.rank == 0 and result is not None:
        oracle = oracle_of(graph, weight_decay=0.0, epochs=1, **options)
        assert result.summary["epochs"] == 40
        assert_close("losses", result.summary["loss"], np.repeat(oracle.losses, 40), 1e-6)
