"""The command line: ``pageahead`` and ``python -m pageahead``."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pageahead._version import __version__
from pageahead.experiment import bench as experiment
from pageahead.experiment.cells import PRESETS, UnknownCellError, select
from pageahead.experiment.identity import IdentityError
from pageahead.experiment.oracle import command as oracle
from pageahead.experiment.oracle.case import CaseError
from pageahead.experiment.runner import WorkerError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Paged bitsandbytes optimizers whose state is streamed from page-locked host memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

PIPED_WIDTH = 100  # columns, where output goes to no terminal that has a width of its own


class PresetName(str, Enum):
    quick = "quick"
    source = "source"
    skew = "skew"


class StrategyName(str, Enum):
    streamed = "streamed"
    lookahead = "lookahead"
    sequential = "sequential"


class DeviceName(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pageahead {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options of `pageahead` itself; the commands are below."""


@app.command()
def bench(
    preset: Annotated[
        PresetName, typer.Option(help="Which cells, and how often each is measured.")
    ] = PresetName.quick,
    cells: Annotated[
        str | None,
        typer.Option(
            "--select",
            metavar="PATTERN",
            help="Only cells whose name contains this or matches it as a shell pattern.",
        ),
    ] = None,
    strategy: Annotated[
        list[StrategyName] | None,
        typer.Option(
            help="Measured against bitsandbytes; may be repeated. Default: streamed and lookahead."
        ),
    ] = None,
    device: Annotated[
        DeviceName, typer.Option(help="auto takes a CUDA GPU if there is one.")
    ] = DeviceName.auto,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            dir_okay=False,
            help="Append every raw timing and a description of the machine to this file.",
        ),
    ] = None,
    list_cells: Annotated[
        bool, typer.Option("--list", help="Show the cells of every preset and exit.")
    ] = False,
) -> None:
    """Measure our optimizers against bitsandbytes' own, and compare their results bit for bit.

    The exit status is 0 if every cell was measured and equal, 1 if not, 2 if nothing was measured.
    """
    output = _console()
    if list_cells:
        output.print(experiment.show_cells())
        return
    chosen_preset = PRESETS[preset.value]
    try:
        chosen = select(chosen_preset, cells)
    except UnknownCellError as error:
        raise typer.BadParameter(str(error), param_hint="--select") from None
    if out is not None:
        _check_writable(out)
    strategies = [one.value for one in strategy or []] or list(experiment.DEFAULT_STRATEGIES)
    argv = ["bench", "--preset", preset.value, "--device", device.value]
    argv += ["--select", cells] if cells is not None else []
    argv += [word for one in strategies for word in ("--strategy", one)]
    argv += ["--out", out.name] if out is not None else []
    options = experiment.Options(
        preset=chosen_preset,
        cells=chosen,
        strategies=strategies,
        device=device.value,
        out=out,
        argv=argv,
    )
    try:
        good = experiment.run(options, output, Console(stderr=True))
    except WorkerError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if good else 1)


@app.command()
def verify(
    device: Annotated[
        DeviceName, typer.Option(help="auto takes a CUDA GPU if there is one.")
    ] = DeviceName.auto,
    full: Annotated[
        bool,
        typer.Option("--full", help="The whole product, bits compared after every step."),
    ] = False,
    cells: Annotated[
        str | None,
        typer.Option(
            "--select",
            metavar="PATTERN",
            help="Only cells whose name contains this or matches it as a shell pattern.",
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CELL",
            help="Check this one, by the name that --list or a failure prints; may be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", dir_okay=False, help="Append a record of each cell to this file."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=0, help="Worker processes; 0 is this one. Default: by device and CPUs."),
    ] = None,
    list_cells: Annotated[
        bool, typer.Option("--list", help="Print the names of the cells and exit.")
    ] = False,
) -> None:
    """Compare our optimizers with bitsandbytes' own, bit for bit, however state moves.

    The exit status is 0 if every cell is equal, 1 if not, 2 if nothing was checked.
    """
    argv = ["verify", "--device", device.value, *(["--full"] if full else [])]
    argv += ["--select", cells] if cells is not None else []
    argv += [word for one in case or [] for word in ("--case", one)]
    argv += ["--out", out.name] if out is not None else []
    argv += ["--jobs", str(jobs)] if jobs is not None else []
    options = oracle.Options(
        device=device.value,
        full=full,
        pattern=cells,
        cases=case or [],
        out=out,
        jobs=jobs,
        argv=argv,
    )
    try:
        if list_cells:
            oracle.show_cells(oracle.choose(options, oracle.device_type(device.value)), _console())
            return
        if out is not None:
            _check_writable(out)
        good = oracle.run(options, _console(), Console(stderr=True))
    except UnknownCellError as error:
        raise typer.BadParameter(str(error), param_hint="--select") from None
    except CaseError as error:
        raise typer.BadParameter(str(error), param_hint="--case") from None
    except IdentityError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if good else 1)


def main() -> None:
    """Entry point of the ``pageahead`` command."""
    app(prog_name="pageahead")


def _console() -> Console:
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(width=PIPED_WIDTH)
    return console


def _check_writable(path: Path) -> None:
    """Hours of measuring must not end in a file that cannot be written."""
    try:
        path.open("a").close()
    except OSError as error:
        raise typer.BadParameter(
            f"cannot write {path}: {error.strerror}", param_hint="--out"
        ) from None
