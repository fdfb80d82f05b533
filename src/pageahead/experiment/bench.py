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
from pageahead.experiment.cells import PRESETS, SOURCE, Cell, Preset
from pageahead.experiment.evidence import (
    CellRecord,
    Environment,
    FailedRecord,
    LeftOutRecord,
    Record,
    TrainingRecord,
)
from pageahead.experiment.planning import plan_cell

__all__ = ["DEFAULT_STRATEGIES", "Options", "collect", "good", "run", "show_cells"]

DEFAULT_STRATEGIES = SOURCE.strategies


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        preset: where the protocol comes from, and the cells if not chosen otherwise.
        cells: those of the preset's that are to be measured.
        strategies: measured against legacy.
        device: ``auto`` is a GPU if there is one.
        out: evidence is appended here.
        argv: how the command was given, as recorded in the evidence.
    """

    preset: Preset
    cells: Sequence[Cell]
    strategies: Sequence[str] = DEFAULT_STRATEGIES
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path | None = None
    argv: list[str] = field(default_factory=list)


def run(options: Options, output: Console, log: Console) -> bool:
    """Measure, print the table to `output` and progress to `log`.

    Returns:
        Whether every cell was measured and every candidate equal to legacy, bit for bit.

    Raises:
        runner.WorkerError: the device cannot be used at all; nothing was measured.
    """
    records = collect(
        lambda environment: _requests(options, environment),
        device=options.device,
        argv=options.argv,
        out=options.out,
        log=log,
    )
    output.print(table.results(records))
    for note in table.notes(records):
        output.print(note, highlight=False, markup=False)
    return good(records)


def collect(
    plan: Callable[
        [Environment], tuple[Sequence[LeftOutRecord], Sequence[messages.MeasureRequest]]
    ],
    *,
    device: Literal["auto", "cpu", "cuda"],
    argv: list[str],
    out: Path | None,
    log: Console,
) -> list[Record]:
    """Look at the machine and measure what `plan` makes of it; each record is kept at once.

    Args:
        plan: what is left out, and what the workers are asked for, in order.
        device, argv, out: as in `Options`.
        log: where progress goes.

    Raises:
        runner.WorkerError: the device cannot be used at all; nothing was measured.
    """
    environment = _probe(device, argv, log)
    left_out, requests = plan(environment)
    records: list[Record] = [environment, *left_out]
    if out is not None:
        for record in records:
            evidence.append(out, record)
    with _Bar(log, sum(request.steps for request in requests)) as bar:
        for request in requests:
            bar.begin(request)
            for record in _measure(request, bar):
                records.append(record)
                if out is not None:
                    evidence.append(out, record)
    if out is not None:
        log.print(f"{len(records)} records appended to {out}", markup=False)
    return records


def good(records: Sequence[Record]) -> bool:
    """Whether every cell was measured and everything compared was equal."""
    return all(_good(record) for record in records)


def show_cells() -> Table:
    """The cells of every preset, as a table."""
    shown = Table("preset", "cell", "parameters", "state on a GPU", "on the CPU", box=SIMPLE_HEAD)
    for preset in PRESETS.values():
        for cell in preset.cells:
            shown.add_row(
                preset.name,
                cell.name,
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


def _probe(device: Literal["auto", "cpu", "cuda"], argv: list[str], log: Console) -> Environment:
    run_id = datetime.now(timezone.utc).isoformat()
    request = messages.ProbeRequest(run=run_id, argv=argv, device=device)
    with log.status("looking at the machine"):
        answer = runner.ask(request, lambda progress: None)
    assert isinstance(answer, Environment)
    return answer


def _requests(
    options: Options, environment: Environment
) -> tuple[list[LeftOutRecord], list[messages.CellRequest]]:
    """What is left out, and what the workers are asked for, in order."""
    left_out, requests = [], []
    for cell in options.cells:
        plan = plan_cell(cell, options.strategies, environment.device)
        left_out += [
            LeftOutRecord(run=environment.run, cell=cell.name, strategy=strategy, reason=reason)
            for strategy, reason in plan.left_out.items()
        ]
        requests += [
            messages.CellRequest(
                run=environment.run,
                cell=cell.name,
                strategies=strategies,
                device=environment.device,
                protocol=options.preset.protocol,
            )
            for strategies in plan.processes
        ]
    return left_out, requests


def _measure(request: messages.MeasureRequest, bar: _Bar) -> Iterator[Record]:
    """The worker's answer; or why there is none; or both, if it did not end well after it."""
    try:
        answer = runner.ask(request, bar.advance)
    except runner.WorkerError as error:
        if error.answer is not None:
            yield error.answer
        yield FailedRecord(
            run=request.run, cell=request.cell, strategies=request.strategies, reason=str(error)
        )
    else:
        yield answer


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
