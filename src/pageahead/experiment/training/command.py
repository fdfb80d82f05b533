"""`pageahead bench --preset training`: every cell in a process of its own, one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pageahead.experiment import bench
from pageahead.experiment.evidence import Environment
from pageahead.experiment.messages import TrainingRequest
from pageahead.experiment.protocol import Protocol
from pageahead.experiment.resume import Done
from pageahead.experiment.table import amount
from pageahead.experiment.training import cells, table
from pageahead.experiment.training.cells import PROTOCOL, TrainingCell
from pageahead.experiment.training.gpt import shape_for

__all__ = ["Options", "run", "show_cells"]


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        cells: those of the preset's that are to be measured.
        parameters: about how many the model has; None is 1.34 billion on a GPU, 2 million on the
            CPU.
        device: ``auto`` is a GPU if there is one.
        out: evidence is appended here; what it already has is not measured again.
        argv: how the command was given, as recorded in the evidence.
        protocol: how often.
    """

    cells: Sequence[TrainingCell]
    parameters: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Path | None = None
    argv: list[str] = field(default_factory=list)
    protocol: Protocol = PROTOCOL


def run(options: Options, output: Console, log: Console) -> bool:
    """Measure, print the table to `output` and progress to `log`.

    Returns:
        Whether every cell was measured and everything compared was equal, bit for bit.

    Raises:
        WorkerError: the device cannot be used at all; nothing was measured.
    """
    before = bench.known(options.out, log)
    records = bench.collect(
        lambda environment: _plan(options, environment, Done(before, environment)),
        device=options.device,
        argv=options.argv,
        out=options.out,
        log=log,
        interrupted=lambda so_far: bench.show(so_far, table.results, table.notes, output),
    )
    bench.show(records, table.results, table.notes, output)
    return bench.good(records)


def show_cells() -> Table:
    """The cells of the preset, as a table."""
    shown = Table("preset", "cell", "parameters", "state on a GPU", "on the CPU", box=SIMPLE_HEAD)
    sizes = [shape_for(n).parameters for n in (cells.PARAMETERS, cells.CPU_PARAMETERS)]
    for cell in cells.CELLS:
        state = [amount(2 * size * cell.bits // 8) for size in sizes]
        shown.add_row(cells.PRESET, cell.name, f"GPT, {sizes[0] / 1e9:.2f} billion", *state)
    return shown


def _plan(options: Options, environment: Environment, done: Done) -> bench.Plan:
    """One for each cell. What does not fit in memory is for the worker to say."""
    default = cells.PARAMETERS if environment.device == "cuda" else cells.CPU_PARAMETERS
    requests = [
        TrainingRequest(
            run=environment.run,
            cell=cell.name,
            strategies=[arm.name for arm in cells.arms_of(cell)],
            device=environment.device,
            protocol=options.protocol,
            parameters=options.parameters or default,
        )
        for cell in options.cells
    ]
    answers = [(request, done.answer(request)) for request in requests]
    return bench.Plan(
        left_out=[],
        requests=[request for request, answer in answers if answer is None],
        done=[answer for _, answer in answers if answer is not None],
    )
