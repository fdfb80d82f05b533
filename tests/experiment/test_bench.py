"""Inside the command: real workers where they are what is tested, played ones elsewhere."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from pageahead.experiment import bench, runner
from pageahead.experiment.cells import QUICK, SOURCE, Preset, select
from pageahead.experiment.evidence import (
    CellRecord,
    Environment,
    FailedRecord,
    LeftOutRecord,
)
from pageahead.experiment.protocol import Protocol
from tests.experiment.support import cell, environment, read

BRIEF = Preset("quick", "", QUICK.cells, Protocol(warmups=1, rounds=1, repetitions=2))


def consoles() -> tuple[Console, Console]:
    return Console(file=io.StringIO(), width=100), Console(file=io.StringIO(), width=100)


@pytest.fixture
def answers(monkeypatch):
    """Play the workers: a list of what they answer, in turn, and of what they were asked."""
    given: list = []
    asked: list = []

    def ask(request, on_progress):
        asked.append(request)
        answer = given.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(runner, "ask", ask)
    return given, asked


def test_a_real_run_on_the_cpu(tmp_path) -> None:
    out = tmp_path / "run.jsonl"
    output, log = consoles()
    options = bench.Options(
        BRIEF, select(BRIEF, "lion8"), device="cpu", out=out, argv=["bench", "--out", "run.jsonl"]
    )
    assert bench.run(options, output, log)
    described, measured = read(out)
    assert isinstance(described, Environment)
    assert isinstance(measured, CellRecord)
    assert described.run == measured.run
    assert described.argv == ["bench", "--out", "run.jsonl"]
    assert measured.protocol == BRIEF.protocol
    assert output.file.getvalue().count("yes") == 2
    assert "lion8/8x1Mi: legacy, streamed, lookahead" in log.file.getvalue()
    assert str(tmp_path) not in out.read_text()


def test_a_worker_that_dies_fails_its_cell_and_no_other(tmp_path, answers) -> None:
    out = tmp_path / "run.jsonl"
    given, _ = answers
    given += [environment(), runner.WorkerError("killed by SIGKILL"), cell()]
    output, log = consoles()
    options = bench.Options(BRIEF, BRIEF.cells[:2], out=out)
    assert not bench.run(options, output, log)
    _, failed, measured = read(out)
    assert isinstance(failed, FailedRecord)
    assert failed.cell == "adamw32/8x1Mi"
    assert measured == cell()
    printed = output.file.getvalue()
    assert "failed" in printed
    assert "killed by SIGKILL" in printed
    assert "yes" in printed


def test_an_answer_before_a_bad_end_is_kept_beside_the_failure(answers) -> None:
    given, _ = answers
    given += [environment(), runner.WorkerError("ended badly", cell())]
    output, log = consoles()
    assert not bench.run(bench.Options(BRIEF, BRIEF.cells[:1]), output, log)
    assert "yes" in output.file.getvalue()
    assert "ended badly" in output.file.getvalue()


def test_a_difference_is_not_good(answers) -> None:
    given, _ = answers
    given += [environment(), cell(differences=1)]
    output, log = consoles()
    assert not bench.run(bench.Options(BRIEF, BRIEF.cells[:1]), output, log)


def test_what_is_left_out_is_recorded_and_the_rest_asked_for(tmp_path, answers) -> None:
    out = tmp_path / "run.jsonl"
    given, asked = answers
    given += [environment(gpu_bytes=16 << 30), cell()]
    output, log = consoles()
    options = bench.Options(SOURCE, select(SOURCE, "llama"), device="cuda", out=out)
    assert bench.run(options, output, log)
    assert [request.kind for request in asked] == ["probe", "cell"]
    assert asked[1].strategies == ["streamed"]
    assert asked[1].device == "cuda"
    assert asked[1].protocol == SOURCE.protocol
    left_out = read(out)[1]
    assert isinstance(left_out, LeftOutRecord)
    assert "lookahead left out" in output.file.getvalue()


def test_a_machine_that_cannot_is_not_measured(answers) -> None:
    given, asked = answers
    given.append(runner.WorkerError("no GPU"))
    with pytest.raises(runner.WorkerError, match="no GPU"):
        bench.run(bench.Options(BRIEF, BRIEF.cells), *consoles())
    assert len(asked) == 1


def test_a_bar_is_drawn_on_a_terminal(answers, monkeypatch) -> None:
    given, _ = answers
    given += [environment(), cell()]
    output, _ = consoles()
    log = Console(file=io.StringIO(), width=100, force_terminal=True)
    bench.run(bench.Options(BRIEF, BRIEF.cells[:1]), output, log)
    assert "100%" in log.file.getvalue()


def test_workers_are_this_pythons() -> None:
    assert runner.WORKER[0] == sys.executable
