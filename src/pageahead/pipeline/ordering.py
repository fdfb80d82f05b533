"""Finds accesses of the same bytes that nothing orders, by vector clocks.

Every agent has a clock: for each agent the number of its operations known to be done. An event
carries the clock of its stream, a wait joins it, and a stream's operation starts after the point of
the host program at which it was enqueued. Two accesses of the same bytes, at least one of which
writes, are ordered if the later one's clock has reached the earlier one; otherwise it depends on
the weather what is read, and they are reported.

Plans, chunks and slots are unknown here: what is checked is what was enqueued.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pageahead.device.trace import HOST, Operation, Range

__all__ = ["Conflict", "find_conflicts"]

Clock = dict[str, int]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two operations, in trace order, that access the same bytes in no order.

    Attributes:
        earlier, later: the operations.
        ranges: the bytes that both access.
    """

    earlier: Operation
    later: Operation
    ranges: tuple[Range, ...]

    def __str__(self) -> str:
        nbytes = sum(one.stop - one.start for one in self.ranges)
        return (
            f"{self.later} is not ordered after {self.earlier}: both access {nbytes:,} bytes from "
            f"{self.ranges[0].start:#x} on"
        )


def find_conflicts(trace: Iterable[Operation]) -> list[Conflict]:
    """Return every pair of conflicting accesses in `trace` that nothing orders.

    Args:
        trace: operations in program order.

    Raises:
        ValueError: an operation waits for an event that no earlier one records.
    """
    clocks: dict[str, Clock] = defaultdict(dict)
    events: dict[str, Clock] = {}
    memory = _Memory()
    found: dict[tuple[int, int], tuple[Operation, Operation, list[Range]]] = {}
    for operation in trace:
        clock = clocks[operation.agent]
        if operation.agent != HOST:
            _join(clock, clocks[HOST])  # enqueued by the host, here
        for event in operation.waits:
            if event not in events:
                raise ValueError(f"{operation} waits for {event!r}, which nothing has recorded")
            _join(clock, events[event])
        for stream in operation.idles:
            _join(clock, clocks[stream])
        clock[operation.agent] = clock.get(operation.agent, 0) + 1
        for earlier, where in memory.access(operation, clock):
            key = (earlier.number, operation.number)
            found.setdefault(key, (earlier, operation, []))[2].append(where)
        if operation.records is not None:
            events[operation.records] = dict(clock)
    return [Conflict(earlier, later, _merged(ranges)) for earlier, later, ranges in found.values()]


def _join(clock: Clock, other: Clock) -> None:
    for agent, time in other.items():
        if time > clock.get(agent, 0):
            clock[agent] = time


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    merged: list[Range] = []
    for one in sorted(ranges):
        if merged and one.start <= merged[-1].stop:
            merged[-1] = Range(merged[-1].start, max(one.stop, merged[-1].stop))
        else:
            merged.append(one)
    return tuple(merged)


class _Access(NamedTuple):
    """An agent's access and, behind it, that agent's access before."""

    time: int
    operation: Operation
    before: _Access | None


Last = dict[str, _Access]
"""Each agent's last access of some bytes, with all before it behind."""


@dataclass(slots=True)
class _Segment:
    """Bytes that every operation so far has accessed as one."""

    stop: int
    reads: Last = field(default_factory=dict)
    writes: Last = field(default_factory=dict)
    migrations: Last = field(default_factory=dict)

    def copy(self) -> _Segment:
        return _Segment(self.stop, dict(self.reads), dict(self.writes), dict(self.migrations))


class _Memory:
    """Who accessed which bytes, as segments in the order of their addresses."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._segments: list[_Segment] = []

    def access(self, operation: Operation, clock: Clock) -> list[tuple[Operation, Range]]:
        """Add the accesses of `operation`; return the earlier ones that it is not ordered after."""
        agent = operation.agent
        found: list[tuple[Operation, Range]] = []
        for ranges, writes in ((operation.reads, False), (operation.writes, True)):
            for asked in ranges:
                for where, segment in self._over(asked):
                    against = [segment.writes, segment.migrations]
                    if writes:
                        against.append(segment.reads)
                    found += [
                        (earlier, where)
                        for last in against
                        for earlier in _unordered(last, agent, clock)
                    ]
                    own = segment.writes if writes else segment.reads
                    own[agent] = _Access(clock[agent], operation, own.get(agent))
        for asked in operation.migrates:
            for _, segment in self._over(asked):
                before = segment.migrations.get(agent)
                segment.migrations[agent] = _Access(clock[agent], operation, before)
        return found

    def _over(self, asked: Range) -> Iterator[tuple[Range, _Segment]]:
        """The segments that make up `asked`, made or cut where need be."""
        if asked.start >= asked.stop:
            return
        self._cut(asked.start)
        self._cut(asked.stop)
        at = bisect.bisect_left(self._starts, asked.start)
        start = asked.start
        while start < asked.stop:
            if at == len(self._starts) or self._starts[at] > start:  # nobody was here yet
                following = self._starts[at] if at < len(self._starts) else asked.stop
                self._starts.insert(at, start)
                self._segments.insert(at, _Segment(min(following, asked.stop)))
            segment = self._segments[at]
            yield Range(start, segment.stop), segment
            start = segment.stop
            at += 1

    def _cut(self, address: int) -> None:
        """Let no segment reach over `address`."""
        at = bisect.bisect_left(self._starts, address) - 1
        if at >= 0 and self._segments[at].stop > address:
            self._starts.insert(at + 1, address)
            self._segments.insert(at + 1, self._segments[at].copy())
            self._segments[at].stop = address


def _unordered(last: Last, agent: str, clock: Clock) -> Iterator[Operation]:
    for other, access in last.items():
        if other == agent:
            continue
        known = clock.get(other, 0)
        one: _Access | None = access
        while one is not None and one.time > known:
            yield one.operation
            one = one.before
