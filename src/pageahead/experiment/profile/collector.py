"""What listens while steps are run."""

from __future__ import annotations

import time
from typing import Protocol

from pageahead.experiment.profile.activity import Activity
from pageahead.experiment.profile.records import Source

__all__ = ["Collector", "NullCollector", "ProfileError"]


class ProfileError(RuntimeError):
    """Nothing can be recorded here; the message says what is missing and what to do."""


class Collector(Protocol):
    """Records activities from its making until `close`.

    Attributes:
        source: what kind it is.
    """

    source: Source

    def now(self) -> int:
        """This moment, in nanoseconds, on the clock that activities have."""

    def take(self) -> list[Activity]:
        """What was recorded since the last call, in no particular order. The device is idle."""

    def close(self) -> None:
        """Stop recording; a second time, do nothing."""


class NullCollector:
    """Records nothing: Nsight Systems does, around this process."""

    source: Source = "marks"

    def now(self) -> int:
        return time.perf_counter_ns()

    def take(self) -> list[Activity]:
        return []

    def close(self) -> None:
        pass
