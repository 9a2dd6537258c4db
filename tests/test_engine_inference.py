"""What is answered beside what is written of it: rounding to float32 must not change an answer."""

from __future__ import annotations

import numpy as np
import pytest

from dorylus_hpc.engine.inference import probabilities


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest_logit_has_the_largest_probability(dtype: type) -> None:
    tiny = np.finfo(dtype).tiny
    logits = np.array(
        [[0, tiny, 0], [0, tiny, 2 * tiny], [-50, 1e-9, 2e-9], [3, 1, 2], [5, 5, 1], [0, 0, 0]], dtype
    )
    found = probabilities(logits)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.argmax(axis=1), [1, 2, 2, 0, 0, 0])
    exact = np.exp(logits.astype(float) - logits.max(axis=1, keepdims=True))
    np.testing.assert_allclose(found, exact / exact.sum(axis=1, keepdims=True), rtol=2e-7, atol=1e-30)
    assert found.max() < 1.0


def test_a_class_of_several_above_0_is_an_answer() -> None:
    found = probabilities(np.array([[1e-9, 0.0, -1e-9, 200.0]], np.float32), several=True)
    np.testing.assert_array_equal(found > 0.5, [[True, False, False, True]])


def test_no_rows() -> None:
    assert probabilities(np.empty((0, 3), np.float32)).shape == (0, 3)
