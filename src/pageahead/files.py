"""The files that commands write: none that is read, and none twice."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import typer

__all__ = ["check_apart"]


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


def _same(one: Path, other: Path) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(one, other)  # two names of one file
    except OSError:  # one of them is not there yet
        return False
