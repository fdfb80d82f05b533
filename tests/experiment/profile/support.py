"""Profiles to test with: of a step that pages and of one that streams, with known figures."""

from __future__ import annotations

from collections.abc import Iterable

from pageahead.experiment.profile.activity import Activity
from pageahead.experiment.profile.records import ProfiledStep, ProfileRecord
from tests.experiment.support import RUN

MIB = 1 << 20
US, MS = 1_000, 1_000_000
UPDATE = "kOptimizer32bit2State"


def kernel(start: int, end: int, name: str = UPDATE) -> Activity:
    return Activity("kernel", start, end, name, "7")


def fetch(start: int, end: int, nbytes: int = 0) -> Activity:
    return Activity("copy", start, end, stream="13", direction="to_device", nbytes=nbytes)


def home(start: int, end: int, nbytes: int = 0) -> Activity:
    return Activity("copy", start, end, stream="14", direction="to_host", nbytes=nbytes)


def migration(start: int, end: int, nbytes: int = 0) -> Activity:
    return Activity("managed", start, end, "prefetch", direction="to_device", nbytes=nbytes)


def synchronized(start: int, end: int, what: str = "device") -> Activity:
    return Activity("synchronization", start, end, what)


def step(
    activities: Iterable[Activity], returned: int, settled: int | None = None, wall: int = 0
) -> ProfiledStep:
    return ProfiledStep(
        wall_ms=(wall or returned) / MS,
        returned=returned,
        settled=settled or returned,
        activities=sorted(activities, key=lambda one: one.start),
    )


def paging_step() -> ProfiledStep:
    """8 times: 32 MiB come in 0.6 ms, then 0.05 ms of update, then 0.2 ms of nothing."""
    found, at = [], 0
    for _ in range(8):
        for _ in range(16):
            found.append(migration(at, at + 37_500, 2 * MIB))
            at += 37_500
        found += [kernel(at, at + 50 * US), synchronized(at - 600 * US, at + 50 * US)]
        at += 250 * US
    found.append(synchronized(at, at + 5 * US))  # the measurement's own
    return step(found, at, at + 5 * US)


def streaming_step() -> ProfiledStep:
    """16 chunks of 16 MiB, each way 0.3 ms; updates of 0.025 ms between fetch and write-back."""
    found = []
    for number in range(16):
        come = (number + 1) * 300 * US
        found.append(fetch(come - 300 * US, come, 16 * MIB))
        found.append(kernel(come, come + 25 * US))
        found.append(home(come + 25 * US, come + 325 * US, 16 * MIB))
    return step(found, 16 * 300 * US + 325 * US)


def profile(arm: str = "streamed", steps: int = 3, **changes: object) -> ProfileRecord:
    one = paging_step() if arm == "legacy" else streaming_step()
    return ProfileRecord(
        run=RUN,
        cell="adamw32/8x4Mi",
        arm=arm,
        device="cuda",
        device_name="A GPU",
        library="libbitsandbytes_cuda130.so",
        source="cupti",
        residency="host",
        state_bytes=256 * MIB,
        managed=arm == "legacy",
        warmups=5,
        steps=[one] * steps,
        untraced_ms=[one.wall_ms * 0.95] * steps,
        driver_peak=1024 * MIB,
        torch_peak=512 * MIB,
    ).model_copy(update=changes)
