"""The oracles of GraphSAGE, GIN, GAT and GATv2: vertex by vertex, and by finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse
from test_oracle import CLASSES, F, N, _adjacency, _data, _edges

from dorylus_hpc.nn.oracle import OracleSettings
from dorylus_hpc.nn.oracle_gat import gat_oracle, gatv2_oracle
from dorylus_hpc.nn.oracle_gin import GinOracle
from dorylus_hpc.nn.oracle_sage import mean_matrix, sage_oracle, sum_matrix

MODELS = {
    "mean": (sage_oracle, {}),
    "mean, normalised": (sage_oracle, {"l2_normalise": "on"}),
    "gcn": (sage_oracle, {"aggregator": "gcn"}),
    "gcn, normalised": (sage_oracle, {"aggregator": "gcn", "l2_normalise": "on"}),
    "max": (sage_oracle, {"aggregator": "max"}),
    "max, normalised": (sage_oracle, {"aggregator": "max", "l2_normalise": "on"}),
    "gin": (GinOracle, {}),
    "gin, epsilon fixed": (GinOracle, {"epsilon": "fixed"}),
    "gat": (gat_oracle, {"heads": 2, "output_heads": 3}),
    "gatv2": (gatv2_oracle, {"heads": 2, "output_heads": 3}),
    "gat, dropped weights": (gat_oracle, {"heads": 3, "attention_dropout": 0.4}),
    "gatv2, dropped weights": (gatv2_oracle, {"heads": 3, "attention_dropout": 0.4, "negative_slope": 0.1}),
}
RUNS = [(1, 0.0, 0.4), (2, 0.0, 0.0), (2, 0.5, 0.5), (3, 0.3, 0.2)]  # layers, dropout, input dropout


def made(name, **settings):
    build, options = MODELS[name]
    return build(_adjacency(), OracleSettings(hidden=5, seed=2, **settings, **options))


def random_params(model, seed=3):
    """Start weights; biases and epsilons away from 0, so that no input of relu is exactly 0."""
    rng = np.random.default_rng(seed)
    params = model.start(F, CLASSES)
    return [tuple(t if t.ndim == 2 else rng.uniform(-0.5, 0.5, t.shape) for t in ts) for ts in params]


def attend(h, near, v, tensors, name, *, last):
    """One vertex of a GAT's layer, head by head."""
    w, second, third, b = tensors
    heads, columns = third.shape
    slope = MODELS[name][1].get("negative_slope", 0.2)
    made = []
    for k in range(heads):
        of_head = slice(k * columns, (k + 1) * columns)
        y = [h[i] @ w[:, of_head] for i in near]
        if "v2" in name:
            pre = [one + h[v] @ second[:, of_head] for one in y]
            e = [np.maximum(one, slope * one) @ third[k] for one in pre]
        else:
            raw = [one @ second[k] + y[-1] @ third[k] for one in y]
            e = [max(one, slope * one) for one in raw]
        alpha = np.exp(e) / np.exp(e).sum()
        made.append(sum(a * one for a, one in zip(alpha, y, strict=True)))
    if last:
        return np.mean(made, axis=0) + b
    z = np.concatenate(made) + b
    return np.where(z > 0, z, np.exp(z) - 1)


@pytest.mark.parametrize("itself", [False, True])
def test_means_and_sums_edge_by_edge(itself):
    total = np.eye(N) * itself
    for i, j, a in zip(*_edges(), strict=True):
        total[j, i] += a * (i != j)
    np.testing.assert_allclose(sum_matrix(_adjacency(), float, itself=itself).toarray(), total, rtol=1e-14)
    with np.errstate(invalid="ignore"):
        mean = np.nan_to_num(total / total.sum(axis=1, keepdims=True))
    np.testing.assert_allclose(mean_matrix(_adjacency(), float, itself=itself).toarray(), mean, rtol=1e-14)


@pytest.mark.parametrize("name", MODELS)
def test_forward_vertex_by_vertex(name):
    model = made(name, layers=3)
    params = random_params(model)
    _, options = MODELS[name]
    x = _data()[0]
    h = x
    for layer, tensors in enumerate(params, start=1):
        rows = []
        for v in range(N):
            near = [(i, a) for i, j, a in zip(*_edges(), strict=True) if j == v and i != v]
            if "gat" in name:
                rows.append(attend(h, [i for i, _ in near] + [v], v, tensors, name, last=layer == 3))
                continue
            total = sum((a * h[i] for i, a in near), np.zeros(h.shape[1]))
            weight = sum(a for _, a in near)
            if "gin" in name:
                u, a, w, b, *e = tensors
                own = 1 + e[0][0] if e else 1
                z = np.maximum((total + own * h[v]) @ u + a, 0) @ w + b
            elif options.get("aggregator") == "gcn":
                w, b = tensors
                z = (total + h[v]) / (weight + 1) @ w + b
            elif options.get("aggregator") == "max":
                wp, bp, ws, wn, b = tensors
                pooled = np.array([np.maximum(h[i] @ wp + bp, 0) for i, _ in near] or [np.zeros(5)])
                z = h[v] @ ws + pooled.max(axis=0) @ wn + b
            else:
                ws, wn, b = tensors
                z = h[v] @ ws + (total / weight if near else total) @ wn + b
            if layer < 3:
                z = np.maximum(z, 0)
                norm = np.sqrt((z * z).sum())
                if options.get("l2_normalise") == "on" and norm:
                    z = z / norm
            rows.append(z)
        h = np.array(rows)
    np.testing.assert_allclose(model.logits(x, params), h, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("sparse_features", [False, True])
@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_by_finite_differences(name, run, sparse_features):
    x, labels, split = _data()
    layers, dropout, input_dropout = run
    model = made(name, layers=layers, dropout=dropout, input_dropout=input_dropout)
    features = sparse.csr_array(x) if sparse_features else x
    train = (split == 1) & (labels >= 0)
    params = random_params(model)

    def loss():
        return model.loss_and_gradients(features, labels, train, params, 3)[0]

    gradients = model.loss_and_gradients(features, labels, train, params, 3)[1]
    for tensors, d_tensors in zip(params, gradients, strict=True):
        for tensor, gradient in zip(tensors, d_tensors, strict=True):
            assert gradient.shape == tensor.shape
            numeric = np.empty_like(tensor)
            for position in np.ndindex(tensor.shape):
                old, step = tensor[position], 1e-6
                tensor[position] = old + step
                above = loss()
                tensor[position] = old - step
                numeric[position] = (above - loss()) / (2 * step)
                tensor[position] = old
            np.testing.assert_allclose(gradient, numeric, rtol=1e-5, atol=1e-8)
    assert all(d_tensors[0].any() for d_tensors in gradients)


def test_matrices_of_a_layer_start_unlike():
    own, neighbours, _ = made("mean").start(F, CLASSES)[0]
    assert own.shape == neighbours.shape and not np.isclose(own, neighbours).any()
