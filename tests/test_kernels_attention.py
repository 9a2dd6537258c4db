"""Graph attention: fused forward and backward against twins, dense NumPy, differences; masks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from attentions import DTYPES, HEADS, KEY, random_pattern, side_by_side, transpose
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import cython_kernels as ck
from cython_kernels import _attention, dispatch, reference
from cython_kernels.dropout_masks import mask_key

HUB = _attention.hub_degree()


class Case(NamedTuple):
    indptr: np.ndarray
    indices: np.ndarray
    indptr_t: np.ndarray
    indices_t: np.ndarray
    x: np.ndarray
    score_source: np.ndarray
    score_target: np.ndarray
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
    def masks(self):
        return self.options | self.gids

    def astype(self, dtype):
        return self._replace(
            **{
                name: getattr(self, name).astype(dtype)
                for name in ("x", "score_source", "score_target", "d_out")
            }
        )


def make_case(
    rng, n_rows, n_cols, heads, width, dtype, *, p=0.0, slope=0.2, hub=0, longest=12, in_order=True
):
    indptr, indices = random_pattern(rng, n_rows, n_cols, hub=hub, longest=longest, in_order=in_order)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    gids = rng.integers(-(2**63), 2**63, n_rows + n_cols)
    return Case(
        indptr, indices, *transpose(indptr, indices, n_cols, None if in_order else rng),
        normal(n_cols, heads * width), 2 * normal(n_cols, heads), normal(n_rows, heads),
        normal(n_rows, heads * width), {"slope": slope, "p": p, **KEY},
        {"source_gids": gids[:n_cols], "target_gids": gids[n_cols:]},
    )  # fmt: skip


@st.composite
def cases(draw, hubs=True):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_rows = draw(st.integers(1, 40))
    heads, width = draw(st.sampled_from(HEADS))
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
    n_rows, heads = case.score_target.shape
    saved = ck.attention_saved(n_rows, heads, case.x.shape[1], case.x.dtype)
    slope = {"slope": case.options["slope"]}
    scores = case.score_source, case.score_target
    out = module.attention(*case.matrix, case.x, *scores, saved=saved, **case.masks, **more)
    d_target, record = module.attention_targets(
        out,
        case.d_out,
        case.score_target,
        saved,
        **slope,
        **{k: v for k, v in more.items() if k != "validate"},
    )
    d_x, d_source = module.attention_adjoint(
        *case.transposed, case.x, case.score_source, record, case.d_out, **case.masks, **more
    )
    weights = module.attention_weights(*case.matrix, *scores, **case.masks, **more)
    return saved._asdict() | {
        "out": out, "d_score_target": d_target, "record": record, "d_x": d_x, "d_score_source": d_source,
        "weights": weights,
    }  # fmt: skip


def distance(got, want):
    return np.linalg.norm(got.astype(np.float64) - want) / max(float(np.linalg.norm(want)), 1e-30)


@settings(max_examples=40, deadline=None)
@given(cases(hubs=False))
def test_agrees_with_its_twin(case):
    check_against_twin(case)


@pytest.mark.parametrize(("heads", "width", "p"), [(1, 4, 0.0), (2, 3, 0.4)])
def test_pieces_of_a_hub_agree_with_its_twin(heads, width, p):
    check_against_twin(make_case(np.random.default_rng(1), 3, 5, heads, width, np.float32, p=p, hub=HUB + 1))


def check_against_twin(case):
    got, want = run(ck, case, num_threads=2), run(reference, case.astype(np.float64))
    scale = np.linalg.norm(case.d_out) * (1 + np.abs(case.x).max())
    # The twin sums entry after entry, which alone costs it some of float64.
    tolerance = 100 * np.finfo(case.x.dtype).eps + len(case.indices) * np.finfo(np.float64).eps
    for name, value in want.items():
        assert got[name].dtype == case.x.dtype and got[name].shape == value.shape
        # Gradients of scores are differences of sums that may cancel altogether.
        floor = 1e-30 if not name.startswith("d_score") else float(scale)
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
    scores = case.score_source, case.score_target
    np.testing.assert_array_equal(ck.attention(*case.matrix, case.x, *scores, **case.masks), want["out"])

    n_rows, n_cols, heads = len(case.score_target), len(case.x), case.score_target.shape[1]
    cut = data.draw(st.integers(0, n_rows))
    cut_t = data.draw(st.integers(0, n_cols))
    saved = ck.attention_saved(n_rows, heads, case.x.shape[1], case.x.dtype)
    out, d_target = np.full_like(want["out"], np.nan), np.full_like(want["d_score_target"], np.nan)
    record, weights = np.full_like(want["record"], np.nan), np.full_like(want["weights"], np.nan)
    d_x, d_source = np.full_like(want["d_x"], np.nan), np.full_like(want["d_score_source"], np.nan)
    for rows in ((cut, n_rows), (0, cut)):
        ck.attention(*case.matrix, case.x, *scores, out, saved=saved, rows=rows, **case.masks)
        ck.attention_weights(*case.matrix, *scores, weights, rows=rows, **case.masks)
        ck.attention_targets(
            out, case.d_out, case.score_target, saved, d_target, record=record, rows=rows,
            slope=case.options["slope"],
        )  # fmt: skip
    for rows in ((0, cut_t), (cut_t, n_cols)):
        ck.attention_adjoint(
            *case.transposed, case.x, case.score_source, record, case.d_out, d_x, d_score_source=d_source,
            rows=rows, **case.masks,
        )  # fmt: skip
    parts = saved._asdict() | {"out": out, "d_score_target": d_target, "record": record, "weights": weights}
    for name, value in (parts | {"d_x": d_x, "d_score_source": d_source}).items():
        np.testing.assert_array_equal(value, want[name], err_msg=name)


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_columns_of_wider_matrices_change_no_bit(case, seed):
    rng = np.random.default_rng(seed)
    want = run(ck, case)
    x, source, _ = side_by_side(rng, case.x, case.score_source)
    slope = {"slope": case.options["slope"]}
    for level in dispatch.available():
        for threads in (1, 2, 3):
            with dispatch.using(level):
                how = {"num_threads": threads}
                got = {}
                saved = ck.attention_saved(*case.score_target.shape, x.shape[1], x.dtype)
                got["out"] = ck.attention(
                    *case.matrix, x, source, case.score_target, saved=saved, **case.masks, **how
                )
                d_out, record, between = side_by_side(rng, case.d_out, np.full_like(want["record"], np.nan))
                got["d_score_target"], got["record"] = ck.attention_targets(
                    got["out"], d_out, case.score_target, saved, record=record, **slope, **how
                )
                assert got["record"] is record and np.isnan(between()).all()
                d_x, d_source, between = side_by_side(
                    rng, *(np.full_like(want[name], np.nan) for name in ("d_x", "d_score_source"))
                )
                got["d_x"], got["d_score_source"] = ck.attention_adjoint(
                    *case.transposed, x, source, record, d_out, d_x, d_score_source=d_source, **case.masks,
                    **how,
                )  # fmt: skip
                assert got["d_x"] is d_x and np.isnan(between()).all()
                got["weights"] = ck.attention_weights(
                    *case.matrix, source, case.score_target, **case.masks, **how
                )
            for name, value in (got | saved._asdict()).items():
                np.testing.assert_array_equal(value, want[name], err_msg=f"{name} {level} {threads}")


def test_rows_outside_an_interval_are_zero_in_a_new_output():
    case = make_case(np.random.default_rng(0), 10, 12, 2, 3, np.float64)
    part, whole = run(ck, case, rows=(3, 6)), run(ck, case)
    for name in ("out", "record", "d_x", "d_score_source", "d_score_target", *ck.AttentionSaved._fields):
        assert not part[name][:3].any() and not part[name][6:].any()
    np.testing.assert_array_equal(part["out"][3:6], whole["out"][3:6])
    first, last = case.indptr[3], case.indptr[6]
    assert not part["weights"][:first].any() and not part["weights"][last:].any()
    np.testing.assert_array_equal(part["weights"][first:last], whole["weights"][first:last])


def dense(case, x, score_source, score_target):
    """The loss sum(d_out * out) by dense matrices; of a matrix without repeated entries."""
    n_rows, heads = score_target.shape
    present = np.zeros((n_rows, len(x)), np.bool_)
    mask = np.ones((n_rows, len(x), heads))
    for i in range(n_rows):
        columns = case.indices[case.indptr[i] : case.indptr[i + 1]]
        present[i, columns] = True
        if case.options["p"] > 0:
            gids = case.gids["source_gids"][columns], np.repeat(case.gids["target_gids"][i], len(columns))
            kept = reference.attention_kept(
                *gids, np.zeros(len(columns), np.uint64), heads, case.options["p"], **KEY
            )
            mask[i, columns] = kept / (1 - case.options["p"])
    raw = score_source[None] + score_target[:, None]
    s = np.where(present[:, :, None], np.maximum(raw, case.options["slope"] * raw), -np.inf)
    with np.errstate(invalid="ignore"):
        alpha = np.exp(s - s.max(axis=1, keepdims=True))
        alpha = np.nan_to_num(alpha / alpha.sum(axis=1, keepdims=True))
    out = np.einsum("ijh,jhd->ihd", mask * alpha, x.reshape(len(x), heads, -1)).reshape(n_rows, -1)
    return (out * case.d_out).sum(), out


def without_repeats(case, n_cols):
    row = np.repeat(np.arange(len(case.indptr) - 1), np.diff(case.indptr))
    pairs = np.unique(np.stack([row, case.indices]), axis=1)
    indptr = np.searchsorted(pairs[0], np.arange(len(case.indptr))).astype(np.int64)
    indices = pairs[1].astype(np.int32)
    starts, targets = transpose(indptr, indices, n_cols)
    return case._replace(indptr=indptr, indices=indices, indptr_t=starts, indices_t=targets)


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize(("heads", "width"), [(1, 5), (3, 2), (8, 8)])
def test_gradients_are_differences_of_a_dense_model(heads, width, p):
    rng = np.random.default_rng(heads)
    case = without_repeats(make_case(rng, 12, 15, heads, width, np.float64, p=p), 15)
    got = run(ck, case, num_threads=2)
    inputs = [case.x, case.score_source, case.score_target]
    np.testing.assert_allclose(got["out"], dense(case, *inputs)[1], atol=1e-13)
    for k, name in enumerate(("d_x", "d_score_source", "d_score_target")):
        for _ in range(5):
            step = rng.standard_normal(inputs[k].shape)
            moved = [
                dense(case, *[v + sign * 1e-6 * step if n == k else v for n, v in enumerate(inputs)])[0]
                for sign in (1, -1)
            ]
            np.testing.assert_allclose(
                (moved[0] - moved[1]) / 2e-6, (got[name] * step).sum(), rtol=1e-6, atol=1e-7
            )


@pytest.mark.parametrize("p", [0.0, 0.6])
@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (3.0, 0.3), (-2.0, 1.0)])
def test_float32_gradients_are_accurate(p, mean, spread):
    """Also of features with a large common part, and of scores of mostly one sign."""
    rng = np.random.default_rng(5)
    case = make_case(rng, 300, 310, 8, 8, np.float32, p=p, longest=200)
    case.score_source[...] = mean + spread * case.score_source
    case.x[...] += np.float32(abs(mean) / 3)
    got, want = run(ck, case), run(reference, case.astype(np.float64))
    for name, value in want.items():
        assert distance(got[name], value) < 1e-5, name


def test_a_row_of_one_sign_has_no_gradient_but_the_slope():
    """The softmax does not see what all its scores share: the target's gradient is 0, exactly."""
    case = make_case(np.random.default_rng(6), 20, 20, 4, 4, np.float32)
    for sign in (1, -1):
        shifted = case._replace(score_source=(np.abs(case.score_source) + 9) * np.float32(sign))
        got = run(ck, shifted)
        np.testing.assert_array_equal(got["d_score_target"], 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_a_softmax(dtype):
    rng = np.random.default_rng(7)
    case = make_case(rng, 60, 70, 3, 1, dtype, slope=1.0, hub=HUB + 500)
    weights = ck.attention_weights(*case.matrix, case.score_source, case.score_target, slope=1.0)
    assert weights.min() >= 0
    row = np.repeat(np.arange(60), np.diff(case.indptr))
    sums = np.zeros((60, 3))
    np.add.at(sums, row, weights.astype(np.float64))
    filled = np.diff(case.indptr) > 0
    np.testing.assert_allclose(sums[filled], 1, rtol=1000 * np.finfo(dtype).eps)
    moved = ck.attention_weights(*case.matrix, case.score_source, case.score_target + dtype(3), slope=1.0)
    np.testing.assert_allclose(moved, weights, rtol=60 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponentials_are_accurate(dtype):
    """In rows of two entries, whose weights are 1 / (1 + exp(-d)) and exp(-d) / (1 + exp(-d))."""
    d = np.concatenate(
        [np.linspace(0, 86 if dtype == np.float32 else 700, 20_001), np.geomspace(1e-8, 1, 999)]
    )
    d = d.astype(dtype)
    indptr = np.arange(0, 2 * len(d) + 1, 2, dtype=np.int64)
    indices = np.arange(2 * len(d), dtype=np.int32)
    scores = np.stack([np.zeros_like(d), -d], axis=1).reshape(-1, 1)
    got = ck.attention_weights(indptr, indices, scores, np.zeros((len(d), 1), dtype), slope=1.0)
    small = np.exp(-d.astype(np.longdouble))
    want = np.stack([1 / (1 + small), small / (1 + small)], axis=1).reshape(-1, 1)
    error = np.abs(got - want) / (want * np.finfo(dtype).eps)
    assert error.max() < 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_scores(dtype):
    indptr, indices = np.array([0, 4, 6]), np.array([0, 1, 2, 3, 2, 3], np.int32)
    transposed = transpose(indptr, indices, 4)
    x = np.arange(1.0, 9).astype(dtype).reshape(4, 2)
    target = np.zeros((2, 1), dtype)

    def both(*source):
        scores = np.array(source, dtype)[:, None]
        saved = ck.attention_saved(2, 1, 2, dtype)
        out = ck.attention(indptr, indices, x, scores, target, saved=saved)
        d_target, record = ck.attention_targets(out, np.ones_like(out), target, saved)
        grads = ck.attention_adjoint(*transposed, x, scores, record, np.ones_like(out))
        return out, d_target, *grads

    for result in both(1e4, -1e4, 0, -1e4):
        assert np.isfinite(result).all()
    np.testing.assert_array_equal(both(1e4, -1e4, 0, -1e4)[0], [[1, 2], [5, 6]])
    np.testing.assert_array_equal(both(-1e4, -1e4, 1e4, 1e4)[0], [[6, 7], [6, 7]])
    for result in both(-np.inf, 0, 0, -np.inf):  # excluded
        assert np.isfinite(result).all()
    np.testing.assert_array_equal(both(-np.inf, 0, 0, -np.inf)[0], [[4, 5], [5, 6]])
    np.testing.assert_array_equal(both(-np.inf, 0, 0, -np.inf)[2][0], 0)
    for bad in (np.nan, np.inf):
        out, d_target, d_x, d_source = both(0, bad, 0, 0)
        assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
        assert np.isnan(d_target[0]).all() and np.isnan(d_x).all() and np.isnan(d_source).all()
    assert np.isnan(both(0, 0, -np.inf, -np.inf)[0][1]).all()
    x[3, 1] = np.nan
    np.testing.assert_array_equal(np.isnan(both(0, 0, 0, 0)[0]), [[False, True]] * 2)


def test_without_rows_or_entries():
    for n_rows, n_cols in ((0, 0), (0, 3), (3, 0), (3, 4)):
        indptr, indices = np.zeros(n_rows + 1, np.int64), np.zeros(0, np.int32)
        starts = np.zeros(n_cols + 1, np.int64)
        ids = np.arange(n_rows + n_cols)
        case = Case(
            indptr, indices, starts, indices,
            np.ones((n_cols, 6)), np.ones((n_cols, 2)), np.ones((n_rows, 2)), np.ones((n_rows, 6)),
            {"slope": 0.2, "p": 0.5, **KEY},
            {"source_gids": ids[:n_cols], "target_gids": ids[n_cols:]},
        )  # fmt: skip
        for name, value in run(ck, case, num_threads=2).items():
            assert name == "record" or not value.any()


@pytest.mark.parametrize("in_order", [True, False])
def test_masks_are_made_of_the_documented_words(in_order):
    indptr, indices = np.array([0, 3]), np.array([0, 0, 1] if in_order else [0, 1, 0], np.int32)
    p, heads, gids = 0.3, 6, {"source_gids": np.array([-5, 2**40 + 1]), "target_gids": np.array([-(2**50)])}
    ones = np.ones((2, heads))
    got = ck.attention_weights(indptr, indices, ones, ones[:1], p=p, **KEY, **gids) != 0

    def mix(word):
        word %= 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = (word ^ (word >> shift)) * factor % 2**64
        return word ^ (word >> 31)

    golden = 0x9E3779B97F4A7C15
    base = mix(mix(mask_key(p, **KEY).key ^ int.from_bytes(b"attentio")) + golden * (KEY["epoch"] + 1))
    for e, occurrence in enumerate([0, 1, 0] if in_order else [0, 0, 1]):
        source, target = int(gids["source_gids"][indices[e]]), int(gids["target_gids"][0])
        counter = source % 2**32, source >> 32 & 0xFFFFFFFF, target % 2**32, target >> 32 & 0xFFFFFFFF
        for h in range(heads):
            key = mix(base + golden * (2**32 * occurrence + h // 4 + 1))
            word = ck.philox4x32(counter, (key % 2**32, key >> 32))[h % 4]
            assert got[e, h] == (word >= round(p * 2**32))


def test_forward_and_backward_draw_the_same_masks():
    """With features and gradients that are unit vectors both show every single weight."""
    rng = np.random.default_rng(8)
    for in_order in (True, False):
        case = make_case(rng, 9, 11, 6, 11, np.float64, p=0.5, in_order=in_order, hub=60)
        row = np.repeat(np.arange(9), np.diff(case.indptr))
        weights = run(ck, case)["weights"]
        want = np.zeros((9, 6, 11))
        np.add.at(want.transpose(0, 2, 1), (row, case.indices), weights)
        shown = run(ck, case._replace(x=np.tile(np.eye(11), 6)))["out"].reshape(9, 6, 11)
        np.testing.assert_allclose(shown, want, atol=1e-14)
        d_out = np.tile(np.eye(9, 11), 6)
        pulled = run(ck, case._replace(d_out=d_out))["d_x"].reshape(11, 6, 11)[:, :, :9]
        np.testing.assert_allclose(pulled.transpose(2, 1, 0), want, atol=1e-14)
        assert 0.3 < (weights == 0).mean() < 0.7


@pytest.mark.parametrize("in_order", [True, False])
def test_masks_do_not_depend_on_numbering_or_partition(in_order):
    rng = np.random.default_rng(9)
    case = make_case(rng, 30, 30, 4, 4, np.float64, p=0.5, in_order=in_order, hub=200)
    whole = run(ck, case)
    new_row, new_col = rng.permutation(30), rng.permutation(30)  # new_row[k] is the old name of row k
    column_of = np.argsort(new_col)
    for part in (np.arange(30), np.arange(7, 19)):
        rows = new_row[part]
        entries = [rng.permutation(np.arange(case.indptr[i], case.indptr[i + 1])) for i in rows]
        indptr = np.concatenate([[0], np.cumsum([len(e) for e in entries])]).astype(np.int64)
        indices = column_of[case.indices[np.concatenate(entries)]].astype(np.int32)
        starts, targets = transpose(indptr, indices, 30, rng)
        moved = case._replace(
            indptr=indptr, indices=indices, indptr_t=starts, indices_t=targets, x=case.x[new_col],
            score_source=case.score_source[new_col], score_target=case.score_target[rows],
            d_out=case.d_out[rows],
            gids={
                "source_gids": case.gids["source_gids"][new_col],
                "target_gids": case.gids["target_gids"][rows],
            },
        )  # fmt: skip
        got = run(ck, moved)
        for name in ("out", "d_score_target"):
            np.testing.assert_allclose(got[name], whole[name][rows], atol=1e-13)
        if len(part) == 30:
            for name in ("d_x", "d_score_source"):
                np.testing.assert_allclose(got[name], whole[name][new_col], atol=1e-13)


def drawn(n=40, heads=8, p=0.5, low=0, **key):
    """Masks of a complete graph, [targets, sources, heads]."""
    indptr = np.arange(0, n * n + 1, n, dtype=np.int64)
    indices = np.tile(np.arange(n, dtype=np.int32), n)
    zeros, gids = np.zeros((n, heads)), np.arange(n) + low
    args = {"p": p, **KEY, "source_gids": gids, "target_gids": gids, **key}
    return ck.attention_weights(indptr, indices, zeros, zeros, **args).reshape(n, n, heads) != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_keep_the_right_share_of_each_head(p):
    for kept in np.moveaxis(drawn(100, 9, p), 2, 0):
        assert stats.binomtest(int(kept.sum()), kept.size, 1 - p).pvalue > 1e-6


@pytest.mark.parametrize(
    "change",
    [{"seed": 4}, {"epoch": 8}, {"layer": 2}, {"low": 2**32}, {"low": 2**63 - 100}, {"low": -(2**31)}]
    + [{"source_gids": np.arange(40) + 2**32}, {"target_gids": np.arange(40) + 2**32}],
)
def test_masks_of_other_keys_and_vertices_are_unrelated(change):
    first, second = drawn(), drawn(**change)
    assert stats.binomtest(int((first == second).sum()), first.size, 0.5).pvalue > 1e-6


def test_masks_of_heads_directions_repetitions_and_features_are_unrelated():
    kept = drawn()
    for other in range(1, 8):
        same = kept[:, :, 0] == kept[:, :, other]
        assert stats.binomtest(int(same.sum()), same.size, 0.5).pvalue > 1e-6
    off = ~np.eye(40, dtype=np.bool_)
    same = (kept == kept.transpose(1, 0, 2))[off]
    assert stats.binomtest(int(same.sum()) // 2, same.size // 2, 0.5).pvalue > 1e-6
    repeated = ck.attention_weights(
        np.array([0, 2000]), np.zeros(2000, np.int32), np.zeros((1, 8)), np.zeros((1, 8)), p=0.5, **KEY,
        source_gids=np.arange(1), target_gids=np.arange(1),
    )  # fmt: skip
    assert stats.binomtest(int((repeated != 0).sum()), repeated.size, 0.5).pvalue > 1e-6
    features = ck.dropout(np.ones((40, 8)), np.arange(40), 0.5, **KEY) != 0
    same = features[None] == kept
    assert stats.binomtest(int(same.sum()), same.size, 0.5).pvalue > 1e-6


@pytest.mark.parametrize("in_order", [True, False])
def test_repetitions_are_counted_across_the_pieces_of_a_hub(in_order):
    rng = np.random.default_rng(10)
    case = make_case(rng, 3, 900, 2, 4, np.float64, p=0.5, hub=2 * HUB + 77, in_order=in_order)
    got, want = run(ck, case, num_threads=2), run(reference, case)
    for name in ("out", "d_x", "weights", "d_score_source", "d_score_target"):
        np.testing.assert_allclose(got[name], want[name], atol=1e-12)


def test_no_dropout_needs_no_ids_and_a_tiny_one_drops_nothing():
    case = make_case(np.random.default_rng(11), 20, 20, 2, 4, np.float64)
    bare = ck.attention(*case.matrix, case.x, case.score_source, case.score_target)
    np.testing.assert_array_equal(bare, run(ck, case)["out"])
    tiny = run(ck, case._replace(options=case.options | {"p": 1e-12}))["out"]
    np.testing.assert_allclose(tiny, bare, rtol=1e-11)
    assert not run(ck, case._replace(options=case.options | {"p": 1 - 1e-12}))["out"].any()


def test_saved_arrays():
    saved = ck.attention_saved(3, 2, 8, np.float32)
    assert [array.shape for array in saved] == [(3, 2), (3, 2), (3, 8), (3, 2)]
    assert all(array.dtype == np.float32 and not array.any() for array in saved)
    with pytest.raises(ValueError, match="heads must be at least 1"):
        ck.attention_saved(3, 0, 8, np.float32)
    with pytest.raises(ValueError, match="columns must be a multiple of heads, got 8 columns for 3 heads"):
        ck.attention_saved(3, 3, 8, np.float32)
    for dtype in (np.int32, "float16", ">f4"):
        with pytest.raises(TypeError, match="dtype must be float32 or float64, got"):
            ck.attention_saved(3, 2, 8, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_score_above_an_older_maximum_counts_as_the_maximum(dtype):
    case = make_case(np.random.default_rng(3), 30, 40, 3, 5, dtype)
    saved = ck.attention_saved(30, 3, 15, dtype)
    out = ck.attention(*case.matrix, case.x, case.score_source, case.score_target, saved=saved)
    _, record = ck.attention_targets(out, case.d_out, case.score_target, saved)
    record[:, 1] -= 200  # e^200 is infinite in float32
    given = case.x, case.score_source, record, case.d_out
    got, want = (
        door(*case.transposed, *given) for door in (ck.attention_adjoint, reference.attention_adjoint)
    )
    for one, other in zip(got, want, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * np.abs(other).max())
