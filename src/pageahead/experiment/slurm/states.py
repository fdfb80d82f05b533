"""What Slurm says about jobs, with accounting (``sacct``) and without it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ENDED", "SlurmError", "State", "ask", "cancel", "parse_sacct", "parse_scontrol"]

#: States that no job leaves. All others are of jobs that wait, run or are about to end.
ENDED = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    )
)
ANSWER_SECONDS = 60.0
SACCT_FIELDS = ("JobIDRaw", "State", "ExitCode", "NodeList", "Submit", "Start", "End", "Reason")


class SlurmError(RuntimeError):
    """Slurm cannot be asked now; the message says why. Nothing is known about its jobs."""


@dataclass(frozen=True)
class State:
    """Slurm's word about one job. Times are UTC, ISO 8601.

    Attributes:
        state: by its name, such as ``PENDING``.
        reason: why it waits or failed, where Slurm says.
        exit_code: exit status and signal.
        node: where it runs or ran.
    """

    state: str
    reason: str | None = None
    exit_code: str | None = None
    node: str | None = None
    submitted: str | None = None
    started: str | None = None
    ended: str | None = None

    @property
    def over(self) -> bool:
        return self.state in ENDED


def ask(jobs: Sequence[str]) -> dict[str, State]:
    """What Slurm says about `jobs`; those that it does not know any more are left out.

    Its controller knows jobs until some minutes after their end; the accounting, where there is
    one, for years.

    Raises:
        SlurmError: it cannot be asked.
    """
    found: dict[str, State] = {}
    for job in jobs:
        done = _run("scontrol", "show", "job", "--oneliner", job)
        if done.returncode == 0:
            found[job] = parse_scontrol(done.stdout)
        elif "invalid job id" not in done.stderr.lower():
            raise SlurmError(f"scontrol: {done.stderr.strip() or 'no answer'}")
    forgotten = [job for job in jobs if job not in found]
    if forgotten:
        fields = f"--format={','.join(SACCT_FIELDS)}"
        try:
            done = _run("sacct", "-X", "-n", "-P", f"--jobs={','.join(forgotten)}", fields)
        except SlurmError:
            return found
        # Without accounting it fails; then nobody knows.
        if done.returncode == 0:
            found.update(parse_sacct(done.stdout))
    return found


def cancel(jobs: Sequence[str]) -> None:
    """Take jobs out of the queue, or stop them.

    Raises:
        SlurmError: Slurm does not do it.
    """
    done = _run("scancel", *jobs)
    if done.returncode != 0:
        raise SlurmError(f"scancel: {done.stderr.strip()}")


def parse_scontrol(line: str) -> State:
    """One line of ``scontrol show job --oneliner``."""

    def value(name: str) -> str | None:
        found = re.search(rf"(?:^|\s){name}=(\S+)", line)
        return found.group(1) if found else None

    return State(
        state=value("JobState") or "UNKNOWN",
        reason=_known(value("Reason")),
        exit_code=value("ExitCode"),
        node=_known(value("NodeList")),
        submitted=_time(value("SubmitTime")),
        started=_time(value("StartTime")),
        ended=_time(value("EndTime")),
    )


def parse_sacct(text: str) -> dict[str, State]:
    """The lines that `ask` wants of ``sacct``."""
    found = {}
    for line in text.splitlines():
        job, state, exit_code, node, submitted, started, ended, reason = line.split("|", 7)
        found[job] = State(
            state=(state.split() or ["UNKNOWN"])[0],  # "CANCELLED by 1000"
            reason=_known(reason),
            exit_code=exit_code,
            node=_known(node),
            submitted=_time(submitted),
            started=_time(started),
            ended=_time(ended),
        )
    return found


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    # In UTC and in the format that is the default, whatever the user's is.
    environment = {**os.environ, "TZ": "UTC", "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=ANSWER_SECONDS
        )
    except FileNotFoundError:
        raise SlurmError(f"there is no {command[0]} here; is this a host of the cluster?") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {ANSWER_SECONDS:g} s") from None


def _known(value: str | None) -> str | None:
    return None if value in (None, "", "None", "(null)", "None assigned", "Unknown") else value


def _time(value: str | None) -> str | None:
    return f"{value}+00:00" if value and re.match(r"\d{4}-", value) else None
