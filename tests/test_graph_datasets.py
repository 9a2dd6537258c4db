"""Embedded data sets, and what `load_graph` makes of a name."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from realdata import real_graph

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph import csr
from dorylus_hpc.graph.datasets import digits, load
from dorylus_hpc.graph.preparation import load_graph


def test_digits():
    graph = digits()
    assert (graph.n, graph.n_features, graph.n_classes, graph.name) == (1797, 64, 10, "digits")
    assert graph.features.dtype == np.float32
    assert (graph.features.min(), graph.features.max()) == (0.0, 1.0)
    assert graph.weights is None
    assert not csr.loops(graph.edges).any()
    assert not csr.repeats(graph.edges).any()
    out_edges, in_edges = csr.both_directions(graph.edges)
    assert in_edges is out_edges
    assert np.diff(graph.indptr).min() >= 8
    for value, count in ((1, 10), (2, 30)):
        assert np.bincount(graph.labels[graph.split == value]).tolist() == [count] * 10
    assert np.count_nonzero(graph.split == 3) == 1797 - 400


def test_digits_are_joined_to_their_nearest():
    graph = digits(k=3)
    x = graph.features.astype(np.float64)
    for vertex in (0, 700, 1796):
        distance = ((x - x[vertex]) ** 2).sum(axis=1)
        distance[vertex] = np.inf
        neighbours = graph.indices[graph.indptr[vertex] : graph.indptr[vertex + 1]]
        assert np.isin(np.sort(distance)[:3], distance[neighbours]).all()


def test_digits_are_always_the_same():
    a, b = digits(), digits()
    assert np.array_equal(a.indices, b.indices)
    assert np.array_equal(a.split, b.split)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"pip install 'dorylus_hpc\[demo\]'"):
        digits()


def test_names_and_paths(tmp_path):
    assert load_graph("digits").n == 1797
    assert load("digits").n == 1797
    assert load_graph(real_graph("cora")).n == 2708
    (tmp_path / "edges.csv").write_text("0,1\n")
    for source, message in (
        (
            "mnist",
            r"mnist: no such file or data set; accepted are an \.npz file or a data set name \(digits\)",
        ),
        (tmp_path / "none.npz", "none.npz: no such file"),
        (tmp_path / "edges.csv", r"edges.csv: is not an \.npz file; accepted are"),
        (tmp_path, "is a folder; accepted are"),
    ):
        with pytest.raises(InputError, match=message):
            load_graph(source)
    with pytest.raises(
        InputError, match="split 3 was asked for, but the data set 'digits' has one split only"
    ):
        load_graph("digits", split=3)
    with pytest.raises(InputError, match="unknown data set 'mnist'; known: digits"):
        load("mnist")
