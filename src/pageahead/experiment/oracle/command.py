"""`pageahead verify`: choose cells, check them in worker processes, make failures small, report."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pageahead.experiment.cells import DeviceType
from pageahead.experiment.environment import describe
from pageahead.experiment.identity import identify
from pageahead.experiment.oracle import pool, records, report
from pageahead.experiment.oracle.case import CaseError, parse_case
from pageahead.experiment.oracle.matrix import Matrix, exclusion, full, selection
from pageahead.experiment.oracle.messages import CheckRequest, Request, ShrinkRequest
from pageahead.experiment.oracle.records import (
    CellRecord,
    ExcludedRecord,
    FailureRecord,
    Record,
)

__all__ = ["Options", "choose", "device_type", "run", "show_cells"]

SHRUNK = 3  # failing cells made small; one mistake usually fails many
MOST_GPU_WORKERS = 12  # cells keep the host busy, not the GPU; each worker needs a context there


@dataclass(frozen=True)
class Options:
    """What to check.

    Attributes:
        device: ``auto`` is a GPU if there is one.
        full: the whole product, and bits compared after every step.
        pattern: only cells whose name contains or matches it.
        cases: instead of the matrix, these, in this process.
        out: evidence is appended here.
        jobs: worker processes; 0 checks in this process; None chooses by device and CPUs.
        argv: how the command was given, as recorded in the evidence.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    full: bool = False
    pattern: str | None = None
    cases: Sequence[str] = ()
    out: Path | None = None
    jobs: int | None = None
    argv: list[str] = field(default_factory=list)


def choose(options: Options, device: DeviceType) -> Matrix:
    """The cells that are asked for.

    Raises:
        CaseError: one of ``options.cases`` is no case, or cannot be compared on `device`.
        UnknownCellError: no cell matches the pattern.
    """
    if not options.cases:
        return (full if options.full else selection)(device).matching(options.pattern)
    cases = [parse_case(text) for text in options.cases]
    for case in cases:
        reason = exclusion(case, device)
        if reason is not None:
            raise CaseError(f"{case} cannot be compared: {reason}")
    return Matrix(list(dict.fromkeys(cases)))


def device_type(wanted: Literal["auto", "cpu", "cuda"]) -> DeviceType:
    """The device that `run` would use. Raises `IdentityError` where there is none of that kind."""
    return identify(wanted).type


def show_cells(matrix: Matrix, output: Console) -> None:
    """Print the name of every cell, one a line, and how many there are."""
    for case in matrix.cases:
        output.print(str(case), markup=False, highlight=False, soft_wrap=True)
    for reason, count in matrix.excluded.items():
        output.print(
            f"# cannot be compared ({count:,} cells of the whole product): {reason}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    output.print(f"# {len(matrix.cases):,} cells", markup=False, highlight=False)


def run(options: Options, output: Console, log: Console) -> bool:
    """Check cells, print the table to `output` and progress to `log`.

    Returns:
        Whether every cell was equal to its reference.

    Raises:
        IdentityError: the device cannot be used at all; nothing was checked.
        CaseError, UnknownCellError: see `choose`.
    """
    identity = identify(options.device)
    matrix = choose(options, identity.type)
    run_id = datetime.now(timezone.utc).isoformat()
    found: list[Record] = []

    def keep(record: Record) -> None:
        found.append(record)
        if options.out is not None:
            records.append(options.out, record)

    keep(describe(identity, run=run_id, argv=options.argv, link=None))
    for reason, count in matrix.excluded.items():
        keep(ExcludedRecord(run=run_id, reason=reason, cells=count))
    jobs = _jobs(options, identity.type)
    checks = [
        CheckRequest(
            run=run_id,
            device=identity.type,
            cases=[str(case) for case in group],
            every_step=options.full,
        )
        for group in matrix.groups()
    ]
    with _Bar(log, len(matrix.cases)) as bar:
        for record in _ask(checks, jobs):
            bar.advance(record)
            keep(record)
    bad = [one for one in found if isinstance(one, CellRecord) and one.result != "equal"]
    for record in _shrink(bad, run_id, identity.type, jobs, log):
        keep(record)
    output.print(report.table(found))
    for note in report.notes(found):
        output.print(note, highlight=False, markup=False, soft_wrap=True)
    return not bad


def _jobs(options: Options, device: DeviceType) -> int:
    if options.jobs is not None:
        return options.jobs
    if options.cases:
        return 0
    cpus = len(os.sched_getaffinity(0))
    if device == "cpu":
        return cpus
    return max(1, min(MOST_GPU_WORKERS * max(1, torch.cuda.device_count()), cpus * 3 // 4))


def _ask(requests: Sequence[Request], jobs: int) -> Iterable[CellRecord | FailureRecord]:
    return pool.ask_all(requests, jobs) if jobs else pool.ask_here(requests)


def _shrink(
    bad: Sequence[CellRecord], run_id: str, device: DeviceType, jobs: int, log: Console
) -> Iterable[CellRecord | FailureRecord]:
    """Make a few failing cells small: of each movement and result at most one."""
    distinct = {(cell.movement, cell.result): cell for cell in reversed(bad)}
    chosen = list(distinct.values())[::-1][:SHRUNK]
    if not chosen:
        return
    requests = [
        ShrinkRequest(run=run_id, device=device, case=cell.case, result=cell.result)
        for cell in chosen
        if cell.result != "equal"
    ]
    with log.status(f"making {len(requests)} of {len(bad)} failing cells small"):
        yield from _ask(requests, jobs)


class _Bar:
    """One progress bar over all cells; where it cannot be drawn, a line for each tenth."""

    def __init__(self, log: Console, cells: int) -> None:
        self._log = log
        self._cells = cells
        self._done = 0
        self._bad = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=log,
            disable=not log.is_terminal,
        )
        self._task = self._progress.add_task("checking", total=cells)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self, record: CellRecord | FailureRecord) -> None:
        before = 10 * self._done // self._cells
        self._done += 1
        if record.result != "equal":
            self._bad += 1
            self._log.print(
                f"{record.result}: {record.case}", markup=False, highlight=False, soft_wrap=True
            )
        said = f"checking, {self._bad} failed" if self._bad else "checking"
        self._progress.update(self._task, completed=self._done, description=said)
        if not self._log.is_terminal and 10 * self._done // self._cells > before:
            self._log.print(f"{self._done:,} of {self._cells:,} cells checked, {self._bad} failed")
