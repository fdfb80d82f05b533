"""From the activities of a step to the figures of a profile: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pageahead.experiment.profile.activity import Activity, Lane, lane
from pageahead.experiment.profile.intervals import (
    Interval,
    clipped,
    gaps,
    intersection,
    length,
    union,
)
from pageahead.experiment.profile.records import ProfiledStep, ProfileRecord
from pageahead.experiment.summary import gigabytes_per_second

__all__ = [
    "TOLERANCE",
    "Figures",
    "device_lanes",
    "figures",
    "problems",
    "typical",
    "typical_step",
    "within",
]

#: By how much the parts of a step may miss its wall time, as a share of that.
TOLERANCE = 0.05
NS = 1e6  # nanoseconds in a millisecond


@dataclass(frozen=True)
class Figures:
    """What one step came to. Milliseconds unless said otherwise; bytes are of the whole step.

    Attributes:
        wall_ms: on the host's clock, until the step returned.
        clock_ms: the same on the collector's clock.
        to_device_bytes, to_host_bytes: copied or migrated, each way.
        managed_to_device_bytes, managed_to_host_bytes: what of it was migrated by the driver.
        to_device_ms, to_host_ms: how long anything was on its way.
        transfer_ms: how long anything was in either direction.
        update_ms: how long an update ran.
        overlap_ms: how long an update ran while something was on its way.
        both_ways_ms: how long something was on its way in both directions.
        concurrent_ms: how long at least two of fetch, update and write-back went on.
        other_ms: how long the device did something else and none of these.
        idle_ms: how long it did nothing before the step returned.
        host_ms: how much of that the host spent in calls of CUDA.
        accounted_ms: transfer + update - overlap + other + idle until the step returned, which has
            to be `wall_ms`.
        after_ms: how long the device was busy after the step had returned.
        gpu_faults, cpu_faults: page faults; the GPU's as groups, as the driver counts them.
        device_synchronizations, stream_synchronizations, event_synchronizations: of the host, until
            the step returned.
        waits: of streams, for events.
        prefetches: migration requests.
        launches: kernels that the host launched.
        kernels: kernels that ran.
    """

    wall_ms: float
    clock_ms: float
    to_device_bytes: int
    to_host_bytes: int
    managed_to_device_bytes: int
    managed_to_host_bytes: int
    to_device_ms: float
    to_host_ms: float
    transfer_ms: float
    update_ms: float
    overlap_ms: float
    both_ways_ms: float
    concurrent_ms: float
    other_ms: float
    idle_ms: float
    host_ms: float
    accounted_ms: float
    after_ms: float
    gpu_faults: int
    cpu_faults: int
    device_synchronizations: int
    stream_synchronizations: int
    event_synchronizations: int
    waits: int
    prefetches: int
    launches: int
    kernels: int

    @property
    def transfer_overlap(self) -> float:
        """Share of the transfer time during which an update ran; 0 where nothing moved."""
        return self.overlap_ms / self.transfer_ms if self.transfer_ms else 0.0

    @property
    def update_overlap(self) -> float:
        """Share of the update time during which something was on its way."""
        return self.overlap_ms / self.update_ms if self.update_ms else 0.0

    @property
    def to_device_rate(self) -> float | None:
        """GB/s (1e9 bytes) while anything was on its way to the device; None if nothing was."""
        return _rate(self.to_device_bytes, self.to_device_ms)

    @property
    def to_host_rate(self) -> float | None:
        """The same to the host."""
        return _rate(self.to_host_bytes, self.to_host_ms)

    @property
    def error(self) -> float:
        """By how much the parts miss the wall time, as a share of it."""
        return self.accounted_ms / self.wall_ms - 1

    @property
    def adds_up(self) -> bool:
        return abs(self.error) <= TOLERANCE


def device_lanes(activities: Iterable[Activity]) -> dict[Lane, list[Interval]]:
    """When the device was busy with what: a union for each lane, also for those without any."""
    found: dict[Lane, list[Interval]] = {"fetch": [], "update": [], "write-back": [], "other": []}
    for one in activities:
        which = lane(one)
        if which is not None:
            found[which].append((one.start, one.end))
    return {which: union(intervals) for which, intervals in found.items()}


def figures(step: ProfiledStep) -> Figures:
    """Compute everything for one step. Device time after the step returned is `after_ms` alone."""
    lanes = device_lanes(step.activities)
    busy = union(one for intervals in lanes.values() for one in intervals)
    inside = {which: clipped(one, 0, step.returned) for which, one in lanes.items()}
    fetch, update, write_back = inside["fetch"], inside["update"], inside["write-back"]
    transfer = union([*fetch, *write_back])
    both_ways = intersection(fetch, write_back)
    overlap = intersection(transfer, update)
    main = union([*transfer, *update])
    # Found as gaps between activities, not as what is left of the wall time: or that would add up
    # whatever was recorded.
    idle = gaps(busy, 0, step.returned)
    other = length(inside["other"]) - length(intersection(inside["other"], main))
    calls = union(
        (one.start, one.end) for one in step.activities if one.kind in ("call", "synchronization")
    )
    accounted = length(transfer) + length(update) - length(overlap) + other + length(idle)
    moved = [one for one in step.activities if one.kind in ("copy", "managed")]
    managed = [one for one in moved if one.kind == "managed"]
    return Figures(
        wall_ms=step.wall_ms,
        clock_ms=step.returned / NS,
        to_device_bytes=_bytes(moved, "fetch"),
        to_host_bytes=_bytes(moved, "write-back"),
        managed_to_device_bytes=_bytes(managed, "fetch"),
        managed_to_host_bytes=_bytes(managed, "write-back"),
        # Not clipped: the bytes beside it are not, either.
        to_device_ms=length(lanes["fetch"]) / NS,
        to_host_ms=length(lanes["write-back"]) / NS,
        transfer_ms=length(transfer) / NS,
        update_ms=length(update) / NS,
        overlap_ms=length(overlap) / NS,
        both_ways_ms=length(both_ways) / NS,
        concurrent_ms=length(union([*both_ways, *overlap])) / NS,
        other_ms=other / NS,
        idle_ms=length(idle) / NS,
        host_ms=length(intersection(idle, calls)) / NS,
        accounted_ms=accounted / NS,
        after_ms=length(clipped(busy, step.returned, max(step.returned, step.settled))) / NS,
        gpu_faults=_faults(step, "gpu"),
        cpu_faults=_faults(step, "cpu"),
        device_synchronizations=len(synchronizations(step, "device")),
        stream_synchronizations=len(synchronizations(step, "stream")),
        event_synchronizations=len(synchronizations(step, "event")),
        waits=sum(one.kind == "wait" for one in step.activities),
        prefetches=_calls(step, "cudaMemPrefetch"),
        launches=_calls(step, "cudaLaunchKernel") + _calls(step, "cudaLaunchCooperativeKernel"),
        kernels=sum(one.kind == "kernel" for one in step.activities),
    )


def typical_step(record: ProfileRecord) -> ProfiledStep:
    """The step whose wall time is the median; of an even number the quicker of the middle two."""
    ordered = sorted(record.steps, key=lambda step: step.wall_ms)
    return ordered[(len(ordered) - 1) // 2]


def typical(record: ProfileRecord) -> Figures:
    """Figures of `typical_step`."""
    return figures(typical_step(record))


def problems(record: ProfileRecord) -> list[str]:
    """Why a profile is not to be relied on; empty if it is.

    Its parts have to add up with the wall time in every step, no kernel that was launched may be
    missing and, where state begins the step on the host of a GPU, all of it has to have come; and
    gone home, if it is not in managed memory.
    """
    found = []
    name = f"{record.cell}, {record.arm}"
    steps = [figures(step) for step in record.steps]
    worst = max(steps, key=lambda one: abs(one.error))
    if not worst.adds_up:
        found.append(
            f"{name}: transfers, updates and idle time come to {worst.accounted_ms:.3f} ms of a "
            f"step that took {worst.wall_ms:.3f}; {TOLERANCE:.0%} are allowed"
        )
    for one in steps:
        if one.kernels < one.launches:
            found.append(
                f"{name}: {one.launches} kernels were launched in a step, {one.kernels} recorded"
            )
            break
    pages = record.managed or record.arm == "streamed"  # what legacy does not page never moves
    if record.device == "cuda" and record.residency == "host" and pages:
        least = min(steps, key=lambda one: one.to_device_bytes)
        if least.to_device_bytes < record.state_bytes:
            hint = (
                "; the driver may not have been allowed to report migrations (in a container: "
                "--cap-add=SYS_PTRACE)"
                if record.managed and not least.managed_to_device_bytes
                else ""
            )
            found.append(
                f"{name}: {least.to_device_bytes:,} bytes came to the device in a step, the state "
                f"has {record.state_bytes:,}{hint}"
            )
        fewest = min(one.to_host_bytes for one in steps)
        if not record.managed and fewest < record.state_bytes:
            found.append(
                f"{name}: {fewest:,} bytes went home in a step, the state has "
                f"{record.state_bytes:,}"
            )
    return found


def within(activities: Iterable[Activity], begin: int, end: int) -> list[Activity]:
    """Those whose middle lies in ``[begin, end)``, in order, their times counted from `begin`.

    By the middle, since clocks of host and device may differ by a little.
    """
    inside = [one for one in activities if begin <= (one.start + one.end) // 2 < end]
    return sorted((one.since(begin) for one in inside), key=lambda one: (one.start, one.end))


def _bytes(activities: Sequence[Activity], which: Lane) -> int:
    return sum(one.nbytes for one in activities if lane(one) == which)


def synchronizations(step: ProfiledStep, what: str) -> list[Activity]:
    """Times the step made the host wait; not the measurement's own wait after it had returned.

    Args:
        step: what was recorded.
        what: ``"device"``, ``"stream"`` or ``"event"``.
    """
    return [
        one
        for one in step.activities
        if one.kind == "synchronization" and one.name == what and one.start < step.returned
    ]


def _faults(step: ProfiledStep, name: str) -> int:
    return sum(one.faults for one in step.activities if one.kind == "fault" and one.name == name)


def _calls(step: ProfiledStep, name: str) -> int:
    return sum(one.kind == "call" and one.name.startswith(name) for one in step.activities)


def _rate(nbytes: int, milliseconds: float) -> float | None:
    return gigabytes_per_second(nbytes, milliseconds) if nbytes and milliseconds else None
