"""Weights of classes from files, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.class_weights import read_class_weights


@pytest.mark.parametrize("text", ["0.5\n2\n0\n", "0.5 2 0", "# by hand\n\n0.5\t2 # two\n0e3"])
def test_text(tmp_path, text):
    (tmp_path / "weights").write_text(text)
    found = read_class_weights(tmp_path / "weights", 3)
    assert found.dtype == np.float64 and found.tolist() == [0.5, 2.0, 0.0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, ">i4"])
def test_npy(tmp_path, dtype):
    np.save(tmp_path / "weights.npy", np.array([4, 2, 0], dtype))
    assert read_class_weights(tmp_path / "weights.npy", 3).tolist() == [4.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"1 2", r"has float64 of shape \(2,\), expected a weight for each of 3 classes"),
        (b"", r"has float64 of shape \(0,\)"),
        (b"1 2 three", "cannot be read as none, balanced or a file of weights: could not convert .*'three'"),
        (b"1 -2 3", r"class 1: weight -2\.0 is not a finite number >= 0"),
        (b"1 2 nan", "class 2: weight nan"),
        (b"inf 2 1", "class 0: weight inf"),
        (b"0 0 0", "all weights are 0"),
        (b"\xff\xfe", "cannot be read as .*'utf-8' codec"),
        (b"\x93NUMPY\x01", "cannot be read as"),
    ],
)
def test_wrong_files(tmp_path, content, said):
    path = tmp_path / "weights.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"^--class-weights {path}: {said}"):
        read_class_weights(path, 3)


def test_not_numbers_and_not_there(tmp_path):
    np.save(tmp_path / "text.npy", np.array(["1", "2", "3"]))
    with pytest.raises(InputError, match=r"has <U1 of shape \(3,\)"):
        read_class_weights(tmp_path / "text.npy", 3)
    with pytest.raises(InputError, match="--class-weights balance: cannot be read as .*: .*No such file"):
        read_class_weights("balance", 3)
    with pytest.raises(InputError, match="Is a directory"):
        read_class_weights(tmp_path, 3)
