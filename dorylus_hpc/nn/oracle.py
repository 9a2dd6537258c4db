"""The oracle: training in one process, written straight from the formulas; here of a GCN.

It is what the engine is tested against, so it shares nothing with it but the definitions of the
start weights and of the dropout masks: no parts, ghosts, intervals, stage programs or kernels. With
``A[i, j]`` the weight of the edge i -> j and ``d_j = sum_i A[i, j]`` (loops left out),

    P       = D^-1/2 (A^T + I) D^-1/2,  D = diag(d + 1)
    Z_l     = P drop_l(H_{l-1}) W_l + b_l          H_0 = X (normalised)
    H_l     = relu(Z_l) for l < L                  logits = Z_L
    loss    = mean over labelled training vertices of -log softmax(logits)[label]
              or, where a vertex may have several classes, mean over these vertices and the classes of
              -log sigmoid(logits) for its classes and -log(1 - sigmoid(logits)) for the others

and backwards, with G_l the gradient of Z_l,

    S_l = P^T G_l      dW_l = drop_l(H_{l-1})^T S_l      db_l = column sums of G_l
    G_{l-1} = (S_l W_l^T) * mask_l * [Z_{l-1} > 0]

Other models bring an `OracleModel` of their own: `oracle_sage`, `oracle_gin`, `oracle_gat`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from scipy import sparse

from cython_kernels.reference import dropout, dropout_csr
from dorylus_hpc.nn.init import glorot_uniform, zeros

Params = list[tuple[np.ndarray, ...]]  # of each layer; of a GCN (W, b)
Matrix = Any  # ndarray or scipy.sparse.csr_array: both know `@`, `.T` and `.shape`

_ROLES = {"train": 1, "val": 2, "test": 3}
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8
_AVERAGED = 0.1  # share of an epoch's value in a running average


@dataclass(frozen=True)
class OracleSettings:
    """Everything a run depends on besides the data.

    Attributes
    ----------
    layers : int
        Number of layers L; 1 is a softmax regression over propagated features.
    hidden : int
        Width of all layers but the last.
    dropout, input_dropout : float
        Probability of dropping an input of the layers 2..L, and of layer 1.
    lr, weight_decay : float
    optimizer : {'adam', 'sgd'}
    decay_scope : {'first', 'all'}
        Weight matrices that decay (biases never do).
    feature_norm : {'none', 'row', 'standard'}
        Rows divided by their sum of absolute values, or columns by (x - mean) / std over all vertices.
    dtype : {'float32', 'float64'}
        Of all arithmetic after the propagation matrix and the feature normalisation.
    epochs, seed : int
    source_degree : {'in', 'out'}
        Which degree normalises the source of an edge.
    eval_every : int
        Accuracies are kept for the versions 0, K, 2K, ... and the last one.
    aggregator : {'mean', 'gcn', 'max'}
        Of GraphSAGE.
    l2_normalise : {'on', 'off'}
        Rows of GraphSAGE's hidden layers have norm 1.
    epsilon : {'learned', 'fixed'}
        Of GIN.
    heads, output_heads : int
        Of GAT's hidden layers, in which `hidden` is the width of each, and of its last one.
    negative_slope, attention_dropout : float
        Of GAT.
    class_weights : 'none', 'balanced' or tuple of float
        Factors of classes in the loss.
    metric : {'auto', 'accuracy', 'f1-micro', 'f1-macro', 'auc'}
        What is kept as accuracies; auto: f1-micro where a vertex may have several classes, else accuracy.
    norm : {'none', 'layer', 'batch'}
    residual : {'off', 'on'}
    jumping : {'none', 'cat', 'max'}
        Of all but GAT: see `oracle_deep`.
    """

    layers: int = 2
    hidden: int = 16
    dropout: float = 0.5
    input_dropout: float = 0.5
    lr: float = 0.01
    optimizer: str = "adam"
    weight_decay: float = 5e-4
    decay_scope: str = "first"
    feature_norm: str = "none"
    dtype: str = "float64"
    epochs: int = 200
    seed: int = 0
    source_degree: str = "in"
    eval_every: int = 1
    aggregator: str = "mean"
    l2_normalise: str = "off"
    epsilon: str = "learned"
    heads: int = 8
    output_heads: int = 1
    negative_slope: float = 0.2
    attention_dropout: float = 0.0
    class_weights: str | tuple[float, ...] = "none"
    metric: str = "auto"
    norm: str = "none"
    residual: str = "off"
    jumping: str = "none"

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            "optimizer": ("adam", "sgd"),
            "decay_scope": ("first", "all"),
            "feature_norm": ("none", "row", "standard"),
            "source_degree": ("in", "out"),
            "aggregator": ("mean", "gcn", "max"),
            "l2_normalise": ("on", "off"),
            "epsilon": ("learned", "fixed"),
            "metric": ("auto", "accuracy", "f1-micro", "f1-macro", "auc"),
            "norm": ("none", "layer", "batch"),
            "residual": ("off", "on"),
            "jumping": ("none", "cat", "max"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if np.dtype(self.dtype) not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"dtype must be float32 or float64, got {self.dtype!r}")
        least = {"layers": 1, "hidden": 1, "epochs": 0, "eval_every": 1, "heads": 1, "output_heads": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")


@dataclass(eq=False)
class OracleResult:
    """What a run of the oracle leaves.

    Attributes
    ----------
    losses : ndarray, (epochs,)
        Training loss of epoch e (with its dropout, without decay) at index e - 1.
    params : list of tuple of ndarray
        The tensors of each layer, after the last update; of a GCN (W, b).
    first_gradients : list of tuple of ndarray
        Gradients of the loss in epoch 1, without decay; empty if there were no epochs.
    logits : ndarray, (n, C)
        Of the last weights, without dropout.
    accuracies : dict
        Weight version v (the number of updates made) -> {'train', 'val', 'test'}, the metric of the
        labelled vertices of that role from a forward without dropout; NaN if there are none.
    """

    losses: np.ndarray
    params: Params
    first_gradients: Params
    logits: np.ndarray
    accuracies: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def best_version(self) -> int:
        """The earliest version of the highest validation accuracy (the last one if there is none)."""
        known = {v: a["val"] for v, a in self.accuracies.items() if not np.isnan(a["val"])}
        return max(known, key=lambda v: (known[v], -v)) if known else max(self.accuracies)


def propagation_matrix(adjacency: Any, source_degree: str = "in", dtype: Any = np.float64) -> Matrix:
    """Return P, computed in float64 and cast.

    Parameters
    ----------
    adjacency : SciPy sparse, (n, n)
        ``A[i, j]`` is the weight of the edge i -> j. Duplicates count, loops do not.
    source_degree : {'in', 'out'}
    dtype : dtype

    Returns
    -------
    csr_array, (n, n)
        Row j holds the in-edges of vertex j.
    """
    n = adjacency.shape[0]
    edges = adjacency.tocoo()
    proper = edges.row != edges.col
    source, target = edges.row[proper], edges.col[proper]
    weight = edges.data[proper].astype(np.float64)
    at_target = 1.0 / np.sqrt(1.0 + np.bincount(target, weight, n))
    degree = np.bincount(target if source_degree == "in" else source, weight, n)
    at_source = 1.0 / np.sqrt(1.0 + degree)
    transposed = sparse.coo_array((weight, (target, source)), shape=(n, n)).tocsr()
    loops = sparse.eye_array(n, format="csr")
    product = sparse.diags_array(at_target) @ (transposed + loops) @ sparse.diags_array(at_source)
    return sparse.csr_array(product).astype(dtype)


def normalise_features(features: Any, norm: str, dtype: Any = np.float64) -> Matrix:
    """Return the input X of layer 1, computed in float64 and cast; sparse features stay sparse.

    Parameters
    ----------
    features : ndarray or SciPy sparse, (n, f)
    norm : {'none', 'row', 'standard'}
        'standard' makes sparse features dense.
    dtype : dtype

    Returns
    -------
    ndarray or csr_array, (n, f)
    """
    x: Matrix = sparse.csr_array(features) if sparse.issparse(features) else np.asarray(features)
    x = x.astype(np.float64)
    if norm == "row":
        total = np.asarray(abs(x).sum(axis=1)).ravel()
        scale = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
        x = sparse.csr_array(sparse.diags_array(scale) @ x) if sparse.issparse(x) else x * scale[:, None]
    elif norm == "standard":
        x = x.toarray() if sparse.issparse(x) else x
        std = x.std(axis=0)
        x = (x - x.mean(axis=0)) / np.where(std == 0, 1.0, std)
    return x.astype(dtype)


def layer_widths(f_in: int, n_classes: int, settings: OracleSettings) -> list[tuple[int, int]]:
    """Return the columns of each layer's input and output."""
    return list(pairwise([f_in] + [settings.hidden] * (settings.layers - 1) + [n_classes]))


def start_params(f_in: int, n_classes: int, settings: OracleSettings) -> Params:
    """Return the weights and biases of version 0 for `f_in` features."""
    widths = layer_widths(f_in, n_classes, settings)
    return [
        (glorot_uniform(settings.seed, layer, rows, columns, settings.dtype), zeros(columns, settings.dtype))
        for layer, (rows, columns) in enumerate(widths, start=1)
    ]


def predict_logits(propagation: Matrix, x: Matrix, params: Params) -> np.ndarray:
    """Return the logits of all vertices without dropout.

    Parameters
    ----------
    propagation : csr_array, (n, n)
    x : ndarray or csr_array, (n, f)
    params : list of (W, b)

    Returns
    -------
    ndarray, (n, C)
    """
    for layer, (w, b) in enumerate(params, start=1):
        z = propagation @ (x @ w) + b
        x = np.maximum(z, 0) if layer < len(params) else z
    return x


def loss_and_gradients(
    propagation: Matrix,
    x: Matrix,
    labels: np.ndarray,
    train: np.ndarray,
    params: Params,
    settings: OracleSettings,
    epoch: int,
) -> tuple[float, Params]:
    """Return the training loss of one epoch, with its dropout masks, and its gradients.

    Parameters
    ----------
    propagation : csr_array, (n, n)
    x : ndarray or csr_array, (n, f)
        Normalised features.
    labels : ndarray of int, (n,)
    train : ndarray of bool, (n,)
        The vertices of the loss.
    params : list of (W, b)
    settings : OracleSettings
        Its dropout probabilities and seed count here.
    epoch : int
        From 1.

    Returns
    -------
    loss : float
    gradients : list of (dW, db)
        Without weight decay.
    """
    dropped: list[Matrix] = []  # drop_l(H), what layer l multiplies
    slopes: list[Any] = []  # d drop_l(relu(Z)) / dZ, from layer 2 on
    h, positive = x, None
    for layer, (w, b) in enumerate(params, start=1):
        d, multiplier = drop(h, settings, epoch, layer)
        dropped.append(d)
        slopes.append(None if positive is None else multiplier * positive)
        z = propagation @ (d @ w) + b
        positive = (z > 0).astype(z.dtype)
        h = np.maximum(z, 0)
    loss, g = cross_entropy(z, labels, train, settings.class_weights)
    gradients: Params = []
    for d, slope, (w, _) in zip(reversed(dropped), reversed(slopes), reversed(params), strict=True):
        s = propagation.T @ g
        gradients.append((d.T @ s, g.sum(axis=0)))
        if slope is not None:
            g = (s @ w.T) * slope
    return loss, gradients[::-1]


class OracleModel(Protocol):
    """A model over one graph. Parameters are those of `predict_logits` and `loss_and_gradients`."""

    def start(self, f_in: int, n_classes: int) -> Params:
        """Return the weights of version 0."""

    def logits(self, x: Matrix, params: Params) -> np.ndarray:
        """Return the logits of all vertices without dropout."""

    def loss_and_gradients(
        self, x: Matrix, labels: np.ndarray, train: np.ndarray, params: Params, epoch: int
    ) -> tuple[float, Params]:
        """Return the training loss of one epoch, with its dropout masks, and its gradients."""


class GcnOracle:
    """A GCN over one graph."""

    def __init__(self, adjacency: Any, settings: OracleSettings) -> None:
        self._settings = settings
        self._propagation = propagation_matrix(adjacency, settings.source_degree, settings.dtype)

    def start(self, f_in: int, n_classes: int) -> Params:
        """As `OracleModel`."""
        return start_params(f_in, n_classes, self._settings)

    def logits(self, x: Matrix, params: Params) -> np.ndarray:
        """As `OracleModel`."""
        return predict_logits(self._propagation, x, params)

    def loss_and_gradients(
        self, x: Matrix, labels: np.ndarray, train: np.ndarray, params: Params, epoch: int
    ) -> tuple[float, Params]:
        """As `OracleModel`."""
        return loss_and_gradients(self._propagation, x, labels, train, params, self._settings, epoch)


def train_oracle(
    adjacency: Any,
    features: Any,
    labels: np.ndarray,
    split: np.ndarray,
    n_classes: int,
    settings: OracleSettings,
    model: Callable[[Any, OracleSettings], OracleModel] | None = None,
) -> OracleResult:
    """Train a model in one process.

    Parameters
    ----------
    adjacency : SciPy sparse, (n, n)
        ``A[i, j]`` is the weight (>= 0) of the edge i -> j; ones if there are no weights. Loops are
        ignored, since the model's self term replaces them; duplicates are summed.
    features : ndarray or SciPy sparse, (n, f)
    labels : ndarray of int, (n,), or of uint8, (n, n_classes)
        -1 where unlabelled: never in the loss nor in an accuracy. Or 1 for each class of a vertex, 0 for the
        others, and 255 where it is not known.
    split : ndarray of uint8, (n,)
        0 none, 1 train, 2 validation, 3 test.
    n_classes : int
    settings : OracleSettings
    model : class
        Made of the adjacency and the settings; by default a GCN.

    Returns
    -------
    OracleResult

    Raises
    ------
    ValueError
        Lengths that differ, a label that is no class, or no labelled training vertex.

    References
    ----------
    Kipf and Welling, Semi-supervised classification with graph convolutional networks, ICLR 2017.
    """
    labels, split = np.asarray(labels), np.asarray(split)
    _check_data(adjacency, features, labels, split, n_classes)
    made = (model or GcnOracle)(adjacency, settings)
    x = normalise_features(features, settings.feature_norm, settings.dtype)
    labelled = labels >= 0 if labels.ndim == 1 else (labels <= 1).any(axis=1)
    roles = {role: (split == code) & labelled for role, code in _ROLES.items()}
    params = made.start(x.shape[1], n_classes)
    averaged: Callable[[int], Collection[int]] = getattr(made, "averaged", lambda layer: ())
    moments = [[(np.zeros_like(p), np.zeros_like(p)) for p in tensors] for tensors in params]
    result = OracleResult(np.zeros(settings.epochs), params, [], np.empty(0))
    for epoch in range(1, settings.epochs + 1):
        if (epoch - 1) % settings.eval_every == 0:
            result.accuracies[epoch - 1] = _values(made.logits(x, params), labels, roles, settings.metric)
        loss, gradients = made.loss_and_gradients(x, labels, roles["train"], params, epoch)
        result.losses[epoch - 1] = loss
        if epoch == 1:
            result.first_gradients = gradients
        params = _update(params, gradients, moments, epoch, settings, averaged)
    result.params, result.logits = params, made.logits(x, params)
    result.accuracies[settings.epochs] = _values(result.logits, labels, roles, settings.metric)
    return result


def drop(h: Matrix, settings: OracleSettings, epoch: int, layer: int) -> tuple[Matrix, Any]:
    """Return drop_l(h), and the multipliers that made it (dense h only; 1 without dropout).

    Parameters
    ----------
    h : ndarray or csr_array, (n, f)
    settings : OracleSettings
    epoch, layer : int
        From 1.
    """
    p = settings.input_dropout if layer == 1 else settings.dropout
    if p == 0:
        return h, 1
    gids = np.arange(h.shape[0], dtype=np.int64)
    if sparse.issparse(h):
        indptr, indices = h.indptr.astype(np.int64), h.indices.astype(np.int32)
        data = dropout_csr(indptr, indices, h.data, gids, p, seed=settings.seed, epoch=epoch, layer=layer)
        return sparse.csr_array((data, h.indices, h.indptr), shape=h.shape), None
    multiplier = dropout(np.ones_like(h), gids, p, seed=settings.seed, epoch=epoch, layer=layer)
    return h * multiplier, multiplier


def cross_entropy(
    logits: np.ndarray,
    labels: np.ndarray,
    train: np.ndarray,
    class_weights: str | tuple[float, ...] = "none",
) -> tuple[float, np.ndarray]:
    """Return the mean of -log softmax at the labels of the rows `train`, and its gradient.

    Parameters
    ----------
    logits : ndarray, (n, C)
    labels : ndarray of int, (n,), or of uint8, (n, C): then of -log sigmoid, the mean over classes, too
    train : ndarray of bool, (n,)
    class_weights : 'none', 'balanced' or tuple of float, (C,)
        The mean is weighted by them; of sigmoids, those of classes that a vertex has are multiplied.
    """
    rows = np.flatnonzero(train)
    if labels.ndim == 2:
        return _sigmoid_cross_entropy(logits, labels, rows, class_weights)
    if class_weights != "none":
        return _weighted_cross_entropy(logits, labels, rows, class_weights)
    z = logits[rows] - logits[rows].max(axis=1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    at_label = np.arange(rows.size), labels[rows]
    d_rows = np.exp(log_p)
    d_rows[at_label] -= 1
    d_logits = np.zeros_like(logits)
    d_logits[rows] = d_rows / rows.size
    return float(-log_p[at_label].mean()), d_logits


def _weighted_cross_entropy(
    logits: np.ndarray, labels: np.ndarray, rows: np.ndarray, class_weights: Any
) -> tuple[float, np.ndarray]:
    onehot = np.eye(logits.shape[1])[labels[rows]]
    members = onehot.sum(axis=0)
    if class_weights == "balanced":
        w = np.where(members > 0, rows.size / (logits.shape[1] * np.maximum(members, 1)), 1.0)
    else:
        w = np.array(class_weights)
    each = (onehot * w).sum(axis=1)
    z = logits[rows].astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    d_logits = np.zeros_like(logits)
    d_logits[rows] = each[:, None] * (p - onehot) / each.sum()
    return float(-(each * (onehot * log_p).sum(axis=1)).sum() / each.sum()), d_logits


def _sigmoid_cross_entropy(
    logits: np.ndarray, labels: np.ndarray, rows: np.ndarray, class_weights: Any
) -> tuple[float, np.ndarray]:
    z, known = logits[rows].astype(np.float64), labels[rows] <= 1
    y, not_y = (labels[rows] == 1).astype(np.float64), (labels[rows] == 0).astype(np.float64)
    members, others = y.sum(axis=0), not_y.sum(axis=0)
    if class_weights == "balanced":
        w = np.where((members > 0) & (others > 0), others / np.maximum(members, 1), 1.0)
    else:
        w = np.ones(z.shape[1]) if class_weights == "none" else np.array(class_weights)
    log_p, log_q = -np.logaddexp(0, -z), -np.logaddexp(0, z)  # of sigmoid and 1 - sigmoid
    d_logits = np.zeros_like(logits)
    d_logits[rows] = (not_y * np.exp(log_p) - w * y * np.exp(log_q)) / known.sum()
    return float(-(w * y * log_p + not_y * log_q).sum() / known.sum()), d_logits


def _update(
    params: Params,
    gradients: Params,
    moments: Sequence[Any],
    t: int,
    settings: OracleSettings,
    averaged: Callable[[int], Collection[int]],
) -> Params:
    """Update number t of all tensors; `moments` (Adam) change in place.

    Which tensors of a layer are running averages `averaged` says: their gradients are an epoch's values.
    """
    new: Params = []
    for layer, of_layer in enumerate(zip(params, gradients, moments, strict=True), start=1):
        decays = settings.decay_scope == "all" or layer == 1
        tensors = []
        for place, (p, d_p, m_p) in enumerate(zip(*of_layer, strict=True)):
            if place in averaged(layer):
                tensors.append((1 - _AVERAGED) * p + _AVERAGED * d_p)
                continue
            if decays and p.ndim == 2:
                d_p = d_p + settings.weight_decay * p
            tensors.append(_descend(p, d_p, m_p, t, settings))
        new.append(tuple(tensors))
    return new


def _descend(p: np.ndarray, g: np.ndarray, moments: Any, t: int, settings: OracleSettings) -> np.ndarray:
    if settings.optimizer == "sgd":
        return p - settings.lr * g
    m, v = moments
    m[...] = _BETA1 * m + (1 - _BETA1) * g
    v[...] = _BETA2 * v + (1 - _BETA2) * g**2
    return p - settings.lr * (m / (1 - _BETA1**t)) / (np.sqrt(v / (1 - _BETA2**t)) + _EPS)


def _values(
    logits: np.ndarray, labels: np.ndarray, roles: dict[str, np.ndarray], metric: str
) -> dict[str, float]:
    """Return the metric by role."""
    if metric == "auto":
        metric = "accuracy" if labels.ndim == 1 else "f1-micro"
    return {
        role: _value(logits[rows], labels[rows], metric) if rows.any() else float("nan")
        for role, rows in roles.items()
    }


def _value(logits: np.ndarray, labels: np.ndarray, metric: str) -> float:
    if metric == "auc":
        score = logits[:, 1].astype(np.float64) - logits[:, 0]
        positive, negative = score[labels == 1][:, None], score[labels == 0]
        return float(((positive > negative) + 0.5 * (positive == negative)).mean())
    if labels.ndim == 2:
        answer, true = (logits > 0) & (labels <= 1), labels == 1
    else:
        classes = np.arange(logits.shape[1])
        answer, true = logits.argmax(axis=1)[:, None] == classes, labels[:, None] == classes
    if metric == "accuracy":
        return float((answer == true).all(axis=1).mean())
    right, wrong = (answer & true).sum(axis=0), (answer ^ true).sum(axis=0)
    if metric == "f1-micro":
        return float(2 * right.sum() / max(2 * right.sum() + wrong.sum(), 1))
    seen = right + wrong > 0
    return float((2 * right[seen] / (2 * right[seen] + wrong[seen])).mean()) if seen.any() else 0.0


def _check_data(adjacency: Any, features: Any, labels: np.ndarray, split: np.ndarray, n_classes: int) -> None:
    n = len(labels)
    shapes = {"adjacency": adjacency.shape, "features": features.shape, "split": split.shape}
    if adjacency.shape != (n, n) or features.shape[0] != n or split.shape != (n,) or labels.ndim > 2:
        raise ValueError(f"{n} labels (shape {labels.shape}) need as many rows everywhere, got {shapes}")
    if labels.ndim == 2:
        if labels.shape[1] != n_classes or ((labels > 1) & (labels < 255)).any():
            raise ValueError(f"labels of shape {labels.shape} must be 0 or 1 in {n_classes} columns, or 255")
        if not ((split == 1) & (labels <= 1).any(axis=1)).any():
            raise ValueError("there is no labelled training vertex (split == 1 and labels below 255)")
        return
    if labels.min(initial=-1) < -1 or labels.max(initial=-1) >= n_classes:
        wrong = int(np.flatnonzero((labels < -1) | (labels >= n_classes))[0])
        raise ValueError(
            f"label {labels[wrong]} of vertex {wrong} is not -1 and not below {n_classes} classes"
        )
    if not ((split == 1) & (labels >= 0)).any():
        raise ValueError("there is no labelled training vertex (split == 1 and label >= 0)")
