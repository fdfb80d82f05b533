"""The files that commands write: none that is read, none twice, and none by halves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import typer

__all__ = ["check_apart", "check_regular", "write_whole"]


def check_apart(outputs: Mapping[str, Path | None], inputs: Iterable[Path] = ()) -> None:
    """Refuse outputs that would overwrite an input or one another, before anything is done.

    Args:
        outputs: by their options; None where one was not given.
        inputs: what is read.

    Raises:
        typer.BadParameter: two of them are one file, however they are spelled or linked.
    """
    taken = [("what is read", path) for path in inputs]
    for option, path in outputs.items():
        if path is None:
            continue
        for what, other in taken:
            if _same(path, other):
                raise typer.BadParameter(
                    f"{path} is {what}, too, and one would destroy the other; name another file",
                    param_hint=option,
                )
        taken.append((option, path))


def check_regular(path: Path, option: str) -> None:
    """Refuse a terminal, a pipe, a device or a packed file for evidence, which is read again.

    Raises:
        typer.BadParameter: there is something at `path` that is no regular file, or its name says
            that it is packed.
    """
    if path.suffix == ".gz":
        raise typer.BadParameter(
            f"{path}: lines are appended, which a packed file does not take; leave out .gz, and "
            f"pack it when it is complete",
            param_hint=option,
        )
    if path.exists() and not path.is_file():
        raise typer.BadParameter(
            f"{path} is no regular file, so that what is appended could not be read again; name "
            f"a file, or do without {option}",
            param_hint=option,
        )


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """All of it or nothing: a file that was there stays until the new one is complete.

    Args:
        path: where it is to be.
        write: writes it to the path that it is given, a neighbour.

    Raises:
        OSError: it cannot be written; the message has `path`, as it was given.
    """
    target = Path(os.path.realpath(path))  # a link keeps pointing to it
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no regular file")  # /dev/null, say, must not become one
        write(beside)
        os.replace(beside, target)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            raise OSError(f"cannot write {path}: {error.strerror or error}") from None
        raise


def _same(one: Path, other: Path) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(one, other)  # two names of one file
    except OSError:  # one of them is not there yet
        return False
