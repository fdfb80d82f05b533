from __future__ import annotations

import pytest

from pageahead.experiment.slurm import states
from pageahead.experiment.slurm.states import SlurmError, State, ask, parse_sacct, parse_scontrol

# As Slurm 22.05 prints them.
SCONTROL = (
    "JobId=2 JobName=pageahead-h200-bench UserId=root(0) GroupId=root(0) MCS_label=N/A "
    "Priority=4294901759 Nice=0 Account=(null) QOS=(null) JobState=FAILED "
    "Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=2:0 RunTime=00:00:13 TimeLimit=02:00:00 TimeMin=N/A "
    "SubmitTime=2026-11-30T01:07:00 EligibleTime=2026-11-30T01:07:00 "
    "StartTime=2026-11-30T01:07:01 EndTime=2026-11-30T01:07:14 Deadline=N/A Partition=all "
    "ReqNodeList=(null) ExcNodeList=(null) NodeList=node1 BatchHost=node1 NumNodes=1\n"
)
WAITING = (
    "JobId=3 JobName=x JobState=PENDING Reason=Resources Dependency=(null) ExitCode=0:0 "
    "SubmitTime=2026-11-30T01:07:00 StartTime=Unknown EndTime=Unknown NodeList= NumNodes=1\n"
)
SACCT = (
    "2|FAILED|2:0|node1|2026-11-30T01:07:00|2026-11-30T01:07:01|2026-11-30T01:07:14|None\n"
    "4|CANCELLED by 1000|0:0|None assigned|2026-11-30T01:07:00|None|2026-11-30T01:08:00|Priority\n"
)


def test_what_scontrol_says() -> None:
    assert parse_scontrol(SCONTROL) == State(
        state="FAILED",
        reason="NonZeroExitCode",
        exit_code="2:0",
        node="node1",
        submitted="2026-11-30T01:07:00+00:00",
        started="2026-11-30T01:07:01+00:00",
        ended="2026-11-30T01:07:14+00:00",
    )
    waiting = parse_scontrol(WAITING)
    assert (waiting.state, waiting.reason, waiting.node) == ("PENDING", "Resources", None)
    assert (waiting.started, waiting.over) == (None, False)


def test_what_sacct_says() -> None:
    found = parse_sacct(SACCT)
    assert found["2"].exit_code == "2:0"
    assert found["4"] == State(
        state="CANCELLED",
        reason="Priority",
        exit_code="0:0",
        submitted="2026-11-30T01:07:00+00:00",
        ended="2026-11-30T01:08:00+00:00",
    )
    assert all(state.over for state in found.values())


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Programs that print something and end with a status, in place of Slurm's."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def make(name: str, out: str = "", err: str = "", status: int = 0) -> None:
        path = tmp_path / name
        path.write_text(
            f"#!/bin/sh\ncat <<'END'\n{out}END\ncat >&2 <<'END'\n{err}\nEND\nexit {status}\n"
        )
        path.chmod(0o755)

    return make


UNKNOWN = "slurm_load_jobs error: Invalid job id specified"


def test_jobs_that_the_controller_forgot_are_in_the_accounting(programs) -> None:
    programs("scontrol", err=UNKNOWN, status=1)
    programs("sacct", out=SACCT)
    assert ask(["2"])["2"].state == "FAILED"


def test_without_accounting_nobody_knows_them(programs) -> None:
    programs("scontrol", err=UNKNOWN, status=1)
    programs("sacct", err="Slurm accounting storage is disabled", status=1)
    assert ask(["2"]) == {}


def test_a_controller_that_does_not_answer_says_nothing_about_jobs(programs) -> None:
    programs("scontrol", err="Unable to contact slurm controller (connect failure)", status=1)
    with pytest.raises(SlurmError, match="Unable to contact"):
        ask(["2"])


def test_where_there_is_no_slurm_this_is_said(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="there is no scontrol here"):
        ask(["2"])
    with pytest.raises(SlurmError, match="there is no scancel here"):
        states.cancel(["2"])
    assert ask([]) == {}
