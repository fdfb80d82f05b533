"""The folder of a set of jobs: what lies where in it, and what it says about each job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pageahead.experiment.slurm import records
from pageahead.experiment.slurm.records import (
    CheckedRecord,
    EndedRecord,
    FinishedRecord,
    Record,
    RefusedRecord,
    SetupFailedRecord,
    StartedRecord,
    SubmittedRecord,
)

__all__ = ["COMMANDS", "Folder", "Job", "Order"]

#: The commands that a job may run, and the end of their evidence's name. Those whose evidence is
#: a ``.jsonl`` append to ``--out FILE``; the others print it.
COMMANDS = {"bench": ".jsonl", "verify": ".jsonl", "profile": ".jsonl", "doctor": ".json"}


@dataclass(frozen=True)
class Order:
    """What one job is to do.

    Attributes:
        folder: seen by all nodes, absolute.
        kind: the kind of device, by which evidence is named.
        expected: what the device's name must contain.
        command: the words after `pageahead`; the place for evidence is not among them.
    """

    folder: Path
    kind: str
    expected: str
    command: tuple[str, ...]

    @property
    def evidence(self) -> str:
        """Name of the file in the folder."""
        name = self.command[0]
        return f"{self.kind}-{name}{COMMANDS[name]}"

    @property
    def appends(self) -> bool:
        """Whether the command appends to evidence that is there; the others make it anew."""
        return self.evidence.endswith(".jsonl")

    @property
    def device(self) -> Literal["auto", "cpu", "cuda"]:
        """What the command's own ``--device`` says."""
        for place, word in enumerate(self.command):
            name, equals, value = word.partition("=")
            if name == "--device":
                given = value if equals else "".join(self.command[place + 1 : place + 2])
                return "cpu" if given == "cpu" else "cuda" if given == "cuda" else "auto"
        return "auto"


@dataclass
class Job:
    """Everything that the folder says about one job, the newest of each kind.

    Attributes:
        id: Slurm's; None for one that Slurm did not take.
        about: the record that says what was asked for.
        submitted_at: UTC, where it was `pageahead` that submitted it.
        source_sha256: of the package that submitted it.
        started, checked, setup_failed, finished: from its journal, since it last started.
        ended: how it ended, once that was collected.
        refused: why Slurm did not take it.
    """

    id: str | None
    about: SubmittedRecord | StartedRecord | RefusedRecord
    submitted_at: str | None = None
    source_sha256: str | None = None
    started: StartedRecord | None = None
    checked: CheckedRecord | None = None
    setup_failed: SetupFailedRecord | None = None
    finished: FinishedRecord | None = None
    ended: EndedRecord | None = None
    refused: RefusedRecord | None = None

    @property
    def over(self) -> bool:
        """Whether its end is known for good. One that was lost may be found again."""
        return self.refused is not None or (self.ended is not None and self.ended.outcome != "lost")

    def does(self, order: Order) -> bool:
        """Whether it was to do just that."""
        return self.about.evidence == order.evidence and self.about.command == list(order.command)


@dataclass(frozen=True)
class Folder:
    """Where jobs leave what they leave."""

    path: Path

    @property
    def jobs(self) -> Path:
        """What was submitted, and how it ended. Written by the commands, not by the jobs."""
        return self.path / "jobs.jsonl"

    @property
    def logs(self) -> Path:
        """Scripts, logs and journals, by job."""
        return self.path / "logs"

    def journal(self, job: str) -> Path:
        """Written by the job alone."""
        return self.logs / f"{job}_journal.jsonl"

    def log_files(self, job: str) -> list[str]:
        """Standard output and error, those that there are; relative to the folder."""
        # The names that submitit gives them.
        names = (f"{job}_0_log.out", f"{job}_0_log.err")
        return [f"logs/{name}" for name in names if (self.logs / name).exists()]

    def read(self) -> tuple[list[Job], list[str]]:
        """The jobs, in the order in which they came, and what is wrong with lines of the files."""
        found, problems = records.read(self.jobs)
        jobs: dict[str, Job] = {}
        for record in found:
            if isinstance(record, RefusedRecord):
                # No id; it stands at its place in the order.
                jobs[f"refused {len(jobs)}"] = Job(None, record, record.time, refused=record)
            elif isinstance(record, SubmittedRecord):
                jobs[record.job] = Job(
                    record.job, record, record.time, source_sha256=record.source_sha256
                )
        journals = sorted(self.logs.glob("*_journal.jsonl"), key=lambda path: path.stat().st_mtime)
        for path in journals:
            entries, wrong = records.read(path)
            problems += wrong
            name = path.name.removesuffix("_journal.jsonl")
            _tell(jobs, name, entries)
        # Last: jobs of the shell scripts are known from their journals only.
        for record in found:
            if isinstance(record, EndedRecord) and record.job in jobs:
                jobs[record.job].ended = record
        return list(jobs.values()), problems


def _tell(jobs: dict[str, Job], name: str, entries: Sequence[Record]) -> None:
    for entry in entries:
        if isinstance(entry, StartedRecord):
            if name not in jobs:
                jobs[name] = Job(name, entry)
            job = jobs[name]
            job.about = entry
            job.started, job.checked, job.setup_failed, job.finished = entry, None, None, None
        elif name not in jobs:
            continue
        elif isinstance(entry, CheckedRecord):
            jobs[name].checked = entry
        elif isinstance(entry, SetupFailedRecord):
            jobs[name].setup_failed = entry
        elif isinstance(entry, FinishedRecord):
            jobs[name].finished = entry
