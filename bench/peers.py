"""The same work done by others: SciPy, and PyTorch and DGL where they are importable.

A peer gets its matrix in the form it likes best (int32 indices, compressed rows, weights in place), made
once and not counted; the results it makes are its own, since none of them writes into a given array.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

Run = Callable[[], np.ndarray]

NAMES = ("scipy", "torch", "dgl")
SINGLE = ("scipy", "numpy")  # candidates that use one thread whatever they are told
REDUCE = {"sum": "sum", "mean": "mean", "max": "amax"}


@contextmanager
def silence() -> Iterator[None]:
    """Throw away what is written to the terminal inside a ``with`` block, by Python or by a library."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for handle in (*kept, nowhere):
            os.close(handle)


class Peers:
    """Those of the peers that are wanted and can be imported."""

    def __init__(self, wanted: Sequence[str] = NAMES) -> None:
        self.names = [name for name in NAMES if name in wanted and importlib.util.find_spec(name)]
        self.missing: dict[str, str] = {}
        self.torch: Any = None
        self.dgl: Any = None
        with silence():
            if "torch" in self.names or "dgl" in self.names:
                import torch

                self.torch = torch
            if "dgl" in self.names:
                os.environ.setdefault("DGLBACKEND", "pytorch")
                try:
                    import dgl

                    self.dgl = dgl
                except Exception as error:  # it is made for one version of PyTorch, and fails in many ways
                    self.names.remove("dgl")
                    self.missing["dgl"] = f"{type(error).__name__}: {error}"
        for message in ("Sparse CSR tensor support is in beta", "Sparse invariant checks are"):
            warnings.filterwarnings("ignore", message=message)

    def set_threads(self, count: int) -> None:
        """Tell each peer how many threads to use; each has an OpenMP of its own."""
        if self.torch:
            self.torch.set_num_threads(count)
        if self.dgl:
            self.dgl.utils.set_num_threads(count)

    def has(self, name: str) -> bool:
        return name in self.names


class Matrix:
    """One sparse matrix, as each peer wants it."""

    def __init__(self, peers: Peers, indptr: np.ndarray, indices: np.ndarray, n_cols: int) -> None:
        self.peers = peers
        self.indptr, self.indices = indptr.astype(np.int32), indices
        self.shape = len(indptr) - 1, n_cols

    @cached_property
    def dgl_graph(self) -> Any:
        """A graph whose incoming edges are the entries, in their order."""
        return self._dgl_graph(np.empty(0, np.int32))

    def dgl_graph_to_train(self) -> Any:
        """The same in all formats, with numbered edges, which gradients of edges need."""
        graph = self._dgl_graph(np.arange(len(self.indices), dtype=np.int32))
        graph = graph.formats(["coo", "csc", "csr"])
        graph.create_formats_()
        return graph

    def _dgl_graph(self, edges: np.ndarray) -> Any:
        arrays = (self.peers.torch.from_numpy(array) for array in (self.indptr, self.indices, edges))
        return self.peers.dgl.graph(("csc", tuple(arrays)), num_nodes=self.shape[0])

    def torch_csr(self, values: np.ndarray) -> Any:
        torch = self.peers.torch
        arrays = (torch.from_numpy(array) for array in (self.indptr, self.indices, values))
        return torch.sparse_csr_tensor(*arrays, size=self.shape)

    def products(self, x: np.ndarray, data: np.ndarray | None = None, reduce: str = "sum") -> dict[str, Run]:
        """The candidates for a gather: the sum (with weights), mean or maximum over the entries of a row."""
        found: dict[str, Run] = {}
        ones = np.ones(len(self.indices), x.dtype)
        values = ones if data is None else data
        if reduce == "mean":
            degrees = np.diff(self.indptr)
            values = np.repeat((1 / np.maximum(degrees, 1)).astype(x.dtype), degrees)
        if self.peers.has("scipy") and reduce != "max":
            matrix = sp.csr_array((values, self.indices, self.indptr), shape=self.shape)
            found["scipy"] = lambda: matrix @ x
        if self.peers.has("torch"):
            found |= self._torch_products(x, values, ones if data is None else data, reduce)
        if self.peers.has("dgl") and self.shape[0] == self.shape[1]:
            found["dgl"] = self._dgl_product(x, data, reduce)
        return found

    def _torch_products(
        self, x: np.ndarray, values: np.ndarray, plain: np.ndarray, reduce: str
    ) -> dict[str, Run]:
        torch = self.peers.torch
        source = torch.from_numpy(x)
        found: dict[str, Run] = {}
        if reduce != "max":
            weighted = self.torch_csr(values)
            found["torch"] = lambda: (weighted @ source).numpy()
        matrix = self.torch_csr(plain)
        found["torch.reduce"] = lambda: torch.sparse.mm(matrix, source, reduce=REDUCE[reduce]).numpy()
        return found

    def _dgl_product(self, x: np.ndarray, data: np.ndarray | None, reduce: str) -> Run:
        graph, ops, source = self.dgl_graph, self.peers.dgl.ops, self.peers.torch.from_numpy(x)
        if data is not None:
            weights = self.peers.torch.from_numpy(data[:, None])
            return lambda: ops.u_mul_e_sum(graph, source, weights).numpy()
        operation = {"sum": ops.copy_u_sum, "mean": ops.copy_u_mean, "max": ops.copy_u_max}[reduce]
        return lambda: operation(graph, source).numpy()


def dgl_attention(
    matrix: Matrix, x: np.ndarray, source: np.ndarray, target: np.ndarray, slope: float
) -> tuple[Run, Callable[[np.ndarray], tuple[np.ndarray, ...]]]:
    """DGL's graph attention, x [n, heads, d] and scores [n, heads]: forward, and forward with backward.

    The forward is that of a training step, which keeps what the backward needs.
    """
    torch, ops, graph = matrix.peers.torch, matrix.peers.dgl.ops, matrix.dgl_graph_to_train()
    leaves = [torch.from_numpy(array).requires_grad_() for array in (x, source[..., None], target[..., None])]

    def forward() -> Any:
        scores = torch.nn.functional.leaky_relu(ops.u_add_v(graph, leaves[1], leaves[2]), slope)
        return ops.u_mul_e_sum(graph, leaves[0], ops.edge_softmax(graph, scores))

    def both(d_out: np.ndarray) -> tuple[np.ndarray, ...]:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(torch.from_numpy(d_out))
        return tuple(leaf.grad.numpy().reshape(len(x), -1) for leaf in leaves)

    return lambda: forward().detach().numpy().reshape(len(x), -1), both
