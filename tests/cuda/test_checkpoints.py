"""Checkpoints on a GPU: interchange, where loaded state lives, memory, and saving beside steps."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from pageahead import Paging
from pageahead.optim.checkpoint import unwrapped
from pageahead.optim.fitting import WRAPPED
from tests.cuda.support import ALIGNED, bits_of, candidate, differences, legacy, parameters

MIB = 1 << 20
FAMILIES = ("Adam", "AdamW", "Lion", "AdEMAMix")
DEVICE = "cuda"

SETTINGS = {
    "plain": Paging(staging=MIB, hbm_budget=0),
    "overlap": Paging(staging=MIB, hbm_budget=0, write_back="overlap"),
    "in backward": Paging(staging=MIB, hbm_budget=0, in_backward=True),
    "budget": Paging(staging=MIB, hbm_budget=0.5),
    "auto": Paging(staging=MIB, hbm_budget="auto"),
}

FORMS = {"wrapped": lambda saved: saved, "unwrapped": unwrapped}


def listed(optimizer: Any) -> list[torch.nn.Parameter]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def train(optimizer: Any, steps: Iterable[int]) -> None:
    """Step over seeded gradients that come by a backward."""
    for step in steps:
        loss = torch.zeros((), device=DEVICE)
        for number, parameter in enumerate(listed(optimizer)):
            generator = torch.Generator(DEVICE).manual_seed(1_000 * step + number)
            gradient = torch.randn(parameter.shape, generator=generator, device=DEVICE)
            # Its gradient is exactly that, whatever the sum is.
            loss = loss + (parameter * (0.1 * gradient).to(parameter.dtype)).sum().float()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def same_weights(optimizer: Any) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(one.detach().clone()) for one in listed(optimizer)]


def assert_same(one: Any, other: Any) -> None:
    for optimizer in (one, other):
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
    torch.cuda.synchronize()
    assert differences(one, listed(one), other, listed(other)) == []


def through_a_file(saved: dict[str, Any], path: Path, where: str) -> Any:
    torch.save(saved, path / "optimizer.pt")
    return torch.load(path / "optimizer.pt", map_location=where, weights_only=True)


# --- interchange ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["paged", "non-paged"])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_interchange(
    family: str, bits: int, kind: str, where: str, form: str, tmp_path: Path
) -> None:
    """Sizes are multiples of 256: others make bitsandbytes' 8-bit AdEMAMix race with itself."""
    name = f"Paged{family}" if kind == "paged" else family
    paging = SETTINGS["plain"]
    mine = candidate(f"Paged{family}", parameters(ALIGNED, torch.bfloat16), bits, paging)
    theirs = legacy(name, parameters(ALIGNED, torch.bfloat16), bits)
    for optimizer in (mine, theirs):
        train(optimizer, range(3))
    assert_same(mine, theirs)

    from_theirs = candidate(f"Paged{family}", same_weights(theirs), bits, paging, lr=1.0)
    from_theirs.load_state_dict(through_a_file(FORMS[form](theirs.state_dict()), tmp_path, where))
    from_mine = legacy(name, same_weights(mine), bits)
    from_mine.load_state_dict(through_a_file(FORMS[form](mine.state_dict()), tmp_path, where))
    assert_same(from_theirs, theirs)
    paged = [route.path == "streamed" for route in from_theirs.routes()]
    assert paged == [one.numel() >= 100_000 for one in listed(mine)]
    for optimizer in (mine, theirs, from_theirs, from_mine):
        train(optimizer, range(3, 6))
    for optimizer in (mine, from_theirs, from_mine):
        assert_same(optimizer, theirs)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_resume_equals_the_uninterrupted_run(
    family: str, bits: int, where: str, settings: str, tmp_path: Path
) -> None:
    paging = SETTINGS[settings]
    uninterrupted = candidate(f"Paged{family}", parameters(ALIGNED, torch.float16), bits, paging)
    train(uninterrupted, range(3))
    weights = same_weights(uninterrupted)
    saved = through_a_file(uninterrupted.state_dict(), tmp_path, where)
    train(uninterrupted, range(3, 6))
    resumed = candidate(f"Paged{family}", weights, bits, paging)
    resumed.load_state_dict(saved)
    del saved
    train(resumed, range(3, 6))
    assert_same(resumed, uninterrupted)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_going_back_to_a_checkpoint_in_the_same_run(
    where: str, settings: str, tmp_path: Path
) -> None:
    optimizer = candidate("PagedAdamW", parameters(ALIGNED, torch.float16), 8, SETTINGS[settings])
    train(optimizer, range(3))
    weights = same_weights(optimizer)
    saved = through_a_file(optimizer.state_dict(), tmp_path, where)
    train(optimizer, range(3, 6))
    expected = same_weights(optimizer)
    train(optimizer, range(10, 12))
    with torch.no_grad():
        for parameter, weight in zip(listed(optimizer), weights, strict=True):
            parameter.copy_(weight)
    optimizer.load_state_dict(saved)
    train(optimizer, range(3, 6))
    for parameter, weight in zip(listed(optimizer), expected, strict=True):
        assert torch.equal(bits_of(parameter), bits_of(weight))


# --- memory ---------------------------------------------------------------------------------------

NUMEL = 4 * MIB
COUNT = 16


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def many() -> list[torch.nn.Parameter]:
    return parameters([(NUMEL,)] * COUNT + [(4096,)] * 4, torch.float16)


@pytest.mark.parametrize("again", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("bits", [8, 32])
def test_loading_takes_no_device_memory_for_paged_state(
    bits: int, where: str, again: bool, tmp_path: Path
) -> None:
    """512 MiB of 32-bit state, or 128 MiB of 8-bit state with 4 MiB of absmax that stay there."""
    paging = Paging(hbm_budget=0, staging=32 * MIB)
    uninterrupted = candidate("PagedAdamW", many(), bits, paging)
    train(uninterrupted, range(2))
    torch.save(uninterrupted.state_dict(), tmp_path / "optimizer.pt")
    weights = [one.detach().cpu() for one in listed(uninterrupted)]
    train(uninterrupted, range(2, 4))
    expected = [bits_of(one) for one in listed(uninterrupted)]
    del uninterrupted

    empty = allocated()
    found = [torch.nn.Parameter(weight.to(DEVICE)) for weight in weights]
    resumed = candidate("PagedAdamW", found, bits, paging)
    if again:
        train(resumed, range(7, 8))
        with torch.no_grad():
            for parameter, weight in zip(found, weights, strict=True):
                parameter.copy_(weight)
    of_parameters = sum(one.nbytes for one in found)
    small = 2 * 4 * NUMEL // 256 * COUNT if bits == 8 else 0  # absmax
    small += 4 * 2 * 4 * 4096 + 2 * MIB  # small parameters' state, qmaps; rounding

    checkpoint = torch.load(tmp_path / "optimizer.pt", map_location=where, weights_only=True)
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    resumed.load_state_dict(checkpoint)
    assert torch.cuda.max_memory_allocated() - before <= small
    del checkpoint
    slots = resumed.residency().slots
    assert slots == 0 or again
    assert allocated() - empty <= of_parameters + slots + small
    assert {route.path for route in resumed.routes() if route.numel >= 100_000} == {"streamed"}

    train(resumed, range(2, 4))
    slots = resumed.residency().slots
    assert 0 < slots <= 32 * MIB
    assert allocated() - empty <= of_parameters + slots + small
    for parameter, theirs in zip(found, expected, strict=True):
        assert torch.equal(bits_of(parameter), theirs)


def test_saving_takes_no_device_memory(tmp_path: Path) -> None:
    optimizer = candidate("PagedAdamW", many(), 32, Paging(hbm_budget=0, staging=32 * MIB))
    train(optimizer, range(2))
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert torch.cuda.max_memory_allocated() - before <= MIB
    state = sum(
        tensor.nbytes
        for entries in optimizer.state_dict()["state"].values()
        for tensor in entries[WRAPPED].values()
    )
    assert state < (tmp_path / "optimizer.pt").stat().st_size < state + MIB


def test_a_file_is_as_large_as_its_tensors_after_state_has_moved(tmp_path: Path) -> None:
    optimizer = candidate("PagedAdamW", many(), 32, Paging(hbm_budget=0.5, staging=32 * MIB))
    train(optimizer, range(2))
    for _ in range(2):
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        state = optimizer.residency().resident + optimizer.residency().host
        assert state < (tmp_path / "optimizer.pt").stat().st_size < state + MIB
        assert optimizer.release(64 * MIB)


# --- torch.distributed.checkpoint -----------------------------------------------------------------


class HeldPlanner(DefaultSavePlanner):
    """Reads nothing of what it saves before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        assert self.go.wait(60)
        return super().resolve_data(write_item)


@pytest.mark.parametrize("stager", ["default", "blocking, page-locked cache"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_after_async_save_do_not_change_what_is_saved(
    settings: str, stager: str, tmp_path: Path
) -> None:
    """State in page-locked host memory is on the CPU already: it must be copied all the same."""
    optimizer = candidate("PagedAdamW", parameters(ALIGNED, torch.float16), 8, SETTINGS[settings])
    train(optimizer, range(3))
    saved = optimizer.state_dict()
    expected = copy.deepcopy(saved)
    planner = HeldPlanner()
    chosen = {} if stager == "default" else {"async_stager": BlockingAsyncStager(True)}
    future: Any = dcp.async_save(
        {"optimizer": saved}, checkpoint_id=tmp_path, planner=planner, no_dist=True, **chosen
    )
    train(optimizer, range(3, 6))
    optimizer.synchronize()
    planner.go.set()
    future.result()
    resumed = candidate("PagedAdamW", parameters(ALIGNED, torch.float16), 8, SETTINGS[settings])
    train(resumed, range(1))
    parts = {"optimizer": resumed.state_dict()}
    dcp.load(parts, checkpoint_id=tmp_path, no_dist=True)
    resumed.load_state_dict(parts["optimizer"])
    found = resumed.state_dict()
    for key, entries in expected["state"].items():
        assert found["state"][key]["step"] == entries["step"] == 3
        for name, tensor in entries[WRAPPED].items():
            assert torch.equal(bits_of(found["state"][key][WRAPPED][name]), bits_of(tensor)), name


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_pytorchs_helpers(settings: str, flat: bool) -> None:
    how = StateDictOptions(flatten_optimizer_state_dict=flat)
    paging = SETTINGS[settings]
    model = torch.nn.ParameterList(parameters(ALIGNED, torch.bfloat16))
    optimizer = candidate("PagedAdamW", list(model), 8, paging)
    train(optimizer, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=how))
    other = torch.nn.ParameterList(same_weights(optimizer))
    resumed = candidate("PagedAdamW", list(other), 8, paging)
    set_optimizer_state_dict(other, resumed, saved, options=how)
    assert_same(resumed, optimizer)
    for one in (optimizer, resumed):
        train(one, range(3, 6))
    assert_same(resumed, optimizer)


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_deep_copy_goes_on_like_the_original(settings: str) -> None:
    optimizer = candidate("PagedAdamW", parameters(ALIGNED, torch.float16), 8, SETTINGS[settings])
    train(optimizer, range(3))
    copied = copy.deepcopy(optimizer)
    assert_same(copied, optimizer)
    for one in (optimizer, copied):
        train(one, range(3, 6))
    assert_same(copied, optimizer)
