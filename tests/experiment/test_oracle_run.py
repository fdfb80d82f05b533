"""The command, its workers and what it says."""

from __future__ import annotations

import io
import itertools
import sys
import threading
import time
from functools import partial

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from pageahead import cli
from pageahead.experiment.evidence import Environment
from pageahead.experiment.identity import IdentityError
from pageahead.experiment.oracle import command, pool, process, report, worker
from pageahead.experiment.oracle.case import PAGINGS, parse_case
from pageahead.experiment.oracle.check import check_group
from pageahead.experiment.oracle.messages import CheckRequest, ShrinkRequest
from pageahead.experiment.oracle.process import WorkerProcess
from pageahead.experiment.oracle.records import CellRecord, ExcludedRecord, FailureRecord
from tests.experiment.support import read

RUN = "2025-01-01T00:00:00+00:00"
CASES = [f"lion/8/float16/streamed/{size}" for size in (5, 6, 7, 8)]
run = CliRunner().invoke


def request(*cases: str) -> CheckRequest:
    return CheckRequest(run=RUN, device="cpu", cases=list(cases), every_step=False)


def cell(case: str, **changes) -> CellRecord:
    given = {
        "run": RUN,
        "case": case,
        "family": "lion",
        "bits": 8,
        "movement": "streamed",
        "device": "cpu",
        "result": "equal",
        "steps": 5,
    }
    return CellRecord(**{**given, **changes})


#: A worker of a few lines: it answers as it is told by the size of a case's parameter.
PLAYED = """
import json, os, sys, time
channel = os.fdopen(int(sys.argv[1]), "w")
def say(**reply):
    channel.write(json.dumps(reply) + "\\n"); channel.flush()
for line in sys.stdin:
    asked = json.loads(line)
    for case in asked.get("cases", [asked.get("case")]):
        size = case.rpartition("/")[2]
        if size == DIES:
            print("Error at line 7"); os._exit(1)
        if size == HANGS:
            time.sleep(60)
        say(kind="verify_cell", run=asked["run"], case=case, family="lion", bits=8,
            movement="streamed", device="cpu", result="equal", steps=5)
    say(kind="done")
"""


def played(dies: str = "", hangs: str = "", silence_seconds: float = 30.0):
    code = PLAYED.replace("DIES", repr(dies)).replace("HANGS", repr(hangs))
    return partial(
        WorkerProcess, command=[sys.executable, "-c", code], silence_seconds=silence_seconds
    )


def test_all_are_answered_by_several_workers() -> None:
    requests = [request(*CASES[:2]), request(*CASES[2:]), request(CASES[0])]
    found = list(pool.ask_all(requests, 2, start=played()))
    assert sorted(one.case for one in found) == sorted([*CASES, CASES[0]])


def test_a_worker_that_dies_fails_its_case_and_no_other() -> None:
    found = list(pool.ask_all([request(*CASES), request(CASES[3])], 1, start=played(dies="7")))
    assert [one.case for one in found] == [*CASES, CASES[3]]
    assert [one.result for one in found] == ["equal", "equal", "failed", "equal", "equal"]
    assert found[2].problem == "the process ended, status 1: Error at line 7"


def test_a_worker_that_dies_before_any_answer_fails_the_request() -> None:
    found = list(pool.ask_all([request(*CASES), request(CASES[1])], 1, start=played(dies="5")))
    assert [one.result for one in found] == ["failed"] * 4 + ["equal"]


def test_a_silent_worker_is_ended() -> None:
    start = played(hangs="6", silence_seconds=1.0)
    found = list(pool.ask_all([request(*CASES[:2])], 1, start=start))
    assert [one.result for one in found] == ["equal", "failed"]
    assert "no sign of life for 1 s" in found[1].problem


def test_a_worker_that_dies_leaves_a_case_as_large_as_it_is() -> None:
    asked = ShrinkRequest(run=RUN, device="cpu", case=CASES[2], result="failed")
    (found,) = pool.ask_all([asked], 1, start=played(dies="7"))
    assert isinstance(found, FailureRecord)
    assert found.smallest == CASES[2]
    assert "could not be made smaller: the process ended" in found.problem


def test_workers_end_when_nobody_listens() -> None:
    begun = time.monotonic()
    answers = pool.ask_all([request(*CASES)], 1, start=played(hangs="6"))
    assert next(answers).case == CASES[0]
    answers.close()
    assert time.monotonic() - begun < 20
    assert not [thread for thread in threading.enumerate() if "serve" in thread.name]


def test_nonsense_from_a_worker_is_raised() -> None:
    code = "import os, sys; os.write(int(sys.argv[1]), b'nonsense\\n'); sys.stdin.read()"
    start = partial(WorkerProcess, command=[sys.executable, "-c", code])
    with pytest.raises(ValueError, match="JSON"):
        list(pool.ask_all([request(*CASES)], 1, start=start))


def test_a_real_run_over_real_workers(tmp_path) -> None:
    out = tmp_path / "verify.jsonl"
    output = Console(file=io.StringIO(), width=100)
    log = Console(file=io.StringIO(), width=100)
    options = command.Options(device="cpu", pattern="lion*/one/*", out=out, jobs=2, argv=["verify"])
    chosen = command.choose(options, "cpu").cases
    assert chosen
    assert command.run(options, output, log)
    environment, *rest = read(out)
    assert isinstance(environment, Environment)
    excluded = [one for one in rest if isinstance(one, ExcludedRecord)]
    cells = [one for one in rest if isinstance(one, CellRecord)]
    assert len(excluded) == 2
    assert sorted(one.case for one in cells) == sorted(map(str, chosen))
    assert {one.run for one in rest} == {environment.run}
    for one in cells:
        assert one.result == "equal"
        assert one.seconds > 0
        assert one.tensors
        assert one.references[0].name.startswith("bitsandbytes.Lion")
        moved = one.copied_bytes if "streamed" in one.movement else one.prefetched_bytes
        assert moved > 0
    said = output.file.getvalue()
    assert f"{len(cells)} of {len(cells)} cells equal to bitsandbytes on cpu" in said
    assert "Cannot be compared (3,024 cells of the whole product)" in said
    assert f"{len(cells)} of {len(cells)} cells checked, 0 failed" in log.file.getvalue()


def test_a_bar_is_drawn_on_a_terminal() -> None:
    log = Console(file=io.StringIO(), width=100, force_terminal=True)
    options = command.Options(device="cpu", cases=CASES[:2])
    assert command.run(options, Console(file=io.StringIO()), log)
    assert "2/2" in log.file.getvalue()


def test_every_movement_takes_its_path() -> None:
    case = parse_case("adam/32/float32/streamed/128x800,100001,300")
    group = [parse_case(str(case).replace("/streamed/", f"/{movement}/")) for movement in PAGINGS]
    found = {one.movement: one for one in check_group(group, torch.device("cpu"))}
    assert {one.result for one in found.values()} == {"equal"}
    paths = {movement: set(one.routes) for movement, one in found.items()}
    both = {"streamed", "resident"}
    assert paths["streamed+hbm_budget=0.5"] == paths["streamed"] == both
    assert found["streamed+hbm_budget=0.5"].routes["resident"].parameters == 2
    assert paths["lookahead"] == {"lookahead", "resident"}
    assert paths["sequential"] == {"sequential", "resident"}
    assert found["lookahead"].prefetched_bytes == 5 * 8 * (102_400 + 100_001)
    assert found["lookahead"].copies == 0
    assert found["streamed+staging=1MiB"].copies > found["streamed"].copies


def test_the_report_counts_what_was_compared_how() -> None:
    references = [
        {
            "name": "bitsandbytes.PagedAdEMAMix()",
            "why": "it races",
            "parameters": 2,
            "tolerance": "near",
        },
    ]
    found = [
        cell("a", compared_steps=[5], tensors=7),
        cell("b", compared_steps=[5], tensors=7, references=references),
        cell("c", result="failed", problem="it broke"),
        ExcludedRecord(run=RUN, reason="no way", cells=12),
    ]
    notes = "\n".join(report.notes(found))
    assert "2 of 3 cells equal to bitsandbytes on cpu: 1 bit for bit, 1 within a tolerance" in notes
    assert "Another reference in 1 cells: it races; within a tolerance: near." in notes
    assert "Cannot be compared (12 cells of the whole product): no way." in notes
    assert "FAILED c: it broke" in notes
    output = Console(file=io.StringIO(), width=100)
    output.print(report.table(found))
    assert "2 of 3" in output.file.getvalue()


def test_many_failures_are_counted() -> None:
    found = [cell(str(number), result="failed", problem="no") for number in range(12)]
    assert "... and 2 more." in report.notes(found)


def test_a_failure_that_did_not_come_back_is_said() -> None:
    failure = FailureRecord(
        run=RUN,
        case="a",
        smallest="a",
        result="different",
        problem=None,
        difference=None,
        attempts=5,
        reproduced=False,
        command="pageahead verify --case 'a'",
    )
    (said,) = report.notes([cell("a"), failure])[1:]
    assert "did not fail again" in said


@pytest.fixture
def asked(monkeypatch):
    seen: list[command.Options] = []
    monkeypatch.setattr(command, "run", lambda options, output, log: seen.append(options) or True)
    return seen


def test_list_prints_every_name_and_checks_nothing(asked) -> None:
    result = run(cli.app, ["verify", "--device", "cpu", "--list"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    names = [line for line in lines if not line.startswith("#")]
    assert [str(parse_case(name)) for name in names] == names
    assert lines[-1] == f"# {len(names)} cells"
    assert sum(line.startswith("# cannot be compared") for line in lines) == 2
    assert asked == []


def test_list_of_what_is_selected(asked) -> None:
    result = run(cli.app, ["verify", "--device", "cpu", "--full", "--select", "giant", "--list"])
    names = [line for line in result.output.splitlines() if not line.startswith("#")]
    assert len(names) > 1_000
    assert all("/giant" in name for name in names)


def test_options_arrive_and_are_recorded_without_the_folder(asked, tmp_path) -> None:
    out = tmp_path / "run.jsonl"
    words = ["verify", "--device", "cpu", "--full", "--select", "lion", "--case", CASES[0]]
    result = run(cli.app, [*words, "--jobs", "3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    (options,) = asked
    assert (options.device, options.full, options.pattern) == ("cpu", True, "lion")
    assert (options.cases, options.jobs, options.out) == ([CASES[0]], 3, out)
    assert options.argv == [*words, "--out", "run.jsonl", "--jobs", "3"]


def test_a_difference_ends_with_1(monkeypatch) -> None:
    monkeypatch.setattr(command, "run", lambda options, output, log: False)
    assert run(cli.app, ["verify"]).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--select", "sgd"], ["'sgd'", "--list"]),
        (["--case", "adamw/8"], ["class/bits/dtype/movement/layout"]),
        (["--case", "adam/8/float32/streamed/64/channels_last"], ["cannot be", "four"]),
        (["--out", "/nowhere/run.jsonl"], ["cannot write"]),
    ],
)
def test_what_cannot_be_checked_ends_with_2(arguments, said) -> None:
    result = run(cli.app, ["verify", "--device", "cpu", *arguments])
    assert result.exit_code == 2
    for words in said:
        assert words in result.output


def test_a_device_that_is_not_there_ends_with_2(monkeypatch) -> None:
    def refuse(wanted):
        raise IdentityError("--device cuda: no GPU here")

    monkeypatch.setattr(command, "identify", refuse)
    for words in (["--list"], []):
        result = run(cli.app, ["verify", "--device", "cuda", *words])
        assert result.exit_code == 2
        assert "Error: --device cuda: no GPU here" in result.output


def test_jobs_by_device() -> None:
    assert command._jobs(command.Options(jobs=5), "cuda") == 5
    assert command._jobs(command.Options(cases=CASES), "cpu") == 0
    assert command._jobs(command.Options(), "cpu") >= 1
    assert 1 <= command._jobs(command.Options(), "cuda") <= 12


def test_a_worker_whose_gpu_context_is_gone_does_not_answer(monkeypatch) -> None:
    """Its case has failed, those behind it go to another process."""
    failed = CellRecord(
        run="",
        case="",
        family="lion",
        bits=8,
        movement="streamed",
        device="cuda",
        result="failed",
        problem="illegal access",
        steps=5,
    )

    def gone() -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    assert worker._broken(failed)
    assert not worker._broken(failed.model_copy(update={"result": "equal"}))
    assert not worker._broken(failed.model_copy(update={"device": "cpu"}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert not worker._broken(failed)


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [(0, None, [None] * 3), (1, None, [None] * 3), (2, None, ["0", "1", "0"]),
     (2, "5,7", ["5", "7", "5"])],
)  # fmt: skip
def test_workers_take_turns_with_gpus(monkeypatch, gpus, visible, expected) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(process, "_workers", itertools.count())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [process._gpu().get("CUDA_VISIBLE_DEVICES") for _ in expected] == expected
