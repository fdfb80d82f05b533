"""Hyperparameters are read once for a group and step, unless a parameter has its own."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from bitsandbytes.optim.optimizer import Optimizer8bit

from pageahead import PagedAdamW8bit
from tests.support import assert_same_bits, legacy, ours, parameters, train

LARGE, SMALL = 150_000, 5_000


class Counting(dict[str, Any]):
    """A parameter group that counts how often its learning rate is read."""

    reads = 0

    def __getitem__(self, key: str) -> Any:
        self.reads += key == "lr"
        return super().__getitem__(key)


def test_once_for_each_group_and_step(optim_manager: GlobalOptimManager) -> None:
    first, second = parameters(LARGE, LARGE, SMALL), parameters(LARGE, LARGE)
    optimizer = ours("PagedAdamW8bit", [{"params": first}, {"params": second, "lr": 0.1}])
    train(optimizer, range(1))
    groups = optimizer.param_groups = [Counting(group) for group in optimizer.param_groups]
    for step in range(1, 4):
        train(optimizer, range(step, step + 1))
        assert [group.reads for group in groups] == [step, step]


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


BITSANDBYTES = Optimizer8bit.get_config


def own(self: Any, gindex: int, pindex: int, group: Any) -> dict[str, Any]:
    """A `get_config` by which parameters have learning rates of their own."""
    config: dict[str, Any] = BITSANDBYTES(self, gindex, pindex, group)
    return {**config, "lr": config["lr"] * (1 + pindex)}


class Own(PagedAdamW8bit):
    get_config = own


@pytest.mark.parametrize("where", ["subclass", "object", "bitsandbytes"])
def test_another_get_config(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = parameters(LARGE, LARGE), parameters(LARGE, LARGE)
    if where == "bitsandbytes":
        monkeypatch.setattr(Optimizer8bit, "get_config", own)
    optimizer = Own(mine, lr=0.01) if where == "subclass" else PagedAdamW8bit(mine, lr=0.01)
    if where == "object":
        optimizer.get_config = MethodType(own, optimizer)
    alike = [{"params": [one], "lr": 0.01 * (1 + number)} for number, one in enumerate(theirs)]
    expected = ours("PagedAdamW8bit", alike)
    for one in (optimizer, expected):
        train(one, range(3))
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
