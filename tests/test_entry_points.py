"""The programs as a user starts them: results on disk, and one clear line for whatever is wrong."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from jobs import launch, predict, train
from pyarrow import parquet

from dorylus_hpc.config import UNAVAILABLE_OPTIONS, UNAVAILABLE_VALUES, TrainConfig
from dorylus_hpc.graph.datasets import digits
from dorylus_hpc.graph.preparation import prepare_folder

SMALL = ["--hidden", 8, "--epochs", 6, "--seed", 3]


@pytest.fixture(scope="module")
def graph():
    return digits()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, graph):
    path = tmp_path_factory.mktemp("prepared") / "digits"
    prepare_folder(graph, path, parts=2, report=lambda *words: None)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory, folder):
    """A run of 2 graph servers and 1 parameter server."""
    path = tmp_path_factory.mktemp("run") / "new" / "run"
    ended = train(3, "--data", folder, "--servers", 1, "--eval-every", 2, "--run-dir", path, *SMALL)
    assert ended.status == 0, ended.err
    return SimpleNamespace(path=path, ended=ended, summary=json.loads((path / "summary.json").read_text()))


def assert_refused(ended, message):
    """One line that says what is wrong, status 2, soon."""
    assert ended.status == 2, (ended.status, ended.err)
    assert len(ended.lines) == 1, ended.err
    assert re.search(message, ended.lines[0]), ended.lines[0]
    assert re.match(r"(python -m dorylus_hpc\.\w+|prepare): error: ", ended.lines[0])


# ------------------------------------------------------------------ what a run leaves


def test_summary_adds_up(run, folder):
    summary = run.summary
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert summary["epochs"] == len(summary["loss"]) == len(lines) == 6
    assert [line["loss"] for line in lines] == summary["loss"]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["val_accuracy"] is None for line in lines] == [False, True] * 3
    assert summary["ranks"]["graph_servers"] == 2 and summary["ranks"]["parameter_servers"] == 1
    assert len(summary["peak_rss_bytes"]) == 3 and min(summary["peak_rss_bytes"]) > 1e7
    manifest = json.loads((folder / "manifest.json").read_text())
    for key in ("vertices", "edges", "features", "classes", "ghosts", "edge_cut"):
        assert summary["graph"][key] == manifest[key]
    # Constant features: nothing of layer 1 travels. 8 < 10 columns: H1 forward and dM2 backward do.
    assert summary["ghost_bytes_per_epoch"] == 2 * manifest["ghosts"] * 8 * 4
    assert summary["task_seconds"]["GA"] > 0 and summary["task_seconds"]["WU"] > 0
    assert summary["task_seconds"]["AE"] == 0


def test_configuration_file_repeats_the_run(run, tmp_path):
    written = tomllib.loads((run.path / "config.toml").read_text())
    assert written == run.summary["config"]
    assert written["hidden"] == 8 and written["intervals"] >= 1 and written["threads"] >= 1
    # The command line wins over the file.
    ended = train(1, "--config", run.path / "config.toml", "--run-dir", tmp_path / "again", "--servers", 0)
    assert ended.status == 0, ended.err
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert again["weights_sha256"] == run.summary["weights_sha256"]
    assert again["loss"] == run.summary["loss"]


@pytest.mark.parametrize("which", ["best", "last"])
def test_predictions_give_the_accuracies_of_the_summary(run, folder, graph, tmp_path, which):
    ended = predict(2, "--run-dir", run.path, "--data", folder, "--weights", which, "-o", tmp_path / "p.npz")
    assert ended.status == 0, ended.err
    table = np.load(tmp_path / "p.npz")
    assert np.array_equal(table["ids"], graph.ids)
    assert np.allclose(table["probabilities"].sum(axis=1), 1, atol=1e-6)
    assert np.array_equal(table["classes"], table["probabilities"].argmax(axis=1))
    key = {"best": "best_validation", "last": "last"}[which]
    for number, name in ((1, "train"), (2, "val"), (3, "test")):
        members = graph.split == number
        right = np.mean(table["classes"][members] == graph.labels[members])
        assert run.summary[f"{name}_accuracy"][key] == pytest.approx(right, abs=1e-12)


def test_predictions_are_the_same_in_every_format_and_on_any_ranks(run, folder, tmp_path):
    for ranks, name in ((0, "p.npz"), (2, "p.csv"), (1, "p.parquet")):
        ended = predict(ranks, "--run-dir", run.path, "--data", folder, "-o", tmp_path / name)
        assert ended.status == 0, ended.err
    table = np.load(tmp_path / "p.npz")
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = parquet.read_table(tmp_path / "p.parquet").to_pydict()
    assert [int(row["id"]) for row in rows] == columns["id"] == table["ids"].tolist()
    assert [int(row["class"]) for row in rows] == columns["class"] == table["classes"].tolist()
    for k in range(10):
        assert columns[f"p{k}"] == table["probabilities"][:, k].tolist()
        written = np.array([float(row[f"p{k}"]) for row in rows])
        assert np.allclose(written, table["probabilities"][:, k], rtol=1e-5, atol=0)


def test_predictions_carry_the_users_own_ids_in_the_order_of_the_input(run, graph, tmp_path):
    import dorylus_hpc
    from dorylus_hpc.graph.data import GraphData

    names = np.array([f"vertex-{(7919 * k) % graph.n:05d}" for k in range(graph.n)])
    named = GraphData(**{**vars(graph), "ids": names})
    result = dorylus_hpc.fit(named, run_dir=tmp_path / "named", hidden=8, epochs=6, seed=3)
    predictions = dorylus_hpc.infer(tmp_path / "named", named)
    assert np.array_equal(predictions.ids, names)
    plain = dorylus_hpc.infer(run.path, "digits")
    assert np.allclose(plain.probabilities, predictions.probabilities, atol=1e-4)
    assert result.summary["loss"] == pytest.approx(run.summary["loss"], rel=1e-5)


def test_fit_is_the_command_lines_run(run, folder, tmp_path):
    import dorylus_hpc

    result = dorylus_hpc.fit(folder, run_dir=tmp_path / "fit", hidden=8, epochs=6, seed=3, eval_every=2)
    assert result.summary["weights_sha256"] == run.summary["weights_sha256"]
    assert result.summary["test_accuracy"] == run.summary["test_accuracy"]
    with h5py.File(run.path / "checkpoint.h5") as file:
        for which, tensors in result.weights.items():
            assert {name: tensor.shape for name, tensor in tensors.items()} == {
                "W1": (64, 8),
                "b1": (8,),
                "W2": (8, 10),
                "b2": (10,),
            }
            for name, tensor in tensors.items():
                assert np.array_equal(file[f"weights/{which}/{name}"][()], tensor)


def test_folders_of_results_are_numbered_and_wrong_data_makes_none(tmp_path):
    for _ in range(2):
        ended = train(0, "--data", "digits", "--epochs", 1, "--hidden", 2, cwd=tmp_path)
        assert ended.status == 0, ended.err
    assert_refused(train(0, "--data", "digts", cwd=tmp_path), "digts")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits", "digits-2"]


def test_without_dropout_the_training_forward_gives_the_accuracies(folder, tmp_path):
    import dorylus_hpc

    options = {"hidden": 8, "epochs": 4, "seed": 3, "dropout": 0.0}
    result = dorylus_hpc.fit(folder, run_dir=tmp_path / "run", **options)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shorter = dorylus_hpc.fit(folder, run_dir=tmp_path / "short", **options | {"epochs": 2})
    assert lines[2]["test_accuracy"] == shorter.summary["test_accuracy"]["last"]  # two updates behind both
    assert result.summary["task_seconds"]["eval"] < sum(result.summary["task_seconds"].values()) / 2


def test_help_is_printed_once_and_names_every_option():
    ended = train(3, "--help")
    assert ended.status == 0 and ended.out.count("usage:") == 1
    for name in TrainConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')} " in ended.out, name


def test_importing_starts_nothing():
    code = (
        "import os, sys, threading; before = dict(os.environ); import dorylus_hpc, dorylus_hpc.errors\n"
        "assert not [m for m in sys.modules if m.startswith('mpi4py')], 'mpi4py'\n"
        "assert dict(os.environ) == before and threading.active_count() == 1"
    )
    ended = launch(0, ["-c", code])
    assert ended.status == 0, ended.err


# ------------------------------------------------------------------ wrong input


def npz(path, graph, **changes):
    """Write the layout of a graph file, some of it changed; None leaves a key out."""
    arrays = {
        "indptr": graph.indptr,
        "indices": graph.indices,
        "x": graph.features,
        "y": graph.labels.astype(np.int64),
        **{
            f"{name}_idx": np.flatnonzero(graph.split == k)
            for k, name in ((1, "train"), (2, "val"), (3, "test"))
        },
    }
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


def changed(array, position, value):
    array = array.copy()
    array.flat[position] = value
    return array


WRONG_FILES = {
    "layout": (lambda g: {"indptr": g.indptr[:-1]}, "indptr"),
    "missing key": (lambda g: {"y": None}, "'y' is missing"),
    "label": (lambda g: {"y": changed(g.labels.astype(np.int64), 5, 10**6)}, "label 1000000"),
    "feature": (lambda g: {"x": changed(g.features, 64 * 3 + 2, np.nan)}, "vertex 3, column 2: nan"),
    "overlap": (lambda g: {"val_idx": np.flatnonzero(g.split != 3)}, "must not overlap"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_wrong_files(name, graph, tmp_path):
    change, message = WRONG_FILES[name]
    path = npz(tmp_path / "graph.npz", graph, **change(graph))
    ended = train(2, "--data", path, "--run-dir", tmp_path / "run")
    assert_refused(ended, message)
    assert "graph.npz" in ended.lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere.npz"], "nowhere.npz"),
        ([], "--data is missing"),
        (["--data", "digits", "--hiden", "3"], "--hiden"),
        (["--data", "digits", "--hidden", "three"], "--hidden"),
        (["--data", "digits", "--dropout", "1"], r"--dropout must be in \[0, 1\), got 1.0"),
        (["--data", "digits", "--lr", "nan"], "--lr"),
        (["--data", "digits", "--epochs", "0"], "--epochs"),
        (["--data", "digits", "--servers", "3"], "mpirun -n 4"),
        (["--data", "digits", "--config", "nowhere.toml"], "nowhere.toml"),
        (["--data", "digits", "--run-dir", "/dev/null/run"], "--run-dir /dev/null/run"),
    ],
)
def test_wrong_usage_on_three_ranks(arguments, message):
    assert_refused(train(3, *arguments), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hiden = 3", "unknown option 'hiden': did you mean 'hidden'"),
        ("hidden = 'a'", "--hidden wants a whole number, got 'a'"),
        ("hidden = true", "--hidden wants a whole number, got True"),
        ("staleness = 1", "--staleness is not available in this version"),
        ("hidden = ", "not valid TOML"),
    ],
)
def test_wrong_configuration_files(text, message, tmp_path):
    (tmp_path / "config.toml").write_text(text)
    assert_refused(train(0, "--data", "digits", "--config", tmp_path / "config.toml"), message)


def test_more_ranks_than_parts_prints_the_command_that_works(folder, tmp_path):
    ended = train(4, "--data", folder, "--servers", 1, "--run-dir", tmp_path / "run", "--epochs", 1)
    assert_refused(ended, "2 parts, too few for 3 graph servers")
    command = re.search(r"run mpirun -n (\d+) python (-m dorylus_hpc.train .*), or", ended.lines[0])
    ended = launch(
        int(command[1]), [*command[2].split(), "--run-dir", tmp_path / "run", "--epochs", 1, "--hidden", 2]
    )
    assert ended.status == 0, ended.err


def test_more_parts_than_vertices(graph, tmp_path):
    tiny = tmp_path / "tiny.npz"
    np.savez(
        tiny,
        indptr=[0, 1, 2],
        indices=[1, 0],
        x=np.eye(2, dtype=np.float32),
        y=[0, 1],
        train_idx=[0],
        val_idx=[1],
        test_idx=np.empty(0, int),
    )
    assert_refused(launch(0, ["-m", "dorylus_hpc.prepare", tiny, "-o", tmp_path / "p", "--parts", 3]), "3")
    assert_refused(
        train(3, "--data", tiny, "--run-dir", tmp_path / "run"), "has 2 vertices, too few for 3 graph servers"
    )
    ended = train(2, "--data", tiny, "--run-dir", tmp_path / "run", "--epochs", 2, "--hidden", 2)
    assert ended.status == 0, ended.err


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_damaged_part_that_one_rank_sees_ends_all(ranks, graph, tmp_path):
    prepare_folder(graph, tmp_path / "p", parts=2, report=lambda *words: None)
    path = tmp_path / "p" / "part-00001.h5"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    ended = train(ranks, "--data", tmp_path / "p", "--servers", ranks - 2, "--run-dir", tmp_path / "run")
    assert_refused(ended, "part-00001.h5: checksum")


def test_wrong_predictions(run, folder, graph, tmp_path):
    asked = ["--run-dir", run.path, "--data", folder]
    assert_refused(predict(0, *asked, "-o", tmp_path / "p.txt"), "must be one of .npz, .csv, .parquet")
    assert_refused(predict(0, *asked, "-o", tmp_path / "nowhere" / "p.csv"), "does not exist")
    assert_refused(
        predict(2, "--run-dir", tmp_path, "--data", folder, "-o", tmp_path / "p.csv"),
        "checkpoint.h5: no such",
    )
    other = npz(tmp_path / "other.npz", graph, x=graph.features[:, :5])
    ended = predict(2, "--run-dir", run.path, "--data", other, "-o", tmp_path / "p.csv")
    assert_refused(ended, "5 features a vertex, but the model was trained with 64")


@pytest.mark.parametrize("name", UNAVAILABLE_OPTIONS)
def test_options_of_later_versions_are_refused_by_name(name):
    from dorylus_hpc.config import parse_train
    from dorylus_hpc.errors import InputError

    flag = "--" + name.replace("_", "-")
    for words in ([flag], [flag, "1"]):
        with pytest.raises(InputError, match=f"^{flag} is not available in this version"):
            parse_train(["--data", "digits", *words], "train")


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in UNAVAILABLE_VALUES.items() for value in values]
)
def test_values_of_later_versions_are_refused_by_name(name, value):
    from dorylus_hpc.config import parse_train
    from dorylus_hpc.errors import InputError

    with pytest.raises(InputError, match=f"^--{name} {value} is not available in this version"):
        parse_train(["--data", "digits", f"--{name}", value], "train")


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"}, "Open MPI's mpirun started 3"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "MPICH-style mpiexec started 2"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "Slurm's srun started 4"),
    ],
)
def test_the_mpirun_of_another_mpi_is_noticed(variables, launcher, tmp_path):
    for program in (["train"], ["predict", "--run-dir", "r", "-o", "p.csv"]):
        words = ["-m", f"dorylus_hpc.{program[0]}", *program[1:], "--data", "digits"]
        ended = launch(0, ["-c", _ALONE, *words], env=variables, cwd=tmp_path)
        assert_refused(ended, launcher)
        assert "each is rank 0 of 1" in ended.lines[0]
    second = {name: "1" if name.endswith(("RANK", "PROCID")) else value for name, value in variables.items()}
    ended = launch(0, ["-c", _ALONE, "-m", "dorylus_hpc.train", "--data", "digits"], env=second, cwd=tmp_path)
    assert ended.status == 2 and ended.lines == []  # one of the processes speaks


# MPI reads these variables too: it starts alone before they are set, as another MPI than theirs would.
_ALONE = """
import os, runpy, sys
from dorylus_hpc.comm.launch import start_mpi
ours = ("OMPI_COMM_WORLD", "PMI_", "SLURM_")
set_here = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(ours)}
start_mpi()
os.environ.update(set_here)
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
