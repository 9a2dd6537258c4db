"""Several classes a vertex, two classes by AUC, weights of classes: runs over ranks are the oracle's runs."""

from __future__ import annotations

import json
from functools import partial

import graphs
import numpy as np
import pytest
from distributed import (
    all_ranks,
    assert_close,
    assert_equals_oracle,
    named,
    oracle_of,
    prepare,
    rejoin,
    train,
)

from dorylus_hpc.api import infer
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.manifest import read_manifest
from dorylus_hpc.report.classification import roc_auc

several = partial(graphs.directed_random, 45, 200, several=True, classes=4, unlabelled=[1, 7, 30])
two = partial(graphs.undirected_random, 60, 150, classes=2, unlabelled=[5])
OPTIONS = {"dtype": "float64", "epochs": 7, "hidden": 6, "intervals": 3, "lr": 0.1}

# By name: graph, options. Between them: evaluations beside the training and by it, all metrics and weights.
CASES = {
    "several": (several, {}),
    "several, balanced": (several, {"class_weights": "balanced", "model": "sage", "metric": "f1-macro"}),
    "several, no dropout": (
        partial(several, sparse=True),
        {"dropout": 0.0, "metric": "accuracy", "optimizer": "sgd", "lr": 1.0},
    ),
    "balanced": (graphs.half_unlabelled, {"class_weights": "balanced", "metric": "f1-macro"}),
    "balanced, gin": (two, {"class_weights": "balanced", "model": "gin", "metric": "f1-micro"}),
    "auc": (two, {"metric": "auc", "eval_every": 2}),
    "auc, no dropout": (two, {"metric": "auc", "dropout": 0.0, "layers": 3}),
}


def lines_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES)
def test_cases(comm, shared_tmp_path, case):
    build, options = CASES[case]
    graph, options = build(), OPTIONS | options
    group = all_ranks(comm, list(CASES).index(case) % 2 if comm.size > 1 else 0)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=4, partitioner="hash")
    result = train(comm, *group, folder, shared_tmp_path / "run", **options)
    assert_equals_oracle(comm, graph, folder, result, group, **options)
    if comm.rank == 0:
        oracle = oracle_of(graph, **options)
        wanted = options.get("metric", "f1-micro")
        assert result.summary["metric"]["name"] == result.summary["config"]["metric"] == wanted
        for line in lines_of(shared_tmp_path / "run"):
            want = oracle.accuracies.get(line["epoch"] - 1, {})
            for role in ("train", "val", "test"):
                assert (line[f"{role}_metric"] is None) == (role not in want)
                assert role not in want or line[f"{role}_metric"] == pytest.approx(want[role], rel=1e-12)
        values = [seen["val"] for seen in oracle.accuracies.values()]
        assert len(set(values)) > 1  # or the best would be no choice


@pytest.mark.parametrize("kind", ["several", "two"])
def test_ranks_without_labels(comm, shared_tmp_path, kind):
    """All labelled vertices are in one part; what they are worth is known all the same."""
    odd = np.arange(1, 40, 2)
    options = OPTIONS | {"class_weights": "balanced", "dropout": 0.0 if kind == "two" else 0.4}
    if kind == "several":
        graph = graphs.directed_random(40, 160, several=True, unlabelled=odd)
    else:
        graph = graphs.directed_random(40, 160, classes=2, unlabelled=odd)
        options["metric"] = "auc"
    parts = 4
    owner = np.where(np.arange(40) % 2, 1 + np.arange(40) // 2 % (parts - 1), 0)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=parts, owner=owner)
    assert [entry.labelled for entry in read_manifest(folder).parts] == [20, 0, 0, 0]
    group = all_ranks(comm)
    result = train(comm, *group, folder, shared_tmp_path / "run", **options)
    assert_equals_oracle(comm, graph, folder, result, group, **options)


def test_weights_from_a_file(comm, shared_tmp_path):
    graph, weights = graphs.directed_random(), (0.25, 3.0, 0.0)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=4)
    file = shared_tmp_path / "weights.txt"
    if comm.rank == 0:
        file.write_text("0.25  # of the first\n3\n0\n")
    rejoin(comm)
    group = all_ranks(comm)
    result = train(comm, *group, folder, shared_tmp_path / "run", class_weights=str(file), **OPTIONS)
    if comm.rank == 0:
        oracle = oracle_of(graph, class_weights=weights, **OPTIONS)
        assert_close("losses", result.summary["loss"], oracle.losses, 1e-12)
        for name, tensor in named(oracle.params).items():
            assert_close(name, result.weights["last"][name], tensor, 1e-12)
        plain = oracle_of(graph, **OPTIONS)
        assert np.abs(oracle.losses - plain.losses).min() > 1e-3


@pytest.mark.parametrize("kind", ["several", "two"])
def test_the_report_is_that_of_the_predictions(comm, shared_tmp_path, kind):
    """In float32, and after an asynchronous run: the numbers of whatever weights came out."""
    graph = several() if kind == "several" else two()
    options = {"epochs": 6, "hidden": 6, "intervals": 2, "mode": "async", "metric": "f1-macro"}
    if kind == "two":
        options["metric"] = "auc"
    run_dir = shared_tmp_path / "run"
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=4)
    result = train(comm, comm.size, 0, folder, run_dir, **options)
    found = infer(run_dir, folder, comm=comm, weights="last")
    if comm.rank != 0:
        return
    for role, code in (("train", 1), ("val", 2), ("test", 3)):
        rows = graph.split == code
        said = result.summary["report"]["last"][role]
        labels, answers = graph.labels[rows], found.classes[rows]
        if kind == "two":
            assert said["confusion"] == [
                [int(((labels == a) & (answers == b)).sum()) for b in (0, 1)] for a in (0, 1)
            ]
            score = found.probabilities[rows, 1].astype(np.float64)
            auc = roc_auc(score[labels == 0], score[labels == 1])
            assert said["auc"] == pytest.approx(auc, abs=0.02)  # probabilities are rounded
            assert said["auc"] == result.summary["metric"][role]["last"]
            answers, labels = np.eye(2)[answers], np.eye(2)[labels]
        else:
            assert set(np.unique(answers)) <= {0, 1}
            np.testing.assert_array_equal(answers, found.probabilities[rows] > 0.5)
            assert said["f1_macro"] == result.summary["metric"][role]["last"]
        answers, labels = answers * (labels < 2), labels == 1  # of what is known
        right = (answers * labels).sum(axis=0)
        assert said["support"] == labels.sum(axis=0).astype(int).tolist()
        for name, below in (("precision", answers.sum(axis=0)), ("recall", labels.sum(axis=0))):
            want = [r / b if b else None for r, b in zip(right, below, strict=True)]
            assert said[name] == pytest.approx(want)


def test_the_metric_ends_a_run(comm, shared_tmp_path):
    """The target and patience go by it."""
    graph, group = two(), all_ranks(comm)
    folder = prepare(comm, graph, shared_tmp_path / "graph", parts=4)
    options = OPTIONS | {"metric": "auc", "epochs": 30, "lr": 0.3}
    whole = train(comm, *group, folder, shared_tmp_path / "whole", **options)
    seen = None if comm.rank else [line["val_metric"] for line in lines_of(shared_tmp_path / "whole")]
    seen = comm.bcast(seen)
    target = sorted(seen)[len(seen) // 2]
    reached = next(epoch for epoch, value in enumerate(seen) if value >= target)
    ended = train(comm, *group, folder, shared_tmp_path / "ended", target_accuracy=target, **options)
    if comm.rank == 0:
        assert ended.summary["metric"]["val"]["best_validation"] >= target
        assert ended.summary["best_epoch"] >= reached
        assert ended.summary["epochs"] == min(reached + 1, 30)  # an update after the evaluation that ends it
        assert whole.summary["epochs"] == 30


def test_what_cannot_be(comm, shared_tmp_path):
    one_sided = two()
    one_sided.labels[one_sided.split == 2] = 1
    built = {"three": graphs.directed_random(), "several": several(), "one_sided": one_sided}
    folders = {
        name: prepare(comm, graph, shared_tmp_path / name, parts=comm.size) for name, graph in built.items()
    }
    if comm.rank == 0:
        (shared_tmp_path / "short.txt").write_text("1 2")
    rejoin(comm)
    wrong = [
        ("three", {"metric": "auc"}, "--metric auc is for two classes, one a vertex, and .* has 3 classes"),
        ("several", {"metric": "auc"}, "--metric auc is for two classes, .* has vertices of several classes"),
        ("one_sided", {"metric": "auc"}, "--metric auc needs both classes in the validation set, .* class 0"),
        (
            "three",
            {"class_weights": "nowhere"},
            "--class-weights nowhere: cannot be read as none, balanced or",
        ),
        ("three", {"class_weights": str(shared_tmp_path / "short.txt")}, "a weight for each of 3 classes"),
    ]
    for number, (name, options, said) in enumerate(wrong):
        with pytest.raises(InputError, match=said):
            train(comm, comm.size, 0, folders[name], shared_tmp_path / f"run{number}", epochs=1, **options)
        rejoin(comm)
