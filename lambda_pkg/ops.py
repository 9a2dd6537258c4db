"""A dense task as data: a short program over named arrays.

A graph server writes down what an interval's dense stages compute, and a worker, or the server's own
cores, run it::

    ["apply_vertex",      {},                  ["M1", "W1"],         ["H1"]]
    ["bias_relu_dropout", {"p": 0.5, ...},     ["H1", "b1", "gids"], ["H1"]]

An op names a function, its parameters, the arrays it reads and those it makes. Only functions of the table
below can be named. Arrays are cut into *chunks* of rows where a task says so: those that have rows are then
received, computed and filled chunk after chunk, and results without rows (gradients, the loss) are added up
in that order. The result depends on the size of the chunks, never on who computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lambda_pkg import attention, dense, edges

Op = Sequence[Any]  # (function, parameters, names read, names made)


@dataclass(frozen=True)
class OutputSpec:
    """An array that a task gives back.

    Attributes
    ----------
    shape
        Of the whole.
    dtype
        As NumPy writes it.
    rows
        Whether its rows are those of the interval; otherwise chunks are added up.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: bool


class Chunks:
    """Runs a program chunk after chunk.

    Parameters
    ----------
    ops
        The program.
    constants
        The inputs without rows, by name.
    outputs
        What to keep, by name.
    buffers
        Where to put them, by name; made where absent.

    Attributes
    ----------
    results : dict
        The outputs, by name; complete after the last chunk.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        constants: Mapping[str, np.ndarray],
        outputs: Mapping[str, OutputSpec],
        buffers: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        check_program(ops)
        self._ops, self._constants, self._outputs = ops, constants, outputs
        self._first = True
        given = buffers or {}
        self.results = {
            name: given[name] if name in given else np.empty(spec.shape, spec.dtype)
            for name, spec in outputs.items()
        }

    def add(self, start: int, stop: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Compute rows [start, stop), the next ones, from these rows of the inputs that have rows."""
        made = _run(self._ops, {**self._constants, **arrays})
        for name, spec in self._outputs.items():
            result, value = self.results[name], made[name]
            if spec.rows:
                result[start:stop] = value
            elif self._first:
                result[...] = value
            else:
                np.add(result, value, out=result)
        self._first = False


def run(
    ops: Sequence[Op],
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, OutputSpec],
    *,
    rows: frozenset[str],
    chunk: int = 0,
    buffers: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Run a whole task.

    Parameters
    ----------
    ops
        The program.
    inputs
        By name; not changed.
    outputs
        What to return.
    rows
        Names of the inputs whose rows are those of the interval; there is one at least.
    chunk
        Rows a chunk; 0: all at once.
    buffers
        Where to put outputs; apart from the inputs.

    Returns
    -------
    dict
        The outputs, by name.

    Raises
    ------
    ValueError
        An op that does not exist.
    TypeError, ValueError
        Arrays that do not fit together.
    """
    chunks = Chunks(ops, {name: inputs[name] for name in inputs if name not in rows}, outputs, buffers)
    n = len(inputs[next(iter(rows))])
    for start, stop in chunk_bounds(n, chunk):
        chunks.add(start, stop, {name: inputs[name][start:stop] for name in rows})
    return chunks.results


def chunk_bounds(n: int, chunk: int) -> list[tuple[int, int]]:
    """Return the chunks of `n` rows, all of `chunk` but the last; one if `chunk` or `n` is 0."""
    if chunk <= 0 or n <= chunk:
        return [(0, n)]
    return [(start, min(n, start + chunk)) for start in range(0, n, chunk)]


def check_program(ops: Sequence[Op]) -> None:
    """Refuse a program that names what is not in the table.

    Raises
    ------
    ValueError
        It does.
    """
    for op in ops:
        if len(op) != 4 or op[0] not in _FUNCTIONS:
            raise ValueError(f"unknown op {op!r}: known are {', '.join(_FUNCTIONS)}")


def _run(ops: Sequence[Op], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a program on one chunk; what was given stays as it is."""
    given = set(arrays)
    for name, parameters, reads, makes in ops:
        # What this program made itself, and makes anew, may be written over.
        own = bool(makes) and makes[0] == reads[0] and makes[0] not in given
        values = _FUNCTIONS[name](parameters, [arrays[one] for one in reads], len(makes), own)
        arrays.update(zip(makes, values, strict=True))
        given.difference_update(makes)
    return arrays


# Each takes its parameters, the arrays read, how many are wanted, and whether the first may be written over.
_Function = Callable[[Mapping[str, Any], list[np.ndarray], int, bool], Sequence[np.ndarray]]


def _apply_vertex(_: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool) -> list[np.ndarray]:
    return [dense.apply_vertex(*arrays)]


def _apply_vertex_backward(
    _: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    d_w, d_h = dense.apply_vertex_backward(*arrays, need_d_h=wanted == 2)
    return [d_w] if d_h is None else [d_w, d_h]


def _add_product(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    z, h, w = arrays
    w = w.T if parameters.get("transposed") else w
    return [dense.apply_vertex(h, w, out=z if own else z.copy(), accumulate=True)]


def _add_gradient(_: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool) -> list[np.ndarray]:
    d_h, h, w, d_out = arrays
    d_h = d_h if own else d_h.copy()
    d_w = dense.apply_vertex_backward(h, w, d_out, d_h=d_h, accumulate=True)[0]
    return [d_h, d_w]


def _add_bias(_: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool) -> list[np.ndarray]:
    z, bias = arrays
    return [np.add(z, bias, out=z if own else None)]


def _bias_relu_dropout(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    z, bias, gids = arrays
    return [dense.bias_relu_dropout(z, bias, gids, out=z if own else None, **parameters)]


def _relu_dropout_backward(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    d_out, activated = arrays
    return [dense.relu_dropout_backward(d_out, activated, parameters["p"], out=d_out if own else None)]


def _bias_elu_dropout(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    z, bias, gids = arrays
    return [dense.bias_elu_dropout(z, bias, gids, out=z if own else None, **parameters)]


def _elu_dropout_backward(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    d_h, h, gids = arrays
    return [dense.elu_dropout_backward(d_h, h, gids, out=d_h if own else None, **parameters)]


def _l2_normalise_dropout(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    a, gids = arrays
    return [dense.l2_normalise_dropout(a, gids, out=a if own else None, **parameters)]


def _l2_normalise_backward(
    _: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    d_out, a = arrays
    return [dense.l2_normalise_backward(d_out, a, out=d_out if own else None)]


def _layer_norm(_: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool) -> list[np.ndarray]:
    return [dense.layer_norm(*arrays)]


def _layer_norm_backward(
    _: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    return [*dense.layer_norm_backward(*arrays, out=arrays[0] if own else None)]


def _add_rows(_: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool) -> list[np.ndarray]:
    rows, more = arrays
    return [np.add(rows, more, out=rows if own else None)]


def _join_layers(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    return [dense.join_layers(arrays, parameters["how"])]


def _join_backward(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    d_out, joined, *hidden = arrays
    return [dense.join_backward(d_out, joined, hidden, parameters["how"]).copy()]


def _add_join_backward(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    d_h, d_out, joined, *hidden = arrays
    share = dense.join_backward(d_out, joined, hidden, parameters["how"])
    return [np.add(d_h, share, out=d_h if own else None)]


def _scale_rows(_: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool) -> list[np.ndarray]:
    rows, scale = arrays
    return [np.multiply(rows, scale[:, None], out=rows if own else None)]


def _add_self(_: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool) -> list[np.ndarray]:
    x, vertex, eps = arrays
    return [dense.add_self(x, vertex, eps, out=x if own else None)]


def _scale_self(_: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool) -> list[np.ndarray]:
    x, eps = arrays
    return [x * (1 + eps)]


def _self_gradient(
    _: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    return [dense.self_gradient(*arrays)]


def _bias_gradient(
    _: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    return [dense.bias_gradient(*arrays)]


def _softmax_cross_entropy(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    weights = _weights(parameters.get("class_weights"))
    loss, d_logits = dense.softmax_cross_entropy(*arrays, class_weights=weights, scale=parameters["scale"])
    return [np.array([loss]), d_logits]


def _sigmoid_cross_entropy(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    weights = _weights(parameters.get("pos_weight"))
    loss, d_logits = dense.sigmoid_cross_entropy(*arrays, pos_weight=weights, scale=parameters["scale"])
    return [np.array([loss]), d_logits]


def _weights(values: Sequence[float] | None) -> np.ndarray | None:
    return None if values is None else np.array(values, np.float64)


def _tally(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    logits, labels, split = arrays
    return [dense.tally(logits, labels, split, parameters["n_sets"])]


def _attention_transform(
    _: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    return [*attention.transform(*arrays)]


def _attention_transform_backward(
    _: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    return [*attention.transform_backward(*arrays)]


def _mean_heads(_: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool) -> list[np.ndarray]:
    return [attention.mean_heads(*arrays)]


def _mean_heads_backward(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> list[np.ndarray]:
    return [*attention.mean_heads_backward(arrays[0], parameters["heads"])]


def _attend(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> Sequence[np.ndarray]:
    return edges.attend(*arrays, slope=parameters["slope"])[:wanted]


def _attend_targets(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> Sequence[np.ndarray]:
    return edges.attend_targets(*arrays, slope=parameters["slope"])


def _attend_sources(
    parameters: Mapping[str, Any], arrays: list[np.ndarray], wanted: int, own: bool
) -> Sequence[np.ndarray]:
    return edges.attend_sources(*arrays, slope=parameters["slope"])


_FUNCTIONS: dict[str, _Function] = {
    "apply_vertex": _apply_vertex,
    "apply_vertex_backward": _apply_vertex_backward,
    "add_product": _add_product,
    "add_gradient": _add_gradient,
    "add_bias": _add_bias,
    "bias_relu_dropout": _bias_relu_dropout,
    "relu_dropout_backward": _relu_dropout_backward,
    "bias_elu_dropout": _bias_elu_dropout,
    "elu_dropout_backward": _elu_dropout_backward,
    "l2_normalise_dropout": _l2_normalise_dropout,
    "l2_normalise_backward": _l2_normalise_backward,
    "layer_norm": _layer_norm,
    "layer_norm_backward": _layer_norm_backward,
    "add_rows": _add_rows,
    "scale_rows": _scale_rows,
    "join_layers": _join_layers,
    "join_backward": _join_backward,
    "add_join_backward": _add_join_backward,
    "add_self": _add_self,
    "scale_self": _scale_self,
    "self_gradient": _self_gradient,
    "bias_gradient": _bias_gradient,
    "softmax_cross_entropy": _softmax_cross_entropy,
    "sigmoid_cross_entropy": _sigmoid_cross_entropy,
    "tally": _tally,
    "attention_transform": _attention_transform,
    "attention_transform_backward": _attention_transform_backward,
    "attend": _attend,
    "attend_targets": _attend_targets,
    "attend_sources": _attend_sources,
    "mean_heads": _mean_heads,
    "mean_heads_backward": _mean_heads_backward,
}
