"""A whole cell on the CPU, every way in turn, with a model of two million parameters."""

from __future__ import annotations

import weakref

import pytest
import torch

from pageahead.experiment.evidence import TrainingRecord
from pageahead.experiment.messages import TrainingRequest
from pageahead.experiment.protocol import Protocol
from pageahead.experiment.training import measure, planning
from pageahead.experiment.training.arms import Arm
from pageahead.experiment.training.cells import CPU_PARAMETERS, arms_of, cell_named
from pageahead.experiment.training.planning import Memory

PROTOCOL = Protocol(warmups=1, rounds=2, repetitions=2)


def measured(cell: str, *arms: str) -> tuple[TrainingRecord, list[tuple[str, int]]]:
    said: list[tuple[str, int]] = []
    request = TrainingRequest(
        run="now",
        cell=cell,
        strategies=list(arms) or [arm.name for arm in arms_of(cell_named(cell))],
        device="cpu",
        protocol=PROTOCOL,
        parameters=CPU_PARAMETERS,
    )
    record = measure.measure_training(request, lambda phase, steps: said.append((phase, steps)))
    return record, said


@pytest.mark.parametrize("bits", [8, 32])
def test_a_cell_on_the_cpu(bits) -> None:
    record, said = measured(f"adamw{bits}/4096")
    assert record.deterministic
    assert (record.sequences, record.length) == (2, 32)
    (group,) = record.groups
    arms = {arm.arm: arm for arm in group.arms}
    assert list(arms)[:2] == ["hbm", "model"]
    assert len(arms) == (11 if bits == 32 else 10)
    assert said[-1] == ("comparing bits", len(arms) * PROTOCOL.steps)
    assert set(record.phase_seconds) == {phase for phase, _ in said}
    state = arms["hbm"].state_bytes
    assert arms["hbm"].hbm_state_bytes == state >= 2 * record.parameters * bits // 8
    for name, arm in arms.items():
        assert [len(one) for one in arm.timings.wall_ms] == [2, 2]
        assert arm.bound_ms is None  # there is no link
        if arm.way in ("after", "during"):
            assert arm.comparison is not None
            assert arm.comparison.equal, (name, arm.comparison.examples)
            assert arm.state_bytes == state
            assert f"hbm_budget={arm.budget!r}" in arm.paging
            assert f"in_backward={arm.way == 'during'}" in arm.paging
            assert arm.hbm_state_bytes == state - arm.streamed_bytes + arm.slot_bytes
        else:
            assert arm.comparison is None
            assert arm.not_compared
    assert arms["after-0"].streamed_bytes > arms["after-0.2"].streamed_bytes
    assert arms["after-0.2"].streamed_bytes > arms["after-0.5"].streamed_bytes > 0
    assert TrainingRecord.model_validate_json(record.model_dump_json()) == record


def test_groups_and_what_is_left_out_are_recorded(monkeypatch) -> None:
    cell = cell_named("adamw8/4096")
    shape = measure.shape_for(CPU_PARAMETERS)
    base = planning.shared(shape, cell, 64)
    pair = planning.of_arm(measure.ARMS["after-0"], shape, cell)
    monkeypatch.setattr(
        planning, "available", lambda device: Memory(base.hbm + pair.hbm + 1000, 10**10)
    )
    record, _ = measured("adamw8/4096", "model", "after-0", "during-0", "after-0.5")
    assert [[arm.arm for arm in group.arms] for group in record.groups] == [
        ["hbm", "model", "after-0"],
        ["hbm", "model", "during-0"],
    ]
    assert "there are" in record.left_out["after-0.5"]
    assert all(group.arms[-1].comparison.equal for group in record.groups)


def test_a_groups_memory_is_given_back_before_the_next_comes(monkeypatch) -> None:
    alive: list[weakref.ref] = []
    make = Arm.__init__

    def remembered(self, *arguments) -> None:
        if self.__class__ is Arm and arguments[0].way == "hbm":
            assert [one() for one in alive if one() is not None] == []
        make(self, *arguments)
        alive.extend([weakref.ref(self._model), weakref.ref(self)])
        if self.optimizer is not None:
            alive.append(weakref.ref(self.optimizer))

    monkeypatch.setattr(Arm, "__init__", remembered)
    pairs = planning.Grouping([[measure.ARMS["during-0"]], [measure.ARMS["after-0"]]])
    monkeypatch.setattr(planning, "group", lambda *arguments: pairs)
    measured("adamw32/4096")
    assert len(alive) == 12
    assert [one() for one in alive if one() is not None] == []


def test_a_planted_difference_is_found(monkeypatch) -> None:
    step = Arm.step

    def disturbed(self) -> None:
        step(self)
        if self.spec.name == "after-0":
            with torch.no_grad():
                next(self._model.parameters()).view(torch.int16)[5, 7] ^= 1

    monkeypatch.setattr(Arm, "step", disturbed)
    record, _ = measured("adamw32/4096", "after-0", "during-0")
    arms = {arm.arm: arm for arm in record.groups[0].arms}
    assert not arms["after-0"].comparison.equal
    assert arms["during-0"].comparison.equal


def test_without_the_same_gradients_twice_nothing_is_compared(monkeypatch) -> None:
    monkeypatch.setattr(measure, "difference", lambda model, text: "dice were thrown")
    record, _ = measured("adamw32/4096", "after-0")
    assert not record.deterministic
    (_, ours) = record.groups[0].arms
    assert (ours.comparison, ours.not_compared) == (None, "dice were thrown")


def test_bounds_are_what_hides_behind_what() -> None:
    from tests.experiment.training.support import record

    arms = {arm.arm: arm for arm in record("adamw32/4096").groups[0].arms}
    whole, model = arms["hbm"].wall.median, arms["model"].wall.median
    moving = arms["after-0"].streamed_bytes / 50e6  # at 50 GB/s, in ms
    assert arms["after-0"].link_bound_ms == pytest.approx(moving)
    assert arms["after-0"].bound_ms == pytest.approx(model + moving)
    assert arms["during-0"].bound_ms == pytest.approx(moving)
    slow = {arm.arm: arm for arm in record("adamw8/16384").groups[0].arms}
    assert slow["during-0"].bound_ms == pytest.approx(slow["hbm"].wall.median)
    assert whole > model
    assert arms["hbm"].bound_ms is None
