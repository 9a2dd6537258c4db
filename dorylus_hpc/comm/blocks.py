"""Ghost rows, an interval at a time: what `pipe` sends instead of a whole exchange.

A block is the rows of one interval of one part that this graph server needs. Its message is packed when
the interval is done, and received whenever it comes: who is first is not known beforehand. A tag names
the table and the interval; blocks of one tag come in the order they were sent, and every interval sends
each table once a round, so the k-th is of the k-th round: that is its stamp.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cython_kernels import pack_rows
from dorylus_hpc.comm.halo import Delivery, HaloPlan, row_count_and_type
from dorylus_hpc.comm.launch import start_mpi
from dorylus_hpc.errors import InputError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

Block = tuple[int, int]  # (part, interval)
Cuts = Mapping[int, Sequence[tuple[int, int]]]


@dataclass(frozen=True, eq=False)
class Received:
    """What arrives in one block: from which rank, how many rows, and where they go."""

    rank: int
    n_rows: int
    deliveries: tuple[Delivery, ...]


@dataclass(frozen=True, eq=False)
class LocalCopy:
    """Rows of a hosted part that are ghosts of another hosted part."""

    lids: np.ndarray
    part: int
    ghosts: tuple[int, int]


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """A halo plan cut by intervals.

    Attributes
    ----------
    n_own
        Own rows of each hosted part.
    incoming
        By block.
    outgoing
        By block: (rank, rows) of each message.
    copies
        By block of a hosted part.
    """

    n_own: Mapping[int, int]
    incoming: dict[Block, Received]
    outgoing: dict[Block, list[tuple[int, np.ndarray]]]
    copies: dict[Block, list[LocalCopy]]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks that bring ghosts here, from other ranks or from this one, in order."""
        return tuple(sorted({*self.incoming, *self.copies}))

    def ghosts(self, block: Block) -> list[tuple[int, tuple[int, int]]]:
        """Return (hosted part, range among its ghosts) of each place a block goes to."""
        places = [(copy.part, copy.ghosts) for copy in self.copies.get(block, ())]
        if block in self.incoming:
            places += [(one.part, one.ghosts) for one in self.incoming[block].deliveries]
        return places


def cut_plan(plan: HaloPlan, cuts: Cuts) -> BlockPlan:
    """Cut the messages of a plan at the intervals' bounds.

    Parameters
    ----------
    plan
        From `plan_halo`: the rows of each message are sorted.
    cuts
        The intervals of every part of the graph.

    Returns
    -------
    BlockPlan
        Without empty blocks.
    """
    incoming: dict[Block, Received] = {}
    outgoing: dict[Block, list[tuple[int, np.ndarray]]] = defaultdict(list)
    copies: dict[Block, list[LocalCopy]] = defaultdict(list)
    for message in plan.incoming:
        for interval, (first, last) in _pieces(message.lids, cuts[message.source]):
            deliveries = [_piece_of(one, first, last) for one in message.deliveries]
            incoming[message.source, interval] = Received(
                message.rank, last - first, tuple(one for one in deliveries if one.ghosts[0] < one.ghosts[1])
            )
    for sent in plan.outgoing:
        for interval, (first, last) in _pieces(sent.lids, cuts[sent.source]):
            outgoing[sent.source, interval].append((sent.rank, sent.lids[first:last]))
    for copy in plan.copies:
        for interval, (first, last) in _pieces(copy.lids, cuts[copy.source]):
            ghosts = (copy.ghosts[0] + first, copy.ghosts[0] + last)
            copies[copy.source, interval].append(LocalCopy(copy.lids[first:last], copy.part, ghosts))
    return BlockPlan(plan.n_own, incoming, dict(outgoing), dict(copies))


def sums_plan(hosts: Mapping[int, int], rank: int, cuts: Cuts) -> BlockPlan:
    """Return who sends what where every rank needs a row of each interval of the graph.

    Parameters
    ----------
    hosts
        The rank that hosts each part.
    rank
        This one.
    cuts
        The intervals of every part.

    Returns
    -------
    BlockPlan
        Of an array with these rows in the order of parts and intervals, which all parts hosted here share: it
        has no ghosts behind the rows, and there is nothing to copy.
    """
    mine = sorted(part for part, host in hosts.items() if host == rank)
    others = sorted({*hosts.values()} - {rank})
    incoming: dict[Block, Received] = {}
    outgoing: dict[Block, list[tuple[int, np.ndarray]]] = {}
    blocks = [(part, interval) for part in sorted(cuts) for interval in range(len(cuts[part]))]
    for row, block in enumerate(blocks):
        if hosts[block[0]] == rank:
            lids = np.array([row], np.int32)
            outgoing[block] = [(other, lids) for other in others]
        else:
            delivery = Delivery(mine[0], (row, row + 1), None)
            incoming[block] = Received(hosts[block[0]], 1, (delivery,))
    return BlockPlan(dict.fromkeys(mine, 0), incoming, outgoing if others else {}, {})


def _pieces(lids: np.ndarray, cuts: Sequence[tuple[int, int]]) -> Iterable[tuple[int, tuple[int, int]]]:
    """Find which places of a sorted list lie in each interval; skip intervals without any."""
    bounds = np.searchsorted(lids, [start for start, _ in cuts] + [cuts[-1][1] if cuts else 0])
    for interval in range(len(cuts)):
        first, last = int(bounds[interval]), int(bounds[interval + 1])
        if first < last:
            yield interval, (first, last)


def _piece_of(delivery: Delivery, first: int, last: int) -> Delivery:
    """Return what a delivery takes from rows first .. last - 1 of its message."""
    start = delivery.ghosts[0]
    if delivery.pick is None:
        return Delivery(delivery.part, (start + first, start + last), None)
    low, high = np.searchsorted(delivery.pick, [first, last]).tolist()
    pick = delivery.pick[low:high] - np.int32(first)
    return Delivery(delivery.part, (start + low, start + high), pick)


@dataclass(eq=False)
class _Receive:
    """A message that was announced and may not be here yet."""

    request: Request
    table: int
    block: Block
    buffer: np.ndarray
    complete: bool = False


def _completed(requests: Sequence[Request]) -> set[int]:
    """Return which of the requests have completed since they were asked last, in one call.

    Each call lets all messages proceed, which takes longer than looking at a request.
    """
    return set(type(requests[0]).Testsome(requests) or ())


@dataclass(frozen=True)
class Channel:
    """A row tensor whose ghosts travel: its name, and the plan of its direction."""

    name: str
    plan: BlockPlan


class BlockExchange:
    """Sends and receives blocks; one thread may call it, but for `prepare`.

    Parameters
    ----------
    comm
        The graph servers; blocks travel on a communicator of their own. Collective.
    channels
        The tables, in the same order on all ranks.
    n_intervals
        Intervals of each part of the graph, by part.
    own
        By hosted part: the row tensors from which rows are sent, by name.
    shared
        By hosted part: the row tensors into which ghosts are put. If these are the same arrays, rows
        for another part of this rank are copied when they are put; else when they are sent, since
        their interval may be rounds ahead by then.

    Attributes
    ----------
    sent_bytes : int
        Bytes of ghost rows sent since `end_setup`.

    Raises
    ------
    InputError
        More tables and intervals than MPI has tags.
    """

    def __init__(
        self,
        comm: Intracomm,
        channels: Sequence[Channel],
        n_intervals: Sequence[int],
        own: Mapping[int, Mapping[str, np.ndarray]],
        shared: Mapping[int, Mapping[str, np.ndarray]],
    ) -> None:
        self.sent_bytes = 0
        self._reuses = True
        self._mpi = start_mpi()
        self._channels, self._own, self._shared = tuple(channels), own, shared
        self._offsets = np.concatenate([[0], np.cumsum(n_intervals)]).astype(np.int64)
        most = comm.Get_attr(self._mpi.TAG_UB)
        if most is not None and len(channels) * int(self._offsets[-1]) > most:
            raise InputError(
                f"{len(channels)} tables of {int(self._offsets[-1])} intervals need more than {most} tags of "
                "this MPI: use fewer --intervals"
            )
        self._comm = comm.Dup()
        self._status = self._mpi.Status()
        self._sends: list[tuple[Request, np.ndarray]] = []
        self._receives: list[_Receive] = []
        self._packed: dict[tuple[int, Block], list[np.ndarray]] = {}
        self._spare: defaultdict[tuple[int, int, str], list[np.ndarray]] = defaultdict(list)
        self._kept: dict[tuple[int, Block], deque[tuple[int, list[np.ndarray]]]] = defaultdict(deque)
        self._came: defaultdict[tuple[int, Block], int] = defaultdict(int)
        self._sent_to: Counter[int] = Counter()
        self._received_from: Counter[int] = Counter()

    @property
    def n_ranks(self) -> int:
        """Graph servers."""
        return self._comm.Get_size()

    @property
    def sending(self) -> bool:
        """Whether blocks are still to leave."""
        return bool(self._sends)

    @property
    def moving(self) -> bool:
        """Whether blocks are on their way from here, or were announced and are not here yet."""
        return bool(self._sends or self._receives)

    def prepare(self, table: int, block: Block) -> None:
        """Pack the rows of an interval for other ranks, which `send` then only sends; any thread may do it.

        At most once before each `send` of them, and that waits until it is done.
        """
        channel = self._channels[table]
        outgoing = channel.plan.outgoing.get(block)
        if outgoing:
            rows = self._own[block[0]][channel.name]
            self._packed[table, block] = [self._pack(rows, lids) for _, lids in outgoing]

    def send(self, table: int, block: Block) -> int:
        """Send the rows of an interval to all ranks that need them.

        Returns
        -------
        int
            The stamp of the rows if another part of this rank needs them too; they have then arrived.
            Else 0.
        """
        channel = self._channels[table]
        rows = self._own[block[0]][channel.name]
        outgoing = channel.plan.outgoing.get(block, ())
        packed = self._packed.pop((table, block), None) or [self._pack(rows, lids) for _, lids in outgoing]
        for (rank, _), buffer in zip(outgoing, packed, strict=True):
            tag = table * int(self._offsets[-1]) + int(self._offsets[block[0]]) + block[1]
            request = self._comm.Isend([buffer, *row_count_and_type(buffer)], dest=rank, tag=tag)
            self._sends.append((request, buffer))
            self._sent_to[rank] += 1
            self.sent_bytes += buffer.nbytes
        copies = channel.plan.copies.get(block, ())
        if not copies:
            return 0
        apart = self._shared[block[0]][channel.name] is not rows
        return self._keep(table, block, [self._pack(rows, copy.lids) for copy in copies] if apart else [])

    def poll(self) -> list[tuple[int, Block, int]]:
        """Let messages proceed; return (table, block, stamp) of those that came."""
        if self._sends:
            gone = _completed([request for request, _ in self._sends])
            self._recycle(self._sends[place][1] for place in gone)
            self._sends = [one for place, one in enumerate(self._sends) if place not in gone]
        while (message := self._comm.Improbe(status=self._status)) is not None:
            table, number = divmod(self._status.Get_tag(), int(self._offsets[-1]))
            part = int(np.searchsorted(self._offsets, number, side="right")) - 1
            block = (part, number - int(self._offsets[part]))
            received = self._channels[table].plan.incoming[block]
            like = self._shared[received.deliveries[0].part][self._channels[table].name]
            buffer = self._buffer(received.n_rows, like)
            request = message.Irecv([buffer, *row_count_and_type(buffer)])
            self._receives.append(_Receive(request, table, block, buffer))
        return self._take_received() if self._receives else []

    def _take_received(self) -> list[tuple[int, Block, int]]:
        for place in _completed([one.request for one in self._receives]):
            self._receives[place].complete = True
        arrived, pending = [], []
        waiting: set[tuple[int, Block]] = set()
        for one in self._receives:  # of one block, in the order in which they were announced
            key = (one.table, one.block)
            if one.complete and key not in waiting:
                self._received_from[self._channels[one.table].plan.incoming[one.block].rank] += 1
                arrived.append((*key, self._keep(*key, [one.buffer])))
            else:
                waiting.add(key)
                pending.append(one)
        self._receives = pending
        return arrived

    def install(self, table: int, block: Block, stamp: int) -> None:
        """Put the rows of a block in their places among the ghosts; older ones are dropped."""
        channel = self._channels[table]
        buffers = self._take(table, block, stamp)
        if block in channel.plan.incoming:
            for one in channel.plan.incoming[block].deliveries:
                places = self._places(channel, one.part, one.ghosts)
                if one.pick is None:
                    places[...] = buffers[0]
                else:
                    pack_rows(buffers[0], one.pick, places, validate=False)
        for number, copy in enumerate(channel.plan.copies.get(block, ())):
            places = self._places(channel, copy.part, copy.ghosts)
            if buffers:
                places[...] = buffers[number]
            else:
                pack_rows(self._own[block[0]][channel.name], copy.lids, places, validate=False)
        self._recycle(buffers)

    def begin_setup(self) -> None:
        """Keep no memory of messages, for none comes again, until `end_setup`."""
        self._reuses = False

    def end_setup(self) -> None:
        """Use memory of messages again from now on, and count bytes from 0."""
        self._reuses = True
        self.sent_bytes = 0

    def count(self) -> None:
        """Tell all ranks how many blocks were sent to each, after the last; see `has_all`. Collective."""
        size = self._comm.Get_size()
        sent = np.array([self._sent_to[rank] for rank in range(size)])
        self._coming = np.empty(size, sent.dtype)
        self._counting = self._comm.Ialltoall(sent, self._coming)

    def has_all(self) -> bool:
        """Whether all that was sent, here and to here, has arrived."""
        if not self._counting.Test() or self._sends:
            return False
        return all(self._received_from[rank] >= count for rank, count in enumerate(self._coming.tolist()))

    def meet(self) -> Request:
        """Begin to wait for the other graph servers. Collective."""
        return self._comm.Ibarrier()

    def forget(self) -> None:
        """Drop what has arrived and was not installed, and count from 1 again."""
        for waiting in self._kept.values():
            while waiting:
                self._recycle(waiting.popleft()[1])
        self._packed.clear()
        self._came.clear()

    def close(self) -> None:
        """Free the communicator, after a whole run. Collective."""
        self._comm.Free()

    def _keep(self, table: int, block: Block, buffers: list[np.ndarray]) -> int:
        """Set the rows of a block aside and return their stamp."""
        self._came[table, block] += 1
        stamp = self._came[table, block]
        self._kept[table, block].append((stamp, buffers))
        return stamp

    def _take(self, table: int, block: Block, stamp: int) -> list[np.ndarray]:
        waiting = self._kept[table, block]
        while True:
            kept, buffers = waiting.popleft()
            if kept == stamp:
                return buffers
            self._recycle(buffers)

    def _recycle(self, buffers: Iterable[np.ndarray]) -> None:
        for buffer in buffers if self._reuses else ():
            self._spare[buffer.shape[0], buffer.shape[1], buffer.dtype.char].append(buffer)

    def _pack(self, rows: np.ndarray, lids: np.ndarray) -> np.ndarray:
        buffer = self._buffer(len(lids), rows)
        pack_rows(rows, lids, buffer, validate=False)
        return buffer

    def _buffer(self, n_rows: int, like: np.ndarray) -> np.ndarray:
        """Reuse a buffer of this shape, or make one: the first rounds make all that are ever needed."""
        try:  # another thread may take the last one
            return self._spare[n_rows, like.shape[1], like.dtype.char].pop()
        except IndexError:
            return np.empty((n_rows, like.shape[1]), like.dtype)

    def _places(self, channel: Channel, part: int, ghosts: tuple[int, int]) -> np.ndarray:
        n_own = channel.plan.n_own[part]
        return self._shared[part][channel.name][n_own + ghosts[0] : n_own + ghosts[1]]
