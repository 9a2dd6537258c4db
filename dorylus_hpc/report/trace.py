"""The timeline of a run: `trace.json` for chrome://tracing and Perfetto, and how much of it overlaps.

Each rank has a `Tracer`. At the end the records of all ranks come together; only then is a ghost block
that arrived matched with the one that left, for its way from rank to rank is part of the overlap.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dorylus_hpc.files import atomic_path

KINDS = ("GA", "AV", "SC", "AE", "dGA", "dAV", "dSC", "dAE", "WU", "RD", "LD", "eval", "wait")
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_LAYERED = frozenset([*KINDS[:8], "RD"])
# Names that chrome://tracing reserves for colours. A backward task is a shade of its forward one.
_COLOURS = {
    "GA": "thread_state_runnable",
    "dGA": "rail_response",
    "AV": "thread_state_iowait",
    "dAV": "rail_animation",
    "SC": "cq_build_running",
    "dSC": "yellow",
    "AE": "cq_build_passed",
    "dAE": "rail_load",
    "WU": "detailed_memory_dump",
    "RD": "background_memory_dump",
    "LD": "heap_dump_child_node_arrow",
    "eval": "olive",
    "wait": "grey",
}
_BLOCK_COLOUR = "generic_work"

_TASK = np.dtype(
    [
        ("kind", "u1"),
        ("begin", "f8"),
        ("end", "f8"),
        ("lane", "i4"),
        ("epoch", "i4"),
        ("layer", "i4"),
        ("part", "i4"),
        ("interval", "i4"),
        ("evaluation", "?"),
    ]
)
_TASK_FIELDS = len(_TASK.names or ())
_KEY = ("table", "part", "interval", "number", "evaluation")
_BLOCK = np.dtype(
    [
        ("at", "f8"),
        ("table", "i4"),
        ("part", "i4"),
        ("interval", "i4"),
        ("number", "i8"),
        ("evaluation", "?"),
    ]
)
_MARK_NS = 1000
_CHUNK = 1 << 14

# What may overlap, as bits of a state; _GROUP gives the bit of a kind of task, or 0.
_GRAPH, _DENSE, _MESSAGES = 1, 2, 4
_GROUP = np.array(
    [
        _GRAPH if kind in ("GA", "dGA", "AE", "dAE", "RD") else _DENSE if kind in ("AV", "dAV") else 0
        for kind in KINDS
    ]
)


@dataclass(frozen=True, eq=False)
class TraceRecord:
    """What one rank saw. Holds no objects but arrays and short names, so it is cheap to send.

    Attributes
    ----------
    tasks : ndarray, structured
        ``kind`` (place in `KINDS`), ``begin``, ``end`` (seconds from the origin), ``lane``, ``epoch``,
        ``layer``, ``part``, ``interval``, ``evaluation``.
    sent, arrived : ndarray, structured
        Ghost blocks: ``at`` (seconds from the origin), ``table``, ``part``, ``interval``, ``number``,
        ``evaluation``.
    lanes
        Names of the lanes, by number.
    dropped
        Events beyond the limit.
    notes
        What was decided: seconds from the origin, of what, its value from then on, and why.
    """

    tasks: np.ndarray
    sent: np.ndarray
    arrived: np.ndarray
    lanes: tuple[str, ...]
    dropped: int
    notes: tuple[tuple[float, str, float, str], ...] = ()


class Tracer:
    """Collects the events of one rank; any thread may call any method.

    An event is one tuple appended to one list, which needs no lock. Events stay in memory to the end.

    Parameters
    ----------
    origin
        What `time.perf_counter` told when the timeline was at 0. Ranks should take it together, behind a
        barrier: only then do their timelines fit each other.
    limit
        Number of events to keep; later ones are only counted.
    """

    def __init__(self, origin: float, limit: int = 500_000) -> None:
        self._origin, self._limit = origin, limit
        self._events: list[tuple[Any, ...]] = []
        self._lanes: dict[str, int] = {}
        self._dropped = 0
        self._notes: list[tuple[float, str, float, str]] = []
        self._lock = threading.Lock()

    def lane(self, name: str) -> int:
        """Return the number of a lane, a row of the timeline; a new name gets the next number."""
        number = self._lanes.get(name)
        if number is None:
            with self._lock:
                number = self._lanes.setdefault(name, len(self._lanes))
        return number

    def task(
        self,
        kind: str,
        begin: float,
        end: float,
        lane: int,
        *,
        epoch: int = 0,
        layer: int = 0,
        part: int = -1,
        interval: int = -1,
        evaluation: bool = False,
    ) -> None:
        """Note a task that has ended.

        Parameters
        ----------
        kind
            One of `KINDS`.
        begin, end
            By `time.perf_counter`.
        lane
            From `lane`. Tasks of one lane must follow each other or nest; viewers refuse others.
        epoch, layer, part, interval
            What it worked on; -1 for none in particular.
        evaluation
            Whether it belongs to an evaluation.

        Raises
        ------
        ValueError
            Unknown kind.
        """
        code = _CODES.get(kind)
        if code is None:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
        self._add((code, begin, end, lane, epoch, layer, part, interval, evaluation))

    def sent(
        self, at: float, table: int, part: int, interval: int, number: int, evaluation: bool = False
    ) -> None:
        """Note that a ghost block leaves this rank, for all ranks that need it.

        Parameters
        ----------
        at
            By `time.perf_counter`.
        table, part, interval
            Which rows of which tensor.
        number
            Tells the blocks of these rows apart: the same on both sides.
        evaluation
            Whether it belongs to an evaluation.
        """
        self._add((True, at, table, part, interval, number, evaluation))

    def arrived(
        self, at: float, table: int, part: int, interval: int, number: int, evaluation: bool = False
    ) -> None:
        """Note that a ghost block arrived at this rank; parameters as for `sent`."""
        self._add((False, at, table, part, interval, number, evaluation))

    def note(self, at: float, what: str, value: float, reason: str) -> None:
        """Note a decision: what has which value from now on, and why. These are few, and all are kept."""
        with self._lock:
            self._notes.append((at - self._origin, what, value, reason))

    def _add(self, event: tuple[Any, ...]) -> None:
        # Threads that look at the length at the same time add a few too many; `record` takes them off.
        if len(self._events) < self._limit:
            self._events.append(event)
        else:
            with self._lock:
                self._dropped += 1

    def record(self) -> TraceRecord:
        """Return what has been noted so far."""
        with self._lock:
            events, dropped, lanes = self._events[:], self._dropped, tuple(self._lanes)
            notes = tuple(self._notes)
        dropped += max(0, len(events) - self._limit)
        del events[self._limit :]
        tasks = np.array([event for event in events if len(event) == _TASK_FIELDS], dtype=_TASK)
        blocks = [event for event in events if len(event) != _TASK_FIELDS]
        sent = np.array([event[1:] for event in blocks if event[0]], dtype=_BLOCK)
        arrived = np.array([event[1:] for event in blocks if not event[0]], dtype=_BLOCK)
        for times in (tasks["begin"], tasks["end"], sent["at"], arrived["at"]):
            times -= self._origin
        return TraceRecord(tasks, sent, arrived, lanes, dropped, notes)


# ---- overlap


def overlap(records: Sequence[TraceRecord]) -> dict[str, float]:
    """Return for how long work of different kinds ran at the same time on the same rank.

    Parameters
    ----------
    records
        Of all ranks.

    Returns
    -------
    dict
        Seconds, summed over ranks, during which a rank had work of a kind: ``graph`` (GA, dGA, AE, dAE,
        RD), ``dense`` (AV, dAV), ``messages`` (a ghost block on its way to this rank), ``any`` of them; and
        during which it had several at once: ``graph_and_dense``, ``graph_and_messages``,
        ``dense_and_messages``, ``all_three``. ``fraction`` is the share of ``any`` with at least two;
        0 if there was no work. Threads that do the same at the same time count once. Blocks of which one
        end is not known do not count, nor does what was dropped.

    Notes
    -----
    A block is taken to be on its way from the moment it left until the receiver noticed it.
    """
    sent, matches = _match(records)
    total = np.zeros(8)
    for record, match in zip(records, matches, strict=True):
        known = match >= 0
        total += _seconds_by_state(
            np.concatenate([record.tasks["begin"], sent["at"][match[known]]]),
            np.concatenate([record.tasks["end"], record.arrived["at"][known]]),
            np.concatenate([_GROUP[record.tasks["kind"]], np.full(np.count_nonzero(known), _MESSAGES)]),
        )

    def during(bits: int) -> float:
        return float(sum(total[state] for state in range(8) if state & bits == bits))

    busy = float(total[1:].sum())
    several = float(sum(total[state] for state in range(8) if state.bit_count() >= 2))
    return {
        "graph": during(_GRAPH),
        "dense": during(_DENSE),
        "messages": during(_MESSAGES),
        "any": busy,
        "graph_and_dense": during(_GRAPH | _DENSE),
        "graph_and_messages": during(_GRAPH | _MESSAGES),
        "dense_and_messages": during(_DENSE | _MESSAGES),
        "all_three": during(_GRAPH | _DENSE | _MESSAGES),
        "fraction": several / busy if busy > 0 else 0.0,
    }


def _seconds_by_state(begin: np.ndarray, end: np.ndarray, bit: np.ndarray) -> np.ndarray:
    """Sweep over the bounds of intervals: seconds by set of bits that have an open interval, (8,)."""
    real = (begin < end) & (bit > 0)  # clocks that differ a little can make a block arrive before it left
    bounds = np.concatenate([begin[real], end[real]])
    order = np.argsort(bounds)
    step = np.repeat(np.array([1, -1]), np.count_nonzero(real))[order]
    bit = np.tile(bit[real], 2)[order]
    state = np.zeros(len(bounds), dtype=np.intp)
    for one in (_GRAPH, _DENSE, _MESSAGES):
        # Bounds at the same time come in any order, but no time passes between them.
        state[np.cumsum(np.where(bit == one, step, 0)) > 0] |= one
    return np.bincount(state[:-1], weights=np.diff(bounds[order]), minlength=8)


def _match(records: Sequence[TraceRecord]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Find the send behind each arrival.

    Returns
    -------
    sent : ndarray, structured
        Of all ranks, one after the other.
    matches : list of ndarray
        By rank, for each arrival: place in `sent`, or -1. Of sends that share a key, the first in time.
    """
    sent = np.concatenate([np.zeros(0, dtype=_BLOCK), *(record.sent for record in records)])
    blocks = np.concatenate([sent, *(record.arrived for record in records)])
    is_arrival = np.arange(len(blocks)) >= len(sent)
    order = np.lexsort([blocks["at"], is_arrival, *(blocks[name] for name in _KEY)])
    is_first = np.zeros(len(blocks), dtype=bool)
    is_first[:1] = True
    for name in _KEY:
        column = blocks[name][order]
        is_first[1:] |= column[1:] != column[:-1]
    # The first of each group is a send, if the group has any.
    leader = order[np.maximum.accumulate(np.where(is_first, np.arange(len(blocks)), 0))]
    match = np.empty(len(blocks), dtype=np.intp)
    match[order] = np.where(leader < len(sent), leader, -1)
    ends = np.cumsum([len(sent), *(len(record.arrived) for record in records)])
    return sent, np.split(match, ends)[1:-1]


# ---- the file


def write_trace(path: Path, records: Sequence[TraceRecord], roles: Sequence[str]) -> None:
    """Write the timeline in the trace event format, whole or not at all.

    A rank is a process, a lane a thread; blocks that left and arrived have a thread each. The timeline
    starts at the origin, or at the first event if that is earlier.

    Parameters
    ----------
    path
        The file to make.
    records
        Of all ranks, by rank.
    roles
        What each rank is to be called.

    Raises
    ------
    ValueError
        Not one role for each record.

    References
    ----------
    "Trace Event Format", the Chromium project: JSON object format; complete, metadata and flow events.
    """
    if len(roles) != len(records):
        raise ValueError(f"{len(records)} records need as many roles, not {len(roles)}")
    head = {"displayTimeUnit": "ms", "otherData": {"dropped": [record.dropped for record in records]}}
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [')
        separator = "\n"
        for event in _events(records, roles):
            file.write(separator + event)
            separator = ",\n"
        file.write("\n]}\n")


def _events(records: Sequence[TraceRecord], roles: Sequence[str]) -> Iterator[str]:
    """Each event as JSON. A slice comes before the arrows that hang on it, as viewers want it."""
    origin = _first_ns(records)
    sent, matches = _match(records)
    left = [_marks(_ns(record.sent["at"]) - origin) for record in records]
    came = [_marks(_ns(record.arrived["at"]) - origin) for record in records]
    for rank, (record, role) in enumerate(zip(records, roles, strict=True)):
        yield from _names(rank, record, role)
        yield from _task_slices(rank, record, origin)
        yield from _decisions(rank, record, origin)
        in_flight = np.full(len(record.arrived), np.nan)
        known = matches[rank] >= 0
        in_flight[known] = record.arrived["at"][known] - sent["at"][matches[rank][known]]
        unknown = np.full(len(record.sent), np.nan)
        yield from _block_slices(rank, _sent_lane(record), record.sent, left[rank], unknown)
        yield from _block_slices(rank, _arrived_lane(record), record.arrived, came[rank], in_flight)
    yield from _arrows(records, matches, [begin for begin, _ in left], [begin for begin, _ in came])


def _decisions(rank: int, record: TraceRecord, origin: int) -> Iterator[str]:
    """A curve of each value that was decided, and a mark with the reason at each decision."""
    for at, what, value, reason in record.notes:
        microseconds = (round(at * 1e9) - origin) / 1000
        head = {"pid": rank, "tid": 0, "ts": microseconds, "name": what}
        yield json.dumps(head | {"ph": "C", "args": {what: value}})
        yield json.dumps(head | {"ph": "i", "s": "p", "args": {"value": value, "reason": reason}})


def _sent_lane(record: TraceRecord) -> int:
    """The lane of blocks that left: not one of the rank's own, where a mark could cross a task."""
    return len(record.lanes)


def _arrived_lane(record: TraceRecord) -> int:
    return len(record.lanes) + 1


def _names(rank: int, record: TraceRecord, role: str) -> Iterator[str]:
    """Metadata: what process and threads are called, and in which order they appear."""

    def metadata(tid: int, what: str, **args: Any) -> str:
        return json.dumps({"ph": "M", "pid": rank, "tid": tid, "ts": 0, "name": what, "args": args})

    yield metadata(0, "process_name", name=role)
    yield metadata(0, "process_sort_index", sort_index=rank)
    if record.dropped:
        yield metadata(0, "process_labels", labels=f"{record.dropped} events dropped")
    names = list(enumerate(record.lanes))
    names += [(_sent_lane(record), "blocks sent")] if len(record.sent) else []
    names += [(_arrived_lane(record), "blocks arrived")] if len(record.arrived) else []
    for tid, name in names:
        yield metadata(tid, "thread_name", name=name)
        yield metadata(tid, "thread_sort_index", sort_index=tid)


def _task_slices(rank: int, record: TraceRecord, origin: int) -> Iterator[str]:
    """Each task, outer ones first."""
    begin = _ns(record.tasks["begin"]) - origin
    length = np.maximum(_ns(record.tasks["end"]) - origin - begin, 0)
    order = np.lexsort((-length, begin))
    for start in range(0, len(order), _CHUNK):
        rows = order[start : start + _CHUNK]
        columns = (begin[rows].tolist(), length[rows].tolist(), record.tasks[rows].tolist())
        for ts, duration, task in zip(*columns, strict=True):
            code, _, _, lane, epoch, layer, part, interval, evaluation = task
            kind = KINDS[code]
            yield (
                f'{{"ph": "X", "name": "{kind}{layer if kind in _LAYERED else ""}", '
                f'"cat": "{"eval" if evaluation else kind}", "cname": "{_COLOURS[kind]}", '
                f'"pid": {rank}, "tid": {lane}, "ts": {_us(ts)}, "dur": {_us(duration)}, "args": '
                f'{{"epoch": {epoch}, "layer": {layer}, "part": {part}, "interval": {interval}}}}}'
            )


def _block_slices(
    rank: int, lane: int, blocks: np.ndarray, marks: tuple[np.ndarray, np.ndarray], in_flight: np.ndarray
) -> Iterator[str]:
    """A mark for each block, since an arrow must begin and end in a slice; in flight: seconds, or NaN."""
    for start in range(0, len(blocks), _CHUNK):
        rows = slice(start, start + _CHUNK)
        columns = (column[rows].tolist() for column in (*marks, blocks, in_flight))
        for ts, duration, block, seconds in zip(*columns, strict=True):
            _, table, part, interval, number, evaluation = block
            way = "" if seconds != seconds else f', "in_flight_us": {1e6 * seconds:.3f}'
            yield (
                f'{{"ph": "X", "name": "block{table}", "cat": "{"eval" if evaluation else "message"}", '
                f'"cname": "{_BLOCK_COLOUR}", "pid": {rank}, "tid": {lane}, "ts": {_us(ts)}, '
                f'"dur": {_us(duration)}, "args": {{"table": {table}, "part": {part}, '
                f'"interval": {interval}, "number": {number}{way}}}}}'
            )


def _arrows(
    records: Sequence[TraceRecord],
    matches: Sequence[np.ndarray],
    left: Sequence[np.ndarray],
    came: Sequence[np.ndarray],
) -> Iterator[str]:
    """An arrow from each block that left to each rank that it reached; times in nanoseconds, by rank."""
    sources = np.repeat(np.arange(len(records)), [len(begin) for begin in left])
    begins = np.concatenate([np.zeros(0, dtype=np.int64), *left])
    number = 0
    for rank, (match, ends) in enumerate(zip(matches, came, strict=True)):
        for start in range(0, len(match), _CHUNK):
            rows = slice(start, start + _CHUNK)
            known = match[rows][match[rows] >= 0]
            arrived = ends[rows][match[rows] >= 0]
            columns = (sources[known].tolist(), begins[known].tolist(), arrived.tolist())
            for source, begin, end in zip(*columns, strict=True):
                if end < begin:
                    continue  # where clocks differ: to a viewer an arrow back in time is an error
                common = f'"name": "block", "cat": "message", "id": {number}'
                number += 1
                yield (
                    f'{{"ph": "s", {common}, "pid": {source}, "tid": {_sent_lane(records[source])}, '
                    f'"ts": {_us(begin)}}}'
                )
                yield (
                    f'{{"ph": "f", "bp": "e", {common}, "pid": {rank}, '
                    f'"tid": {_arrived_lane(records[rank])}, "ts": {_us(end)}}}'
                )


def _marks(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Begin and length of a mark for each time, in nanoseconds, none inside or across another.

    Viewers drop slices that cross, and would hang an arrow on the innermost of those that coincide;
    so marks of the same time are moved apart by a nanosecond.
    """
    order = np.argsort(at, kind="stable")
    steps = np.arange(len(at))
    begin = np.maximum.accumulate(at[order] - steps) + steps
    length = np.full(len(at), _MARK_NS)
    length[:-1] = np.minimum(np.diff(begin), _MARK_NS)
    back = np.argsort(order)
    return begin[back], length[back]


def _first_ns(records: Sequence[TraceRecord]) -> int:
    """Time of the first event, or 0 if none is before the origin: viewers drop negative times."""
    times = [
        column
        for record in records
        for column in (record.tasks["begin"], record.sent["at"], record.arrived["at"])
        if len(column)
    ]
    return min([0, *(int(_ns(column).min()) for column in times)])


def _ns(seconds: np.ndarray) -> np.ndarray:
    """Whole nanoseconds: slices that touch or nest still do when rounded."""
    return np.rint(1e9 * seconds).astype(np.int64)


def _us(nanoseconds: int) -> str:
    """Microseconds, exactly."""
    return f"{nanoseconds / 1000:.3f}"
