"""`dorylus_hpc.fit` and `infer`: the command line's runs from Python, and nothing beside them."""

from __future__ import annotations

import json
import os
import threading

import h5py
import jobs
import numpy as np
import pytest
import scipy.sparse as sp
from jobs import launch, write_ring
from threadpoolctl import threadpool_info

import dorylus_hpc
from dorylus_hpc import InputError, predict, prepare, train
from dorylus_hpc.engine import runner
from dorylus_hpc.graph.readers import from_arrays, read_npz

OPTIONS = {"hidden": 5, "epochs": 6, "seed": 3, "lr": 0.2, "input_dropout": 0.1}
WORDS = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a graph in it."""
    write_ring(tmp_path / "ring.npz", n=60, features=4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_memory(path="ring.npz", **changes):
    """The graph of a file, by way of SciPy and NumPy."""
    with np.load(path) as file:
        content = dict(file)
    n = len(content["y"])
    ones = np.ones(len(content["indices"]), bool)
    arguments = {
        "adjacency": sp.csr_matrix((ones, content["indices"], content["indptr"]), shape=(n, n)),
        "features": content["x"],
        "labels": content["y"].tolist(),
        "train": content["train_idx"],
        "validation": content["val_idx"],
        "test": content["test_idx"],
        "name": "ring",
    }
    return from_arrays(**{**arguments, **changes})


def weights_in(path):
    with h5py.File(path) as file:
        return {
            which: {name: tensor[()] for name, tensor in group.items()}
            for which, group in file["weights"].items()
        }


def assert_same_weights(got, wanted):
    assert {which: set(tensors) for which, tensors in got.items()} == {
        which: set(tensors) for which, tensors in wanted.items()
    }
    for which, tensors in wanted.items():
        for name, tensor in tensors.items():
            assert got[which][name].dtype == tensor.dtype
            np.testing.assert_array_equal(got[which][name], tensor)


@pytest.mark.parametrize("model", ["gcn", "sage", "gat", "gatv2"])
@pytest.mark.parametrize("goal", [{}, {"patience": 2, "lr": 1e-9}])
def test_one_graph_server_evaluates_between_epochs(folder, model, goal):
    """With memory to be saved, epochs and evaluations share row tensors, and no bit differs."""
    more = {"hidden": 4, "epochs": 7, "eval_every": 2, "intervals": 9, "threads": 2, **goal}
    found = {}
    for saves in ("off", "on"):
        result = dorylus_hpc.fit("ring.npz", run_dir=folder / saves, save_memory=saves, model=model, **more)
        keys = ("weights_sha256", "loss", "best_epoch", "epochs", "val_accuracy", "test_accuracy")
        lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
        columns = ("epoch", "loss", "train_accuracy", "val_accuracy", "test_accuracy")
        seen = [[line[name] for name in columns] for line in lines]
        found[saves] = [result.summary.get(key) for key in keys], seen
    assert found["on"] == found["off"]
    events = json.loads((folder / "on" / "trace.json").read_text())["traceEvents"]
    tasks = [event for event in events if event["ph"] == "X" and "epoch" in event["args"]]
    spans = {True: [], False: []}
    for task in tasks:
        if task["cat"] == "eval" or task["args"]["epoch"]:
            spans[task["cat"] == "eval"].append((task["ts"], task["ts"] + task["dur"], task["name"]))
    work = [span for span in spans[False] if span[2] != "WU"]
    assert spans[True] and work
    assert not any(begin < stop and start < end for begin, end, _ in spans[True] for start, stop, _ in work)


# ---- the same run, whatever the data is given as


def test_result_is_what_is_on_disk(folder):
    result = dorylus_hpc.fit(in_memory(), **OPTIONS)
    assert result.run_dir.parts == ("runs", "ring")
    assert json.loads((result.run_dir / "summary.json").read_text()) == result.summary
    assert_same_weights(result.weights, weights_in(result.run_dir / "checkpoint.h5"))
    assert {name: tensor.shape for name, tensor in result.weights["best"].items()} == {
        "W1": (4, 5),
        "b1": (5,),
        "W2": (5, 2),
        "b2": (2,),
    }
    names = {path.name for path in result.run_dir.iterdir()}
    assert names == {"summary.json", "metrics.jsonl", "checkpoint.h5", "config.toml", "trace.json", "graph"}
    assert {path.name for path in folder.iterdir()} == {"ring.npz", "runs"}


def test_every_way_is_the_command_lines_run_bit_for_bit(folder):
    assert train.main(["--data", "ring.npz", "--run-dir", "command", *WORDS]) == 0
    wanted = json.loads((folder / "command" / "summary.json").read_text())
    assert prepare.main(["ring.npz", "-o", "parts", "--parts", "1"]) == 0
    ways = {
        "name of a file": "ring.npz",
        "path": folder / "ring.npz",
        "prepared folder": "parts",
        "graph read": read_npz("ring.npz"),
        "graph of arrays": in_memory(),
        "COO": in_memory(adjacency=sp.coo_array(in_memory().edges.matrix(60))),
        "masks": in_memory(train=np.isin(np.arange(60), np.arange(0, 60, 3))),
    }
    for name, data in ways.items():
        result = dorylus_hpc.fit(data, run_dir=folder / name, **OPTIONS)
        assert result.run_dir == folder / name
        for key in ("weights_sha256", "loss", "best_epoch", "test_accuracy", "val_accuracy"):
            assert result.summary[key] == wanted[key], (name, key)
        assert_same_weights(result.weights, weights_in("command/checkpoint.h5"))
    other = dorylus_hpc.fit("parts", **OPTIONS | {"seed": 4})
    assert other.summary["weights_sha256"] != wanted["weights_sha256"]


def test_data_set_by_name(folder):
    result = dorylus_hpc.fit("digits", epochs=1, hidden=2)
    assert result.run_dir.parts == ("runs", "digits")
    assert result.summary["graph"]["vertices"] == 1797
    assert len(dorylus_hpc.infer(result.run_dir).ids) == 1797


_ON_RANKS = """
import json, sys
from dorylus_hpc import InputError, fit, infer, train
from dorylus_hpc.comm.launch import start_mpi
from dorylus_hpc.graph.readers import read_npz
comm = start_mpi().COMM_WORLD
options = json.loads(sys.argv[1])
graph = read_npz("ring.npz") if comm.rank == 0 else None  # it counts on rank 0 only
result = fit(graph, comm=comm, servers=1, run_dir="fitted", **options)
assert train.main(["--data", "ring.npz", "--servers", "1", "--run-dir", "command", *sys.argv[2:]]) == 0
command = json.load(open("command/summary.json"))
assert result.summary["weights_sha256"] == command["weights_sha256"]
digests = comm.allgather([tensor.tobytes() for tensor in result.weights["best"].values()])
assert len(set(map(tuple, digests))) == 1  # the same on every rank
group = comm.Create(comm.Get_group().Incl([2, 1]))  # in another order
if comm.rank:
    smaller = fit(graph if group.rank else read_npz("ring.npz"), comm=group, run_dir="two", **options)
    assert smaller.summary["ranks"]["graph_servers"] == 2
predictions = infer("fitted", comm=group) if comm.rank else None
assert (predictions is None) == (comm.rank != 2)  # rank 0 of the group
for wrong in ({"comm": comm, "epoch": 3}, {"comm": comm, "epochs": comm.rank}, {"comm": comm, "servers": 3}):
    try:
        fit("ring.npz", run_dir="wrong", **wrong)
    except InputError as error:
        assert len(set(comm.allgather(str(error)))) == 1
    else:
        raise AssertionError(f"{wrong} was accepted")
for wrong in ({"run_dir": "nowhere"}, {"run_dir": "fitted", "weights": "first"}):
    try:
        infer(comm=comm, **wrong)
    except InputError as error:
        assert len(set(comm.allgather(str(error)))) == 1
    else:
        raise AssertionError(f"{wrong} was accepted")
if comm.rank == 0:
    print("all was well")
"""


def test_on_three_ranks(folder):
    """Bit-equal to the command line; on groups of ranks; and wrong input is everybody's exception."""
    ended = launch(3, ["-c", _ON_RANKS, json.dumps(OPTIONS), *WORDS], cwd=folder)
    assert (ended.status, ended.lines) == (0, []), ended.err
    assert ended.out.endswith("all was well\n")


# ---- folders of results


def test_folders_are_numbered(folder):
    graph = in_memory()
    (folder / "runs" / "ring-3").mkdir(parents=True)
    made = [dorylus_hpc.fit(graph, epochs=1).run_dir.name for _ in range(3)]
    assert made == ["ring", "ring-2", "ring-4"]
    assert dorylus_hpc.fit("ring.npz", epochs=1).run_dir.name == "ring-5"
    assert dorylus_hpc.fit(in_memory(name="a/b c"), epochs=1).run_dir.name == "b c"
    assert dorylus_hpc.fit(in_memory(name=".."), epochs=1).run_dir.parent.name == "runs"
    assert {path.name for path in folder.iterdir()} == {"ring.npz", "runs"}


def test_wrong_input_makes_no_folder(folder):
    for data, options in (
        ("nope.npz", {}),
        ("ring.npz", {"epochs": 0}),
        ("ring.npz", {"heads": 3}),
        (None, {}),
    ):
        with pytest.raises(InputError):
            dorylus_hpc.fit(data, **options)
    assert [path.name for path in folder.iterdir()] == ["ring.npz"]


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epoch": 3}, "unknown option 'epoch': did you mean 'epochs'?"),
        ({"input-dropout": 0.5}, "unknown option 'input-dropout': did you mean 'input_dropout'?"),
        ({"epochs": "3"}, "--epochs wants a whole number, got '3'"),
        ({"heads": 3}, "--heads is for --model gat or gatv2, not gcn"),
        ({"resume": "auto"}, "--resume is not available in this version"),
        ({"weight_update": "interval"}, "--weight-update interval is for --mode async, not pipe"),
        ({"model": "gatv2", "mode": "async"}, "--model gatv2 is for --mode pipe or nopipe"),
        ({"switch_margin": 0.1}, "--switch-margin is for --mode async with a --target-accuracy"),
        ({"run_dir": "ring.npz"}, "--run-dir ring.npz: cannot be made or written"),
    ],
)
def test_wrong_options(folder, options, said):
    with pytest.raises(InputError) as caught:
        dorylus_hpc.fit("ring.npz", **options)
    assert str(caught.value).startswith(said)


def test_numpy_numbers_are_numbers(folder):
    plain = dorylus_hpc.fit("ring.npz", **OPTIONS)
    numbers = OPTIONS | {"hidden": np.int32(5), "epochs": np.int64(6), "lr": np.float64(0.2)}
    result = dorylus_hpc.fit("ring.npz", **numbers)
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert json.loads((result.run_dir / "summary.json").read_text())["config"]["hidden"] == 5


def test_any_other_exception_passes(folder, monkeypatch):
    """On one rank nobody waits: the caller may catch it, and go on."""

    def fails(*arguments, **options):
        raise KeyError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(runner.Runner, "task", fails)
        with pytest.raises(KeyError, match="gone"):
            dorylus_hpc.fit("ring.npz", threads=3, run_dir="run", **OPTIONS)
    assert not (folder / "run" / "summary.json").exists()
    assert dorylus_hpc.fit("ring.npz", run_dir="run", **OPTIONS).summary["epochs"] == 6


# ---- prediction


def test_infer_is_the_command_lines_prediction(folder):
    run_dir = dorylus_hpc.fit("ring.npz", run_dir="run", **OPTIONS).run_dir
    for which in ("best", "last"):
        words = ["--run-dir", "run", "--data", "ring.npz", "--weights", which, "-o", f"{which}.npz"]
        assert predict.main(words) == 0
        with np.load(f"{which}.npz") as file:
            for data in (None, "ring.npz", in_memory()):
                answer = dorylus_hpc.infer(run_dir, data, weights=which)
                for name in ("ids", "classes", "probabilities"):
                    np.testing.assert_array_equal(getattr(answer, name), file[name])


def test_infer_takes_the_data_of_the_run(folder):
    """The folder it was trained on, or the graph that was prepared for it."""
    assert prepare.main(["ring.npz", "-o", "parts", "--parts", "3"]) == 0
    prepared = dorylus_hpc.fit("parts", run_dir="one", **OPTIONS)
    texts = [f"vertex-{k}" for k in range(60)]
    given = dorylus_hpc.fit(in_memory(ids=texts), run_dir="two", **OPTIONS)
    assert dorylus_hpc.infer(prepared.run_dir).ids.tolist() == list(range(60))
    assert dorylus_hpc.infer(given.run_dir).ids.tolist() == texts


def test_infer_refuses(folder):
    dorylus_hpc.fit("ring.npz", run_dir="run", **OPTIONS)
    write_ring(folder / "wider.npz", features=7)
    for arguments, said in (
        (("nowhere",), "nowhere/checkpoint.h5: no such file"),
        (("run", "nope.npz"), "nope.npz: no such file"),
        (("run", "wider.npz"), "7 features a vertex, but the model was trained with 4"),
    ):
        with pytest.raises(InputError, match=said):
            dorylus_hpc.infer(*arguments)
    with pytest.raises(InputError, match="weights must be best or last, got 'first'"):
        dorylus_hpc.infer("run", weights="first")
    with h5py.File("run/checkpoint.h5", "a") as file:
        file.attrs["config"] = json.dumps(json.loads(file.attrs["config"]) | {"colour": 1})
    with pytest.raises(InputError, match="run/checkpoint.h5: written by another version: unknown option"):
        dorylus_hpc.infer("run")


# ---- nothing beside


def test_fit_leaves_everything_else_as_it_was(folder):
    """Arrays of the caller, environment, threads, limits of BLAS."""
    graph = in_memory()
    arrays = {name: value for name, value in vars(graph).items() if isinstance(value, np.ndarray)}
    before = {name: value.copy() for name, value in arrays.items()}
    environment, threads = dict(os.environ), threading.active_count()
    limits = [(library["filepath"], library["num_threads"]) for library in threadpool_info()]
    dorylus_hpc.infer(dorylus_hpc.fit(graph, threads=3, intervals=4, **OPTIONS).run_dir, graph)
    for name, value in before.items():
        np.testing.assert_array_equal(arrays[name], value)
    assert (dict(os.environ), threading.active_count()) == (environment, threads)
    assert [(library["filepath"], library["num_threads"]) for library in threadpool_info()] == limits


def test_quiet_unless_progress_is_asked_for(folder, capfd):
    dorylus_hpc.infer(dorylus_hpc.fit("ring.npz", **OPTIONS).run_dir)
    assert capfd.readouterr() == ("", "")
    dorylus_hpc.fit("ring.npz", progress=True, **OPTIONS)
    out, err = capfd.readouterr()
    assert "ring: 60 vertices" in out and "epoch 6/6 " in out and err == ""


_IMPORTS = """
import os, sys, threading, warnings
before = dict(os.environ), list(warnings.filters), os.getcwd(), len(os.listdir("/proc/self/task"))
import dorylus_hpc
assert set(dorylus_hpc.__all__) >= {"fit", "infer", "InputError"}
assert "numpy" not in sys.modules and "mpi4py" not in sys.modules
assert (dict(os.environ), list(warnings.filters), os.getcwd(), len(os.listdir("/proc/self/task"))) == before
import dorylus_hpc.api, dorylus_hpc.predict, dorylus_hpc.prepare, dorylus_hpc.train
assert "mpi4py" not in sys.modules
assert (dict(os.environ), os.getcwd(), threading.active_count()) == (before[0], before[2], 1)
assert len(os.listdir("/proc/self/task")) == before[3]  # BLAS, too, has one thread here
assert callable(dorylus_hpc.fit) and callable(dorylus_hpc.infer)
assert "mpi4py" not in sys.modules
try:
    dorylus_hpc.nothing
except AttributeError as error:
    assert "'dorylus_hpc' has no attribute 'nothing'" in str(error)
"""


def test_importing_starts_nothing(folder):
    one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "MKL", "OMP")}
    ended = launch(0, ["-c", _IMPORTS], cwd=folder, env=one_thread)
    assert (ended.status, ended.out, ended.err) == (0, "", "")


def test_the_command_line_needs_no_script(folder):
    """The modules are programs; as modules they do nothing."""
    ended = launch(
        0, ["-c", "import dorylus_hpc.train, dorylus_hpc.predict, dorylus_hpc.prepare"], cwd=folder
    )
    assert (ended.status, ended.out, ended.err) == (0, "", "")
    ended = jobs.train(0, "--data", "ring.npz", "--epochs", 1, cwd=folder)
    assert (ended.status, ended.err) == (0, "")
    assert (folder / "runs" / "ring" / "summary.json").is_file()
