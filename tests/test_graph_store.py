"""Prepared folders: what is written is read back, what does not fit is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
from dataclasses import asdict, fields

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
from graphs import AWKWARD, awkward, directed_weighted, sparse_features, undirected_random

from dorylus_hpc.errors import InputError
from dorylus_hpc.graph import store
from dorylus_hpc.graph.clean import clean
from dorylus_hpc.graph.partition import Adjacency, Part, build_parts
from dorylus_hpc.graph.partitioners import partition
from dorylus_hpc.graph.store import read_manifest, read_part, write_folder


def check_equal(a, b) -> None:
    """Same dtype and values, dense or sparse."""
    if sp.issparse(a):
        check_equal(a.data, b.data)
        assert np.array_equal(a.indices, b.indices)
        assert np.array_equal(a.indptr, b.indptr)
        assert a.shape == b.shape
    elif a is None:
        assert b is None
    else:
        assert a.dtype == b.dtype or a.dtype.kind == b.dtype.kind == "U"
        assert np.array_equal(a, b)


def check_same_part(a: Part, b: Part) -> None:
    assert a.index == b.index
    assert a.symmetric == b.symmetric
    for name in ("gid", "ids", "in_degree", "out_degree", "features", "labels", "split"):
        check_equal(getattr(a, name), getattr(b, name))
    for x, y in ((a.in_edges, b.in_edges), (a.out_edges, b.out_edges)):
        for field in fields(Adjacency):
            if field.name != "send":
                check_equal(getattr(x, field.name), getattr(y, field.name))
        assert list(x.send) == list(y.send)
        for peer, lids in x.send.items():
            check_equal(lids, y.send[peer])


@pytest.mark.parametrize("self_loops", ["drop", "keep"])
@pytest.mark.parametrize("name", AWKWARD)
def test_what_is_written_is_read_back(tmp_path, name, self_loops):
    graph = clean(awkward(name), self_loops=self_loops, duplicates="keep")
    parts = min(4, graph.n)
    owner = partition(graph, parts, "hash")
    written = write_folder(graph, owner, tmp_path / "new" / "folder", parts=parts, options={"seed": 3})
    manifest = read_manifest(tmp_path / "new" / "folder")
    assert manifest == written
    assert manifest.options == {"seed": 3}
    for part in build_parts(graph, owner, parts=parts):
        check_same_part(part, read_part(tmp_path / "new" / "folder", manifest, part.index))


def test_totals(tmp_path):
    graph = clean(directed_weighted(), self_loops="keep")
    owner = partition(graph, 3, "hash")
    m = write_folder(graph, owner, tmp_path)
    rows = graph.edges.rows()
    assert (m.name, m.vertices, m.edges) == ("directed_weighted", graph.n, graph.n_edges)
    assert (m.features, m.feature_kind, m.feature_dtype, m.classes) == (5, "dense", "float64", 3)
    assert (m.directed, m.weighted, m.has_loops, m.id_kind) == (True, True, True, "gid")
    assert m.labelled == graph.n
    assert [m.train, m.validation, m.test] == np.bincount(graph.split, minlength=4)[1:].tolist()
    assert m.edge_cut == np.count_nonzero(owner[rows] != owner[graph.indices])
    ghosts = {(owner[j], i) for i, j in zip(rows, graph.indices, strict=True) if owner[i] != owner[j]}
    assert m.ghosts == len(ghosts)
    assert [entry.own for entry in m.parts] == np.bincount(owner).tolist()


@pytest.mark.parametrize(("name", "kind"), [("text_ids", "str"), ("large_ids", "int64"), ("star", "gid")])
def test_id_kinds(tmp_path, name, kind):
    assert write_folder(awkward(name), np.zeros(awkward(name).n, int), tmp_path).id_kind == kind


def test_nothing_is_stored_twice_or_for_nothing(tmp_path):
    graph = clean(undirected_random())
    manifest = write_folder(graph, partition(graph, 2), tmp_path)
    with h5py.File(tmp_path / manifest.parts[0].file) as file:
        assert set(file) == {"gid", "in_degree", "labels", "split", "features", "in_edges"}
        assert "weights" not in file["in_edges"]
        assert "ghost_out_degree" not in file["in_edges"]
        assert all(file["in_edges"][name].chunks is None for name in file["in_edges"])


def test_labels_of_several_classes(tmp_path):
    graph = clean(undirected_random(several=True, unlabelled=[3, 8]))
    owner = partition(graph, 3, "hash")
    manifest = write_folder(graph, owner, tmp_path)
    assert read_manifest(tmp_path) == manifest and manifest.several_classes
    assert manifest.labelled == graph.n - 2 == sum(entry.labelled for entry in manifest.parts)
    for part in build_parts(graph, owner):
        check_same_part(part, read_part(tmp_path, manifest, part.index))
        assert np.array_equal(part.labels, graph.labels[part.gid])
    with h5py.File(tmp_path / manifest.parts[0].file) as file:
        assert file["labels"].dtype == np.uint8 and file["labels"].shape[1] == graph.n_classes
    rewrite(tmp_path, label_kind="one")
    with pytest.raises(InputError, match="not a part file of format 1: its labels have shape"):
        read_part(tmp_path, read_manifest(tmp_path), 0)
    rewrite(tmp_path, label_kind="many")
    with pytest.raises(InputError, match="key 'label_kind' must be one or several, got 'many'"):
        read_manifest(tmp_path)


def test_folders_of_before_have_one_class_a_vertex(tmp_path):
    graph = clean(undirected_random())
    write_folder(graph, partition(graph, 2), tmp_path)
    path = tmp_path / "manifest.json"
    old = json.loads(path.read_text())
    assert old.pop("label_kind") == "one"
    path.write_text(json.dumps(old))
    assert not read_manifest(tmp_path).several_classes
    read_part(tmp_path, read_manifest(tmp_path), 1)


def test_text_ids_are_utf8_for_any_reader(tmp_path):
    graph = awkward("text_ids")
    manifest = write_folder(graph, np.zeros(graph.n, int), tmp_path, order="none")
    with h5py.File(tmp_path / manifest.parts[0].file) as file:
        assert h5py.check_string_dtype(file["ids"].dtype).encoding == "utf-8"
        assert file["ids"].asstr()[:].tolist() == graph.ids.tolist()


def test_empty_parts(tmp_path):
    for k, graph in enumerate((clean(directed_weighted()), clean(sparse_features()))):
        manifest = write_folder(graph, np.full(graph.n, 1), tmp_path / str(k), parts=4)
        assert [entry.own for entry in manifest.parts] == [0, graph.n, 0, 0]
        manifest = read_manifest(tmp_path / str(k))
        empty = read_part(tmp_path / str(k), manifest, 3)
        assert (empty.n_own, empty.n_features, empty.in_edges.n_ghost) == (0, graph.n_features, 0)
        assert empty.features.dtype == graph.features.dtype


def test_the_same_bytes_twice(tmp_path):
    graph = clean(directed_weighted())
    first, second = (write_folder(graph, partition(graph, 3), tmp_path / name) for name in "ab")
    assert first == second


def test_arrays_move_in_slices(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SLICE_BYTES", 64)
    for graph in (clean(directed_weighted()), clean(awkward("text_ids")), clean(sparse_features())):
        owner = partition(graph, 2)
        manifest = write_folder(graph, owner, tmp_path)
        for part in build_parts(graph, owner):
            check_same_part(part, read_part(tmp_path, manifest, part.index))


def test_slices_stay_under_a_gigabyte():
    for shape, itemsize in (((10**9,), 8), ((10**6, 4096), 4), ((3, 10**9), 8), ((0, 5), 8)):
        found = list(store._slices(shape, itemsize))
        assert sum(s.stop - s.start for s in found) == shape[0]
        row = int(np.prod(shape[1:], dtype=np.int64)) * itemsize
        assert all((s.stop - s.start) * row <= max(2**29, row) for s in found)


# --- preparing again


def test_preparing_again_replaces_ours_and_leaves_the_rest(tmp_path):
    graph = clean(undirected_random())
    write_folder(graph, partition(graph, 5), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "part-a.h5").write_text("mine")
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f".part-00001.h5.{dead.pid}.tmp").write_text("left by a killed preparation")
    (tmp_path / f".part-00001.h5.{os.getpid()}.tmp").write_text("somebody is at work")
    (tmp_path / f".part-00001.h5.{os.getppid()}.tmp").write_text("somebody is at work")
    manifest = write_folder(graph, partition(graph, 2), tmp_path)
    kept = {"manifest.json", "part-00000.h5", "part-00001.h5", "notes.txt", "part-a.h5"}
    assert {path.name for path in tmp_path.iterdir()} == kept | {f".part-00001.h5.{os.getppid()}.tmp"}
    for index in range(2):
        read_part(tmp_path, manifest, index)


def test_a_failed_preparation_leaves_the_old_one(tmp_path, monkeypatch):
    graph = clean(undirected_random())
    owner = partition(graph, 3)
    manifest = write_folder(graph, owner, tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    write = store._write_part

    def full_disk(path, part, id_kind):
        write(path, part, id_kind)
        if part.index == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "_write_part", full_disk)
    with pytest.raises(InputError, match="cannot write the prepared graph: .*No space left"):
        write_folder(graph, partition(graph, 4, "hash"), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before
    assert read_manifest(tmp_path) == manifest
    for index in range(3):
        read_part(tmp_path, manifest, index)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    graph = undirected_random()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=f"{folder}: cannot write"):
            write_folder(graph, np.zeros(graph.n, int), folder)


# --- what is refused


@pytest.fixture
def prepared(tmp_path):
    graph = clean(directed_weighted())
    write_folder(graph, partition(graph, 3, "hash"), tmp_path)
    return tmp_path


def rewrite(folder, **changes) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_no_folder_and_no_manifest(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such folder; make it with: .*prepare INPUT -o"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(InputError, match="not a prepared folder, it has no manifest.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff", '{"version": 1}', "null"])
def test_broken_manifests(prepared, text):
    (prepared / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match="manifest.json: "):
        read_manifest(prepared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "format version 2, this program reads 1"),
        ({"version": None}, "format version None"),
        ({"vertices": 26}, "the parts' 'own' add up to 25, the total is 26"),
        ({"edges": 1}, "the parts' 'in_edges' add up"),
        ({"ghosts": 0}, "the parts' 'in_ghosts' add up"),
        ({"labelled": 24}, "'labelled' add up to 25, the total is 24"),
        ({"train": 0}, "'train' add up"),
        ({"test": 0}, "'test' add up"),
        ({"edges": "many"}, "key 'edges' must be int, got 'many'"),
        ({"directed": 1}, "key 'directed' must be bool, got 1"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"parts": []}, "key 'parts' must be a list of at least one part"),
        ({"parts": {}}, "key 'parts' must be a list"),
        ({"parts": [3]}, r"parts\[0\]: expected an object, got 3"),
        ({"parts": [{"file": "x"}]}, r"parts\[0\]: key 'sha256' is missing"),
    ],
)
def test_manifests_that_do_not_add_up(prepared, changes, message):
    rewrite(prepared, **changes)
    with pytest.raises(InputError, match=message):
        read_manifest(prepared)


def test_a_missing_part(prepared):
    (prepared / "part-00001.h5").unlink()
    with pytest.raises(InputError, match="part file 'part-00001.h5' is missing"):
        read_manifest(prepared)


def test_a_part_outside_the_folder(prepared):
    entries = [asdict(entry) for entry in read_manifest(prepared).parts]
    shutil.copy(prepared / entries[0]["file"], prepared.parent / "outside.h5")
    rewrite(prepared, parts=[{**entries[0], "file": "../outside.h5"}, *entries[1:]])
    with pytest.raises(InputError, match="part file '../outside.h5' is missing"):
        read_manifest(prepared)


def test_a_damaged_part(prepared):
    manifest = read_manifest(prepared)
    path = prepared / manifest.parts[1].file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="part-00001.h5: checksum is .* the file was changed or damaged"):
        read_part(prepared, manifest, 1)
    read_part(prepared, manifest, 1, verify=False)
    read_part(prepared, manifest, 0)


@pytest.mark.parametrize("content", [b"", b"not HDF5", None])
def test_a_part_that_is_not_hdf5(prepared, content):
    manifest = read_manifest(prepared)
    path = prepared / manifest.parts[1].file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match="part-00001.h5: cannot read the part: "):
        read_part(prepared, manifest, 1, verify=False)


def test_a_part_without_its_arrays_or_with_others(prepared):
    manifest = read_manifest(prepared)
    with h5py.File(prepared / manifest.parts[0].file, "a") as file:
        del file["in_edges/ghost_gid"]
    with pytest.raises(InputError, match="part-00000.h5: not a part file of format 1"):
        read_part(prepared, manifest, 0, verify=False)
    shutil.copy(prepared / manifest.parts[1].file, prepared / manifest.parts[2].file)
    with pytest.raises(InputError, match="part-00002.h5: holds other counts than manifest.json says"):
        read_part(prepared, manifest, 2, verify=False)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOLCK, "No locks available"), OSError("unable to lock file, errno = 11")]
)
def test_lock_errors_explain_the_variable(prepared, monkeypatch, error):
    def refuse(*_args, **_options):
        raise error

    manifest = read_manifest(prepared)
    monkeypatch.setattr(store.h5py, "File", refuse)
    with pytest.raises(InputError, match="part-00000.h5: .*HDF5_USE_FILE_LOCKING=FALSE"):
        read_part(prepared, manifest, 0)


def test_parts_open_while_somebody_holds_a_lock(prepared):
    """A part never changes once it has its name: readers need no lock, which NFS may not have."""
    manifest = read_manifest(prepared)
    with (prepared / manifest.parts[0].file).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert read_part(prepared, manifest, 0).n_own == manifest.parts[0].own
