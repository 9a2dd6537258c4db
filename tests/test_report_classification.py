"""Metrics from counts that were added over parts, against plain formulas on all vertices at once."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import rankdata

from dorylus_hpc.report.classification import METRICS, SETS, LabelForm, Tally, roc_auc
from dorylus_hpc.report.metrics import evaluation
from lambda_pkg.dense import tally


def case(seed, n, n_classes, *, several):
    """Logits, labels and a split; of more than two classes the last is not in the test set."""
    rng = np.random.default_rng(seed)
    logits, split = rng.normal(size=(n, n_classes)), rng.integers(0, 4, n)
    if several:
        labels = (rng.random((n, n_classes)) < 0.3).astype(np.uint8)
        labels[split == 0] = 255
        labels[split == 3, -1] *= n_classes == 2
    else:
        labels = rng.integers(0, n_classes, n).astype(np.int32)
        labels[split == 0] = -1
        if n_classes > 2:
            labels[(split == 3) & (labels == n_classes - 1)] = 0
            logits[split == 3, -1] = -9  # nor is it answered
    return logits, labels, split


def form_of(labels, split, n_classes):
    members = tuple(int(np.count_nonzero(split == member)) for member in (1, 2, 3))
    return LabelForm(n_classes, labels.ndim == 2, members)


def tally_of(logits, labels, split, cuts):
    """Count piece by piece, as parts do, and add up."""
    bounds = [0, *cuts, len(logits)]
    pieces = [slice(*pair) for pair in zip(bounds[:-1], bounds[1:], strict=True)]
    empty = np.empty(0)
    parts = [(tally(logits[piece], labels[piece], split[piece], 3), empty) for piece in pieces]
    return Tally.of_parts(form_of(labels, split, logits.shape[1]), parts)


def by_hand(logits, labels, metric):
    if labels.ndim == 2:
        answer, true = logits > 0, labels == 1
    else:
        answer, true = (np.eye(logits.shape[1], dtype=bool)[of] for of in (logits.argmax(axis=1), labels))
    if metric == "accuracy":
        return (answer == true).all(axis=1).mean()
    f1 = []
    for c in range(logits.shape[1]) if metric == "f1-macro" else [slice(None)]:
        precision = (answer & true)[:, c].sum() / max(answer[:, c].sum(), 1)
        recall = (answer & true)[:, c].sum() / max(true[:, c].sum(), 1)
        if answer[:, c].any() or true[:, c].any():
            f1.append(2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    return np.mean(f1)


@pytest.mark.parametrize("metric", ["accuracy", "f1-micro", "f1-macro"])
@pytest.mark.parametrize("cuts", [[], [20, 20, 140], list(range(1, 200))], ids=["whole", "parts", "rows"])
@pytest.mark.parametrize("n_classes, several", [(2, False), (5, False), (40, False), (2, True), (40, True)])
def test_metrics_by_hand(n_classes, several, cuts, metric):
    logits, labels, split = case(n_classes, 200, n_classes, several=several)
    found = tally_of(logits, labels, split, cuts)
    for place, member in enumerate((1, 2, 3)):
        rows = split == member
        want = by_hand(logits[rows], labels[rows], metric)
        assert found.value(metric, place) == pytest.approx(want, rel=1e-12)
        assert 0 <= want < 1


def test_of_one_class_a_vertex_micro_f1_is_the_accuracy():
    found = tally_of(*case(1, 100, 4, several=False), [])
    assert [found.value("f1-micro", place) for place in range(3)] == pytest.approx(
        [found.value("accuracy", place) for place in range(3)], rel=1e-14
    )


def test_a_set_without_vertices_has_no_metrics():
    logits, labels, split = case(2, 50, 3, several=False)
    split[split == 2] = 0
    found = tally_of(logits, labels, split, [])
    assert [found.value(metric, 1) for metric in METRICS] == [None] * 4
    assert list(found.report()) == ["train", "test"]
    seen = evaluation(7, found, "f1-macro")
    assert (seen.epoch, seen.val, seen.accuracy[1]) == (7, None, None)
    assert (seen.train, seen.test) == (found.value("f1-macro", 0), found.value("f1-macro", 2))
    assert seen.accuracy[0] == found.value("accuracy", 0) != seen.train


def test_nobody_answers_anything():
    labels, split = np.zeros((4, 3), np.uint8), np.ones(4, int)
    found = tally_of(np.full((4, 3), -1.0), labels, split, [2])
    assert [found.value(metric, 0) for metric in METRICS] == [1.0, 0.0, 0.0, None]
    assert found.report()["train"]["f1"] == [None] * 3


@pytest.mark.parametrize("several", [False, True])
def test_report_by_hand(several):
    logits, labels, split = case(3, 300, 4, several=several)
    report = tally_of(logits, labels, split, [77, 200]).report()
    assert list(report) == list(SETS)
    for name, member in zip(SETS, (1, 2, 3), strict=True):
        rows, said = split == member, report[name]
        z, y = logits[rows], labels[rows]
        assert said["vertices"] == np.count_nonzero(rows)
        assert said["f1_macro"] == pytest.approx(by_hand(z, y, "f1-macro")) and said["auc"] is None
        for c in range(4):
            answer = z[:, c] > 0 if several else z.argmax(axis=1) == c
            true = y[:, c] == 1 if several else y == c
            both = np.count_nonzero(answer & true)
            assert said["support"][c] == np.count_nonzero(true)
            assert said["precision"][c] == (both / answer.sum() if answer.any() else None)
            assert said["recall"][c] == (both / true.sum() if true.any() else None)
            if not several:
                assert said["confusion"][c] == np.bincount(z[true].argmax(axis=1), minlength=4).tolist()
        assert several == (said["confusion"] is None)
    assert report["test"]["support"][3] == 0 and report["test"]["recall"][3] is None


# ---- ROC AUC


@pytest.mark.parametrize("levels", [1, 2, 7, 10**6])
@pytest.mark.parametrize("n", [(1, 1), (1, 30), (400, 150)])
def test_auc_is_the_mid_rank_formula(n, levels):
    """Ties and all: with few levels nearly every pair is one."""
    rng = np.random.default_rng([*n, levels])
    negative, positive = (rng.integers(0, levels, count) / levels for count in n)
    positive[::2] += 1e-9
    ranks = rankdata(np.concatenate([negative, positive]))
    p = len(positive)
    want = (ranks[len(negative) :].sum() - p * (p + 1) / 2) / (len(negative) * p)
    assert roc_auc(negative, positive) == pytest.approx(want, abs=1e-15)
    pairs = (positive[:, None] > negative) + 0.5 * (positive[:, None] == negative)
    assert roc_auc(negative, positive) == pytest.approx(pairs.mean(), abs=1e-15)
    assert roc_auc(rng.permutation(negative), rng.permutation(positive)) == roc_auc(negative, positive)


def test_auc_at_its_ends():
    low, high = np.array([-np.inf, 0.0]), np.array([1.0, np.inf])
    assert (roc_auc(low, high), roc_auc(high, low), roc_auc(low, low)) == (1.0, 0.0, 0.5)
    assert roc_auc(low, low[:0]) is None and roc_auc(low[:0], low) is None


def test_auc_of_parts_is_that_of_the_whole():
    logits, labels, split = case(5, 500, 2, several=False)
    logits = np.round(logits, 1)  # ties
    score = logits[:, 1] - logits[:, 0]
    bounds, parts = [0, 0, 30, 499, 500], []
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        z, y, s, mine = (array[start:stop] for array in (logits, labels, split, score))
        groups = [mine[(s == member) & (y == one)] for member in (1, 2, 3) for one in (0, 1)]
        parts.append((tally(z, y, s, 3), np.concatenate(groups)))
    form = form_of(labels, split, 2)
    found = Tally.of_parts(form, parts)
    for place, member in enumerate((1, 2, 3)):
        negative, positive = (score[(split == member) & (labels == one)] for one in (0, 1))
        assert found.value("auc", place) == roc_auc(negative, positive)
    assert found.report()["train"]["auc"] == found.value("auc", 0)
    assert Tally.of_parts(form, parts[::-1]).value("auc", 1) == found.value("auc", 1)


def test_an_unknown_metric():
    with pytest.raises(ValueError, match="metric must be one of accuracy, .*, got 'f2'"):
        tally_of(*case(1, 20, 2, several=False), []).value("f2", 0)
