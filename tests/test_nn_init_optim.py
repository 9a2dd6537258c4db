"""Start values, and the optimizers against formulas written out for one number at a time."""

from __future__ import annotations

import math
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from dorylus_hpc.nn.init import glorot_uniform, zeros
from dorylus_hpc.nn.optim import Adam, Sgd, make_optimizer

DTYPES = [np.float32, np.float64]
KINDS = ["adam", "sgd"]

# ---- start values ----


def test_glorot_is_uniform_within_its_limit():
    w = glorot_uniform(3, 1, 300, 200, np.float64)
    limit = math.sqrt(6 / 500)
    assert w.shape == (300, 200) and w.flags.c_contiguous
    assert np.abs(w).max() <= limit and np.abs(w).max() > 0.999 * limit
    counts, _ = np.histogram(w, bins=10, range=(-limit, limit))
    assert np.abs(counts - 6000).max() < 5 * math.sqrt(6000 * 0.9)  # five standard deviations


def test_glorot_is_a_function_of_seed_and_layer():
    w = glorot_uniform(7, 2, 5, 4, np.float64)
    np.testing.assert_array_equal(w, glorot_uniform(7, 2, 5, 4, np.float64))
    for seed, layer in ((7, 1), (8, 2), (2, 7), (2**64 - 1, 2)):
        assert not np.isclose(w, glorot_uniform(seed, layer, 5, 4, np.float64)).any()


def test_matrices_of_one_layer_have_draws_of_their_own():
    draws = [glorot_uniform(7, 2, 5, 4, np.float64, draw=draw) for draw in (0, 1, 255)]
    np.testing.assert_array_equal(draws[0], glorot_uniform(7, 2, 5, 4, np.float64))
    assert not np.isclose(draws[0], draws[1]).any() and not np.isclose(draws[1], draws[2]).any()
    with pytest.raises(ValueError, match="draw must be between 0 and 255, got 256"):
        glorot_uniform(7, 2, 5, 4, np.float64, draw=256)


def test_glorot_casts_one_float64_draw():
    w = glorot_uniform(1, 1, 11, 6, np.float64)
    np.testing.assert_array_equal(glorot_uniform(1, 1, 11, 6, "float32"), w.astype(np.float32))


def test_glorot_takes_the_doubles_of_the_philox_stream():
    key = np.array([5, 3], dtype=np.uint64)
    unit = np.random.Generator(np.random.Philox(key=key)).random((4, 2))
    np.testing.assert_allclose(glorot_uniform(5, 3, 4, 2, np.float64), 2 * unit - 1, rtol=1e-15)


def test_zeros():
    b = zeros(3, np.float32)
    assert b.dtype == np.float32 and b.shape == (3,) and not b.any()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, 1, 2, 2, "f4"), ValueError, "seed must be between 0 and .*, got -1"),
        ((2**64, 1, 2, 2, "f4"), ValueError, "seed must be between"),
        ((0, 0, 2, 2, "f4"), ValueError, "layer must be between 1"),
        ((0, 1, 0, 2, "f4"), ValueError, "f_in must be at least 1, got 0"),
        ((0, 1, 2, -3, "f4"), ValueError, "f_out must be at least 1, got -3"),
        ((0.5, 1, 2, 2, "f4"), TypeError, "seed must be an integer, got 0.5"),
        ((0, 1, 2, 2, "f2"), TypeError, "dtype must be float32 or float64, got float16"),
    ],
)
def test_glorot_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        glorot_uniform(*arguments)


# ---- optimizers ----


def _sgd_path(x, gradients, lr, decay):
    for g in gradients:
        x -= lr * (g + decay * x)
    return x


def _adam_path(x, gradients, lr, decay, beta1=0.9, beta2=0.999, eps=1e-8):
    """The averages as explicit sums over all gradients so far, not as recursions."""
    seen = []
    for t, g in enumerate(gradients, start=1):
        seen.append(g + decay * x)
        m = (1 - beta1) * math.fsum(beta1 ** (t - 1 - k) * s for k, s in enumerate(seen))
        v = (1 - beta2) * math.fsum(beta2 ** (t - 1 - k) * s * s for k, s in enumerate(seen))
        x -= lr * (m / (1 - beta1**t)) / (math.sqrt(v / (1 - beta2**t)) + eps)
    return x


PATHS = {"sgd": _sgd_path, "adam": _adam_path}


def _run(optimizer, start, gradients, decay=0.0, cuts=()):
    """All steps over the pieces of a flat vector between `cuts`, each with its own state."""
    param = start.copy()
    pieces = [slice(a, b) for a, b in pairwise([0, *cuts, start.size])]
    states = [optimizer.init(param[cut].shape, param.dtype) for cut in pieces]
    for number, gradient in enumerate(gradients, start=1):
        for cut, state in zip(pieces, states, strict=True):
            optimizer.step(param[cut], gradient[cut], state, number, weight_decay=decay)
    slots = {slot: np.concatenate([state[slot] for state in states]) for slot in optimizer.slots}
    return param, slots


def _problem(size, steps, dtype, seed=0):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.integers(-9, 3, size)
    gradients = [(rng.standard_normal(size) * scale).astype(dtype) for _ in range(steps)]
    for gradient in gradients:
        gradient[:: max(1, size // 3)] = 0
    return rng.standard_normal(size).astype(dtype), gradients


@pytest.mark.parametrize("decay", [0.0, 5e-2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_follow_the_formula(kind, dtype, decay):
    start, gradients = _problem(23, 30, dtype)
    start[0] = gradients[0][0] = 0
    got, _ = _run(make_optimizer(kind, 0.01), start, gradients, decay)
    want = [
        PATHS[kind](float(start[i]), [float(g[i]) for g in gradients], 0.01, decay) for i in range(start.size)
    ]
    assert got.dtype == dtype
    # 30 steps of at most lr (adam), or of lr * gradient (sgd), each rounded a few times.
    moved = 1.0 + 0.01 * np.sum(np.abs(gradients), axis=0) * (kind == "sgd")
    tolerance = 60 * np.finfo(dtype).eps
    assert (np.abs(got - np.array(want)) <= tolerance * (np.abs(start) + moved)).all()


def test_first_adam_step_is_lr_times_the_sign():
    start = np.zeros(3)
    got, _ = _run(Adam(0.1), start, [np.array([5.0, -1e-3, 0.0])])
    np.testing.assert_allclose(got, [-0.1, 0.1, 0.0], rtol=2e-5)


@pytest.mark.parametrize("decay", [0.0, 5e-4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_depends_on_how_a_vector_is_cut(kind, dtype, decay):
    size = 2 * 8192 + 777
    start, gradients = _problem(size, 4, dtype)
    optimizer = make_optimizer(kind, 0.01)
    whole, whole_slots = _run(optimizer, start, gradients, decay)
    rng = np.random.default_rng(1)
    cuttings = [(1,), (8192,), (8191, 8193), (3, 3, 10), tuple(sorted(rng.integers(0, size, 12)))]
    for cuts in cuttings:
        cut, cut_slots = _run(optimizer, start, gradients, decay, cuts)
        assert cut.tobytes() == whole.tobytes()
        assert all(cut_slots[slot].tobytes() == whole_slots[slot].tobytes() for slot in optimizer.slots)
    one_by_one, _ = _run(optimizer, start[:40], [g[:40] for g in gradients], decay, range(1, 40))
    assert one_by_one.tobytes() == whole[:40].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_step_is_in_place_and_leaves_the_gradient(kind):
    optimizer = make_optimizer(kind, 0.1)
    param, grad = np.ones((3, 4)), np.full((3, 4), 2.0)
    state = optimizer.init(param.shape, param.dtype)
    arrays = dict(state)
    assert optimizer.step(param, grad, state, 1, weight_decay=0.5) is None
    assert (grad == 2.0).all() and (param < 1.0).all()
    assert all(state[slot] is arrays[slot] and state[slot].any() for slot in optimizer.slots)


@pytest.mark.parametrize("kind", KINDS)
def test_step_allocates_little(kind):
    optimizer = make_optimizer(kind, 0.1)
    param, grad = np.ones(500_000), np.ones(500_000)
    state = optimizer.init(param.shape, param.dtype)
    tracemalloc.start()
    optimizer.step(param, grad, state, 1, weight_decay=0.1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300_000  # bytes; the tensor has 4,000,000


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_shape(kind, shape):
    optimizer = make_optimizer(kind, 0.1)
    param, grad = np.ones(shape, np.float32), np.ones(shape, np.float32)
    optimizer.step(param, grad, optimizer.init(shape, np.float32), 1)
    np.testing.assert_allclose(param, np.full(shape, 0.9), rtol=1e-6)


def test_zero_gradients_move_nothing():
    start = np.array([1.5, -2.0], dtype=np.float32)
    for kind in KINDS:
        got, _ = _run(make_optimizer(kind, 0.1), start, [np.zeros(2, np.float32)] * 3)
        np.testing.assert_array_equal(got, start)


def test_kinds():
    assert isinstance(make_optimizer("sgd", 1), Sgd)
    adam = make_optimizer("adam", 0.1, beta1=0.5, eps=1e-3)
    assert isinstance(adam, Adam) and (adam.beta1, adam.beta2, adam.eps) == (0.5, 0.999, 1e-3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make_optimizer("rmsprop", 0.1), ValueError, "one of adam, sgd, got 'rmsprop'"),
        (lambda: make_optimizer("sgd", 0.0), ValueError, "lr must be a finite number > 0, got 0.0"),
        (lambda: make_optimizer("sgd", math.nan), ValueError, "lr must be a finite number"),
        (lambda: make_optimizer("adam", 0.1, beta1=1.0), ValueError, r"beta1 must be in \[0, 1\), got 1.0"),
        (lambda: make_optimizer("adam", 0.1, beta2=-0.1), ValueError, "beta2 must be"),
        (lambda: make_optimizer("adam", 0.1, eps=0.0), ValueError, "eps must be a finite number > 0"),
        (lambda: make_optimizer("sgd", 0.1, beta1=0.9), TypeError, "beta1"),
    ],
)
def test_make_optimizer_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grad": np.ones(4)}, ValueError, r"grad must have the shape \(3,\) of param, got \(4,\)"),
        ({"grad": np.ones(3, "f4")}, TypeError, "grad must be float64 like param, got float32"),
        ({"grad": np.ones(6)[::2]}, ValueError, "grad must be C-contiguous, got strides"),
        ({"param": np.ones(6)[::2]}, ValueError, "param must be C-contiguous"),
        ({"param": np.ones(3, int)}, TypeError, "param must be float32 or float64, got int64"),
        ({"param": [1.0]}, TypeError, "param must be a NumPy array, got list"),
        ({"state": {}}, ValueError, r"the state of adam has the slots \('m', 'v'\), got \[\]"),
        ({"state": {"m": np.ones(3), "v": np.ones(2)}}, ValueError, "v must have the shape"),
        ({"step_number": 0}, ValueError, "step_number counts from 1, got 0"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay must be a finite number >= 0, got -1.0"),
    ],
)
def test_step_refuses(change, error, message):
    arguments = {"param": np.ones(3), "grad": np.ones(3), "step_number": 1, "weight_decay": 0.0}
    arguments["state"] = Adam(0.1).init(3, np.float64)
    with pytest.raises(error, match=message):
        Adam(0.1).step(**(arguments | change))
