"""A run that goes on where another was stopped."""

from __future__ import annotations

import errno
import io
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from pageahead.experiment import bench, evidence, runner
from pageahead.experiment.cells import MATRIX, QUICK, Preset, select
from pageahead.experiment.evidence import (
    CellRecord,
    Environment,
    FailedRecord,
    LeftOutRecord,
    PeakRecord,
    SetupFailedRecord,
    append,
)
from pageahead.experiment.gate.reading import read_one
from pageahead.experiment.gate.thresholds import THRESHOLDS
from pageahead.experiment.messages import CellRequest, PeakRequest, TrainingRequest
from pageahead.experiment.protocol import Protocol
from pageahead.experiment.resume import Done
from pageahead.experiment.training.cells import PROTOCOL as TRAINING_PROTOCOL
from pageahead.experiment.training.cells import arms_of, cell_named
from tests.experiment.gate.support import verified
from tests.experiment.support import RUN, cell, environment, peak, read
from tests.experiment.training.support import record as training

PROTOCOL = Protocol(warmups=1, rounds=2, repetitions=2)
TWO = Preset(
    "quick", "", QUICK.cells[:2], PROTOCOL
)  # adamw32/8x1Mi, which cell() is of, and adamw8


def request(**fields) -> CellRequest:
    asked = {"cell": "adamw32/8x1Mi", "strategies": ["streamed"], "protocol": PROTOCOL}
    return CellRequest(run="now", device="cuda", **{**asked, **fields})


def test_the_same_cell_strategies_protocol_and_code_are_done() -> None:
    assert Done([environment(), cell()], environment(run="now")).answer(request()) == cell()


@pytest.mark.parametrize(
    "other",
    [
        {"cell": "adamw8/8x1Mi"},
        {"strategies": ["lookahead"]},
        {"strategies": ["streamed", "lookahead"]},
        {"protocol": Protocol(1, 2, 3)},
    ],
)
def test_another_cell_strategy_or_protocol_is_not(other) -> None:
    assert Done([environment(), cell()], environment()).answer(request(**other)) is None


@pytest.mark.parametrize(
    "other",
    [
        {"source_sha256": "1" * 64},
        {"torch": "2.12"},
        {"bitsandbytes": "0.50.3"},
        {"gpu_bytes": 1 << 36},
        {"library": "libbitsandbytes_cuda128.so"},
        {"device": "cpu"},
    ],
)
def test_other_code_or_another_machine_is_not(other) -> None:
    assert Done([environment(), cell()], environment(**other)).answer(request()) is None


def test_what_nobody_knows_the_code_of_is_not_done() -> None:
    assert Done([cell()], environment()).answer(request()) is None


def test_a_failure_is_not_done() -> None:
    failed = FailedRecord(run=RUN, cell="adamw32/8x1Mi", strategies=["streamed"], reason="died")
    assert Done([environment(), failed], environment()).answer(request()) is None


def test_training_is_done_by_cell_model_and_protocol() -> None:
    done = Done([environment(), training("adamw8/4096"), cell()], environment())

    def asked(**fields: object) -> TrainingRequest:
        wanted = {
            "cell": "adamw8/4096",
            "strategies": [arm.name for arm in arms_of(cell_named("adamw8/4096"))],
            "protocol": TRAINING_PROTOCOL,
            "parameters": 1_340_000_000,
            **fields,
        }
        return TrainingRequest(run="now", device="cuda", **wanted)

    assert done.answer(asked()) == training("adamw8/4096")
    assert done.answer(asked(strategies=["during-0"])) is not None
    assert done.answer(asked(strategies=["torch"])) is None
    assert done.answer(asked(cell="adamw32/4096")) is None
    assert done.answer(asked(parameters=30_000_000)) is None
    assert done.answer(asked(protocol=PROTOCOL)) is None


def peak_of(arm: str) -> PeakRequest:
    protocol = Protocol(warmups=10, rounds=7, repetitions=8)
    return PeakRequest(
        run="now", cell="adamw32/8x1Mi", strategies=[arm], device="cuda", protocol=protocol
    )


def test_peaks_are_done_by_arm() -> None:
    done = Done([environment(), peak("adamw32/8x1Mi", "legacy")], environment())
    assert done.answer(peak_of("legacy")) is not None
    assert done.answer(peak_of("streamed")) is None
    assert done.answer(request(strategies=["legacy"])) is None


def test_peaks_that_cannot_be_compared_are_measured_again() -> None:
    beside = THRESHOLDS.taken_before + 1
    legacy, ours = peak("adamw32/8x1Mi", "legacy"), peak("adamw32/8x1Mi", "streamed")
    more = ours.model_copy(update={"driver_before": ours.driver_before + beside})
    other = more.model_copy(update={"arm": "lookahead"})
    later = legacy.model_copy(update={"driver_before": more.driver_before})
    for records, done in [
        ([legacy, ours], True),
        ([legacy, more], False),
        ([legacy, more, later], False),  # the gate compares with what was there beside it
        ([legacy, more, legacy, ours], True),
        ([more], True),
        ([legacy, ours, other, later, other], True),
        ([legacy, ours, other], False),
    ]:
        found = Done([environment(), *records], environment())
        assert (found.answer(peak_of("streamed")) is not None) == done
        if legacy in records:
            assert (found.answer(peak_of("legacy")) is not None) == done


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Run `bench` on played workers: returns good, the requests and what was printed."""
    out = tmp_path / "run.jsonl"

    def run(answers, preset=TWO, **fields):
        asked, given = [], list(answers)

        def ask(request, on_progress):
            asked.append(request)
            answer = given.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer.model_copy(update={"run": request.run})

        monkeypatch.setattr(runner, "ask", ask)
        output, log = (Console(file=io.StringIO(), width=200) for _ in range(2))
        options = bench.Options(
            preset, preset.cells, ["streamed"], device="cuda", out=out, **fields
        )
        try:
            good = bench.run(options, output, log)
        except BaseException as error:
            good = error
        said = output.file.getvalue() + log.file.getvalue()
        return good, [one for one in asked if one.kind != "probe"], said

    run.out = out
    return run


def second() -> CellRecord:
    return cell().model_copy(update={"cell": "adamw8/8x1Mi", "optimizer": "adamw8"})


def test_a_file_may_have_what_verify_found_beside_it(play) -> None:
    play([environment(), cell(), second()])
    append(play.out, verified("lion", 8))
    before = play.out.read_bytes()
    good, asked, said = play([environment()])
    assert (good, asked) == (True, [])
    assert "not a record" not in said
    assert play.out.read_bytes() == before


def test_a_finished_file_says_so_and_stays_as_it_is(play) -> None:
    good, asked, _ = play([environment(), cell(), second()])
    assert (good, len(asked)) == (True, 2)
    before = play.out.read_bytes()
    good, asked, said = play([environment()])
    assert (good, asked) == (True, [])
    assert play.out.read_bytes() == before
    assert "2 measurements are in" in said
    assert "nothing is left to measure" in said
    assert said.count("yes") == 2  # the table, of what was found


def test_what_was_different_stays_different(play) -> None:
    play([environment(), cell(differences=1), second()])
    good, asked, said = play([environment()])
    assert (good, asked) == (False, [])
    assert "NOT EQUAL" in said


def test_a_run_goes_on_where_it_was_interrupted(play) -> None:
    good, _, said = play([environment(), cell(), KeyboardInterrupt()])
    assert isinstance(good, KeyboardInterrupt)
    assert "interrupted after 1 of 2 measurements, which are in" in said
    assert said.count("yes") == 1  # the table so far
    good, asked, said = play([environment(), second()])
    assert good is True
    assert [one.cell for one in asked] == ["adamw8/8x1Mi"]
    assert "1 measurements are in" in said
    assert [type(record) for record in read(play.out)] == [
        Environment,
        CellRecord,
        Environment,
        CellRecord,
    ]


def test_before_the_first_measurement_there_is_no_table(play) -> None:
    good, _, said = play([environment(), KeyboardInterrupt()])
    assert isinstance(good, KeyboardInterrupt)
    assert "interrupted before the first measurement was made; the same command goes on" in said
    assert f"in {play.out}" in said
    assert "ratio" not in said
    good, asked, _ = play([environment(), cell(), second()])
    assert (good, len(asked)) == (True, 2)


def test_an_interrupted_run_counts_what_an_earlier_one_did(play) -> None:
    play([environment(), cell(), KeyboardInterrupt()])
    _, _, said = play([environment(), KeyboardInterrupt()])
    assert "interrupted after 1 of 2 measurements (1 of them of an earlier run), which are" in said
    assert said.count("yes") == 1  # the table, of what was found


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_full_disk_shows_the_table_so_far(play, monkeypatch, room) -> None:
    """Also of the measurement for which there was no room; none where none was made."""

    def full(path, record):
        if len(path.read_bytes().splitlines() if path.exists() else ()) >= room:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        append(path, record)

    monkeypatch.setattr(evidence, "append", full)
    error, _, said = play([environment(), cell(), second()])
    assert isinstance(error, OSError)
    assert error.filename == str(play.out)
    assert said.count("yes") == room


def test_a_corrupt_line_is_named_and_only_its_cell_measured_again(play) -> None:
    play([environment(), cell(), second()])
    lines = play.out.read_text().splitlines()
    lines[1] = lines[1][: len(lines[1]) // 2]
    play.out.write_text("\n".join([*lines, ""]))
    good, asked, said = play([environment(), cell()])
    assert good is True
    assert [one.cell for one in asked] == ["adamw32/8x1Mi"]
    assert "run.jsonl, line 2: Invalid JSON" in said
    assert play.out.read_text().splitlines()[:3] == lines
    assert play([environment()])[1] == []


def test_a_failed_cell_is_tried_again(play) -> None:
    good, _, _ = play([environment(), runner.WorkerError("died"), second()])
    assert good is False
    good, asked, _ = play([environment(), cell()])
    assert good is True
    assert [one.cell for one in asked] == ["adamw32/8x1Mi"]


def test_what_is_left_out_is_recorded_once(play) -> None:
    preset = Preset("matrix", "", (*TWO.cells, *select(MATRIX, "oversubscribed")), PROTOCOL)
    play([environment(), cell(), KeyboardInterrupt()], preset)
    good, _, _ = play([environment(), second()], preset)
    assert good is True
    left_out = [record for record in read(play.out) if isinstance(record, LeftOutRecord)]
    assert [record.reason for record in left_out] == [
        "it can hang a GPU, and is measured only with --oversubscribe"
    ]


KILLED = """
import io, os, signal, sys
from pathlib import Path
from rich.console import Console
from pageahead.experiment import bench, evidence, runner
from tests.experiment import test_resume
append, records = evidence.append, []
def append_and_die(path, record):
    records.append(record)
    if len(records) == 3:  # the environment, a cell, half of the next
        with path.open("a") as file:
            file.write(record.model_dump_json()[:500])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    append(path, record)
evidence.append = append_and_die
answers = [test_resume.environment(), test_resume.cell(), test_resume.second()]
runner.ask = lambda request, progress: answers.pop(0).model_copy(update={"run": request.run})
consoles = [Console(file=io.StringIO()) for _ in range(2)]
options = bench.Options(
    test_resume.TWO, test_resume.TWO.cells, ["streamed"], device="cuda", out=Path(sys.argv[1])
)
bench.run(options, *consoles)
"""


def test_a_run_that_is_killed_while_it_writes_is_finished_by_the_next(play) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(play.out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not play.out.read_bytes().endswith(b"\n")
    good, asked, said = play([environment(), second()])
    assert good is True
    assert [one.cell for one in asked] == ["adamw8/8x1Mi"]
    assert "line 3: Invalid JSON" in said
    records, problems = read_one(play.out)
    assert [record.cell for record in records if isinstance(record, CellRecord)] == [
        "adamw32/8x1Mi",
        "adamw8/8x1Mi",
    ]
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("fields", "there", "said"),
    [
        ({"expect": "B300"}, {}, "--expect B300: the device here is A GPU"),
        ({}, {"dirty": True}, "differ from commit"),
    ],
)
def test_a_failed_set_up_is_recorded_and_nothing_is_measured(play, fields, there, said) -> None:
    preset = Preset("matrix", "", TWO.cells, PROTOCOL, evidence=True)
    error, asked, _ = play([environment(**there)], preset, **fields)
    assert isinstance(error, runner.WorkerError)
    assert said in str(error)
    assert asked == []
    (record,) = read(play.out)
    assert isinstance(record, SetupFailedRecord)
    assert said in record.reason


def test_a_machine_without_the_device_is_a_failed_set_up(play) -> None:
    play([runner.WorkerError("no GPU here")])
    (record,) = read(play.out)
    assert isinstance(record, SetupFailedRecord)
    assert record.reason == "no GPU here"


@pytest.mark.parametrize("there", [{"dirty": True}, {"dirty": None, "commit": None}])
def test_a_changed_package_is_measured_if_allowed_and_an_unknown_one_always(play, there) -> None:
    preset = Preset("matrix", "", TWO.cells[:1], PROTOCOL, evidence=True)
    answers = [
        environment(**there),
        cell(),
        peak("adamw32/8x1Mi", "legacy"),
        peak("adamw32/8x1Mi", "streamed"),
    ]
    good, asked, _ = play(answers, preset, allow_dirty=there["dirty"] is True, expect="a gpu")
    assert good is True
    assert [(one.kind, one.strategies) for one in asked] == [
        ("cell", ["streamed"]),
        ("peak", ["legacy"]),
        ("peak", ["streamed"]),
    ]
    assert sum(isinstance(record, PeakRecord) for record in read(play.out)) == 2


def test_a_failed_peak_says_what_failed(play) -> None:
    preset = Preset("matrix", "", TWO.cells[:1], PROTOCOL, evidence=True)
    died = runner.WorkerError("died")
    good, _, said = play([environment(), cell(), died, died], preset)
    assert good is False
    failures = [record for record in read(play.out) if isinstance(record, FailedRecord)]
    assert [(one.what, one.strategies, one.reason) for one in failures] == [
        ("peak memory", ["legacy"], "died"),
        ("peak memory", ["streamed"], "died"),
    ]
    assert "FAILED adamw32/8x1Mi (streamed): peak memory: died" in said


def test_appending_keeps_what_is_there(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    append(path, environment())
    before = path.read_bytes()
    append(path, cell())
    assert path.read_bytes().startswith(before)
