"""Dense tasks as programs, and the row-wise maths that workers do in NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cython_kernels
from lambda_pkg import dense
from lambda_pkg.dropout import keep_mask
from lambda_pkg.ops import OutputSpec, chunk_bounds, run


def block(rng, n, f, dtype="float32"):
    return rng.normal(size=(n, f)).astype(dtype)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 300), f=st.integers(1, 40), p=st.sampled_from([0.1, 0.5, 0.9]),
    seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**32 - 1), layer=st.integers(0, 60),
    dtype=st.sampled_from(["float32", "float64"]),
)  # fmt: skip
def test_activation_has_the_bits_of_the_compiled_one(n, f, p, seed, epoch, layer, dtype):
    rng = np.random.default_rng([n, f])
    gids = rng.integers(0, 2**62, n)
    z, bias, d_out = block(rng, n, f, dtype), block(rng, 1, f, dtype)[0], block(rng, n, f, dtype)
    key = {"seed": seed, "epoch": epoch, "layer": layer}
    there = cython_kernels.bias_relu_dropout(z, bias, gids, p, **key)
    here = dense.bias_relu_dropout(z, bias, gids, p, **key)
    np.testing.assert_array_equal(here, there)
    np.testing.assert_array_equal(
        dense.relu_dropout_backward(d_out, here, p), cython_kernels.relu_dropout_backward(d_out, there, p)
    )
    there = cython_kernels.bias_elu_dropout(z, bias, gids, p, **key)
    here = dense.bias_elu_dropout(z, bias, gids, p, **key)
    np.testing.assert_allclose(here, there, rtol=8 * np.finfo(dtype).eps, atol=0)
    np.testing.assert_array_equal(here == 0, there == 0)  # masks are equal
    np.testing.assert_array_equal(
        dense.elu_dropout_backward(d_out, there, gids, p, **key),
        cython_kernels.elu_dropout_backward(d_out, there, gids, p, **key),
    )
    ones = np.ones((n, f), dtype)
    kept = cython_kernels.dropout(ones, gids, p, **key) > 0
    np.testing.assert_array_equal(keep_mask(gids, f, p, **key), kept)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [0, 1, 57])
def test_loss_is_that_of_the_compiled_one(n, dtype):
    rng = np.random.default_rng(n)
    logits = 20 * block(rng, n, 7, dtype)
    labels, mask = rng.integers(0, 7, n).astype(np.int32), rng.random(n) < 0.6
    labels[~mask] = -1
    there = np.empty_like(logits)
    wanted = cython_kernels.softmax_cross_entropy(logits, labels, mask, scale=0.25, d_logits=there)
    loss, here = dense.softmax_cross_entropy(logits, labels, mask, scale=0.25)
    assert loss == pytest.approx(wanted, rel=1e-14)
    np.testing.assert_allclose(here, there, rtol=1e-6, atol=1e-12)
    assert not here[~mask].any()


def test_loss_refuses_a_label_out_of_range():
    with pytest.raises(ValueError, match=r"labels under the mask must lie in 0..2, got 1..3"):
        dense.softmax_cross_entropy(np.zeros((2, 3)), np.array([1, 3]), np.array([1, 1]))
    with pytest.raises(ValueError, match="labels under the mask must be 0, 1 or 255, got 2"):
        dense.sigmoid_cross_entropy(np.zeros((2, 3)), np.full((2, 3), 2, np.uint8), np.array([1, 0]))
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 3\), got \(2,\)"):
        dense.sigmoid_cross_entropy(np.zeros((2, 3)), np.zeros(2, np.uint8), np.array([1, 0]))
    with pytest.raises(ValueError, match=r"class_weights must have shape \(3,\), got \(2,\)"):
        dense.softmax_cross_entropy(
            np.zeros((2, 3)), np.array([1, 2]), np.array([1, 1]), class_weights=np.ones(2)
        )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [0, 1, 57])
def test_other_losses_are_those_of_the_compiled_ones(n, weighted, dtype):
    rng = np.random.default_rng(n)
    logits, mask = 20 * block(rng, n, 7, dtype), rng.random(n) < 0.6
    marks = (rng.random((n, 7)) < 0.4).astype(np.uint8)
    marks[rng.random((n, 7)) < 0.1] = 255
    marks[~mask] = 77
    weights = rng.random(7) if weighted else None
    cases = [
        ("sigmoid_cross_entropy", marks, {"pos_weight": weights}),
        ("softmax_cross_entropy", rng.integers(0, 7, n).astype(np.int32), {"class_weights": weights}),
    ]
    for name, labels, options in cases:
        there = np.empty_like(logits)
        compiled, ours = getattr(cython_kernels, name), getattr(dense, name)
        wanted = compiled(logits, labels, mask, scale=0.25, d_logits=there, **options)
        loss, here = ours(logits, labels, mask, scale=0.25, **options)
        assert loss == pytest.approx(wanted, rel=1e-14)
        np.testing.assert_allclose(here, there, rtol=1e-6, atol=1e-12)
        assert here.dtype == logits.dtype and not here[~mask].any()


def test_weights_of_a_loss_come_in_its_parameters():
    rng = np.random.default_rng(0)
    logits, mask = rng.normal(size=(9, 3)), np.ones(9, np.uint8)
    classes, marks = rng.integers(0, 3, 9), (rng.random((9, 3)) < 0.5).astype(np.uint8)
    weights = [0.5, 2.0, 1.25]
    outputs = {"loss": OutputSpec((1,), "<f8", False), "d": OutputSpec((9, 3), "<f8", True)}
    cases = [
        ("softmax_cross_entropy", "class_weights", classes),
        ("sigmoid_cross_entropy", "pos_weight", marks),
    ]
    for name, option, labels in cases:
        program = [[name, {"scale": 0.1, option: weights}, ["z", "y", "m"], ["loss", "d"]]]
        arrays = {"z": logits, "y": labels, "m": mask}
        found = run(program, arrays, outputs, rows=frozenset(arrays), chunk=4)
        want, gradient = getattr(dense, name)(logits, labels, mask, scale=0.1, **{option: np.array(weights)})
        assert found["loss"][0] == pytest.approx(want, rel=1e-14)
        np.testing.assert_allclose(found["d"], gradient, rtol=1e-14)


def test_answers_are_counted_by_set_and_class():
    logits = np.eye(4)[[0, 1, 2, 3, 1, 1]]
    labels, split = np.array([0, 2, 2, -1, 1, 0]), np.array([1, 1, 2, 0, 0, 3])
    found = dense.tally(logits, labels, split, 3)
    assert found.shape == (3, dense.tally_width(4, several=False)) == (3, 1 + 3 * 4 + 16)
    assert found[:, 0].tolist() == [1, 1, 0]
    right, answered, true = found[0, 1:13].reshape(3, 4).tolist()
    assert (right, answered, true) == ([1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0])
    confusion = [row[13:].reshape(4, 4) for row in found]
    assert [np.argwhere(pairs).tolist() for pairs in confusion] == [[[0, 0], [2, 1]], [[2, 2]], [[0, 1]]]
    assert not dense.tally(logits[:0], labels[:0], split[:0], 3).any()


def test_of_many_classes_pairs_are_not_counted():
    n = dense.MOST_IN_CONFUSION
    assert dense.tally_width(n, several=False) == 1 + 3 * n + n * n
    assert (
        dense.tally_width(n + 1, several=False) == 1 + 3 * (n + 1) == dense.tally_width(n + 1, several=True)
    )
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(200, n + 1)), rng.integers(0, n + 1, 200)
    found = dense.tally(logits, labels, np.ones(200, int), 1)
    np.testing.assert_array_equal(found[0, 1 + 2 * (n + 1) :], np.bincount(labels, minlength=n + 1))
    assert found[0, 1 : n + 2].sum() == found[0, 0] == np.count_nonzero(logits.argmax(axis=1) == labels)


def test_answers_of_several_classes_are_counted_by_set_and_class():
    logits = np.array([[1.0, -1.0], [0.5, 2.0], [-1.0, -1.0], [3.0, 0.0], [1.0, 1.0]])
    labels = np.array([[1, 0], [0, 1], [0, 0], [1, 1], [255, 255]], np.uint8)
    found = dense.tally(logits, labels, np.array([1, 1, 2, 1, 0]), 3)
    assert found.tolist() == [[1, 2, 1, 3, 1, 2, 2], [1, 0, 0, 0, 0, 0, 0], [0] * 7]
    labels[:2, 0] = 255  # a right answer and a wrong one of which nobody knows
    found = dense.tally(logits, labels, np.array([1, 1, 2, 1, 0]), 3)
    assert found[0].tolist() == [2, 1, 1, 1, 1, 1, 2]


PROGRAM = [
    ["apply_vertex", {}, ["M", "W"], ["H"]],
    ["bias_relu_dropout", {"p": 0.5, "seed": 3, "epoch": 4, "layer": 1}, ["H", "b", "gids"], ["H"]],
    ["relu_dropout_backward", {"p": 0.5}, ["dH", "H"], ["dH"]],
    ["bias_gradient", {}, ["dH"], ["grad b"]],
    ["apply_vertex_backward", {}, ["M", "W", "dH"], ["grad W", "dM"]],
]


def task(n=100):
    rng = np.random.default_rng(0)
    inputs = {
        "M": block(rng, n, 6), "W": block(rng, 6, 5), "b": block(rng, 1, 5)[0],
        "dH": block(rng, n, 5), "gids": rng.integers(0, 10**6, n),
    }  # fmt: skip
    outputs = {
        "H": OutputSpec((n, 5), "<f4", True),
        "dM": OutputSpec((n, 6), "<f4", True),
        "grad W": OutputSpec((6, 5), "<f4", False),
        "grad b": OutputSpec((5,), "<f4", False),
    }
    return inputs, outputs, frozenset({"M", "dH", "gids"})


def expected(inputs):
    h = dense.bias_relu_dropout(
        inputs["M"] @ inputs["W"], inputs["b"], inputs["gids"], 0.5, seed=3, epoch=4, layer=1
    )
    d_z = dense.relu_dropout_backward(inputs["dH"], h, 0.5)
    return {
        "H": h, "dM": d_z @ inputs["W"].T, "grad W": inputs["M"].T @ d_z,
        "grad b": d_z.astype(float).sum(axis=0),
    }  # fmt: skip


@pytest.mark.parametrize("chunk", [0, 1, 7, 100, 1000])
def test_a_program_computes_what_its_ops_say(chunk):
    inputs, outputs, rows = task()
    before = {name: array.copy() for name, array in inputs.items()}
    found = run(PROGRAM, inputs, outputs, rows=rows, chunk=chunk)
    for name, array in expected(inputs).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
    for name, array in before.items():
        np.testing.assert_array_equal(inputs[name], array, err_msg=f"{name} was changed")


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_elu_in_a_program(chunk, p):
    inputs, outputs, rows = task()
    key = {"p": p, "seed": 3, "epoch": 4, "layer": 1}
    program = [
        ["apply_vertex", {}, ["M", "W"], ["H"]],
        ["bias_elu_dropout", key, ["H", "b", "gids"], ["H"]],
        ["elu_dropout_backward", key, ["dH", "H", "gids"], ["dH"]],
        ["apply_vertex_backward", {}, ["M", "W", "dH"], ["grad W", "dM"]],
    ]
    before = {name: array.copy() for name, array in inputs.items()}
    wanted = {name: spec for name, spec in outputs.items() if name != "grad b"}
    found = run(program, inputs, wanted, rows=rows, chunk=chunk)
    z = (inputs["M"] @ inputs["W"] + inputs["b"]).astype(np.float64)
    kept = keep_mask(inputs["gids"], 5, **key) if p > 0 else np.ones(z.shape, np.bool_)
    mask = kept / (1 - p)
    d_z = inputs["dH"] * mask * np.where(z > 0, 1, np.exp(z))
    np.testing.assert_allclose(found["H"], mask * np.where(z > 0, z, np.expm1(z)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["dM"], d_z @ inputs["W"].T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["grad W"], inputs["M"].T @ d_z, rtol=1e-4, atol=1e-4)
    for name, array in before.items():
        np.testing.assert_array_equal(inputs[name], array, err_msg=f"{name} was changed")


def test_elu_keeps_nan_visible_and_writes_to_its_buffer():
    z, gids, key = np.array([[np.nan, -1.0, 2.0]]), np.arange(1), {"seed": 0, "epoch": 0, "layer": 0}
    h = dense.bias_elu_dropout(z, np.zeros(3), gids, 0.0, **key)
    np.testing.assert_array_equal(h, [[np.nan, np.expm1(-1.0), 2.0]])
    d_h = np.full((1, 3), 3.0)
    assert dense.elu_dropout_backward(d_h, h, gids, 0.0, out=d_h, **key) is d_h
    np.testing.assert_allclose(d_h, [[np.nan, 3 * np.exp(-1.0), 3]], rtol=1e-15)
    assert dense.bias_elu_dropout(z, np.zeros(3), gids, 0.0, out=z, **key) is z
    np.testing.assert_array_equal(z, h)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda one: dense.bias_elu_dropout(one[0], one[0], one, 0.5, seed=0, epoch=0, layer=0), ValueError,
         r"z must have 2 dimension\(s\), got shape \(3,\)"),
        (lambda one: dense.bias_elu_dropout(one, one[0, :2], one, 0.5, seed=0, epoch=0, layer=0), ValueError,
         r"bias must have shape \(3,\), got \(2,\)"),
        (lambda one: dense.bias_elu_dropout(one, one[0], np.arange(3), 0.5, seed=0, epoch=0, layer=0),
         ValueError, r"gids must have shape \(2,\), got \(3,\)"),
        (lambda one: dense.elu_dropout_backward(one, one.astype("f4"), one, 0.5, seed=0, epoch=0, layer=0),
         TypeError, "h must be float64 like the other arrays, got float32"),
        (lambda one: dense.elu_dropout_backward(one, one, np.arange(3), 0.5, seed=0, epoch=0, layer=0),
         ValueError, r"gids must have shape \(2,\), got \(3,\)"),
    ],
)  # fmt: skip
def test_elu_refuses_what_does_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        call(np.ones((2, 3)))


def test_results_go_to_given_buffers_and_chunks_are_added_in_order():
    inputs, outputs, rows = task()
    buffers = {"grad W": np.full((6, 5), np.nan, np.float32), "H": np.full((100, 5), np.nan, np.float32)}
    found = run(PROGRAM, inputs, outputs, rows=rows, chunk=40, buffers=buffers)
    assert found["grad W"] is buffers["grad W"] and found["H"] is buffers["H"]
    total = np.zeros((6, 5), np.float32)
    for start, stop in ((0, 40), (40, 80), (80, 100)):
        part = {name: inputs[name][start:stop] if name in rows else inputs[name] for name in inputs}
        total += run(
            PROGRAM, part, {"grad W": outputs["grad W"]}, rows=rows, chunk=0
        )["grad W"]  # fmt: skip
    np.testing.assert_array_equal(found["grad W"], total)


def test_a_task_without_rows_gives_zero_gradients():
    inputs, outputs, rows = task(0)
    found = run(PROGRAM, inputs, outputs, rows=rows, chunk=8)
    assert not found["grad W"].any() and not found["grad b"].any() and found["H"].shape == (0, 5)


def test_chunks_cover_all_rows():
    assert chunk_bounds(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert chunk_bounds(8, 4) == [(0, 4), (4, 8)]
    assert chunk_bounds(3, 4) == chunk_bounds(3, 0) == [(0, 3)]
    assert chunk_bounds(0, 4) == [(0, 0)]


def test_unknown_ops_are_refused():
    with pytest.raises(ValueError, match="unknown op .*system"):
        run([["system", {}, ["x"], ["y"]]], {"x": np.zeros(1)}, {}, rows=frozenset({"x"}))
