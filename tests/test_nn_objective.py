"""Losses and what their means are over, against the formulas of torch's losses."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_expit, log_softmax

from dorylus_hpc.nn.objective import Objective, balanced_weights

N, CLASSES = 50, 4


def case(seed=0):
    rng = np.random.default_rng(seed)
    mask = (rng.random(N) < 0.7).astype(np.uint8)
    return 3 * rng.normal(size=(N, CLASSES)), mask, rng


def mean_and_gradient(objective, logits, labels, mask, members, known):
    divisor = objective.divisor(members, known)
    gradient = np.full_like(logits, np.nan)
    loss = objective.loss(logits, labels, mask, divisor, gradient) / divisor
    shape = np.ones(logits.shape)
    numeric = np.empty_like(logits)
    for at in np.ndindex(shape.shape):
        change = np.zeros_like(logits)
        change[at] = 1e-5
        up, down = (
            objective.loss(logits + sign * change, labels, mask, divisor, np.empty_like(logits))
            for sign in (1, -1)
        )
        numeric[at] = (up - down) / divisor / 2e-5
    return loss, gradient, numeric


@pytest.mark.parametrize("weights", [None, np.array([1.0, 0.2, 5.0, 0.0])], ids=["plain", "weighted"])
def test_one_class_a_vertex(weights):
    """The mean of CrossEntropyLoss(weight=w): over the weights, not the vertices."""
    logits, mask, rng = case()
    labels = np.where(mask, rng.integers(0, CLASSES, N), -1).astype(np.int32)
    rows = mask == 1
    w = (np.ones(CLASSES) if weights is None else weights)[labels[rows]]
    want = -(w * log_softmax(logits[rows], axis=1)[np.arange(rows.sum()), labels[rows]]).sum() / w.sum()
    members = np.bincount(labels[rows], minlength=CLASSES)
    known = np.full(CLASSES, rows.sum())
    loss, gradient, numeric = mean_and_gradient(
        Objective(False, weights), logits, labels, mask, members, known
    )
    assert loss == pytest.approx(want, rel=1e-13)
    np.testing.assert_allclose(gradient, numeric, atol=1e-9)


@pytest.mark.parametrize("weights", [None, np.array([1.0, 0.2, 5.0, 0.0])], ids=["plain", "weighted"])
def test_several_classes_a_vertex(weights):
    """The mean of BCEWithLogitsLoss(pos_weight=p): over what is known, whatever the weights."""
    logits, mask, rng = case(1)
    labels = (rng.random((N, CLASSES)) < 0.3).astype(np.uint8)
    labels[rng.random((N, CLASSES)) < 0.2] = 255
    labels[mask == 0] = 255
    known = labels < 2
    y, z = labels == 1, logits
    w = np.ones(CLASSES) if weights is None else weights
    want = -(w * y * log_expit(z) + ~y * log_expit(-z))[known].mean()
    loss, gradient, numeric = mean_and_gradient(
        Objective(True, weights), logits, labels, mask, y.sum(axis=0), known.sum(axis=0)
    )
    assert loss == pytest.approx(want, rel=1e-13)
    np.testing.assert_allclose(gradient, numeric, atol=1e-9)


def test_balanced_classes_count_alike():
    labels = np.repeat([0, 1, 3], [90, 9, 1])
    members = np.bincount(labels, minlength=4)
    weights = balanced_weights(members, np.full(4, 100), several=False)
    assert weights.tolist() == [100 / (4 * 90), 100 / (4 * 9), 1.0, 100 / 4]
    assert (weights * members)[[0, 1, 3]] == pytest.approx([25.0] * 3)
    assert Objective(False, weights).divisor(members, np.full(4, 100)) == pytest.approx(75.0)
    assert Objective(False, None).divisor(members, np.full(4, 100)) == 100.0


def test_balanced_marks_count_alike():
    members, known = np.array([90, 9, 0, 100]), np.array([100, 30, 100, 100])
    weights = balanced_weights(members, known, several=True)
    assert weights.tolist() == [10 / 90, 21 / 9, 1.0, 1.0]
    assert Objective(True, weights).divisor(members, known) == 330.0
