"""A fault anywhere ends the whole job, soon, with the rank and its traceback first, and leaves no process."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from jobs import launch, started, write_ring
from run_mpi import descendants

SOON = 5  # seconds from a fault to the end of the job

# Runs the real program, with a function of one rank made to fail in one of its calls. That rank leaves a file
# named after the moment; every rank leaves one named after its process.
_FAULTY = """
import os, signal, sys, time
rank, where, call, notes, *arguments = sys.argv[1:]
from dorylus_hpc.comm.launch import start_mpi
from dorylus_hpc.comm import blocks
from dorylus_hpc.engine import graph_server, loading, recorder, runner, weights
owner, name = {
    "load": (loading, "read_structure"),
    "epoch": (graph_server.GraphServer, "_end_epoch"),
    "task": (runner.Runner, "_run"),
    "exchange": (blocks.BlockExchange, "send"),
    "update": (weights.WeightShard, "apply"),
    "finish": (recorder.Recorder, "finish"),
    "killed": (graph_server.GraphServer, "_end_epoch"),
    "nothing": (runner.Runner, "_run"),
}[where]
original, calls = getattr(owner, name), [0]
def faulty(*args, **kwargs):
    calls[0] += 1
    if calls[0] == int(call):
        open(f"{notes}/at.{time.time()}", "w").close()
        if where == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError(f"made to fail in {where}")
    return original(*args, **kwargs)
own = start_mpi().COMM_WORLD.Get_rank()
open(f"{notes}/pid.{own}.{os.getpid()}", "w").close()
if own == int(rank):
    setattr(owner, name, faulty)
import dorylus_hpc.train
sys.exit(dorylus_hpc.train.main(arguments))
"""
_RUN = ["--hidden", 8, "--servers", 1, "--threads", 2, "--intervals", 3]
_ENDLESS = [*_RUN, "--epochs", 10**7]
_SHORT = [*_RUN, "--epochs", 3]


def faulty(tmp_path, rank, where, call=1, arguments=_ENDLESS):
    """Return the arguments of Python for a run with a fault."""
    data = ["--data", write_ring(tmp_path / "ring.npz", n=300), "--run-dir", tmp_path / "run"]
    return ["-c", _FAULTY, rank, where, call, tmp_path, *data, *arguments]


def pids(tmp_path):
    """Return the processes of the ranks, by rank."""
    names = [path.name.split(".") for path in tmp_path.glob("pid.*")]
    return {int(rank): int(pid) for _, rank, pid in names}


def assert_over(tmp_path, moment):
    """Assert that the job has ended soon after a moment, and that no rank is left."""
    assert time.time() - moment < SOON
    assert len(pids(tmp_path)) == 3
    wait_until(lambda: not any(alive(pid) for pid in pids(tmp_path).values()), SOON)
    assert not (tmp_path / "run" / "summary.json").exists()


def moment_of_fault(tmp_path):
    (path,) = tmp_path.glob("at.*")
    return float(path.name.removeprefix("at."))


def alive(pid):
    """Tell if a process is there, and not only waiting for its parent to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds):
    """Fail if a condition does not become true in time."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "not in time"
        time.sleep(0.05)


# ---- a rank that raises

FAULTS = [
    (0, "epoch", 20, _ENDLESS),  # the rank that records the run
    (1, "epoch", 20, _ENDLESS),  # another graph server
    (1, "exchange", 20, _ENDLESS),  # with messages under way
    (1, "task", 100, _ENDLESS),  # a thread of the executor
    (2, "update", 20, _ENDLESS),  # the parameter server
    (1, "load", 1, _SHORT),  # the others wait to agree
    (0, "finish", 1, _SHORT),  # the others have ended their epochs
]


@pytest.mark.parametrize(("rank", "where", "call", "arguments"), FAULTS)
def test_the_rank_that_raises_speaks_first_and_ends_the_job(tmp_path, rank, where, call, arguments):
    ended = launch(3, faulty(tmp_path, rank, where, call, arguments))
    assert_over(tmp_path, moment_of_fault(tmp_path))
    assert ended.status not in (0, 2), ended.err
    first, second, *others = ended.lines
    assert first == f"rank {rank} of 3 failed:" and second.startswith("Traceback")
    assert f"MemoryError: made to fail in {where}" in others
    assert "rank " not in "".join(line for line in others if line.endswith("failed:"))


def test_alone_the_exception_passes(tmp_path):
    """One rank has nobody to warn: the traceback is Python's own."""
    ended = launch(0, faulty(tmp_path, 0, "task", 5))
    assert ended.status == 1
    assert ended.err.startswith("Traceback ") and ended.err.count("Traceback ") == 1
    assert ended.err.endswith("MemoryError: made to fail in task\n")
    assert time.time() - moment_of_fault(tmp_path) < SOON


# ---- signals


def test_a_rank_that_is_killed_ends_the_job(tmp_path):
    ended = launch(3, faulty(tmp_path, 1, "killed", 20))
    assert ended.status != 0
    assert_over(tmp_path, moment_of_fault(tmp_path))


@contextmanager
def running(tmp_path):
    """Give a job of 3 ranks that is deep in its epochs."""
    with started(3, faulty(tmp_path, 0, "nothing", 0)) as process:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 5, 60)
        yield process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_the_job(tmp_path, number):
    with running(tmp_path) as process:
        assert set(pids(tmp_path).values()) <= set(descendants(process.pid))
        moment = time.time()
        process.send_signal(number)
        assert process.wait(4 * SOON) != 0
        assert_over(tmp_path, moment)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_signal_to_one_rank_ends_the_job(tmp_path, rank):
    with running(tmp_path) as process:
        moment = time.time()
        os.kill(pids(tmp_path)[rank], signal.SIGTERM)
        assert process.wait(4 * SOON) != 0
        assert_over(tmp_path, moment)


# ---- a loss that is no number


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_diverging_loss_says_what_to_do(tmp_path, ranks):
    data = ["--data", write_ring(tmp_path / "ring.npz"), "--run-dir", tmp_path / "run"]
    options = [*data, "--optimizer", "sgd", "--lr", 1e30]
    ended = launch(ranks, ["-W", "ignore", "-m", "dorylus_hpc.train", *options])
    assert ended.status == 1
    (told,) = [line for line in ended.lines if "DivergedError: " in line]
    assert told.endswith("try a lower --lr than 1e+30") and "the training loss is nan in epoch" in told
    losses = [
        json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses and all(loss == loss for loss in losses)
    assert not (tmp_path / "run" / "summary.json").exists()
