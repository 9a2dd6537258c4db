"""`python -m dorylus_hpc.predict`: the same rows in every format, under the user's own ids, on any ranks."""

from __future__ import annotations

import csv
import shlex
import shutil
import sys

import jobs
import numpy as np
import pytest
from jobs import run_table, write_ring
from pyarrow import parquet

from dorylus_hpc import predict, prepare, train
from dorylus_hpc.engine.inference import probabilities as probabilities_of
from dorylus_hpc.errors import InputError
from dorylus_hpc.report.predictions import write_predictions

PROGRAM = "python -m dorylus_hpc.predict"
N = 60
RNG = np.random.default_rng(4)
IDS = {
    "numbers": RNG.permutation(2**40 - 977 * np.arange(N)),  # beyond 32 bits, in no order
    "texts": RNG.permutation([f'no. {k}, "the {k}th"' if k % 2 else f"Straße-中-{k}" for k in range(N)]),
}
OPTIONS = ["--hidden", "5", "--epochs", "12", "--seed", "3", "--lr", "0.3", "--servers", "1"]


def words(command):
    """Return a case from a command line."""
    program, *arguments = shlex.split(command)
    return program, arguments


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with graphs, in files and prepared, for good and bad predictions."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, ids in IDS.items():
        write_ring(folder / f"{name}.npz", n=N, features=4, ids=ids)
        for parts, kind in ((4, "hash"), (2, "metis")):
            output = folder / f"{name}{parts}"
            options = ["--parts", str(parts), "--partitioner", kind]
            assert prepare.main([str(folder / f"{name}.npz"), "-o", str(output), *options]) == 0
    write_ring(folder / "wider.npz", n=N, features=5)
    write_ring(folder / "longer.npz", n=2 * N, features=4)
    write_ring(folder / "nan.npz", n=N, features=4, x=np.full((N, 4), np.nan))
    shutil.copytree(folder / "numbers4", folder / "flipped")
    path = folder / "flipped" / "part-00003.h5"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for name in ("empty", "garbage", "folder.csv"):
        (folder / name).mkdir()
    (folder / "garbage" / "checkpoint.h5").write_text("weights")
    (folder / "file.txt").write_text("")
    return folder


RIGHT = {
    "train numbers": ("train", ["--data", "numbers4", "--run-dir", "run numbers", *OPTIONS]),
    "train texts": ("train", ["--data", "texts4", "--run-dir", "run texts", *OPTIONS]),
    **{
        f"{kind} {name}": words(f"predict --run-dir 'run {name}' --data {name}4 -o {name}.{kind}")
        for name in IDS
        for kind in ("npy.npz", "csv", "parquet")
    },
    "last": words("predict --run-dir 'run numbers' --data numbers4 --weights last -o last.npz"),
    "on the fly": words("predict --run-dir 'run numbers' --data numbers.npz -o on_the_fly.npz"),
    "another graph": words("predict --run-dir 'run numbers' --data longer.npz -o longer.out.npz"),
}
# By name: (arguments, what the line says, ranks it is wrong on).
ANY, SEVERAL = (1, 3), (3,)
GOOD = "--run-dir 'run numbers' --data numbers4"
WRONG = {
    "no run-dir": ("--run-dir nowhere --data numbers4 -o p.csv", "nowhere/checkpoint.h5: no such file", ANY),
    "no checkpoint": ("--run-dir empty --data numbers4 -o p.csv", "empty/checkpoint.h5: no such file", ANY),
    "long run-dir": (f"--run-dir {300 * 'x'} --data numbers4 -o p.csv", "be read: File name too long", ANY),
    "long folder": (f"{GOOD} -o {300 * 'x'}/p.csv", "does not exist", ANY),
    "run-dir a file": ("--run-dir file.txt --data numbers4 -o p.csv", "checkpoint.h5: no such file", ANY),
    "garbage": ("--run-dir garbage --data numbers4 -o p.csv", "checkpoint.h5: not a checkpoint, or", ANY),
    "ending": (f"{GOOD} -o p.txt", "-o p.txt: the ending must be one of .npz, .csv, .parquet", ANY),
    "no ending": (f"{GOOD} -o p", "-o p: the ending must be one of", ANY),
    "no folder": (f"{GOOD} -o nowhere/p.csv", "-o nowhere/p.csv: the folder nowhere does not exist", ANY),
    "a folder": (f"{GOOD} -o folder.csv", "-o folder.csv: cannot be written", ANY),
    "features": ("--run-dir 'run numbers' --data wider.npz -o p.csv", "5 features a vertex, but the", ANY),
    "no data": ("--run-dir 'run numbers' --data nope.npz -o p.csv", "nope.npz: no such file", ANY),
    "nan": ("--run-dir 'run numbers' --data nan.npz -o p.csv", "nan.npz: x", ANY),
    "damage": ("--run-dir 'run numbers' --data flipped -o p.csv", "part-00003.h5: checksum is", ANY),
    "few parts": ("--run-dir 'run numbers' --data numbers2 -o p.csv", "has 2 parts, too few for 3", SEVERAL),
    "weights": (f"{GOOD} --weights first -o p.csv", "argument --weights: invalid choice: 'first'", ANY),
    "no output": (GOOD, "the following arguments are required: -o/--output", ANY),
    "nothing": ("", "the following arguments are required: --run-dir, --data, -o/--output", ANY),
    "unknown": (f"{GOOD} -o p.csv --threads 3", "unrecognized arguments: --threads 3", ANY),
}


@pytest.fixture(scope="module")
def ended(inputs):
    """What 3 ranks did: right commands, wrong ones, and help."""
    wrong = {name: ("predict", shlex.split(row[0])) for name, row in WRONG.items()}
    table = {**RIGHT, **wrong, "help": ("predict", ["--help"])}
    return run_table(3, table, inputs)


@pytest.fixture(scope="module")
def right(inputs, ended):
    """The folder, after all right commands."""
    for name in RIGHT:
        ranks = ended[name]
        assert [rank.status for rank in ranks] == [0, 0, 0], ranks[0].err
        assert "".join(rank.err for rank in ranks) + "".join(rank.out for rank in ranks[1:]) == "", name
    return inputs


# ---- predictions


def arrays(path):
    """Return the ids, classes and probabilities in a file, whatever its kind."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            assert set(file) == {"ids", "classes", "probabilities"}
            return file["ids"], file["classes"], file["probabilities"]
    if path.suffix == ".parquet":
        columns = parquet.read_table(path).to_pydict()
    else:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file)
        columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    names = list(columns)
    assert names == ["id", "class", *(f"p{k}" for k in range(len(names) - 2))]
    probabilities = np.array([columns[name] for name in names[2:]], dtype=np.float32).T
    return np.array(columns["id"]), np.array(columns["class"], dtype=np.int32), probabilities


@pytest.mark.parametrize("name", IDS)
def test_formats_agree_under_the_users_ids_in_input_order(right, name):
    ids, classes, probabilities = arrays(right / f"{name}.npy.npz")
    assert (ids == IDS[name]).all() and ids.dtype == IDS[name].dtype
    assert (classes.dtype, probabilities.dtype) == (np.int32, np.float32)
    assert probabilities.shape == (N, 2)
    assert np.abs(probabilities.sum(axis=1, dtype=np.float64) - 1).max() < 1e-6
    assert (classes == probabilities.argmax(axis=1)).all() and len(set(classes.tolist())) == 2

    other_ids, other_classes, other_probabilities = arrays(right / f"{name}.parquet")
    assert (other_ids == ids).all() and (other_classes == classes).all()
    assert (other_probabilities == probabilities).all()

    other_ids, other_classes, other_probabilities = arrays(right / f"{name}.csv")
    assert other_ids.tolist() == [str(one) for one in ids.tolist()]
    assert (other_classes == classes).all()
    np.testing.assert_allclose(other_probabilities, probabilities, rtol=5e-6)


def test_ids_do_not_change_predictions(right):
    """The two graphs differ in their ids only."""
    numbers, texts = (arrays(right / f"{name}.npy.npz") for name in IDS)
    assert (numbers[2] == texts[2]).all()


def test_predictions_belong_to_their_vertices(right):
    """The ring's halves are its classes: a permuted table would not follow them."""
    classes = arrays(right / "numbers.npy.npz")[1]
    assert (classes == np.arange(N) * 2 // N).mean() > 0.8


def test_best_and_last_weights_differ(right, ended):
    said = ended["train numbers"][0].out
    assert "(after epoch 12)" not in said  # or this test would be of no use
    best, last = (arrays(right / name) for name in ("numbers.npy.npz", "last.npz"))
    assert (best[0] == last[0]).all() and not (best[2] == last[2]).any()


def test_another_partitioning_agrees(right):
    prepared, fly = (arrays(right / name) for name in ("numbers.npy.npz", "on_the_fly.npz"))
    assert (prepared[0] == fly[0]).all()
    np.testing.assert_allclose(fly[2], prepared[2], atol=1e-6)


def test_another_graph(right):
    ids, _, probabilities = arrays(right / "longer.out.npz")
    assert ids.tolist() == list(range(2 * N)) and probabilities.shape == (2 * N, 2)
    assert np.isfinite(probabilities).all()


def test_one_rank_agrees_and_says_where_the_file_is(right, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(right)
    output = tmp_path / "alone.npz"
    _, arguments = words(f"predict {GOOD} -o {output}")
    assert predict.main(arguments) == 0
    assert capfd.readouterr() == (f"{N} predictions are in {output}\n", "")
    for alone, ranks in zip(arrays(output), arrays(right / "numbers.npy.npz"), strict=True):
        assert (alone == ranks).all()


def test_the_command_that_training_prints(right, ended, tmp_path):
    """It works as it stands, also with a blank in a name."""
    said = ended["train texts"][0].out
    command = shlex.split(said.split("predict with: ")[1].splitlines()[0])
    assert command[1:3] == ["-m", "dorylus_hpc.predict"] and command[-2:] == ["-o", "predictions.csv"]
    command[-1] = str(tmp_path / "predictions.csv")
    assert jobs.launch(0, command[1:], cwd=right).status == 0
    assert (tmp_path / "predictions.csv").read_text() == (right / "texts.csv").read_text()


# ---- wrong input


@pytest.mark.parametrize("name", [name for name, row in WRONG.items() if 1 in row[2]])
def test_wrong_input_alone(right, monkeypatch, capfd, name):
    monkeypatch.chdir(right)
    assert predict.main(shlex.split(WRONG[name][0])) == 2
    out, line = capfd.readouterr()
    assert out == ""
    assert line.startswith(f"{PROGRAM}: error: ") and WRONG[name][1] in line
    assert line.count("\n") == 1 and line.endswith("\n")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_on_3_ranks(right, ended, name):
    assert name in ended, "the job ended, or hung, here or before"
    ranks = ended[name]
    assert [rank.status for rank in ranks] == [2, 2, 2]
    line = ranks[0].err
    assert line.startswith(f"{PROGRAM}: error: ") and WRONG[name][1] in line
    assert line.count("\n") == 1 and line.endswith("\n")
    assert ranks[0].out + "".join(rank.err + rank.out for rank in ranks[1:]) == ""
    assert max(rank.seconds for rank in ranks) < 10
    assert not (right / "p.csv").exists()


def test_help_is_printed_once(ended):
    ranks = ended["help"]
    assert [rank.status for rank in ranks] == [0, 0, 0]
    assert ranks[0].out.startswith(f"usage: {PROGRAM} ") and "None" not in ranks[0].out
    assert "".join(rank.err for rank in ranks) + "".join(rank.out for rank in ranks[1:]) == ""
    for option in ("--run-dir", "--data", "--weights {best,last}", "-o FILE"):
        assert (
            f"  {option} " in ranks[0].out
            or f"  {option}\n" in ranks[0].out
            or f"  {option}," in ranks[0].out
        )


def test_wrong_input_through_the_launcher(right):
    ended = jobs.predict(3, "--run-dir", "empty", "--data", "numbers4", "-o", "p.csv", cwd=right)
    assert (ended.status, ended.out, len(ended.lines)) == (2, "", 1)
    assert ended.lines[0].startswith(f"{PROGRAM}: error: empty/checkpoint.h5: no such file")


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_alone_under_a_launcher_of_another_mpi(right, monkeypatch, capfd, variable):
    monkeypatch.chdir(right)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "2")
    assert predict.main(shlex.split(f"{GOOD} -o p.csv")) == 2
    assert "started 2 processes" in capfd.readouterr().err


def test_parquet_without_its_package(right, monkeypatch, capfd):
    monkeypatch.chdir(right)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert predict.main(shlex.split(f"{GOOD} -o p.parquet")) == 2
    line = capfd.readouterr().err
    assert "-o p.parquet: parquet needs pyarrow: pip install 'dorylus_hpc[parquet]'" in line
    assert line.count("\n") == 1


# ---- files


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    ids, classes = np.arange(3), np.zeros(3, np.int32)
    probabilities = np.full((3, 2), 0.5, np.float32)
    path = tmp_path / "p.csv"
    path.write_text("old")
    with pytest.raises(ValueError):
        write_predictions(path, ids, classes[:2], probabilities)
    assert path.read_text() == "old"
    write_predictions(path, ids, classes, probabilities)
    assert path.read_bytes() == b"id,class,p0,p1\n0,0,0.5,0.5\n1,0,0.5,0.5\n2,0,0.5,0.5\n"
    with pytest.raises(InputError):
        write_predictions(tmp_path / "p.txt", ids, classes, probabilities)
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]


def test_a_run_of_one_rank_is_predicted_by_three(right, tmp_path, monkeypatch):
    """The other way round: trained alone, on the same parts, it is the same model."""
    monkeypatch.chdir(right)
    assert train.main(["--data", "numbers4", "--run-dir", str(tmp_path), *OPTIONS]) == 0
    assert (
        predict.main(["--run-dir", str(tmp_path), "--data", "numbers4", "-o", str(tmp_path / "p.npz")]) == 0
    )
    assert (arrays(tmp_path / "p.npz")[2] == arrays(right / "numbers.npy.npz")[2]).all()


def test_several_classes_a_vertex_in_every_format(tmp_path):
    ids, probabilities = np.array(["a", "b", "c"]), np.array([[0.75, 0.5], [1, 0.875], [0, 0]], np.float32)
    classes = (probabilities > 0.5).astype(np.uint8)
    for kind in ("npz", "csv", "parquet"):
        write_predictions(tmp_path / f"p.{kind}", ids, classes, probabilities)
    with np.load(tmp_path / "p.npz") as file:
        assert file["classes"].dtype == np.uint8 and file["classes"].tolist() == [[1, 0], [1, 1], [0, 0]]
        assert (file["probabilities"] == probabilities).all()
    assert (tmp_path / "p.csv").read_text() == ("id,classes,p0,p1\na,0,0.75,0.5\nb,0 1,1,0.875\nc,,0,0\n")
    assert parquet.read_table(tmp_path / "p.parquet").to_pydict() == {
        "id": ["a", "b", "c"], "classes": [[0], [0, 1], []], "p0": [0.75, 1, 0], "p1": [0.5, 0.875, 0],
    }  # fmt: skip


def test_an_answer_is_not_rounded_away():
    """Probabilities are float32: one just above 1/2 stays above it, as its logit is above 0."""
    logits = np.array([[1e-12, 0.0, -1e-12], [40.0, -40.0, 800.0], [-800.0, np.inf, -np.inf]])
    found = probabilities_of(logits, several=True)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found > 0.5, logits > 0)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-np.clip(logits, -700, 700))), rtol=2e-7, atol=1e-38)
