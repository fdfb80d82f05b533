"""What `bench` and its workers say to each other: one JSON object a line."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from pageahead.experiment.evidence import (
    CellRecord,
    Environment,
    PeakRecord,
    ProfileRecord,
    TrainingRecord,
)
from pageahead.experiment.protocol import Protocol

__all__ = [
    "Answer",
    "CellRequest",
    "Failure",
    "MeasureRequest",
    "PeakRequest",
    "ProbeRequest",
    "ProfileRequest",
    "Progress",
    "Reply",
    "TrainingRequest",
    "replies",
    "requests",
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProbeRequest(_Model):
    """Say what this machine is, and measure its link if it has a GPU. Answer: `Environment`."""

    kind: Literal["probe"] = "probe"
    run: str
    argv: list[str]
    device: Literal["auto", "cpu", "cuda"]


class _MeasureRequest(_Model):
    baseline: ClassVar[str]
    """What the strategies are measured against."""

    run: str
    cell: str
    strategies: list[str]
    device: Literal["cpu", "cuda"]
    protocol: Protocol

    @property
    def steps(self) -> int:
        """How many there will be in all, to draw a progress bar of."""
        return self.protocol.steps * (1 + len(self.strategies))


class CellRequest(_MeasureRequest):
    """Measure one cell. Answer: `CellRecord`."""

    baseline = "legacy"

    kind: Literal["cell"] = "cell"


class PeakRequest(_MeasureRequest):
    """Measure the memory of one arm, the only one of `strategies`. Answer: `PeakRecord`."""

    baseline = "peak memory"

    kind: Literal["peak"] = "peak"

    @property
    def steps(self) -> int:
        return self.protocol.warmups


class ProfileRequest(_MeasureRequest):
    """Profile one arm, the only one of `strategies`. Answer: `ProfileRecord`.

    The protocol's repetitions are the steps that are profiled; as many are timed after them.
    """

    baseline = "profile"

    kind: Literal["profile"] = "profile"
    mark: bool = False
    """Only name the steps, for another profiler that records this process."""

    @property
    def steps(self) -> int:
        return self.protocol.warmups + 2 * self.protocol.repetitions


class TrainingRequest(_MeasureRequest):
    """Measure training iterations in the ways (`strategies`) named. Answer: `TrainingRecord`."""

    baseline = "hbm"

    kind: Literal["training"] = "training"
    parameters: int


class Progress(_Model):
    """Sent on the way: what is being done, and how many steps are."""

    kind: Literal["progress"] = "progress"
    phase: str
    steps: int


class Failure(_Model):
    """The answer when it cannot be done."""

    kind: Literal["failure"] = "failure"
    reason: str


MeasureRequest = CellRequest | PeakRequest | ProfileRequest | TrainingRequest
Request = ProbeRequest | CellRequest | PeakRequest | ProfileRequest | TrainingRequest
Answer = Environment | CellRecord | PeakRecord | ProfileRecord | TrainingRecord
Reply = Progress | Failure | Answer
requests: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
replies: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])
