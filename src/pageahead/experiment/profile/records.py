"""A profile as evidence: every activity of every step, from which all figures are computed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pageahead.experiment.cells import Residency
from pageahead.experiment.profile.activity import Activity

__all__ = ["ProfileRecord", "ProfiledStep", "Source"]

Source = Literal["cupti", "nsys", "cpu", "marks"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProfiledStep(_Model):
    """One step. Its times include the cost of tracing and are no timings of the optimizer."""

    wall_ms: float = Field(gt=0)
    """On the host's clock, from an idle device until the step returned."""
    returned: int = Field(gt=0)
    """When it returned, in nanoseconds since it began, on the collector's clock."""
    settled: int
    """When the device was idle again, likewise."""
    activities: list[Activity]
    """Times in nanoseconds since the step began, in order of their start."""


class ProfileRecord(_Model):
    """One arm of a cell, profiled in a process of its own."""

    kind: Literal["profile"] = "profile"
    run: str
    cell: str
    arm: str
    """``legacy`` or a strategy."""
    device: Literal["cpu", "cuda"]
    device_name: str
    library: str
    source: Source
    """Who recorded it."""
    residency: Residency
    state_bytes: int
    """Of ``state1`` and ``state2`` of the parameters that are paged."""
    managed: bool
    """Whether that state was in managed memory."""
    warmups: int
    steps: list[ProfiledStep] = Field(min_length=1)
    untraced_ms: list[float]
    """Wall times of as many steps after those, with nobody listening: what tracing costs. Empty
    where another profiler listened."""
    driver_peak: Annotated[int, Field(ge=0, lt=1 << 63)] | None
    """The most that was taken of the GPU, by anybody, after any step, the collector's own buffers
    included; None where nobody asked."""
    torch_peak: Annotated[int, Field(ge=0, lt=1 << 63)] | None
    """PyTorch's ``max_memory_allocated``, which does not know of managed memory."""
