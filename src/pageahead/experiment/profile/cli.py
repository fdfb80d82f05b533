"""The options of `pageahead profile`."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pageahead import terminal
from pageahead.experiment.cells import UnknownCellError, cell_named
from pageahead.files import check_apart, check_regular

__all__ = ["profile"]


class Candidate(str, Enum):
    streamed = "streamed"
    lookahead = "lookahead"
    sequential = "sequential"


class Where(str, Enum):
    cuda = "cuda"
    cpu = "cpu"


def profile(
    cell: Annotated[
        str, typer.Argument(metavar="CELL", help="By its name; bench --list shows them.")
    ],
    strategy: Annotated[
        Candidate, typer.Option(help="Profiled beside bitsandbytes' own.")
    ] = Candidate.streamed,
    device: Annotated[
        Where,
        typer.Option(
            help="cpu times the operations of the CPU device, and says nothing of a link."
        ),
    ] = Where.cuda,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Profiled, after as many warm-ups.")
    ] = 5,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", dir_okay=False, help="Append evidence to this file."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", dir_okay=False, help="Write a trace for Perfetto or Chrome."
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", dir_okay=False, help="Draw the timeline: .png, .svg, .pdf."
        ),
    ] = None,
    nsys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.sqlite",
            dir_okay=False,
            help="Run nothing: read what Nsight Systems recorded and exported as SQLite.",
        ),
    ] = None,
    mark: Annotated[
        bool,
        typer.Option(
            "--mark",
            help="Only run the steps and name them, under `nsys profile`; then see --nsys.",
        ),
    ] = False,
) -> None:
    """Show what a step of a cell does when: bytes, bandwidth, overlap, faults, synchronizations.

    The exit status is 0 if both arms were profiled and their figures add up, 1 if not, 2 if nothing
    was profiled.
    """
    # matplotlib and PyTorch take seconds to import, which no other command should wait for.
    from pageahead.experiment.profile import command
    from pageahead.experiment.profile.collector import ProfileError
    from pageahead.experiment.runner import WorkerError

    try:
        chosen = cell_named(cell)
    except UnknownCellError as error:
        raise typer.BadParameter(str(error), param_hint="CELL") from None
    if nsys is not None and mark:
        raise typer.BadParameter("--nsys reads what --mark made; not both", param_hint="--mark")
    if mark and any(path is not None for path in (out, trace, picture)):
        raise typer.BadParameter(
            "with it nothing is recorded here, so that nothing can be written", param_hint="--mark"
        )
    check_apart(
        {"--out": out, "--trace": trace, "--picture": picture}, [nsys] if nsys is not None else []
    )
    argv = ["profile", cell, "--strategy", strategy.value, "--device", device.value]
    argv += ["--steps", str(steps)]
    for name, path in (("--out", out), ("--nsys", nsys)):
        argv += [name, path.name] if path is not None else []
    if out is not None:
        check_regular(out, "--out")
    for path in (out, trace, picture):
        _check_writable(path)
    options = command.Options(
        cell=chosen,
        strategy=strategy.value,
        device=device.value,
        warmups=steps,
        steps=steps,
        out=out,
        trace=trace,
        picture=picture,
        nsys=nsys,
        mark=mark,
        argv=argv,
    )
    try:
        good = command.run(options, terminal.console(), Console(stderr=True))
    except (ProfileError, WorkerError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if good else 1)


def _check_writable(path: Path | None) -> None:
    """Before anything is run. What is not there yet is not made, so that no empty file is left."""
    if path is None:
        return
    target = path if path.exists() else path.absolute().parent
    if not os.access(target, os.W_OK):
        raise typer.BadParameter(f"cannot write {path}")
