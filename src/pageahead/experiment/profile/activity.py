"""One thing that happened during a step, whoever recorded it."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

__all__ = ["LANES", "Activity", "Direction", "Kind", "Lane", "lane", "short_name"]

#: ``copy`` is a copy somebody asked for, ``managed`` a migration by the driver; ``wait`` is one
#: stream's for an event, ``synchronization`` the host's; ``call`` is a call of the CUDA runtime.
Kind = Literal["kernel", "copy", "fill", "managed", "fault", "synchronization", "wait", "call"]
Direction = Literal["to_device", "to_host", "other"]
Lane = Literal["fetch", "update", "write-back", "other"]

#: In the order in which state passes through them.
LANES: tuple[Lane, ...] = ("fetch", "update", "write-back", "other")
#: Part of the name of every update: bitsandbytes' kernels on CUDA, its operators on the CPU.
UPDATE = "ptimizer"


class Activity(NamedTuple):
    """An interval on the collector's clock. A tuple, which takes little space as JSON.

    Attributes:
        kind: what it was.
        start, end: nanoseconds; in a record, since the beginning of the step.
        name: of a kernel or call; of a synchronization ``device``, ``stream`` or ``event``; of a
            fault ``gpu`` or ``cpu``; of a migration its cause.
        stream: which one, as the collector numbers them; empty where there is none.
        direction: of a copy or migration.
        nbytes: moved or filled.
        faults: how many it stands for.
    """

    kind: Kind
    start: int
    end: int
    name: str = ""
    stream: str = ""
    direction: Direction = "other"
    nbytes: int = 0
    faults: int = 0

    def since(self, begin: int) -> Activity:
        """The same, its times counted from `begin`."""
        return self._replace(start=self.start - begin, end=self.end - begin)


def lane(activity: Activity) -> Lane | None:
    """Which part of the step the device was busy with; None of what the host does, and waits."""
    if activity.kind in ("copy", "managed"):
        if activity.direction == "to_device":
            return "fetch"
        return "write-back" if activity.direction == "to_host" else "other"
    if activity.kind == "kernel":
        return "update" if UPDATE in activity.name else "other"
    return "other" if activity.kind == "fill" else None


def short_name(name: str) -> str:
    """A kernel's bare name, of a mangled or a demangled one: no types, parameters, namespaces."""
    if name.startswith("_Z"):
        return _last_identifier(name)
    bare = re.sub(r"\(.*", "", name.removeprefix("void ").replace("(anonymous namespace)", ""))
    return re.sub(r"<.*", "", bare).rpartition("::")[2].strip() or name


def _last_identifier(mangled: str) -> str:
    """The last of the leading run of length-prefixed identifiers: ``_ZN2at4fillIfEEv`` is fill."""
    position = len("_ZN") if mangled.startswith("_ZN") else len("_Z")
    found = mangled
    while length := re.match(r"\d+", mangled[position:]):
        begin = position + length.end()
        position = begin + int(length.group())
        found = mangled[begin:position]
    return found
