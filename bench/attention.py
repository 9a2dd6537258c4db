"""What is measured of graph attention: forward, forward with backward, and the memory that both take.

That with scores of both ends (GATv2) has no peer here.

python -m bench.attention FILE CANDIDATE THREADS    (what bench.kernels starts, for the memory of one)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

import cython_kernels as ck
from bench.cases import MAIN, Candidate, Case, Inputs
from bench.checking import close, rounding
from bench.graphs import Graph, awkward
from bench.machine import ROOT, forget_peak, peak_bytes, resident_bytes
from bench.peers import Peers, dgl_attention

HEADS, EACH, SLOPE = 8, 8, 0.2
WIDTH = HEADS * EACH
CHECKED = (0, HEADS - 1)  # heads of a large graph that are checked
PIECE = 1 << 20  # entries that the check looks at together
SUMS = 4  # made one after the other: their errors add up

Results = tuple[np.ndarray, ...]


class Attention:
    """Inputs of one graph, and what should come out of them."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        n = inputs.graph.n
        self.x, self.d_out = inputs.positive(n, WIDTH), inputs.positive(n, WIDTH)
        self.source, self.target = inputs.positive(n, HEADS) - 1, inputs.positive(n, HEADS) - 1  # either sign

    # ---- ours ----

    def forward(self, threads: int, out: np.ndarray | None = None, saved: Any = None) -> np.ndarray:
        how = {"slope": SLOPE, "saved": saved, "num_threads": threads, "validate": False}
        return ck.attention(*self.inputs.pattern, self.x, self.source, self.target, out, **how)

    def both(self, threads: int) -> Results:
        """Forward and backward, with new arrays for all that is made, as DGL does it."""
        n, how = self.inputs.graph.n, {"slope": SLOPE, "num_threads": threads}
        saved = ck.attention_saved(n, HEADS, WIDTH, np.float32)
        out = self.forward(threads, saved=saved)
        d_target, record = ck.attention_targets(out, self.d_out, self.target, saved, **how)
        d_x, d_source = ck.attention_adjoint(
            *self.inputs.graph.transposed[:2], self.x, self.source, record, self.d_out, validate=False, **how
        )
        return d_x, d_source, d_target

    # ---- DGL's ----

    @cached_property
    def dgl(self) -> tuple[Callable[[], np.ndarray], Callable[[], Results]]:
        heads = self.x.reshape(-1, HEADS, EACH), self.source, self.target
        forward, both = dgl_attention(self.inputs.matrix, *heads, SLOPE)
        d_out = self.d_out.reshape(-1, HEADS, EACH)
        return forward, lambda: both(d_out)

    # ---- what is right ----

    def wanted(self, *, backward: bool) -> Iterator[tuple[slice, int, list[np.ndarray], list[np.ndarray]]]:
        """For some heads: columns, head, the wanted arrays in float64, and how large their terms are."""
        graph = self.inputs.graph
        row = np.repeat(np.arange(graph.n), graph.degrees)
        for head in range(HEADS) if graph.nnz < PIECE else CHECKED:
            columns = slice(head * EACH, (head + 1) * EACH)
            x, d_out = (array[:, columns].astype(np.float64) for array in (self.x, self.d_out))
            # Scores are added in float32, as everybody does: their sign decides on the gradient.
            raw = (self.source[graph.indices, head] + self.target[row, head]).astype(np.float64)
            alpha = np.exp(np.where(raw > 0, raw, SLOPE * raw))  # no score is above 1
            alpha /= np.bincount(row, alpha, graph.n)[row]
            matrix = sp.csr_array((alpha, graph.indices, graph.indptr), shape=(graph.n, graph.n))
            out = matrix @ x
            if not backward:
                yield columns, head, [out], [out]
                continue
            d_alpha = np.empty(graph.nnz)
            for first in range(0, graph.nnz, PIECE):
                piece = slice(first, first + PIECE)
                d_alpha[piece] = np.einsum("ec,ec->e", d_out[row[piece]], x[graph.indices[piece]])
            mean = np.einsum("nc,nc->n", d_out, out)[row]
            factor = alpha * np.where(raw > 0, 1.0, SLOPE)
            change, size = factor * (d_alpha - mean), factor * (d_alpha + mean)
            d_x = matrix.T @ d_out
            yield (
                columns,
                head,
                [d_x, *(np.bincount(at, change, graph.n) for at in (graph.indices, row))],
                [d_x, *(np.bincount(at, size, graph.n) for at in (graph.indices, row))],
            )

    def check(self, *, backward: bool) -> Callable[[Any], None]:
        graph = self.inputs.graph
        degrees = np.maximum(graph.degrees, np.bincount(graph.indices, minlength=graph.n))
        tolerance = SUMS * rounding(degrees, np.float32)
        known: list[Any] = []

        def check(result: Any) -> None:
            if not known:
                known.extend(self.wanted(backward=backward))
            got = result if backward else (result,)
            for columns, head, wanted, sizes in known:
                parts = [got[0][:, columns], *(scores[:, head] for scores in got[1:])]
                for part, right, size in zip(parts, wanted, sizes, strict=True):
                    close(part, right, tolerance, f"of head {head}, value", size=size)

        return check


def attention(inputs: Inputs) -> Case:
    """The forward pass of a training step: what a backward pass needs is kept."""
    case = Attention(inputs)
    check = case.check(backward=False)
    candidates = []
    out = inputs.out if inputs.width == WIDTH else np.empty_like(case.x)
    if hasattr(ck, "attention"):
        saved = ck.attention_saved(inputs.graph.n, HEADS, WIDTH, np.float32)
        candidates = [
            Candidate(MAIN, lambda threads: case.forward(threads, out, saved), check),
            Candidate("to infer", lambda threads: case.forward(threads, out), check),
        ]
    if inputs.peers.has("dgl"):
        candidates.append(Candidate("dgl", lambda threads: case.dgl[0](), check, peer=True))
    return _case(inputs, "attention", candidates, out, products=1)


def attention_training(inputs: Inputs) -> Case:
    """Forward and backward together: gradients of the features and of both scores."""
    case = Attention(inputs)
    check = case.check(backward=True)
    candidates = []
    if hasattr(ck, "attention"):
        candidates = [Candidate(MAIN, case.both, check)]
    if inputs.peers.has("dgl"):
        candidates.append(Candidate("dgl", lambda threads: case.dgl[1](), check, peer=True))
    return _case(inputs, "attention_training", candidates, np.empty(0), products=3)


class AttentionV2:
    """Inputs of one graph, and what should come out of them."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        n = inputs.graph.n
        self.left, self.right = inputs.positive(n, WIDTH), -inputs.positive(n, WIDTH)  # sums of either sign
        self.d_out, self.a = inputs.positive(n, WIDTH), inputs.positive(HEADS, EACH) - 1

    def forward(self, threads: int, out: np.ndarray | None = None, saved: Any = None) -> np.ndarray:
        how = {"slope": SLOPE, "saved": saved, "num_threads": threads, "validate": False}
        return ck.attention_v2(*self.inputs.pattern, self.left, self.right, self.a, out, **how)

    def both(self, threads: int) -> Results:
        """Forward and backward, with new arrays for all that is made."""
        how = {"slope": SLOPE, "num_threads": threads, "validate": False}
        saved = ck.attention_v2_saved(self.inputs.graph.n, HEADS, np.float32)
        inputs = self.left, self.right, self.a
        out = self.forward(threads, saved=saved)
        d_right, d_a, record = ck.attention_v2_targets(
            *self.inputs.pattern, *inputs, out, self.d_out, saved, **how
        )
        d_left = ck.attention_v2_adjoint(
            *self.inputs.graph.transposed[:2], *inputs, record, self.d_out, **how
        )
        return d_left, d_right, d_a

    def wanted(self, *, backward: bool) -> Iterator[tuple[slice, int, list[np.ndarray], list[np.ndarray]]]:
        """For some heads: columns, head, the wanted arrays in float64, and how large their terms are."""
        graph = self.inputs.graph
        row, column = np.repeat(np.arange(graph.n), graph.degrees), graph.indices
        pieces = [slice(first, first + PIECE) for first in range(0, graph.nnz, PIECE)]
        for head in range(HEADS) if graph.nnz < PIECE else CHECKED:
            columns = slice(head * EACH, (head + 1) * EACH)
            left, right, d_out = (array[:, columns] for array in (self.left, self.right, self.d_out))
            a, alpha, d_alpha = self.a[head].astype(np.float64), np.empty(graph.nnz), np.empty(graph.nnz)
            for piece in pieces:  # added in float32, as everybody does: the sign decides on the gradient
                raw = (left[column[piece]] + right[row[piece]]).astype(np.float64)
                alpha[piece] = np.exp(np.where(raw > 0, raw, SLOPE * raw) @ a)  # no score is above 8
                d_alpha[piece] = np.einsum(
                    "ec,ec->e", d_out[row[piece]], left[column[piece]], dtype=np.float64
                )
            alpha /= np.bincount(row, alpha, graph.n)[row]
            matrix = sp.csr_array((alpha, column, graph.indptr), shape=(graph.n, graph.n))
            out = matrix @ left.astype(np.float64)
            if not backward:
                yield columns, head, [out], [out]
                continue
            d_left = matrix.T @ d_out.astype(np.float64)
            wanted = [d_left, np.zeros(out.shape), np.zeros(EACH)]
            sizes = [d_left.copy(), np.zeros(out.shape), np.zeros(EACH)]
            t = np.einsum("nc,nc->n", d_out, out)[row]
            for sign, sums in ((-1, wanted), (1, sizes)):
                factor = a if sign < 0 else np.abs(a)
                for piece in pieces:
                    raw = (left[column[piece]] + right[row[piece]]).astype(np.float64)
                    change = (alpha[piece] * (d_alpha[piece] + sign * t[piece]))[:, None]
                    change = change * np.where(raw > 0, 1.0, SLOPE)
                    sums[2] += (change * (raw if sign < 0 else np.abs(raw))).sum(axis=0)
                    for c in range(EACH):
                        for total, at in ((sums[0], column), (sums[1], row)):
                            total[:, c] += np.bincount(at[piece], factor[c] * change[:, c], graph.n)
            yield columns, head, wanted, sizes

    def check(self, *, backward: bool) -> Callable[[Any], None]:
        graph = self.inputs.graph
        degrees = np.maximum(graph.degrees, np.bincount(graph.indices, minlength=graph.n))
        tolerance = SUMS * rounding(degrees, np.float32)
        known: list[Any] = []

        def check(result: Any) -> None:
            if not known:
                known.extend(self.wanted(backward=backward))
            got = result if backward else (result,)
            for columns, head, wanted, sizes in known:
                parts = [array[:, columns] for array in got[:2]] + [array[head] for array in got[2:]]
                for part, right, size in zip(parts, wanted, sizes, strict=True):
                    allowed = tolerance if part.ndim > 1 else np.full(EACH, tolerance.max())
                    close(part, right, allowed, f"of head {head}, value", size=size)

        return check


def attention_v2(inputs: Inputs) -> Case:
    """The forward pass of a training step of GATv2."""
    case = AttentionV2(inputs)
    out = inputs.out if inputs.width == WIDTH else np.empty_like(case.left)
    candidates = []
    if hasattr(ck, "attention_v2"):
        saved = ck.attention_v2_saved(inputs.graph.n, HEADS, np.float32)
        run = lambda threads: case.forward(threads, out, saved)  # noqa: E731
        candidates = [Candidate(MAIN, run, case.check(backward=False))]
    return _case(inputs, "attention_v2", candidates, out, products=2)


def attention_v2_training(inputs: Inputs) -> Case:
    """Forward and backward of GATv2 together."""
    case = AttentionV2(inputs)
    candidates = []
    if hasattr(ck, "attention_v2"):
        candidates = [Candidate(MAIN, case.both, case.check(backward=True))]
    return _case(inputs, "attention_v2_training", candidates, np.empty(0), products=9)


def _case(
    inputs: Inputs, kernel: str, candidates: list[Candidate], out: np.ndarray, *, products: int
) -> Case:
    """`products` is how often the entries are multiplied with the features: result, d_x, d_alpha, scores."""
    work = inputs.graph.nnz * WIDTH * products
    return Case(
        kernel,
        inputs.graph.name,
        WIDTH,
        candidates,
        flops=2 * work,
        values=inputs.graph.n * WIDTH,
        moved=work,
        reset=lambda: out.fill(np.nan),
        notes={"heads": HEADS},
    )


KERNELS: dict[str, Callable[[Inputs], Case]] = {
    build.__name__: build for build in (attention, attention_training, attention_v2, attention_v2_training)
}


# ---- memory ----


def memory(graph: Graph, threads: int, peers: Peers) -> dict[str, int]:
    """Bytes that forward and backward take at their peak beyond their inputs, each in an own process."""
    candidates = [MAIN] * hasattr(ck, "attention") + ["dgl"] * peers.has("dgl")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "graph.npz")
        np.savez(path, name=graph.name, indptr=graph.indptr, indices=graph.indices)
        for name in candidates:
            command = [sys.executable, "-m", "bench.attention", str(path), name, str(threads)]
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if result.returncode:
                raise SystemExit(f"status {result.returncode} of: {' '.join(command)}\n{result.stderr}")
            found[name] = json.loads(result.stdout.splitlines()[-1])
    return found


def _main(path: str, name: str, threads: str) -> None:
    with np.load(path) as file:
        graph = Graph(str(file["name"]), file["indptr"], file["indices"])
    peers = Peers(["dgl"] if name == "dgl" else [])
    peers.set_threads(int(threads))
    for one in (awkward(), graph):  # the first loads what is loaded once
        case = Attention(Inputs(one, WIDTH, peers))
        run = case.dgl[1] if name == "dgl" else lambda case=case: case.both(int(threads))
        _ = one.transposed
        forget_peak()
        before = resident_bytes()
        run()
        peak = peak_bytes()
    print(json.dumps(max(0, peak - before)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
