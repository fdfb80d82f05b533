"""PyTorch's hooks around `step` run, and profilers see its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.support import ours, parameters


@pytest.fixture
def optimizer() -> Any:
    found = parameters(120_000, 10)
    for one in found:
        one.grad = torch.ones_like(one)
    return ours("PagedAdamW", found, lr=0.1)


def test_hooks_of_the_optimizer_run_around_step(optimizer: Any) -> None:
    seen: list[str] = []
    before = optimizer.param_groups[0]["params"][0].clone()

    def pre(one: Any, args: Any, kwargs: Any) -> None:
        assert torch.equal(one.param_groups[0]["params"][0], before)
        seen.append("pre")

    def post(one: Any, args: Any, kwargs: Any) -> None:
        assert not torch.equal(one.param_groups[0]["params"][0], before)
        seen.append("post")

    handles = [
        optimizer.register_step_pre_hook(pre),
        optimizer.register_step_post_hook(post),
    ]
    optimizer.step()
    assert seen == ["pre", "post"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == ["pre", "post"]


def test_hooks_of_all_optimizers_run(optimizer: Any) -> None:
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("post")),
    ]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["pre", "post"]


def test_a_pre_hook_may_give_another_closure(optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda one, args, kwargs: (args, {"closure": lambda: 7}))
    assert optimizer.step() == 7


def test_a_profiler_sees_the_step_by_name(optimizer: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = [event.name for event in profile.events()]
    assert names.count("Optimizer.step#PagedAdamW.step") == 1


def test_pytorch_does_not_wrap_it_again(optimizer: Any) -> None:
    assert "step" not in vars(type(optimizer))  # which is where it would put its wrapper
