"""Two classes by ROC AUC on a public graph, against the same formula on the predictions of the run."""

from __future__ import annotations

import numpy as np
import pytest
from realdata import real_graph
from scipy.stats import rankdata

import dorylus_hpc
from dorylus_hpc.graph.readers import read_npz


def test_tolokers(tmp_path):
    """A tenth of the usual epochs, which is far better than chance; 21.8 % of the vertices are of class 1."""
    path = real_graph("tolokers")
    graph = read_npz(path)
    options = {"epochs": 60, "hidden": 32, "feature_norm": "standard", "eval_every": 10, "dropout": 0.2}
    result = dorylus_hpc.fit(
        path, run_dir=tmp_path / "run", metric="auc", class_weights="balanced", model="sage", **options
    )
    summary = result.summary
    assert summary["metric"]["name"] == "auc"
    assert summary["metric"]["test"]["best_validation"] > 0.72
    found = dorylus_hpc.infer(tmp_path / "run")
    for name, member in (("train", 1), ("val", 2), ("test", 3)):
        rows = graph.split == member
        labels, score = graph.labels[rows], found.probabilities[rows, 1]
        positives = int(labels.sum())
        ranks = rankdata(score)[labels == 1].sum()
        auc = (ranks - positives * (positives + 1) / 2) / (positives * (len(labels) - positives))
        # Probabilities are float32: a few pairs that the logits tell apart are ties in them.
        assert summary["metric"][name]["best_validation"] == pytest.approx(auc, abs=1e-5)
        report = summary["report"]["best_validation"][name]
        assert report["support"] == np.bincount(labels).tolist()
        answers = found.classes[rows]
        pairs = [[int(((labels == a) & (answers == b)).sum()) for b in (0, 1)] for a in (0, 1)]
        assert report["confusion"] == pairs
        assert min(report["recall"]) > 0.5  # balanced: the rarer class is found, too
