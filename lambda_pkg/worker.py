"""A worker's work on one task: fetch the inputs, compute, send the result.

What arrives in chunks is received by a second thread while the chunks before it are computed. Between tasks
a sandbox keeps its connections, and those inputs (weights) that have a key, until a task of another run
comes.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import numpy as np

from lambda_pkg import tls
from lambda_pkg.ops import Chunks, OutputSpec, chunk_bounds
from lambda_pkg.protocol import (
    FETCH_BODY,
    HEADER,
    REASON_BYTES,
    TOKEN_BYTES,
    Kind,
    ProtocolError,
    as_bytes,
    deadline_for,
    is_loopback,
    pack_header,
    parse_header,
    receive_into,
    send_all,
    tune,
)

_AHEAD = 2  # chunks that are received before they are computed
_KEYS = 2  # of one name: the newest weights, and those that intervals in flight still use

Arrays = dict[str, np.ndarray]


class TensorServerError(RuntimeError):
    """The tensor server cannot be reached, breaks off, is too slow, or answers nonsense."""


@dataclass(frozen=True)
class Input:
    """An input as a descriptor has it; `key` is None where it must not be kept."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    rows: bool
    key: str | None

    def bytes_of(self, rows: int | None = None) -> int:
        """Size of so many rows, or of the whole."""
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        return math.prod(shape) * self.dtype.itemsize


class Task:
    """A task's descriptor, taken apart."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        self.run: str = event["run"]
        self.address: tuple[str, int] = (event["server"]["host"], event["server"]["port"])
        self.tls: Mapping[str, str] | None = event["tls"]
        self.token = bytes.fromhex(event["token"])
        self.ops: Sequence[Any] = event["ops"]
        self.inputs = [
            Input(one["name"], np.dtype(one["dtype"]), tuple(one["shape"]), one["rows"], one.get("key"))
            for one in event["inputs"]
        ]
        self.outputs = {
            one["name"]: OutputSpec(tuple(one["shape"]), one["dtype"], one["rows"])
            for one in event["outputs"]
        }
        self.seconds: float = event["seconds"]
        rows = next(one.shape[0] for one in self.inputs if one.rows)
        self.bounds = chunk_bounds(rows, event["chunk"])


class Sandbox:
    """What a worker keeps from task to task. One thread works with it."""

    def __init__(self) -> None:
        self._identity: tuple[str, bytes] | None = None  # run, and digest of its certificates
        self._context: ssl.SSLContext | None = None
        self._connections: dict[tuple[str, int], Connection] = {}
        self._slots: list[Arrays] = []  # where chunks of the last task were received
        self._kept: dict[tuple[str, int, str], Arrays] = {}  # by server and name: by key, the oldest first

    def work(self, event: Mapping[str, Any], limit: float | None = None) -> dict[str, Any]:
        """Do one task.

        Parameters
        ----------
        event
            The task's descriptor.
        limit
            Until when (`time.monotonic`) all must be done.

        Returns
        -------
        dict
            As `handler.handler` describes it.
        """
        task = Task(event)
        host, port = task.address
        started = time.perf_counter()
        try:
            self._turn_to(task)
            report = self._work(task, math.inf if limit is None else limit)
        except (OSError, ProtocolError) as error:
            raise TensorServerError(
                f"tensor server {host}:{port}: {type(error).__name__}: {error}"
            ) from error
        report["seconds"]["total"] = time.perf_counter() - started
        return report

    def close(self) -> None:
        """Forget everything."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._kept.clear()
        self._slots.clear()
        self._context, self._identity = None, None

    def _turn_to(self, task: Task) -> None:
        """Forget what belongs to another run, and prepare TLS for this one."""
        if task.tls is None and not is_loopback(task.address[0]):
            raise ProtocolError("a task without TLS is for loopback only")
        pems = [] if task.tls is None else [task.tls[name] for name in ("ca", "certificate", "key")]
        identity = (task.run, hashlib.sha256("".join(pems).encode()).digest())
        if identity != self._identity:
            self.close()
            self._context = tls.client_context(*pems) if pems else None
            self._identity = identity

    def _work(self, task: Task, limit: float) -> dict[str, Any]:
        kept = {one.name: self._recall(task, one) for one in task.inputs}
        inputs = Inputs(task, kept, self._slots)
        began = time.perf_counter()
        connection, kind, length, connect = self._fetch(task, inputs.mask, limit)
        counts, reason, seconds = False, "", {"connect": connect, "fetch": 0.0, "compute": 0.0, "send": 0.0}
        try:
            if kind is Kind.BLOCKS:
                results, arrived = self._compute(task, inputs, connection, length, seconds)
                seconds["fetch"] = arrived - began - connect
                counts, reason = self._send(task, results, connection, seconds)
            else:
                reason = connection.reason(kind, length)
        except BaseException:
            connection.close()  # something may be under way on it
            raise
        self._connections[task.address] = connection
        return {
            "accepted": counts,
            "reason": reason,
            "seconds": seconds,
            "bytes_in": connection.bytes_in,
            "bytes_out": connection.bytes_out,
            "kept": inputs.kept,
        }

    def _fetch(self, task: Task, mask: int, limit: float) -> tuple[Connection, Kind, int, float]:
        """Ask for inputs; the connection, the head of the answer, and seconds it took to connect."""
        body = FETCH_BODY.pack(task.token, mask)
        kept = self._connections.pop(task.address, None)
        if kept is not None:
            kept.begin(task.seconds, limit)
            try:
                return kept, *kept.ask(body), 0.0
            except OSError as error:
                kept.close()
                if isinstance(error, TimeoutError) and error.errno is None:  # there, but slow
                    raise
                # Nobody was there: while the sandbox slept, the server, or something between, gave it up.
        start = time.perf_counter()
        fresh = Connection(task.address, self._context, task.seconds, limit)
        connect = time.perf_counter() - start
        try:
            return fresh, *fresh.ask(body), connect
        except BaseException:
            fresh.close()
            raise

    def _compute(
        self, task: Task, inputs: Inputs, connection: Connection, length: int, seconds: dict[str, float]
    ) -> tuple[Arrays, float]:
        """Receive the inputs and compute; the results, and when the last input was there."""
        if length != inputs.wanted_bytes:
            raise ProtocolError(f"BLOCKS has {inputs.wanted_bytes} bytes here, not {length}")
        program = Chunks(task.ops, inputs.receive_whole(connection), task.outputs)
        with Ahead(
            task.bounds, lambda *place: inputs.receive_rows(connection, *place), connection.cut
        ) as chunks:
            for first, stop, arrays in chunks:
                began = time.perf_counter()
                program.add(first, stop, arrays)
                seconds["compute"] += time.perf_counter() - began
        for one in task.inputs:
            self._keep(task, one, inputs.whole.get(one.name))
        return program.results, chunks.arrived

    def _send(
        self, task: Task, results: Arrays, connection: Connection, seconds: dict[str, float]
    ) -> tuple[bool, str]:
        start = time.perf_counter()
        arrays = [results[name] for name in task.outputs]
        size = TOKEN_BYTES + sum(array.nbytes for array in arrays)
        head = pack_header(Kind.RESULT, size) + task.token
        connection.send([head, *map(as_bytes, arrays)], size)
        kind, length = connection.head()
        if kind is Kind.ACCEPTED and length == 0:
            answer = True, ""
        else:
            answer = False, connection.reason(kind, length)
        seconds["send"] = time.perf_counter() - start
        return answer

    def _recall(self, task: Task, one: Input) -> np.ndarray | None:
        """The array that was kept under an input's key."""
        if one.key is None:
            return None
        array = self._kept.get((*task.address, one.name), {}).get(one.key)
        fits = array is not None and array.shape == one.shape and array.dtype == one.dtype
        return array if fits else None

    def _keep(self, task: Task, one: Input, array: np.ndarray | None) -> None:
        if one.key is None or array is None:
            return
        array.flags.writeable = False
        keys = self._kept.setdefault((*task.address, one.name), {})
        keys.pop(one.key, None)
        keys[one.key] = array
        while len(keys) > _KEYS:
            del keys[next(iter(keys))]


class Inputs:
    """The inputs of one task, as they are received.

    Parameters
    ----------
    task
    kept
        By name: what the sandbox has already, or None.
    slots
        Buffers of the last task; replaced where they do not fit.

    Attributes
    ----------
    whole : dict
        Inputs that are here, or are received, as a whole: those without rows, and those with a key.
    mask, wanted_bytes
        What is asked for.
    kept
        How many are not.
    """

    def __init__(self, task: Task, kept: Mapping[str, np.ndarray | None], slots: list[Arrays]) -> None:
        self.whole: Arrays = {name: array for name, array in kept.items() if array is not None}
        self.kept = len(self.whole)
        self._wanted = [one for one in task.inputs if one.name not in self.whole]
        self.mask = sum(1 << place for place, one in enumerate(task.inputs) if one in self._wanted)
        self.wanted_bytes = sum(one.bytes_of() for one in self._wanted)
        self._task, self._slots = task, slots

    def receive_whole(self, connection: Connection) -> Arrays:
        """Receive the inputs that come first; return all without rows."""
        for one in self._wanted:
            if not one.rows or one.key is not None:
                self.whole[one.name] = np.empty(one.shape, one.dtype)
            if not one.rows:
                connection.receive(as_bytes(self.whole[one.name]))
        self._prepare_slots()
        return {one.name: self.whole[one.name] for one in self._task.inputs if not one.rows}

    def _prepare_slots(self) -> None:
        """Buffers for as many chunks as there are at once; the last task's, if they fit."""
        most = max(stop - start for start, stop in self._task.bounds)
        wanted = {
            one.name: ((most, *one.shape[1:]), one.dtype)
            for one in self._task.inputs
            if one.name not in self.whole
        }
        count = min(_AHEAD + 1, len(self._task.bounds))
        there = [{name: (array.shape, array.dtype) for name, array in slot.items()} for slot in self._slots]
        if there != [wanted] * count:
            self._slots[:] = [
                {name: np.empty(shape, dtype) for name, (shape, dtype) in wanted.items()}
                for _ in range(count)
            ]

    def receive_rows(self, connection: Connection, chunk: int, start: int, stop: int) -> Arrays:
        """Receive a chunk; its arrays live until the chunk `_AHEAD` + 1 places after it is received."""
        slot = self._slots[chunk % len(self._slots)]
        arrays = {
            one.name: self.whole[one.name][start:stop]
            if one.name in self.whole
            else slot[one.name][: stop - start]
            for one in self._task.inputs
            if one.rows
        }
        for one in self._wanted:
            if one.rows:
                connection.receive(as_bytes(arrays[one.name]))
        return arrays


class Ahead:
    """Chunks, received by another thread while the caller works on the one before. A context manager.

    Parameters
    ----------
    bounds
        Of each chunk.
    receive
        Called with a chunk's number, start and stop, in that thread; returns its arrays. It is called for a
        chunk when the one `_AHEAD` + 1 places before it is done with.
    cut
        Ends a `receive` that hangs, where the caller gives up.

    Attributes
    ----------
    arrived : float
        When (`time.perf_counter`) the last chunk was there.
    """

    def __init__(
        self,
        bounds: Sequence[tuple[int, int]],
        receive: Callable[[int, int, int], Arrays],
        cut: Callable[[], None],
    ) -> None:
        self._bounds, self._receive, self._cut = bounds, receive, cut
        self._done: SimpleQueue[bool] = SimpleQueue()  # chunks that are done with; False: give up
        self._there: SimpleQueue[Arrays | BaseException] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.arrived = 0.0

    def __enter__(self) -> Self:
        if len(self._bounds) > 1:  # nothing to overlap otherwise
            self._thread = threading.Thread(target=self._run, name="fetch ahead", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            if kind is not None:
                self._done.put(False)
                self._cut()
            self._thread.join()

    def __iter__(self) -> Iterator[tuple[int, int, Arrays]]:
        for chunk, (start, stop) in enumerate(self._bounds):
            if self._thread is None:
                arrays = self._receive_one(chunk)
            else:
                item = self._there.get()
                if isinstance(item, BaseException):
                    raise item
                arrays = item
            yield start, stop, arrays
            self._done.put(True)

    def _receive_one(self, chunk: int) -> Arrays:
        arrays = self._receive(chunk, *self._bounds[chunk])
        self.arrived = time.perf_counter()
        return arrays

    def _run(self) -> None:
        try:
            for chunk in range(len(self._bounds)):
                if chunk > _AHEAD and not self._done.get():
                    return
                self._there.put(self._receive_one(chunk))
        except BaseException as error:
            self._there.put(error)


class Connection:
    """A connection to a tensor server. One thread at a time uses it, but for `cut`.

    Parameters
    ----------
    address
        Host and port.
    context
        TLS; None for plain TCP.
    seconds
        Patience with the server, for a frame (and one more a megabyte).
    limit
        Until when (`time.monotonic`) all must be done.
    """

    def __init__(
        self, address: tuple[str, int], context: ssl.SSLContext | None, seconds: float, limit: float
    ) -> None:
        self.begin(seconds, limit)
        left = max(1e-3, min(seconds, limit - time.monotonic()))
        self._socket = socket.create_connection(address, timeout=left)
        try:
            tune(self._socket)
            if context is not None:
                self._socket = context.wrap_socket(self._socket, server_hostname=tls.NAME)
        except BaseException:
            self._socket.close()
            raise

    def begin(self, seconds: float, limit: float) -> None:
        """Start with a task."""
        self._seconds, self._limit = seconds, limit
        self.bytes_in = self.bytes_out = 0

    def ask(self, body: bytes) -> tuple[Kind, int]:
        """Send FETCH; return the head of the answer."""
        self.send([pack_header(Kind.FETCH, len(body)) + body], len(body))
        return self.head()

    def send(self, pieces: Sequence[bytes | memoryview], size: int) -> None:
        """Send pieces, which have about `size` bytes."""
        self.bytes_out += send_all(self._socket, pieces, self._deadline(size))

    def receive(self, view: memoryview) -> None:
        """Fill a buffer."""
        receive_into(self._socket, view, self._deadline(len(view)))
        self.bytes_in += len(view)

    def head(self) -> tuple[Kind, int]:
        """Receive the head of a frame."""
        header = bytearray(HEADER.size)
        self.receive(memoryview(header))
        return parse_header(header)

    def reason(self, kind: Kind, length: int) -> str:
        """Receive the rest of a frame REFUSED, which this head must announce."""
        if kind is not Kind.REFUSED or length > REASON_BYTES:
            raise ProtocolError(f"a frame {kind.name} of {length} bytes does not belong here")
        text = bytearray(length)
        self.receive(memoryview(text))
        return text.decode(errors="replace")

    def cut(self) -> None:
        """End at once what another thread receives."""
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown: that forgets TLS, and the other thread would read on without.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def _deadline(self, size: int) -> float:
        return min(deadline_for(size, self._seconds), self._limit)
