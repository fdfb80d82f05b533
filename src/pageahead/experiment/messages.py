"""What `bench` and its workers say to each other: one JSON object a line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from pageahead.experiment.evidence import CellRecord, Environment
from pageahead.experiment.protocol import Protocol

__all__ = ["CellRequest", "Failure", "ProbeRequest", "Progress", "Reply", "replies", "requests"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProbeRequest(_Model):
    """Say what this machine is, and measure its link if it has a GPU. Answer: `Environment`."""

    kind: Literal["probe"] = "probe"
    run: str
    argv: list[str]
    device: Literal["auto", "cpu", "cuda"]


class CellRequest(_Model):
    """Measure one cell. Answer: `CellRecord`."""

    kind: Literal["cell"] = "cell"
    run: str
    cell: str
    strategies: list[str]
    device: Literal["cpu", "cuda"]
    protocol: Protocol


class Progress(_Model):
    """Sent on the way: what is being done, and how many steps are."""

    kind: Literal["progress"] = "progress"
    phase: str
    steps: int


class Failure(_Model):
    """The answer when it cannot be done."""

    kind: Literal["failure"] = "failure"
    reason: str


Request = ProbeRequest | CellRequest
Reply = Progress | Failure | Environment | CellRecord
requests: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
replies: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])
