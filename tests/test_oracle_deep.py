"""The oracle of norms, residuals and jumping knowledge, by finite differences and by its parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import sparse

from dorylus_hpc.nn.oracle import GcnOracle, OracleSettings, propagation_matrix, train_oracle
from dorylus_hpc.nn.oracle_deep import DeepOracle
from dorylus_hpc.nn.oracle_gin import GinOracle
from dorylus_hpc.nn.oracle_sage import sage_oracle
from lambda_pkg.dense import join_backward, join_layers, layer_norm, layer_norm_backward

N, F, CLASSES = 12, 5, 3


def data(seed=2):
    rng = np.random.default_rng(seed)
    adjacency = sparse.coo_array((rng.random(30) + 0.1, rng.integers(0, N - 1, (2, 30))), shape=(N, N))
    return adjacency, rng.standard_normal((N, F)), rng.integers(0, CLASSES, N), rng.random(N) < 0.6


def moved(params, seed=4):
    """Start weights, and vectors away from where they start."""
    rng = np.random.default_rng(seed)
    return [
        tuple(p if p.ndim == 2 else p + rng.uniform(-0.5, 0.5, p.shape) for p in tensors)
        for tensors in params
    ]


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
@pytest.mark.parametrize("residual", ["off", "on"])
@pytest.mark.parametrize("jumping", ["none", "cat", "max"])
@pytest.mark.parametrize("model", ["gcn", "sage", "gin"])
def test_gradients_by_finite_differences(model, norm, residual, jumping):
    adjacency, x, labels, train = data()
    settings = OracleSettings(
        layers=4, hidden=4, dropout=0.3, input_dropout=0.2, norm=norm, residual=residual, jumping=jumping
    )
    oracle = DeepOracle(adjacency, settings, model)
    params = moved(oracle.start(F, CLASSES))
    _, gradients = oracle.loss_and_gradients(x, labels, train, params, 3)
    for layer, (tensors, found) in enumerate(zip(params, gradients, strict=True)):
        for place, (tensor, gradient) in enumerate(zip(tensors, found, strict=True)):
            assert tensor.shape == gradient.shape
            if place in oracle.averaged(layer + 1):
                continue
            want = np.zeros_like(tensor)
            for at in np.ndindex(tensor.shape):
                kept, losses = tensor[at], []
                for step in (1e-6, -1e-6):
                    tensor[at] = kept + step
                    losses.append(oracle.loss_and_gradients(x, labels, train, params, 3)[0])
                tensor[at] = kept
                want[at] = (losses[0] - losses[1]) / 2e-6
            np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-8, err_msg=f"layer {layer + 1}")


def test_running_averages_by_hand():
    """One hidden layer: what is normed is P X W, whatever the epoch before has made of the norm."""
    adjacency, x, labels, train = data()
    split = np.where(train, 1, 2).astype(np.uint8)
    settings = OracleSettings(
        hidden=4, dropout=0.4, input_dropout=0.0, norm="batch", epochs=3, lr=0.1, optimizer="sgd"
    )
    p = propagation_matrix(adjacency)
    mean, variance = np.zeros(4), np.ones(4)
    for epochs in range(4):
        result = train_oracle(
            adjacency, x, labels, split, CLASSES, replace(settings, epochs=epochs),
            lambda given, settings: DeepOracle(given, settings, "gcn"),
        )  # fmt: skip
        w, g, s, found_mean, found_variance = result.params[0]
        np.testing.assert_allclose(found_mean, mean, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(found_variance, variance, rtol=1e-12)
        hidden = np.maximum((p @ x @ w - mean) / np.sqrt(variance + 1e-5) * g + s, 0)
        w2, b2 = result.params[1]
        np.testing.assert_allclose(result.logits, p @ hidden @ w2 + b2, rtol=1e-10, atol=1e-13)
        z = p @ x @ w
        mean, variance = 0.9 * mean + 0.1 * z.mean(axis=0), 0.9 * variance + 0.1 * np.var(z, axis=0, ddof=1)


@pytest.mark.parametrize("model", ["gcn", "sage", "gin"])
def test_without_any_of_them_it_is_the_plain_oracle(model):
    adjacency, x, labels, train = data()
    settings = OracleSettings(layers=3, hidden=4, dropout=0.3, input_dropout=0.2)
    plain = {"gcn": GcnOracle, "sage": sage_oracle, "gin": GinOracle}[model](adjacency, settings)
    deep = DeepOracle(adjacency, settings, model)
    params = plain.start(F, CLASSES)
    for mine, theirs in zip(deep.start(F, CLASSES), params, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(deep.logits(x, params), plain.logits(x, params), rtol=1e-13)
    mine, theirs = (one.loss_and_gradients(x, labels, train, params, 2) for one in (deep, plain))
    assert mine[0] == pytest.approx(theirs[0], rel=1e-13)
    for found, want in zip(mine[1], theirs[1], strict=True):
        for one, other in zip(found, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-15)


# ---- the functions of workers and servers ----


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-5)])
def test_layer_norm(dtype, tolerance):
    rng = np.random.default_rng(1)
    a, scale = (rng.standard_normal(shape).astype(dtype) * 3 + 2 for shape in ((7, 6), (6,)))
    want = np.array([(row - row.mean()) / np.sqrt(row.var() + 1e-5) for row in a.astype(float)]) * scale
    made = layer_norm(a, scale)
    assert made.dtype == a.dtype
    np.testing.assert_allclose(made, want, rtol=tolerance, atol=tolerance)
    assert layer_norm(a, scale, out=a) is a
    np.testing.assert_array_equal(a, made)
    assert layer_norm(a[:0], scale).shape == (0, 6)
    np.testing.assert_array_equal(layer_norm(np.full((2, 3), 4.0), np.ones(3)), np.zeros((2, 3)))


def test_layer_norm_backward():
    rng = np.random.default_rng(2)
    a, d_out, scale = rng.standard_normal((5, 4)), rng.standard_normal((5, 4)), rng.standard_normal(4)
    d_a, d_scale = layer_norm_backward(d_out, a, scale)
    for tensor, found in ((a, d_a), (scale, d_scale)):
        for at in np.ndindex(tensor.shape):
            kept, values = tensor[at], []
            for step in (1e-6, -1e-6):
                tensor[at] = kept + step
                values.append((layer_norm(a, scale) * d_out).sum())
            tensor[at] = kept
            assert found[at] == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6, abs=1e-8)
    np.testing.assert_allclose(d_a.sum(axis=1), 0, atol=1e-12)
    room = np.empty(4)
    into, again = layer_norm_backward(d_out.copy(), a, scale, d_scale=room)
    assert again is room
    np.testing.assert_array_equal(into, d_a)
    np.testing.assert_array_equal(room, d_scale)
    empty, none = layer_norm_backward(d_out[:0], a[:0], scale)
    assert empty.shape == (0, 4) and not none.any()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda a, s: layer_norm(a, s[:-1]), "scale must have shape"),
        (lambda a, s: layer_norm(a, s, out=a[:-1]), "out must have shape"),
        (lambda a, s: layer_norm_backward(a[:-1], a, s), "a must have shape"),
        (lambda a, s: layer_norm_backward(a, a, s[1:]), "scale must have shape"),
        (lambda a, s: join_layers([a, a], "min"), "how must be cat or max, got 'min'"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong(np.ones((3, 4)), np.ones(4))


def test_joined_layers_and_their_gradients():
    first, second = np.array([[1.0, 5.0, 2.0]]), np.array([[4.0, 3.0, 2.0]])
    d_wide, d_narrow = np.arange(6.0)[None], np.array([[7.0, 8.0, 9.0]])
    wide, narrow = join_layers([first, second], "cat"), join_layers([first, second], "max")
    assert wide.tolist() == [[1, 5, 2, 4, 3, 2]] and narrow.tolist() == [[4, 5, 2]]
    assert first.tolist() == [[1, 5, 2]]
    assert join_backward(d_wide, wide, [first], "cat").tolist() == [[0, 1, 2]]
    assert join_backward(d_wide, wide, [first, second], "cat").tolist() == [[3, 4, 5]]
    assert join_backward(d_narrow, narrow, [first], "max").tolist() == [[0, 8, 9]]
    assert join_backward(d_narrow, narrow, [first, second], "max").tolist() == [[7, 0, 0]]
