"""A fault anywhere ends the whole job, soon, with the rank and its traceback first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import launch
from run_mpi import ROOT, descendants, end

# Runs the real program, with one function of one rank made to fail in its 20th call.
_FAULTY = """
import os, signal, sys
rank, where, *arguments = sys.argv[1:]
from dorylus_hpc.comm.launch import start_mpi
import dorylus_hpc.engine.runner as runner, dorylus_hpc.engine.weights as weights
owner, name = {
    "epoch": (runner.Runner, "train"),
    "task": (runner, "_run_stages"),
    "update": (weights.WeightShard, "apply"),
    "killed": (runner.Runner, "train"),
}[where]
original, calls = getattr(owner, name), [0]
def faulty(*args, **kwargs):
    calls[0] += 1
    if calls[0] == 20:
        if where == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"made to fail in {where}")
    return original(*args, **kwargs)
if start_mpi().COMM_WORLD.Get_rank() == int(rank):
    setattr(owner, name, faulty)
import dorylus_hpc.train
sys.exit(dorylus_hpc.train.main(arguments))
"""
_ENDLESS = ["--data", "digits", "--epochs", 10**7, "--servers", 1, "--threads", 2, "--intervals", 3]


@pytest.mark.parametrize(
    ("rank", "where"), [(0, "epoch"), (1, "epoch"), (1, "task"), (0, "task"), (2, "update")]
)
def test_the_rank_that_raises_speaks_first_and_ends_the_job(rank, where, tmp_path):
    ended = launch(3, ["-c", _FAULTY, rank, where, *_ENDLESS, "--run-dir", tmp_path / "run"])
    assert ended.status not in (0, 2), ended.err
    first, second = ended.err.splitlines()[:2]
    assert first == f"rank {rank} of 3 failed:" and second.startswith("Traceback")
    assert f"RuntimeError: made to fail in {where}" in ended.err
    assert not (tmp_path / "run" / "summary.json").exists()
    started = (tmp_path / "run" / "metrics.jsonl").stat().st_mtime
    assert time.time() - started < 5  # the last epoch's line was written when the fault was near


def test_a_killed_rank_ends_the_job(tmp_path):
    ended = launch(3, ["-c", _FAULTY, 1, "killed", *_ENDLESS, "--run-dir", tmp_path / "run"])
    assert ended.status != 0
    assert time.time() - (tmp_path / "run" / "metrics.jsonl").stat().st_mtime < 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_leaves_no_process(number, tmp_path):
    words = [ROOT / "mpirun.sh", "--no-setup", "-n", 3, "python", "-m", "dorylus_hpc.train", *_ENDLESS]
    environment = {**os.environ, "DORYLUS_PYTHON": sys.executable}
    process = subprocess.Popen(
        [str(word) for word in [*words, "--run-dir", tmp_path / "run"]],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 60)
        ranks = descendants(process.pid)
        assert len(ranks) >= 3
        process.send_signal(number)
        assert process.wait(20) != 0
        wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 5)
    finally:
        if process.poll() is None:
            end(process)


def wait_until(condition, seconds):
    """Fail if a condition does not become true in time."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "not in time"
        time.sleep(0.05)


def test_a_diverging_loss_says_what_to_do(tmp_path):
    words = ["--data", "digits", "--optimizer", "sgd", "--lr", 1e30, "--run-dir", tmp_path / "run"]
    ended = launch(2, ["-W", "ignore", "-m", "dorylus_hpc.train", *words])
    assert ended.status == 1
    assert (
        "DivergedError: the training loss is nan in epoch" in ended.err
        and "lower --lr than 1e+30" in ended.err
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["loss"] == line["loss"] for line in lines)
