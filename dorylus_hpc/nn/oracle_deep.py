"""The oracle of norms, residuals and jumping knowledge, straight from the formulas (see `oracle`).

With f_l the layer of a GCN, a GraphSAGE or a GIN, as their oracles have it, and D_l = drop_l(H_{l-1}),

    Z_l = f_l(D_l) + D_l         the residual of l < L; in layer 1 f_1(D_1) + D_1 Wr
    Y_l = (Z_l - mean) / sqrt(variance + 1e-5) * g_l + s_l      row by row; or Z_l without a norm
          of a batch norm column by column, over all vertices, and f_l has no bias
    H_l = relu(Y_l) for l < L          logits = f_L(J)
    J   = D_L, or [D_2, ..., D_L] side by side, or their maximum, element by element

and backwards, with G_l the gradient of Y_l and dD_l that of D_l,

    ds = sum G    dg = sum G n    dn = G g    dZ = (dn - mean(dn) - n mean(dn n)) / sqrt(variance + 1e-5)
    dD_l = (gradient of f_l) + dZ_l + (share of dJ), of equal values that of the lowest layer
    G_{l-1} = dD_l * mask_l * [Y_{l-1} > 0]

After each epoch the running averages of a batch norm become 0.9 of themselves and 0.1 of the epoch's mean, or
of its variance times n / (n - 1); the logits outside of the training are of these.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from dorylus_hpc.nn.init import glorot_uniform, zeros
from dorylus_hpc.nn.oracle import (
    Matrix,
    OracleSettings,
    Params,
    cross_entropy,
    drop,
    layer_widths,
    propagation_matrix,
)
from dorylus_hpc.nn.oracle_sage import mean_matrix, sum_matrix

_EPSILON = 1e-5


class DeepOracle:
    """A GCN, GraphSAGE (of the means) or GIN (of a learned epsilon) over one graph.

    Parameters
    ----------
    adjacency : SciPy sparse, (n, n)
        ``A[i, j]`` is the weight of the edge i -> j.
    settings : OracleSettings
    model : {'gcn', 'sage', 'gin'}
    """

    def __init__(self, adjacency: Any, settings: OracleSettings, model: str) -> None:
        self._settings, self._model = settings, model
        dtype, n = settings.dtype, adjacency.shape[0]
        if model == "gcn":
            self._terms = [propagation_matrix(adjacency, settings.source_degree, dtype)]
        elif model == "sage":
            identity = sparse.eye_array(n, dtype=dtype, format="csr")
            self._terms = [identity, mean_matrix(adjacency, dtype, itself=False)]
        else:
            self._terms = [sum_matrix(adjacency, dtype, itself=False)]

    def names(self, layer: int) -> list[str]:
        """Return the names of a layer's tensors, in order."""
        last, norm = layer == self._settings.layers, self._settings.norm
        own = {"gcn": ["W", "b"], "sage": ["Ws", "Wn", "b"], "gin": ["U", "a", "W", "b", "e"]}[self._model]
        own += ["Wr"] if layer == 1 and not last and self._settings.residual == "on" else []
        if last or norm == "none":
            return own
        if norm == "batch":
            own.remove("b")
        return [*own, "g", "s", *(("mean", "variance") if norm == "batch" else ())]

    def averaged(self, layer: int) -> frozenset[int]:
        """Return the places of a layer's running averages among its tensors."""
        names = self.names(layer)
        return frozenset(names.index(name) for name in ("mean", "variance") if name in names)

    def start(self, f_in: int, n_classes: int) -> Params:
        """As `OracleModel`."""
        settings, seed, dtype = self._settings, self._settings.seed, self._settings.dtype
        widths = layer_widths(f_in, n_classes, settings)
        if settings.jumping == "cat" and settings.layers > 2:
            widths[-1] = (settings.hidden * (settings.layers - 1), n_classes)
        params: Params = []
        for layer, (rows, columns) in enumerate(widths, start=1):
            inner = settings.hidden
            shapes = {"U": (rows, inner, 0), "Ws": (rows, columns, 0), "Wn": (rows, columns, 1)}
            shapes |= {"W": (inner, columns, 1) if self._model == "gin" else (rows, columns, 0)}
            shapes |= {"Wr": (rows, columns, 3)}
            lengths = {"a": inner, "b": columns, "e": 1, "s": columns, "mean": columns}
            tensors = {name: np.ones(columns, dtype) for name in ("g", "variance")}
            tensors |= {name: zeros(length, dtype) for name, length in lengths.items()}
            for name, (f_in, f_out, draw) in shapes.items():
                tensors[name] = glorot_uniform(seed, layer, f_in, f_out, dtype, draw=draw)
            params.append(tuple(tensors[name] for name in self.names(layer)))
        return params

    def logits(self, x: Matrix, params: Params) -> np.ndarray:
        """As `OracleModel`."""
        return self._forward(x, params, 0)[0]

    def loss_and_gradients(
        self, x: Matrix, labels: np.ndarray, train: np.ndarray, params: Params, epoch: int
    ) -> tuple[float, Params]:
        """As `OracleModel`."""
        logits, inputs, passed = self._forward(x, params, epoch)
        loss, g = cross_entropy(logits, labels, train)
        gradients: list[dict[str, np.ndarray]] = []
        shares: dict[int, Any] = {}  # of dJ, by the layer whose input it belongs to
        for layer in range(len(params), 0, -1):
            tensors = self._named(params, layer)
            d, multiplier, y, normed, deviation, saved, found = passed[layer - 1]
            last = layer == len(params)
            d_z = g
            if normed is not None:
                found |= {"s": g.sum(axis=0), "g": (g * normed).sum(axis=0)}
                d_n = g * tensors["g"]
                along = normed * (d_n * normed).mean(axis=self._axis, keepdims=True)
                d_z = (d_n - d_n.mean(axis=self._axis, keepdims=True) - along) / deviation
            more, d_d = self._back(d_z, d, tensors, saved)
            found |= more
            if layer == 1 and "Wr" in tensors:
                found["Wr"] = d.T @ d_z
            gradients.append(found)
            if layer == 1:
                break
            if last and self._settings.jumping != "none":
                shares = self._shares(d_d, d, inputs)
                d_d = shares.pop(layer)
            else:
                d_d = d_d + shares.pop(layer, 0)
                if self._settings.residual == "on" and not last:
                    d_d = d_d + d_z
            # The mask is that of the layer's own input, not of J.
            g = d_d * inputs[layer - 1][1] * (passed[layer - 2][2] > 0)
        gradients.reverse()
        return loss, [
            tuple(found[name] for name in self.names(layer)) for layer, found in enumerate(gradients, start=1)
        ]

    @property
    def _axis(self) -> int:
        """Over which a norm's means are."""
        return 0 if self._settings.norm == "batch" else 1

    def _named(self, params: Params, layer: int) -> dict[str, np.ndarray]:
        return dict(zip(self.names(layer), params[layer - 1], strict=True))

    def _forward(self, x: Matrix, params: Params, epoch: int) -> tuple[np.ndarray, list[Any], list[Any]]:
        """Return logits, D and mask of each layer, and what the backward wants; no dropout in epoch 0."""
        h: Matrix = x
        inputs: list[Any] = []
        passed: list[Any] = []
        for layer in range(1, len(params) + 1):
            tensors, last = self._named(params, layer), layer == len(params)
            d, multiplier = drop(h, self._settings, epoch, layer) if epoch else (h, 1)
            inputs.append((d, multiplier))
            if last and layer > 2 and self._settings.jumping != "none":
                hidden = [one for one, _ in inputs[1:]]
                d = np.hstack(hidden) if self._settings.jumping == "cat" else np.max(hidden, axis=0)
            z, saved = self._product(d, tensors)
            if self._settings.residual == "on" and not last:
                z = z + (d @ tensors["Wr"] if layer == 1 else d)
            y, normed, deviation = z, None, None
            found: dict[str, np.ndarray] = {}
            if "g" in tensors:
                mean, variance = z.mean(axis=self._axis, keepdims=True), z.var(axis=self._axis, keepdims=True)
                if "mean" in tensors:
                    found = {"mean": mean[0], "variance": z.var(axis=0, ddof=1)}
                    if not epoch:
                        mean, variance = tensors["mean"], tensors["variance"]
                deviation = np.sqrt(variance + _EPSILON).astype(z.dtype)
                normed = (z - mean) / deviation
                y = normed * tensors["g"] + tensors["s"]
            passed.append((d, multiplier, y, normed, deviation, saved, found))
            h = np.maximum(y, 0)
        return y, inputs, passed

    def _shares(self, d_j: np.ndarray, j: np.ndarray, inputs: list[Any]) -> dict[int, np.ndarray]:
        hidden = [one for one, _ in inputs[1:]]
        if len(hidden) == 1:
            return {2: d_j}
        if self._settings.jumping == "cat":
            return dict(enumerate(np.split(d_j, len(hidden), axis=1), start=2))
        winner = np.argmax(np.array(hidden), axis=0)  # the first of equals
        return {layer: d_j * (winner == layer - 2) for layer in range(2, len(hidden) + 2)}

    def _product(self, d: Matrix, tensors: dict[str, np.ndarray]) -> tuple[np.ndarray, Any]:
        """Return what the layer makes of D, and what `_back` wants."""
        if self._model == "gin":
            s = self._terms[0] @ d + d * (1 + tensors["e"][0])
            r = np.maximum(s @ tensors["U"] + tensors["a"], 0)
            return r @ tensors["W"] + tensors.get("b", 0), (s, r)
        weights = [tensors[name] for name in self._matrices]
        z = sum(term @ (d @ w) for term, w in zip(self._terms, weights, strict=True))
        return z + tensors.get("b", 0), None

    @property
    def _matrices(self) -> list[str]:
        return ["W"] if self._model == "gcn" else ["Ws", "Wn"]

    def _back(
        self, g: np.ndarray, d: Matrix, tensors: dict[str, np.ndarray], saved: Any
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the gradients of a layer's own tensors, and of D."""
        if self._model == "gin":
            s, r = saved
            q = (g @ tensors["W"].T) * (r > 0)
            d_s = q @ tensors["U"].T
            d_e = (d.multiply(d_s) if sparse.issparse(d) else d * d_s).sum()
            found = {"U": s.T @ q, "a": q.sum(axis=0), "W": r.T @ g, "b": g.sum(axis=0)}
            found["e"] = np.array([d_e], g.dtype)
            return found, (1 + tensors["e"]) * d_s + self._terms[0].T @ d_s
        names = self._matrices
        found = {name: (term @ d).T @ g for name, term in zip(names, self._terms, strict=True)}
        d_d = sum(term.T @ (g @ tensors[name].T) for name, term in zip(names, self._terms, strict=True))
        return found | {"b": g.sum(axis=0)}, d_d
