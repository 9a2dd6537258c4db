"""The command: what it prints, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from realdata import real_graph

from dorylus_hpc import prepare
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.preparation import load_graph, prepare_folder
from dorylus_hpc.graph.store import read_manifest, read_part


def save(path, sources, destinations, n, **keys):
    """A file of directed arcs as they are given."""
    order = np.argsort(sources, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(sources, minlength=n))])
    content = {
        "indptr": indptr,
        "indices": np.asarray(destinations)[order],
        "x": np.ones((n, 2), np.float32),
        "y": np.arange(n) % 2,
        "train_idx": [0, 1],
        "val_idx": [2],
        "test_idx": [3],
        **keys,
    }
    np.savez(path, **content)
    return str(path)


@pytest.fixture
def file(tmp_path):
    """0->1 twice, a loop at 1, 1->2, 4 isolated."""
    return save(tmp_path / "graph.npz", [0, 0, 1, 1], [1, 1, 1, 2], 5)


def run(*arguments: str) -> int:
    return prepare.main([str(a) for a in arguments])


def test_a_whole_run(file, tmp_path, capsys):
    folder = tmp_path / "a folder"
    assert run(file, "-o", folder, "--parts", 2, "--seed", 5) == 0
    out = capsys.readouterr().out
    for line in (
        "graph: 5 vertices, 2 arcs, 2 dense features (float32), 2 classes",
        "labelled: 5 vertices; 2 train, 1 validation, 1 test",
        "connected components: 3, 2 of them isolated vertices",
        "note: 1 self loops dropped",
        "note: 1 repeated edges merged",
        "directed: both directions are stored",
        f"written to '{folder}'; train on 1 to 2 graph servers, for example:",
        f"  mpirun -n 2 python -m dorylus_hpc.train --data '{folder}'",
    ):
        assert line in out.splitlines()
    assert "by vertices" in out
    assert "edge cut: " in out
    manifest = read_manifest(folder)
    assert manifest.options == {
        "partitioner": "metis",
        "parts": 2,
        "order": "auto",
        "seed": 5,
        "undirected": False,
        "self_loops": "drop",
        "duplicates": "merge",
    }


def test_every_option(file, tmp_path):
    owners = tmp_path / "owners.txt"
    owners.write_text("2\n2\n0\n0\n2\n")
    options = ["--partitioner", f"file:{owners}", "--undirected", "--self-loops", "keep"]
    options += ["--duplicates", "keep", "--order", "none", "--split", "0"]
    assert run(file, "-o", tmp_path / "out", "--parts", 3, *options) == 0
    manifest = read_manifest(tmp_path / "out")
    assert [entry.own for entry in manifest.parts] == [2, 0, 3]
    assert (manifest.edges, manifest.directed, manifest.has_loops, manifest.edge_cut) == (7, False, True, 2)
    assert read_part(tmp_path / "out", manifest, 2).gid.tolist() == [0, 1, 4]


def test_many_parts_are_summed_up(tmp_path):
    lines: list[str] = []
    prepare_folder(load_graph("digits"), tmp_path, parts=20, partitioner="range", report=lines.append)
    table = [line for line in lines if line.lstrip().startswith(("min", "max"))]
    assert len(table) == 2
    assert table[0].split()[:2] == ["min", "89"]
    assert table[1].split()[:2] == ["max", "90"]


@pytest.mark.parametrize("partitioner", ["metis", "hash", "range"])
def test_one_vertex(tmp_path, partitioner):
    path = save(
        tmp_path / "one.npz", np.zeros(0, int), np.zeros(0, int), 1, train_idx=[0], val_idx=[], test_idx=[]
    )
    assert run(path, "-o", tmp_path / "out", "--parts", 1, "--partitioner", partitioner) == 0
    assert read_manifest(tmp_path / "out").vertices == 1


def test_preparing_again_with_fewer_parts(file, tmp_path):
    for parts in (4, 2):
        assert run(file, "-o", tmp_path / "out", "--parts", parts) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "part-00000.h5",
        "part-00001.h5",
    ]


def check_refused(capsys, message: str, *arguments: str) -> None:
    """Exit status 2 and one line."""
    try:
        status = run(*arguments)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.startswith("prepare: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_wrong_use(file, tmp_path, capsys):
    out = ("-o", tmp_path / "out")
    check_refused(capsys, "no such file or data set", "nothing", *out, "--parts", 2)
    check_refused(capsys, "none.npz: no such file", tmp_path / "none.npz", *out, "--parts", 2)
    check_refused(capsys, "--parts 6: more parts than the graph's 5 vertices", file, *out, "--parts", 6)
    check_refused(capsys, "--parts 0: at least one part", file, *out, "--parts", 0)
    check_refused(capsys, "invalid int value: 'two'", file, *out, "--parts", "two")
    check_refused(capsys, "the following arguments are required: --parts", file, *out)
    check_refused(capsys, "unrecognized arguments: --fast", file, *out, "--parts", 2, "--fast")
    check_refused(capsys, "unrecognized arguments: --part", file, *out, "--parts", 2, "--part=3")
    check_refused(capsys, "invalid choice: 'sum'", file, *out, "--parts", 2, "--duplicates", "sum")
    check_refused(
        capsys, "stream: not available in this version", file, *out, "--parts", 2, "--partitioner", "stream"
    )
    check_refused(
        capsys, "the edge 0 -> 1 occurs more than once", file, *out, "--parts", 2, "--duplicates", "error"
    )
    check_refused(capsys, "has no key 'splits'", file, *out, "--parts", 2, "--split", 1)
    check_refused(capsys, "cannot write", file, "-o", file, "--parts", 2)
    assert not (tmp_path / "out").exists()


def test_wrong_files(tmp_path, capsys):
    for name, keys, message in (
        ("nan", {"x": np.array([[1.0, np.nan]] * 5)}, "nan.npz: x: vertex 0, column 1: nan"),
        ("overlap", {"test_idx": [1]}, "overlap.npz: test_idx: vertex 1 is in this set and in"),
        ("label", {"meta": '{"num_classes": 1}'}, "label.npz: y: vertex 1: label 1 is not in 0..0"),
        ("layout", {"indptr": [0, 2, 1, 4, 4, 4]}, "layout.npz: indptr: position 2: 1 after 2"),
    ):
        path = save(tmp_path / f"{name}.npz", [0, 0, 1, 1], [1, 1, 1, 2], 5, **keys)
        check_refused(capsys, message, path, "-o", tmp_path / "out", "--parts", 2)


def test_help_shows_the_contract(capsys):
    with pytest.raises(SystemExit) as stop:
        run("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in (
        "--parts",
        "--partitioner",
        "--undirected",
        "--self-loops",
        "--duplicates",
        "--order",
        "--seed",
        "--split",
    ):
        assert option in text


def test_as_a_module_without_mpi(file, tmp_path):
    code = (
        "import runpy, sys\n"
        "sys.modules['mpi4py'] = None\n"
        "runpy.run_module('dorylus_hpc.prepare', run_name='__main__')\n"
    )
    paths = ":".join(path for path in sys.path if path)
    for arguments, status in (([file], 0), ([str(tmp_path / "none.npz")], 2)):
        command = [sys.executable, "-c", code, *arguments, "-o", str(tmp_path / "out"), "--parts", "2"]
        done = subprocess.run(
            command, env={"PYTHONPATH": paths}, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr


# --- real graphs


def check_against(graph: GraphData, folder) -> None:
    """Everything of the graph is in the parts."""
    manifest = read_manifest(folder)
    parts = [read_part(folder, manifest, k) for k in range(len(manifest.parts))]
    gid = np.concatenate([part.gid for part in parts])
    place = np.argsort(gid)
    assert np.array_equal(gid[place], np.arange(graph.n))
    for name in ("labels", "split", "ids"):
        assert np.array_equal(
            np.concatenate([getattr(part, name) for part in parts])[place], getattr(graph, name)
        )
    assert np.array_equal(np.concatenate([part.out_degree for part in parts])[place], np.diff(graph.indptr))
    assert sum(part.features.sum() for part in parts) == pytest.approx(graph.features.sum())


@pytest.mark.parametrize(
    ("name", "parts"), [("cora", 4), ("citeseer", 7), ("amazon_photo", 3), ("tolokers", 2)]
)
def test_public_graphs(tmp_path, name, parts):
    graph = load_graph(real_graph(name))
    manifest = prepare_folder(graph, tmp_path, parts=parts, report=lambda _line: None)
    assert (manifest.vertices, manifest.edges, manifest.directed) == (graph.n, graph.n_edges, False)
    assert manifest.feature_kind == ("dense" if name == "tolokers" else "csr")
    check_against(graph, tmp_path)


def test_a_large_public_graph_takes_seconds(tmp_path):
    path = real_graph("debian12_packages")
    start = time.perf_counter()
    assert run(path, "-o", tmp_path, "--parts", 2) == 0
    assert time.perf_counter() - start < 20
    check_against(load_graph(path), tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size < 20e6  # features stay sparse, one direction is stored
    assert json.loads((tmp_path / "manifest.json").read_text())["edge_cut"] < 0.2 * 1_773_110
