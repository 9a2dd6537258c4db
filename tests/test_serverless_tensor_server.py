"""The tensor server, as its peers see it; the claim; certificates."""

from __future__ import annotations

import contextlib
import gc
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from dorylus_hpc.serverless import attempts, claim, tensor_server
from dorylus_hpc.serverless.certificates import make_credentials
from dorylus_hpc.serverless.claim import Claim
from dorylus_hpc.serverless.tensor_server import Block, TensorServer, TensorStatistics
from lambda_pkg import tls
from lambda_pkg.protocol import Kind, pack_header, parse_header

RUN = make_credentials("0123456789abcdef")
FOREIGN = make_credentials("0123456789abcdef")  # the same names, another authority
BIG = 8_000_000  # float32: more than sockets take in while nobody reads


def client_context() -> ssl.SSLContext:
    return tls.client_context(RUN.authority, RUN.client_certificate, RUN.client_key)


class Peer:
    """A worker, frame by frame."""

    closed = False

    def __init__(self, server: TensorServer, context: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection(server.address, timeout=30)
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_hostname=tls.NAME)

    def send(self, *pieces: bytes) -> None:
        self.socket.sendall(b"".join(pieces))

    def receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise EOFError(f"{len(data)} of {size} bytes")
            data += piece
        return bytes(data)

    def answer(self) -> tuple[Kind, bytes]:
        kind, length = parse_header(self.receive(16))
        return kind, self.receive(length)

    def fetch(self, token: str, mask: int = 1) -> tuple[Kind, bytes]:
        self.send(fetch_frame(token, mask))
        return self.answer()

    def deliver(self, token: str, data: bytes) -> tuple[Kind, bytes]:
        self.send(result_frame(token, data))
        return self.answer()

    def hears_the_end(self) -> bool:
        """Whether the server closes the connection, maybe after a frame REFUSED."""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while self.socket.recv(1000):
                pass
        return True

    def close(self) -> None:
        self.closed = True
        self.socket.close()


def fetch_frame(token: str, mask: int = 1) -> bytes:
    return pack_header(Kind.FETCH, 40) + bytes.fromhex(token) + struct.pack("<Q", mask)


def result_frame(token: str, data: bytes) -> bytes:
    return pack_header(Kind.RESULT, 32 + len(data)) + bytes.fromhex(token) + data


def wait_until(true: Callable[[], object]) -> None:
    """Wait for another thread."""
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, "it does not become true"
        time.sleep(0.001)


class Job:
    """A task of a small input and a small output, and who accepted it."""

    def __init__(self, server: TensorServer, rows: int = 4) -> None:
        self.server = server
        self.input = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
        self.output = np.zeros(rows * 2, np.float64)
        self.calls: list[str] = []
        self.claim = Claim(lambda: self.calls.append(threading.current_thread().name))

    def offer(self) -> str:
        return self.server.offer([Block(self.input, True)], [self.output], 0, self.claim)

    def result(self, value: float) -> bytes:
        return np.full_like(self.output, value).tobytes()

    def arrives(self, token: str, value: float, peer: Peer) -> None:
        """The whole of an exchange that must go well."""
        assert peer.fetch(token) == (Kind.BLOCKS, self.input.tobytes())
        assert peer.deliver(token, self.result(value)) == (Kind.ACCEPTED, b"")
        assert (self.output == value).all()
        assert len(self.calls) == 1


@pytest.fixture(params=["plain", "tls"])
def context(request):
    return client_context() if request.param == "tls" else None


@pytest.fixture
def server(context):
    with TensorServer(context=RUN.server_context() if context else None) as one:
        yield one


@pytest.fixture
def plain():
    with TensorServer(context=None) as one:
        yield one


@pytest.fixture
def connect(context):
    """Makes peers, and closes them at the end."""
    peers = []

    def make(server: TensorServer, with_tls: bool = True) -> Peer:
        peers.append(Peer(server, context if with_tls else None))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) - before == set()


# ---- what is served ----


@pytest.mark.parametrize("chunk", [0, 1, 3, 4, 7, 100])
def test_blocks_come_in_the_order_of_the_wire(server, connect, chunk):
    rng = np.random.default_rng(0)
    h, g = rng.random((7, 3), np.float32), rng.integers(0, 99, 7)
    w, b = rng.random((3, 5)), np.array([True, False])
    inputs = [Block(h, True), Block(w, False), Block(g, True), Block(b, False)]
    starts = range(0, 7, chunk or 7)
    stop = chunk or 7
    peer = connect(server)
    for mask in range(16):
        token = server.offer(inputs, [], chunk, Claim(lambda: None))
        expected = b"".join(x.tobytes() for bit, x in ((2, w), (8, b)) if mask & bit)
        for start in starts:
            slices = [x[start : start + stop] for bit, x in ((1, h), (4, g)) if mask & bit]
            expected += b"".join(x.tobytes() for x in slices)
        assert peer.fetch(token, mask) == (Kind.BLOCKS, expected), f"mask {mask:b}"


def test_results_lie_in_their_buffers_when_the_claim_hears_of_them(server, connect):
    rng = np.random.default_rng(1)
    a, b = np.zeros((50_000, 3), np.float32), np.zeros((0, 4))
    c, d = np.zeros((), np.int64), np.zeros(5, "?")
    values = [rng.random(a.shape, np.float32), b, np.int64(-3), np.array([1, 0, 1, 1, 0], bool)]
    seen = []
    claim = Claim(lambda: seen.append([x.tobytes() for x in (a, b, c, d)]))
    token = server.offer([Block(np.zeros((2, 2)), True)], [a, b, c, d], 0, claim)
    peer = connect(server)
    peer.fetch(token)
    assert peer.deliver(token, b"".join(x.tobytes() for x in values)) == (Kind.ACCEPTED, b"")
    assert seen == [[x.tobytes() for x in values]]
    assert claim.taken


@pytest.mark.parametrize("rows", [0, 1])
def test_tasks_without_rows_or_results(server, connect, rows):
    calls = []
    claim = Claim(lambda: calls.append(1))
    token = server.offer([Block(np.zeros((rows, 2)), True)], [], 1, claim)
    peer = connect(server)
    assert peer.fetch(token) == (Kind.BLOCKS, bytes(rows * 16))
    assert peer.deliver(token, b"") == (Kind.ACCEPTED, b"")
    assert calls == [1]


def test_a_connection_serves_task_after_task(server, connect):
    peer = connect(server)
    for value in range(5):
        job = Job(server)
        job.arrives(job.offer(), value + 1, peer)
    expected = TensorStatistics(
        bytes_sent=5 * (16 + 48 + 16), bytes_received=5 * (56 + 48 + 64), connections=1
    )
    wait_until(lambda: server.statistics == expected)  # the last answer is counted when it is sent


def test_data_larger_than_any_buffer_go_both_ways(server, connect):
    data = np.random.default_rng(2).random(BIG, np.float32)
    back = np.zeros(BIG, np.float32)
    token = server.offer([Block(data, True)], [back], 1_000_000, Claim(lambda: None))
    peer = connect(server)
    assert peer.fetch(token)[1] == data.tobytes()
    assert peer.deliver(token, data.tobytes()) == (Kind.ACCEPTED, b"")
    np.testing.assert_array_equal(back, data)


def test_many_peers_at_once(server, connect):
    jobs = [Job(server) for _ in range(16)]

    def work(job: Job, value: int, peer: Peer) -> None:
        job.arrives(job.offer(), value, peer)

    threads = [
        threading.Thread(target=work, args=(job, value + 1, connect(server)))
        for value, job in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [job.output[0] for job in jobs] == [value + 1 for value in range(16)]


# ---- what is refused ----


def test_tokens_that_are_unknown_over_or_used(server, connect):
    job = Job(server)
    used, withdrawn, good = job.offer(), job.offer(), job.offer()
    server.withdraw(withdrawn)
    peer, other = connect(server), connect(server)
    assert peer.fetch("00" * 32) == (Kind.REFUSED, b"unknown token")
    assert peer.fetch(withdrawn) == (Kind.REFUSED, b"the task is over")
    assert peer.fetch(used)[0] is Kind.BLOCKS
    assert peer.fetch(used) == (Kind.REFUSED, b"the token was used before")
    assert other.fetch(used) == (Kind.REFUSED, b"the token was used before")
    job.arrives(good, 1, peer)  # a refusal leaves the connection as it was
    assert other.fetch(good) == (Kind.REFUSED, b"the task is over")
    late = job.offer()
    assert peer.fetch(late) == (Kind.REFUSED, b"the task is over")
    assert (server.statistics.refused, server.statistics.duplicates_refused) == (1, 5)


def test_a_late_result_is_read_and_thrown_away(server, connect):
    job = Job(server, rows=100_000)  # several pieces of the discarding
    first, second, third = job.offer(), job.offer(), job.offer()
    peers = [connect(server) for _ in range(3)]
    for peer, token in zip(peers, (first, second, third), strict=True):
        assert peer.fetch(token)[0] is Kind.BLOCKS
    assert peers[1].deliver(second, job.result(2)) == (Kind.ACCEPTED, b"")
    server.withdraw(third)
    for peer, token in ((peers[0], first), (peers[2], third)):
        assert peer.deliver(token, job.result(7)) == (Kind.REFUSED, b"the task is over")
    assert (job.output == 2).all()
    assert len(job.calls) == 1
    assert server.statistics.duplicates_refused == 2
    again = Job(server)
    again.arrives(again.offer(), 5, peers[0])


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(lambda token: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="another protocol"),
        pytest.param(lambda token: pack_header(Kind.BLOCKS, 40), id="BLOCKS"),
        pytest.param(lambda token: pack_header(Kind.ACCEPTED, 0), id="ACCEPTED"),
        pytest.param(lambda token: pack_header(Kind.FETCH, 39), id="FETCH too short"),
        pytest.param(lambda token: pack_header(Kind.FETCH, 2**63), id="FETCH too long"),
        pytest.param(lambda token: pack_header(Kind.FETCH, 1 << 40), id="FETCH of the largest frame"),
        pytest.param(lambda token: fetch_frame(token, 2), id="no such input"),
        pytest.param(lambda token: fetch_frame(token, 1 << 63), id="no such input, last bit"),
        pytest.param(lambda token: result_frame(token, bytes(64)), id="RESULT before FETCH"),
        pytest.param(lambda token: fetch_frame(token) + result_frame(token, bytes(63)), id="RESULT short"),
        pytest.param(lambda token: fetch_frame(token) + result_frame(token, bytes(65)), id="RESULT long"),
        pytest.param(
            lambda token: fetch_frame(token) + pack_header(Kind.RESULT, 1 << 40), id="RESULT of a terabyte"
        ),
        pytest.param(lambda token: fetch_frame(token) + pack_header(Kind.RESULT, 0), id="RESULT of nothing"),
        pytest.param(
            lambda token: fetch_frame(token) + result_frame("ab" * 32, bytes(64)), id="RESULT, other token"
        ),
    ],
)
def test_a_wrong_frame_ends_its_connection_and_touches_nothing(server, connect, frame):
    job, bystander = Job(server), connect(server)
    peer = connect(server)
    peer.send(frame(job.offer()))
    assert peer.hears_the_end()
    wait_until(lambda: server.statistics.refused == 1)
    assert (job.output == 0).all()
    assert job.calls == []
    assert job.claim.begin(None), "the claim is still held"
    job.claim.abandon(None)
    job.arrives(job.offer(), 3, bystander)


def test_the_reason_is_told(server, connect):
    peer = connect(server)
    peer.send(pack_header(Kind.FETCH, 41))
    assert peer.answer() == (Kind.REFUSED, b"FETCH has 40 bytes, not 41")


@pytest.mark.parametrize("cut", [1, 15, 16, 20, 55, 57, 72, 100, 104 + 63])
def test_half_a_frame_then_nothing(server, connect, cut):
    """The peer goes away anywhere in its frames; the task is done by the next."""
    job = Job(server)
    token = job.offer()
    peer = connect(server)
    peer.send((fetch_frame(token) + result_frame(token, job.result(9)))[:cut])
    peer.close()
    job.arrives(job.offer(), 3, connect(server))


@pytest.mark.parametrize("place", ["header", "body", "result"])
def test_who_trickles_is_cut_off(context, connect, place):
    """Every byte comes in time; the whole does not."""
    with TensorServer(context=RUN.server_context() if context else None, seconds=0.2) as server:
        job, peer = Job(server), connect(server)
        token = job.offer()
        frame = fetch_frame(token)
        if place == "result":
            assert peer.fetch(token)[0] is Kind.BLOCKS
            frame = result_frame(token, job.result(1))
        start = {"header": 0, "body": 17, "result": 50}[place]
        peer.send(frame[:start])
        with pytest.raises((ConnectionError, ssl.SSLError)):
            for byte in frame[start:] + bytes(1000):
                peer.send(bytes([byte]))
                time.sleep(0.05)
        assert not job.claim.taken
        assert job.claim.begin(None)


def test_a_stranger_who_says_nothing_is_not_kept(context, connect):
    with TensorServer(context=RUN.server_context() if context else None, seconds=0.1) as server:
        assert connect(server).hears_the_end()
        assert server.statistics.refused == 0


@pytest.mark.parametrize(
    ("inputs", "outputs", "chunk", "message"),
    [
        ([], [], 0, "has inputs with rows"),
        ([Block(np.zeros(3), False)], [], 0, "has inputs with rows"),
        ([Block(np.zeros(()), True)], [], 0, "has inputs with rows"),
        ([Block(np.zeros(3), True), Block(np.zeros((4, 1)), True)], [], 0, r"\(3,\), \(4, 1\)"),
        ([Block(np.zeros(1), True)] * 65, [], 0, "at most 64 inputs, got 65"),
        ([Block(np.zeros(3, ">f4"), True)], [], 0, "little-endian numbers, got dtype >f4"),
        ([Block(np.array([None]), True)], [], 0, "little-endian numbers, got dtype |O"),
        ([Block(np.zeros((4, 4)).T[:2], True)], [], 0, "an input must be C-contiguous"),
        ([Block(np.zeros(3), True)], [np.zeros((4, 4))[:, 0]], 0, "an output must be C-contiguous"),
        ([Block(np.zeros(3), True)], [np.broadcast_to(np.zeros(1), (1,))], 0, "must be writeable"),
        ([Block(np.zeros(3), True)], [], -1, "chunk must be 0"),
    ],
)
def test_what_cannot_be_offered(plain, inputs, outputs, chunk, message):
    with pytest.raises(ValueError, match=message):
        plain.offer(inputs, outputs, chunk, Claim(lambda: None))


def test_it_remembers_so_many_tokens(plain, monkeypatch):
    monkeypatch.setattr(attempts, "_REMEMBERED", 3)
    job = Job(plain)
    tokens = [job.offer() for _ in range(5)]
    for token in tokens:
        plain.withdraw(token)
    peer = Peer(plain)
    answers = [peer.fetch(token)[1] for token in tokens]
    assert answers == 2 * [b"unknown token"] + 3 * [b"the task is over"]
    peer.close()


# ---- withdrawing ----


def half_way(job: Job, peer: Peer, token: str, value: float) -> None:
    """Fetch, and send a result but for its last byte; on return the server is receiving the outputs."""
    assert peer.fetch(token)[0] is Kind.BLOCKS
    peer.send(result_frame(token, job.result(value))[:-1])
    wait_until(lambda: job.output[0] == value)


def test_an_upload_is_cut_before_withdraw_returns(server, connect):
    job = Job(server)
    token, peer = job.offer(), connect(server)
    half_way(job, peer, token, 8)
    server.withdraw(token)
    assert job.claim.begin(None), "the claim is still held"
    job.output[:] = 4
    with contextlib.suppress(OSError):
        peer.send(job.result(8)[-1:])
    assert peer.hears_the_end()
    assert (job.output == 4).all()
    job.claim.accept(None)
    assert job.calls == [threading.current_thread().name]


def test_withdrawing_twice_and_what_is_accepted(server, connect):
    job = Job(server)
    token = job.offer()
    job.arrives(token, 1, connect(server))
    server.withdraw(token)
    server.withdraw(token)
    server.withdraw("ff" * 32)
    assert job.claim.taken


def test_withdrawing_from_the_call_that_accepts(server, connect):
    """All attempts, the one that is being accepted too, on its own thread."""
    tokens = []
    claim = Claim(lambda: [server.withdraw(token) for token in tokens])
    tokens += [server.offer([Block(np.zeros(1), True)], [], 0, claim) for _ in range(2)]
    peer = connect(server)
    peer.fetch(tokens[0])
    assert peer.deliver(tokens[0], b"") == (Kind.ACCEPTED, b"")
    assert peer.fetch(tokens[1]) == (Kind.REFUSED, b"the task is over")


def test_inputs_that_nobody_reads_on(server, connect):
    """The peer stops in the middle of BLOCKS: withdrawing ends the sending."""
    data = np.zeros(BIG, np.float32)
    alive = weakref.ref(data)
    token = server.offer([Block(data, True)], [], 0, Claim(lambda: None))
    del data
    peer = connect(server)
    peer.send(fetch_frame(token))
    peer.receive(1000)
    server.withdraw(token)
    assert alive() is None, "the arrays are kept"


@pytest.mark.parametrize("end", ["withdrawn", "accepted", "uploading", "broken"])
def test_arrays_are_let_go(server, connect, end):
    gc.collect()
    gc.disable()  # nothing may hang in a cycle
    try:
        data, back = np.zeros(4), np.zeros(4)
        alive = [weakref.ref(data), weakref.ref(back)]
        claim = Claim(lambda: None)
        token = server.offer([Block(data, True)], [back], 2, claim)
        peer = connect(server)
        assert peer.fetch(token)[0] is Kind.BLOCKS
        frame = result_frame(token, np.ones(4).tobytes())
        if end == "accepted":
            peer.send(frame)
            assert peer.answer()[0] is Kind.ACCEPTED
        elif end != "withdrawn":
            peer.send(frame[:-1])
            wait_until(lambda back=back: back[0] == 1)
            if end == "broken":
                peer.close()
                assert claim.begin(None)
        del data, back
        server.withdraw(token)
        assert [one() for one in alive] == [None, None]
    finally:
        gc.enable()


def test_nothing_is_kept_while_a_broken_connection_ends(plain, monkeypatch):
    """Not even by the error that tells of it."""
    left, go_on = threading.Event(), threading.Event()
    leave = attempts.Attempts.leave

    def leave_and_wait(self, attempt):
        leave(self, attempt)
        if left.is_set() or not peer.closed:
            return
        left.set()
        assert go_on.wait(30)

    monkeypatch.setattr(attempts.Attempts, "leave", leave_and_wait)
    gc.collect()
    gc.disable()
    try:
        back = np.zeros(4)
        alive = weakref.ref(back)
        token = plain.offer([Block(np.zeros(4), True)], [back], 0, Claim(lambda: None))
        peer = Peer(plain)
        peer.fetch(token)
        peer.send(result_frame(token, np.ones(4).tobytes())[:-1])
        peer.close()
        assert left.wait(30)
        del back
        plain.withdraw(token)
        assert alive() is None
    finally:
        gc.enable()
        go_on.set()


def test_a_claim_is_let_go_too(plain):
    """With all that its callback refers to, although it knows the attempts that retired."""
    gc.collect()
    gc.disable()
    try:
        job = Job(plain)
        alive = weakref.ref(job)
        job.claim = Claim(lambda held=job: None)
        token = job.offer()
        plain.withdraw(token)
        job.claim = None  # or the job and its claim would keep each other
        del job
        assert alive() is None
    finally:
        gc.enable()


def test_withdrawn_between_the_last_byte_and_acceptance(server, connect, monkeypatch):
    job, peer = Job(server), connect(server)
    token = job.offer()
    peer.fetch(token)
    leave = attempts.Attempts.leave

    def leave_and_withdraw(self, attempt):
        leave(self, attempt)
        server.withdraw(token)

    monkeypatch.setattr(attempts.Attempts, "leave", leave_and_withdraw)
    assert peer.deliver(token, job.result(2)) == (Kind.REFUSED, b"the task is over")
    assert (job.calls, job.claim.taken) == ([], False)
    monkeypatch.undo()
    job.arrives(job.offer(), 3, peer)


def test_withdrawn_between_the_right_to_write_and_writing(server, connect, monkeypatch):
    job, peer = Job(server), connect(server)
    token = job.offer()
    peer.fetch(token)
    begin = Claim.begin

    def begin_and_withdraw(self, owner):
        right = begin(self, owner)
        server.withdraw(token)
        return right

    monkeypatch.setattr(Claim, "begin", begin_and_withdraw)
    assert peer.deliver(token, job.result(2)) == (Kind.REFUSED, b"the task is over")
    assert (job.output == 0).all(), "written after it was withdrawn"
    monkeypatch.undo()
    job.arrives(job.offer(), 3, peer)


# ---- several attempts at once ----


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def waiting_in(claim: Claim) -> int:
    return len(claim._changed._waiters)


def test_the_second_upload_waits_for_the_first(server, connect):
    job = Job(server)
    first, second = job.offer(), job.offer()
    one, two = connect(server), connect(server)
    half_way(job, one, first, 1)
    two.fetch(second)
    two.send(result_frame(second, job.result(2)))
    wait_until(lambda: waiting_in(job.claim) == 1)
    one.send(job.result(1)[-1:])
    assert one.answer() == (Kind.ACCEPTED, b"")
    assert two.answer() == (Kind.REFUSED, b"the task is over")
    assert (job.output == 1).all()
    assert len(job.calls) == 1


@pytest.mark.parametrize("how", ["dies", "is withdrawn"])
def test_the_second_upload_replaces_a_first_that(server, connect, how):
    job = Job(server)
    first, second = job.offer(), job.offer()
    one, two = connect(server), connect(server)
    half_way(job, one, first, 1)
    two.fetch(second)
    two.send(result_frame(second, job.result(2)))
    wait_until(lambda: waiting_in(job.claim) == 1)
    if how == "dies":
        one.close()
    else:
        server.withdraw(first)
    assert two.answer() == (Kind.ACCEPTED, b"")
    assert (job.output == 2).all()
    assert len(job.calls) == 1
    assert server.statistics.duplicates_refused == 0


def test_the_upload_that_waits_is_withdrawn(server, connect):
    job = Job(server)
    first, second = job.offer(), job.offer()
    one, two = connect(server), connect(server)
    half_way(job, one, first, 1)
    two.fetch(second)
    two.send(result_frame(second, job.result(2)))
    wait_until(lambda: waiting_in(job.claim) == 1)
    server.withdraw(second)
    assert two.answer() == (Kind.REFUSED, b"the task is over")
    one.send(job.result(1)[-1:])
    assert one.answer() == (Kind.ACCEPTED, b"")
    assert (job.output == 1).all()


@pytest.mark.parametrize("done", [True, False])
def test_an_upload_waits_for_the_servers_own_cores(server, connect, done):
    job = Job(server)
    token, peer = job.offer(), connect(server)
    peer.fetch(token)
    assert job.claim.begin(None)
    peer.send(result_frame(token, job.result(2)))
    wait_until(lambda: waiting_in(job.claim) == 1)
    job.output[:] = 3
    if done:
        job.claim.accept(None)
        assert peer.answer() == (Kind.REFUSED, b"the task is over")
        assert (job.output == 3).all()
    else:
        job.claim.abandon(None)
        assert peer.answer() == (Kind.ACCEPTED, b"")
        assert (job.output == 2).all()
    assert len(job.calls) == 1


@pytest.mark.parametrize("seed", range(8))
def test_attempts_that_race(plain, seed):
    """Uploads, deaths, withdrawals and the fall-back in any order: one result, whole, announced once."""
    rng = np.random.default_rng(seed)
    rows = 20_000
    for _ in range(6):
        job = Job(plain, rows)
        final = []
        job.claim = Claim(lambda job=job, final=final: final.append(job.output.copy()))
        tokens = [job.offer() for _ in range(4)]
        orders = rng.integers(0, 3, 4)
        cuts = rng.integers(1, 16 * rows, 4)
        accepted = []

        def attempt(place, job=job, tokens=tokens, orders=orders, cuts=cuts, accepted=accepted):
            peer = Peer(plain)
            with contextlib.suppress(EOFError, OSError):
                if peer.fetch(tokens[place])[0] is Kind.BLOCKS:
                    frame = result_frame(tokens[place], job.result(place + 1))
                    if orders[place] == 0:
                        peer.send(frame[: cuts[place]])
                    else:
                        peer.send(frame)
                        if peer.answer()[0] is Kind.ACCEPTED:
                            accepted.append(place + 1)
            peer.close()

        def withdraw(tokens=tokens, orders=orders):
            for token, order in zip(tokens, orders, strict=True):
                if order == 2:
                    plain.withdraw(token)

        def fall_back(job=job, accepted=accepted):
            if job.claim.begin(None):
                job.output[:] = 9
                job.claim.accept(None)
                accepted.append(9)

        work = [*(lambda place=place: attempt(place) for place in range(4)), withdraw, fall_back]
        threads = [threading.Thread(target=work[place]) for place in rng.permutation(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for token in tokens:
            plain.withdraw(token)
        assert len(final) == 1
        # The answer ACCEPTED may be lost with its connection, so at most one heard it.
        assert accepted in ([], [final[0][0]])
        np.testing.assert_array_equal(final[0], np.full(2 * rows, final[0][0]))
        np.testing.assert_array_equal(job.output, final[0])


# ---- the claim alone ----


def test_the_claims_states():
    calls = []
    claim = Claim(lambda: calls.append(claim.taken))
    assert not claim.taken
    assert claim.begin("a")
    claim.abandon("a")
    assert claim.begin(None)
    for wrong in ("a", "b"):
        with pytest.raises(RuntimeError, match="not the one that is writing"):
            claim.accept(wrong)
        with pytest.raises(RuntimeError, match="not the one that is writing"):
            claim.abandon(wrong)
    assert (claim.taken, calls) == (False, [])
    claim.accept(None)
    assert (claim.taken, calls) == (True, [True])
    assert not claim.begin("a")
    assert not claim.begin(None)
    for late in (claim.accept, claim.abandon):
        with pytest.raises(RuntimeError, match="not the one that is writing"):
            late(None)
    assert calls == [True]


def test_who_is_retired_does_not_begin_and_stops_waiting():
    claim = Claim(lambda: None)
    claim.retire("a")
    assert not claim.begin("a")
    assert claim.begin("b")
    thread, results = in_thread(lambda: claim.begin("c"))
    other, others = in_thread(lambda: claim.begin("d"))
    wait_until(lambda: waiting_in(claim) == 2)
    claim.retire("c")
    thread.join()
    assert results == [False]
    claim.retire("b")  # who writes already may finish
    claim.abandon("b")
    other.join()
    assert others == [True]


def test_one_writes_at_a_time_and_one_for_good():
    for taker in range(20):
        calls: list[int] = []
        claim = Claim(lambda calls=calls: calls.append(1))
        writing: list[int] = []
        most: list[int] = []

        def write(owner, claim=claim, writing=writing, most=most, taker=taker):
            for _ in range(50):
                if not claim.begin(owner):
                    return
                writing.append(owner)
                most.append(len(writing))
                writing.remove(owner)
                if owner == taker % 6 and len(most) > 5 * taker:
                    claim.accept(owner)
                    return
                claim.abandon(owner)

        threads = [threading.Thread(target=write, args=(owner,)) for owner in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(most) == {1}
        assert calls == [1] * claim.taken


# ---- who may connect ----


def refused_by_server(server: TensorServer, context: ssl.SSLContext) -> bool:
    """Whether a client with these settings gets nothing; it may hear of it with its first answer only."""
    try:
        peer = Peer(server, context)
    except (ssl.SSLError, ConnectionError):
        return True
    try:
        return peer.fetch("00" * 32)[0] is None
    except (ssl.SSLError, ConnectionError, EOFError):
        return True
    finally:
        peer.close()


def stranger(version: ssl.TLSVersion | None = None, identity: tuple[str, str] | None = None):
    """A client that believes any server."""
    if identity is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    else:
        context = tls.client_context(RUN.authority, *identity)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if version is not None:
        context.minimum_version = context.maximum_version = version
    return context


EXPIRED = make_credentials("run", timedelta(minutes=-30))

STRANGERS = {
    "no certificate": lambda: stranger(),
    "another run's certificate": lambda: stranger(identity=(FOREIGN.client_certificate, FOREIGN.client_key)),
    "the server's certificate": lambda: stranger(identity=(RUN.server_certificate, RUN.server_key)),
    "TLS 1.2": lambda: stranger(ssl.TLSVersion.TLSv1_2, (RUN.client_certificate, RUN.client_key)),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_are_refused(who):
    with TensorServer(context=RUN.server_context()) as server:
        assert refused_by_server(server, STRANGERS[who]())
        wait_until(lambda: server.statistics.handshakes_failed == 1)
        job, peer = Job(server), Peer(server, client_context())
        job.arrives(job.offer(), 2, peer)
        peer.close()
        assert server.statistics.refused == 0


def test_certificates_end(capfd):
    with TensorServer(context=EXPIRED.server_context()) as server:
        identity = (EXPIRED.client_certificate, EXPIRED.client_key)
        assert refused_by_server(server, stranger(identity=identity))
        with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
            Peer(server, tls.client_context(EXPIRED.authority, *identity))
    assert capfd.readouterr() == ("", "")


def test_plain_bytes_to_a_server_with_tls_and_the_other_way_round():
    with TensorServer(context=RUN.server_context()) as server:
        peer = Peer(server)
        peer.send(fetch_frame("00" * 32))
        assert peer.hears_the_end()
        wait_until(lambda: server.statistics.handshakes_failed == 1)
        peer.close()
    with TensorServer(context=None) as server:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            Peer(server, client_context())
        wait_until(lambda: server.statistics.refused == 1)


@pytest.mark.parametrize(
    ("impostor", "message"),
    [
        (FOREIGN, "verify failed"),
        (
            replace(RUN, server_certificate=RUN.client_certificate, server_key=RUN.client_key),
            "unsuitable certificate purpose|unsupported certificate purpose",
        ),
    ],
    ids=["another run's server", "a worker of this run"],
)
def test_workers_believe_the_runs_servers_only(impostor, message):
    """A worker's certificate opens nothing to other workers."""
    with TensorServer(context=impostor.server_context()) as server:
        with pytest.raises(ssl.SSLCertVerificationError, match=message):
            Peer(server, client_context())


def test_the_servers_name_is_wanted():
    with TensorServer(context=RUN.server_context()) as server:
        sock = socket.create_connection(server.address, timeout=30)
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            client_context().wrap_socket(sock, server_hostname="another.dorylus")


def test_credentials_hide_their_keys_and_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    context = RUN.server_context()
    assert list(tmp_path.iterdir()) == []
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert "PRIVATE" not in repr(RUN)
    assert set(RUN.descriptor()) == {"ca", "certificate", "key"}
    assert RUN.server_key not in RUN.descriptor().values()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "example.org"])
def test_without_tls_only_this_machine_may_connect(host):
    with pytest.raises(ValueError, match=f"loopback only, got host '{host}'"):
        TensorServer(host, context=None)


# ---- too many, and the end ----


def test_too_many_connections(context, connect):
    """Those that never fetched make way, the oldest first; those that did stay."""
    with TensorServer(context=RUN.server_context() if context else None, max_connections=3) as server:
        workers = [connect(server) for _ in range(2)]
        for peer in workers:
            job = Job(server)
            job.arrives(job.offer(), 1, peer)
        silent = [connect(server, False) for _ in range(3)]
        assert silent[0].hears_the_end()
        assert silent[1].hears_the_end()
        job = Job(server)
        job.arrives(job.offer(), 1, connect(server))
        assert silent[2].hears_the_end()
        assert connect(server, False).hears_the_end(), "all three are in use"
        for peer in workers:
            job = Job(server)
            job.arrives(job.offer(), 1, peer)
        wait_until(lambda: server.statistics.turned_away == 4)
        assert server.statistics.connections == 7


def test_closing_while_peers_hang_everywhere(context, connect, monkeypatch):
    """Nobody's patience ends here: who is not cut off lets this test hang."""
    monkeypatch.setattr(tensor_server, "_HANDSHAKE", 3600.0)
    server = TensorServer(context=RUN.server_context() if context else None, seconds=3600.0)
    big = np.zeros(BIG, np.float32)
    silent = connect(server, False)  # in the handshake, with TLS
    half_header = connect(server)
    half_header.send(b"DHP")
    unread = connect(server)
    unread.send(fetch_frame(server.offer([Block(big, True)], [], 0, Claim(lambda: None))))
    unread.receive(100)
    idle, job = connect(server), Job(server)
    job.arrives(job.offer(), 1, idle)
    job = Job(server)
    first, second = connect(server), connect(server)
    half_way(job, first, job.offer(), 1)
    token = job.offer()
    second.fetch(token)
    second.send(result_frame(token, job.result(2)))
    wait_until(lambda: waiting_in(job.claim) == 1)
    own = Job(server)
    third, token = connect(server), own.offer()
    third.fetch(token)
    assert own.claim.begin(None)  # the server's own cores are computing
    third.send(result_frame(token, own.result(2)))
    wait_until(lambda: waiting_in(own.claim) == 1)

    server.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("tensor server")]
    assert job.claim.begin(None)
    assert (job.calls, own.calls) == ([], [])
    own.claim.accept(None)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address)
    for peer in (silent, half_header, unread, idle, first, second, third):
        assert peer.hears_the_end()
    with pytest.raises(RuntimeError, match="closed"):
        job.offer()
    server.withdraw(token)
    server.close()


def test_closing_lets_no_attempt_succeed_another(plain, monkeypatch):
    """The first one's end gives the second the right to write; it is over by then."""
    job = Job(plain)
    first, second = job.offer(), job.offer()
    one, two = Peer(plain), Peer(plain)
    half_way(job, one, first, 1)
    two.fetch(second)
    two.send(result_frame(second, job.result(2)))
    wait_until(lambda: waiting_in(job.claim) == 1)
    withdraw = attempts.Attempts.withdraw

    def withdraw_and_wait(self, token):
        withdraw(self, token)
        if token.hex() == first:
            wait_until(lambda: not waiting_in(job.claim) and job.claim._writer is claim._NOBODY)

    monkeypatch.setattr(attempts.Attempts, "withdraw", withdraw_and_wait)
    plain.close()
    assert (job.calls, job.claim.taken) == ([], False)
    one.close()
    two.close()


def test_closing_while_peers_come(plain):
    """No connection slips in behind."""
    stop = threading.Event()

    def knock():
        while not stop.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection(plain.address, timeout=5).close()

    threads = [threading.Thread(target=knock) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: plain.statistics.connections > 20)
    plain.close()
    names = [one.name for one in threading.enumerate() if one.name.startswith("tensor server")]
    stop.set()
    for thread in threads:
        thread.join()
    assert names == []


def test_a_callback_that_fails_is_not_silent(plain, monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))

    def fail():
        raise ZeroDivisionError("in accepted")

    token = plain.offer([Block(np.zeros(1), True)], [], 0, Claim(fail))
    peer = Peer(plain)
    peer.fetch(token)
    peer.send(result_frame(token, b""))
    assert peer.hears_the_end()
    wait_until(lambda: told)
    assert str(told[0]) == "in accepted"
    peer.close()
