"""`pageahead bench`: every cell in a process of its own, one progress bar, one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pageahead.experiment import evidence, messages, runner, table
from pageahead.experiment.cells import PEAK_ROLES, PRESETS, SOURCE, Cell, Preset
from pageahead.experiment.evidence import (
    CellRecord,
    Environment,
    FailedRecord,
    LeftOutRecord,
    Record,
    SetupFailedRecord,
    TrainingRecord,
)
from pageahead.experiment.gate import reading
from pageahead.experiment.planning import CellPlan, plan_cell
from pageahead.experiment.protocol import Protocol
from pageahead.experiment.resume import Done

__all__ = [
    "DEFAULT_STRATEGIES",
    "Options",
    "Plan",
    "collect",
    "good",
    "known",
    "run",
    "show",
    "show_cells",
]

DEFAULT_STRATEGIES = SOURCE.strategies


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        preset: where the protocol comes from, and the cells if not chosen otherwise.
        cells: those of the preset's that are to be measured.
        strategies: measured against legacy.
        device: ``auto`` is a GPU if there is one.
        out: evidence is appended here; what it already has is not measured again.
        argv: how the command was given, as recorded in the evidence.
        oversubscribe: measure cells that take more device memory than there is, too.
        expect: what the device's name has to contain.
        allow_dirty: measure for the gate although the package differs from its commit.
    """

    preset: Preset
    cells: Sequence[Cell]
    strategies: Sequence[str] = DEFAULT_STRATEGIES
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path | None = None
    argv: list[str] = field(default_factory=list)
    oversubscribe: bool = False
    expect: str | None = None
    allow_dirty: bool = False


def run(options: Options, output: Console, log: Console) -> bool:
    """Measure, print the table to `output` and progress to `log`.

    Returns:
        Whether every cell was measured and every candidate equal to legacy, bit for bit.

    Raises:
        runner.WorkerError: the device cannot be used at all, or is not the one that was expected,
            or the package is not as committed; nothing was measured.
    """
    before = known(options.out, log)
    records = collect(
        lambda environment: _plan(options, environment, Done(before, environment)),
        device=options.device,
        argv=options.argv,
        out=options.out,
        log=log,
        check=lambda environment: _check(options, environment),
        interrupted=lambda so_far: show(so_far, table.results, table.notes, output),
    )
    show(records, table.results, table.notes, output)
    return good(records)


def show(
    records: Sequence[Record],
    results: Callable[[Sequence[Record]], Table],
    notes: Callable[[Sequence[Record]], Sequence[str]],
    output: Console,
) -> None:
    """Print the table and what a reader of it has to know."""
    output.print(results(records))
    for note in notes(records):
        output.print(note, highlight=False, markup=False)


@dataclass(frozen=True)
class Plan:
    """What one run does.

    Attributes:
        left_out: what it does without, and why.
        requests: what the workers are asked for, in order.
        done: what the evidence file already has of it.
    """

    left_out: Sequence[LeftOutRecord]
    requests: Sequence[messages.MeasureRequest]
    done: Sequence[Record] = ()


def collect(
    plan: Callable[[Environment], Plan],
    *,
    device: Literal["auto", "cpu", "cuda"],
    argv: list[str],
    out: Path | None,
    log: Console,
    check: Callable[[Environment], None] = lambda environment: None,
    interrupted: Callable[[Sequence[Record]], None] | None = None,
) -> list[Record]:
    """Look at the machine and measure what `plan` makes of it; each record is kept at once.

    Args:
        plan: what to do on this machine.
        device, argv, out: as in `Options`. Where everything is done already, nothing is appended.
        log: where progress goes.
        check: raises `runner.WorkerError` if this machine or package is not what was asked for.
        interrupted: for a run that can go on later: called with what there is, if any, after
            Ctrl-C or when evidence cannot be written.

    Returns:
        The records of this run, and those that it found done.

    Raises:
        runner.WorkerError: the device cannot be used at all, or `check` raised; nothing was
            measured, and the evidence says so.
        OSError: evidence cannot be written.
    """
    run_id = datetime.now(timezone.utc).isoformat()
    try:
        environment = _probe(run_id, device, argv, log)
        check(environment)
    except runner.WorkerError as error:
        if out is not None:
            evidence.append(out, SetupFailedRecord(run=run_id, argv=argv, reason=str(error)))
        raise
    planned = plan(environment)
    about: list[Record] = [environment, *planned.left_out]
    made: list[Record] = []
    if planned.done:
        log.print(f"{len(planned.done)} measurements are in {out} already", markup=False)
        if not planned.requests:
            log.print("nothing is left to measure; nothing was appended", markup=False)
            return [*about, *planned.done]
    if out is not None:
        for record in about:
            evidence.append(out, record)
    finished = 0
    try:
        with _Bar(log, sum(request.steps for request in planned.requests)) as bar:
            for request in planned.requests:
                bar.begin(request)
                for record in _measure(request, bar):
                    made.append(record)
                    if out is not None:
                        evidence.append(out, record)
                finished += 1
    except (KeyboardInterrupt, OSError) as error:
        if isinstance(error, KeyboardInterrupt):
            log.print(_interrupted(planned, finished, out, interrupted is not None), markup=False)
        if interrupted is not None and (made or planned.done):
            interrupted([*about, *made, *planned.done])
        raise
    if out is not None:
        log.print(f"{len(about) + len(made)} records appended to {out}", markup=False)
    return [*about, *made, *planned.done]


def good(records: Sequence[Record]) -> bool:
    """Whether every cell was measured and everything compared was equal."""
    return all(_good(record) for record in records)


def show_cells() -> Table:
    """The cells of every preset, as a table."""
    headers = ("preset", "cell", "role", "parameters", "state on a GPU", "on the CPU")
    shown = Table(*headers, box=SIMPLE_HEAD)
    for preset in PRESETS.values():
        for cell in preset.cells:
            shown.add_row(
                preset.name,
                cell.name,
                cell.role,
                str(len(cell.layout.shapes)),
                table.amount(cell.state_bytes("cuda")),
                table.amount(cell.state_bytes("cpu")),
            )
    return shown


class _Bar:
    """One progress bar over all cells; where it cannot be drawn, a line for each cell."""

    def __init__(self, log: Console, steps: int) -> None:
        self._log = log
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            console=log,
            disable=not log.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=steps)
        self._cell = ""
        self._before = 0
        self._within = 0

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._pass_cell()
        self._progress.stop()

    def begin(self, request: messages.MeasureRequest) -> None:
        self._pass_cell()
        self._cell, self._within = request.cell, request.steps
        self._log.print(f"{request.cell}: {request.baseline}, {', '.join(request.strategies)}")

    def advance(self, progress: messages.Progress) -> None:
        self._progress.update(
            self._task,
            description=f"{self._cell}: {progress.phase}",
            completed=self._before + min(progress.steps, self._within),
        )

    def _pass_cell(self) -> None:
        """Count the cell so far as done, also when it failed half way."""
        self._before += self._within
        self._within = 0
        self._progress.update(self._task, completed=self._before)


def known(out: Path | None, log: Console) -> list[reading.Record]:
    """What is in an evidence file; what is no record there is said and left where it is.

    It may have records of `pageahead verify`, so that one file is all that the gate asks for.
    """
    if out is None or not out.exists():
        return []
    records, problems = reading.read_one(out)
    for problem in problems:
        log.print(f"not a record, and left alone: {problem}", markup=False, highlight=False)
    return records


def _interrupted(plan: Plan, finished: int, out: Path | None, goes_on: bool) -> str:
    """How far this run and those before it came, and how to go on."""
    before = len(plan.done)
    if not finished and not before:
        said = "interrupted before the first measurement was made"
        return f"{said}; the same command goes on, in {out}" if goes_on and out else said
    said = f"interrupted after {before + finished} of {before + len(plan.requests)} measurements"
    said += f" ({before} of them of an earlier run)" if before else ""
    if out is not None:
        said += f", which are in {out}"
        said += "; the same command goes on from there" if goes_on else ""
    return said


def _check(options: Options, environment: Environment) -> None:
    name = environment.gpu.name if environment.gpu is not None else "CPU"
    if options.expect is not None and options.expect.lower() not in name.lower():
        raise runner.WorkerError(f"--expect {options.expect}: the device here is {name}")
    if options.preset.evidence and environment.dirty and not options.allow_dirty:
        raise runner.WorkerError(
            f"the package's files differ from commit {environment.commit}, so that nobody could "
            f"repeat what is measured; commit them, or pass --allow-dirty to measure all the same"
        )


def _probe(
    run_id: str, device: Literal["auto", "cpu", "cuda"], argv: list[str], log: Console
) -> Environment:
    request = messages.ProbeRequest(run=run_id, argv=argv, device=device)
    with log.status("looking at the machine"):
        answer = runner.ask(request, lambda progress: None)
    assert isinstance(answer, Environment)
    return answer


def _plan(options: Options, environment: Environment, done: Done) -> Plan:
    """Every cell, and the peak memory of its arms, but for what is done."""
    left_out: list[LeftOutRecord] = []
    wanted: list[messages.CellRequest | messages.PeakRequest] = []
    gpu_bytes = environment.gpu.memory_bytes if environment.gpu is not None else None
    for cell in options.cells:
        plan = plan_cell(
            cell,
            options.strategies,
            environment.device,
            gpu_bytes=gpu_bytes,
            oversubscribe=options.oversubscribe,
        )
        left_out += [
            LeftOutRecord(run=environment.run, cell=cell.name, strategy=strategy, reason=reason)
            for strategy, reason in plan.left_out.items()
        ]
        peaks = options.preset.evidence and environment.device == "cuda"
        wanted += _requests(
            cell, plan, environment, options.preset.protocol, peaks and cell.role in PEAK_ROLES
        )
    answers = [(request, done.answer(request)) for request in wanted]
    return Plan(
        left_out=[one for one in left_out if not done.said(one)],
        requests=[request for request, answer in answers if answer is None],
        done=[answer for _, answer in answers if answer is not None],
    )


def _requests(
    cell: Cell, plan: CellPlan, environment: Environment, protocol: Protocol, peaks: bool
) -> Iterator[messages.CellRequest | messages.PeakRequest]:
    """Its processes and, with `peaks`, one for each arm's memory."""
    for strategies in plan.processes:
        yield messages.CellRequest(
            run=environment.run,
            cell=cell.name,
            strategies=strategies,
            device=environment.device,
            protocol=protocol,
        )
    measured = [strategy for strategies in plan.processes for strategy in strategies]
    for arm in ["legacy", *measured] if measured and peaks else []:
        yield messages.PeakRequest(
            run=environment.run,
            cell=cell.name,
            strategies=[arm],
            device=environment.device,
            protocol=protocol,
        )


def _measure(request: messages.MeasureRequest, bar: _Bar) -> Iterator[Record]:
    """The worker's answer; or why there is none; or both, if it did not end well after it."""
    try:
        answer = runner.ask(request, bar.advance)
    except runner.WorkerError as error:
        if error.answer is not None:
            yield error.answer
        yield FailedRecord(
            run=request.run,
            cell=request.cell,
            strategies=request.strategies,
            reason=str(error),
            what=_what(request),
        )
    else:
        yield answer


def _what(request: messages.MeasureRequest) -> Literal["steps", "peak memory", "profile"]:
    if isinstance(request, messages.PeakRequest):
        return "peak memory"
    return "profile" if isinstance(request, messages.ProfileRequest) else "steps"


def _good(record: Record) -> bool:
    if isinstance(record, CellRecord):
        return all(candidate.comparison.equal for candidate in record.candidates)
    if isinstance(record, TrainingRecord):
        return all(
            arm.comparison is None or arm.comparison.equal
            for group in record.groups
            for arm in group.arms
        )
    return not isinstance(record, FailedRecord)
