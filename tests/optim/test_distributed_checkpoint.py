"""`torch.distributed.checkpoint` of one process: as trainers use it, and used directly."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

from pageahead import Paging
from pageahead.optim import checkpoint
from pageahead.optim.fitting import WRAPPED, CheckpointError
from tests.support import CPU, MIB, assert_same_bits, bits, ours

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:.*TypedStorage", "ignore:.*synchronize_staging"
)

SETTINGS = {
    "plain": Paging(staging=MIB, hbm_budget=0),
    "overlap": Paging(staging=MIB, hbm_budget=0, write_back="overlap"),
    "in backward": Paging(staging=MIB, hbm_budget=0, in_backward=True),
    "budget": Paging(staging=MIB, hbm_budget=0.5),
}
FAMILIES = ("PagedAdamW8bit", "PagedAdamW32bit", "PagedLion8bit", "PagedAdEMAMix8bit")
FLAT = {"flatten_optimizer_state_dict": True}


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """Two paged weights, two small tensors, one frozen layer, one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(320, 320)
        self.frozen = nn.Linear(320, 320)
        self.frozen.requires_grad_(False)
        self.optional = nn.Linear(320, 320, bias=False)
        self.last = nn.Linear(320, 16)

    def forward(self, x: torch.Tensor, optional: bool) -> torch.Tensor:
        x = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        if optional:
            x = x + self.optional(x)
        out: torch.Tensor = self.last(x)
        return out


def made(name: str, paging: Paging, trained: int = 0, optional: bool = True) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = ours(name, groups, lr=1e-2, paging=paging)
    train(model, optimizer, range(trained), optional)
    return model, optimizer


def train(model: Net, optimizer: Any, steps: range, optional: bool = True) -> None:
    for step in steps:
        x = torch.randn(4, 320, generator=torch.Generator().manual_seed(step))
        model(x, optional).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def like(model: Net, name: str, paging: Paging, trained: int = 0) -> tuple[Net, Any]:
    """Another model with the same weights, whose optimizer has done something else before."""
    other, optimizer = made(name, paging, trained)
    other.load_state_dict(model.state_dict())
    return other, optimizer


@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "stepped"])
@pytest.mark.parametrize(
    "options",
    [{}, FLAT, {"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}],
    ids=["nested", "flat", "full", "full on the CPU"],
)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_pytorchs_helpers(
    name: str, settings: str, options: dict[str, bool], trained: int, tmp_path: Path
) -> None:
    paging, how = SETTINGS[settings], StateDictOptions(**options)
    model, optimizer = made(name, paging, trained=3)
    saved = get_optimizer_state_dict(model, optimizer, options=how)
    torch.save(saved, tmp_path / "optimizer.pt")
    other, resumed = like(model, name, paging, trained)
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    set_optimizer_state_dict(other, resumed, loaded, options=how)
    assert_same_bits(resumed, optimizer)
    for one, its in ((model, optimizer), (other, resumed)):
        train(one, its, range(3, 6))
    assert_same_bits(resumed, optimizer)


@pytest.mark.parametrize("options", [{}, FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_save_and_load_as_trainers_do(
    settings: str, options: dict[str, bool], tmp_path: Path
) -> None:
    paging, how = SETTINGS[settings], StateDictOptions(**options)
    model, optimizer = made("PagedAdamW8bit", paging, trained=3)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=how)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path)

    other, resumed = made("PagedAdamW8bit", paging)
    parts = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, resumed, options=how),
    }
    dcp.load(parts, checkpoint_id=tmp_path)
    other.load_state_dict(parts["model"])
    set_optimizer_state_dict(other, resumed, parts["optimizer"], options=how)
    assert_same_bits(resumed, optimizer)
    for one, its in ((model, optimizer), (other, resumed)):
        train(one, its, range(3, 6))
    assert_same_bits(resumed, optimizer)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("stateful", [False, True], ids=["its state dict", "the optimizer"])
def test_without_the_helpers(settings: str, stateful: bool, tmp_path: Path) -> None:
    """Then keys are numbers, which `load` gives back as text beside what it loads in place."""
    paging = SETTINGS[settings]
    model, optimizer = made("PagedAdamW8bit", paging, trained=3)
    part: Any = optimizer if stateful else optimizer.state_dict()
    dcp.save({"optimizer": part}, checkpoint_id=tmp_path)
    other, resumed = like(model, "PagedAdamW8bit", paging, trained=1)
    parts = {"optimizer": resumed if stateful else resumed.state_dict()}
    dcp.load(parts, checkpoint_id=tmp_path)
    if not stateful:
        resumed.load_state_dict(parts["optimizer"])
    assert_same_bits(resumed, optimizer)
    for one, its in ((model, optimizer), (other, resumed)):
        train(one, its, range(3, 6))
    assert_same_bits(resumed, optimizer)


class HeldPlanner(DefaultSavePlanner):
    """Reads nothing of what it saves before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        assert self.go.wait(60)
        return super().resolve_data(write_item)


@pytest.mark.parametrize("stager", [None, BlockingAsyncStager], ids=["default", "blocking"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_after_async_save_do_not_change_what_is_saved(
    settings: str, stager: Callable[[], Any] | None, tmp_path: Path
) -> None:
    paging = SETTINGS[settings]
    model, optimizer = made("PagedAdamW8bit", paging, trained=3)
    expected = copy.deepcopy(optimizer.state_dict())
    planner = HeldPlanner()
    future: Any = dcp.async_save(
        {"optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=tmp_path,
        planner=planner,
        **({} if stager is None else {"async_stager": stager()}),
    )
    train(model, optimizer, range(3, 6))
    optimizer.synchronize()
    planner.go.set()
    future.result()
    other, resumed = made("PagedAdamW8bit", paging)
    parts = {"optimizer": get_optimizer_state_dict(other, resumed)}
    dcp.load(parts, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, resumed, parts["optimizer"])
    found = resumed.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for key, entries in expected["state"].items():
        assert found["state"][key]["step"] == entries["step"] == 3
        for name, tensor in entries[WRAPPED].items():
            assert bits(found["state"][key][WRAPPED][name]) == bits(tensor), (key, name)


@pytest.mark.parametrize("options", [{}, FLAT], ids=["nested", "flat"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_state_of_some_parameters_only(settings: str, options: dict[str, bool]) -> None:
    """PyTorch makes state for all of them first, by a step without gradients."""
    how = StateDictOptions(strict=False, **options)  # strict=True wants all: PyTorch's own rule
    model, optimizer = made("PagedAdamW8bit", SETTINGS[settings], trained=3, optional=False)
    saved = get_optimizer_state_dict(model, optimizer, options=how)
    other, resumed = like(model, "PagedAdamW8bit", SETTINGS[settings])
    set_optimizer_state_dict(other, resumed, saved, options=how)
    assert other.optional.weight not in resumed.state
    assert_same_bits(resumed, optimizer)
    for one, its in ((model, optimizer), (other, resumed)):
        train(one, its, range(3, 6))
    assert_same_bits(resumed, optimizer)


def test_loading_makes_no_second_arena() -> None:
    """Though PyTorch's helper has made state already, for more parameters than are saved."""
    model, optimizer = made("PagedAdamW8bit", SETTINGS["plain"], trained=3, optional=False)
    saved = get_optimizer_state_dict(model, optimizer)
    other, resumed = like(model, "PagedAdamW8bit", SETTINGS["plain"], trained=1)
    arena = resumed._engines[CPU].arena
    held = arena.nbytes
    how = StateDictOptions(strict=False)
    set_optimizer_state_dict(other, resumed, saved, options=how)
    train(other, resumed, range(3, 6))
    assert resumed._engines[CPU].arena is arena
    assert arena.nbytes == held


def test_state_dict_is_flat_only_where_pytorch_flattens_it() -> None:
    model, optimizer = made("PagedAdamW8bit", SETTINGS["plain"], trained=1)
    assert not checkpoint.will_be_flat()
    nested = get_optimizer_state_dict(model, optimizer)
    assert WRAPPED in nested["state"]["first.weight"]
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**FLAT))
    assert "state.first.weight.state1" in flat
    assert not any(WRAPPED in key for key in flat)
    assert WRAPPED in optimizer.state_dict()["state"][0]


def test_a_flat_state_dict_that_lost_its_tensors_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As bitsandbytes' optimizers save it; PyTorch finds nothing in it on the way back."""
    how = StateDictOptions(**FLAT)
    model, optimizer = made("PagedAdamW8bit", SETTINGS["plain"], trained=1)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "will_be_flat", lambda: False)
        saved = get_optimizer_state_dict(model, optimizer, options=how)
    with pytest.raises(CheckpointError, match=r"nothing is left of \['absmax1'.*flat state dict"):
        set_optimizer_state_dict(model, optimizer, saved, options=how)
