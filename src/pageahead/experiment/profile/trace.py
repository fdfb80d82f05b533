"""A profile as a trace that Perfetto and Chrome's about:tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pageahead.experiment.profile.activity import LANES, Activity, lane
from pageahead.experiment.profile.records import ProfileRecord

__all__ = ["events", "write"]

US = 1e3  # nanoseconds in a microsecond, the unit of the format
PAUSE_US = 500.0  # between two steps, whose real distance is how long preparing took
#: Threads of the picture, in order from top to bottom.
THREADS = ("step", "host", *LANES)
SPARE = 10  # numbers for each thread, for what goes on at the same time in one lane


def write(path: Path, records: Sequence[ProfileRecord]) -> None:
    """Write a trace of every arm: all its steps, one after the other. Raises `OSError`."""
    path.write_text(
        json.dumps({"traceEvents": events(records), "displayTimeUnit": "ms"}), encoding="utf-8"
    )


def events(records: Sequence[ProfileRecord]) -> list[dict[str, Any]]:
    """The events of the format: each arm is a process, each lane one of its threads.

    Step ``i`` of every arm begins at the same time, so that arms compare. What goes on at the same
    time in one lane is put into several threads: within one, events must not overlap.
    """
    found: list[dict[str, Any]] = []
    begins = _begins(records)
    for process, record in enumerate(records):
        name = f"{record.cell} {record.arm} ({record.source}, {record.device_name})"
        found += [_name("process_name", process, 0, name), _sort("process", process, 0, process)]
        threads: dict[int, tuple[str, int]] = {}
        for number, (begin, step) in enumerate(zip(begins, record.steps, strict=False)):
            whole = {"wall_ms": step.wall_ms}
            found.append(
                _event(f"step {number}", "step", begin, 0, step.returned, process, 0, whole)
            )
            threads[0] = ("step", 0)
            ends: dict[int, int] = {}
            for one in step.activities:
                place = THREADS.index(lane(one) or "host")
                thread = _free(ends, place * SPARE, one)
                threads[thread] = (THREADS[place], thread % SPARE)
                found.append(
                    _event(
                        _title(one),
                        one.kind,
                        begin,
                        one.start,
                        one.end,
                        process,
                        thread,
                        _args(one),
                    )
                )
        for thread, (name, spare) in sorted(threads.items()):
            label = f"{name} ({spare + 1})" if spare else name
            found += [
                _name("thread_name", process, thread, label),
                _sort("thread", process, thread, thread),
            ]
    return found


def _begins(records: Sequence[ProfileRecord]) -> list[float]:
    """When each step begins, in microseconds: after the longest of those before it."""
    begins, at = [], 0.0
    for number in range(max((len(record.steps) for record in records), default=0)):
        begins.append(at)
        steps = [record.steps[number] for record in records if number < len(record.steps)]
        at += max(max(step.returned, step.settled) for step in steps) / US + PAUSE_US
    return begins


def _free(ends: dict[int, int], first: int, activity: Activity) -> int:
    """The first thread of a lane that is free; the last one takes whatever is left."""
    for thread in range(first, first + SPARE):
        if ends.get(thread, activity.start) <= activity.start or thread == first + SPARE - 1:
            ends[thread] = max(ends.get(thread, 0), activity.end)
            return thread
    raise AssertionError("the last thread takes everything")


def _title(activity: Activity) -> str:
    if activity.kind in ("copy", "managed"):
        return f"{activity.kind} {activity.direction}".replace("_", " ")
    if activity.kind in ("synchronization", "fault"):
        return f"{activity.name} {activity.kind}"
    return activity.name or activity.kind


def _args(activity: Activity) -> dict[str, Any]:
    given = {
        "stream": activity.stream,
        "bytes": activity.nbytes,
        "faults": activity.faults,
        "cause": activity.name if activity.kind == "managed" else "",
    }
    return {name: value for name, value in given.items() if value}


def _event(
    name: str,
    category: str,
    begin: float,
    start: int,
    end: int,
    process: int,
    thread: int,
    args: dict[str, Any],
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",  # complete: a beginning and a duration
        "ts": begin + start / US,
        "dur": (end - start) / US,
        "pid": process,
        "tid": thread,
        "args": args,
    }


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _sort(what: str, process: int, thread: int, index: int) -> dict[str, Any]:
    return {
        "name": f"{what}_sort_index",
        "ph": "M",
        "pid": process,
        "tid": thread,
        "args": {"sort_index": index},
    }
