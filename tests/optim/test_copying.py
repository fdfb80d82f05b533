"""Copies of whole optimizers: they go on like the original, and share nothing with it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pageahead import Paging
from pageahead.memory import host
from pageahead.memory.host import HostMemoryError
from tests.support import CLASSES, MIB, Snapshot, assert_same_bits, bits, ours, paths


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved_and_loaded,
}
SETTINGS = {
    "plain": Paging(staging=MIB, hbm_budget=0),
    "overlap": Paging(staging=MIB, hbm_budget=0, write_back="overlap"),
    "in backward": Paging(staging=MIB, hbm_budget=0, in_backward=True),
    "budget": Paging(staging=MIB, hbm_budget=0.5),
    "managed": Paging(strategy="lookahead"),
}


def made(name: str, paging: Paging) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(320, 320), nn.Tanh(), nn.Linear(320, 400))
    return model, ours(name, model.parameters(), lr=1e-2, paging=paging)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 320, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_goes_on_like_the_original(way: str, settings: str) -> None:
    model, optimizer = made("PagedAdamW8bit", SETTINGS[settings])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it puts its own `step` on it
    train(model, optimizer, range(3))
    scheduler.step()
    twin, copied = WAYS[way]((model, optimizer))
    assert copied.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert copied.paging == optimizer.paging
    assert paths(copied) == paths(optimizer)
    assert_same_bits(copied, optimizer)
    snapshot = Snapshot(optimizer)
    train(twin, copied, range(3, 6))
    snapshot.assert_unchanged()
    train(model, optimizer, range(3, 6))
    assert_same_bits(copied, optimizer)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_class(name: str, way: str) -> None:
    model, optimizer = made(name, SETTINGS["plain"])
    train(model, optimizer, range(2))
    twin, copied = WAYS[way]((model, optimizer))
    assert type(copied) is type(optimizer)
    for one, its in ((model, optimizer), (twin, copied)):
        train(one, its, range(2, 4))
    assert_same_bits(copied, optimizer)


@pytest.mark.parametrize("way", WAYS)
def test_one_that_has_not_stepped(way: str) -> None:
    model, optimizer = made("PagedAdamW8bit", Paging())
    twin, copied = WAYS[way]((model, optimizer))
    assert not copied.state
    for one, its in ((model, optimizer), (twin, copied)):
        train(one, its, range(2))
    assert_same_bits(copied, optimizer)


def test_hooks_stay_with_the_original() -> None:
    model, optimizer = made("PagedAdamW8bit", Paging())
    called: list[Any] = []
    optimizer.register_step_post_hook(lambda one, args, kwargs: called.append(one))
    twin, copied = copy.deepcopy((model, optimizer))
    train(twin, copied, range(1))
    assert called == []
    copied.register_step_post_hook(lambda one, args, kwargs: called.append(one))
    train(twin, copied, range(1))
    assert called == [copied]


def test_state_that_is_sent_to_another_process_is_a_copy() -> None:
    """PyTorch would move the storage of the arena's own tensors to shared memory."""
    model, optimizer = made("PagedAdamW8bit", SETTINGS["plain"])
    train(model, optimizer, range(2))
    state = optimizer.state[model[0].weight]["state1"]  # type: ignore[index]
    address, before = state.data_ptr(), bits(state)
    _, (_, _, _, sent) = optimizer.__reduce_ex__(4)
    found = sent["state"][0]["__bnb_optimizer_quant_state__"]["state1"]
    assert bits(found) == before
    assert found.data_ptr() != address


def test_too_little_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made("PagedAdamW8bit", SETTINGS["plain"])
    train(model, optimizer, range(2))
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    with pytest.raises(HostMemoryError, match="only 1,000 bytes"):
        copy.deepcopy((model, optimizer))
