"""What the oracle and its workers say to each other: one JSON object a line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from pageahead.experiment.oracle.records import CellRecord, FailureRecord

__all__ = ["CheckRequest", "Done", "Request", "ShrinkRequest", "replies", "requests"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckRequest(_Model):
    """Check cases that share a reference. Answer: a `CellRecord` for each, in order; `Done`."""

    kind: Literal["check"] = "check"
    run: str
    device: Literal["cpu", "cuda"]
    cases: list[str]
    every_step: bool


class ShrinkRequest(_Model):
    """Make a failing case small. Answer: a `FailureRecord`; `Done`."""

    kind: Literal["shrink"] = "shrink"
    run: str
    device: Literal["cpu", "cuda"]
    case: str
    result: Literal["different", "wrong_path", "failed"]


class Done(_Model):
    """The request is answered."""

    kind: Literal["done"] = "done"


Request = CheckRequest | ShrinkRequest
Reply = CellRecord | FailureRecord | Done
requests: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
replies: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])
