"""Reading graphs: what is accepted, and one row for every kind of wrong input."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from realdata import real_graph

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph import checks
from dorylus_hpc.graph.data import MAX_VERTICES
from dorylus_hpc.graph.readers import from_arrays, read_npz

N = 6


def content(**changes: Any) -> dict[str, Any]:
    """A small right file: a ring in both directions, 2 classes; keys changed or (None) removed."""
    ring = np.arange(N)
    keys = {
        "indptr": np.arange(0, 2 * N + 1, 2, dtype=np.int32),
        "indices": np.sort(np.stack([(ring + 1) % N, (ring - 1) % N], 1), 1).ravel().astype(np.int32),
        "x": np.arange(N * 3, dtype=np.float32).reshape(N, 3),
        "y": np.array([0, 1, 0, 1, -1, 0]),
        "train_idx": np.array([0, 1]),
        "val_idx": np.array([2]),
        "test_idx": np.array([3, 5]),
    }
    return {key: value for key, value in {**keys, **changes}.items() if value is not None}


SPARSE = sp.csr_array(
    np.array([[1, 0, 2], [0, 0, 0], [0, 3, 0], [0, 0, 1], [1, 1, 1], [0, 0, 5]], np.float32)
)


def sparse_content(**changes: Any) -> dict[str, Any]:
    keys = {"x": None, "x_indptr": SPARSE.indptr, "x_indices": SPARSE.indices, "x_data": SPARSE.data}
    return content(**{**keys, "x_shape": np.array([N, 3]), **changes})


MARKS = np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 1], [1, 0, 0]])


def several(**changes: Any) -> dict[str, Any]:
    """A file in which vertices have any number of classes."""
    return content(**{"y": MARKS, **changes})


def changed(key: str, position: Any, value: Any, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """The right file with one value changed."""
    keys = content() if base is None else base
    keys[key] = keys[key].copy()
    keys[key][position] = value
    return keys


@pytest.fixture
def save(tmp_path):
    def to_file(keys: dict[str, Any]):
        np.savez(tmp_path / "graph.npz", **keys)
        return tmp_path / "graph.npz"

    return to_file


# --- what is accepted


def test_a_right_file(save):
    graph = read_npz(save(content()))
    assert (graph.n, graph.n_edges, graph.n_features, graph.n_classes) == (N, 2 * N, 3, 2)
    assert (graph.indptr.dtype, graph.indices.dtype, graph.weights) == (np.int64, np.int32, None)
    assert graph.labels.tolist() == [0, 1, 0, 1, -1, 0]
    assert graph.split.tolist() == [1, 1, 2, 3, 0, 3]
    assert (graph.labels.dtype, graph.split.dtype) == (np.int32, np.uint8)
    assert (graph.ids.tolist(), graph.name, graph.notes) == (list(range(N)), "graph", ())
    assert graph.features.dtype == np.float32


def test_rows_get_sorted_with_their_weights(save):
    keys = content(weights=np.arange(2.0 * N))
    flipped = keys["indices"].reshape(N, 2)[:, ::-1].ravel()
    graph = read_npz(save({**keys, "indices": flipped}))
    assert np.array_equal(graph.indices, keys["indices"])
    assert np.array_equal(graph.weights, np.arange(2.0 * N).reshape(N, 2)[:, ::-1].ravel())


def test_weights_of_one_are_still_weights(save):
    assert read_npz(save(content(weights=np.ones(2 * N, np.int8)))).weights.tolist() == [1.0] * 2 * N


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.int64, ">i4", np.float32, np.float64])
def test_label_types(save, dtype):
    y = np.array([0, 1, 0, 1, 1, 0]).astype(dtype)
    assert read_npz(save(content(y=y))).labels.tolist() == [0, 1, 0, 1, 1, 0]
    assert read_npz(save(content(y=y[:, None]))).labels.tolist() == [0, 1, 0, 1, 1, 0]


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int64, ">i4", np.float32])
def test_any_number_of_classes(save, dtype):
    graph = read_npz(save(several(y=MARKS.astype(dtype))))
    assert (graph.labels.dtype, graph.n_classes, graph.labels.flags.c_contiguous) == (np.uint8, 3, True)
    assert np.array_equal(graph.labels, MARKS)
    assert graph.split.tolist() == [1, 1, 2, 3, 0, 3]


@pytest.mark.parametrize("unknown", [-1.0, np.nan])
def test_rows_of_unknown_marks_are_unlabelled(save, unknown):
    graph = read_npz(save(changed("y", 1, unknown, several(y=MARKS * 1.0))))
    assert graph.labels[1].tolist() == [255] * 3
    assert np.array_equal(np.delete(graph.labels, 1, 0), np.delete(MARKS, 1, 0))
    assert graph.split[1] == 0
    assert "1 unlabelled vertices dropped from the train set" in graph.notes


def test_marks_may_be_known_in_part(save):
    graph = read_npz(save(changed("y", (3, 1), np.nan, several(y=MARKS * 1.0))))
    assert graph.labels[3].tolist() == [1, 255, 1] and np.count_nonzero(graph.labels == 255) == 1
    assert graph.split[3] == 3 and graph.notes == ()


def test_classes_as_sets(save):
    matrix = sp.csr_array(MARKS)
    keys = {"y": None, "y_indptr": matrix.indptr, "y_indices": matrix.indices}
    assert np.array_equal(read_npz(save(content(**keys))).labels, MARKS)
    graph = read_npz(save(content(**keys, meta='{"num_classes": 5}')))
    assert graph.n_classes == 5 and not graph.labels[:, 3:].any()
    for form in (sp.csr_array, sp.coo_matrix, sp.csc_array):
        built = build(labels=form(MARKS.astype(float)))
        assert built.labels.dtype == np.uint8 and np.array_equal(built.labels, MARKS)
    with pytest.raises(InputError, match="labels: vertex 0, class 0: 2 is not 0 or 1"):
        build(labels=sp.csr_array(2 * MARKS))


def test_splits_are_drawn_from_vertices_with_marks(save):
    keys = changed("y", 5, -1, several(train_idx=None, val_idx=None, test_idx=None))
    graph = read_npz(save(keys))
    assert graph.split[5] == 0 and np.count_nonzero(graph.split) == 5


def test_nan_labels_are_unlabelled(save):
    graph = read_npz(save(content(y=np.array([0, np.nan, 1, 1, np.nan, 0]))))
    assert graph.labels.tolist() == [0, -1, 1, 1, -1, 0]
    assert graph.split.tolist() == [1, 0, 2, 3, 0, 3]
    assert graph.notes == ("1 unlabelled vertices dropped from the train set",)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ">f4", np.float64, np.int32, np.uint8, bool])
def test_feature_types(save, dtype):
    x = (np.arange(N * 3).reshape(N, 3) % 2).astype(dtype)
    graph = read_npz(save(content(x=x)))
    assert graph.features.dtype == (np.float64 if dtype is np.float64 else np.float32)
    assert graph.features.dtype.isnative
    assert np.array_equal(graph.features, x)


def test_integers_too_large_for_float32_stay_exact(save):
    graph = read_npz(save(changed("x", (2, 1), 2**24 + 1, content(x=np.ones((N, 3), np.int64)))))
    assert graph.features.dtype == np.float64
    assert graph.features[2, 1] == 2**24 + 1


def test_fortran_ordered_features_become_c_ordered(save):
    graph = read_npz(save(content(x=np.asfortranarray(content()["x"]))))
    assert graph.features.flags.c_contiguous


def test_sparse_features_stay_sparse(save):
    graph = read_npz(save(sparse_content()))
    assert graph.sparse_features
    assert np.array_equal(graph.features.toarray(), SPARSE.toarray())
    assert (graph.features.dtype, graph.features.indices.dtype) == (np.float32, np.int32)


def test_repeated_feature_entries_are_summed(save):
    keys = sparse_content(
        x_indptr=np.array([0, 3, 3, 3, 3, 3, 3]),
        x_indices=np.array([2, 0, 2]),
        x_data=np.array([1.0, 5.0, 2.5]),
    )
    assert read_npz(save(keys)).features.toarray()[0].tolist() == [5.0, 0.0, 3.5]


@pytest.mark.parametrize(
    "ids", [np.array([9, 7, 5, -3, 2**62, 0]), np.array(["b", "a", "é", "", "中", "x y"])]
)
def test_ids(save, ids):
    graph = read_npz(save(content(ids=ids)))
    assert graph.ids.tolist() == ids.tolist()


def test_ids_as_utf8_bytes(save):
    ids = np.char.encode(np.array(["a", "é", "c", "d", "e", "f"]), "utf-8")
    assert read_npz(save(content(ids=ids))).ids.tolist() == ["a", "é", "c", "d", "e", "f"]


def test_masks_and_repeated_entries(save):
    mask = np.array([True, True, False, False, False, False])
    graph = read_npz(save(content(train_idx=mask, test_idx=np.array([3, 5, 3]))))
    assert graph.split.tolist() == [1, 1, 2, 3, 0, 3]
    assert len(graph.notes) == 1
    assert "test_idx: 1 repeated entries counted once" in graph.notes[0]


def test_missing_sets_are_empty_and_said(save):
    graph = read_npz(save(content(val_idx=None)))
    assert graph.split.tolist() == [1, 1, 0, 3, 0, 3]
    assert "val_idx is missing: that set is empty" in graph.notes[0]


def test_a_split_is_drawn_where_there_is_none(save):
    keys = content(train_idx=None, val_idx=None, test_idx=None)
    graph = read_npz(save(keys), seed=4)
    assert np.bincount(graph.split).tolist() == [1, 3, 1, 1]
    assert graph.split[4] == 0  # unlabelled
    assert "drawn 60/20/20" in graph.notes[0]
    assert "seed 4" in graph.notes[0]
    assert np.array_equal(read_npz(save(keys), seed=4).split, graph.split)
    assert any(not np.array_equal(read_npz(save(keys), seed=s).split, graph.split) for s in range(5, 9))


def test_one_of_several_splits(save):
    splits = np.array([[0, 1, 2, 2, 255, 0], [255, 2, 1, 0, 255, 255]], np.uint8)
    keys = content(splits=splits)
    assert read_npz(save(keys)).split.tolist() == [1, 1, 2, 3, 0, 3]  # the *_idx sets
    assert read_npz(save(keys), split=0).split.tolist() == [1, 2, 3, 3, 0, 1]
    assert read_npz(save(keys), split=1).split.tolist() == [0, 3, 2, 1, 0, 0]
    alone = content(splits=splits, train_idx=None, val_idx=None, test_idx=None)
    graph = read_npz(save(alone))
    assert (graph.split.tolist(), graph.notes) == ([1, 2, 3, 3, 0, 1], ("split 0 of `splits`",))
    assert read_npz(save(content()), split=0).split.tolist() == [1, 1, 2, 3, 0, 3]


@pytest.mark.parametrize(
    "meta", [{"num_classes": 5}, {"classes": list("abcde")}, {"num_classes": 5, "classes": 5}]
)
def test_classes_of_meta(save, meta):
    graph = read_npz(save(content(meta=json.dumps({"name": "ring", **meta}))))
    assert (graph.n_classes, graph.name) == (5, "ring")


def test_what_is_not_used_is_said(save):
    graph = read_npz(save(content(edge_attr=np.ones(3), meta="made by hand")))
    assert graph.notes == ("key 'meta' is not used: it is not a JSON object", "key 'edge_attr' is not used")


# --- what is refused: (file content, split, what the message says)

NAN = float("nan")
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no indptr": (content(indptr=None), "key 'indptr' is missing; the file has indices, x, y"),
    "no indices": (content(indices=None), "key 'indices' is missing"),
    "no y": (content(y=None), "key 'y' is missing"),
    "no x": (content(x=None), "key 'x' is missing"),
    "no x_data": (sparse_content(x_data=None), "key 'x_data' is missing"),
    "x twice": (sparse_content(x=content()["x"]), r"dense features \(x\) and sparse ones \(x_indptr\)"),
    "no train_idx": (content(train_idx=None), "train_idx is missing, but .*val_idx is there"),
    "pickled": (content(y=np.array([0, None, 1, 1, 0, 0], object)), "y: is a pickled"),
    # structure
    "no vertices": (
        content(indptr=np.zeros(1, int), indices=np.zeros(0, int)),
        "indptr: the graph has no vertices",
    ),
    "indptr empty": (content(indptr=np.zeros(0, int)), "indptr: must start with 0, got no entries"),
    "indptr start": (changed("indptr", 0, 1), r"indptr: must start with 0, got \[1\]"),
    "indptr falls": (changed("indptr", 3, 3), "indptr: position 3: 3 after 4; row starts must not decrease"),
    "indptr falls below 0": (changed("indptr", 2, -4), "indptr: position 2: -4 after 2"),
    "indptr end": (changed("indptr", N, 13), "indptr: ends with 13, but indices has 12 entries"),
    "indptr float": (content(indptr=np.arange(0.0, 13, 2)), "indptr: has dtype float64, expected integers"),
    "indptr 2-D": (
        content(indptr=np.zeros((7, 1), int)),
        r"indptr: has shape \(7, 1\), expected one dimension",
    ),
    "index too large": (changed("indices", 7, 6), r"indices: position 7 \(row 3\): 6 is not in 0\.\.5"),
    "index negative": (changed("indices", 0, -1), r"indices: position 0 \(row 0\): -1"),
    "index beyond int32": (
        changed("indices", 3, 2**32 + 1, content(indices=content()["indices"].astype(np.int64))),
        r"indices: position 3 \(row 1\): 4294967297",
    ),
    "indices float": (content(indices=content()["indices"] * 1.0), "indices: has dtype float64"),
    # weights
    "weight negative": (
        changed("weights", 5, -0.5, content(weights=np.ones(12))),
        r"weights: position 5 \(edge 2 -> 3\): weight -0\.5 is not a finite number >= 0",
    ),
    "weight nan": (
        changed("weights", 2, NAN, content(weights=np.ones(12))),
        r"weights: position 2 \(edge 1 -> 0\)",
    ),
    "weight inf": (changed("weights", 2, np.inf, content(weights=np.ones(12))), "weight inf"),
    "weights short": (
        content(weights=np.ones(11)),
        r"weights: has shape \(11,\), expected one weight for each of the 12",
    ),
    "weights text": (content(weights=np.array(["1"] * 12)), "weights: has dtype <U1"),
    # features
    "feature nan": (changed("x", (4, 2), NAN), "x: vertex 4, column 2: nan is not a finite number"),
    "feature inf": (changed("x", (0, 1), -np.inf), "x: vertex 0, column 1: -inf"),
    "x rows": (content(x=np.ones((5, 3))), r"x: has shape \(5, 3\), expected \(6, number of features\)"),
    "x 1-D": (content(x=np.ones(6)), r"x: has shape \(6,\)"),
    "x no columns": (content(x=np.ones((6, 0))), "x: has no columns"),
    "x complex": (content(x=np.ones((6, 2), complex)), "x: has dtype complex128"),
    "x text": (content(x=np.full((6, 2), "1")), "x: has dtype <U1"),
    "sparse nan": (changed("x_data", 3, NAN, sparse_content()), "x_data: vertex 3, column 2: nan"),
    "sparse column": (
        changed("x_indices", 2, 3, sparse_content()),
        r"x_indices: position 2 \(row 2\): 3 is not in 0\.\.2",
    ),
    "sparse indptr": (changed("x_indptr", 2, 1, sparse_content()), "x_indptr: position 2: 1 after 2"),
    "sparse indptr short": (
        sparse_content(x_indptr=np.array([0, 8])),
        r"x_indptr: has 2 entries, expected rows \+ 1 = 7",
    ),
    "sparse data short": (
        sparse_content(x_data=np.ones(7)),
        r"x_data: has shape \(7,\), but .*x_indices has shape \(8,\)",
    ),
    "sparse shape": (sparse_content(x_shape=np.array([7, 3])), r"x_shape: is \[7, 3\], expected \[6, "),
    "sparse shape 1": (sparse_content(x_shape=np.array([6])), "x_shape: has 1 entries, expected 2"),
    # labels
    "label negative": (changed("y", 2, -2), "y: vertex 2: label -2 is negative"),
    "label large": (
        changed("y", 2, 900),
        "y: vertex 2: label 900 would mean 901 classes for 5 labelled vertices: are these",
    ),
    "label above meta": (
        changed("y", 3, 3, content(meta='{"num_classes": 3}')),
        r"y: vertex 3: label 3 is not in 0\.\.2 \(3 classes\)",
    ),
    "label broken": (
        content(y=np.array([0, 1, 0.5, 1, 1, 0])),
        r"y: vertex 2: label 0\.5 is not a whole number",
    ),
    "label inf": (content(y=np.array([0, 1, 1, np.inf, 1, 0])), "y: vertex 3: label inf"),
    "labels text": (content(y=np.array(list("abcdef"))), "y: has dtype <U1, expected whole numbers"),
    "labels short": (
        content(y=np.zeros(5, int)),
        r"y: has shape \(5,\), expected one label for each of the 6",
    ),
    "marks short": (
        content(y=np.zeros((5, 4), np.uint8)),
        r"y: has shape \(5, 4\), expected one row for each of the 6",
    ),
    "mark of 2": (changed("y", (4, 2), 2, several()), "y: vertex 4, class 2: 2 is not 0 or 1"),
    "mark of 255": (
        changed("y", 4, 255, several(y=MARKS.astype(np.uint8))),
        "y: vertex 4, class 0: 255 is not 0 or 1",
    ),
    "mark broken": (
        changed("y", (3, 1), 0.5, several(y=MARKS * 1.0)),
        r"y: vertex 3, class 1: 0\.5 is not 0 or 1",
    ),
    "marks text": (content(y=np.full((6, 2), "1")), "y: has dtype <U1, expected 0 and 1"),
    "marks against meta": (
        several(meta='{"num_classes": 4}'),
        "y: has 3 columns, but the number of classes is 4",
    ),
    "labels twice": (
        several(y_indptr=np.zeros(7, int), y_indices=np.zeros(0, int)),
        "has labels twice",
    ),
    "label sets short": (
        content(y=None, y_indptr=np.array([0, 1]), y_indices=np.array([1])),
        r"y_indptr: has 2 entries, expected vertices \+ 1 = 7",
    ),
    "label sets range": (
        content(
            y=None, y_indptr=np.arange(7), y_indices=np.array([0, 1, 3, 1, 0, 0]), meta='{"num_classes": 3}'
        ),
        r"y_indices: position 2 \(row 2\): 3 is not in 0\.\.2",
    ),
    "label sets without indices": (content(y=None, y_indptr=np.arange(7)), "key 'y_indices' is missing"),
    "label sets of one class": (
        content(y=None, y_indptr=np.arange(7), y_indices=np.zeros(6, int)),
        r"y_indices: has shape \(6, 1\), expected \(6, number of classes\), at least 2",
    ),
    "classes wrong": (
        content(meta='{"num_classes": "two"}'),
        "meta: num_classes must be a whole number >= 1.*'two'",
    ),
    "classes none": (content(meta='{"classes": []}'), "meta: classes must be"),
    "classes differ": (
        content(meta='{"num_classes": 3, "classes": ["a"]}'),
        "meta: num_classes is 3, but there are 1",
    ),
    # split
    "overlap": (changed("test_idx", 1, 1), "test_idx: vertex 1 is in this set and in .*train_idx"),
    "set index": (changed("val_idx", 0, 6), r"val_idx: position 0: vertex 6 is not in 0\.\.5"),
    "set negative": (changed("train_idx", 1, -1), "train_idx: position 1: vertex -1"),
    "set float": (content(val_idx=np.array([2.0])), "val_idx: has dtype float64"),
    "mask short": (
        content(val_idx=np.zeros(5, bool)),
        r"val_idx: is a mask of shape \(5,\), expected \(6,\)",
    ),
    "no training": (content(train_idx=np.zeros(0, int)), "no training vertex: the training set is empty"),
    "training unlabelled": (content(train_idx=np.array([4])), "all training vertices are unlabelled"),
    "all unlabelled": (content(y=np.full(6, -1)), "no training vertex"),
    "splits value": (
        content(splits=np.full((1, 6), 3), train_idx=None, val_idx=None, test_idx=None),
        "splits: split 0, vertex 0: 3 is not",
    ),
    "splits shape": (
        content(splits=np.zeros((1, 5), int), train_idx=None, val_idx=None, test_idx=None),
        r"splits: is int64 of shape \(1, 5\)",
    ),
    # ids
    "id twice": (content(ids=np.array([5, 1, 2, 3, 1, 0])), "ids: positions 1 and 4: id 1 occurs twice"),
    "text id twice": (content(ids=np.array(list("abcdda"))), "ids: positions 0 and 5: id 'a' occurs twice"),
    "ids float": (content(ids=np.arange(6.0)), "ids: has dtype float64"),
    "ids short": (content(ids=np.arange(5)), r"ids: has shape \(5,\), expected one id for each of the 6"),
    "id too large": (
        content(ids=np.array([0, 1, 2, 3, 2**63, 5], np.uint64)),
        "ids: position 4: id 9223372036854775808",
    ),
    "id not utf-8": (
        content(ids=np.array([b"a", b"\xff", b"c", b"d", b"e", b"f"])),
        "ids: an id is not valid UTF-8",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_files(save, kind):
    keys, message = WRONG[kind]
    path = save(keys)
    with pytest.raises(InputError, match=message) as caught:
        read_npz(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("row", [2, -1])
def test_a_split_that_is_not_there(save, row):
    with pytest.raises(InputError, match=rf"splits: split {row} was asked for, the file has splits 0\.\.1"):
        read_npz(save(content(splits=np.zeros((2, N), int))), split=row)
    with pytest.raises(InputError, match=f"split {row} was asked for, but the file has no key 'splits'"):
        read_npz(save(content()), split=row)


def test_a_negative_seed(save):
    with pytest.raises(InputError, match="seed: must not be negative, got -1"):
        read_npz(save(content(train_idx=None, val_idx=None, test_idx=None)), seed=-1)


def test_files_that_are_no_npz(tmp_path, save):
    def refuse(path, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            read_npz(path)
        assert str(path) in str(caught.value)

    refuse(tmp_path / "none.npz", "no such file")
    refuse(tmp_path, "cannot be read: .*directory")
    for name, data in (("text", b"1 2\n2 3\n"), ("empty", b""), ("npy", b"\x93NUMPY\x01\x00")):
        (tmp_path / name).write_bytes(data)
        refuse(tmp_path / name, "not an .npz file")
    whole = save(content()).read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    refuse(tmp_path / "cut", "not an .npz file")
    broken = bytearray(whole)
    position = whole.index(b"\x93NUMPY") + 100
    broken[position : position + 60] = bytes(60)
    (tmp_path / "broken").write_bytes(broken)
    refuse(tmp_path / "broken", "cannot be read")


def test_too_many_vertices_are_refused_by_name():
    assert checks.vertex_count(MAX_VERTICES, "indptr") == MAX_VERTICES
    with pytest.raises(InputError, match="the graph has 2147483648 vertices; at most 2147483647"):
        checks.vertex_count(2**31, "indptr")


# --- SciPy matrices and arrays


def arrays(**changes: Any) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    ring = sp.coo_array((np.ones(N), (np.arange(N), (np.arange(N) + 1) % N)), shape=(N, N))
    given = {
        "adjacency": ring,
        "features": np.ones((N, 2)),
        "labels": [0, 1, 0, 1, 0, 1],
        "train": [0, 1],
        **changes,
    }
    return (given.pop("adjacency"), given.pop("features"), given.pop("labels")), given


def build(**changes: Any):
    positional, named = arrays(**changes)
    return from_arrays(*positional, **named)


@pytest.mark.parametrize("form", ["coo", "csr", "csc", "lil", "dok", "bsr", "dia"])
@pytest.mark.parametrize("old", [False, True], ids=["array", "matrix"])
def test_scipy_formats(form, old):
    ring = arrays()[0][0].asformat(form)
    graph = build(adjacency=getattr(sp, f"{form}_matrix")(ring) if old else ring)
    assert graph.edges.rows().tolist() == list(range(N))
    assert graph.indices.tolist() == [1, 2, 3, 4, 5, 0]
    assert graph.weights is None


@pytest.mark.parametrize("form", ["coo", "csr"])
def test_repeated_entries_and_zeros_stay_edges(form):
    rows, cols, data = [1, 0, 1, 1], [2, 1, 2, 0], [2.0, 0.0, 1.0, 3.0]
    if form == "coo":
        matrix = sp.coo_array((data, (rows, cols)), shape=(N, N))
    else:
        matrix = sp.csr_array((np.array([0.0, 2, 1, 3]), [1, 2, 2, 0], [0, 1, 4, 4, 4, 4, 4]), shape=(N, N))
    graph = build(adjacency=matrix)
    assert graph.edges.rows().tolist() == [0, 1, 1, 1]
    assert graph.indices.tolist() == [1, 0, 2, 2]
    assert graph.weights.tolist() == [0.0, 3.0, 1.0, 2.0]


def test_the_callers_arrays_stay_as_they_are():
    matrix = sp.csr_array(
        (np.array([1.0, 2, 3]), np.array([2, 0, 2]), np.array([0, 3, 3, 3, 3, 3, 3])), shape=(N, N)
    )
    features = sp.csr_array(
        (np.array([1.0, 2, 3]), np.array([1, 0, 1]), np.array([0, 3, 3, 3, 3, 3, 3])), shape=(N, 2)
    )
    graph = build(adjacency=matrix, features=features)
    assert (matrix.indices.tolist(), matrix.data.tolist()) == ([2, 0, 2], [1.0, 2.0, 3.0])
    assert (features.indices.tolist(), features.data.tolist()) == ([1, 0, 1], [1.0, 2.0, 3.0])
    assert graph.features.toarray()[0].tolist() == [2.0, 4.0]


def test_text_ids_of_a_list():
    assert build(ids=["a", "bb", "ccc", "d", "e", "f"]).ids.dtype.kind == "U"
    assert build(ids=np.array(["a", "bb", "ccc", "d", "e", "f"], object)).ids.tolist()[1] == "bb"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adjacency": np.eye(N)}, "adjacency: expected a SciPy sparse matrix, got ndarray"),
        ({"adjacency": sp.csr_array((N, 3))}, r"adjacency: has shape \(6, 3\), expected a square matrix"),
        (
            {"adjacency": sp.csr_array(-np.eye(N))},
            r"adjacency\.data: position 0 \(edge 0 -> 0\): weight -1\.0",
        ),
        ({"adjacency": sp.csr_array(1j * np.eye(N))}, "adjacency.data: has dtype complex128"),
        ({"features": np.ones((5, 2))}, r"features: has shape \(5, 2\)"),
        (
            {"features": [[1, 2], [3, NAN], [0, 0], [0, 0], [0, 0], [0, 0]]},
            "features: vertex 1, column 1: nan",
        ),
        ({"features": sp.csr_array(np.full((N, 2), np.inf))}, "features: vertex 0, column 0: inf"),
        ({"labels": [0, 1]}, r"labels: has shape \(2,\)"),
        (
            {"labels": [0, 1, 0, 1, 0, 5], "n_classes": 5},
            r"labels: vertex 5: label 5 is not in 0\.\.4 \(5 classes\)",
        ),
        ({"n_classes": 0}, "labels: the number of classes must be a whole number >= 1, got 0"),
        ({"n_classes": 2.0}, "got 2.0"),
        ({"train": [0, 6]}, r"train: position 1: vertex 6 is not in 0\.\.5"),
        ({"validation": [1]}, "validation: vertex 1 is in this set and in train"),
        ({"train": None, "test": [1]}, "train is missing, but test is there"),
        ({"train": []}, "train: no training vertex"),
        ({"ids": np.array([1, 2, 3, 4, 5, "a"], object)}, "ids: position 0: id 1 is neither"),
        ({"ids": ["a", "\ud800", "c", "d", "e", "f"]}, "ids: an id is not valid UTF-8"),
    ],
)
def test_wrong_arrays(changes, message):
    with pytest.raises(InputError, match=message):
        build(**changes)


# --- public graphs


@pytest.mark.parametrize(
    ("name", "n", "arcs", "features", "classes", "split"),
    [
        ("cora", 2708, 10556, 1433, 7, (140, 500, 1000)),
        ("citeseer", 3327, 9104, 3703, 6, (120, 500, 1000)),
        ("amazon_photo", 7650, 238162, 745, 8, (160, 240, 7250)),
        ("tolokers", 11758, 1038000, 10, 2, (5879, 2939, 2940)),
        ("debian12_packages", 63436, 1773110, 3676, 58, (38061, 12687, 12688)),
    ],
)
def test_public_graphs(name, n, arcs, features, classes, split):
    graph = read_npz(real_graph(name))
    assert (graph.name, graph.n, graph.n_edges, graph.n_features, graph.n_classes) == (
        name,
        n,
        arcs,
        features,
        classes,
    )
    assert tuple(np.bincount(graph.split, minlength=4)[1:]) == split
    assert graph.sparse_features == (name != "tolokers")
    assert graph.notes == ()


def test_the_splits_of_a_public_graph():
    path = real_graph("tolokers")
    first, second = (read_npz(path, split=k).split for k in (0, 1))
    assert np.array_equal(first, read_npz(path).split)
    assert not np.array_equal(first, second)
    with pytest.raises(InputError, match=r"split 10 was asked for, the file has splits 0\.\.9"):
        read_npz(path, split=10)
