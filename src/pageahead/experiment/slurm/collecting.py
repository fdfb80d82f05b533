"""How jobs ended: from Slurm's word, their own, and the evidence that they left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pageahead.experiment.identity import scrub
from pageahead.experiment.slurm import records, states
from pageahead.experiment.slurm.folder import Folder, Job
from pageahead.experiment.slurm.records import EndedRecord, FinishedRecord, Outcome
from pageahead.experiment.slurm.states import State

__all__ = ["collect", "ended", "live"]

MEASURED = frozenset(("cell", "peak", "training", "verify_cell", "profile"))
"""Kinds of records that are what a command is run for."""
SETTLE_SECONDS = 10.0  # for what a job wrote last to arrive over a network's file system
LAST_BYTES = 4000
LAST_LINES = 3


def live(jobs: Sequence[Job]) -> dict[str, State]:
    """What Slurm says about those whose end is not known for good.

    Raises:
        SlurmError: it cannot be asked.
    """
    return states.ask([job.id for job in jobs if job.id is not None and not job.over])


def collect(folder: Folder) -> tuple[list[Job], dict[str, State], list[str]]:
    """Record each job that has ended since the last time.

    Returns:
        All jobs, Slurm's word about those that have not ended, and lines that are no records.

    Raises:
        SlurmError: Slurm cannot be asked; nothing was recorded.
    """
    jobs, problems = folder.read()
    said = live(jobs)
    give_up = time.monotonic() + SETTLE_SECONDS
    while _awaited(jobs, said) and time.monotonic() < give_up:
        time.sleep(0.5)
        jobs, problems = folder.read()
    for job in jobs:
        if job.id is None or job.over:
            continue
        state = said.get(job.id)
        if state is not None and not state.over:
            continue
        found = ended(folder, job, state)
        if job.ended is None or job.ended.outcome != found.outcome:
            records.append(folder.jobs, found)
        job.ended = found
    return jobs, {job: state for job, state in said.items() if not state.over}, problems


def ended(folder: Folder, job: Job, state: State | None) -> EndedRecord:
    """What there is to say about a job that is over; `state` is None where Slurm forgot it."""
    assert job.id is not None
    measured = _measured(folder.path / job.about.evidence, job.id)
    outcome, reason = _outcome(folder, job, state, measured)
    state = state or State("UNKNOWN")
    return EndedRecord(
        time=records.now(),
        device_kind=job.about.device_kind,
        expected=job.about.expected,
        command=job.about.command,
        evidence=job.about.evidence,
        job=job.id,
        outcome=outcome,
        reason=scrub(reason),
        state=state.state,
        exit_code=state.exit_code,
        exit_status=job.finished.exit_status if job.finished else None,
        node=state.node or (job.started.node if job.started else None),
        submitted=state.submitted or job.submitted_at,
        started=state.started or (job.started.time if job.started else None),
        ended=state.ended or (job.finished.time if job.finished else None),
        logs=folder.log_files(job.id),
        measured=measured,
        environment=job.checked.environment if job.checked else None,
    )


def _awaited(jobs: Sequence[Job], said: dict[str, State]) -> bool:
    """Whether some job that ended by itself must have written more than can be seen yet."""
    return any(
        job.finished is None
        and job.setup_failed is None
        and (state.state == "COMPLETED" or (state.state == "FAILED" and job.checked is not None))
        for job in jobs
        if job.id is not None and (state := said.get(job.id)) is not None
    )


def _outcome(folder: Folder, job: Job, state: State | None, measured: int) -> tuple[Outcome, str]:
    """The rules, the first that applies."""
    assert job.id is not None
    left = _left(measured, job.about.evidence)
    finished = job.finished
    if finished is not None and finished.exit_status == 0:
        return "done", left
    name = state.state if state is not None else ""
    if name == "CANCELLED":
        return "cancelled", left
    if name in ("TIMEOUT", "DEADLINE") or (finished is not None and _timed_out(finished)):
        return "timed_out", left
    if job.setup_failed is not None:
        return "setup_failed", job.setup_failed.reason
    last = _last_lines(folder, job.id)
    if finished is None:
        if state is None:
            return "lost", f"Slurm does not know it any more, and it left no word; {left}"
        how = f"Slurm says {name}, exit code {state.exit_code}"
        if job.checked is None:
            return "setup_failed", f"it ended before the command began ({how}){last}"
        return "failed", f"it was killed ({how}); {left}{last}"
    if measured == 0 and finished.exit_status == 2:
        return "setup_failed", f"exit status 2{last}"
    how = finished.signal or finished.stopped or f"exit status {finished.exit_status}"
    return "failed", f"{how}; {left}{last}"


def _timed_out(finished: FinishedRecord) -> bool:
    """submitit's words where it stops a job shortly before Slurm would."""
    return finished.stopped is not None and "timed-out" in finished.stopped


def _left(measured: int, evidence: str) -> str:
    if measured == 0:
        return "it measured nothing new"
    return f"it left {measured} measurement{'s' * (measured > 1)} in {evidence}"


def _measured(evidence: Path, job: str) -> int:
    """How many measurements of the file were made in this job."""
    runs: set[str] = set()
    count = 0
    for record in _objects(evidence):
        environment = record if record.get("kind") == "environment" else record.get("environment")
        if isinstance(environment, dict) and environment.get("slurm_job") == job:
            runs.add(environment["run"])
            count += record is not environment  # a diagnosis, which has its environment in it
        elif record.get("kind") in MEASURED and record.get("run") in runs:
            count += 1
    return count


def _objects(evidence: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines, or of one object. Whatever is none is passed over."""
    if not evidence.exists():
        return
    text = evidence.read_text(encoding="utf-8", errors="replace")
    for one in text.splitlines() if evidence.suffix == ".jsonl" else [text]:
        try:
            found = json.loads(one)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def _last_lines(folder: Folder, job: str) -> str:
    """What a job printed last, from its standard error or else its output."""
    for name in reversed(folder.log_files(job)):
        text = (folder.path / name).read_bytes()[-LAST_BYTES:].decode(errors="replace")
        lines = [line.strip("│╭╰─╮╯ ") for line in text.splitlines()]
        lines = [line for line in lines if line]
        if lines:
            return f"; last output: {' | '.join(lines[-LAST_LINES:])}"
    return ""
