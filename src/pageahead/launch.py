"""`pageahead run`: a script, unchanged, whose paged bitsandbytes optimizers are ours.

Neither this module nor what it imports imports PyTorch: the script may first set the environment.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Annotated

import typer

from pageahead import installing

__all__ = ["SETTINGS", "Program", "app", "main", "run"]

SETTINGS = {"allow_interspersed_args": False}
"""Of the command: what comes after the script is the script's."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """With a callback, typer keeps `run` a command of its own."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run: a script's path or a module's name, with its arguments."""

    target: str
    is_module: bool
    arguments: Sequence[str]


@app.command(context_settings=SETTINGS)
def run(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A script, or with -m a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Passed on as they are.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name.")] = False,
) -> None:
    """Run a script whose paged bitsandbytes optimizers are to be pageahead's.

    Settings are read from PAGEAHEAD_* variables. The exit status is the script's.

    With torchrun or accelerate launch: torchrun ... -m pageahead run SCRIPT
    """
    program = Program(target, module, arguments or [])
    try:
        installing.check_settings()
    except (ImportError, TypeError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    if context.obj is None:
        start(program)
    else:
        context.obj.append(program)


def main() -> None:
    """``pageahead run``; the script starts outside of the command line's error handling."""
    wanted: list[Program] = []
    try:
        # Not app(...), which leaves typer's hook for uncaught exceptions behind.
        typer.main.get_command(app).main(prog_name="pageahead", obj=wanted)
    except SystemExit:
        if not wanted:
            raise
    start(wanted[0])


def start(program: Program) -> None:
    """Run `program` as ``__main__``, as ``python`` does.

    Raises:
        SystemExit: from the program, or because there is no such program.
    """
    if "bitsandbytes" in sys.modules:
        installing.install()
    else:
        sys.meta_path.insert(0, _InstallAfterImport())
    sys.argv = [program.target, *program.arguments]
    if program.is_module:
        _set_first_path(os.getcwd())
        _check_module(program.target)
        atexit.register(_say_if_nothing, os.getpid())
        runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(program.target):
        typer.echo(f"Error: cannot open {program.target!r}: there is no such file", err=True)
        raise SystemExit(2)
    if pkgutil.get_importer(program.target) is None:
        _set_first_path(os.path.dirname(os.path.realpath(program.target)))
    else:
        _set_first_path(None)  # a folder or an archive: runpy puts it there
    atexit.register(_say_if_nothing, os.getpid())
    # Absolute as Python makes ``__file__``; ``sys.argv[0]`` becomes it, too.
    runpy.run_path(os.path.abspath(program.target), run_name="__main__")


class _InstallAfterImport(MetaPathFinder):
    """Calls `install` when bitsandbytes has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "bitsandbytes":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_install(module: ModuleType) -> None:
                execute(module)
                installing.install()

            loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _say_if_nothing(process: int) -> None:
    if os.getpid() == process and not installing.replaced():
        installing.say("replaced nothing: no paged bitsandbytes optimizer was made")


def _set_first_path(folder: str | None) -> None:
    """Put `folder`, or nothing, where Python put that of `pageahead`, unless it was told not to."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [] if folder is None else [folder]


def _check_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package was found, and what it imports is missing
        found = None
    if found is None:
        typer.echo(f"Error: there is no module named {name!r}", err=True)
        raise SystemExit(1)
