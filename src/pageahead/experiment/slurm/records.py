"""What is known of jobs: JSON lines, in `jobs.jsonl` and in the journal of each job."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pageahead.experiment.evidence import Environment, why_invalid

__all__ = [
    "CheckedRecord",
    "EndedRecord",
    "FinishedRecord",
    "Outcome",
    "Record",
    "RefusedRecord",
    "SetupFailedRecord",
    "StartedRecord",
    "SubmittedRecord",
    "append",
    "now",
    "read",
]

#: ``done``: exit status 0. ``failed``: something was measured, but not everything, or not all of
#: it equal. ``setup_failed``: it ended before anything was measured. ``lost``: Slurm does not know
#: the job any more, and it has left no word of its end.
Outcome = Literal["done", "failed", "setup_failed", "cancelled", "timed_out", "lost"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Order(_Model):
    time: str
    """UTC, ISO 8601."""
    device_kind: str
    expected: str
    """What the device's name must contain."""
    command: list[str]
    """The words after `pageahead`, without the place for evidence."""
    evidence: str
    """Name of the file in the folder."""


class SubmittedRecord(_Order):
    """Slurm took a job."""

    kind: Literal["submitted"] = "submitted"
    version: Literal[1] = 1
    job: str
    sbatch: dict[str, str | bool]
    """Options, by their long names."""
    source_sha256: str
    """Of the package that submitted it. See `evidence.Environment`."""


class RefusedRecord(_Order):
    """Slurm did not take a job: a set-up that failed."""

    kind: Literal["refused"] = "refused"
    version: Literal[1] = 1
    sbatch: dict[str, str | bool]
    reason: str


class StartedRecord(_Order):
    """A job runs. One that Slurm puts back into the queue starts again."""

    kind: Literal["started"] = "started"
    job: str
    node: str


class CheckedRecord(_Model):
    """The device is the one that was expected: the command begins."""

    kind: Literal["checked"] = "checked"
    time: str
    environment: Environment


class SetupFailedRecord(_Model):
    """The job ended before the command began."""

    kind: Literal["setup_failed"] = "setup_failed"
    time: str
    reason: str


class FinishedRecord(_Model):
    """The command ended, by itself or because it was stopped."""

    kind: Literal["finished"] = "finished"
    time: str
    exit_status: int | None
    """None where a signal ended it, or where this job stopped it."""
    signal: str | None
    stopped: str | None
    """Why this job stopped it; None if it did not."""


class EndedRecord(_Order):
    """How a job ended, from Slurm's word and its own; all that is needed to find what it left."""

    kind: Literal["ended"] = "ended"
    version: Literal[1] = 1
    job: str
    outcome: Outcome
    reason: str
    state: str | None
    """Slurm's; None where it has forgotten the job."""
    exit_code: str | None
    """Slurm's: exit status and signal."""
    exit_status: int | None
    """The command's."""
    node: str | None
    submitted: str | None
    started: str | None
    ended: str | None
    logs: list[str]
    """Relative to the folder."""
    measured: int
    """Records of measurements with this job's id in the evidence file."""
    environment: Environment | None
    """What the job found where it ran: device, driver, versions, commit."""


Record = (
    SubmittedRecord
    | RefusedRecord
    | StartedRecord
    | CheckedRecord
    | SetupFailedRecord
    | FinishedRecord
    | EndedRecord
)
_adapter: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def now() -> str:
    """UTC, ISO 8601, to a second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def append(path: Path, record: Record) -> None:
    """Add one line, on the disk when this returns: the job may be killed at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(record.model_dump_json() + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> tuple[list[Record], list[str]]:
    """The records of a file, none if there is no such file, and what is wrong with other lines."""
    records: list[Record] = []
    problems = []
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return [], []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_adapter.validate_json(line))
        except ValidationError as error:
            problems.append(f"{path.name}, line {number}: {why_invalid(error)}")
    return records, problems
