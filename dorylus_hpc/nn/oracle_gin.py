"""The oracle of GIN, written straight from the formulas (see `oracle`).

With ``A[i, j]`` the weight of the edge i -> j (loops left out) and D_l = drop_l(H_{l-1}),

    S_l = (1 + e_l) D_l + A^T D_l      R_l = relu(S_l U_l + a_l)      Z_l = R_l W_l + b_l
    H_l = relu(Z_l) for l < L          logits = Z_L

and backwards, with G_l the gradient of Z_l and Q_l that of S_l U_l + a_l,

    dW = R^T G    db = sum G    Q = G W^T * [R > 0]    dU = S^T Q    da = sum Q    de = <Q U^T, D>
    G_{l-1} = ((1 + e) Q U^T + A Q U^T) * mask_l * [Z_{l-1} > 0]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from dorylus_hpc.nn.init import glorot_uniform, zeros
from dorylus_hpc.nn.oracle import Matrix, OracleSettings, Params, cross_entropy, drop, layer_widths
from dorylus_hpc.nn.oracle_sage import sum_matrix

NAMES = {"learned": ("U", "a", "W", "b", "e"), "fixed": ("U", "a", "W", "b")}  # of a layer's tensors


class GinOracle:
    """A GIN over one graph."""

    def __init__(self, adjacency: Any, settings: OracleSettings) -> None:
        self._settings = settings
        self._sum = sum_matrix(adjacency, settings.dtype, itself=False)

    def start(self, f_in: int, n_classes: int) -> Params:
        """As `OracleModel`."""
        seed, dtype, inner = self._settings.seed, self._settings.dtype, self._settings.hidden
        params: Params = []
        for layer, (rows, columns) in enumerate(layer_widths(f_in, n_classes, self._settings), start=1):
            u = glorot_uniform(seed, layer, rows, inner, dtype)
            w = glorot_uniform(seed, layer, inner, columns, dtype, draw=1)
            tensors = (u, zeros(inner, dtype), w, zeros(columns, dtype))
            params.append((*tensors, zeros(1, dtype)) if self._settings.epsilon == "learned" else tensors)
        return params

    def logits(self, x: Matrix, params: Params) -> np.ndarray:
        """As `OracleModel`."""
        for layer, tensors in enumerate(params, start=1):
            z = self._layer(x, tensors)[-1]
            x = np.maximum(z, 0) if layer < len(params) else z
        return x

    def loss_and_gradients(
        self, x: Matrix, labels: np.ndarray, train: np.ndarray, params: Params, epoch: int
    ) -> tuple[float, Params]:
        """As `OracleModel`."""
        h: Matrix = x
        saved: list[Any] = []
        for layer, tensors in enumerate(params, start=1):
            d, multiplier = drop(h, self._settings, epoch, layer)
            saved.append((d, multiplier, *self._layer(d, tensors)))
            h = np.maximum(saved[-1][-1], 0)
        loss, g = cross_entropy(saved[-1][-1], labels, train, self._settings.class_weights)
        gradients: Params = []
        for layer in range(len(params), 0, -1):
            d, multiplier, s, r, _ = saved[layer - 1]
            u, _, w, _, *_ = params[layer - 1]
            q = (g @ w.T) * (r > 0)
            d_s = q @ u.T
            d_e = (d.multiply(d_s) if sparse.issparse(d) else d * d_s).sum()
            tensors = (s.T @ q, q.sum(axis=0), r.T @ g, g.sum(axis=0), np.array([d_e], g.dtype))
            gradients.append(tensors if self._settings.epsilon == "learned" else tensors[:-1])
            if layer > 1:
                d_h = self._scale(params[layer - 1]) * d_s + self._sum.T @ d_s
                g = d_h * multiplier * (saved[layer - 2][-1] > 0)
        return loss, gradients[::-1]

    def _scale(self, tensors: tuple[np.ndarray, ...]) -> Any:
        return 1 + tensors[4] if self._settings.epsilon == "learned" else 1

    def _layer(self, d: Matrix, tensors: tuple[np.ndarray, ...]) -> tuple[Matrix, np.ndarray, np.ndarray]:
        """Return S, R and Z."""
        u, a, w, b, *_ = tensors
        scale = self._scale(tensors)
        s = self._sum @ d + d * (scale if np.isscalar(scale) else scale[0])
        r = np.maximum(s @ u + a, 0)
        return s, r, r @ w + b
