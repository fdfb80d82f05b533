"""Jobs as a table, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pageahead.experiment.slurm.folder import Folder, Job
from pageahead.experiment.slurm.states import State

__all__ = ["good", "newest", "notes", "show"]

STYLES = {"done": "green", "failed": "bold red", "setup failed": "bold red", "lost": "bold red"}


def show(jobs: Sequence[Job], said: Mapping[str, State]) -> Table:
    """One row a job, in the order in which they were submitted."""
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for header in ("kind", "command", "job", "is", "node", "took", "more"):
        table.add_column(header, overflow="fold")
    for job in jobs:
        state = said.get(job.id or "")
        what, node, took, more = _row(job, state)
        table.add_row(
            job.about.device_kind,
            job.about.command[0],
            job.id or "-",
            Text(what, STYLES.get(what, "")),
            node or "-",
            took,
            Text(more),
        )
    return table


def notes(folder: Folder, jobs: Sequence[Job]) -> Iterator[str]:
    """What the user can do now."""
    last = newest(jobs)
    bad = [job for job in last if _bad(job)]
    for job in bad:
        logs = job.ended.logs if job.ended is not None else []
        if logs:
            yield f"logs of job {job.id}: {', '.join(logs)}"
    if bad:
        yield (
            "Once the reason is gone, submit the same again: what was measured already is not "
            "measured again."
        )
    if good(jobs):
        for kind in sorted({job.about.device_kind for job in last}):
            files = [
                f"{folder.path.name}/{job.about.evidence}"
                for job in last
                if job.about.device_kind == kind and job.about.evidence.endswith(".jsonl")
            ]
            if files:
                yield f"Next: pageahead gate {' '.join(sorted(files))}"


def good(jobs: Sequence[Job]) -> bool:
    """Whether the last job of each evidence file did all of its work."""
    return all(job.ended is not None and job.ended.outcome == "done" for job in newest(jobs))


def newest(jobs: Sequence[Job]) -> list[Job]:
    """Of each evidence file the last job."""
    return list({job.about.evidence: job for job in jobs}.values())


def _bad(job: Job) -> bool:
    return job.refused is not None or (job.ended is not None and job.ended.outcome != "done")


def _row(job: Job, state: State | None) -> tuple[str, str | None, str, str]:
    if job.refused is not None:
        return "setup failed", None, "", f"Slurm did not take it: {job.refused.reason}"
    if job.ended is not None:
        one = job.ended
        return one.outcome.replace("_", " "), one.node, _took(one.started, one.ended), one.reason
    if state is None:
        return "unknown", job.started.node if job.started is not None else None, "", ""
    why = "" if state.reason is None or state.node else f"waits: {state.reason}"
    return state.state.lower().replace("_", " "), state.node, "", why


def _took(started: str | None, ended: str | None) -> str:
    if started is None or ended is None:
        return ""
    return str(datetime.fromisoformat(ended) - datetime.fromisoformat(started)).split(".")[0]
