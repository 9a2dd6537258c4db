"""The oracle of GraphSAGE, written straight from the formulas (see `oracle`).

With ``A[i, j]`` the weight of the edge i -> j (loops left out), ``d_j = sum_i A[i, j]`` and 1/0 = 0,

    mean    Z_l = D_l Ws_l + N D_l Wn_l + b_l      N = diag(1/d) A^T             D_l = drop_l(H_{l-1})
    gcn     Z_l = N D_l W_l + b_l                  N = diag(1/(d + 1)) (A^T + I)
    max     Z_l = D_l Ws_l + M_l Wn_l + b_l        M_vc = max over edges i -> v of P_ic, 0 if there are none
                                                   P = relu(D_l Wp_l + bp_l)
    H_l     = relu(Z_l), its rows divided by their norms if wanted, for l < L      logits = Z_L

and backwards, with G_l the gradient of Z_l, term by term of Z_l = sum_t N_t D_l W_t + b_l,

    dW_t = (N_t D_l)^T G_l      db_l = column sums of G_l      dH_{l-1} = sum_t N_t^T G_l W_t^T * mask_l
    for max  dM = G_l Wn^T goes to where M came from, of equal values to the vertex of lowest number,
             dWp = D^T dP, dbp = column sums of dP, and dP Wp^T is a term of dH
    G_{l-1} = (dH - n (n . dH)) / norm * [Z_{l-1} > 0] with n = H_{l-1}, or dH * [Z_{l-1} > 0]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from scipy import sparse

from dorylus_hpc.nn.init import glorot_uniform, zeros
from dorylus_hpc.nn.oracle import (
    Matrix,
    OracleModel,
    OracleSettings,
    Params,
    cross_entropy,
    drop,
    layer_widths,
)

NAMES = {
    "mean": ("Ws", "Wn", "b"),
    "gcn": ("W", "b"),
    "max": ("Wp", "bp", "Ws", "Wn", "b"),
}  # of a layer's tensors, in order


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


def sage_oracle(adjacency: Any, settings: OracleSettings) -> OracleModel:
    """Return the GraphSAGE of the settings' aggregator over one graph."""
    if settings.aggregator == "max":
        return _MaxOracle(adjacency, settings)
    return _MeanOracle(adjacency, settings)


class _SageOracle(ABC):
    """What all aggregators share; `_product` returns Z and what `_back` wants of it."""

    def __init__(self, settings: OracleSettings) -> None:
        self._settings = settings

    @abstractmethod
    def _product(self, d: Matrix, tensors: tuple[np.ndarray, ...]) -> tuple[np.ndarray, Any]:
        """Return Z of a layer, and what `_back` wants of it."""

    @abstractmethod
    def _back(
        self, g: np.ndarray, d: Matrix, tensors: tuple[np.ndarray, ...], saved: Any
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """Return the gradients of a layer's tensors, and of its input."""

    def logits(self, x: Matrix, params: Params) -> np.ndarray:
        """As `OracleModel`."""
        for layer, tensors in enumerate(params, start=1):
            z, _ = self._product(x, tensors)
            x = self._activate(z)[0] if layer < len(params) else z
        return x

    def loss_and_gradients(
        self, x: Matrix, labels: np.ndarray, train: np.ndarray, params: Params, epoch: int
    ) -> tuple[float, Params]:
        """As `OracleModel`."""
        h: Matrix = x
        passed: list[Any] = []
        for layer, tensors in enumerate(params, start=1):
            d, multiplier = drop(h, self._settings, epoch, layer)
            z, saved = self._product(d, tensors)
            passed.append((d, multiplier, z, saved))
            h, _ = self._activate(z)
        loss, g = cross_entropy(z, labels, train, self._settings.class_weights)
        gradients: Params = []
        for layer in range(len(params), 0, -1):
            d, multiplier, _, saved = passed[layer - 1]
            d_tensors, d_d = self._back(g, d, params[layer - 1], saved)
            gradients.append(d_tensors)
            if layer > 1:
                z = passed[layer - 2][2]
                n, norm = self._activate(z)
                d_h = d_d * multiplier
                if norm is not None:
                    d_h = (d_h - n * (n * d_h).sum(axis=1, keepdims=True)) / norm
                g = d_h * (z > 0)
        return loss, gradients[::-1]

    def _activate(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the activation, and the norms that rows were divided by."""
        a = np.maximum(z, 0)
        if self._settings.l2_normalise == "off":
            return a, None
        norm = np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-12)
        return a / norm, norm


class _MeanOracle(_SageOracle):
    """The means: Z is a sum of terms, each a matrix times D times weights."""

    def __init__(self, adjacency: Any, settings: OracleSettings) -> None:
        super().__init__(settings)
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

    def _product(self, d: Matrix, tensors: tuple[np.ndarray, ...]) -> tuple[np.ndarray, Any]:
        *weights, b = tensors
        return sum(term @ (d @ w) for term, w in zip(self._terms, weights, strict=True)) + b, None

    def _back(
        self, g: np.ndarray, d: Matrix, tensors: tuple[np.ndarray, ...], saved: Any
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        *weights, _ = tensors
        d_d = sum(term.T @ (g @ w.T) for term, w in zip(self._terms, weights, strict=True))
        return (*((term @ d).T @ g for term in self._terms), g.sum(axis=0)), d_d


class _MaxOracle(_SageOracle):
    """The maximum, vertex by vertex."""

    def __init__(self, adjacency: Any, settings: OracleSettings) -> None:
        super().__init__(settings)
        edges = adjacency.tocoo()
        self._near = [
            np.unique(edges.row[(edges.col == v) & (edges.row != v)]) for v in range(edges.shape[0])
        ]

    def start(self, f_in: int, n_classes: int) -> Params:
        """As `OracleModel`."""
        seed, dtype, pool = self._settings.seed, self._settings.dtype, self._settings.hidden
        return [
            (
                glorot_uniform(seed, layer, rows, pool, dtype, draw=2),
                zeros(pool, dtype),
                glorot_uniform(seed, layer, rows, columns, dtype),
                glorot_uniform(seed, layer, pool, columns, dtype, draw=1),
                zeros(columns, dtype),
            )
            for layer, (rows, columns) in enumerate(layer_widths(f_in, n_classes, self._settings), start=1)
        ]

    def _product(self, d: Matrix, tensors: tuple[np.ndarray, ...]) -> tuple[np.ndarray, Any]:
        wp, bp, ws, wn, b = tensors
        p = np.maximum(d @ wp + bp, 0)
        m = np.array([p[near].max(axis=0, initial=0) for near in self._near])
        return d @ ws + m @ wn + b, (p, m)

    def _back(
        self, g: np.ndarray, d: Matrix, tensors: tuple[np.ndarray, ...], saved: Any
    ) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        wp, _, ws, wn, _ = tensors
        p, m = saved
        d_m, d_p = g @ wn.T, np.zeros_like(p)
        columns = np.arange(p.shape[1])
        for v, near in enumerate(self._near):
            if near.size:
                d_p[near[p[near].argmax(axis=0)], columns] += d_m[v]
        d_p *= p > 0
        d_tensors = (d.T @ d_p, d_p.sum(axis=0), d.T @ g, m.T @ g, g.sum(axis=0))
        return d_tensors, g @ ws.T + d_p @ wp.T
