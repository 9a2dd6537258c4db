"""Nonsense for the tensor server: a million headers on the parser, thousands of frames through sockets.

    python -m bench.fuzz_frames [--headers N] [--frames N] [--seed S]

Frames go to two servers, plain (where nonsense reaches the parser) and with TLS (where it reaches the
handshake, and with a worker's certificate the parser). Meanwhile and afterwards a worker does tasks. Fails if
anything but a refusal comes of it, if a task fails, or if memory grows.
"""

from __future__ import annotations

import argparse
import gc
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

from bench.machine import resident_bytes
from dorylus_hpc.serverless.certificates import Credentials, make_credentials
from dorylus_hpc.serverless.claim import Claim
from dorylus_hpc.serverless.tensor_server import Block, TensorServer
from lambda_pkg import tls
from lambda_pkg.protocol import HEADER, Kind, ProtocolError, pack_header, parse_header
from lambda_pkg.worker import Sandbox

GROWTH = 8 << 20  # bytes that may be noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--headers", type=int, default=1_000_000)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    fuzz_parser(rng, options.headers)
    credentials = make_credentials("fuzz")
    for name, one in (("plain", None), ("TLS", credentials)):
        fuzz_sockets(name, rng, options.frames // 2, one)


def fuzz_parser(rng: np.random.Generator, n: int) -> None:
    """Random headers, half of them right but for some bytes."""
    random = rng.integers(0, 256, (n, HEADER.size), dtype=np.uint8)
    good = np.frombuffer(b"".join(pack_header(kind, 40) for kind in Kind), np.uint8).reshape(-1, HEADER.size)
    random[::2] = good[rng.integers(0, len(good), len(random[::2]))]
    random[np.arange(n), rng.integers(0, HEADER.size, n)] = rng.integers(0, 256, n)
    view = memoryview(random.tobytes())
    outcomes: Counter[str] = Counter()
    gc.collect()
    before, began = resident_bytes(), time.perf_counter()
    for start in range(0, n * HEADER.size, HEADER.size):
        try:
            kind, length = parse_header(view[start : start + HEADER.size], largest=1 << 20)
        except ProtocolError:
            outcomes["refused"] += 1
        else:
            assert kind in Kind and 0 <= length <= 1 << 20
            outcomes["read"] += 1
    seconds, grown = time.perf_counter() - began, resident_bytes() - before
    assert grown < GROWTH, f"memory grew by {grown} bytes"
    print(f"parser   {n} headers in {seconds:.1f} s: {dict(outcomes)}; memory {grown / 1e6:+.1f} MB")


class Tasks:
    """A worker that does one task after another, and says how many were right."""

    def __init__(self, server: TensorServer, credentials: Credentials | None) -> None:
        self._server, self._tls = server, credentials.descriptor() if credentials else None
        self._sandbox = Sandbox()
        self.done = 0

    def one(self) -> None:
        h, w = np.full((64, 8), self.done, np.float32), np.ones((8, 2), np.float32)
        out = np.zeros((64, 2), np.float32)
        claim = Claim(lambda: None)
        token = self._server.offer([Block(h, True), Block(w, False)], [out], 16, claim)
        event: dict[str, Any] = {
            "run": "fuzz",
            "server": dict(zip(("host", "port"), self._server.address, strict=True)),
            "tls": self._tls,
            "token": token,
            "ops": [["apply_vertex", {}, ["h", "w"], ["z"]]],
            "inputs": [
                {"name": "h", "dtype": "<f4", "shape": h.shape, "rows": True},
                {"name": "w", "dtype": "<f4", "shape": w.shape, "rows": False},
            ],
            "outputs": [{"name": "z", "dtype": "<f4", "shape": out.shape, "rows": True}],
            "chunk": 16,
            "seconds": 30.0,
        }
        report = self._sandbox.work(event)
        self._server.withdraw(token)
        assert report["accepted"] and claim.taken, report
        np.testing.assert_array_equal(out, 8 * h[:, :2])
        self.done += 1

    def close(self) -> None:
        self._sandbox.close()


def fuzz_sockets(name: str, rng: np.random.Generator, n: int, credentials: Credentials | None) -> None:
    context = credentials.server_context() if credentials else None
    client = None
    if credentials:
        client = tls.client_context(
            credentials.authority, credentials.client_certificate, credentials.client_key
        )
    with TensorServer(context=context, seconds=5.0) as server:
        tasks = Tasks(server, credentials)
        data, out = np.zeros((256, 64), np.float32), np.zeros(4096, np.float32)
        claim = Claim(lambda: None)  # of a task that nonsense must not do
        refuse_some(server, rng, 200, client, data, out, claim)  # until pools and caches are full
        tasks.one()
        gc.collect()
        before, began = resident_bytes(), time.perf_counter()
        stop, failure = threading.Event(), []

        def go_on() -> None:
            try:
                while not stop.wait(0.01):
                    tasks.one()
            except BaseException as error:
                failure.append(error)

        worker = threading.Thread(target=go_on)
        worker.start()
        closed = refuse_some(server, rng, n, client, data, out, claim)
        stop.set()
        worker.join()
        if failure:
            raise failure[0]
        tasks.one()
        gc.collect()
        seconds, grown = time.perf_counter() - began, resident_bytes() - before
        assert not claim.taken, "nonsense was accepted"
        assert grown < GROWTH, f"memory grew by {grown} bytes"
        print(
            f"{name:8} {n} frames in {seconds:.1f} s: {dict(closed)}; {tasks.done} tasks done meanwhile and "
            f"after; memory {grown / 1e6:+.1f} MB\n         {server.statistics}"
        )
        tasks.close()


def refuse_some(
    server: TensorServer,
    rng: np.random.Generator,
    n: int,
    client: ssl.SSLContext | None,
    data: np.ndarray,
    out: np.ndarray,
    claim: Claim,
) -> Counter[str]:
    """Send so many wrong frames, each on its own connection, and count how connections end."""
    outcomes: Counter[str] = Counter()
    for _ in range(n):
        token = server.offer([Block(data, True)], [out], 0, claim)
        frame = wrong_frame(rng, bytes.fromhex(token), out.nbytes)
        sock = socket.create_connection(server.address, timeout=30)
        try:
            # With TLS one in four has no certificate.
            if client is not None and rng.integers(4):
                sock = client.wrap_socket(sock, server_hostname=tls.NAME)
            sock.sendall(frame)
            socket.socket.shutdown(sock, socket.SHUT_WR)
            first = sock.recv(1 << 16)
            while first and sock.recv(1 << 16):
                pass
            answer = Kind(first[4]).name if first[:4] == b"DHPC" else "closed"
            outcomes[f"answered {answer}" if answer != "closed" else answer] += 1
        except OSError:  # it was closed before it had heard, or said, everything
            outcomes["closed"] += 1
        finally:
            sock.close()
            server.withdraw(token)
    return outcomes


def wrong_frame(rng: np.random.Generator, token: bytes, result: int) -> bytes:
    """A frame, or two, that must not have their task done."""
    fetch = pack_header(Kind.FETCH, 40) + token + struct.pack("<Q", 1)
    right = fetch + pack_header(Kind.RESULT, 32 + result) + token + bytes(result)
    choice = rng.integers(6)
    if choice == 0:
        return rng.bytes(int(rng.integers(1, 200)))
    if choice == 1:  # a right exchange with a byte of the heads changed
        places = [*range(48), *range(49, 56 + 48)]  # without the lowest bits of the mask: they may be 0
        place, wrong = int(rng.choice(places)), bytearray(right)
        wrong[place] ^= int(rng.integers(1, 256))
        return bytes(wrong)
    if choice == 2:  # cut short
        return right[: int(rng.integers(1, len(right)))]
    if choice == 3:  # a length that is anything
        length = int(rng.integers(0, 2**63)) >> int(rng.integers(63))
        return fetch + HEADER.pack(b"DHPC", 3, bytes(3), length + (length == 32 + result)) + token
    if choice == 4:  # any kind, with any bytes behind it
        body = rng.bytes(int(rng.integers(0, 100)))
        return pack_header(Kind(int(rng.integers(1, 6))), len(body)) + body
    return fetch + pack_header(Kind.RESULT, 32 + result) + rng.bytes(32) + bytes(result)  # another token


if __name__ == "__main__":
    main()
