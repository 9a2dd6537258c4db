"""The worker's side: the handler, what a sandbox keeps, fetching ahead, and what can go wrong."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dorylus_hpc.serverless.attempts import Attempts
from dorylus_hpc.serverless.certificates import Credentials, make_credentials
from dorylus_hpc.serverless.claim import Claim
from dorylus_hpc.serverless.tensor_server import Block, TensorServer
from lambda_pkg import VERSION, handler, ops, worker
from lambda_pkg.protocol import HEADER, Kind, pack_header, refusal
from lambda_pkg.worker import Ahead, Sandbox, TensorServerError

RUN = make_credentials("run")
FOREIGN = make_credentials("run")


class Job:
    """z = h @ w, and the gradient-like g = h.T @ z, as a task."""

    def __init__(self, server: TensorServer, rows: int = 10, chunk: int = 0, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.server, self.chunk = server, chunk
        self.h = rng.random((rows, 6), np.float32)
        self.w = rng.random((6, 4), np.float32)
        self.z, self.g = np.zeros((rows, 4), np.float32), np.zeros((6, 4), np.float32)
        self.accepted = threading.Event()
        self.claim = Claim(self.accepted.set)

    def offer(self) -> str:
        return self.server.offer(
            [Block(self.w, False), Block(self.h, True)], [self.z, self.g], self.chunk, self.claim
        )

    def event(self, token: str, **changes: Any) -> dict[str, Any]:
        """The descriptor, as it arrives: through JSON."""
        event = {
            "protocol": VERSION,
            "run": "run",
            "server": {"host": self.server.address[0], "port": self.server.address[1]},
            "tls": None,
            "token": token,
            "ops": [
                ["apply_vertex", {}, ["h", "w"], ["z"]],
                ["apply_vertex_backward", {}, ["h", "w", "z"], ["g"]],
            ],
            "inputs": [
                {"name": "w", "dtype": "<f4", "shape": self.w.shape, "rows": False, "key": None},
                {"name": "h", "dtype": "<f4", "shape": self.h.shape, "rows": True, "key": None},
            ],
            "outputs": [
                {"name": "z", "dtype": "<f4", "shape": self.z.shape, "rows": True},
                {"name": "g", "dtype": "<f4", "shape": self.g.shape, "rows": False},
            ],
            "chunk": self.chunk,
            "seconds": 30.0,
        }
        return json.loads(json.dumps(event | changes))

    def keyed(self, token: str, **keys: str) -> dict[str, Any]:
        event = self.event(token)
        for one in event["inputs"]:
            one["key"] = keys.get(one["name"])
        return event

    def expect(self) -> None:
        """The results are those of the server's own cores, bit by bit."""
        outputs = {
            "z": ops.OutputSpec(self.z.shape, "<f4", True),
            "g": ops.OutputSpec(self.g.shape, "<f4", False),
        }
        program = self.event("")["ops"]
        inputs = {"h": self.h, "w": self.w}
        expected = ops.run(program, inputs, outputs, rows=frozenset({"h"}), chunk=self.chunk)
        np.testing.assert_array_equal(self.z, expected["z"])
        np.testing.assert_array_equal(self.g, expected["g"])
        assert self.accepted.is_set()


@pytest.fixture
def server():
    with TensorServer(context=None) as one:
        yield one


@pytest.fixture
def sandbox():
    one = Sandbox()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) - before == set()


# ---- tasks ----


@pytest.mark.parametrize("credentials", [None, RUN], ids=["plain", "tls"])
@pytest.mark.parametrize(
    ("rows", "chunk"), [(0, 0), (0, 3), (1, 3), (3, 3), (10, 3), (10, 1), (50_000, 7001), (10, 0)]
)
def test_a_task(sandbox, credentials: Credentials | None, rows, chunk):
    with TensorServer(context=credentials and credentials.server_context()) as server:
        tls = credentials and credentials.descriptor()
        for seed in range(2):
            job = Job(server, rows, chunk, seed)
            report = sandbox.work(job.event(job.offer(), tls=tls))
            job.expect()
            assert report["accepted"] is True
            assert report["reason"] == ""
            assert report["bytes_in"] == 16 + job.w.nbytes + job.h.nbytes + 16
            assert report["bytes_out"] == 16 + 40 + 16 + 32 + job.z.nbytes + job.g.nbytes
            assert report["kept"] == 0
            seconds = report["seconds"]
            assert set(seconds) == {"connect", "fetch", "compute", "send", "total"}
            assert all(value >= 0 for value in seconds.values())
            assert (seconds["connect"] > 0) is (seed == 0), "the connection is kept"
        assert server.statistics.connections == 1
        sandbox.close()


def test_tasks_of_other_shapes_in_turn(server, sandbox):
    """Buffers of the task before are used where they fit only."""
    for seed, (rows, chunk) in enumerate(
        [(10, 3), (10, 3), (9, 3), (6, 3), (10, 4), (3, 0), (10, 3), (0, 0)]
    ):
        job = Job(server, rows, chunk, seed)
        assert sandbox.work(job.event(job.offer()))["accepted"]
        job.expect()


def test_the_handler_answers_in_json(server, monkeypatch):
    monkeypatch.setattr(handler, "_calls", iter(range(3)))
    cold = []
    for seed in range(2):
        job = Job(server, seed=seed)
        context = SimpleNamespace(get_remaining_time_in_millis=lambda: 60_000)
        report = json.loads(json.dumps(handler.handler(job.event(job.offer()), context)))
        job.expect()
        assert set(report) == {
            *("protocol", "accepted", "reason", "cold", "seconds", "bytes_in", "bytes_out", "kept")
        }
        assert report["protocol"] == VERSION
        cold.append(report["cold"])
    assert cold == [True, False]
    handler._sandbox().close()


@pytest.mark.parametrize(("told", "memory"), [("1769", 1769), ("", None), (None, None)])
def test_hello(monkeypatch, told, memory):
    monkeypatch.delenv("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", raising=False)
    if told is not None:
        monkeypatch.setenv("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", told)
    assert handler.handler({"hello": True}) == {
        "memory_mb": memory,
        "protocol": VERSION,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


@pytest.mark.parametrize("spoken", ["0", 1, None])
def test_another_version_is_named(server, spoken):
    job = Job(server)
    event = job.event(job.offer()) | {"protocol": spoken}
    with pytest.raises(handler.VersionError, match=f"protocol {spoken!r}, this archive has '{VERSION}'"):
        handler.handler(event)
    assert server.statistics.connections == 0


def test_loading_the_handler_loads_no_numpy():
    code = "import sys, lambda_pkg.handler; print(*sorted(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "lambda_pkg.handler" in modules
    assert not {"numpy", "ssl", "lambda_pkg.worker"} & set(modules)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_refusal_is_no_error(server, sandbox, when):
    job = Job(server)
    token, other = job.offer(), job.offer()
    if when == "before":
        server.withdraw(token)
    else:  # while it computes, another is accepted

        class Slow(ops.Chunks):
            def add(self, *chunk):
                super().add(*chunk)
                with pytest.MonkeyPatch.context() as back:
                    back.setattr(worker, "Chunks", ops.Chunks)
                    second = Sandbox()
                    assert second.work(job.event(other))["accepted"]
                    second.close()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "Chunks", Slow)
            report = sandbox.work(job.event(token))
    if when == "before":
        report = sandbox.work(job.event(token))
    assert (report["accepted"], report["reason"]) == (False, "the task is over")
    assert server.statistics.duplicates_refused == 1
    again = Job(server)
    assert sandbox.work(again.event(again.offer()))["seconds"]["connect"] == 0
    again.expect()


# ---- what is kept ----


def test_weights_are_kept_by_their_keys(server, sandbox):
    """The newest two, and only while name, key, shape and type agree."""
    kept = []
    for key in ["1", "1", "2", "1", "2", "3", "2", "3", "1", "3"]:
        job = Job(server, seed=int(key))
        report = sandbox.work(job.keyed(job.offer(), w=key))
        job.expect()
        kept.append(report["kept"])
    #               1  1  2  1  2  3 (drops 1)  2  3  1 (drops 2)  3
    assert kept == [0, 1, 0, 1, 1, 0, 1, 1, 0, 1]


def test_what_is_kept_saves_its_bytes(server, sandbox):
    job = Job(server)
    first = sandbox.work(job.keyed(job.offer(), w="1"))
    job = Job(server)
    second = sandbox.work(job.keyed(job.offer(), w="1"))
    assert first["bytes_in"] - second["bytes_in"] == job.w.nbytes


@pytest.mark.parametrize("chunk", [0, 3])
def test_inputs_with_rows_can_be_kept_too(server, sandbox, chunk):
    for number in range(3):
        job = Job(server, 10, chunk)
        report = sandbox.work(job.keyed(job.offer(), w="1", h="2"))
        job.expect()
        assert report["kept"] == (2 if number else 0)


def test_another_shape_under_a_key_is_fetched(server, sandbox):
    for rows, kept in ((10, 0), (11, 0), (11, 1), (10, 0)):
        job = Job(server, rows)
        assert sandbox.work(job.keyed(job.offer(), h="1"))["kept"] == kept
        job.expect()


def test_another_run_finds_nothing(server, sandbox):
    for run, kept in (("a", 0), ("a", 1), ("b", 0), ("a", 0)):
        job = Job(server)
        report = sandbox.work(job.keyed(job.offer(), w="1") | {"run": run})
        job.expect()
        assert report["kept"] == kept
        assert (report["seconds"]["connect"] == 0) is bool(kept)


def test_another_server_finds_nothing(server, sandbox):
    with TensorServer(context=None) as other:
        for where, kept in ((server, 0), (other, 0), (server, 1), (other, 1)):
            job = Job(where, seed=where is other)
            assert sandbox.work(job.keyed(job.offer(), w="1"))["kept"] == kept
            job.expect()
        sandbox.close()


def test_what_is_kept_cannot_be_changed_by_a_task(server, sandbox, monkeypatch):
    class Vandal(ops.Chunks):
        def __init__(self, program, constants, outputs):
            super().__init__(program, constants, outputs)
            self.constants = constants

        def add(self, *chunk):
            self.constants["w"][:] = 0

    job = Job(server)
    sandbox.work(job.keyed(job.offer(), w="1"))
    monkeypatch.setattr(worker, "Chunks", Vandal)
    job = Job(server)
    with pytest.raises(ValueError, match="read-only"):
        sandbox.work(job.keyed(job.offer(), w="1"))


# ---- what goes wrong ----


def test_a_kept_connection_that_is_dead_is_replaced(sandbox):
    server = TensorServer(context=RUN.server_context())
    port = server.address[1]
    job = Job(server)
    sandbox.work(job.event(job.offer(), tls=RUN.descriptor()))
    server.close()
    with TensorServer(port=port, context=RUN.server_context()) as server:
        job = Job(server)
        report = sandbox.work(job.event(job.offer(), tls=RUN.descriptor()))
        assert report["seconds"]["connect"] > 0
        job.expect()
        sandbox.close()


def test_a_kept_connection_that_is_slow_is_not_tried_again(server, sandbox, monkeypatch):
    job = Job(server)
    sandbox.work(job.event(job.offer()))
    fetch, go_on = Attempts.fetch, threading.Event()

    def slow(*arguments):
        assert go_on.wait(30)
        return fetch(*arguments)

    monkeypatch.setattr(Attempts, "fetch", slow)
    job = Job(server)
    with pytest.raises(TensorServerError, match="TimeoutError: timed out"):
        sandbox.work(job.event(job.offer(), seconds=0.1))
    go_on.set()
    assert server.statistics.connections == 1


def test_nobody_listens(sandbox):
    with TensorServer(context=None) as server:
        job = Job(server)
        event = job.event(job.offer())
    address = ":".join(map(str, server.address))
    with pytest.raises(TensorServerError, match=f"{address}: ConnectionRefusedError"):
        sandbox.work(event)


@pytest.mark.parametrize(
    ("server_has", "worker_has", "message"),
    [
        (RUN, FOREIGN, "SSLCertVerificationError"),
        (RUN, None, "Disconnected|ConnectionResetError"),
        (None, RUN, "SSL|Disconnected|ConnectionResetError"),
    ],
    ids=["another run", "plain to tls", "tls to plain"],
)
def test_a_server_of_others(sandbox, server_has, worker_has, message):
    with TensorServer(context=server_has and server_has.server_context()) as server:
        job = Job(server)
        event = job.event(job.offer(), tls=worker_has and worker_has.descriptor())
        with pytest.raises(TensorServerError, match=message):
            sandbox.work(event)
        assert not job.accepted.is_set()


def test_without_tls_a_worker_stays_on_its_machine(server, sandbox):
    job = Job(server)
    event = job.event(job.offer(), server={"host": "10.0.0.1", "port": 1})
    with pytest.raises(TensorServerError, match="without TLS is for loopback only"):
        sandbox.work(event)


@pytest.mark.parametrize("chunk", [0, 3])
def test_a_task_that_fails_leaves_a_sandbox_that_works(server, sandbox, chunk):
    job = Job(server, chunk=chunk)
    event = job.event(job.offer())
    event["ops"][1][2] = ["w", "h", "z"]
    with pytest.raises(ValueError, match="columns but"):
        sandbox.work(event)
    assert not job.accepted.is_set()
    again = Job(server, chunk=chunk)
    assert sandbox.work(again.event(again.offer()))["seconds"]["connect"] > 0
    again.expect()


def test_a_failure_ends_fetching_ahead(sandbox):
    """The second thread is in the middle of an input that does not come; the failure is told all the same."""
    with answering(pack_header(Kind.BLOCKS, 96 + 12 * 24) + bytes(96 + 3 * 24)) as address:
        event = event_for(address, rows=12, chunk=3)
        event["ops"][1][2] = ["w", "h", "z"]
        with pytest.raises(ValueError, match="columns but"):
            sandbox.work(event)


class answering:
    """A server that takes one connection, reads a FETCH, says something and hangs until the end."""

    def __init__(self, answer: bytes, hang_up: bool = False) -> None:
        self._answer, self._hang_up = answer, hang_up
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)
        self._end = threading.Event()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.recv(56, socket.MSG_WAITALL)
            connection.sendall(self._answer)
            if not self._hang_up:
                self._end.wait()

    def __enter__(self) -> tuple[str, int]:
        self._thread.start()
        return self._listener.getsockname()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._listener.close()


def event_for(address: tuple[str, int], rows: int = 4, chunk: int = 0, seconds: float = 30.0):
    shell = SimpleNamespace(address=address)
    job = Job(shell, rows, chunk)  # type: ignore[arg-type]
    return job.event("00" * 32, seconds=seconds)


BLOCKS = 96 + 4 * 24  # bytes of the inputs of a task of four rows


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "ProtocolError: a frame starts with b'DHPC'"),
        (pack_header(Kind.ACCEPTED, 0), "ProtocolError: a frame ACCEPTED of 0 bytes does not belong here"),
        (pack_header(Kind.REFUSED, 201), "ProtocolError: a frame REFUSED of 201 bytes"),
        (pack_header(Kind.BLOCKS, BLOCKS - 1), f"ProtocolError: BLOCKS has {BLOCKS} bytes here, not"),
        (
            pack_header(Kind.BLOCKS, 1 << 39),
            f"ProtocolError: BLOCKS has {BLOCKS} bytes here, not 549755813888",
        ),
        (pack_header(Kind.BLOCKS, BLOCKS) + bytes(50), "Disconnected: .* after 50 of 96 bytes"),
        (pack_header(Kind.BLOCKS, BLOCKS) + bytes(100), "Disconnected: .* after 4 of (96|24) bytes"),
        (HEADER.pack(b"DHPC", 2, b"abc", 0), "ProtocolError: the pad"),
    ],
)
def test_answers_that_are_wrong(sandbox, answer, message, chunk):
    with answering(answer, hang_up=True) as address:
        with pytest.raises(TensorServerError, match=message):
            sandbox.work(event_for(address, chunk=chunk))


def test_a_reason_is_passed_on(sandbox):
    with answering(refusal("because")) as address:
        report = sandbox.work(event_for(address))
    assert (report["accepted"], report["reason"]) == (False, "because")
    assert report["bytes_in"] == 16 + 7


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("answer", [b"", pack_header(Kind.BLOCKS, BLOCKS) + bytes(100)])
@pytest.mark.parametrize("why", ["the task's patience", "the invocation's end"])
def test_a_server_that_hangs(sandbox, answer, chunk, why):
    seconds = 0.1 if why == "the task's patience" else 30.0
    with answering(answer) as address:
        with pytest.raises(TensorServerError, match="TimeoutError: timed out"):
            event = event_for(address, chunk=chunk, seconds=seconds)
            if seconds < 1:
                sandbox.work(event)
            else:
                context = SimpleNamespace(get_remaining_time_in_millis=lambda: 350)
                try:
                    handler.handler(event, context)
                finally:
                    handler._sandbox().close()


def test_no_time_is_left(server, sandbox):
    job = Job(server)
    with pytest.raises(TensorServerError, match="TimeoutError"):
        sandbox.work(job.event(job.offer()), limit=0.0)


# ---- fetching ahead ----


def test_chunks_are_at_most_two_ahead():
    bounds = [(place, place + 1) for place in range(20)]
    done, ahead = [], []

    def receive(chunk, start, stop):
        ahead.append(chunk - len(done))
        return {"x": np.array([chunk])}

    with Ahead(bounds, receive, lambda: None) as chunks:
        for start, _, arrays in chunks:
            assert arrays["x"][0] == start
            done.append(start)
    assert done == [*range(20)]
    assert max(ahead) <= 3, "two, and the one that is computed"
    assert chunks.arrived > 0


def test_two_chunks_arrive_while_one_is_computed():
    there = threading.Semaphore(0)
    bounds = [(place, place + 1) for place in range(6)]

    def receive(chunk, start, stop):
        there.release()
        return {}

    with Ahead(bounds, receive, lambda: None) as chunks:
        for place, _ in enumerate(chunks):
            for _ in range(3 if place == 0 else 1 if place <= 3 else 0):
                assert there.acquire(timeout=30), "nothing is fetched while a chunk is computed"


def test_one_chunk_needs_no_thread():
    names = []

    def receive(chunk, start, stop):
        names.append(threading.current_thread())
        return {}

    with Ahead([(0, 5)], receive, lambda: None) as chunks:
        assert [place[:2] for place in chunks] == [(0, 5)]
    assert names == [threading.current_thread()]


@pytest.mark.parametrize("place", [0, 1, 5])
def test_a_failure_of_the_second_thread_is_raised_in_the_first(place):
    def receive(chunk, start, stop):
        if chunk == place:
            raise ConnectionResetError("gone")
        return {}

    done = []
    with pytest.raises(ConnectionResetError, match="gone"):
        with Ahead([(one, one + 1) for one in range(9)], receive, lambda: None) as chunks:
            for start, _, _ in chunks:
                done.append(start)
    assert done == [*range(place)]


def test_buffers_are_not_written_while_they_are_read(server, sandbox, monkeypatch):
    """Each chunk is compared with what it must be after a while in which others arrive."""
    seen = []

    class Slow(ops.Chunks):
        def add(self, start, stop, arrays):
            before = arrays["h"].copy()
            super().add(start, stop, arrays)
            np.testing.assert_array_equal(arrays["h"], before)
            np.testing.assert_array_equal(before, job.h[start:stop])
            seen.append((start, stop))

    monkeypatch.setattr(worker, "Chunks", Slow)
    job = Job(server, rows=5000, chunk=100)
    sandbox.work(job.event(job.offer()))
    job.expect()
    assert seen == [(start, start + 100) for start in range(0, 5000, 100)]
