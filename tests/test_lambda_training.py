"""Training on the local Lambda service: the numbers of the CPU back end, whatever goes wrong.

Runs of a table share one start of their ranks. What they leave is looked for at the end of a job: processes
are known by the folder for temporary files that they inherit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path

import graphs
import h5py
import numpy as np
import psutil
import pytest
from jobs import run_table, started
from own_models import EXAMPLES, write_example
from serverless import VERSION_0, assert_adds_up, other_archive

import dorylus_hpc
from dorylus_hpc.engine.recorder import Recorder
from dorylus_hpc.graph.preparation import prepare_folder
from dorylus_hpc.report.cost import Bill, Fleet, load_prices
from dorylus_hpc.serverless.controller import LambdaAccount
from dorylus_hpc.serverless.local import LocalService, LocalSettings

SOON = 10  # seconds until everything of a job has ended
EPOCHS = 3
COMMON = ["--epochs", EPOCHS, "--hidden", 8, "--intervals", 3, "--threads", 1]
LOCAL = ["--backend", "lambda-local", "--workers", 2, "--max-workers", 2]
FAULTS = [
    "--workers", 4, "--max-workers", 4, "--function-timeout", 4, "--local-faults",
    "drop=0.05,crash_before=0.08,crash_after=0.08,delay=0.1,delay_seconds=2,duplicate=0.1,throttle=0.03,seed=32",
]  # fmt: skip

# By name: the graph, options of both back ends, and of lambda-local only.
CASES = {
    "plain": ("dense", [], []),
    "deep": ("dense", ["--layers", 3, "--input-dropout", 0.2], []),
    "one layer": ("dense", ["--layers", 1, "--optimizer", "sgd"], []),
    "sparse": ("sparse", ["--input-dropout", 0.2], []),
    "streamed": ("dense", [], ["--stream-rows", 16]),
    "not fused": ("dense", [], ["--task-fusion", "off", "--rematerialisation", "off"]),
    "kept": ("dense", ["--layers", 3], ["--rematerialisation", "off"]),
    "no TLS": ("dense", [], ["--tls", "off"]),
    "several": ("several", ["--class-weights", "balanced", "--metric", "f1-macro"], ["--stream-rows", 16]),
    "auc": ("two", ["--metric", "auc", "--dropout", 0, "--class-weights", "balanced"], []),
    "norm, residual, maximum": (
        "dense",
        ["--layers", 4, "--norm", "layer", "--residual", "on", "--jumping", "max", "--optimizer", "sgd"],
        [],
    ),
    "batch norm": (
        "dense",
        ["--model", "gin", "--layers", 3, "--hidden", 6, "--norm", "batch", "--optimizer", "sgd"],
        [],
    ),
    "gat": ("dense", ["--model", "gat", "--hidden", 4, "--heads", 3, "--output-heads", 2], []),
    "gat, edges on workers": (
        "dense",
        ["--model", "gat", "--layers", 3, "--hidden", 4, "--heads", 3, "--output-heads", 2],
        ["--place", "ae=lambda", "--stream-rows", 16],
    ),
    "gatv2": ("dense", ["--model", "gatv2", "--hidden", 4, "--heads", 2], ["--stream-rows", 16]),
    "own layer": ("dense", ["--model-file", "gatedsum.py", "--layers", 3, "--input-dropout", 0.2], []),
    "own layer, streamed": ("dense", ["--model-file", "appnp.py"], ["--stream-rows", 16]),
}
ALONE = ("plain", "sparse", "streamed")  # also on one graph server
ASYNC = ["--mode", "async", "--staleness", 0]


def processes_of(folder):
    """Processes that have a folder in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and str(folder) in str(process.environ()):
                found.append(process)
        except psutil.Error:
            continue
    return found


class Jobs:
    """A folder with graphs, and one for temporary files, from which nothing may be left after a job."""

    def __init__(self, folder, temporary):
        self.folder, self.temporary = folder, temporary
        kinds = {"dense": {}, "sparse": {"sparse": True}, "several": {"several": True}, "two": {"classes": 2}}
        for name, kind in kinds.items():
            graph = graphs.directed_random(150, 900, features=24, **kind)
            prepare_folder(graph, folder / name, parts=2, report=lambda line: None)
        for name in EXAMPLES:
            write_example(name, folder)

    def words(self, graph, run_dir, *options):
        return ["--data", self.folder / graph, "--run-dir", self.folder / run_dir, *COMMON, *options]

    def run(self, ranks, table, **environment):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (environment | {"TMPDIR": str(self.temporary)}).items():
                patch.setenv(name, value)
            found = run_table(ranks, table, self.folder)
        self.assert_nothing_left()
        return found

    def assert_nothing_left(self):
        limit = time.monotonic() + SOON
        while processes_of(self.temporary) and time.monotonic() < limit:
            time.sleep(0.05)
        assert [" ".join(process.cmdline()) for process in processes_of(self.temporary)] == []
        assert list(self.temporary.glob("dorylus-*")) == []

    def summary(self, run_dir):
        return json.loads((self.folder / run_dir / "summary.json").read_text())

    def weights(self, run_dir):
        with h5py.File(self.folder / run_dir / "checkpoint.h5") as file:
            return {
                f"{which} {name}": tensor[()]
                for which, group in file["weights"].items()
                for name, tensor in group.items()
            }

    def account(self, run_dir):
        """What a run counted; it must add up."""
        counted = self.summary(run_dir)["lambda"]
        account = LambdaAccount(**counted)
        assert_adds_up(account, counted["tasks"])
        assert account.tasks > 0 and account.gb_seconds >= 0
        return account


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    temporary = Path(tempfile.mkdtemp(prefix="dl", dir="/tmp"))  # short: launchers put sockets there
    yield Jobs(tmp_path_factory.mktemp("jobs"), temporary)
    shutil.rmtree(temporary)


@pytest.fixture(scope="module")
def three_ranks(jobs):
    """Two graph servers and a parameter server: every case on both back ends, and more of the first one."""
    table = {}
    for name, (graph, options, local) in CASES.items():
        for backend, more in (("cpu", []), ("local", [*LOCAL, *local])):
            words = jobs.words(graph, f"{name} {backend}", "--servers", 1, *options, *more)
            table[f"{name} {backend}"] = ("train", words)
    for name, more in (("faults", FAULTS), ("async", ASYNC)):
        table[name] = ("train", jobs.words("dense", name, "--servers", 1, *LOCAL, *more))
    return jobs.run(3, table)


@pytest.fixture(scope="module")
def one_rank(jobs, three_ranks):
    """One graph server, and predictions."""
    table = {}
    for name in ALONE:
        graph, options, local = CASES[name]
        table[name] = ("train", jobs.words(graph, f"{name} alone", *options, *LOCAL, *local))
    for name, (graph, _, _) in CASES.items():
        for backend in ("cpu", "local"):
            run_dir, file = (jobs.folder / f"{name} {backend}{end}" for end in ("", ".npz"))
            words = ["--run-dir", run_dir, "--data", jobs.folder / graph, "--weights", "last", "-o", file]
            table[f"predict {name} {backend}"] = ("predict", words)
    return jobs.run(1, table)


def assert_well(found, names):
    for name in names:
        for ended in found[name]:
            assert (ended.status, ended.err) == (0, ""), name


# ---- the same numbers


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_the_cpu_back_end(jobs, three_ranks, one_rank, name):
    cpu, local = f"{name} cpu", f"{name} local"
    assert_well(three_ranks, [cpu, local])
    np.testing.assert_allclose(jobs.summary(local)["loss"], jobs.summary(cpu)["loss"], rtol=1e-5)
    for which in ("train", "val", "test"):
        want, got = (jobs.summary(run)["metric"][which]["last"] for run in (cpu, local))
        assert got == pytest.approx(want, abs=0.01) and 0 < got < 1
    wanted, got = jobs.weights(cpu), jobs.weights(local)
    assert wanted.keys() == got.keys()
    for tensor, want in wanted.items():
        assert np.abs(got[tensor] - want).max() <= 1e-5 * np.abs(want).max(), tensor
    assert_well(one_rank, [f"predict {cpu}", f"predict {local}"])
    with np.load(jobs.folder / f"{cpu}.npz") as want, np.load(jobs.folder / f"{local}.npz") as got:
        np.testing.assert_array_equal(got["classes"], want["classes"])
        np.testing.assert_allclose(got["probabilities"], want["probabilities"], atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_every_dense_task_went_to_a_worker(jobs, three_ranks, name):
    account = jobs.account(f"{name} local")
    assert account.invoked == account.tasks and account.broken == []
    layers = 3 if "--layers" in CASES[name][1] and name != "one layer" else 1 if name == "one layer" else 2
    passes = 2 * layers - ("--task-fusion" not in CASES[name][2])  # of training
    assert account.tasks >= 2 * 3 * EPOCHS * passes // 2
    assert account.cold_starts >= 1 and min(account.bytes_sent, account.bytes_received) > 0
    assert jobs.summary(f"{name} cpu")["lambda"]["invocations"] == 0


def test_where_attention_was_computed(jobs, three_ranks):
    """Edges go to workers where that was asked for; else an estimate says that they stay."""
    server, workers = (jobs.summary(f"{name} local") for name in ("gat", "gat, edges on workers"))
    assert (server["place"]["ae"], server["place"]["by"]) == ("server", "estimate")
    assert (workers["place"]["ae"], workers["place"]["by"]) == ("lambda", "option")
    for summary in (server, workers):
        assert summary["place"]["transfer_seconds"] > summary["place"]["server_seconds"] > 0
        assert summary["config"]["place"] == f"ae={summary['place']['ae']}"
    assert workers["task_seconds"]["AE"] > 0 and server["task_seconds"]["AE"] == 0
    assert jobs.summary("gat cpu")["place"]["by"] == "default"


def test_what_is_switched_changes_what_travels(jobs, three_ranks):
    plain, unfused = jobs.account("plain local"), jobs.account("not fused local")
    assert unfused.tasks > plain.tasks
    deep, kept = jobs.account("deep local"), jobs.account("kept local")
    assert deep.tasks == kept.tasks and deep.bytes_received < kept.bytes_received


def test_the_same_bits_in_other_runs_and_on_other_servers(jobs, three_ranks, one_rank):
    assert_well(one_rank, ALONE)
    sha = {name: jobs.summary(f"{name} local")["weights_sha256"] for name in CASES}
    for name in ALONE:
        assert jobs.summary(f"{name} alone")["weights_sha256"] == sha[name]
        assert jobs.summary(f"{name} alone")["loss"] == jobs.summary(f"{name} local")["loss"]
    assert sha["no TLS"] == sha["plain"] != sha["deep"]  # and bits are not the same for everything


def test_the_same_bits_whatever_goes_wrong(jobs, three_ranks):
    assert_well(three_ranks, ["faults"])
    assert jobs.summary("faults")["weights_sha256"] == jobs.summary("plain local")["weights_sha256"]
    account, plain = jobs.account("faults"), jobs.account("plain local")
    assert account.tasks == plain.tasks
    assert account.failures > plain.failures and account.throttles > 0 and account.timeouts > 0
    assert account.retries > 0 and account.duplicates_refused > 0


def test_async_comes_to_its_end(jobs, three_ranks):
    assert_well(three_ranks, ["async"])
    summary = jobs.summary("async")
    assert len(summary["loss"]) == EPOCHS and np.isfinite(summary["loss"]).all()
    assert summary["staleness"]["max_lead"] == 0
    account = jobs.account("async")
    assert account.invoked == account.tasks


def test_it_is_priced(jobs, three_ranks):
    cost = jobs.summary("plain local")["cost"]
    account = jobs.account("plain local")
    assert cost["lambda_requests"] >= account.invocations * 0.2e-6 * (1 - 1e-9)
    assert cost["lambda_compute"] == pytest.approx(account.gb_seconds * 1.66667e-5, rel=1e-3)
    lines = (jobs.folder / "plain local" / "metrics.jsonl").read_text().splitlines()
    spent = [json.loads(line)["total_cost"] for line in lines]
    assert spent == sorted(spent)
    assert 0 < spent[-1] <= cost["lambda_compute"] + cost["lambda_requests"]


def test_what_a_server_used_never_shrinks():
    """What is told under way is rounded, and an invocation that was counted may not be made after all."""
    recorder = Recorder(None, None, None, None, None, Bill(load_prices(), Fleet(2)), time.perf_counter())
    told = [(0, 3.5, 129), (1, 1.0, 7), (0, 3.4999999, 128), (1, 2.0, 7)]
    spent = []
    for rank, gb_seconds, invocations in told:
        recorder.usage(rank, gb_seconds, invocations)
        spent.append(recorder._spend())
    assert spent[2].lambda_compute == spent[2].lambda_requests == 0
    assert sum(cost.lambda_requests for cost in spent) == pytest.approx(136 * 0.2e-6)
    compute = [cost.lambda_compute for cost in spent]
    assert compute[0] > compute[1] == pytest.approx(compute[3]) and compute[3] > 0


# ---- nothing is left


def test_in_one_process_nothing_is_left(jobs, tmp_path):
    """A run from Python: no thread, socket, descriptor or child of it is there afterwards."""

    def left():
        process = psutil.Process()
        sockets = {(one.laddr, one.raddr) for one in process.net_connections("all")}
        return set(threading.enumerate()), sockets, process.num_fds(), len(process.children(recursive=True))

    options = {"epochs": 2, "hidden": 8, "intervals": 3, "threads": 1, "backend": "lambda-local"}
    dorylus_hpc.fit(
        jobs.folder / "dense", run_dir=tmp_path / "first", **options
    )  # what stays, stays from here
    before = left()
    dorylus_hpc.fit(jobs.folder / "dense", run_dir=tmp_path / "second", **options)
    assert left() == before


# ---- faults of the service as a whole

LONG = ["--epochs", 30]


@pytest.fixture(scope="module")
def with_service(jobs, tmp_path_factory):
    """Runs that call a service, or somewhere else, as they would call AWS."""
    keys = {"DORYLUS_LOCAL_ACCESS_KEY": "AKIATEST", "DORYLUS_LOCAL_SECRET_KEY": "secret"}
    aws = {
        "AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }  # fmt: skip
    archive = other_archive(tmp_path_factory.mktemp("archive") / "other", "__init__.py", VERSION_0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN"):
            patch.delenv(name, raising=False)
        foreign = LocalService(LocalSettings())
        with foreign, socket.create_server(("127.0.0.1", 0)) as taken:
            for name, value in keys.items():
                patch.setenv(name, value)
            with (
                LocalService(LocalSettings(concurrency=8)) as ours,
                LocalService(LocalSettings(archive=archive)) as other,
            ):
                refused = f"http://127.0.0.1:{taken.getsockname()[1]}"
                places = {
                    "well": (ours.endpoint_url, ["--tls", "off"]),
                    "function": (ours.endpoint_url, ["--function", "nobody"]),
                    "credentials": (foreign.endpoint_url, []),
                    "version": (other.endpoint_url, []),
                    "endpoint": ("http://127.0.0.1:9", []),
                    "no URL": ("nowhere", []),
                    "port": (
                        ours.endpoint_url,
                        ["--tls", "off", "--tensor-port", refused.rpartition(":")[2]],
                    ),
                }
                table = {
                    name: (
                        "train",
                        jobs.words(
                            "dense", f"at {name}", "--backend", "lambda", "--region", "us-east-1",
                            "--endpoint-url", url, "--max-workers", 4, *more,
                        ),
                    )
                    for name, (url, more) in places.items()
                }  # fmt: skip
                table["region"] = ("train", jobs.words("dense", "at region", "--backend", "lambda"))
                table["faults"] = ("train", jobs.words("dense", "at f", *LOCAL, "--local-faults", "drop=2"))
                table["budget"] = (
                    "train",
                    jobs.words("dense", "budget", *LOCAL, *LONG, "--budget-usd", 1e-9),
                )
                yield jobs.run(2, table, **aws)


def test_another_endpoint_is_as_good_as_another(jobs, three_ranks, with_service):
    assert_well(with_service, ["well"])
    assert jobs.summary("at well")["weights_sha256"] == jobs.summary("plain local")["weights_sha256"]
    assert jobs.account("at well").broken == []


REFUSALS = {
    "function": "Lambda function nobody cannot be used: .*ResourceNotFoundException.*: Function not found.*",
    "credentials": "Lambda function dorylus-hpc cannot be used: .*UnrecognizedClientException.*",
    "version": "Lambda function dorylus-hpc speaks protocol '0', this version '2': deploy it again .*",
    "endpoint": "Lambda function dorylus-hpc cannot be used: Could not connect to the endpoint URL: .*",
    "no URL": "Lambda function dorylus-hpc: Invalid endpoint: nowhere",
    "port": "--tensor-port [0-9]+: cannot listen there: Address already in use.*",
    "region": "--backend lambda needs an AWS region: give --region, or set AWS_DEFAULT_REGION",
    "faults": "faults: drop=2.0: a share in .* is needed",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_told_in_a_line(with_service, name):
    first, second = with_service[name]
    assert (first.status, second.status, second.err) == (2, 2, "")
    (line,) = first.err.splitlines()
    start, _, told = line.partition("error: ")
    assert start == "python -m dorylus_hpc.train: "
    assert re.fullmatch(REFUSALS[name], told), told
    assert first.seconds < SOON


def test_without_money_the_cores_go_on(jobs, with_service):
    for number, rank in enumerate(with_service["budget"]):
        told = "Lambda: the budget is spent: dense tasks run on this server's cores"
        assert (rank.status, rank.err) == (0, f"graph server {number}: {told}\n")
    account = jobs.account("budget")
    assert account.fallbacks >= account.tasks - 8 and account.invocations <= 8


def wait_for_epochs(metrics, count):
    limit = time.monotonic() + 60
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert time.monotonic() < limit
        time.sleep(0.02)


def long_run(jobs, name, **options):
    """Start a long run; a context, which gives its launcher."""
    words = ["-m", "dorylus_hpc.train", *jobs.words("dense", name, *LOCAL, *LONG)]
    environment = {"TMPDIR": str(jobs.temporary)}
    return started(2, words, env=environment, **options)


def rank_of(process):
    """The rank that launchers gave a process, as text; None if it is no rank."""
    environment = process.environ()
    return environment.get("OMPI_COMM_WORLD_RANK", environment.get("PMI_RANK"))


def service_of(jobs):
    (service,) = [
        one for one in processes_of(jobs.temporary) if "dorylus_hpc.serverless.local" in one.cmdline()
    ]
    return service


def test_the_service_dies_and_the_cores_go_on(jobs, with_service, tmp_path):
    with (tmp_path / "err").open("w+") as err, long_run(jobs, "dies", err=err) as process:
        wait_for_epochs(jobs.folder / "dies" / "metrics.jsonl", 3)
        service_of(jobs).send_signal(signal.SIGKILL)
        status = process.wait(60)
        err.seek(0)
        told = err.read()
    assert status == 0, told
    jobs.assert_nothing_left()
    assert told.count("dense tasks run on this server's cores") == 2
    summary = jobs.summary("dies")
    assert summary["weights_sha256"] == jobs.summary("budget")["weights_sha256"]
    account = jobs.account("dies")
    assert 0 < account.fallbacks < account.tasks and account.broken


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_and_nothing_is_left(jobs, rank):
    name = f"rank {rank}"
    with long_run(jobs, name) as process:
        wait_for_epochs(jobs.folder / name / "metrics.jsonl", 3)
        ranks = {rank_of(one): one for one in processes_of(jobs.temporary)}
        ranks[str(rank)].send_signal(signal.SIGKILL)
        assert process.wait(60) != 0
    jobs.assert_nothing_left()
