"""Halo exchange: the rows of boundary vertices, from the part that owns them to those that touch them.

Planned once from the partition files, without a message: sender and receiver both know which rows go
where, and in which order.

    part p on rank r                     rank s hosts parts q and t
    own rows  [ .a..b.c ]  --- a b c --->  staged, then   q's ghosts [.. a c ..]
                                                          t's ghosts [.. a b ..]

A row travels once to a rank, however many of its parts want it, and not at all inside a rank (there it is
a copy). Where only one part of the receiving rank wants rows of p, its ghosts of p are exactly the
message, and MPI receives straight into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from cython_kernels import pack_rows
from dorylus_hpc.comm.launch import start_mpi
from dorylus_hpc.comm.roles import Placement
from dorylus_hpc.comm.tags import Kind, tag
from dorylus_hpc.comm.waiting import wait_all
from dorylus_hpc.graph.partition import Adjacency

if TYPE_CHECKING:
    from mpi4py.MPI import Datatype, Intracomm, Request


@dataclass(frozen=True, eq=False)
class Delivery:
    """Rows of one source part that are ghosts of one hosted part.

    Attributes
    ----------
    part
        The hosted part.
    ghosts
        (start, stop): where they lie among the ghosts of `part`.
    pick
        Which rows of the message they are; None for all of them, in order.
    """

    part: int
    ghosts: tuple[int, int]
    pick: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Copy:
    """Rows `lids` of the hosted part `source` that are the ghosts `ghosts` of the hosted part `part`."""

    source: int
    lids: np.ndarray
    part: int
    ghosts: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Outgoing:
    """Rows `lids` of the hosted part `source`, for graph server `rank`."""

    source: int
    rank: int
    lids: np.ndarray


@dataclass(frozen=True, eq=False)
class Incoming:
    """Rows `lids` of part `source`, hosted by graph server `rank`."""

    source: int
    rank: int
    lids: np.ndarray
    deliveries: tuple[Delivery, ...]

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.lids)


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """Who sends which rows to whom, in one direction of the edges.

    Attributes
    ----------
    n_own
        Own rows of each hosted part, by part: ghosts follow them.
    outgoing, incoming
        Messages, in the order of their source parts.
    copies
        What needs no message: both parts are hosted here.
    """

    n_own: dict[int, int]
    outgoing: tuple[Outgoing, ...]
    incoming: tuple[Incoming, ...]
    copies: tuple[Copy, ...]

    def rows_sent(self) -> int:
        """Return the number of rows this rank sends in one exchange."""
        return sum(len(message.lids) for message in self.outgoing)


def plan_halo(rank: int, placement: Placement, adjacencies: Mapping[int, Adjacency]) -> HaloPlan:
    """Derive the messages of one direction from the hosted parts' adjacencies.

    Parameters
    ----------
    rank
        This graph server.
    placement
        Which server hosts which part.
    adjacencies
        Of the hosted parts, by part.

    Returns
    -------
    HaloPlan
        Agrees with the plans that the other servers derive: what one sends, the other expects.
    """
    outgoing = []
    for source, adjacency in sorted(adjacencies.items()):
        wanted: dict[int, list[np.ndarray]] = {}
        for peer, lids in sorted(adjacency.send.items()):
            if len(lids) and placement.host(peer) != rank:
                wanted.setdefault(placement.host(peer), []).append(lids)
        for server, lists in sorted(wanted.items()):
            lids = lists[0] if len(lists) == 1 else np.unique(np.concatenate(lists))
            outgoing.append(Outgoing(source, server, np.ascontiguousarray(lids, dtype=np.int32)))

    blocks: dict[int, list[tuple[int, int, int]]] = {}
    for part, adjacency in sorted(adjacencies.items()):
        sources, starts = np.unique(adjacency.ghost_part, return_index=True)  # ghosts are sorted by part
        stops = np.append(starts, len(adjacency.ghost_part))[1:]
        for source, start, stop in zip(sources.tolist(), starts.tolist(), stops.tolist(), strict=True):
            blocks.setdefault(source, []).append((part, start, stop))

    incoming: list[Incoming] = []
    copies: list[Copy] = []
    for source, wanted_by in sorted(blocks.items()):
        lists = [adjacencies[part].ghost_lid[start:stop] for part, start, stop in wanted_by]
        if source in adjacencies:
            copies += [
                Copy(source, np.ascontiguousarray(lids, dtype=np.int32), part, (start, stop))
                for (part, start, stop), lids in zip(wanted_by, lists, strict=True)
            ]
            continue
        rows = lists[0] if len(lists) == 1 else np.unique(np.concatenate(lists))
        deliveries = tuple(
            Delivery(
                part,
                (start, stop),
                None if len(lists) == 1 else np.searchsorted(rows, lids).astype(np.int32),
            )
            for (part, start, stop), lids in zip(wanted_by, lists, strict=True)
        )
        incoming.append(Incoming(source, placement.host(source), rows, deliveries))
    n_own = {part: len(adjacency.indptr) - 1 for part, adjacency in adjacencies.items()}
    return HaloPlan(n_own, tuple(outgoing), tuple(incoming), tuple(copies))


class HaloExchange:
    """Executes a plan on row tensors. Every graph server must call `begin` and `end` alike.

    Parameters
    ----------
    comm
        The graph servers.
    plan
        From `plan_halo`.
    kind
        Tells the two directions apart on the wire.
    """

    def __init__(self, comm: Intracomm, plan: HaloPlan, kind: Kind) -> None:
        self.comm = comm
        self.plan = plan
        self.kind = kind
        self._staging: dict[tuple[str, int, int, str], np.ndarray] = {}

    def _stage(self, way: str, number: int, n_rows: int, like: np.ndarray) -> np.ndarray:
        """Return the message buffer for rows like those of `like`; made at first use, then kept."""
        key = (way, number, like.shape[1], like.dtype.str)
        if key not in self._staging:
            self._staging[key] = np.empty((n_rows, like.shape[1]), like.dtype)
        return self._staging[key]

    def begin(self, arrays: Mapping[int, np.ndarray], *, epoch: int = 0, layer: int = 0) -> PendingHalo:
        """Start to fill the ghost rows of `arrays`. Collective over graph servers, does not block.

        Parameters
        ----------
        arrays
            By hosted part, (n_own + n_ghosts, width): own rows are read, ghost rows written.
        epoch, layer
            Stamp of the messages.

        Returns
        -------
        PendingHalo
            Until its `end` returns, own rows must not change and ghost rows must not be read; a second
            exchange of the same width must not begin.
        """
        plan, stamp = self.plan, tag(self.kind, epoch=epoch, layer=layer)
        requests, unpack = [], []
        for number, message in enumerate(plan.incoming):
            direct = len(message.deliveries) == 1
            delivery = message.deliveries[0]
            if direct:
                target = self._ghost_rows(arrays, delivery)
            else:
                target = self._stage("in", number, message.n_rows, arrays[delivery.part])
                unpack.append((target, message.deliveries))
            requests.append(
                self.comm.Irecv([target, *row_count_and_type(target)], source=message.rank, tag=stamp)
            )
        for number, sent in enumerate(plan.outgoing):
            buffer = self._stage("out", number, len(sent.lids), arrays[sent.source])
            pack_rows(arrays[sent.source], sent.lids, buffer)
            requests.append(self.comm.Isend([buffer, *row_count_and_type(buffer)], dest=sent.rank, tag=stamp))
        for copy in plan.copies:
            pack_rows(arrays[copy.source], copy.lids, self._ghost_rows(arrays, copy))
        return PendingHalo(self, arrays, requests, unpack)

    def _ghost_rows(self, arrays: Mapping[int, np.ndarray], delivery: Delivery | Copy) -> np.ndarray:
        n_own = self.plan.n_own[delivery.part]
        return arrays[delivery.part][n_own + delivery.ghosts[0] : n_own + delivery.ghosts[1]]

    def row_bytes(self, width: int, itemsize: int) -> int:
        """Return the bytes this rank sends in one exchange of rows of this width."""
        return self.plan.rows_sent() * width * itemsize


class PendingHalo:
    """An exchange under way."""

    def __init__(
        self,
        exchange: HaloExchange,
        arrays: Mapping[int, np.ndarray],
        requests: list[Request],
        unpack: list[tuple[np.ndarray, tuple[Delivery, ...]]],
    ) -> None:
        self._exchange, self._arrays = exchange, arrays
        self._requests, self._unpack = requests, unpack

    def end(self) -> float:
        """Wait until every ghost row is in place and every buffer is free again.

        Returns
        -------
        float
            Seconds waited for messages.
        """
        waited = wait_all(self._requests)
        for buffer, deliveries in self._unpack:
            for delivery in deliveries:
                assert delivery.pick is not None  # all rows for one part: received in place
                pack_rows(buffer, delivery.pick, self._exchange._ghost_rows(self._arrays, delivery))
        return waited


@lru_cache(maxsize=64)
def _row_type(n_bytes: int) -> Datatype:
    """Return the MPI type of a row, so that counts are rows and stay far below 2^31."""
    return start_mpi().BYTE.Create_contiguous(n_bytes).Commit()


def row_count_and_type(array: np.ndarray) -> tuple[int, Datatype]:
    """Return (count, type) of the rows of a C-contiguous array."""
    return len(array), _row_type(array.shape[1] * array.itemsize)
