"""The line of a sandbox: latency and bandwidth, as between a Lambda function and a server.

The shim in `bootstrap` connects here in place of where it wanted to, and says where that is. Bytes are
then passed on in order, each read being sent off at the line's bandwidth and arriving half a round trip
later. A line keeps one clock in each direction for all connections of its sandbox::

    leaves  = max(now, when the line is free); the line is free again after size / bandwidth
    arrives = leaves + size / bandwidth + latency / 2

What is under way is bounded, so that a reader that is slow or a line that is full holds the sender back.
Nothing arrives early; the loop's timers make it up to a millisecond late, which does not add up.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import secrets
from collections import deque

_PREAMBLE = 512  # bytes at most
_CHUNK = 256 * 1024  # what asyncio reads at once


class Lane:
    """One direction of a sandbox's line: when what is sent now arrives."""

    def __init__(self, latency: float, bandwidth: float) -> None:
        self._delay = latency / 2
        self._bandwidth = bandwidth
        self._free = 0.0
        # As much as fills the line from end to end, and a few reads that wait before it.
        self.most_under_way = 4 * _CHUNK + int(bandwidth * self._delay if bandwidth else 16e6)

    def arrival(self, now: float, size: int) -> float:
        """When the last of `size` bytes, sent now, arrives."""
        if self._bandwidth:
            self._free = max(self._free, now) + size / self._bandwidth
            return self._free + self._delay
        return now + self._delay


class _Side(asyncio.Protocol):
    """One of the two sockets of a connection: what comes here goes out at the other one."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[tuple[float, bytes]] = deque()  # arrival and data; b"" is the end
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self.held = False  # the other side cannot take more now
        self._reading = True
        self.ended = False  # the end was passed on
        self.lost = False
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=2 * _CHUNK)

    def data_received(self, data: bytes) -> None:
        self._send_off(data)

    def eof_received(self) -> bool:
        self._send_off(b"")
        return True  # the other direction goes on

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        other = self.other
        if error is not None and other is not None and not other.lost and other.transport is not None:
            other.transport.abort()  # reset here, reset there; in good order ends are passed on instead

    def pause_writing(self) -> None:
        assert self.other is not None
        self.other.held = True

    def resume_writing(self) -> None:
        assert self.other is not None
        self.other.release()

    def release(self) -> None:
        """Go on after being held."""
        self.held = False
        self._deliver()

    def _send_off(self, data: bytes) -> None:
        self._under_way.append((self._lane.arrival(self._loop.time(), len(data)), data))
        self._size += len(data)
        if self._size >= self._lane.most_under_way and self._reading and not self.lost:
            assert self.transport is not None
            self.transport.pause_reading()
            self._reading = False
        if self._timer is None and not self.held:
            self._set_timer()

    def _set_timer(self) -> None:
        self._timer = self._loop.call_at(self._under_way[0][0], self._deliver)

    def _deliver(self) -> None:
        """Pass on what has arrived."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        assert self.other is not None and self.other.transport is not None
        now = self._loop.time()
        while self._under_way and self._under_way[0][0] <= now and not self.held:
            data = self._under_way.popleft()[1]
            self._size -= len(data)
            if self.other.lost:
                continue
            if data:
                self.other.transport.write(data)  # may call pause_writing
            else:
                self._pass_on_end()
        if not self._reading and not self.lost and self._size + _CHUNK <= self._lane.most_under_way:
            assert self.transport is not None
            self.transport.resume_reading()
            self._reading = True
        if self._under_way and not self.held:
            self._set_timer()

    def _pass_on_end(self) -> None:
        assert self.other is not None and self.other.transport is not None and self.transport is not None
        if self.ended:
            return
        self.ended = True
        if self.lost or self.other.ended:
            self.other.transport.close()
            self.transport.close()
        else:
            self.other.transport.write_eof()


class _Entrance(asyncio.Protocol):
    """A connection of the sandbox before it is known where it goes."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._received += data
        head, _, rest = self._received.partition(b"\n")
        port, found, rest = rest.partition(b"\n")
        token, host = head[: len(self._line.token)], head[len(self._line.token) :]
        if found and not rest and hmac.compare_digest(token, self._line.token) and port.isdigit():
            self._transport.pause_reading()
            self._task = asyncio.get_running_loop().create_task(self._connect(host.decode(), int(port)))
        elif found or len(self._received) > _PREAMBLE:
            self._transport.abort()

    async def _connect(self, host: str, port: int) -> None:
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        near = _Side(self._line.out)
        far = _Side(self._line.back)
        near.other, far.other = far, near
        near.connection_made(self._transport)
        far.held = True  # a server that speaks first is heard after the answer
        error = 0
        started = loop.time()
        try:
            await loop.create_connection(lambda: far, host, port)
        except OSError as problem:
            error = problem.errno if problem.errno and 0 < problem.errno < 256 else errno.EHOSTUNREACH
        await asyncio.sleep(max(0.0, started + self._line.latency - loop.time()))  # the handshake's
        if self._transport.is_closing():
            if far.transport is not None:
                far.transport.abort()
            return
        self._transport.write(bytes([error]))
        if error:
            self._transport.close()
            return
        if far.lost:
            self._transport.abort()
            return
        self._transport.set_protocol(near)
        self._transport.resume_reading()
        far.release()


class Line:
    """A sandbox's line; `open` it before the sandbox starts.

    Parameters
    ----------
    latency
        Round trip, in seconds.
    bandwidth
        Bytes a second in each direction; 0: not bounded.
    """

    def __init__(self, latency: float, bandwidth: float) -> None:
        self.latency = latency
        self.out, self.back = Lane(latency, bandwidth), Lane(latency, bandwidth)
        self.token = secrets.token_hex(16).encode()
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """Listen on 127.0.0.1, and return the port."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Entrance(self), "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop listening. Connections end when the sandbox or the server they lead to ends them."""
        if self._server is not None:
            self._server.close()
