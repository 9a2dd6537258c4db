"""The oracle of GraphSAGE, written straight from the formulas (see `oracle`).

With ``A[i, j]`` the weight of the edge i -> j (loops left out), ``d_j = sum_i A[i, j]`` and 1/0 = 0,

    mean    Z_l = D_l Ws_l + N D_l Wn_l + b_l      N = diag(1/d) A^T             D_l = drop_l(H_{l-1})
    gcn     Z_l = N D_l W_l + b_l                  N = diag(1/(d + 1)) (A^T + I)
    H_l     = relu(Z_l), its rows divided by their norms if wanted, for l < L      logits = Z_L

and backwards, with G_l the gradient of Z_l, term by term of Z_l = sum_t N_t D_l W_t + b_l,

    dW_t = (N_t D_l)^T G_l      db_l = column sums of G_l      dH_{l-1} = sum_t N_t^T G_l W_t^T * mask_l
    G_{l-1} = (dH - n (n . dH)) / norm * [Z_{l-1} > 0] with n = H_{l-1}, or dH * [Z_{l-1} > 0]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from dorylus_hpc.nn.init import glorot_uniform, zeros
from dorylus_hpc.nn.oracle import Matrix, OracleSettings, Params, cross_entropy, drop, layer_widths

NAMES = {"mean": ("Ws", "Wn", "b"), "gcn": ("W", "b")}  # of a layer's tensors, in order


def mean_matrix(adjacency: Any, dtype: Any, *, itself: bool) -> Matrix:
    """Return the mean over sources of in-edges as a matrix, computed in float64 and cast.

    Parameters
    ----------
    adjacency : SciPy sparse, (n, n)
        ``A[i, j]`` is the weight of the edge i -> j. Duplicates count, loops do not.
    dtype : dtype
    itself : bool
        With the vertex itself, of weight 1.

    Returns
    -------
    csr_array, (n, n)
    """
    total = sum_matrix(adjacency, np.float64, itself=itself)
    degree = np.asarray(total.sum(axis=1)).ravel()
    scale = np.divide(1.0, degree, out=np.zeros_like(degree), where=degree > 0)
    return sparse.csr_array(sparse.diags_array(scale) @ total).astype(dtype)


def sum_matrix(adjacency: Any, dtype: Any, *, itself: bool) -> Matrix:
    """Return the sum over sources of in-edges as a matrix; arguments as for `mean_matrix`."""
    n = adjacency.shape[0]
    edges = adjacency.tocoo()
    proper = edges.row != edges.col
    pairs = edges.col[proper], edges.row[proper]
    transposed = sparse.coo_array((edges.data[proper].astype(np.float64), pairs), shape=(n, n)).tocsr()
    return sparse.csr_array(transposed + sparse.eye_array(n) if itself else transposed).astype(dtype)


class SageOracle:
    """A GraphSAGE over one graph."""

    def __init__(self, adjacency: Any, settings: OracleSettings) -> None:
        self._settings = settings
        own = settings.aggregator == "gcn"
        mean = mean_matrix(adjacency, settings.dtype, itself=own)
        identity = sparse.eye_array(mean.shape[0], dtype=settings.dtype, format="csr")
        self._terms = [mean] if own else [identity, mean]

    def start(self, f_in: int, n_classes: int) -> Params:
        """As `OracleModel`."""
        seed, dtype = self._settings.seed, self._settings.dtype
        widths = layer_widths(f_in, n_classes, self._settings)
        return [
            (
                *(glorot_uniform(seed, layer, *shape, dtype, draw=t) for t in range(len(self._terms))),
                zeros(shape[1], dtype),
            )
            for layer, shape in enumerate(widths, start=1)
        ]

    def logits(self, x: Matrix, params: Params) -> np.ndarray:
        """As `OracleModel`."""
        for layer, tensors in enumerate(params, start=1):
            z = self._product(x, tensors)
            x = self._activate(z)[0] if layer < len(params) else z
        return x

    def loss_and_gradients(
        self, x: Matrix, labels: np.ndarray, train: np.ndarray, params: Params, epoch: int
    ) -> tuple[float, Params]:
        """As `OracleModel`."""
        h: Matrix = x
        saved: list[Any] = []
        for layer, tensors in enumerate(params, start=1):
            d, multiplier = drop(h, self._settings, epoch, layer)
            z = self._product(d, tensors)
            saved.append((d, multiplier, z))
            h, _ = self._activate(z)
        loss, g = cross_entropy(z, labels, train)
        gradients: Params = []
        for layer in range(len(params), 0, -1):
            d, multiplier, _ = saved[layer - 1]
            *weights, _ = params[layer - 1]
            gradients.append((*((term @ d).T @ g for term in self._terms), g.sum(axis=0)))
            if layer == 1:
                break
            d_h = sum(term.T @ (g @ w.T) for term, w in zip(self._terms, weights, strict=True)) * multiplier
            z = saved[layer - 2][2]
            n, norm = self._activate(z)
            if norm is not None:
                d_h = (d_h - n * (n * d_h).sum(axis=1, keepdims=True)) / norm
            g = d_h * (z > 0)
        return loss, gradients[::-1]

    def _product(self, d: Matrix, tensors: tuple[np.ndarray, ...]) -> np.ndarray:
        *weights, b = tensors
        return sum(term @ (d @ w) for term, w in zip(self._terms, weights, strict=True)) + b

    def _activate(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the activation, and the norms that rows were divided by."""
        a = np.maximum(z, 0)
        if self._settings.l2_normalise == "off":
            return a, None
        norm = np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-12)
        return a / norm, norm
