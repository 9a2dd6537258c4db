"""Serves the inputs of dense tasks to workers, and takes their results.

One thread accepts connections, and each connection has its own, which does its handshake too: a peer that
hangs, sends nonsense or has no certificate holds up nobody but itself. All that a peer can name is an attempt
at a task, by a token that was made for it (`attempts`). Results are received straight into their buffers, by
one attempt of a task at a time (`claim`); nothing is allocated that a peer has asked for.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from dorylus_hpc.serverless.attempts import Attempt, Attempts
from dorylus_hpc.serverless.attempts import Block as Block
from dorylus_hpc.serverless.attempts import TensorStatistics as TensorStatistics
from dorylus_hpc.serverless.claim import Claim as Claim
from lambda_pkg.protocol import (
    FETCH_BODY,
    HEADER,
    TOKEN_BYTES,
    Disconnected,
    Kind,
    ProtocolError,
    as_bytes,
    deadline_for,
    is_loopback,
    pack_header,
    parse_header,
    receive_into,
    refusal,
    send_all,
    tune,
)

_HANDSHAKE = 10.0  # seconds at most, for a peer of whom nothing is known
_IDLE = 900.0  # seconds between two tasks of a sandbox; Lambda keeps idle sandboxes for about as long
_PIECE = 64 << 10  # bytes, in which a result that nobody wants is read
_PAUSE = 0.1  # seconds until the system may have descriptors again


class TensorServer:
    """Offers attempts at tasks to workers. A context manager, which closes it at the end.

    Parameters
    ----------
    host, port
        Where to listen; port 0 is any.
    context
        TLS (`Credentials.server_context`); None for plain TCP, on loopback only.
    max_connections
        With so many, the oldest that never fetched anything makes way for a new one; if there is none, the
        new one is closed.
    seconds
        Patience with a peer in the middle of a frame (and one more a megabyte).

    Attributes
    ----------
    address : tuple of (str, int)
        Host and port it listens on.

    Raises
    ------
    ValueError
        No TLS although others than this machine could connect.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        context: ssl.SSLContext | None,
        max_connections: int = 1024,
        seconds: float = 30.0,
    ) -> None:
        if context is None and not is_loopback(host):
            raise ValueError(f"a tensor server without TLS listens on loopback only, got host {host!r}")
        self._context, self._seconds, self._most = context, seconds, max_connections
        self._attempts = Attempts()
        self._lock = threading.Lock()
        self._connections: dict[_Connection, None] = {}  # the oldest first
        self._closing = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=512)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._acceptor = threading.Thread(target=self._accept, name="tensor server", daemon=True)
        self._acceptor.start()

    def offer(self, inputs: Sequence[Block], outputs: Sequence[np.ndarray], chunk: int, claim: Claim) -> str:
        """Offer one attempt at a task.

        Parameters
        ----------
        inputs
            In the order of the descriptor. One at least has rows, and all that have have equally many.
        outputs
            Where results go, in the order of the descriptor: C-contiguous, little-endian, writeable. A result
            that breaks off leaves them half written, and another attempt fetches the inputs again: outputs
            must not share memory with inputs of their task. Where a task works in place, give buffers aside,
            and copy in the claim's `accepted`.
        chunk
            Rows a chunk; 0: all at once.
        claim
            The task's; the same for all its attempts.

        Returns
        -------
        str
            The attempt's token, 64 hexadecimal digits. `withdraw` it, whatever becomes of it.

        Raises
        ------
        ValueError
            Arrays that cannot be sent or received as they are.
        RuntimeError
            The server is closed.
        """
        return self._attempts.offer(inputs, outputs, chunk, claim)

    def withdraw(self, token: str) -> None:
        """End an attempt: the server lets its arrays go, and whoever still comes with the token is refused.

        On return nobody reads or writes the arrays on its behalf; a connection that did is cut. If it was not
        accepted by then (`Claim.taken` tells; `accepted` may be running still), it never will be.
        """
        self._attempts.withdraw(bytes.fromhex(token))

    @property
    def statistics(self) -> TensorStatistics:
        """A copy of the counters."""
        return self._attempts.statistics

    def close(self) -> None:
        """Withdraw all attempts and cut all connections. No thread or socket is left. Idempotent.

        Waits for calls of `accepted` that are running: do not hold a lock that they want.
        """
        with self._lock:
            self._closing.set()
            connections = list(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._attempts.close()
        for connection in connections:
            connection.cut()
        for thread in [self._acceptor, *(connection.thread for connection in connections)]:
            thread.join()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- connections ----

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except ConnectionError:  # it went before it was accepted
                continue
            except OSError:  # closing, or no descriptor is left
                self._closing.wait(_PAUSE)
                continue
            if not self._admit(sock):
                sock.close()

    def _admit(self, sock: socket.socket) -> bool:
        """Start to serve a connection, unless there are too many."""
        self._attempts.count(connections=1)
        connection = _Connection(self._attempts, sock, self._context, self._seconds, self._forget)
        with self._lock:
            if self._closing.is_set() or not self._has_room():
                return False
            try:
                connection.thread.start()
            except RuntimeError:  # the system has no thread left
                self._attempts.count(turned_away=1)
                return False
            self._connections[connection] = None
            return True

    def _has_room(self) -> bool:
        """Whether there is room for one more connection, or one makes room."""
        if len(self._connections) < self._most:
            return True
        self._attempts.count(turned_away=1)
        if len(self._connections) < 2 * self._most:  # those that were cut end soon, but not at once
            for connection in self._connections:
                if connection.is_stranger and not connection.was_cut:
                    connection.cut()
                    return True
        return False

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.pop(connection, None)


class _Connection:
    """A peer, and the thread that serves it."""

    def __init__(
        self,
        attempts: Attempts,
        sock: socket.socket,
        context: ssl.SSLContext | None,
        seconds: float,
        ended: Callable[[_Connection], None],
    ) -> None:
        self._attempts, self._socket, self._context = attempts, sock, context
        self._seconds, self._ended = seconds, ended
        self._lock = threading.Lock()  # the socket is not replaced or closed while another thread cuts it
        self._fetched: Attempt | None = None  # its RESULT may come
        self._head = memoryview(bytearray(HEADER.size))
        self._body = memoryview(bytearray(FETCH_BODY.size))
        self.is_stranger = True  # it has not named an attempt
        self.was_cut = False
        self.thread = threading.Thread(target=self._run, name="tensor server connection", daemon=True)

    def cut(self) -> None:
        """End at once what it sends or receives; any thread may call it."""
        with self._lock, contextlib.suppress(OSError):
            self.was_cut = True
            # Not SSLSocket.shutdown: that forgets TLS, and the thread would read on without.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            if self._shake_hands():
                while True:
                    self._serve_frame()
        except ProtocolError as error:
            self._attempts.count(refused=1)
            with contextlib.suppress(OSError):
                self._send([refusal(str(error))], deadline_for(0, 1.0))
        except OSError:  # it went, was too slow, or was cut
            pass
        finally:
            with self._lock:
                self._socket.close()
            self._ended(self)

    def _shake_hands(self) -> bool:
        try:
            tune(self._socket)
            if self._context is not None:
                with self._lock:
                    secure = self._context.wrap_socket(
                        self._socket, server_side=True, do_handshake_on_connect=False
                    )
                    self._socket = secure
                secure.settimeout(min(self._seconds, _HANDSHAKE))  # for all of it
                secure.do_handshake()
        except (OSError, ValueError):  # ValueError: it went before TLS began
            self._attempts.count(handshakes_failed=1)
            return False
        return True

    def _serve_frame(self) -> None:
        self._socket.settimeout(self._seconds if self.is_stranger else _IDLE)
        count = self._socket.recv_into(self._head)
        if not count:
            raise Disconnected("the peer closed the connection")
        self._receive(self._head[count:])
        kind, length = parse_header(self._head)
        if kind is Kind.FETCH:
            self._serve_fetch(length)
        elif kind is Kind.RESULT:
            self._serve_result(length)
        else:
            raise ProtocolError(f"a worker sends FETCH or RESULT, not {kind.name}")

    def _serve_fetch(self, length: int) -> None:
        if length != FETCH_BODY.size:
            raise ProtocolError(f"FETCH has {FETCH_BODY.size} bytes, not {length}")
        self._receive(self._body)
        self._attempts.count(bytes_received=HEADER.size + length)
        token, mask = FETCH_BODY.unpack(self._body)
        self._fetched = None
        found = self._attempts.fetch(token, mask, self)
        if isinstance(found, str):
            self._send([refusal(found)], deadline_for(0, self._seconds))
            return
        self.is_stranger, self._fetched = False, found
        self._touching(found, lambda: self._send_blocks(found, mask))

    def _send_blocks(self, attempt: Attempt, mask: int) -> None:
        views = attempt.blocks(mask)
        size = sum(view.nbytes for view in views)
        self._send([pack_header(Kind.BLOCKS, size), *views], deadline_for(size, self._seconds))

    def _serve_result(self, length: int) -> None:
        attempt, self._fetched = self._fetched, None
        if attempt is None:
            raise ProtocolError("RESULT before FETCH")
        if length != TOKEN_BYTES + attempt.result_bytes:
            raise ProtocolError(f"RESULT has {TOKEN_BYTES + attempt.result_bytes} bytes here, not {length}")
        self._receive(self._body[:TOKEN_BYTES])
        if self._body[:TOKEN_BYTES] != attempt.token:
            raise ProtocolError("RESULT has another token than FETCH")
        claim = attempt.claim
        counts, unread = (False, attempt.result_bytes) if claim is None else self._write(attempt, claim)
        self._discard(unread)
        self._attempts.count(bytes_received=HEADER.size + length, duplicates_refused=int(not counts))
        if counts and claim is not None:
            claim.announce()
        answer = pack_header(Kind.ACCEPTED, 0) if counts else refusal("the task is over")
        self._send([answer], deadline_for(0, self._seconds))

    def _write(self, attempt: Attempt, claim: Claim) -> tuple[bool, int]:
        """Receive the outputs if they are wanted still; whether they count, and how many bytes are unread."""
        counts, unread = False, attempt.result_bytes
        if claim.begin(attempt):
            try:
                if self._attempts.touch(attempt, self):
                    self._touching(attempt, lambda: self._receive_outputs(attempt))
                    unread = 0
                    counts = self._attempts.settle(attempt)
            finally:
                if not counts:
                    claim.abandon(attempt)
        return counts, unread

    def _receive_outputs(self, attempt: Attempt) -> None:
        deadline = deadline_for(attempt.result_bytes, self._seconds)
        for output in attempt.outputs:
            receive_into(self._socket, as_bytes(output), deadline)

    def _touching(self, attempt: Attempt, work: Callable[[], None]) -> None:
        """Do something with the arrays of an attempt; afterwards nothing here refers to them."""
        failure = None
        try:
            work()
        except OSError as error:
            failure = error.with_traceback(None)  # whose frames hold views of the arrays
        finally:
            self._attempts.leave(attempt)
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # or the error and this frame would keep each other

    def _discard(self, size: int) -> None:
        scratch = memoryview(bytearray(min(size, _PIECE)))
        deadline = deadline_for(size, self._seconds)
        while size:
            piece = scratch[: min(size, _PIECE)]
            receive_into(self._socket, piece, deadline)
            size -= len(piece)

    def _receive(self, view: memoryview) -> None:
        receive_into(self._socket, view, deadline_for(0, self._seconds))

    def _send(self, pieces: Sequence[bytes | memoryview], deadline: float) -> None:
        self._attempts.count(bytes_sent=send_all(self._socket, pieces, deadline))
