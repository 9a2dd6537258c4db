"""Attention over edges as a worker does it: against the kernels, and where it is placed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cython_kernels import attention, attention_adjoint, attention_saved, attention_targets
from dorylus_hpc.comm.roles import Placement
from dorylus_hpc.config import TrainConfig, make_config
from dorylus_hpc.engine.edge_placement import BANDWIDTH, LINE, describe_place, estimate_edges
from dorylus_hpc.engine.trial import Trial, compare_workers, random_weights, small_graph
from dorylus_hpc.graph.manifest import Manifest, PartEntry
from dorylus_hpc.nn.gat import gat_program
from dorylus_hpc.nn.operands import EdgeOperand, slice_edges
from dorylus_hpc.nn.program import Program
from lambda_pkg import edges

TOLERANCE = {"float64": 1e-13, "float32": 2e-6}


def case(dtype: str, heads: int, columns: int, seed: int = 0) -> tuple[Any, ...]:
    """In-edges of 30 targets, some without any, a hub, repeated edges; packed sources, scores of targets."""
    rng = np.random.default_rng(seed)
    degree = rng.integers(0, 6, 30)
    degree[[0, 7, 29]], degree[12] = 0, 300
    indptr = np.concatenate([[0], np.cumsum(degree)])
    indices = rng.integers(0, 17, indptr[-1]).astype(np.int32)
    packed = rng.standard_normal((17, heads * columns + heads)).astype(dtype)
    return indptr, indices, packed, 3 * rng.standard_normal((30, heads)).astype(dtype)


def reversed_edges(indptr: np.ndarray, indices: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    order = np.argsort(indices, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(indices, minlength=n))])
    return starts, row[order].astype(np.int32)


@pytest.mark.parametrize("piece", [1 << 19, 40])
@pytest.mark.parametrize("heads, columns", [(1, 1), (3, 4)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equal_to_the_kernels(
    dtype: str, heads: int, columns: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges, "_PIECE", piece)
    indptr, indices, packed, score = case(dtype, heads, columns)
    width = heads * columns
    saved = attention_saved(30, heads, width, dtype)
    z = attention(indptr, indices, packed[:, :width], packed[:, width:], score, saved=saved, slope=0.3)
    found = edges.attend(packed, indptr, indices, score, slope=0.3)

    def close(got: np.ndarray, want: np.ndarray) -> None:
        assert got.dtype == want.dtype == np.dtype(dtype) and got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=TOLERANCE[dtype] * max(1.0, np.abs(want).max()), rtol=0)

    for got, want in zip(found, (z, *saved), strict=True):
        close(got, want)
    assert not found[0][[0, 7, 29]].any()

    d_z = np.random.default_rng(1).standard_normal((30, width)).astype(dtype)
    d_target, record = attention_targets(z, d_z, score, saved, slope=0.3)
    got_target, packed_targets = edges.attend_targets(found[0], d_z, score, *found[1:], slope=0.3)
    close(got_target, d_target)
    close(packed_targets, np.hstack([d_z, record.reshape(30, -1)]))

    starts, targets = reversed_edges(indptr, indices, 17)
    want_y, want_score = attention_adjoint(
        starts, targets, packed[:, :width], packed[:, width:], record, d_z, slope=0.3
    )
    d_y, d_score = edges.attend_sources(packed_targets, starts, targets, packed, slope=0.3)
    close(d_y, want_y)
    close(d_score, want_score)


def test_an_interval_without_rows_or_edges() -> None:
    packed, none = np.empty((0, 10)), np.empty(0, np.int32)
    found = edges.attend(packed, np.zeros(1, np.int64), none, np.empty((0, 2)), slope=0.2)
    assert [one.shape for one in found] == [(0, 8), (0, 2), (0, 2), (0, 8), (0, 2)]
    d_target, targets = edges.attend_targets(found[0], found[0], found[1], *found[1:], slope=0.2)
    assert d_target.shape == (0, 2) and targets.shape == (0, 16)
    z = edges.attend(packed, np.zeros(4, np.int64), none, np.ones((3, 2)), slope=0.2)[0]
    assert z.tolist() == np.zeros((3, 8)).tolist()
    d_y, d_score = edges.attend_sources(targets, np.zeros(4, np.int64), none, np.ones((3, 10)), slope=0.2)
    assert d_y.shape == (3, 8) and not d_y.any() and d_score.shape == (3, 2) and not d_score.any()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"indices": np.array([0, 17], np.int32)}, "indices must be below 17, got 0 to 17"),
        ({"indices": np.array([0, -1], np.int32)}, "indices must be below 17, got -1 to 0"),
        ({"indptr": np.array([0, 1, 3])}, "is not that of 2 rows and 2 entries"),
        ({"indptr": np.array([0, 3, 2])}, "is not that of 2 rows and 2 entries"),
        ({"indptr": np.array([0, 2])}, "is not that of 2 rows and 2 entries"),
        ({"packed": np.ones((17, 6))}, "6 columns are not those of 4 heads and their scores"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, np.ndarray], said: str) -> None:
    given = {
        "packed": np.ones((17, 12)),
        "indptr": np.array([0, 1, 2]),
        "indices": np.array([0, 3], np.int32),
    }
    with pytest.raises(ValueError, match=said):
        edges.attend(**(given | change), score_target=np.ones((2, 4)), slope=0.2)


def test_slices_name_each_source_once() -> None:
    indptr = np.array([0, 3, 3, 5, 6])
    indices = np.array([4, 0, 4, 2, 0, 5], np.int32)
    operand = EdgeOperand(indptr, indices, None, None, None)
    first, none, last = slice_edges(operand, [(0, 3), (3, 3), (3, 4)])
    assert first.indptr.tolist() == [0, 3, 3, 5] and first.sources.tolist() == [0, 2, 4]
    assert first.indices.tolist() == [2, 0, 2, 1, 0] and first.place == (0, 3)
    assert none.indptr.tolist() == [0] and none.place == (3, 3)
    assert last.sources.tolist() == [5] and last.indices.tolist() == [0] and last.place == (3, 4)


def program(*, elsewhere: bool, **changes: Any) -> Program:
    options: dict[str, Any] = {
        "n_features": 5, "hidden": [4, 2], "n_classes": 3, "sparse_features": False, "dropout": 0.3,
        "input_dropout": 0.2, "weight_decay": 0.0, "decay_scope": "all", "seed": 3, "heads": 2,
        "output_heads": 3,
    }  # fmt: skip
    return gat_program(**(options | changes), edges_elsewhere=elsewhere)


def test_an_epoch_is_that_of_the_kernels() -> None:
    placed, plain = (
        Trial(program(elsewhere=elsewhere), "attention", small_graph(5, 3)) for elsewhere in (True, False)
    )
    weights = random_weights(placed.program)
    (loss, gradients), (want_loss, want) = placed.train(weights), plain.train(weights)
    assert loss == pytest.approx(want_loss, rel=1e-13)
    np.testing.assert_allclose(gradients, want, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(placed.evaluate(weights), plain.evaluate(weights), rtol=1e-11, atol=1e-13)
    assert compare_workers(placed.program, "attention", small_graph(5, 3)) == ""


@pytest.mark.parametrize("changes", [{"second": True}, {"attention_dropout": 0.1}])
def test_edges_that_must_stay(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="edges stay on the server"):
        program(elsewhere=True, **changes)


# ---- the estimate ----


def entry(own: int, edges_of: int, ghosts: int) -> PartEntry:
    return PartEntry("p.h5", "", own, edges_of, edges_of, ghosts, ghosts, own, own, 0, 0)


def manifest(*parts: PartEntry) -> Manifest:
    named: dict[str, Any] = dict.fromkeys(Manifest.__dataclass_fields__)
    return Manifest(**(named | {"classes": 7, "parts": parts}))


def config(**changes: Any) -> TrainConfig:
    given = {"model": "gat", "backend": "lambda-local", "intervals": 4, "threads": 2, "hidden": 8, "heads": 8}
    return make_config(given | changes)


def test_estimate_counts_rows_of_intervals_and_edges() -> None:
    """One head of 7 columns, float32, 10 vertices with 3 in- and out-edges each, and themselves."""
    one = {"layers": 1, "output_heads": 1}
    found = estimate_edges(config(**one), manifest(entry(10, 30, 5)), Placement(1, 1))
    rows = 40  # fewer edges than 4 intervals times 15 rows
    numbers = rows * 8 + rows * 11 + 10 * (1 + 17 + 18 + 12 + 8)
    assert found.bytes_per_epoch == 4 * numbers + 4 * 80 + 16 * 10
    assert found.transfer_seconds == pytest.approx(found.bytes_per_epoch / (4 * BANDWIDTH))
    assert found.server_seconds == pytest.approx(40 * (7 * 0.2e-9 + 4e-9) / 2)
    few = estimate_edges(config(**one, intervals=1), manifest(entry(10, 300, 5)), Placement(1, 1))
    assert few.bytes_per_epoch == 4 * (15 * 19 + 10 * 56) + 4 * 620 + 160  # no more than the rows there are


def test_estimate_is_of_the_server_with_the_most() -> None:
    small, large = entry(10, 30, 5), entry(1000, 90_000, 50)
    both = estimate_edges(config(), manifest(small, large), Placement(2, 2))
    assert both == estimate_edges(config(), manifest(large), Placement(1, 1))
    one = estimate_edges(config(), manifest(small, large), Placement(2, 1))
    assert one.bytes_per_epoch > both.bytes_per_epoch and one.server_seconds > both.server_seconds


def test_the_default_follows_the_estimate() -> None:
    """Dense graphs in few intervals pay, if lines are fast and many workers share them; others do not."""
    sparse, dense = manifest(entry(100_000, 1_000_000, 0)), manifest(entry(20_000, 100_000_000, 0))
    assert estimate_edges(config(), sparse, Placement(1, 1)).place == "ae=server"
    many = estimate_edges(config(workers=100), dense, Placement(1, 1))
    assert many.transfer_seconds == pytest.approx(many.bytes_per_epoch / LINE)
    assert many.place == "ae=lambda"
    slow = estimate_edges(config(workers=100, local_bandwidth=1e6), dense, Placement(1, 1))
    assert slow.place == "ae=server"
    told = describe_place(config(place="ae=server"), slow, given=True)
    assert told["ae"] == "server" and told["by"] == "option"
    assert told["bytes_per_epoch"] == slow.bytes_per_epoch
    assert describe_place(config(place="ae=server"), None, given=False) == {
        "ae": "server", "by": "default", "bytes_per_epoch": None, "transfer_seconds": None,
        "server_seconds": None,
    }  # fmt: skip
