"""Frames on the wire: what is packed, what is refused, and moving bytes with a deadline."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from lambda_pkg.protocol import (
    Disconnected,
    Kind,
    ProtocolError,
    as_bytes,
    is_loopback,
    pack_header,
    parse_header,
    receive_into,
    refusal,
    send_all,
)


def soon() -> float:
    """A deadline that no test reaches."""
    return time.monotonic() + 30


@pytest.fixture
def pair():
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(30)
    yield ends
    for end in ends:
        end.close()


def test_the_header_byte_by_byte():
    header = pack_header(Kind.RESULT, 0x0102030405)
    assert header == b"DHPC" + b"\x03" + b"\0\0\0" + b"\x05\x04\x03\x02\x01\0\0\0"


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("length", [0, 1, 200, 1 << 40])
@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_a_header_is_read_as_it_was_packed(kind, length, form):
    assert parse_header(form(pack_header(kind, length))) == (kind, length)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "16 bytes, got 0"),
        (b"DHPC\x01\0\0\0" + bytes(7), "16 bytes, got 15"),
        (b"DHPC\x01\0\0\0" + bytes(9), "16 bytes, got 17"),
        (b"GET / HTTP/1.1\r\n", "starts with b'DHPC', got b'GET '"),
        (b"dhpc\x01\0\0\0" + bytes(8), "got b'dhpc'"),
        (b"DHPC\x00\0\0\0" + bytes(8), "kinds 1 to 5, got 0"),
        (b"DHPC\x06\0\0\0" + bytes(8), "kinds 1 to 5, got 6"),
        (b"DHPC\x01\0\0\x01" + bytes(8), "pad"),
        (b"DHPC\x01\x80\0\0" + bytes(8), "pad"),
        (
            b"DHPC\x01\0\0\0" + b"\xff" * 8,
            "FETCH may have 1099511627776 bytes here, got 18446744073709551615",
        ),
    ],
)
def test_what_is_no_header_is_refused(header, message):
    with pytest.raises(ProtocolError, match=message):
        parse_header(header)


def test_a_length_is_held_to_the_callers_limit():
    assert parse_header(pack_header(Kind.FETCH, 40), largest=40) == (Kind.FETCH, 40)
    with pytest.raises(ProtocolError, match="40 bytes here, got 41"):
        parse_header(pack_header(Kind.FETCH, 41), largest=40)


def test_a_million_random_headers():
    """Random bytes, half of them with a good start: right ones are read, all others refused, nothing else."""
    rng = np.random.default_rng(5)
    n = 1_000_000
    headers = rng.integers(0, 256, (n, 16), dtype=np.uint8)
    headers[::2, :8] = np.frombuffer(b"DHPC\0\0\0\0", np.uint8)
    headers[::2, 4] = rng.integers(0, 8, n // 2)
    headers[::4, 10:] = 0
    headers[::8, 5 + rng.integers(3)] = 1
    expected = (
        (headers[:, :4] == np.frombuffer(b"DHPC", np.uint8)).all(1)
        & (headers[:, 4] >= 1)
        & (headers[:, 4] <= 5)
        & (headers[:, 5:8] == 0).all(1)
        & (headers[:, 8:].copy().view("<u8")[:, 0] <= 1 << 20)
    )
    view, read = memoryview(headers.tobytes()), np.zeros(n, bool)
    for place in range(n):
        try:
            kind, length = parse_header(view[16 * place : 16 * place + 16], largest=1 << 20)
        except ProtocolError:
            continue
        read[place] = kind == headers[place, 4] and 0 <= length <= 1 << 20
    assert 10_000 < expected.sum() < n / 2
    np.testing.assert_array_equal(read, expected)


def test_a_refusal_is_cut():
    assert refusal("too late") == pack_header(Kind.REFUSED, 8) + b"too late"
    long = refusal("ü" * 300)
    assert parse_header(long[:16]) == (Kind.REFUSED, 200)
    assert long[16:] == "ü".encode() * 100


@pytest.mark.parametrize(
    ("host", "stays"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("::", False),
        ("", False),
        ("127.example.org", False),
        ("128.0.0.1", False),
    ],
)
def test_what_is_loopback(host, stays):
    assert is_loopback(host) is stays


@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (0,), (0, 7), (7, 0)])
@pytest.mark.parametrize("dtype", ["<f4", "<f8", "u1", "<i8", "?"])
def test_arrays_as_bytes(shape, dtype):
    array = np.ones(shape, dtype)
    view = as_bytes(array)
    assert bytes(view) == array.tobytes()
    if array.size:
        view[0] = 77
        assert array.tobytes()[0] == 77, "a copy"


def test_a_buffer_is_filled_from_pieces(pair):
    here, there = pair
    data = np.random.default_rng(0).bytes(100_000)

    def dribble():
        for start in range(0, len(data), 7001):
            there.sendall(data[start : start + 7001])
        there.sendall(b"next")

    sender = threading.Thread(target=dribble)
    sender.start()
    buffer = bytearray(len(data))
    receive_into(here, memoryview(buffer), soon())
    sender.join()
    assert buffer == data
    assert here.recv(10) == b"next"


def test_nothing_is_received_for_an_empty_buffer(pair):
    receive_into(pair[0], memoryview(b""), 0.0)


def test_the_end_comes_too_early(pair):
    pair[1].sendall(b"abc")
    pair[1].shutdown(socket.SHUT_WR)
    with pytest.raises(Disconnected, match="after 3 of 10 bytes"):
        receive_into(pair[0], memoryview(bytearray(10)), soon())


@pytest.mark.parametrize("patience", [-1.0, 0.05])
def test_a_silent_peer_is_given_up(pair, patience):
    with pytest.raises(TimeoutError, match="timed out"):
        receive_into(pair[0], memoryview(bytearray(10)), time.monotonic() + patience)


def test_a_peer_that_trickles_gains_nothing(pair):
    """Each byte comes in time, but the whole does not."""
    stop = threading.Event()

    def trickle():
        while not stop.wait(0.01):
            pair[1].sendall(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        with pytest.raises(TimeoutError, match="timed out"):
            receive_into(pair[0], memoryview(bytearray(1_000_000)), time.monotonic() + 0.2)
    finally:
        stop.set()
        sender.join()


def pieces_of(sizes: list[int]) -> list[bytes | memoryview]:
    rng = np.random.default_rng(1)
    data = [rng.bytes(size) for size in sizes]
    return [memoryview(one) if place % 2 else one for place, one in enumerate(data)]


@pytest.mark.parametrize(
    "sizes",
    [[], [0], [5], [16, 0, 32, 4], [1] * 1500, [16, 300_000, 3, 0, 200_000, 1], [20_000] * 40],
    ids=lambda sizes: f"{len(sizes)}x{max(sizes, default=0)}",
)
def test_all_pieces_are_sent_in_order(pair, sizes):
    here, there = pair
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # so that the system takes a part at a time
    pieces = pieces_of(sizes)
    received = bytearray(sum(sizes))
    receiver = threading.Thread(target=receive_into, args=(there, memoryview(received), soon()))
    receiver.start()
    assert send_all(here, pieces, soon()) == sum(sizes)
    receiver.join()
    assert received == b"".join(bytes(piece) for piece in pieces)


def test_a_peer_that_does_not_read_is_given_up(pair):
    with pytest.raises(TimeoutError, match="timed out"):
        send_all(pair[0], [bytes(50_000_000)], time.monotonic() + 0.1)
