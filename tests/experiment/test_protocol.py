from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from pageahead.experiment.protocol import CpuClock, CudaClock, Interleaving, Protocol, Sample


class Subject:
    def __init__(self, name: str, journal: list[str]) -> None:
        self.name = name
        self.journal = journal
        self.turns: list[int] = []

    def prepare(self, turn: int) -> None:
        self.turns.append(turn)
        self.journal.append(f"prepare {self.name}")

    def step(self) -> None:
        self.journal.append(f"step {self.name}")


class CountingClock:
    """Says how many steps it has timed, and whether the collector could have run."""

    def __init__(self) -> None:
        self.timed = 0
        self.collecting: list[bool] = []

    def time(self, operation: Callable[[], None]) -> Sample:
        operation()
        self.collecting.append(gc.isenabled())
        self.timed += 1
        return Sample(float(self.timed), None, 0.0)


def test_order_rotates_and_each_subject_is_prepared_just_before_its_step() -> None:
    journal: list[str] = []
    a, b, c = (Subject(name, journal) for name in "abc")
    Interleaving([a, b, c], CountingClock(), lambda: None).warm_up(4)
    steps = [entry.removeprefix("step ") for entry in journal if entry.startswith("step")]
    assert "".join(steps) == "abcbcacababc"
    for before, after in zip(journal[::2], journal[1::2], strict=True):
        assert (before, after) == (f"prepare {after[-1]}", f"step {after[-1]}")


def test_all_take_the_same_turns_through_warm_up_and_rounds() -> None:
    subjects = [Subject(name, []) for name in "ab"]
    done = []
    arms = Interleaving(subjects, CountingClock(), lambda: done.append(1))
    arms.warm_up(3)
    arms.measure(2, 4)
    assert subjects[0].turns == subjects[1].turns == list(range(11))
    assert len(done) == 2 * Protocol(3, 2, 4).steps


def test_samples_are_returned_by_subject_and_round_whoever_began() -> None:
    arms = Interleaving([Subject("a", []), Subject("b", [])], CountingClock(), lambda: None)
    measured = arms.measure(rounds=2, repetitions=2)
    walls = [[[sample.wall_ms for sample in one] for one in subject] for subject in measured]
    # In order: a b, b a, a b, b a.
    assert walls == [[[1.0, 4.0], [5.0, 8.0]], [[2.0, 3.0], [6.0, 7.0]]]


def test_no_garbage_is_collected_within_a_round() -> None:
    clock = CountingClock()
    Interleaving([Subject("a", [])], clock, lambda: None).measure(2, 3)
    assert clock.collecting == [False] * 6
    assert gc.isenabled()


def test_cpu_clock_runs_the_step_once_and_knows_no_events() -> None:
    ran = []
    sample = CpuClock().time(lambda: ran.append(1))
    assert ran == [1]
    assert sample.wall_ms > 0
    assert sample.event_ms is None


def test_cuda_clock_starts_from_an_idle_device_and_asks_what_was_left(monkeypatch) -> None:
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def elapsed_time(self, end: Event) -> float:
            assert end is not self
            return 2.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronize"))
    sample = CudaClock().time(lambda: order.append("step"))
    assert order == ["synchronize", "event", "step", "event", "synchronize"]
    assert sample.event_ms == 2.5
    assert sample.wall_ms > 0
    assert sample.settle_ms > 0
