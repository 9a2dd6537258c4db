"""Frames between a worker and a tensor server.

A frame is a header and so many bytes. The header, little-endian: magic, kind (u8), three zero bytes,
length (u64) of what follows. ::

    FETCH     worker -> server   token (32 bytes), u64 bit mask of the inputs that are wanted
    BLOCKS    server -> worker   wanted inputs that are not cut into rows, in order; then for each chunk of
                                 rows the slice of each wanted input that is
    RESULT    worker -> server   token (32 bytes), then all outputs, in order
    ACCEPTED  server -> worker   nothing
    REFUSED   server -> worker   why: UTF-8, at most 200 bytes

Both sides know every shape beforehand, so blocks are raw little-endian bytes one after another, and a
length is compared with what it must be before anything is allocated or read. Nothing is ever unpickled.
Every wait has an end: a deadline (of `time.monotonic`) for the whole of what is received or sent, so that
a peer that trickles bytes gains nothing.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"DHPC"
HEADER = struct.Struct("<4sB3sQ")
FETCH_BODY = struct.Struct("<32sQ")
TOKEN_BYTES = 32
REASON_BYTES = 200
MOST_INPUTS = 64  # bits of the mask
LARGEST = 1 << 40  # bytes of a frame; what a frame must have is checked besides

_ZEROS = bytes(3)
_SMALL = 16 << 10  # bytes: one record of TLS; smaller pieces are copied together
_PIECES = 512  # of one sendmsg; the system takes 1024
_SLOWEST = 1e6  # bytes a second
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}  # gone for two minutes is gone
_REFRESH = 1.0  # seconds after which a socket's timeout is brought up to date


class Kind(IntEnum):
    """What a frame is."""

    FETCH = 1
    BLOCKS = 2
    RESULT = 3
    ACCEPTED = 4
    REFUSED = 5


_KINDS = {int(kind): kind for kind in Kind}


class ProtocolError(ValueError):
    """Bytes that are no frame, or not the frame that must come now."""


class Disconnected(ConnectionError):
    """The peer closed the connection where more had to come."""


def pack_header(kind: Kind, length: int) -> bytes:
    """Return the header of a frame that has so many bytes behind it."""
    return HEADER.pack(MAGIC, kind, _ZEROS, length)


def parse_header(header: bytes | bytearray | memoryview, *, largest: int = LARGEST) -> tuple[Kind, int]:
    """Take a header apart.

    Parameters
    ----------
    header : bytes-like, (16,)
    largest
        The most bytes that may follow.

    Returns
    -------
    kind : Kind
    length : int
        Bytes that follow.

    Raises
    ------
    ProtocolError
        Another size or magic, an unknown kind, pad bytes that are not zero, a length over `largest`.
    """
    if len(header) != HEADER.size:
        raise ProtocolError(f"a header has {HEADER.size} bytes, got {len(header)}")
    magic, number, pad, length = HEADER.unpack(header)
    if magic != MAGIC:
        raise ProtocolError(f"a frame starts with {MAGIC!r}, got {magic!r}")
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"frames are of kinds {min(_KINDS)} to {max(_KINDS)}, got {number}")
    if pad != _ZEROS:
        raise ProtocolError(f"the pad of a header is zero, got {pad!r}")
    if length > largest:
        raise ProtocolError(f"a frame {kind.name} may have {largest} bytes here, got {length}")
    return kind, length


def refusal(reason: str) -> bytes:
    """Return a whole frame REFUSED; a long reason is cut."""
    text = reason.encode()[:REASON_BYTES]
    return pack_header(Kind.REFUSED, len(text)) + text


def as_bytes(array: np.ndarray) -> memoryview:
    """Return the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view("u1").data


def is_loopback(host: str) -> bool:
    """Whether an address never leaves the machine; only there may TLS be off."""
    try:
        return host in ("localhost", "::1") or socket.inet_pton(socket.AF_INET, host)[0] == 127
    except OSError:  # no IPv4 address
        return False


def tune(sock: socket.socket) -> None:
    """Set what both ends want of a connection: small frames leave at once, and a vanished peer is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def deadline_for(n_bytes: int, seconds: float) -> float:
    """Return until when so many bytes must be through: `seconds`, and one more a megabyte."""
    return time.monotonic() + seconds + n_bytes / _SLOWEST


def time_left(deadline: float) -> float:
    """Seconds to a deadline.

    Raises
    ------
    TimeoutError
        It has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out: the peer is too slow")
    return left


def receive_into(sock: socket.socket, view: memoryview, deadline: float) -> None:
    """Fill a buffer from a socket, exactly.

    Raises
    ------
    Disconnected
        The peer closed first.
    TimeoutError
        The deadline passed first.
    """
    got, size, refresh = 0, len(view), 0.0
    while got < size:
        now = time.monotonic()
        if now >= refresh:  # setting it is a system call, and a piece may be one record of TLS
            sock.settimeout(time_left(deadline))
            refresh = min(now + _REFRESH, deadline)
        count = sock.recv_into(view[got:] if got else view)
        if not count:
            raise Disconnected(f"the peer closed the connection after {got} of {size} bytes")
        got += count


def send_all(sock: socket.socket, pieces: Iterable[bytes | memoryview], deadline: float) -> int:
    """Send pieces one after another, large ones without a copy of ours; return the number of bytes.

    Raises
    ------
    TimeoutError
        The deadline passed first.
    """
    views = [memoryview(piece) for piece in pieces if len(piece)]
    size = sum(view.nbytes for view in views)
    if isinstance(sock, ssl.SSLSocket):
        for part in _joined(views):
            sock.settimeout(time_left(deadline))
            sock.sendall(part)
    else:
        _scatter(sock, views, deadline)
    return size


def _joined(views: list[memoryview]) -> Iterable[bytearray | memoryview]:
    """Neighbours that are small as one: each part is a record of TLS, and a system call, at least."""
    small = bytearray()
    for view in views:
        if view.nbytes < _SMALL:
            small += view
            if len(small) < _SMALL:
                continue
        if small:
            yield small
            small = bytearray()
        if view.nbytes >= _SMALL:
            yield view
    if small:
        yield small


def _scatter(sock: socket.socket, views: list[memoryview], deadline: float) -> None:
    first = 0
    while first < len(views):
        sock.settimeout(time_left(deadline))
        sent = sock.sendmsg(views[first : first + _PIECES])
        while sent and sent >= views[first].nbytes:
            sent -= views[first].nbytes
            first += 1
        if sent:
            views[first] = views[first][sent:]
