"""Faults on purpose: each is seen at the right place, and made small to a case that has it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from pageahead.experiment.evidence import Environment
from pageahead.experiment.oracle import command
from pageahead.experiment.oracle import shrink as shrinking
from pageahead.experiment.oracle.case import parse_case
from pageahead.experiment.oracle.check import check, check_group
from pageahead.experiment.oracle.layouts import Layout
from pageahead.experiment.oracle.records import CellRecord, FailureRecord
from pageahead.experiment.oracle.shrink import shrink
from pageahead.optim import engine, homes
from pageahead.optim.hyperparameters import Hyperparameters
from tests.experiment.support import read

CPU = torch.device("cpu")
CASE = parse_case(
    "adamw8bit/8/float16/streamed+staging=1MiB/64,120x900,400x1001/steps=7/absent/changing"
)


@pytest.fixture(autouse=True)
def _patience(monkeypatch) -> None:
    """A slow machine makes cases as small as a fast one does."""
    monkeypatch.setattr(shrinking, "SECONDS", float("inf"))


def verify(case, out=None) -> tuple[bool, str]:
    """What `pageahead verify --case` says, in this process."""
    output = Console(file=io.StringIO(), width=100)
    options = command.Options(device="cpu", cases=[str(case)], out=out, argv=["verify"])
    good = command.run(options, output, Console(file=io.StringIO()))
    return good, output.file.getvalue()


def after_each_step(monkeypatch, fault) -> None:
    """Call ``fault(active)`` for each parameter that was updated, at the end of every step.

    Not around ``PagedOptimizer.step``: PyTorch wraps that in each class for good.
    """
    step = engine.Engine.step

    def faulty(self, actives, *arguments, **options):
        step(self, actives, *arguments, **options)
        for active in actives:
            fault(active)

    monkeypatch.setattr(engine.Engine, "step", faulty)


def at_launch(monkeypatch, change) -> None:
    """Let each update happen with ``change(name, active, views)`` for its arguments."""
    launch = engine.launch
    monkeypatch.setattr(engine, "launch", lambda *arguments: launch(*change(*arguments)))


def flip(active) -> None:
    """Flip the lowest bit of one element of a paged parameter's state after its fourth update."""
    if active.parameter.numel() >= 100_000 and active.state["step"] == 4:
        active.state["state2"].view(-1).view(torch.uint8)[3_000] ^= 1


def test_without_a_fault_it_is_equal() -> None:
    record = check(CASE, CPU)
    assert record.result == "equal", record
    assert record.bitwise
    assert record.compared_steps == [7]
    assert record.copies > 2 * 7 * 2  # slices, not parameters
    assert record.copied_bytes > 2 * 4 * 2 * (108_000 + 400_400)
    assert record.routes["streamed"].parameters == 2
    assert record.routes["resident"].parameters == 1


def test_one_flipped_bit_of_state(monkeypatch) -> None:
    after_each_step(monkeypatch, flip)
    record = check(CASE, CPU)
    assert record.result == "different"
    found = shrink(CASE, "different", CPU)
    smallest = found.case
    assert str(smallest) == "adamw/8/float32/streamed/100000/steps=4"
    difference = found.record.difference
    assert difference.step == 4
    assert (difference.name, difference.index, difference.differing) == ("state2", [3_000], 1)
    assert int(difference.expected) ^ int(difference.found) == 1
    assert int(difference.expected_bits, 16) == int(difference.expected)
    assert check(smallest, CPU).result == "different"
    assert check(replace(smallest, steps=3), CPU).result == "equal"


def test_every_step_sees_it_at_the_step_it_happens(monkeypatch) -> None:
    after_each_step(monkeypatch, flip)
    (record,) = check_group([replace(CASE, gradients="all")], CPU, every_step=True)
    assert record.compared_steps == [1, 2, 3, 4]
    assert (record.difference.step, record.difference.parameter) == (4, 1)
    assert (record.difference.name, record.difference.index) == ("state2", [3, 300])


def test_a_wrong_update(monkeypatch) -> None:
    def change(name, active, views):
        active.config = Hyperparameters.of({**active.config.values, "weight_decay": 0.5})
        return name, active, views

    at_launch(monkeypatch, change)
    good, said = verify(CASE)
    assert not good
    assert "step 7, parameter 0, parameter[0]" in said
    assert "again: pageahead verify --device cpu --case 'adamw/8/float32/streamed/1/steps=1'" in (
        said
    )


def test_a_wrong_slice_offset(monkeypatch) -> None:
    def change(name, active, views):
        if views.start and not views.whole:
            views = replace(views, start=views.start - 256, stop=views.stop - 256)
        return name, active, views

    at_launch(monkeypatch, change)
    found = shrink(CASE, "different", CPU)
    numels = found.case.layout.numels
    assert len(numels) == 1
    assert found.case.movement.staging is not None  # without it nothing this small is cut
    # With 256 KiB a chunk and two bytes an element: the smallest that is cut, to the element.
    assert check(found.case, CPU).result == "different"
    smaller = replace(found.case, layout=Layout.of((numels[0] - 1,)))
    assert check(smaller, CPU).result == "equal"
    # The second slice was applied to what is before it.
    index = found.record.difference.index[0]
    assert index % 256 == 0
    assert 0 < index < numels[0]


def test_state_that_stays_where_it_should_travel(monkeypatch) -> None:
    choose = homes.choose
    monkeypatch.setattr(
        homes, "choose", lambda *all: [("resident", "broken") for _ in choose(*all)]
    )
    record = check(CASE, CPU)
    assert record.result == "wrong_path"
    assert "(108,000 elements) is resident: broken" in record.problem
    assert str(shrink(CASE, "wrong_path", CPU).case) == "adamw/8/float32/streamed/100000/steps=1"


def test_an_error_of_ours_fails_the_cell_and_is_said(monkeypatch) -> None:
    def fault(active):
        if active.parameter.numel() > 128:
            raise ArithmeticError("out of luck")

    after_each_step(monkeypatch, fault)
    good, said = verify(replace(CASE, gradients="all"))
    assert not good
    assert "ArithmeticError in test_oracle_faults.py:" in said
    assert "out of luck" in said
    assert "--case 'adamw/8/float32/streamed/129/steps=1'" in said


def test_an_error_of_bitsandbytes_fails_every_cell_of_the_group(monkeypatch) -> None:
    def broken(*arguments, **options):
        raise OSError("no library")

    monkeypatch.setattr("bitsandbytes.optim.AdamW8bit", broken)
    found = list(check_group([CASE, CASE], CPU))
    assert [record.result for record in found] == ["failed", "failed"]
    assert "bitsandbytes: OSError" in found[0].problem


def test_what_does_not_fail_again_is_said(monkeypatch) -> None:
    found = shrink(CASE, "different", CPU, run=lambda case: check(CASE, CPU), attempts=1)
    assert found.record is None
    assert found.case == CASE


def test_the_search_ends(monkeypatch) -> None:
    after_each_step(monkeypatch, flip)
    found = shrink(CASE, "different", CPU, attempts=6)
    assert found.attempts == 6
    assert found.record is not None


def test_evidence_of_a_failure(monkeypatch, tmp_path) -> None:
    def fault(active):
        if active.parameter.numel() > 128 and active.state["step"] == 2:
            active.state["state1"].view(-1)[100] = float("inf")

    after_each_step(monkeypatch, fault)
    case = parse_case("lion/32/bfloat16/lookahead/64,300,17x19/absent")
    out = tmp_path / "verify.jsonl"
    good, said = verify(case, out)
    assert not good
    environment, cell, failure = read(out)
    assert isinstance(environment, Environment)
    assert environment.argv == ["verify"]
    assert isinstance(cell, CellRecord)
    assert (cell.case, cell.result, cell.run) == (str(case), "different", environment.run)
    assert isinstance(failure, FailureRecord)
    assert failure.reproduced
    assert (failure.case, failure.run) == (str(case), environment.run)
    assert failure.smallest == "lion/32/float32/lookahead/129/steps=2"
    assert failure.command == f"pageahead verify --device cpu --case '{failure.smallest}'"
    assert failure.command in said
    difference = failure.difference
    assert (difference.step, difference.parameter, difference.name) == (2, 0, "state1")
    assert (difference.index, difference.found, difference.found_bits) == (
        [100],
        "inf",
        "0x7f800000",
    )
    assert str(tmp_path) not in out.read_text()
