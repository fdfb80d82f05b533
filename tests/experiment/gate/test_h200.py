"""The evidence behind the README's verdicts, of one H200: what it says, and what it hangs on."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from pageahead import cli
from pageahead.experiment.cells import CELLS
from pageahead.experiment.evidence import CellRecord, PeakRecord
from pageahead.experiment.gate.decision import Decision, decide
from pageahead.experiment.gate.reading import Record, gather, read, read_one
from pageahead.experiment.oracle.records import SourceRecord
from pageahead.experiment.oracle.records import SummaryRecord as Verified
from pageahead.experiment.oracle.sums import sums
from pageahead.experiment.profile.analysis import figures, problems, typical
from pageahead.experiment.report import rendering
from pageahead.experiment.report.model import build
from pageahead.experiment.summary import round_ratios
from tests.experiment.gate.support import NEEDED, failed, finding, missing
from tests.experiment.support import MIB
from tests.processes import environment

H200 = Path(__file__).parents[3] / "evidence" / "nvidia-h200"
PUBLIC = "adamw32/qwen2.5-0.5b"


@cache
def records(name: str) -> tuple[Record, ...]:
    found, wrong = read_one(H200 / f"{name}.jsonl")
    assert wrong == []
    return tuple(found)


def judged(change: Callable[[Record], Record | None] = lambda one: one) -> Decision:
    """`streamed`, with each record replaced by what `change` makes of it."""
    after = [change(one) for one in records("streamed")]
    return decide(gather(one for one in after if one is not None))


def without(kind: type, **values: object) -> Decision:
    """`streamed`, less the records of that kind with these values."""
    gone = []

    def change(one: Record) -> Record | None:
        if isinstance(one, kind) and all(getattr(one, key) == values[key] for key in values):
            gone.append(one)
            return None
        return one

    decision = judged(change)
    assert gone
    return decision


def at(ratios: dict[str, float]) -> Decision:
    """`streamed`, with legacy's raw times of these cells so much shorter that it has this ratio."""

    def change(one: Record) -> Record | None:
        if not isinstance(one, CellRecord) or one.cell not in ratios:
            return one
        timings = one.legacy.timings
        factor = ratios[one.cell] / median(
            round_ratios(timings.wall_ms, one.candidates[0].timings.wall_ms)
        )
        scaled = {
            key: [[factor * value for value in found] for found in getattr(timings, key)]
            for key in ("wall_ms", "event_ms")
        }
        legacy = one.legacy.model_copy(update={"timings": timings.model_copy(update=scaled)})
        return one.model_copy(update={"legacy": legacy})

    return judged(change)


def test_streamed_is_go() -> None:
    decision = judged()
    assert decision.verdict == "GO"
    assert {one.status for one in decision.findings} == {"passed"}
    assert len({one.cell for one in records("streamed") if isinstance(one, CellRecord)}) == 41
    assert decision.device == "NVIDIA H200"


def test_lookahead_is_no_go_as_in_the_source() -> None:
    decision = decide(gather(records("lookahead")))
    assert (decision.verdict, failed(decision)) == ("NO-GO", ["2"])
    eight, thirty_two = finding(decision, "2").figures
    assert "at least 1.15" in eight
    assert "less than 1.15" in thirty_two


@pytest.mark.parametrize(("name", "status"), [("streamed", 0), ("lookahead", 1)])
def test_what_the_gate_said_is_what_it_says(name: str, status: int) -> None:
    paths = [str(H200 / f"{one}.jsonl") for one in (name, f"profile-{name}")]
    result = CliRunner().invoke(cli.app, ["gate", *paths], env={"COLUMNS": "120"})
    assert result.exit_code == status
    assert result.stdout == (H200 / f"gate-{name}.txt").read_text()


def test_the_report_is_that_of_the_evidence() -> None:
    names = ("streamed", "lookahead", "profile-streamed", "profile-lookahead")
    report = build([H200 / f"{name}.jsonl" for name in names])
    assert rendering.markdown(report).strip() == (H200 / "report.md").read_text().strip()
    assert rendering.html(report).strip() == (H200 / "report.html").read_text().strip()


@pytest.mark.parametrize("name", [cell.name for cell in NEEDED])
def test_without_any_needed_cell_it_is_incomplete(name: str) -> None:
    decision = without(CellRecord, cell=name)
    assert decision.verdict == "INCOMPLETE"
    assert f"{name}: not measured" in finding(decision, "1").missing


@pytest.mark.parametrize("arm", ["legacy", "streamed"])
@pytest.mark.parametrize("role", ["primary", "public"])
def test_without_any_peak_it_is_incomplete(role: str, arm: str) -> None:
    for cell in NEEDED:
        if cell.role == role:
            decision = without(PeakRecord, cell=cell.name, arm=arm)
            assert (decision.verdict, missing(decision)) == ("INCOMPLETE", ["6"])


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("family", ["adam", "adamw", "lion", "ademamix"])
def test_without_an_optimizer_in_verify_it_is_incomplete(family: str, bits: int) -> None:
    decision = without(Verified, family=family, bits=bits)
    assert (decision.verdict, missing(decision)) == ("INCOMPLETE", ["1"])


@pytest.mark.parametrize("bits", [8, 32])
def test_criterion_2_flips_with_its_cells(bits: int) -> None:
    names = [
        cell.name
        for cell in NEEDED
        if cell.role == "primary" and cell.optimizer.name == f"adamw{bits}"
    ]
    assert at(dict.fromkeys(names, 1.1501)).verdict == "GO"
    below = at(dict.fromkeys(names, 1.1499))
    assert (below.verdict, failed(below)) == ("NO-GO", ["2"])


@pytest.mark.parametrize(
    ("key", "name", "kept", "broken"),
    [
        ("3", PUBLIC, 1.2, 1.0),
        ("4", "adamw32/8x4Mi", 0.9525, 0.9523),
        ("5", "adamw8/256MiB@resident", 0.971, 0.9708),
    ],
)
def test_criteria_3_4_and_5_flip_with_one_cell(
    key: str, name: str, kept: float, broken: float
) -> None:
    assert at({name: kept}).verdict == "GO"
    decision = at({name: broken})
    assert decision.verdict == "NO-GO"
    assert key in failed(decision)


def test_criterion_6_flips_with_one_byte_of_any_cell() -> None:
    for cell in NEEDED:
        peaks = {
            one.arm: one
            for one in records("streamed")
            if isinstance(one, PeakRecord) and one.cell == cell.name
        }
        if not peaks:
            continue
        ours = peaks["streamed"]
        slack = peaks["legacy"].taken + ours.staging - ours.taken
        for more, verdict in ((slack, "GO"), (slack + 1, "NO-GO")):
            changed = ours.model_copy(update={"driver_peak": ours.driver_peak + more})
            decision = judged(lambda one, old=ours, new=changed: new if one is old else one)
            assert decision.verdict == verdict


def test_one_bit_that_differs_is_no_go() -> None:
    def change(one: Record) -> Record:
        if isinstance(one, CellRecord) and one.cell == PUBLIC:
            (ours,) = one.candidates
            unequal = ours.comparison.model_copy(
                update={"differences": 1, "examples": ["state1 of 0: 1 of 8 bytes differ"]}
            )
            ours = ours.model_copy(update={"comparison": unequal})
            return one.model_copy(update={"candidates": [ours]})
        return one

    decision = judged(change)
    assert (decision.verdict, failed(decision)) == ("NO-GO", ["1"])


def test_sums_are_those_of_the_cells_and_nothing_counts_twice() -> None:
    whole = sums(H200 / "verify-cells.jsonl.gz")
    assert whole == list(records("verify"))
    for name in ("streamed", "lookahead"):
        theirs = [one for one in records(name) if isinstance(one, (SourceRecord, Verified))]
        assert theirs == [one for one in whole if isinstance(one, (SourceRecord, Verified))]
    paths = [H200 / f"{name}.jsonl" for name in ("streamed", "streamed", "verify")]
    for together in (paths, [*paths, H200 / "verify-cells.jsonl.gz"]):
        assert finding(decide(read(together)), "1").figures == finding(judged(), "1").figures


def summed(cells: Path, evidence: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "pageahead.experiment.oracle.sums", str(cells), str(evidence)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    return done.returncode, " ".join(done.stderr.replace("│", "").split())


def test_sums_of_a_file_that_is_not_one_run_of_verify_are_refused(tmp_path: Path) -> None:
    lines = gzip.decompress((H200 / "verify-cells.jsonl.gz").read_bytes()).splitlines()
    about, last = lines[0], lines[-1]
    other = json.dumps(json.loads(last) | {"run": "another"}).encode()
    path = tmp_path / "cells.jsonl"
    for some, said in [
        ([about], "cells of 0 runs"),
        ([about, last, other], "cells of 2 runs"),
        ([last], "does not say on what machine"),
        ([about, last[:-9]], "cells.jsonl, line 2: Invalid JSON"),
    ]:
        path.write_bytes(b"\n".join(some) + b"\n")
        with pytest.raises(ValueError, match=said):
            sums(path)
    out = tmp_path / "evidence.jsonl"
    status, said = summed(path, out)
    assert (status, out.exists()) == (1, False)
    assert "Error: cells.jsonl, line 2" in said
    assert "Traceback" not in said
    # A file of `bench` that `verify` went on with, and a cell that is there twice.
    bench = (H200 / "streamed.jsonl").read_bytes().splitlines()[:3]
    path.write_bytes(b"\n".join([*bench, about, last, last]) + b"\n")
    assert summed(path, out) == (0, "")
    (one,) = [one for one in read_one(out)[0] if isinstance(one, Verified)]
    assert (one.cells, one.results) == (1, {"equal": 1})
    assert "is what is read, too" in summed(path, path)[1]
    assert "leave out .gz" in summed(path, tmp_path / "evidence.jsonl.gz")[1]


@pytest.mark.parametrize("candidate", ["streamed", "lookahead"])
def test_profiles_add_up_and_show_how_state_moved(candidate: str) -> None:
    found = read([H200 / f"profile-{candidate}.jsonl"]).profiles
    assert len({one.cell for one in found}) == 4
    assert {(one.cell, one.arm) for one in found} == {
        (one.cell, arm) for one in found for arm in ("legacy", candidate)
    }
    for one in found:
        assert problems(one) == []
        for step in one.steps:
            assert figures(step).error <= 0.05
        assert one.state_bytes == CELLS[one.cell].state_bytes("cuda")
        step = typical(one)
        if one.arm == "streamed":
            assert (step.to_device_bytes, step.to_host_bytes) == (one.state_bytes,) * 2
            assert (step.managed_to_device_bytes, step.device_synchronizations) == (0, 0)
            assert step.both_ways_ms > 0.5 * step.wall_ms
        else:
            # The driver moves whole pages.
            assert 0 <= step.managed_to_device_bytes - one.state_bytes < 0.001 * one.state_bytes
    by_arm = {one.arm: typical(one) for one in found if one.cell == "adamw32/8x4Mi"}
    assert by_arm["legacy"].managed_to_device_bytes == 256 * MIB
    assert by_arm["legacy"].transfer_overlap < 0.001
