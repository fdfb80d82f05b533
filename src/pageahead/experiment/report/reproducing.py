"""How somebody else gets the same evidence: commands, code and versions, as recorded."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from pageahead.experiment.evidence import Environment
from pageahead.experiment.gate.reading import Evidence

__all__ = ["Machine", "Steps", "machines", "steps"]


@dataclass(frozen=True)
class Machine:
    """Runs whose environments are the same but for when, what and how fast the link was.

    Attributes:
        environment: of the first of them.
        runs: when each began.
    """

    environment: Environment
    runs: Sequence[Environment]


@dataclass(frozen=True)
class Steps:
    """Commands that were run with one state of the code.

    Attributes:
        commit: to check out; None where the evidence has none.
        remark: what is known about how the code differed from it.
        source_sha256: what tells whether code is the same.
        versions: what else has to be installed.
        commands: as given, but without folders.
    """

    commit: str | None
    remark: str
    source_sha256: str
    versions: str
    commands: Sequence[str]


def machines(evidence: Evidence) -> list[Machine]:
    """Each environment once."""
    by_machine: dict[str, list[Environment]] = {}
    for one in evidence.environments.values():
        same = one.model_copy(update={"run": "", "argv": [], "link": None})
        by_machine.setdefault(same.model_dump_json(), []).append(one)
    return [Machine(runs[0], runs) for runs in by_machine.values()]


def steps(evidence: Evidence) -> list[Steps]:
    """The commands of every run, by the state of the code."""
    found: dict[tuple[str | None, str, str, str], list[str]] = {}
    for environment in evidence.environments.values():
        key = (
            environment.commit,
            _remark(environment),
            environment.source_sha256,
            _versions(environment),
        )
        found.setdefault(key, []).append(shlex.join(["pageahead", *environment.argv]))
    return [Steps(*key, list(dict.fromkeys(commands))) for key, commands in found.items()]


def _remark(environment: Environment) -> str:
    if environment.commit is None:
        return "the evidence names no commit; the digest tells whether code is the same"
    if environment.dirty is None:
        return "whether the package differed from this commit is not known; the digest tells"
    if environment.dirty:
        return "the package differed from this commit; the digest tells whether code is the same"
    return ""


def _versions(environment: Environment) -> str:
    found = f"Python {environment.python}, torch {environment.torch}"
    return f"{found}, bitsandbytes {environment.bitsandbytes}"
