"""`pageahead slurm`: its options."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer.core import TyperGroup

from pageahead import terminal
from pageahead.experiment.slurm import collecting, job, states, submitting, table
from pageahead.experiment.slurm.asked import OptionError, merged, parse_kind, sbatch_options
from pageahead.experiment.slurm.folder import COMMANDS, Folder, Job, Order
from pageahead.experiment.slurm.records import RefusedRecord
from pageahead.experiment.slurm.states import SlurmError, State

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help="Run the other commands as Slurm jobs, one for each kind of device.",
)
SETTINGS = {"allow_interspersed_args": False}
"""What comes after the command is the command's."""
FIRST_POLL_SECONDS, LAST_POLL_SECONDS = 1.0, 30.0  # the controller has others to answer, too

FolderArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", file_okay=False, help="As given to submit.")
]
FolderOption = Annotated[
    Path,
    typer.Option(
        "--folder",
        "-f",
        metavar="FOLDER",
        file_okay=False,
        help="Where evidence, logs and jobs.jsonl go; all nodes must see it.",
    ),
]
CommandArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND...", help=f"With its options, but without --out: {', '.join(COMMANDS)}."
    ),
]


@app.command(context_settings=SETTINGS)
def submit(
    context: typer.Context,
    command: CommandArgument,
    folder: FolderOption,
    kind: Annotated[
        list[str],
        typer.Option(
            "--device-kind",
            "-k",
            metavar="NAME[=EXPECTED][:OPTIONS]",
            help="One job is submitted for each. NAME is that of its evidence; the device's name "
            "must contain EXPECTED (default: NAME), or nothing is measured; OPTIONS are sbatch's, "
            "as in 'h200:--gres=gpu:h200:1 --constraint=sxm'. May be repeated.",
        ),
    ],
    partition: Annotated[str | None, typer.Option("--partition", "-p")] = None,
    account: Annotated[str | None, typer.Option("--account", "-A")] = None,
    qos: Annotated[str | None, typer.Option("--qos", "-q")] = None,
    limit: Annotated[
        str, typer.Option("--time", "-t", help="Of each job, as for sbatch.")
    ] = "2:00:00",
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTIONS",
            help="More options of sbatch for all jobs, as in '--mem=64G --exclusive'. May be "
            "repeated. Those of --device-kind go before them.",
        ),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHELL",
            help="A command that each job begins with, as 'module load cuda'. May be repeated.",
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND", help="Starts Python in a job. Default: the Python that runs this."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the scripts; submit and write nothing.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait for the jobs and collect them.")
    ] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="Submit although the same code has done all of it already."),
    ] = False,
) -> None:
    """Submit a command as one job for each kind of device.

    What is submitted again goes on where it was: what the evidence has already is not measured.
    The exit status is 2 if a job could not be submitted; with --wait 1 if one did not do all of
    its work; else 0.
    """
    console = terminal.console()
    where = Folder(folder.absolute())
    _check(context, command)
    common = {"time": limit, "partition": partition, "account": account, "qos": qos}
    given: dict[str, str | bool] = {name: value for name, value in common.items() if value}
    names = [parsed.partition(":")[0].partition("=")[0] for parsed in kind]
    if len(set(names)) < len(names):
        raise typer.BadParameter("one kind is given twice", param_hint="--device-kind")
    try:
        options = merged([given, *map(sbatch_options, sbatch or [])])
        requests = [
            submitting.Request.of(
                parse_kind(one), where, command, options, setup=setup or [], python=python
            )
            for one in kind
        ]
        scripts = [submitting.script(request) for request in requests]
    except OptionError as error:
        raise typer.BadParameter(str(error)) from None
    except submitting.MissingError as error:
        raise _failure(error) from None
    if dry_run:
        for request, script in zip(requests, scripts, strict=True):
            typer.echo(f"# {request.order.kind}: evidence goes to {request.order.evidence}")
            typer.echo(script)
        return
    try:
        wrong = _submit(requests, where, again)
    except (SlurmError, submitting.MissingError) as error:
        raise _failure(error) from None
    if wrong:
        raise typer.Exit(2)
    if wait:
        raise typer.Exit(_wait(where, console))


@app.command()
def status(folder: FolderArgument) -> None:
    """Show the jobs of a folder. Writes nothing.

    The exit status is 2 if there are no jobs, else 0.
    """
    where = Folder(folder.absolute())
    jobs, problems = _jobs(where)
    said: dict[str, State] = {}
    try:
        said = collecting.live(jobs)
    except SlurmError as error:
        typer.echo(f"Slurm cannot be asked: {error}", err=True)
    _show(where, jobs, said, problems, terminal.console())


@app.command()
def collect(
    folder: FolderArgument,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Until every job has ended.")
    ] = False,
) -> None:
    """Record how the jobs of a folder ended, in its jobs.jsonl, and show it.

    The exit status is 0 if the last job of each evidence file did all of its work, 1 if not (also
    while one waits or runs), 2 if Slurm cannot be asked or there are no jobs.
    """
    where = Folder(folder.absolute())
    console = terminal.console()
    _jobs(where)
    if wait:
        raise typer.Exit(_wait(where, console))
    try:
        jobs, said, problems = collecting.collect(where)
    except SlurmError as error:
        raise _failure(error) from None
    _show(where, jobs, said, problems, console)
    raise typer.Exit(0 if table.good(jobs) else 1)


@app.command()
def cancel(
    folder: FolderArgument,
    kind: Annotated[
        list[str] | None,
        typer.Option("--device-kind", "-k", metavar="NAME", help="Only of this kind."),
    ] = None,
) -> None:
    """Cancel the jobs of a folder that wait or run. What they have measured stays.

    The exit status is 2 if Slurm cannot be asked or there are no jobs, else 0.
    """
    jobs, _ = _jobs(Folder(folder.absolute()))
    wanted = [one for one in jobs if not kind or one.about.device_kind in kind]
    try:
        chosen = [job for job, state in collecting.live(wanted).items() if not state.over]
        if chosen:
            states.cancel(chosen)
    except SlurmError as error:
        raise _failure(error) from None
    typer.echo(f"cancelled: {', '.join(chosen) or 'none, all have ended'}")


@app.command("job", hidden=True, context_settings=SETTINGS)
def run_job(
    command: CommandArgument,
    folder: FolderOption,
    kind: Annotated[str, typer.Option("--device-kind", "-k", metavar="NAME[=EXPECTED]")],
) -> None:
    """What runs in a job, for sites that write their sbatch scripts themselves (slurm/*.sh)."""
    try:
        parsed = parse_kind(kind)
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint="--device-kind") from None
    if parsed.sbatch:
        raise typer.BadParameter("sbatch has been called already", param_hint="--device-kind")
    _known(command)
    job.run(Order(folder.absolute(), parsed.name, parsed.expected, tuple(command)))


def _submit(requests: Sequence[submitting.Request], folder: Folder, again: bool) -> bool:
    """Returns whether Slurm did not get a job that it should have got, or did not take it."""
    jobs, _ = folder.read()
    said = collecting.live(jobs)
    wrong = False
    for request in requests:
        order = request.order
        before = submitting.in_the_way(order, jobs, said)
        done = None if again else submitting.done_already(order, jobs)
        if before is not None:
            wrong = True
            typer.echo(
                f"{order.kind}: not submitted, because job {before.id} has not ended and writes to "
                f"{order.evidence}, too; wait for it, or `pageahead slurm cancel`",
                err=True,
            )
        elif done is not None:
            typer.echo(
                f"{order.kind}: job {done.id} did all of this, with the same code; --again to "
                f"submit all the same"
            )
        else:
            record = submitting.submit(request)
            if isinstance(record, RefusedRecord):
                wrong = True
                typer.echo(f"{order.kind}: Slurm did not take it: {record.reason}", err=True)
            else:
                typer.echo(f"{order.kind}: job {record.job}, evidence {order.evidence}")
    return wrong


def _jobs(folder: Folder) -> tuple[list[Job], list[str]]:
    """As `Folder.read`; ends the command with 2 where nothing was ever submitted."""
    jobs, problems = folder.read()
    if not jobs:
        for one in problems:
            typer.echo(f"not a record: {one}", err=True)
        what = "no jobs in it" if folder.path.exists() else "no such folder"
        raise _failure(f"{folder.path}: {what}; name the --folder that submit was given")
    return jobs, problems


def _wait(folder: Folder, console: Console) -> int:
    """Until every job has ended; returns the exit status."""
    seen: dict[str, str] = {}
    pause = FIRST_POLL_SECONDS
    while True:
        try:
            jobs, said, problems = collecting.collect(folder)
        except SlurmError as error:
            # A controller that restarts is no reason to give up on jobs that go on meanwhile.
            typer.echo(f"Slurm cannot be asked now: {error}", err=True)
        else:
            for one, state in said.items():
                if seen.get(one) != state.state:
                    typer.echo(f"job {one}: {state.state.lower()}", err=True)
                seen[one] = state.state
            if not said:
                _show(folder, jobs, said, problems, console)
                return 0 if table.good(jobs) else 1
        time.sleep(pause)
        pause = min(1.5 * pause, LAST_POLL_SECONDS)


def _show(
    folder: Folder,
    jobs: Sequence[Job],
    said: dict[str, State],
    problems: Sequence[str],
    console: Console,
) -> None:
    console.print(table.show(jobs, said))
    for note in [*table.notes(folder, jobs), *(f"not a record: {one}" for one in problems)]:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _check(context: typer.Context, words: list[str]) -> None:
    """What cannot be understood would be found out only when the job runs, hours later.

    Fails as the command itself would.
    """
    name, *arguments = words
    _known(words)
    if any(word.partition("=")[0] == "--out" for word in arguments):
        raise typer.BadParameter("evidence goes to the folder", param_hint="--out")
    group = context.find_root().command
    assert isinstance(group, TyperGroup)
    group.commands[name].make_context(name, arguments, parent=context)


def _known(words: list[str]) -> None:
    if words[0] not in COMMANDS:
        raise typer.BadParameter(
            f"a job can run {', '.join(COMMANDS)}, not {words[0]!r}", param_hint="COMMAND"
        )


def _failure(error: object) -> typer.Exit:
    typer.echo(f"Error: {error}", err=True)
    return typer.Exit(2)
