"""Training epochs of DGL and of PyTorch Geometric, for `bench.epoch`.

    PYTHON bench/peer_epoch.py --library dgl --data graph.npz --weights start.npz ... -o result.json
    PYTHON bench/peer_epoch.py --probe -o found.json

`bench.epoch` starts this file, with a Python that has the library; nothing of this project is imported. One
epoch is a forward on the whole graph, cross entropy over the training vertices, a backward and a step of
Adam. The graph has all its formats, self loops and scales before the first epoch.

- DGL's GCN is made of its built-in functions, as its GraphConv is, but the rows are scaled where they are
  narrow, by scales that are computed once; GraphConv would scale wide features in every epoch. GraphSAGE and
  GAT are `dgl.nn.SAGEConv` and `dgl.nn.GATConv`.
- PyTorch Geometric's layers get a CSR tensor (GCN with its values in place), GATConv an `edge_index`.
- With ``--constant`` the first aggregate, of features that never change, is computed once, by hand.

Start weights come from a file, with this project's names: ``W1, b1, ...`` (GCN), ``Ws1, Wn1, b1, ...``
(GraphSAGE), ``W1``, two attention vectors and ``b1`` (GAT). Start with ``--help`` for the options.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LIBRARIES = {"dgl": "dgl", "pyg": "torch_geometric"}
LOOPS = {"gcn": True, "sage": False, "gat": True}  # a vertex is among its own neighbours
SLOPE = 0.2  # of GAT's LeakyReLU
ATTENTION = (("as", "at"), ("a_source", "a_target"), ("asrc", "adst"), ("al", "ar"))
Arrays = Mapping[str, np.ndarray]
LayerCall = Callable[[Any], Any]


# ---- graph and weights ----


def with_loops(indptr: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put an edge of each vertex to itself in front of its others."""
    n = len(indptr) - 1
    return indptr + np.arange(n + 1), np.insert(indices, indptr[:-1], np.arange(n, dtype=indices.dtype))


def split_layers(model: str, weights: Arrays, heads: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Sort the tensors by layer; those of GAT get the names of what they are.

    Raises
    ------
    ValueError
        There are other tensors than this file knows.
    """
    count = sum(name.rstrip("0123456789") == "b" for name in weights)
    layers = []
    for number in range(1, count + 1):
        mine = {
            name.removesuffix(str(number)).rstrip("_"): tensor
            for name, tensor in weights.items()
            if name.rstrip("0123456789") + str(number) == name
        }
        if model == "gat":
            mine = _attention(mine, heads[number - 1])
        wanted = {"gcn": {"W", "b"}, "sage": {"Ws", "Wn", "b"}, "gat": {"W", "source", "target", "b"}}[model]
        if set(mine) != wanted:
            raise ValueError(f"layer {number} of {model} has the tensors {sorted(mine)}, known are {wanted}")
        layers.append(mine)
    return layers


def _attention(tensors: dict[str, np.ndarray], heads: int) -> dict[str, np.ndarray]:
    for source, target in ATTENTION:
        if {source, target} <= set(tensors):
            found = dict(tensors)
            found["source"], found["target"] = (
                found.pop(name).reshape(1, heads, -1) for name in (source, target)
            )
            return found
    return tensors


class Data:
    """A graph's arrays, and as tensors what every library needs of them."""

    def __init__(self, torch: Any, arrays: Arrays, loops: bool) -> None:
        indptr, indices = arrays["indptr"], arrays["indices"]
        self.indptr, self.indices = with_loops(indptr, indices) if loops else (indptr, indices)
        self.n = len(indptr) - 1
        # Built in float64, as this project does.
        degrees = np.maximum(np.diff(self.indptr), 1)
        self.root = (degrees**-0.5).astype(np.float32)
        self.inverse = (1 / degrees).astype(np.float32)
        self.x, self.y, self.train, self.validation = (
            torch.from_numpy(arrays[name]) for name in ("x", "y", "train", "validation")
        )


# ---- DGL ----


class Dgl:
    """The layers of DGL."""

    def __init__(self, torch: Any, data: Data, threads: int) -> None:
        import dgl

        dgl.utils.set_num_threads(threads)
        self.torch, self.ops, self.nn = torch, dgl.ops, dgl.nn
        self.version = dgl.__version__
        edges = np.arange(len(data.indices), dtype=np.int32)
        arrays = (torch.from_numpy(a) for a in (data.indptr.astype(np.int32), data.indices, edges))
        graph = dgl.graph(("csc", tuple(arrays)), num_nodes=data.n).formats(["coo", "csr", "csc"])
        graph.create_formats_()
        self.graph, self.root = graph, torch.from_numpy(data.root)[:, None]

    def aggregate(self, model: str, h: Any) -> Any:
        """What a vertex takes from its neighbours."""
        if model == "sage":
            return self.ops.copy_u_mean(self.graph, h)
        return self.ops.copy_u_sum(self.graph, h * self.root) * self.root

    def gcn(self, tensors: Arrays) -> tuple[LayerCall, list[Any]]:
        w, b = (self.torch.nn.Parameter(self.torch.from_numpy(tensors[name])) for name in ("W", "b"))

        def layer(h: Any) -> Any:
            if w.shape[1] < w.shape[0]:
                return self.aggregate("gcn", h @ w) + b
            return self.aggregate("gcn", h) @ w + b

        return layer, [w, b]

    def sage(self, tensors: Arrays) -> tuple[LayerCall, list[Any]]:
        layer = self.nn.SAGEConv(*tensors["Ws"].shape, "mean")
        fill(self.torch, {layer.fc_self.weight: tensors["Ws"].T, layer.fc_neigh.weight: tensors["Wn"].T})
        fill(self.torch, {layer.fc_self.bias: tensors["b"]})
        return lambda h: layer(self.graph, h), list(layer.parameters())

    def gat(self, tensors: Arrays, last: bool) -> tuple[LayerCall, list[Any]]:
        (f_in, _), (_, heads, width) = tensors["W"].shape, tensors["source"].shape
        layer = self.nn.GATConv(f_in, width, heads, negative_slope=SLOPE, allow_zero_in_degree=True)
        fill(self.torch, {layer.fc.weight: tensors["W"].T, layer.bias: tensors["b"]})
        fill(self.torch, {layer.attn_l: tensors["source"], layer.attn_r: tensors["target"]})
        if last:
            return lambda h: layer(self.graph, h).mean(1), list(layer.parameters())
        return lambda h: layer(self.graph, h).flatten(1), list(layer.parameters())


# ---- PyTorch Geometric ----


class Pyg:
    """The layers of PyTorch Geometric."""

    def __init__(self, torch: Any, data: Data, threads: int) -> None:
        import torch_geometric
        from torch_geometric import nn

        self.torch, self.nn, self.data = torch, nn, data
        self.version = torch_geometric.__version__
        self._matrices: dict[str, Any] = {}

    def matrix(self, model: str) -> Any:
        """The matrix of a model as a CSR tensor; a mean's values are ones, as its layer wants them."""
        if model not in self._matrices:
            data, values = self.data, np.ones(len(self.data.indices), np.float32)
            if model == "gcn":
                values = data.root[data.indices] * np.repeat(data.root, np.diff(data.indptr))
            arrays = (self.torch.from_numpy(a) for a in (data.indptr, data.indices.astype(np.int64), values))
            self._matrices[model] = self.torch.sparse_csr_tensor(*arrays, size=(data.n, data.n))
        return self._matrices[model]

    def aggregate(self, model: str, h: Any) -> Any:
        """What a vertex takes from its neighbours."""
        summed = self.matrix(model) @ h
        return summed * self.torch.from_numpy(self.data.inverse)[:, None] if model == "sage" else summed

    def gcn(self, tensors: Arrays) -> tuple[LayerCall, list[Any]]:
        layer, matrix = self.nn.GCNConv(*tensors["W"].shape, normalize=False), self.matrix("gcn")
        fill(self.torch, {layer.lin.weight: tensors["W"].T, layer.bias: tensors["b"]})
        return lambda h: layer(h, matrix), list(layer.parameters())

    def sage(self, tensors: Arrays) -> tuple[LayerCall, list[Any]]:
        layer, matrix = self.nn.SAGEConv(*tensors["Ws"].shape, aggr="mean"), self.matrix("sage")
        fill(self.torch, {layer.lin_l.weight: tensors["Wn"].T, layer.lin_r.weight: tensors["Ws"].T})
        fill(self.torch, {layer.lin_l.bias: tensors["b"]})
        return lambda h: layer(h, matrix), list(layer.parameters())

    def gat(self, tensors: Arrays, last: bool) -> tuple[LayerCall, list[Any]]:
        (f_in, _), (_, heads, width) = tensors["W"].shape, tensors["source"].shape
        layer = self.nn.GATConv(
            f_in, width, heads, concat=not last, negative_slope=SLOPE, add_self_loops=False
        )
        linear = layer.lin if getattr(layer, "lin", None) is not None else layer.lin_src  # older versions
        fill(self.torch, {linear.weight: tensors["W"].T, layer.bias: tensors["b"]})
        fill(self.torch, {layer.att_src: tensors["source"], layer.att_dst: tensors["target"]})
        targets = np.repeat(np.arange(self.data.n), np.diff(self.data.indptr))
        edges = self.torch.from_numpy(np.stack([self.data.indices.astype(np.int64), targets]))
        return lambda h: layer(h, edges), list(layer.parameters())


def fill(torch: Any, values: Mapping[Any, np.ndarray]) -> None:
    """Set parameters to start values of just their shape.

    Raises
    ------
    ValueError
        A shape is another one: this would be another model.
    """
    with torch.no_grad():
        for parameter, value in values.items():
            if tuple(parameter.shape) != value.shape:
                raise ValueError(f"a parameter of shape {tuple(parameter.shape)} cannot get {value.shape}")
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))


# ---- a model, and its training ----


class Model:
    """Layers with dropout in front and an activation between them."""

    def __init__(self, torch: Any, library: Any, data: Data, options: argparse.Namespace) -> None:
        self.torch, self.x = torch, data.x
        self.dropouts = options.input_dropout, options.dropout
        self.activation = torch.nn.functional.elu if options.model == "gat" else torch.relu
        with np.load(options.weights) as weights:
            tensors = split_layers(options.model, weights, [options.heads, options.output_heads])
        self.layers: list[LayerCall] = []
        self.parameters: list[Any] = []
        for number, mine in enumerate(tensors):
            if options.model == "gat":
                layer, parameters = library.gat(mine, number == len(tensors) - 1)
            elif options.constant and number == 0:
                layer, parameters = self.constant(library.aggregate(options.model, data.x), mine)
            else:
                layer, parameters = getattr(library, options.model)(mine)
            self.layers.append(layer)
            self.parameters += parameters

    def constant(self, aggregate: Any, tensors: Arrays) -> tuple[LayerCall, list[Any]]:
        """A first layer of GCN or GraphSAGE whose aggregate is there already."""
        made = {name: self.torch.nn.Parameter(self.torch.from_numpy(t)) for name, t in tensors.items()}

        def layer(h: Any) -> Any:
            z = aggregate @ made["W" if "W" in made else "Wn"] + made["b"]
            return z + h @ made["Ws"] if "Ws" in made else z

        return layer, list(made.values())

    def __call__(self, training: bool) -> Any:
        h = self.x
        for number, layer in enumerate(self.layers):
            if number:
                h = self.activation(h)
            if training and (p := self.dropouts[min(number, 1)]):
                h = self.torch.nn.functional.dropout(h, p)
            h = layer(h)
        return h


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train; return losses, seconds and accuracies of the epochs, and the peak of the memory."""
    started = time.perf_counter()
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    with np.load(options.data) as arrays:
        data = Data(torch, arrays, LOOPS[options.model])
    library = {"dgl": Dgl, "pyg": Pyg}[options.library](torch, data, options.threads)
    model = Model(torch, library, data, options)
    optimizer = torch.optim.Adam(model.parameters, lr=options.lr, weight_decay=0.0)
    setup = time.perf_counter() - started
    labels = data.y[data.train]
    losses, seconds, accuracies = [], [], []
    for _ in range(options.epochs):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(training=True)[data.train], labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if options.target_accuracy:
            accuracies.append(accuracy(torch, model, data))
        seconds.append(time.perf_counter() - start)
        if options.target_accuracy and accuracies[-1] >= options.target_accuracy:
            break
    return {
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            options.library: library.version,
        },
        "threads": torch.get_num_threads(),
        "setup_seconds": setup,
        "loss": losses,
        "seconds": seconds,
        "val_accuracy": accuracies,
        "peak_rss_bytes": peak_bytes(),
    }


def accuracy(torch: Any, model: Model, data: Data) -> float:
    """Share of the validation vertices that are classified rightly."""
    with torch.no_grad():
        logits = model(training=False)[data.validation]
    return float((logits.argmax(1) == data.y[data.validation]).float().mean())


def peak_bytes() -> int:
    """The most memory of this process; not what it inherits of the one that has started it (ru_maxrss)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def probe() -> dict[str, Any]:
    """Which libraries can be imported: their versions, or what stands in the way."""
    found: dict[str, Any] = {"python": sys.version.split()[0]}
    for name, module in {"torch": "torch", **LIBRARIES}.items():
        try:
            found[name] = {"version": str(__import__(module).__version__)}
        except Exception as error:  # each is made for one version of another, and fails in many ways
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


# ---- command line ----


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="bench/peer_epoch.py", description="Training epochs of DGL or PyTorch Geometric."
    )
    add = parser.add_argument
    add("--probe", action="store_true", help="only say which libraries can be imported")
    add("--library", choices=LIBRARIES)
    add("--data", type=Path, metavar="FILE", help="arrays of the graph, as bench.tasks writes them")
    add("--weights", type=Path, metavar="FILE", help="start weights by name")
    add("--model", choices=LOOPS)
    add("--heads", type=int, default=1, help="of GAT's first layer")
    add("--output-heads", type=int, default=1, help="of GAT's last layer")
    add("--dropout", type=float, default=0.0, help="on hidden values")
    add("--input-dropout", type=float, default=0.0, help="on features")
    add("--constant", action="store_true", help="compute the first aggregate once")
    add("--lr", type=float, default=0.01, help="of Adam")
    add("--epochs", type=int, default=1)
    add("--target-accuracy", type=float, default=0.0, help="of validation, at which to stop; 0: never")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0, help="of dropout")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="for the result, JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or probe."""
    options = parser().parse_args(argv)
    os.environ.setdefault("DGLBACKEND", "pytorch")
    if options.probe:
        result = probe()
    elif None in (options.library, options.data, options.weights, options.model):
        parser().error("--library, --data, --weights and --model are needed")
    else:
        if options.constant and (options.model == "gat" or options.input_dropout):
            parser().error("--constant is for gcn and sage without --input-dropout")
        result = train(options)
    options.output.write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
