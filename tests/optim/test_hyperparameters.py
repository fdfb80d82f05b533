"""Hyperparameters are read once for a group and step, unless a parameter has its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from bitsandbytes.optim.optimizer import Optimizer8bit

from pageahead import PagedAdamW8bit
from tests.support import assert_same_bits, legacy, ours, parameters, train

LARGE, SMALL = 150_000, 5_000


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What `get_config` is asked for: group and parameter."""
    asked: list[tuple[int, int]] = []
    really = Optimizer8bit.get_config

    def get_config(self: Any, gindex: int, pindex: int, group: Mapping[str, Any]) -> Any:
        asked.append((gindex, pindex))
        return really(self, gindex, pindex, group)

    monkeypatch.setattr(Optimizer8bit, "get_config", get_config)
    return asked


def test_once_for_each_group_and_step(
    optim_manager: GlobalOptimManager, reads: list[tuple[int, int]]
) -> None:
    first, second = parameters(LARGE, LARGE, SMALL), parameters(LARGE, LARGE)
    optimizer = ours("PagedAdamW8bit", [{"params": first}, {"params": second, "lr": 0.1}])
    train(optimizer, range(1))
    for step in range(1, 3):
        reads.clear()
        train(optimizer, range(step, step + 1))
        assert reads == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    "name", ["PagedAdamW8bit", "PagedAdamW32bit", "PagedLion", "PagedAdEMAMix"]
)
def test_each_step_reads_them_again(name: str) -> None:
    mine, theirs = parameters(LARGE, SMALL), parameters(LARGE, SMALL)
    optimizer, expected = ours(name, mine), legacy(name, theirs)
    for step in range(4):
        for one in (optimizer, expected):
            one.param_groups[0].update(
                lr=0.01 * (step + 1), weight_decay=0.1 * step, betas=(0.8, 0.9, 0.99)
            )
            train(one, range(step, step + 1))
    assert_same_bits(optimizer, expected)


def test_a_parameter_that_gets_its_own_between_two_steps(
    optim_manager: GlobalOptimManager,
) -> None:
    mine, theirs = parameters(LARGE, LARGE, SMALL), parameters(LARGE, LARGE, SMALL)
    optimizer, expected = ours("PagedAdamW8bit", mine), legacy("PagedAdamW8bit", theirs)
    for one in (optimizer, expected):
        train(one, range(2))
    optim_manager.override_config([mine[1], theirs[1]], key_value_dict={"lr": 0.5})
    for one in (optimizer, expected):
        train(one, range(2, 4))
    assert_same_bits(optimizer, expected)


class Own(PagedAdamW8bit):
    """Reads its own hyperparameters for a parameter."""

    def get_config(self, gindex: int, pindex: int, group: Any) -> dict[str, Any]:
        config: dict[str, Any] = Optimizer8bit.get_config(self, gindex, pindex, group)
        return {**config, "lr": config["lr"] * (1 + pindex)}


@pytest.mark.parametrize("where", ["class", "object"])
def test_another_get_config(where: str) -> None:
    mine, theirs = parameters(LARGE, LARGE), parameters(LARGE, LARGE)
    if where == "class":
        optimizer = Own(mine, lr=0.01)
    else:
        optimizer = PagedAdamW8bit(mine, lr=0.01)
        optimizer.get_config = MethodType(Own.get_config, optimizer)
    alike = [{"params": [one], "lr": 0.01 * (1 + number)} for number, one in enumerate(theirs)]
    expected = ours("PagedAdamW8bit", alike)
    for one in (optimizer, expected):
        train(one, range(3))
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
