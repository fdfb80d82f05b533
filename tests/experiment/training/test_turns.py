from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from pageahead.experiment.training.arms import MemoryWatch
from pageahead.experiment.training.turns import Turns

CPU = torch.device("cpu")


class Played:
    """An arm that notes what it is asked to do."""

    def __init__(self, name: str, log: list) -> None:
        self.name, self.log = name, log

    def prepare(self, turn: int) -> None:
        self.log.append((self.name, turn))

    def step(self) -> None:
        self.log.append((self.name, "step", gc.isenabled()))

    def stepped(self) -> None:
        self.log.append((self.name, "stepped"))


def test_a_turn_is_several_iterations_and_the_first_changes_from_round_to_round() -> None:
    log: list = []
    counted: list[int] = []
    turns = Turns([Played("a", log), Played("b", log)], CPU, lambda: counted.append(1))
    turns.warm_up(1)
    samples = turns.measure(2, 2)
    order = [entry for entry in log if isinstance(entry[1], int)]
    assert order == [
        *[("a", 0), ("b", 0)],
        *[("b", 1), ("b", 2), ("a", 1), ("a", 2)],
        *[("a", 3), ("a", 4), ("b", 3), ("b", 4)],
    ]
    assert [[len(one) for one in arm] for arm in samples] == [[2, 2], [2, 2]]
    assert all(sample.wall_ms >= 0 for arm in samples for one in arm for sample in one)
    assert len(counted) == 10
    steps = [entry[2] for entry in log if entry[1] == "step"]
    assert steps == [True] * 2 + [False] * 8  # no garbage collection in what is timed
    assert gc.isenabled()


def test_an_arms_own_peak_is_without_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, peaks, emptied = iter([1000, 1300, 1300, 1300]), iter([1900, 2000]), []
    monkeypatch.setattr(
        torch,
        "cuda",
        SimpleNamespace(
            reset_peak_memory_stats=lambda device: None,
            memory_allocated=lambda device: next(allocated),
            max_memory_allocated=lambda device: next(peaks),
            mem_get_info=lambda device: (4000, 10_000),
            empty_cache=lambda: emptied.append(1),
        ),
    )
    watch = MemoryWatch(CPU, parameter_bytes=100)
    assert watch.occupancy is None
    watch.begin()
    watch.end()  # leaves 300 bytes of state behind
    assert watch.occupancy is not None
    assert watch.occupancy.own_peak == 1900 - 1000 + 100
    watch.begin()
    watch.end()
    assert watch.occupancy.own_peak == 2000 - 1300 + 400
    assert watch.occupancy.process_peak == 2000
    assert watch.occupancy.driver_used == 6000
    assert emptied == [1]
