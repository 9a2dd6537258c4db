"""The oracle of GAT and GATv2, written straight from the formulas, edge by edge (see `oracle`).

With the edges u -> v of the graph, loops left out and one u = v added for each vertex, LR the LeakyReLU and
for each head, D_l = drop_l(H_{l-1}),

    GAT      y = D_l W                         e_uv = LR(y_u . a_s + y_v . a_t)
    GATv2    y = D_l W, r = D_l W_t            e_uv = a . LR(y_u + r_v)
    alpha_uv = exp(e_uv) / sum over u' of exp(e_u'v)        c_uv = mask_uv alpha_uv
    z_v = sum over u of c_uv y_u
    H_l = elu(heads beside each other + b_l) for l < L      logits = mean over heads + b_L

and backwards, with g the gradient of z and q_uv = mask_uv g_v . y_u,

    dy_u = sum over v of c_uv g_v        de_uv = alpha_uv (q_uv - sum over u' of alpha_u'v q_u'v)
    GAT      ds_u = sum over v of de_uv LR'      dt_v = sum over u of de_uv LR'      dy += ds a_s + dt a_t
    GATv2    dy_u += sum over v of de_uv a LR'(y_u + r_v)        dr_v = the same over u
             da = sum over all edges of de_uv LR(y_u + r_v)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cython_kernels.reference import attention_kept
from dorylus_hpc.nn.init import glorot_uniform, zeros
from dorylus_hpc.nn.oracle import Matrix, OracleSettings, Params, cross_entropy, drop

NAMES = {"gat": ("W", "as", "at", "b"), "gatv2": ("W", "Wt", "a", "b")}  # of a layer's tensors, in order


def gat_oracle(adjacency: Any, settings: OracleSettings) -> GatOracle:
    """Return the GAT over one graph."""
    return GatOracle(adjacency, settings, second=False)


def gatv2_oracle(adjacency: Any, settings: OracleSettings) -> GatOracle:
    """Return the GATv2 over one graph."""
    return GatOracle(adjacency, settings, second=True)


class GatOracle:
    """A GAT, or GATv2, over one graph."""

    def __init__(self, adjacency: Any, settings: OracleSettings, *, second: bool) -> None:
        self._settings, self._second = settings, second
        self._n = n = adjacency.shape[0]
        edges = adjacency.tocoo()
        proper = edges.row != edges.col
        self._u = np.concatenate([edges.row[proper], np.arange(n)]).astype(np.int64)
        self._v = np.concatenate([edges.col[proper], np.arange(n)]).astype(np.int64)
        met: dict[tuple[int, int], int] = {}
        occurrences = np.zeros(len(self._u), np.uint64)  # of equal edges
        for k, pair in enumerate(zip(self._u.tolist(), self._v.tolist(), strict=True)):
            occurrences[k] = met.get(pair, 0)
            met[pair] = met.get(pair, 0) + 1
        self._occurrences = occurrences

    def start(self, f_in: int, n_classes: int) -> Params:
        """As `OracleModel`."""
        s = self._settings
        params: Params = []
        for layer in range(1, s.layers + 1):
            last = layer == s.layers
            heads, columns = (s.output_heads, n_classes) if last else (s.heads, s.hidden)
            width = heads * columns
            shapes = [(f_in, width), (heads, columns), (heads, columns)]
            if self._second:
                shapes = [(f_in, width), (f_in, width), (heads, columns)]
            drawn = [glorot_uniform(s.seed, layer, *shape, s.dtype, draw=k) for k, shape in enumerate(shapes)]
            params.append((*drawn, zeros(columns if last else width, s.dtype)))
            f_in = width
        return params

    def logits(self, x: Matrix, params: Params) -> np.ndarray:
        """As `OracleModel`."""
        for layer, tensors in enumerate(params, start=1):
            z = self._attend(x, tensors, layer, None)[0]
            x = self._finish(z, tensors[-1], layer)
        return x

    def loss_and_gradients(
        self, x: Matrix, labels: np.ndarray, train: np.ndarray, params: Params, epoch: int
    ) -> tuple[float, Params]:
        """As `OracleModel`."""
        h: Matrix = x
        passed: list[Any] = []
        for layer, tensors in enumerate(params, start=1):
            d, multiplier = drop(h, self._settings, epoch, layer)
            z, saved = self._attend(d, tensors, layer, epoch)
            passed.append((d, multiplier, saved))
            h = self._finish(z, tensors[-1], layer)
            passed[-1] += (h,)
        loss, d_h = cross_entropy(h, labels, train, self._settings.class_weights)
        gradients: Params = []
        for layer in range(len(params), 0, -1):
            d, multiplier, saved, h = passed[layer - 1]
            heads = saved[0].shape[1]
            if layer == len(params):
                g = np.repeat(d_h[:, None] / heads, heads, axis=1)
                d_b = d_h.sum(axis=0)
            else:
                d_z = d_h * np.where(h > 0, 1, h + 1)
                g, d_b = d_z.reshape(len(d_z), heads, -1), d_z.sum(axis=0)
            d_tensors, d_d = self._back(g, d, params[layer - 1], saved)
            gradients.append((*d_tensors, d_b))
            if layer > 1:
                d_h = d_d * multiplier
        return loss, gradients[::-1]

    def _finish(self, z: np.ndarray, b: np.ndarray, layer: int) -> np.ndarray:
        if layer == self._settings.layers:
            return z.mean(axis=1) + b
        z = z.reshape(len(z), -1) + b
        return np.where(z > 0, z, np.expm1(np.minimum(z, 0)))

    def _leaky(self, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return LeakyReLU and its derivative."""
        slope = np.where(value > 0, 1, self._settings.negative_slope).astype(value.dtype)
        return value * slope, slope

    def _sum(self, ends: np.ndarray, values: np.ndarray) -> np.ndarray:
        total = np.zeros((self._n, *values.shape[1:]), values.dtype)
        np.add.at(total, ends, values)
        return total

    def _attend(
        self, d: Matrix, tensors: tuple[np.ndarray, ...], layer: int, epoch: int | None
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Return z of each head, and what `_back` wants."""
        s, u, v = self._settings, self._u, self._v
        w, second, third, _ = tensors
        heads, columns = third.shape
        y = (d @ w).reshape(self._n, heads, columns)
        if self._second:
            r = (d @ second).reshape(self._n, heads, columns)
            active, slope = self._leaky(y[u] + r[v])
            e = (active * third).sum(axis=2)
        else:
            active = np.empty(0)
            e, slope = self._leaky((y * second).sum(axis=2)[u] + (y * third).sum(axis=2)[v])
        most = np.full((self._n, heads), -np.inf, e.dtype)
        np.maximum.at(most, v, e)
        exponential = np.exp(e - most[v])
        alpha = exponential / self._sum(v, exponential)[v]
        mask = np.ones_like(alpha)
        if epoch is not None and s.attention_dropout:
            p = s.attention_dropout
            kept = attention_kept(u, v, self._occurrences, heads, p, seed=s.seed, epoch=epoch, layer=layer)
            mask = (kept / (1 - p)).astype(alpha.dtype)
        return self._sum(v, (mask * alpha)[:, :, None] * y[u]), (y, alpha, mask, active, slope)

    def _back(
        self, g: np.ndarray, d: Matrix, tensors: tuple[np.ndarray, ...], saved: tuple[np.ndarray, ...]
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Return the gradients of a layer's tensors but the bias, and of its input."""
        u, v = self._u, self._v
        w, second, third, _ = tensors
        y, alpha, mask, active, slope = saved
        d_y = self._sum(u, (mask * alpha)[:, :, None] * g[v])
        q = mask * (g[v] * y[u]).sum(axis=2)
        d_e = alpha * (q - self._sum(v, alpha * q)[v])
        n = self._n
        if self._second:
            d_both = d_e[:, :, None] * third * slope
            d_y += self._sum(u, d_both)
            d_r = self._sum(v, d_both).reshape(n, -1)
            d_third = (d_e[:, :, None] * active).sum(axis=0)
            d_y = d_y.reshape(n, -1)
            return (d.T @ d_y, d.T @ d_r, d_third), d_y @ w.T + d_r @ second.T
        d_s, d_t = self._sum(u, d_e * slope)[:, :, None], self._sum(v, d_e * slope)[:, :, None]
        d_y = (d_y + d_s * second + d_t * third).reshape(n, -1)
        return (d.T @ d_y, (d_s * y).sum(axis=0), (d_t * y).sum(axis=0)), d_y @ w.T
