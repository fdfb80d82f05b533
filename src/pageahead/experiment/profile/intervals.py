"""Sets of moments, as sorted lists of intervals that do not touch. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Interval", "clipped", "gaps", "intersection", "length", "union"]

#: Half-open, ``(start, end)``.
Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Every moment in any of them. Empty and reversed intervals have none."""
    merged: list[Interval] = []
    for start, end in sorted(one for one in intervals if one[0] < one[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Every moment in both, which are unions."""
    common: list[Interval] = []
    first = second = 0
    while first < len(one) and second < len(other):
        start = max(one[first][0], other[second][0])
        end = min(one[first][1], other[second][1])
        if start < end:
            common.append((start, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return common


def clipped(intervals: Sequence[Interval], start: int, end: int) -> list[Interval]:
    """The part of a union that lies in ``[start, end)``."""
    return intersection(intervals, [(start, end)] if start < end else [])


def gaps(intervals: Sequence[Interval], start: int, end: int) -> list[Interval]:
    """Every moment of ``[start, end)`` that is not in a union."""
    edges = [start]
    for begin, stop in clipped(intervals, start, end):
        edges += [begin, stop]
    edges.append(end)
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def length(intervals: Iterable[Interval]) -> int:
    """How long a union lasts."""
    return sum(end - start for start, end in intervals)
