"""`pageahead profile`: each arm of a cell in a process of its own, a table, a trace, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from rich.console import Console

from pageahead.experiment import bench, evidence, runner
from pageahead.experiment.cells import Cell
from pageahead.experiment.evidence import Environment, FailedRecord
from pageahead.experiment.messages import ProfileRequest
from pageahead.experiment.planning import plan_cell
from pageahead.experiment.profile import cupti, nsys, picture, table, trace
from pageahead.experiment.profile.analysis import problems
from pageahead.experiment.profile.collector import ProfileError
from pageahead.experiment.profile.records import ProfileRecord
from pageahead.experiment.protocol import Protocol

__all__ = ["Options", "run"]


@dataclass(frozen=True)
class Options:
    """What to profile, and what to make of it.

    Attributes:
        cell: which.
        strategy: profiled beside legacy.
        device: ``cuda``, or ``cpu`` for the CPU device's own operations.
        warmups, steps: of each arm.
        out: evidence is appended here.
        trace: a trace is written here.
        picture: a timeline is drawn here.
        nsys: an export of Nsight Systems to read in the place of running anything.
        mark: run the steps and name them, for Nsight Systems that records them.
        argv: how the command was given, as recorded in the evidence.
    """

    cell: Cell
    strategy: str = "streamed"
    device: Literal["cpu", "cuda"] = "cuda"
    warmups: int = 5
    steps: int = 5
    out: Path | None = None
    trace: Path | None = None
    picture: Path | None = None
    nsys: Path | None = None
    mark: bool = False
    argv: list[str] = field(default_factory=list)


def run(options: Options, output: Console, log: Console) -> bool:
    """Profile, print the table to `output` and progress to `log`, write what was asked for.

    Returns:
        Whether both arms were profiled and their figures add up.

    Raises:
        ProfileError: nothing can be recorded here; says what is missing and what to do.
        runner.WorkerError: the device cannot be used at all.
        OSError: a file cannot be written.
    """
    if options.picture is not None:
        picture.check(options.picture)
    profiles, failures = _read(options) if options.nsys is not None else _measure(options, log)
    for failure in failures:
        output.print(f"failed: {failure}", highlight=False, markup=False, soft_wrap=True)
    if options.mark:
        if not failures:
            output.print("steps are marked; export what was recorded, and read it with --nsys")
        return not failures
    found = [problem for record in profiles for problem in problems(record)]
    if profiles:
        output.print(table.results(profiles))
        for note in table.notes(profiles):
            output.print(note, highlight=False, markup=False)
        for problem in found:
            output.print(f"not to be relied on: {problem}", style="bold red", markup=False)
        if options.trace is not None:
            trace.write(options.trace, profiles)
            log.print(f"wrote {options.trace}", markup=False)
        if options.picture is not None:
            picture.draw(profiles, options.picture)
            log.print(f"wrote {options.picture}", markup=False)
    return bool(profiles) and not failures and not found


def _measure(options: Options, log: Console) -> tuple[list[ProfileRecord], list[str]]:
    """The profiles of both arms, and why there is none of an arm."""
    plan = plan_cell(options.cell, [options.strategy], options.device)
    if plan.left_out:
        raise ProfileError(f"{options.cell.name}: {'; '.join(plan.left_out.values())}")
    records = bench.collect(
        lambda environment: bench.Plan(left_out=[], requests=_requests(options, environment)),
        device=options.device,
        argv=options.argv,
        # Marked steps are no evidence: nothing was recorded of them here.
        out=None if options.mark else options.out,
        log=log,
        check=lambda environment: _check(options),
    )
    failures = [
        f"{record.cell}, {', '.join(record.strategies)}: {record.reason}"
        for record in records
        if isinstance(record, FailedRecord)
    ]
    return [record for record in records if isinstance(record, ProfileRecord)], failures


def _requests(options: Options, environment: Environment) -> Sequence[ProfileRequest]:
    return [
        ProfileRequest(
            run=environment.run,
            cell=options.cell.name,
            strategies=[arm],
            device=environment.device,
            protocol=Protocol(options.warmups, 1, options.steps),
            mark=options.mark,
        )
        for arm in ("legacy", options.strategy)
    ]


def _check(options: Options) -> None:
    """Before minutes are spent on arms that all would fail."""
    if options.device == "cuda" and not options.mark:
        try:
            cupti.load()
        except ProfileError as error:
            raise runner.WorkerError(str(error)) from None


def _read(options: Options) -> tuple[list[ProfileRecord], list[str]]:
    """The arms of the cell in an export: legacy and the strategy, as far as they are in it."""
    assert options.nsys is not None
    records = nsys.read(options.nsys, datetime.now(timezone.utc).isoformat())
    arms = ("legacy", options.strategy)
    found = [record for record in records if record.cell == options.cell.name]
    chosen = [record for arm in arms for record in found if record.arm == arm]
    if not chosen:
        there = ", ".join(f"{record.cell} {record.arm}" for record in records)
        raise ProfileError(
            f"{options.nsys.name} has neither legacy nor {options.strategy} of "
            f"{options.cell.name}; it has: {there}"
        )
    if options.out is not None:
        for record in chosen:
            evidence.append(options.out, record)
    missing = [arm for arm in arms if arm not in {record.arm for record in chosen}]
    return chosen, [f"{options.cell.name}, {arm}: not in the export" for arm in missing]
