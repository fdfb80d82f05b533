"""The command line: ``pageahead`` and ``python -m pageahead``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pageahead import launch, terminal
from pageahead._version import __version__
from pageahead.experiment import bench as experiment
from pageahead.experiment.cells import PRESETS, UnknownCellError, select
from pageahead.experiment.identity import IdentityError
from pageahead.experiment.oracle import command as oracle
from pageahead.experiment.oracle.case import CaseError
from pageahead.experiment.profile.cli import profile
from pageahead.experiment.report.command import report
from pageahead.experiment.runner import WorkerError
from pageahead.experiment.slurm import command as slurm
from pageahead.experiment.training import cells as training_cells
from pageahead.experiment.training import command as training
from pageahead.experiment.training.gpt import shape_for
from pageahead.files import check_apart, check_regular

__all__ = ["app", "main"]

app = typer.Typer(
    help="Paged bitsandbytes optimizers whose state is streamed from page-locked host memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

app.command(context_settings=launch.SETTINGS)(launch.run)
app.command()(profile)
app.add_typer(slurm.app, name="slurm")


class PresetName(str, Enum):
    quick = "quick"
    source = "source"
    skew = "skew"
    resident = "resident"
    matrix = "matrix"
    training = "training"


class StrategyName(str, Enum):
    streamed = "streamed"
    lookahead = "lookahead"
    sequential = "sequential"
    resident = "resident"


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
            help="Measured against bitsandbytes; may be repeated. Default: streamed and lookahead; "
            "preset resident: resident and streamed."
        ),
    ] = None,
    parameters: Annotated[
        int | None,
        typer.Option(
            "--params",
            metavar="N",
            min=1,
            help="Preset training only: about how many parameters the model has. Default: 1.34 "
            "billion on a GPU, 2 million on the CPU.",
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
            help="Append every raw timing and a description of the machine to this file. What it "
            "has already from the same code on the same device is not measured again.",
        ),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Measure only if the GPU's name contains this."),
    ] = None,
    oversubscribe: Annotated[
        bool,
        typer.Option(
            "--oversubscribe",
            help="Measure cells that take more GPU memory than is left, too. That can hang a GPU.",
        ),
    ] = False,
    allow_dirty: Annotated[
        bool,
        typer.Option(
            "--allow-dirty",
            help="Preset matrix: measure although the package differs from its commit.",
        ),
    ] = False,
    list_cells: Annotated[
        bool, typer.Option("--list", help="Show the cells of every preset and exit.")
    ] = False,
) -> None:
    """Measure our optimizers against bitsandbytes' own, and compare their results bit for bit.

    The exit status is 0 if every cell was measured and equal, 1 if not, 2 if nothing was measured.
    """
    output = terminal.console()
    if list_cells:
        output.print(experiment.show_cells())
        output.print(training.show_cells())
        return
    argv = ["bench", "--preset", preset.value, "--device", device.value]
    argv += ["--select", cells] if cells is not None else []
    try:
        if preset is PresetName.training:
            _check_training(strategy, parameters)
            _only_for_cells(expect=expect, oversubscribe=oversubscribe, allow_dirty=allow_dirty)
            argv += ["--params", str(parameters)] if parameters is not None else []
            wanted = training.Options(
                cells=training_cells.select(cells),
                parameters=parameters,
                device=device.value,
                out=out,
                argv=argv + _out_argv(out),
            )
            _ready(out)
            good = training.run(wanted, output, Console(stderr=True))
        else:
            if parameters is not None:
                raise typer.BadParameter("only for --preset training", param_hint="--params")
            strategies = [one.value for one in strategy or []]
            chosen_preset = PRESETS[preset.value]
            strategies = strategies or list(chosen_preset.strategies)
            argv += [word for one in strategies for word in ("--strategy", one)]
            argv += ["--expect", expect] if expect is not None else []
            argv += ["--oversubscribe"] if oversubscribe else []
            argv += ["--allow-dirty"] if allow_dirty else []
            options = experiment.Options(
                preset=chosen_preset,
                cells=select(chosen_preset, cells),
                strategies=strategies,
                device=device.value,
                out=out,
                argv=argv + _out_argv(out),
                oversubscribe=oversubscribe,
                expect=expect,
                allow_dirty=allow_dirty,
            )
            _ready(out)
            good = experiment.run(options, output, Console(stderr=True))
    except UnknownCellError as error:
        raise typer.BadParameter(str(error), param_hint="--select") from None
    except WorkerError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:  # a disk that is full: what was written before is kept
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(0 if good else 1)


@app.command()
def plot_training(
    source: Annotated[
        Path, typer.Argument(metavar="EVIDENCE.jsonl", dir_okay=False, help="From bench --out.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FILE", dir_okay=False, help="A picture: .svg, .png or .pdf."
        ),
    ],
) -> None:
    """Draw what `bench --preset training` measured: time of an iteration by HBM used for state.

    Of each cell the last that is of the code, model and device of the last run.
    """
    check_apart({"--out": out}, [source])
    # matplotlib takes a second to import, which no other command should wait for.
    from pageahead.experiment.training import plot

    try:
        plot.draw(source, out, Console(stderr=True))
    except (OSError, plot.NothingToDrawError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"wrote {out}")


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
            oracle.show_cells(
                oracle.choose(options, oracle.device_type(device.value)), terminal.console()
            )
            return
        if out is not None:
            _check_writable(out)
        good = oracle.run(options, terminal.console(), Console(stderr=True))
    except UnknownCellError as error:
        raise typer.BadParameter(str(error), param_hint="--select") from None
    except CaseError as error:
        raise typer.BadParameter(str(error), param_hint="--case") from None
    except IdentityError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:  # a disk that is full: what was written before is kept
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(0 if good else 1)


@app.command()
def gate(
    evidence: Annotated[
        list[Path],
        typer.Argument(
            metavar="EVIDENCE...",
            exists=True,
            dir_okay=False,
            help="From bench --preset matrix, verify and profile --out; .jsonl or .jsonl.gz.",
        ),
    ],
    strategy: Annotated[
        StrategyName | None,
        typer.Option(help="The candidate. Needed where the evidence has several."),
    ] = None,
) -> None:
    """Decide from evidence whether a strategy pays: GO, NO-GO or INCOMPLETE, and why.

    The exit status is 0 for GO, 1 for NO-GO, 2 for INCOMPLETE or evidence that cannot be judged.
    """
    from pageahead.experiment.gate import command

    try:
        verdict = command.run(evidence, strategy and strategy.value, terminal.console())
    except (OSError, command.EvidenceError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(command.EXIT[verdict])


app.command()(report)


@app.command()
def doctor(
    device: Annotated[
        DeviceName, typer.Option(help="auto takes a CUDA GPU if there is one.")
    ] = DeviceName.auto,
    parameters: Annotated[
        int, typer.Option("--params", metavar="N", min=1, help="Of the model to advise on.")
    ] = 1_000_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Say what this machine can do, how fast, and which settings follow from that.

    The exit status is 1 if something that is needed does not work.
    """
    from pageahead.doctor import command

    argv = ["doctor", "--device", device.value, "--params", str(parameters)]
    try:
        found = command.diagnose(device.value, parameters, argv)
    except IdentityError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(found.model_dump_json(indent=1))
    else:
        command.show(found, terminal.console())
    raise typer.Exit(0 if found.healthy else 1)


def main() -> None:
    """Entry point of every command but `run`."""
    app(prog_name="pageahead")


def _out_argv(out: Path | None) -> list[str]:
    """As recorded in evidence, which has no machine's folders."""
    return ["--out", out.name] if out is not None else []


def _check_training(strategies: list[StrategyName] | None, parameters: int | None) -> None:
    if strategies:
        raise typer.BadParameter(
            "not for --preset training, which measures `streamed` after and during backward",
            param_hint="--strategy",
        )
    try:
        shape_for(parameters or training_cells.PARAMETERS)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--params") from None


def _only_for_cells(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise typer.BadParameter(
                "not for --preset training", param_hint=f"--{name.replace('_', '-')}"
            )


def _ready(out: Path | None) -> None:
    if out is not None:
        _check_writable(out)


def _check_writable(path: Path) -> None:
    """Hours of measuring must not end in a file that cannot be written, or not be read again."""
    check_regular(path, "--out")
    try:
        path.open("a").close()
    except OSError as error:
        raise typer.BadParameter(
            f"cannot write {path}: {error.strerror}", param_hint="--out"
        ) from None
