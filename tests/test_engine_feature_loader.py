"""Features that are read slice by slice: the values of a whole read, and nothing wrong goes unseen."""

from __future__ import annotations

import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from graphs import awkward, directed_random, sparse_features

from cython_kernels.layout import empty
from dorylus_hpc.engine import feature_loader
from dorylus_hpc.engine.executor import Executor
from dorylus_hpc.engine.feature_loader import FeatureLoader, Target
from dorylus_hpc.errors import InputError
from dorylus_hpc.graph.data import GraphData
from dorylus_hpc.graph.feature_norm import normalise_rows
from dorylus_hpc.graph.partitioners import partition
from dorylus_hpc.graph.store import read_manifest, read_part, read_structure, write_folder
from dorylus_hpc.report.trace import KINDS, Tracer

NEW_KEYS = ("structure_sha256", "features_sha256", "feature_bytes")


def prepared(folder: Path, graph: GraphData, parts: int = 2) -> Path:
    write_folder(graph, partition(graph, parts, "hash"), folder, parts=parts)
    return folder


def dense_graph(features: int = 37, **options: Any) -> GraphData:
    return directed_random(60, 300, features=features, **options)


def loader_of(
    folder: Path, dtype: str, executor: Executor | None = None, tracer: Tracer | None = None, **options: Any
) -> tuple[FeatureLoader, list[np.ndarray]]:
    """Have the dense features of all parts read; return where they go."""
    manifest = read_manifest(folder)
    loader, arrays = FeatureLoader(executor, tracer or Tracer(0.0)), []
    for index in range(len(manifest.parts)):
        part, stored = read_structure(folder, manifest, index)
        assert part.features is None
        x = empty(stored.arrays["values"].shape, dtype)
        x[...] = np.nan
        loader.add(index, stored, [Target("values", x, f"part {index} is not finite", **options)])
        arrays.append(x)
    return loader, arrays


def in_place(rows: np.ndarray) -> None:
    rows[...] = normalise_rows(rows)


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("slice_bytes", [1, 1000, 1 << 23])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_slices_have_the_bits_of_a_whole_read(tmp_path, monkeypatch, threads, slice_bytes, dtype) -> None:
    monkeypatch.setattr(feature_loader, "SLICE_BYTES", slice_bytes)
    folder = prepared(tmp_path, dense_graph())
    manifest = read_manifest(folder)
    with Executor(1) as executor:
        loader, arrays = loader_of(folder, dtype, executor if threads else None, then=in_place)
        loader.finish()
        loader.finish()  # nothing is left to do
    for index, x in enumerate(arrays):
        whole = read_part(folder, manifest, index).features.astype(dtype)
        assert x.tobytes() == normalise_rows(whole).tobytes()


def test_rows_come_as_they_are_asked_for(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(feature_loader, "SLICE_BYTES", 4 * 37 * 8)
    folder = prepared(tmp_path, dense_graph())
    loader, (first, second) = loader_of(folder, "float64")
    loader.load(1, (0, 7))
    assert np.isfinite(second[:7]).all()
    assert np.isnan(second[7:]).all()
    assert np.isnan(first).all()
    loader.load(1, (3, 5))
    assert np.isnan(second[7:]).all()
    loader.load(0, (0, len(first)))
    assert np.isfinite(first).all()
    loader.finish()
    assert np.isfinite(second).all()


def test_reading_ahead_is_on_the_timeline_and_ends_when_it_is_handed_over(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(feature_loader, "SLICE_BYTES", 37 * 8)
    folder, tracer = prepared(tmp_path, dense_graph()), Tracer(0.0)
    with Executor(1) as executor:
        loader_of(folder, "float64", executor, tracer)[0].finish()
        assert tracer.record().lanes == ("io_0",)
        tasks = tracer.record().tasks
        assert len(tasks) == 60
        assert {KINDS[kind] for kind in tasks["kind"]} == {"LD"}
        assert np.bincount(tasks["part"]).tolist() == [entry.own for entry in read_manifest(folder).parts]
    with Executor(1) as executor:
        waits = threading.Event()
        executor.background(lambda: None if waits.wait(10) else None, "io")
        loader, arrays = loader_of(folder, "float64", executor)
        loader.hand_over()
        waits.set()
        executor.background(lambda: loader.load(1, (0, 3)), "io").result()
        assert [int(np.isfinite(x).all(axis=1).sum()) for x in arrays] == [0, 3]
        loader.finish()
        assert all(np.isfinite(x).all() for x in arrays)


def test_features_are_in_memory_once(tmp_path) -> None:
    graph = dense_graph(features=20_000)
    folder = prepared(tmp_path, graph, parts=1)
    size = graph.features.nbytes
    tracemalloc.start()
    try:
        loader, (x,) = loader_of(folder, "float64")
        loader.finish()
        assert x.nbytes == size
        assert tracemalloc.get_traced_memory()[1] < 1.3 * size + feature_loader.SLICE_BYTES / 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["edgeless", "one_vertex", "text_ids", "sparse_features"])
def test_awkward_graphs(tmp_path, name) -> None:
    graph = awkward(name)
    folder = prepared(tmp_path, graph, parts=1 if graph.n == 1 else 3)
    manifest = read_manifest(folder)
    loader = FeatureLoader(None, Tracer(0.0))
    found = {}
    for index in range(len(manifest.parts)):
        _, stored = read_structure(folder, manifest, index)
        found[index] = {one: np.empty(array.shape, array.dtype) for one, array in stored.arrays.items()}
        loader.add(index, stored, [Target(one, array) for one, array in found[index].items()])
    loader.finish()
    for index, arrays in found.items():
        want = read_part(folder, manifest, index).features
        names = ("data", "indices", "indptr") if sp.issparse(want) else ("values",)
        for one in names:
            np.testing.assert_array_equal(arrays[one], getattr(want, one) if sp.issparse(want) else want)


# ---- what is wrong


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def load(folder: Path) -> None:
    """Read all there is, as a run does."""
    loader_of(folder, "float64")[0].finish()


def forget_new_keys(folder: Path) -> None:
    """Make the manifest one of before structure and features had checksums of their own."""
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    raw["parts"] = [
        {key: value for key, value in entry.items() if key not in NEW_KEYS} for entry in raw["parts"]
    ]
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize("old", [False, True])
def test_no_byte_may_change(tmp_path, old) -> None:
    folder = prepared(tmp_path, dense_graph(features=3))
    if old:
        forget_new_keys(folder)
    path = folder / read_manifest(folder).parts[1].file
    good = path.read_bytes()
    load(folder)
    start, stop = [0, len(good)] if old else read_manifest(folder).parts[1].feature_bytes
    places = {0, start - 1, start, (start + stop) // 2, stop - 1, stop, len(good) - 1} - {-1, len(good)}
    for place in [*places, *range(5, len(good), 331)]:
        flip(path, place)
        with pytest.raises(InputError, match="part-00001.h5: checksum is .*, manifest.json says .* damaged"):
            load(folder)
        path.write_bytes(good)
    for damaged in (good[:-1], good[: (start + stop) // 2], good + b"\0", b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="part-00001.h5: checksum is"):
            load(folder)


def test_a_sparse_part_may_not_change_either(tmp_path) -> None:
    folder = prepared(tmp_path, sparse_features())
    entry = read_manifest(folder).parts[0]
    assert len(entry.feature_bytes) == 6
    good = (folder / entry.file).read_bytes()
    for place in {*entry.feature_bytes, *range(1, len(good), 97)}:
        flip(folder / entry.file, place)
        with pytest.raises(InputError, match="checksum is"):  # noqa: PT012
            _, stored = read_structure(folder, read_manifest(folder), 0)
            for name, array in stored.arrays.items():
                stored.read(name, 0, np.empty(array.shape, array.dtype))
            stored.check()
        (folder / entry.file).write_bytes(good)


def test_a_late_value_that_is_not_finite(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(feature_loader, "SLICE_BYTES", 100)
    graph = dense_graph()
    graph.features[:] = 0.5
    graph.features[-1, -1] = 1e300
    folder = prepared(tmp_path, graph)
    loader_of(folder, "float64")[0].finish()
    wrong = next(part for part in range(2) if 59 in read_part(folder, read_manifest(folder), part).gid)
    for then in (None, in_place):
        with pytest.raises(InputError, match=f"^part {wrong} is not finite$"):
            loader_of(folder, "float32", then=then)[0].finish()
    entry = read_manifest(folder).parts[wrong]
    flip(folder / entry.file, entry.feature_bytes[0])  # then it is the file that is told
    with pytest.raises(InputError, match="checksum is"):
        loader_of(folder, "float32")[0].finish()


def test_a_file_that_goes_away_while_it_is_read(tmp_path) -> None:
    folder = prepared(tmp_path, dense_graph())
    loader, _ = loader_of(folder, "float64")
    path = folder / read_manifest(folder).parts[0].file
    path.write_bytes(path.read_bytes()[: read_manifest(folder).parts[0].feature_bytes[0] + 8])
    with pytest.raises(InputError, match="part-00000.h5: cannot read the part: it ends early"):
        loader.finish()


@pytest.mark.parametrize("ends", [[1], [4, 2], ["1", "2"], [1.5, 2]])
def test_manifests_with_impossible_ranges(tmp_path, ends) -> None:
    folder = prepared(tmp_path, dense_graph())
    raw = json.loads((folder / "manifest.json").read_text())
    raw["parts"][1]["feature_bytes"] = ends
    (folder / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=r"parts\[1\]: key 'feature_bytes' must be pairs of rising numbers"):
        read_manifest(folder)


def test_ranges_that_are_not_those_of_the_features(tmp_path) -> None:
    folder = prepared(tmp_path, dense_graph())
    raw = json.loads((folder / "manifest.json").read_text())
    raw["parts"][1]["feature_bytes"][0] += 8
    (folder / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="checksum is"):
        load(folder)
    with pytest.raises(InputError, match="not a part file .* its features are not where the manifest says"):
        read_structure(folder, read_manifest(folder), 1, verify=False)
