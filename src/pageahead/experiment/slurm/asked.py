"""What is asked of Slurm: kinds of devices, and options of ``sbatch``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Kind", "OptionError", "minutes", "parse_kind", "sbatch_options"]

SHORT = {
    "-A": "account",
    "-C": "constraint",
    "-G": "gpus",
    "-N": "nodes",
    "-c": "cpus-per-task",
    "-p": "partition",
    "-q": "qos",
    "-t": "time",
    "-w": "nodelist",
    "-x": "exclude",
}
"""The short options of sbatch that say where a job runs."""

TAKEN = frozenset(
    ("array", "error", "job-name", "ntasks", "ntasks-per-node", "open-mode", "output", "wrap")
)
"""What a job of one process with logs in the folder has fixed already."""


class OptionError(ValueError):
    """What was asked for cannot be understood; the message says what would be."""


@dataclass(frozen=True)
class Kind:
    """Devices of one kind, and how to get one.

    Attributes:
        name: of the evidence files.
        expected: what the device's name must contain; upper and lower case are the same.
        sbatch: options by their long names; True for one without a value.
    """

    name: str
    expected: str
    sbatch: Mapping[str, str | bool] = field(default_factory=dict)


def parse_kind(text: str) -> Kind:
    """Read ``NAME[=EXPECTED][:OPTIONS]``, as in ``h200:--gres=gpu:h200:1 --partition=hopper``.

    Raises:
        OptionError: it is something else.
    """
    head, _, options = text.partition(":")
    name, _, expected = head.partition("=")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII) is None:
        raise OptionError(
            f"{text!r} does not begin with a name of letters, digits, '.', '-' and '_'; "
            f"one that does: h200:--gres=gpu:h200:1"
        )
    return Kind(name, expected.strip() or name, sbatch_options(options))


def sbatch_options(text: str) -> dict[str, str | bool]:
    """Read options as they are given to sbatch, separated by blanks; values may be quoted.

    Raises:
        OptionError: there is something else among them, or one that cannot be chosen.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise OptionError(f"{text!r}: {error}") from None
    found: dict[str, str | bool] = {}
    while words:
        name, value = _option(words)
        if name in TAKEN:
            raise OptionError(
                f"--{name} is set by `pageahead slurm`: a job is one process, and its logs are in "
                f"the folder"
            )
        found[name] = value
    return found


def _option(words: list[str]) -> tuple[str, str | bool]:
    """Take one option from the front of `words`."""
    word = words.pop(0)
    short, attached = word[:2], word[2:]
    if word.startswith("--") and len(word) > 2:
        name, equals, value = word[2:].partition("=")
        if equals:
            return name, value
    elif short in SHORT:
        name = SHORT[short]
        if attached:
            return name, attached.removeprefix("=")
    else:
        raise OptionError(f"{word!r} is no option of sbatch; write it as --name=value")
    if words and not words[0].startswith("-"):
        return name, words.pop(0)
    return name, True


def minutes(text: str) -> int:
    """Read a time limit as Slurm does; part of a minute counts as one.

    Raises:
        OptionError: it is none.
    """
    matched = re.fullmatch(
        r"(?:(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+))?(?::(?P<ds>\d+))?"
        r"|(?:(?P<h>\d+):(?=\d+:))?(?P<m>\d+)(?::(?P<s>\d+))?)",
        text,
    )
    if matched is None:
        raise OptionError(
            f"{text!r} is no time limit; Slurm's are: minutes, minutes:seconds, "
            f"hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds"
        )
    parts: Mapping[str, int] = {
        name: int(value or 0) for name, value in matched.groupdict().items()
    }
    hours = 24 * parts["days"] + parts["dh"] + parts["h"]
    seconds = 3600 * hours + 60 * (parts["dm"] + parts["m"]) + parts["ds"] + parts["s"]
    if seconds == 0:
        raise OptionError("a time limit of 0 is none; say how long the job may run")
    return -(-seconds // 60)


def merged(options: Sequence[Mapping[str, str | bool]]) -> dict[str, str | bool]:
    """All of them, the later ones first in rank."""
    return {name: value for one in options for name, value in one.items()}
