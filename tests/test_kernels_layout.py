"""Tiles, bfloat16, the instruction sets and the maximum: every way to a gather gives the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cython_kernels as ck
from cython_kernels import _aggregate, dispatch, layout, reference
from cython_kernels.layout import Tiles, empty, empty_tiles

WIDTHS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 47, 63, 64, 65, 100, 127, 128, 129, 145, 255, 260]
HUB = _aggregate.hub_degree()


def matrix(rng, n_rows, n_cols, *, hub=0, longest=12):
    lengths = rng.integers(0, longest, n_rows)
    if hub:
        lengths[rng.integers(n_rows)] = hub
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return indptr, rng.integers(0, n_cols, indptr[-1]).astype(np.int32)


@st.composite
def gathers(draw):
    """Arguments of a gather with row-major features."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    n_rows = draw(st.integers(1, 60))
    n_cols = n_rows + draw(st.integers(0, 9))
    indptr, indices = matrix(rng, n_rows, n_cols, hub=draw(st.sampled_from([0, 300, HUB + 1, 3 * HUB])))
    x = rng.standard_normal((n_cols, draw(st.sampled_from(WIDTHS)))).astype(dtype)

    def maybe(length):
        return rng.uniform(0.1, 2, length).astype(dtype) if draw(st.booleans()) else None

    options = {
        "row_scale": maybe(n_rows),
        "source_scale": maybe(n_cols),
        "self_weight": draw(st.sampled_from([0.0, 1.0, -0.3])),
        "mean": draw(st.booleans()),
        "accumulate": draw(st.booleans()),
    }
    return rng, indptr, indices, maybe(len(indices)), x, options


@settings(max_examples=60, deadline=None)
@given(gathers(), st.integers(1, 40), st.integers(1, 40))
def test_layouts_instructions_and_threads_change_no_bit(case, width_in, width_out):
    rng, indptr, indices, data, x, options = case
    before = rng.standard_normal((len(indptr) - 1, x.shape[1])).astype(x.dtype)
    with dispatch.using("baseline"):
        want = ck.gather(indptr, indices, data, x, before.copy(), layout="rows", **options)
    tiles = ck.to_tiles(x, empty_tiles(*x.shape, x.dtype, width_in))
    for level in dispatch.available():
        with dispatch.using(level):
            for threads in (1, 2, 3):
                for features, how in ((x, "rows"), (x, "tiles"), (tiles, "auto")):
                    got = ck.gather(
                        indptr,
                        indices,
                        data,
                        features,
                        before.copy(),
                        layout=how,
                        num_threads=threads,
                        **options,
                    )
                    np.testing.assert_array_equal(got, want, err_msg=f"{level} {threads} {how}")
                out = ck.to_tiles(before, empty_tiles(*before.shape, x.dtype, width_out))
                ck.gather(indptr, indices, data, x, out, num_threads=threads, **options)
                np.testing.assert_array_equal(ck.from_tiles(out), want)


@settings(max_examples=40, deadline=None)
@given(gathers())
def test_bfloat16_features_are_summed_in_float32(case):
    _, indptr, indices, data, x, options = case
    options = {key: value.astype(np.float32) if isinstance(value, np.ndarray) else value
               for key, value in options.items() if key != "accumulate"}  # fmt: skip
    data = None if data is None else data.astype(np.float32)
    bits = ck.to_bfloat16(x.astype(np.float32))
    want = ck.gather(indptr, indices, data, ck.from_bfloat16(bits), **options)
    for level in dispatch.available():
        with dispatch.using(level):
            for features in (bits, ck.to_tiles(bits)):
                got = ck.gather(indptr, indices, data, features, num_threads=2, **options)
                assert got.dtype == np.float32
                np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(ck.gather(indptr, indices, data, bits, layout="tiles", **options), want)


@settings(max_examples=40, deadline=None)
@given(gathers())
def test_maximum_agrees_with_its_twin(case):
    rng, indptr, indices, _, x, _ = case
    x[rng.random(x.shape) < 0.02] = np.nan
    x = np.round(x)  # ties
    rows = (0, (len(indptr) - 1) // 2)
    for features in (x, ck.to_tiles(x)):
        for level in dispatch.available():
            with dispatch.using(level):
                for part in (None, rows):
                    source = np.full((len(indptr) - 1, x.shape[1]), -7, np.int32)
                    want_source = source.copy()
                    want = reference.gather_max(indptr, indices, x, source=want_source, rows=part)
                    how = {"rows": part, "layout": "tiles" if rng.random() < 0.5 else "rows"}
                    got = ck.gather_max(indptr, indices, features, source=source, num_threads=2, **how)
                    np.testing.assert_array_equal(got, want)
                    np.testing.assert_array_equal(source, want_source)
                    np.testing.assert_array_equal(ck.gather_max(indptr, indices, features, rows=part), want)


@settings(max_examples=40, deadline=None)
@given(gathers())
def test_gradient_of_the_maximum(case):
    rng, indptr, indices, _, x, _ = case
    x = x.astype(np.float64)
    source = np.empty((len(indptr) - 1, x.shape[1]), np.int32)
    out = ck.gather_max(indptr, indices, x, source=source)
    weight = rng.standard_normal(out.shape)
    d_x = ck.gather_max_adjoint(source, weight, n_sources=len(x), num_threads=2)
    np.testing.assert_allclose(
        d_x, reference.gather_max_adjoint(source, weight, n_sources=len(x)), atol=1e-12
    )
    # The maximum is piecewise linear: along a small step its change is the gradient's.
    step = 1e-9 * rng.standard_normal(x.shape)
    change = ((ck.gather_max(indptr, indices, x + step) - out) * weight).sum()
    np.testing.assert_allclose(change, (d_x * step).sum(), rtol=1e-3, atol=1e-13)
    before = rng.standard_normal(x.shape)
    added = ck.gather_max_adjoint(source, weight, before.copy(), n_sources=len(x), accumulate=True)
    np.testing.assert_allclose(added, before + d_x, atol=1e-12)


def test_rounding_to_bfloat16():
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 3.4e38, 1e-45, 1.0, 1 + 2**-8, 1 + 3 * 2**-8],
        np.float32,
    )
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint64).astype(np.uint32)
    for x in (special, bits.view(np.float32), np.zeros((3, 0, 2), np.float32)):
        for level in dispatch.available():
            with dispatch.using(level):
                got = ck.to_bfloat16(x, num_threads=3)
                np.testing.assert_array_equal(got, reference.to_bfloat16(x))
                back = ck.from_bfloat16(got, num_threads=2)
                np.testing.assert_array_equal(back, reference.from_bfloat16(got))
                np.testing.assert_array_equal(np.isnan(back), np.isnan(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (5, 1), (7, 33), (4, 64)])
def test_tiles_there_and_back(shape, dtype):
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    for width in (None, 1, 5, 64):
        tiles = ck.to_tiles(x, empty_tiles(*shape, dtype, width))
        assert tiles.shape == shape and tiles.dtype == dtype
        np.testing.assert_array_equal(ck.from_tiles(tiles), x)
    assert layout.tile_columns(dtype) * np.dtype(dtype).itemsize == 64
    assert empty((3, *shape, 2), dtype).shape == (3, *shape, 2)
    assert empty((1, 3), dtype).ctypes.data % 64 == 0


def test_arrays_of_no_shape_are_refused():
    for shape in ((-3, 4), (3, -4), (-3, -4), (0, -1)):
        with pytest.raises(ValueError, match="a length in shape must be at least 0"):
            empty(shape, np.float32)
    with pytest.raises(TypeError, match="a length in shape must be an integer"):
        empty((3.0, 4), np.float32)
    with pytest.raises(ValueError, match="n_rows must be at least 0"):
        empty_tiles(-3, 4, np.float32)
    for dtype in ("S100", np.float16, ">f4"):
        with pytest.raises(TypeError, match="dtype must be float32, float64 or uint16, got"):
            empty_tiles(3, 4, dtype)
    with pytest.raises(ValueError, match="columns must be at least 0"):
        empty_tiles(3, -4, np.float32)


def test_wrong_tiles_are_refused():
    with pytest.raises(ValueError, match="17 columns do not make 1 tiles of 16"):
        Tiles(np.zeros((1, 3, 16), np.float32), 17)
    with pytest.raises(TypeError, match="Tiles.array must be float32"):
        Tiles(np.zeros((1, 3, 16), np.int32), 16)
    with pytest.raises(ValueError, match="Tiles.array must be C-contiguous"):
        Tiles(np.zeros((2, 3, 32), np.float32)[:, :, ::2], 32)
    indptr, indices = np.array([0, 1]), np.array([0], np.int32)
    x = np.ones((1, 20), np.float32)
    with pytest.raises(ValueError, match=r"out must have shape \(1, 20\), got float32 tiles of shape"):
        ck.gather(indptr, indices, None, x, empty_tiles(1, 19, np.float32))
    with pytest.raises(TypeError, match="out must be float32, got float64 tiles of shape"):
        ck.gather(indptr, indices, None, x, empty_tiles(1, 20, np.float64))
    with pytest.raises(ValueError, match="must not share memory with x"):
        tiles = ck.to_tiles(x)
        ck.gather(indptr, indices, None, tiles, tiles)
    read_only = ck.to_tiles(x)
    read_only.array.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writable"):
        ck.gather(indptr, indices, None, x, read_only)
    with pytest.raises(ValueError, match="out must be tiles of float32"):
        ck.to_tiles(x, empty_tiles(2, 20, np.float32))
    with pytest.raises(ValueError, match="indices.0. = 0 is outside"):
        ck.gather(indptr, indices, None, ck.to_tiles(np.ones((0, 4), np.float32)))


def test_copies_into_their_own_input_are_refused():
    buffer = np.arange(24, dtype=np.float32)
    rows, tiles = buffer.reshape(3, 8), Tiles(buffer.reshape(2, 3, 4), 8)
    with pytest.raises(ValueError, match="out must not share memory with x"):
        ck.to_tiles(rows, tiles)
    with pytest.raises(ValueError, match="out must not share memory with tiles"):
        ck.from_tiles(tiles, rows)
    with pytest.raises(TypeError, match="tiles must be Tiles, got a float32 array"):
        ck.from_tiles(rows)
    with pytest.raises(TypeError, match="out must be Tiles, got a float32 array"):
        ck.to_tiles(rows, rows)


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"shape": (-3, 4)}, ValueError, "shape must be at least 0"),
        ({"shape": (3,)}, TypeError, "shape must be"),
        ({"dtype": np.int32}, TypeError, "dtype must be float32, float64 or uint16, got int32"),
        ({"indptr": np.zeros(0, np.int64)}, ValueError, "indptr must have one entry more"),
        ({"cache_bytes": 2**50}, ValueError, "cache_bytes must be"),
    ],
)
def test_wrong_arguments_of_choose_layout(wrong, error, match):
    right = {
        "indptr": np.array([0, 1]),
        "indices": np.zeros(1, np.int32),
        "shape": (1, 64),
        "dtype": np.float32,
    }
    with pytest.raises(error, match=match):
        ck.choose_layout(**right | wrong)


def test_instruction_sets_by_name():
    assert dispatch.instruction_set() == dispatch.available()[-1]
    with dispatch.using("baseline"):
        assert dispatch.instruction_set() == "baseline"
    assert dispatch.instruction_set() == dispatch.available()[-1]
    with pytest.raises(ValueError, match="this CPU can run baseline.* got 'sse9'"), dispatch.using("sse9"):
        pass


def test_the_layout_follows_cache_and_locality():
    rng = np.random.default_rng(1)
    n, degree = 20_000, 60
    indptr = np.arange(0, n * degree + 1, degree, dtype=np.int64)
    random = rng.integers(0, n, n * degree).astype(np.int32)
    banded = ((np.arange(n * degree) // degree + rng.integers(0, 50, n * degree)) % n).astype(np.int32)
    shape, megabyte = (n, 128), 1 << 20

    def chosen(indices, cache, dtype=np.float32, width=128):
        return ck.choose_layout(indptr, indices, (n, width), dtype, cache_bytes=cache)

    assert chosen(random, 2 * megabyte) == "tiles"
    assert chosen(random, 20 * megabyte) == "rows"  # all features are cached
    assert chosen(random, megabyte // 4) == "rows"  # not even a tile is
    assert chosen(random, 2 * megabyte, width=16) == "rows"  # a row is a cache line as it is
    assert chosen(banded, 2 * megabyte) == "rows"
    assert chosen(random, 2 * megabyte, np.uint16) == "tiles"
    few = np.arange(0, 2 * n + 1, 2, dtype=np.int64)  # short rows do not pay for reading them once a tile
    assert ck.choose_layout(few, random[: 2 * n], shape, np.float32, cache_bytes=2 * megabyte) == "rows"
    assert layout.miss_rate(random, n * shape[1]) <= layout.miss_rate(random, 100)
    assert layout.miss_rate(np.zeros(0, np.int32), 10) == 0
    assert layout.miss_rate(np.zeros(1000, np.int32), 10) == pytest.approx(0.001)
    assert 0.85 < layout.miss_rate(random, n // 10) < 0.95
    assert layout.last_level_cache() > 0
