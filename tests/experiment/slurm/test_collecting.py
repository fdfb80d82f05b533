"""How a job ended, from what there is: no Slurm needed."""

from __future__ import annotations

import json

import pytest

from pageahead.experiment import evidence
from pageahead.experiment.slurm import collecting, records, states
from pageahead.experiment.slurm.collecting import collect
from pageahead.experiment.slurm.folder import Folder, Order
from pageahead.experiment.slurm.records import (
    CheckedRecord,
    EndedRecord,
    FinishedRecord,
    RefusedRecord,
    SetupFailedRecord,
    StartedRecord,
    SubmittedRecord,
)
from pageahead.experiment.slurm.states import State
from pageahead.experiment.slurm.table import good
from tests.experiment.support import cell, environment

TIME = "2026-11-30T01:07:00+00:00"
ABOUT = {
    "time": TIME,
    "device_kind": "h200",
    "expected": "h200",
    "command": ["bench"],
    "evidence": "h200-bench.jsonl",
}
SUBMITTED = SubmittedRecord(job="7", sbatch={}, source_sha256="0" * 64, **ABOUT)
STARTED = StartedRecord(job="7", node="node1", **ABOUT)
CHECKED = CheckedRecord(time=TIME, environment=environment())
WRONG = SetupFailedRecord(time=TIME, reason="expected h200")


def finished(status=None, signal=None, stopped=None) -> FinishedRecord:
    return FinishedRecord(time=TIME, exit_status=status, signal=signal, stopped=stopped)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(collecting, "SETTLE_SECONDS", 0.0)
    records.append(Folder(tmp_path).jobs, SUBMITTED)
    return Folder(tmp_path)


@pytest.fixture
def said(monkeypatch):
    """Slurm's word."""
    answers: dict[str, State] = {}
    monkeypatch.setattr(
        states, "ask", lambda jobs: {job: answers[job] for job in jobs if job in answers}
    )
    return answers


def left(folder: Folder, *cells: str) -> None:
    """Evidence of job 7, between some of others."""
    path = folder.path / "h200-bench.jsonl"
    for job, names in (("6", ["earlier"]), ("7", cells), ("8", ["later", "later still"])):
        run = f"run of {job}"
        evidence.append(path, environment(run=run, slurm_job=job))
        for name in names:
            evidence.append(path, cell().model_copy(update={"run": run, "cell": name}))


@pytest.mark.parametrize(
    ("journal", "state", "cells", "outcome", "reason"),
    [
        ([STARTED, CHECKED, finished(0)], "COMPLETED", ["a", "b"], "done", "left 2 measurements"),
        ([STARTED, CHECKED, finished(0)], "COMPLETED", [], "done", "nothing new"),
        ([STARTED, CHECKED, finished(0)], None, [], "done", ""),
        ([STARTED, CHECKED, finished(1)], "FAILED", ["a"], "failed", "exit status 1; it left 1 m"),
        ([STARTED, CHECKED, finished(2)], "FAILED", [], "setup_failed", "exit status 2"),
        ([STARTED, CHECKED, finished(2)], "FAILED", ["a"], "failed", "exit status 2"),
        ([STARTED, WRONG], "FAILED", [], "setup_failed", "expected h200"),
        ([STARTED, WRONG], None, [], "setup_failed", "expected h200"),
        ([STARTED], "FAILED", [], "setup_failed", "ended before the command began (Slurm says FAI"),
        ([], "FAILED", [], "setup_failed", "ended before the command began"),
        ([], "NODE_FAIL", [], "setup_failed", "Slurm says NODE_FAIL, exit code 1:0"),
        ([], "CANCELLED", [], "cancelled", "nothing new"),
        ([STARTED, CHECKED], "CANCELLED", ["a"], "cancelled", "left 1 measurement in h200-bench"),
        ([STARTED, CHECKED, finished(None, "SIGTERM")], "TIMEOUT", ["a"], "timed_out", "left 1"),
        (
            [STARTED, CHECKED, finished(None, "SIGTERM", "Job not requeued because: timed-out")],
            "FAILED",
            ["a"],
            "timed_out",
            "left 1",
        ),
        ([STARTED, CHECKED, finished(None, None, "-1")], "FAILED", ["a"], "failed", "-1; it left"),
        ([STARTED, CHECKED], "OUT_OF_MEMORY", ["a"], "failed", "killed (Slurm says OUT_OF_MEMORY"),
        ([STARTED, CHECKED, finished(None, "SIGKILL")], "FAILED", [], "failed", "SIGKILL"),
        ([STARTED, CHECKED], None, ["a"], "lost", "left no word; it left 1 measurement"),
        # Slurm put it back into the queue: what it said before is of no account.
        ([STARTED, WRONG, STARTED, CHECKED, finished(0)], "COMPLETED", [], "done", ""),
        ([STARTED, CHECKED, finished(0), STARTED], "CANCELLED", [], "cancelled", ""),
    ],
)
def test_how_a_job_ended(folder, said, journal, state, cells, outcome, reason) -> None:
    for record in journal:
        records.append(folder.journal("7"), record)
    left(folder, *cells)
    if state is not None:
        said["7"] = State(state, exit_code="1:0", node="node1", ended=TIME)
    (job,), running, problems = collect(folder)
    assert job.ended.outcome == outcome
    assert reason in job.ended.reason
    assert (job.ended.measured, running, problems) == (len(cells), {}, [])
    assert good([job]) is (outcome == "done")
    before = folder.jobs.read_bytes()
    assert records.read(folder.jobs)[0][-1] == job.ended
    collect(folder)
    assert folder.jobs.read_bytes() == before


def test_a_lost_job_that_is_found_again(folder, said) -> None:
    assert collect(folder)[0][0].ended.outcome == "lost"
    said["7"] = State("RUNNING", node="node1")
    (job,), running, _ = collect(folder)
    assert running == said
    assert not job.over
    said["7"] = State("CANCELLED")
    assert collect(folder)[0][0].ended.outcome == "cancelled"
    kinds = [record.kind for record in records.read(folder.jobs)[0]]
    assert kinds == ["submitted", "ended", "ended"]


def test_a_job_that_runs_has_not_ended(folder, said) -> None:
    said["7"] = State("RUNNING", node="node1")
    (job,), running, _ = collect(folder)
    assert (job.ended, running) == (None, said)
    assert not good([job])


def test_what_a_job_wrote_last_is_waited_for(folder, said, monkeypatch) -> None:
    monkeypatch.setattr(collecting, "SETTLE_SECONDS", 60.0)
    said["7"] = State("COMPLETED")

    def arrives(seconds: float) -> None:
        for record in (STARTED, CHECKED, finished(0)):
            records.append(folder.journal("7"), record)

    monkeypatch.setattr(collecting.time, "sleep", arrives)
    assert collect(folder)[0][0].ended.outcome == "done"


def test_the_last_lines_of_the_log_are_the_reason(folder, said) -> None:
    said["7"] = State("FAILED", exit_code="127:0")
    folder.logs.mkdir()
    (folder.logs / "7_0_log.out").write_text("nothing to see\n")
    (folder.logs / "7_0_log.err").write_text("one\n\n│ python: not found │\n╰────╯\n")
    ended = collect(folder)[0][0].ended
    assert ended.reason.endswith("last output: one | python: not found")
    assert ended.logs == ["logs/7_0_log.out", "logs/7_0_log.err"]


def test_a_job_of_a_script_is_known_by_its_journal(folder, said) -> None:
    for record in (STARTED.model_copy(update={"job": "9"}), CHECKED, finished(0)):
        records.append(folder.journal("9"), record)
    said["7"], said["9"] = State("RUNNING"), State("COMPLETED")
    jobs, _, _ = collect(folder)
    assert [job.id for job in jobs] == ["7", "9"]
    assert jobs[1].ended.outcome == "done"
    assert [job.ended for job in folder.read()[0]] == [None, jobs[1].ended]


def test_a_diagnosis_is_one_measurement(folder, said) -> None:
    found = {"kind": "doctor", "environment": environment(slurm_job="7").model_dump(mode="json")}
    (folder.path / "h200-doctor.json").write_text(json.dumps(found, indent=1))
    about = {**ABOUT, "command": ["doctor"], "evidence": "h200-doctor.json"}
    records.append(folder.journal("7"), StartedRecord(job="7", node="node1", **about))
    records.append(folder.journal("7"), finished(0))
    said["7"] = State("COMPLETED")
    assert collect(folder)[0][0].ended.measured == 1


def test_lines_that_are_no_records_are_named_and_nothing_else_is_lost(folder, said) -> None:
    with folder.jobs.open("a") as file:
        file.write('{"kind":"submit\n')
    records.append(folder.journal("7"), STARTED)
    said["7"] = State("RUNNING")
    jobs, _, problems = collect(folder)
    assert len(jobs) == 1
    (problem,) = problems
    assert "jobs.jsonl, line 2" in problem


def test_a_job_that_slurm_did_not_take_is_a_failed_set_up(folder, said) -> None:
    records.append(folder.jobs, RefusedRecord(sbatch={}, reason="no such partition", **ABOUT))
    said["7"] = State("RUNNING")
    jobs, _, _ = collect(folder)
    assert [job.id for job in jobs] == ["7", None]
    assert (jobs[1].over, good(jobs)) == (True, False)


def test_only_the_last_job_of_an_evidence_file_counts(folder, said) -> None:
    for record in (STARTED, CHECKED, finished(1)):
        records.append(folder.journal("7"), record)
    records.append(folder.jobs, SUBMITTED.model_copy(update={"job": "8"}))
    for record in (STARTED.model_copy(update={"job": "8"}), CHECKED, finished(0)):
        records.append(folder.journal("8"), record)
    said["7"], said["8"] = State("FAILED"), State("COMPLETED")
    jobs, _, _ = collect(folder)
    assert [job.ended.outcome for job in jobs] == ["failed", "done"]
    assert good(jobs)


def test_every_record_is_read_as_it_was_written(tmp_path) -> None:
    path = tmp_path / "jobs.jsonl"
    all_of_them = [SUBMITTED, STARTED, CHECKED, WRONG, finished(0)]
    for record in all_of_them:
        records.append(path, record)
    assert records.read(path) == (all_of_them, [])
    assert EndedRecord.model_fields.keys() > {"job", "node", "state", "exit_code", "logs"}


@pytest.mark.parametrize(
    ("words", "device"),
    [
        (["bench"], "auto"),
        (["bench", "--device", "cpu"], "cpu"),
        (["bench", "--device=cuda", "--select", "x"], "cuda"),
        (["bench", "--device"], "auto"),
    ],
)
def test_the_device_is_the_commands(words, device, tmp_path) -> None:
    order = Order(tmp_path, "h200", "h200", tuple(words))
    assert (order.device, order.evidence, order.appends) == (device, "h200-bench.jsonl", True)
