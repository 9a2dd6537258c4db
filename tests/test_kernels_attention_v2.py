"""GATv2: fused forward and backward against twins, dense NumPy, differences; bits and masks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from attentions import DTYPES, HEADS, KEY, random_pattern, side_by_side, transpose
from hypothesis import given, settings
from hypothesis import strategies as st

import cython_kernels as ck
from cython_kernels import _attention, dispatch, reference

HUB = _attention.hub_degree()
WIDE = [(1, 3), (3, 16), (2, 64), (1, 100), (6, 20), (8, 2)]


class Case(NamedTuple):
    indptr: np.ndarray
    indices: np.ndarray
    indptr_t: np.ndarray
    indices_t: np.ndarray
    left: np.ndarray
    right: np.ndarray
    a: np.ndarray
    d_out: np.ndarray
    options: dict
    gids: dict

    @property
    def matrix(self):
        return self.indptr, self.indices

    @property
    def transposed(self):
        return self.indptr_t, self.indices_t

    @property
    def inputs(self):
        return self.left, self.right, self.a

    @property
    def masks(self):
        return self.options | self.gids

    def astype(self, dtype):
        names = ("left", "right", "a", "d_out")
        return self._replace(**{name: getattr(self, name).astype(dtype) for name in names})


def make_case(rng, n_rows, n_cols, heads, width, dtype, *, p=0.0, slope=0.2, in_order=True, **pattern):
    indptr, indices = random_pattern(rng, n_rows, n_cols, in_order=in_order, **pattern)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    gids = rng.integers(-(2**63), 2**63, n_rows + n_cols)
    return Case(
        indptr, indices, *transpose(indptr, indices, n_cols, None if in_order else rng),
        normal(n_cols, heads * width), normal(n_rows, heads * width),
        (2 / np.sqrt(width) * normal(heads, width)).astype(dtype), normal(n_rows, heads * width),
        {"slope": slope, "p": p, **KEY}, {"source_gids": gids[:n_cols], "target_gids": gids[n_cols:]},
    )  # fmt: skip


@st.composite
def cases(draw, hubs=True):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_rows = draw(st.integers(1, 40))
    heads, width = draw(st.sampled_from(HEADS + WIDE))
    big = hubs and heads * width <= 64
    return make_case(
        rng, n_rows, n_rows + draw(st.integers(0, 9)), heads, width, draw(st.sampled_from(DTYPES)),
        p=draw(st.sampled_from([0.0, 0.0, 0.4, 1e-12, 1 - 1e-12])),
        slope=draw(st.sampled_from([0.2, 0.0, 1.0, 1.5])),
        hub=draw(st.sampled_from([0, 300, *([HUB + 1] if big else [])])),
        in_order=draw(st.booleans()),
    )  # fmt: skip


def run(module, case, **more):
    """All results of forward and backward, by name."""
    saved = ck.attention_v2_saved(len(case.right), len(case.a), case.left.dtype)
    out = module.attention_v2(*case.matrix, *case.inputs, saved=saved, **case.masks, **more)
    d_right, d_a, record = module.attention_v2_targets(
        *case.matrix, *case.inputs, out, case.d_out, saved, **case.masks, **more
    )
    d_left = module.attention_v2_adjoint(
        *case.transposed, *case.inputs, record, case.d_out, **case.masks, **more
    )
    return saved._asdict() | {
        "out": out, "record": record, "d_right": d_right, "d_a": d_a, "d_left": d_left
    }  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(cases(hubs=False))
def test_agrees_with_its_twin(case):
    got, want = run(ck, case, num_threads=2), run(reference, case.astype(np.float64))
    # The twin sums entry after entry, which alone costs it some of float64.
    tolerance = 200 * np.finfo(case.left.dtype).eps + len(case.indices) * np.finfo(np.float64).eps
    scale = float(np.linalg.norm(case.d_out)) * (1 + float(np.abs(case.left).max()))
    for name, value in want.items():
        assert got[name].dtype == case.left.dtype and got[name].shape == value.shape
        # Scores, and ds, are sums that may cancel altogether.
        floor = scale if name in ("d_right", "d_a", "row_max", "record") else 1e-30
        error = np.linalg.norm(got[name].astype(np.float64) - value)
        assert error <= tolerance * max(float(np.linalg.norm(value)), floor), name


@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_threads_instructions_intervals_and_saving_change_no_bit(case, data):
    with dispatch.using("baseline"):
        want = run(ck, case)
    for level in dispatch.available():
        with dispatch.using(level):
            for threads in (1, 2, 3):
                got = run(ck, case, num_threads=threads, validate=False)
                for name, value in want.items():
                    np.testing.assert_array_equal(got[name], value, err_msg=f"{name} {level} {threads}")
    np.testing.assert_array_equal(ck.attention_v2(*case.matrix, *case.inputs, **case.masks), want["out"])

    n_rows, n_cols = len(case.right), len(case.left)
    cut, cut_t = data.draw(st.integers(0, n_rows)), data.draw(st.integers(0, n_cols))
    saved = ck.attention_v2_saved(n_rows, len(case.a), case.left.dtype)
    made = {name: np.full_like(want[name], np.nan) for name in ("out", "record", "d_right", "d_left")}
    parts = []
    for rows in ((cut, n_rows), (0, cut)):
        ck.attention_v2(*case.matrix, *case.inputs, made["out"], saved=saved, rows=rows, **case.masks)
        _, part, _ = ck.attention_v2_targets(
            *case.matrix, *case.inputs, made["out"], case.d_out, saved, made["d_right"],
            record=made["record"], rows=rows, **case.masks,
        )  # fmt: skip
        parts.append(part.astype(np.float64))
    for rows in ((0, cut_t), (cut_t, n_cols)):
        ck.attention_v2_adjoint(
            *case.transposed, *case.inputs, made["record"], case.d_out, made["d_left"], rows=rows,
            **case.masks,
        )  # fmt: skip
    for name, value in (made | saved._asdict()).items():
        np.testing.assert_array_equal(value, want[name], err_msg=name)
    size = np.abs(parts[0]) + np.abs(parts[1]) + np.abs(want["d_a"])
    bound = 4 * np.finfo(case.left.dtype).eps * size + 1e-30
    assert (np.abs(parts[0] + parts[1] - want["d_a"]) <= bound).all()


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_columns_of_wider_matrices_change_no_bit(case, seed):
    rng = np.random.default_rng(seed)
    want = run(ck, case)

    def empty(*names):
        return side_by_side(rng, *(np.full_like(want[name], np.nan) for name in names))

    left, _ = side_by_side(rng, case.left)
    for level in dispatch.available():
        for threads in (1, 2, 3):
            with dispatch.using(level):
                how = case.masks | {"num_threads": threads}
                right, d_out, record, between = side_by_side(
                    rng, case.right, case.d_out, np.full_like(want["record"], np.nan)
                )
                saved = ck.attention_v2_saved(len(right), len(case.a), left.dtype)
                got = {"record": record}
                got["out"] = ck.attention_v2(*case.matrix, left, right, case.a, saved=saved, **how)
                got["d_right"], after = empty("d_right")
                got["d_a"] = ck.attention_v2_targets(
                    *case.matrix, left, right, case.a, got["out"], d_out, saved, got["d_right"],
                    record=record, **how,
                )[1]  # fmt: skip
                got["d_left"], behind = empty("d_left")
                ck.attention_v2_adjoint(
                    *case.transposed, left, right, case.a, record, d_out, got["d_left"], **how
                )
                for untouched in (between, after, behind):
                    assert np.isnan(untouched()).all()
            for name, value in (got | saved._asdict()).items():
                np.testing.assert_array_equal(value, want[name], err_msg=f"{name} {level} {threads}")


def test_both_gradients_may_be_columns_of_one_matrix():
    case = make_case(np.random.default_rng(1), 20, 20, 4, 4, np.float64)
    want = run(ck, case)
    both = np.full((20, 32), np.nan)
    features, d_right, d_left = np.concatenate([case.left, case.right], axis=1), both[:, 16:], both[:, :16]
    inputs = features[:, :16], features[:, 16:], case.a
    saved = ck.AttentionV2Saved(want["row_max"], want["row_sum"])
    *_, record = ck.attention_v2_targets(
        *case.matrix, *inputs, want["out"], case.d_out, saved, d_right, **case.masks
    )
    ck.attention_v2_adjoint(*case.transposed, *inputs, record, case.d_out, d_left, **case.masks)
    np.testing.assert_array_equal(both, np.concatenate([want["d_left"], want["d_right"]], axis=1))


def test_rows_outside_an_interval_are_zero_in_a_new_output():
    case = make_case(np.random.default_rng(0), 10, 12, 2, 3, np.float64)
    part, whole = run(ck, case, rows=(3, 6)), run(ck, case)
    for name in ("out", "record", "d_left", "d_right", *ck.AttentionV2Saved._fields):
        assert not part[name][:3].any() and not part[name][6:].any()
    np.testing.assert_array_equal(part["out"][3:6], whole["out"][3:6])
    want = run(reference, case, rows=(3, 6))
    for name, value in part.items():
        np.testing.assert_allclose(value, want[name], atol=1e-13, err_msg=name)


# ---- a dense model ----


def dense(case, left, right, a):
    """The loss sum(d_out * out) by dense matrices; of a matrix without repeated entries."""
    n_rows, heads = len(right), len(a)
    present = np.zeros((n_rows, len(left)), np.bool_)
    mask = np.ones((n_rows, len(left), heads))
    for i in range(n_rows):
        columns = case.indices[case.indptr[i] : case.indptr[i + 1]]
        present[i, columns] = True
        if case.options["p"] > 0:
            gids = case.gids["source_gids"][columns], np.repeat(case.gids["target_gids"][i], len(columns))
            kept = reference.attention_kept(
                *gids, np.zeros(len(columns), np.uint64), heads, case.options["p"], **KEY
            )
            mask[i, columns] = kept / (1 - case.options["p"])
    raw = (left[None] + right[:, None]).reshape(n_rows, len(left), *a.shape)
    s = (a * np.maximum(raw, case.options["slope"] * raw)).sum(axis=3)
    s = np.where(present[:, :, None], s, -np.inf)
    with np.errstate(invalid="ignore"):
        alpha = np.exp(s - s.max(axis=1, keepdims=True))
        alpha = np.nan_to_num(alpha / alpha.sum(axis=1, keepdims=True))
    out = np.einsum("ijh,jhd->ihd", mask * alpha, left.reshape(len(left), *a.shape)).reshape(n_rows, -1)
    return (out * case.d_out).sum(), out


def without_repeats(case):
    row = np.repeat(np.arange(len(case.indptr) - 1), np.diff(case.indptr))
    pairs = np.unique(np.stack([row, case.indices]), axis=1)
    indptr = np.searchsorted(pairs[0], np.arange(len(case.indptr))).astype(np.int64)
    indices = pairs[1].astype(np.int32)
    starts, targets = transpose(indptr, indices, len(case.left))
    return case._replace(indptr=indptr, indices=indices, indptr_t=starts, indices_t=targets)


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize(("heads", "width"), [(1, 5), (3, 2), (2, 8), (1, 11)])
def test_gradients_are_differences_of_a_dense_model(heads, width, p):
    rng = np.random.default_rng(heads)
    case = without_repeats(make_case(rng, 7, 9, heads, width, np.float64, p=p))
    got = run(ck, case, num_threads=2)
    inputs = list(case.inputs)
    np.testing.assert_allclose(got["out"], dense(case, *inputs)[1], atol=1e-13)
    for k, name in enumerate(("d_left", "d_right", "d_a")):
        for at in np.ndindex(inputs[k].shape):
            step = np.zeros_like(inputs[k])
            step[at] = 1e-6
            moved = [
                dense(case, *[v + sign * step if n == k else v for n, v in enumerate(inputs)])[0]
                for sign in (1, -1)
            ]
            assert got[name][at] == pytest.approx((moved[0] - moved[1]) / 2e-6, rel=1e-6, abs=1e-7), name


@pytest.mark.parametrize("p", [0.0, 0.6])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_float32_gradients_are_accurate(p, mean):
    """Also of features with a large common part."""
    rng = np.random.default_rng(5)
    case = make_case(rng, 300, 310, 8, 8, np.float32, p=p, longest=200)
    case.left[...] += np.float32(mean)
    got, want = run(ck, case), run(reference, case.astype(np.float64))
    for name, value in want.items():
        error = np.linalg.norm(got[name] - value) / np.linalg.norm(value)
        assert error < 2e-5, name


# ---- what is special ----


def test_a_target_may_rank_sources_as_it_likes():
    """What the paper calls dynamic attention: with one head two targets have different favourites."""
    indptr, indices = np.array([0, 2, 4]), np.array([0, 1, 0, 1], np.int32)
    left, right = np.array([[3.0, 0.0], [0.0, 3.0]]), np.array([[-2.0, 0.0], [0.0, -2.0]])
    out = ck.attention_v2(indptr, indices, left, right, np.array([[1.0, 1.0]]), slope=0.0)
    favourite = np.exp([1.0, 3.0]) / np.exp([1.0, 3.0]).sum()  # relu(3 - 2) against relu(0 - 2) + 3
    np.testing.assert_allclose(out, [3 * favourite, 3 * favourite[::-1]], rtol=1e-14)


@pytest.mark.parametrize("in_order", [True, False])
def test_masks_are_those_of_attention(in_order):
    """With scores that are all 0 the weights of a row are the masks over its length."""
    rng = np.random.default_rng(8)
    case = make_case(rng, 9, 11, 6, 11, np.float64, p=0.5, in_order=in_order, hub=60)
    case.a[...] = 0
    zeros = np.zeros((11, 6)), np.zeros((9, 6))
    want = ck.attention(*case.matrix, case.left, *zeros, **case.masks)
    got = run(ck, case)
    np.testing.assert_allclose(got["out"], want, atol=1e-13)
    # Scores and maxima that are 0, the inverse of the sum, and t, which does not matter here.
    record = np.stack([zeros[1], zeros[1], got["record"][:, 1], zeros[1]], axis=1)
    d_x, _ = ck.attention_adjoint(*case.transposed, case.left, zeros[0], record, case.d_out, **case.masks)
    np.testing.assert_allclose(got["d_left"], d_x, atol=1e-13)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_pieces_of_a_hub_are_merged(in_order, p):
    rng = np.random.default_rng(10)
    case = make_case(rng, 3, 900, 2, 4, np.float64, p=p, hub=2 * HUB + 77, in_order=in_order)
    got, want = run(ck, case, num_threads=2), run(reference, case)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_maxima_that_come_late_or_early(dtype, descending):
    """Sums of a row are multiplied whenever its maximum grows, by block and by piece of a hub."""
    n = HUB + 3000
    scores = np.linspace(-300, 60, n) if dtype == np.float32 else np.linspace(-3000, 600, n)
    left = np.stack([scores[:: -1 if descending else 1], np.linspace(1, 2, n)], axis=1).astype(dtype)
    indptr, indices, a = np.array([0, n]), np.arange(n, dtype=np.int32), np.array([[1, 0]], dtype)
    saved = ck.attention_v2_saved(1, 1, dtype)
    for threads in (1, 2):
        out = ck.attention_v2(
            indptr, indices, left, np.zeros((1, 2), dtype), a, slope=1.0, saved=saved, num_threads=threads
        )
        s = left[:, 0].astype(np.float64)
        weight = np.exp(s - s.max())
        np.testing.assert_allclose(saved.row_max, [[s.max()]])
        np.testing.assert_allclose(saved.row_sum, [[weight.sum()]], rtol=400 * np.finfo(dtype).eps)
        np.testing.assert_allclose(
            out[0], (weight / weight.sum()) @ left.astype(np.float64), rtol=400 * np.finfo(dtype).eps
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_scores(dtype):
    indptr, indices = np.array([0, 4, 6]), np.array([0, 1, 2, 3, 2, 3], np.int32)
    transposed = transpose(indptr, indices, 4)
    right, a = np.zeros((2, 2), dtype), np.array([[1, 0]], dtype)

    def both(*scores):
        left = np.stack([np.array(scores), np.arange(1.0, 5)], axis=1).astype(dtype)
        saved = ck.attention_v2_saved(2, 1, dtype)
        out = ck.attention_v2(indptr, indices, left, right, a, saved=saved, slope=1.0)
        ones = np.ones_like(out)
        d_right, d_a, record = ck.attention_v2_targets(
            indptr, indices, left, right, a, out, ones, saved, slope=1.0
        )
        d_left = ck.attention_v2_adjoint(*transposed, left, right, a, record, ones, slope=1.0)
        return out, d_right, d_a, d_left

    for result in both(1e4, -1e4, 0, -1e4):
        assert np.isfinite(result).all()
    np.testing.assert_array_equal(both(1e4, -1e4, 0, -1e4)[0], [[1e4, 1], [0, 3]])
    np.testing.assert_array_equal(both(-1e4, -1e4, 1e4, 1e4)[0], [[1e4, 3.5], [1e4, 3.5]])
    for bad in (np.nan, np.inf):
        out, d_right, d_a, d_left = both(0, bad, 0, 0)
        assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
        assert np.isnan(d_right[0, 0]) and np.isnan(d_a[0, 0]) and np.isnan(d_left[0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_overflow(dtype):
    """-inf excludes an entry; a row of nothing else is NaN."""
    most = np.finfo(dtype).max
    indptr, indices = np.array([0, 40, 80, 120]), np.tile(np.arange(40, dtype=np.int32), 3)
    indices[40:80], indices[80:] = 0, np.arange(39, -1, -1)
    left = np.tile(np.array([most, most], dtype), (40, 1))
    left[-1] = [3, 4]
    right, a = np.zeros((3, 2), dtype), np.array([[-1, -1]], dtype)
    out = ck.attention_v2(indptr, indices, left, right, a)
    np.testing.assert_array_equal(out, [[3, 4], [np.nan, np.nan], [3, 4]])


def test_without_rows_or_entries():
    for n_rows, n_cols in ((0, 0), (0, 3), (3, 0), (3, 4)):
        indptr, indices = np.zeros(n_rows + 1, np.int64), np.zeros(0, np.int32)
        starts = np.zeros(n_cols + 1, np.int64)
        ids = np.arange(n_rows + n_cols)
        case = Case(
            indptr, indices, starts, indices,
            np.ones((n_cols, 6)), np.ones((n_rows, 6)), np.ones((2, 3)), np.ones((n_rows, 6)),
            {"slope": 0.2, "p": 0.5, **KEY},
            {"source_gids": ids[:n_cols], "target_gids": ids[n_cols:]},
        )  # fmt: skip
        for value in run(ck, case, num_threads=2).values():
            assert not value.any()


def test_no_rows_give_no_gradient_of_the_vector():
    case = make_case(np.random.default_rng(3), 5, 5, 2, 2, np.float32)
    d_a = np.full((2, 2), np.nan, np.float32)
    saved = ck.attention_v2_saved(5, 2, np.float32)
    ck.attention_v2_targets(
        *case.matrix, *case.inputs, case.right.copy(), case.d_out, saved, d_a=d_a, rows=(2, 2), **case.masks
    )
    np.testing.assert_array_equal(d_a, 0)


def test_no_dropout_needs_no_ids_and_a_tiny_one_drops_nothing():
    case = make_case(np.random.default_rng(11), 20, 20, 2, 4, np.float64)
    bare = ck.attention_v2(*case.matrix, *case.inputs)
    np.testing.assert_array_equal(bare, run(ck, case)["out"])
    tiny = run(ck, case._replace(options=case.options | {"p": 1e-12}))["out"]
    np.testing.assert_allclose(tiny, bare, rtol=1e-11)
    assert not run(ck, case._replace(options=case.options | {"p": 1 - 1e-12}))["out"].any()


def test_saved_arrays():
    saved = ck.attention_v2_saved(3, 2, np.float32)
    assert [array.shape for array in saved] == [(3, 2), (3, 2)]
    assert all(array.dtype == np.float32 and not array.any() for array in saved)
    with pytest.raises(ValueError, match="heads must be at least 1"):
        ck.attention_v2_saved(3, 0, np.float32)
    for dtype in (np.int32, "float16", ">f4"):
        with pytest.raises(TypeError, match="dtype must be float32 or float64, got"):
            ck.attention_v2_saved(3, 2, dtype)
