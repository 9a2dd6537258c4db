"""Gather and its adjoint against their twins, over shapes, options and threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cython_kernels as ck
from cython_kernels import aggregate, dispatch, reference

DTYPES = (np.float32, np.float64)
THREADS = (1, 2, 3)


class Matrix(NamedTuple):
    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray | None
    n_cols: int


def make_matrix(rng, lengths, n_cols, dtype, *, values):
    """A matrix with rows of these lengths; columns unsorted, duplicates likely."""
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    indices = rng.integers(0, max(n_cols, 1), indptr[-1]).astype(np.int32)
    data = rng.standard_normal(indptr[-1]).astype(dtype) if values else None
    return Matrix(indptr, indices, data, n_cols)


def error_bound(matrix, x, rows_in_sum, transpose=False, **options):
    """Elementwise: a few roundings for each term, on the sum of the terms' magnitudes."""
    size = {
        key: abs(value) if key != "mean" else value for key, value in options.items() if value is not None
    }
    data = None if matrix.data is None else abs(matrix.data).astype(np.float64)
    kernel = reference.gather_adjoint if transpose else reference.gather
    extra = {"n_sources": matrix.n_cols} if transpose else {}
    magnitude = kernel(matrix.indptr, matrix.indices, data, abs(x).astype(np.float64), **size, **extra)
    return magnitude * np.finfo(x.dtype).eps * (rows_in_sum + 8)


def assert_within(got, want, bound):
    assert got.shape == want.shape
    excess = np.abs(got.astype(np.float64) - want) - bound
    assert (excess <= 0).all(), (
        f"off by {excess.max()} more than allowed at {np.unravel_index(excess.argmax(), got.shape)}"
    )


@st.composite
def cases(draw):
    """A matrix, features, and a choice of every option of a gather."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(DTYPES))
    n_rows = draw(st.integers(0, 80))
    n_cols = n_rows + draw(st.integers(0, 20))
    lengths = rng.integers(0, draw(st.integers(1, 12)), n_rows)
    if n_rows and draw(st.booleans()):
        lengths[rng.integers(n_rows)] = 500  # a hub
    matrix = make_matrix(rng, lengths, n_cols, dtype, values=draw(st.booleans()))
    f = draw(st.sampled_from([0, 1, 2, 5, 16, 31, 127, 128, 129, 260]))

    def maybe(length):
        return rng.uniform(0.1, 2, length).astype(dtype) if draw(st.booleans()) else None

    options = {
        "row_scale": maybe(n_rows),
        "source_scale": maybe(n_cols),
        "self_weight": draw(st.sampled_from([0.0, 1.0, -0.5])),
        "mean": draw(st.booleans()),
    }
    start = draw(st.integers(0, n_rows))
    rows = draw(st.sampled_from([None, (start, draw(st.integers(start, n_rows)))]))
    return rng, matrix, f, dtype, options, rows, draw(st.booleans())


@settings(max_examples=80, deadline=None)
@given(cases())
def test_gather_agrees_with_its_twin(case):
    rng, matrix, f, dtype, options, rows, accumulate = case
    indptr, indices, data, n_cols = matrix
    x = rng.standard_normal((n_cols, f)).astype(dtype)
    before = rng.standard_normal((len(indptr) - 1, f)).astype(dtype)
    options |= {"rows": rows, "accumulate": accumulate}
    results = [
        ck.gather(indptr, indices, data, x, before.copy(), num_threads=threads, **options)
        for threads in THREADS
    ]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    want = reference.gather(indptr, indices, data, x, before.astype(np.float64), **options)
    del options["rows"], options["accumulate"]
    bound = error_bound(matrix, x, 500, **options) + 2 * np.finfo(dtype).eps * np.abs(want)
    assert_within(results[0], want, bound)
    if rows is not None:
        outside = np.r_[0 : rows[0], rows[1] : len(before)]
        np.testing.assert_array_equal(results[0][outside], before[outside])


@settings(max_examples=80, deadline=None)
@given(cases())
def test_adjoint_agrees_with_its_twin(case):
    rng, matrix, f, dtype, options, rows, accumulate = case
    indptr, indices, data, n_cols = matrix
    d_out = rng.standard_normal((len(indptr) - 1, f)).astype(dtype)
    before = rng.standard_normal((n_cols, f)).astype(dtype)
    options |= {"rows": rows, "accumulate": accumulate, "n_sources": n_cols}
    results = [
        ck.gather_adjoint(indptr, indices, data, d_out, before.copy(), num_threads=threads, **options)
        for threads in THREADS
    ]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    want = reference.gather_adjoint(indptr, indices, data, d_out, before.astype(np.float64), **options)
    for key in ("rows", "accumulate", "n_sources"):
        del options[key]
    bound = error_bound(matrix, d_out, len(indices), transpose=True, **options)
    assert_within(results[0], want, bound + 600 * np.finfo(dtype).eps * (np.abs(want) + np.abs(before)))


@pytest.fixture
def ways(monkeypatch):
    """Force the ways of an adjoint: whether a call transposes, and how it reads rows over a transpose."""

    def force(pays, layout):
        monkeypatch.setattr(aggregate, "_pays_to_transpose", lambda *_: pays)
        monkeypatch.setattr(aggregate, "choose_layout", lambda *_: layout)

    return force


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_adjoint_is_the_same_bits_every_way(ways, case):
    """Over a given transpose, over one that the call makes, and without; read by rows or by tiles."""
    rng, matrix, f, dtype, options, rows, accumulate = case
    indptr, indices, data, n_cols = matrix
    d_out = rng.standard_normal((len(indptr) - 1, f)).astype(dtype)
    before = rng.standard_normal((n_cols, f)).astype(dtype)
    options |= {"rows": rows, "accumulate": accumulate, "n_sources": n_cols}
    given_one = ck.transpose_csr(indptr, indices, n_cols=n_cols)
    ways(False, "rows")
    want = ck.gather_adjoint(indptr, indices, data, d_out, before.copy(), **options)
    for layout in ("rows", "tiles"):
        ways(True, layout)
        for transposed in (given_one, None):
            for threads in THREADS:
                got = ck.gather_adjoint(
                    indptr, indices, data, d_out, before.copy(), transposed=transposed, num_threads=threads,
                    **options,
                )  # fmt: skip
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("f", [1, 7, 16, 48, 300])
def test_a_large_adjoint_is_the_same_bits_every_way(ways, dtype, f):
    """Enough entries for all threads and for several blocks; hubs on both sides; all instructions."""
    rng = np.random.default_rng(f)
    n_rows, n_cols = 700, 1000
    lengths = rng.integers(0, 30, n_rows)
    lengths[5] = 5000
    indptr, indices, data, _ = make_matrix(rng, lengths, n_cols, dtype, values=True)
    indices[rng.random(len(indices)) < 0.5] = 900
    d_out = rng.standard_normal((n_rows, f)).astype(dtype)
    options = {"n_sources": n_cols, "mean": True, "self_weight": 0.7, "rows": (3, n_rows - 2)}
    options |= {"source_scale": rng.uniform(0.5, 2, n_cols).astype(dtype)}
    given_one = ck.transpose_csr(indptr, indices, n_cols=n_cols)
    ways(False, "rows")
    want = ck.gather_adjoint(indptr, indices, data, d_out, **options)
    bound = error_bound(
        Matrix(indptr, indices, data, n_cols), d_out, len(indices), transpose=True,
        mean=True, self_weight=0.7, source_scale=options["source_scale"],
    )  # fmt: skip
    assert_within(
        want, reference.gather_adjoint(indptr, indices, data, d_out.astype(np.float64), **options), bound
    )
    for level in dispatch.available():
        with dispatch.using(level):
            for pays, layout, transposed in [
                (False, "rows", None),
                (True, "rows", None),
                (True, "rows", given_one),
                (True, "tiles", given_one),
            ]:
                ways(pays, layout)
                for threads in (1, 2, 40):
                    got = ck.gather_adjoint(
                        indptr, indices, data, d_out, transposed=transposed, num_threads=threads, **options
                    )
                    np.testing.assert_array_equal(got, want)


def test_when_a_call_transposes(monkeypatch):
    """Where rows of the result are long, many entries add to each, and they are not cached."""
    monkeypatch.setattr(aggregate, "last_level_cache", lambda: 100_000)
    small, wide = np.zeros((48, 512), np.float32), np.zeros((1000, 128), np.float32)
    assert aggregate._pays_to_transpose(4000, wide, False)
    assert not aggregate._pays_to_transpose(4000, wide, True)
    assert aggregate._pays_to_transpose(4000, wide.astype(np.float64), True)
    assert not aggregate._pays_to_transpose(3999, wide, False)
    assert not aggregate._pays_to_transpose(10**9, small, False)
    assert not aggregate._pays_to_transpose(10**9, np.zeros((1000, 64), np.float32), False)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_adjoint_identity(case):
    rng, matrix, f, _, options, rows, _ = case
    indptr, indices, data, n_cols = matrix
    data = None if data is None else data.astype(np.float64)
    for key in ("row_scale", "source_scale"):
        options[key] = None if options[key] is None else options[key].astype(np.float64)
    x = rng.standard_normal((n_cols, f))
    y = rng.standard_normal((len(indptr) - 1, f))
    forward = ck.gather(indptr, indices, data, x, rows=rows, **options)
    backward = ck.gather_adjoint(indptr, indices, data, y, n_sources=n_cols, rows=rows, **options)
    size = np.abs(forward * y).sum() + np.abs(x * backward).sum() + 1
    assert abs((forward * y).sum() - (x * backward).sum()) <= 1e-12 * size


@pytest.mark.parametrize("dtype", DTYPES)
def test_intervals_put_together_are_the_whole(dtype):
    rng = np.random.default_rng(1)
    indptr, indices, data, n_cols = make_matrix(rng, rng.integers(0, 9, 100), 130, dtype, values=True)
    x = rng.standard_normal((n_cols, 33)).astype(dtype)
    whole = ck.gather(indptr, indices, data, x, mean=True, self_weight=1.0)
    transposed = ck.gather_adjoint(indptr, indices, data, whole, n_sources=n_cols)
    pieces, gradient = np.full_like(whole, np.nan), np.zeros_like(x)
    for rows in ((0, 1), (1, 37), (37, 37), (37, 100)):
        ck.gather(indptr, indices, data, x, pieces, rows=rows, mean=True, self_weight=1.0, num_threads=2)
        ck.gather_adjoint(
            indptr, indices, data, whole, gradient, n_sources=n_cols, rows=rows, accumulate=True
        )
    np.testing.assert_array_equal(pieces, whole)
    np.testing.assert_array_equal(gradient, transposed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("shape", [(0, 0, 3), (0, 4, 3), (4, 4, 0), (4, 4, 1), (1, 1, 5)])
def test_graphs_without_edges(shape, threads, dtype):
    n_rows, n_cols, f = shape
    indptr, indices = np.zeros(n_rows + 1, np.int64), np.zeros(0, np.int32)
    x = np.full((n_cols, f), np.nan, dtype)
    for mean in (False, True):
        out = ck.gather(
            indptr, indices, None, x, np.full((n_rows, f), np.nan, dtype), mean=mean, num_threads=threads
        )
        np.testing.assert_array_equal(out, np.zeros((n_rows, f)))
        d_x = ck.gather_adjoint(indptr, indices, None, out, n_sources=n_cols, mean=mean, num_threads=threads)
        np.testing.assert_array_equal(d_x, np.zeros((n_cols, f)))


def test_a_star_is_exact_in_both_directions():
    n = 20_001
    indptr = np.array([0, n - 1] + [n - 1] * (n - 1), np.int64)
    indices = np.arange(1, n, dtype=np.int32)
    x = np.ones((n, 3), np.float32)
    for threads in THREADS:
        out = ck.gather(indptr, indices, None, x, num_threads=threads)
        np.testing.assert_array_equal(out[0], n - 1)
        np.testing.assert_array_equal(out[1:], 0)
        np.testing.assert_array_equal(
            ck.gather(indptr, indices, None, x, mean=True, num_threads=threads)[0], 1
        )
        d_x = ck.gather_adjoint(indptr, indices, None, x, n_sources=n, num_threads=threads)
        np.testing.assert_array_equal(d_x[:, 0], np.arange(n) > 0)


def test_only_named_rows_are_read():
    indptr, indices = np.array([0, 2, 3], np.int64), np.array([0, 2, 2], np.int32)
    x = np.array([[1.0], [np.nan], [2.0], [np.inf]])
    np.testing.assert_array_equal(ck.gather(indptr, indices, None, x), [[3.0], [2.0]])


def test_rows_outside_the_range_are_zero_in_a_new_array():
    indptr, indices = np.arange(5, dtype=np.int64), np.zeros(4, np.int32)
    out = ck.gather(indptr, indices, None, np.ones((1, 2)), rows=(1, 3))
    np.testing.assert_array_equal(out[:, 0], [0, 1, 1, 0])


def test_the_formula_by_hand():
    indptr, indices, data = (
        np.array([0, 3, 3], np.int64),
        np.array([0, 2, 2], np.int32),
        np.array([1.0, 2.0, 3.0]),
    )
    x, source, row = np.array([[1.0], [10.0], [100.0]]), np.array([2.0, 3.0, 5.0]), np.array([7.0, 11.0])
    out = ck.gather(indptr, indices, data, x, row_scale=row, source_scale=source, self_weight=0.5)
    np.testing.assert_array_equal(
        out, [[7 * (0.5 * 2 * 1 + 1 * 2 * 1 + (2 + 3) * 5 * 100)], [11 * 0.5 * 3 * 10]]
    )
    mean = ck.gather(indptr, indices, data, x, row_scale=row, source_scale=source, self_weight=0.5, mean=True)
    np.testing.assert_allclose(
        mean, [[7 * (0.5 * 2 * 1 + (1 * 2 * 1 + (2 + 3) * 5 * 100) / 3)], [11 * 0.5 * 3 * 10]]
    )


def test_read_only_inputs_and_concurrent_calls():
    rng = np.random.default_rng(2)
    indptr, indices, data, n_cols = make_matrix(rng, rng.integers(0, 20, 300), 300, np.float32, values=True)
    x = rng.standard_normal((n_cols, 40)).astype(np.float32)
    for array in (indptr, indices, data, x):
        array.flags.writeable = False
    want = ck.gather(indptr, indices, data, x)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(
            lambda threads: ck.gather(indptr, indices, data, x, num_threads=threads), [1, 2, 3] * 6
        ):
            np.testing.assert_array_equal(got, want)


def test_validate_false_gives_the_same():
    rng = np.random.default_rng(3)
    indptr, indices, data, n_cols = make_matrix(rng, [3, 0, 4], 6, np.float64, values=True)
    x = rng.standard_normal((n_cols, 4))
    ck.check_csr(indptr, indices, data, n_cols=n_cols)
    out = ck.gather(indptr, indices, data, x, validate=False)
    np.testing.assert_array_equal(out, ck.gather(indptr, indices, data, x))
    np.testing.assert_array_equal(
        ck.gather_adjoint(indptr, indices, data, out, n_sources=n_cols, validate=False),
        ck.gather_adjoint(indptr, indices, data, out, n_sources=n_cols),
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-1, 6), min_size=0, max_size=6),
    st.lists(st.integers(-1, 4), max_size=6),
    st.integers(0, 4),
)
def test_check_csr_and_its_twin_refuse_the_same(indptr, indices, n_cols):
    starts, columns = np.array(indptr, np.int64), np.array(indices, np.int32)

    def verdict(check):
        try:
            check(starts, columns, n_cols=n_cols)
        except ValueError:
            return "refused"
        return "accepted"

    assert verdict(ck.check_csr) == verdict(reference.check_csr)
