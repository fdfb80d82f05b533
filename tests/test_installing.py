"""`install`: bitsandbytes' own classes, asked for paging, make optimizers that are ours."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.optim.optimizer import Optimizer1State, Optimizer2State

import pageahead
from pageahead import installing
from pageahead.optim.paged import PagedOptimizer
from tests.support import (
    CLASSES,
    FAMILIES,
    assert_same_bits,
    legacy,
    parameters,
    paths,
    set_gradients,
    train,
)

bnb = bitsandbytes.optim
SIZES = (100_000, 5_000, 300)
UNPAGED = [f"{family}{bits}" for family in FAMILIES for bits in ("", "8bit", "32bit")]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(installing, "_said", set())
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    pageahead.install()
    yield
    pageahead.uninstall()


class Renamed(bnb.AdamW):
    """A subclass that decides on paging itself, and relies on nothing that we replace."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, optim_bits=8, is_paged=True)
        self.note = "kept"

    def describe(self) -> str:
        return f"{self.note} at {self.param_groups[0]['lr']}"


class OwnUpdate(bnb.AdamW):
    def update_step(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
        p.grad.zero_()
        super().update_step(group, p, gindex, pindex)


class StepMixin:
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)  # type: ignore[misc]


class MixedIn(StepMixin, bnb.Lion):
    pass


class HidesOurs(bnb.Adam):
    def release(self) -> str:
        return "mine"


class Lamb(Optimizer2State):
    def __init__(self, params: Any) -> None:
        super().__init__("lamb", params, is_paged=True)


@pytest.mark.parametrize("name", [*UNPAGED, *CLASSES])
def test_every_class_gives_ours_with_the_same_bits(name: str) -> None:
    kind = getattr(bnb, name)
    asked = {} if name.startswith("Paged") else {"is_paged": True}
    mine, theirs = parameters(*SIZES), parameters(*SIZES)
    optimizer, expected = kind(mine, lr=1e-2, **asked), legacy(name, theirs, lr=1e-2)
    assert isinstance(optimizer, PagedOptimizer)
    assert isinstance(optimizer, kind)
    assert str(optimizer.__class__) == str(kind)
    assert "bitsandbytes" in str(optimizer.__class__)
    assert inspect.signature(optimizer.__class__) == inspect.signature(kind)
    for one in (optimizer, expected):
        train(one, range(3))
    assert paths(optimizer) == ["streamed", "resident", "resident"]
    assert_same_bits(optimizer, expected)


def test_not_paged_stays_as_it_is() -> None:
    optimizer = bnb.AdamW(parameters(*SIZES), is_paged=False)
    assert type(optimizer) is bnb.AdamW
    train(optimizer, range(1))


def test_ours_made_directly_is_not_made_ours_again() -> None:
    paging = pageahead.Paging(staging=1 << 21)
    optimizer = pageahead.PagedAdamW(parameters(*SIZES), paging=paging)
    assert type(optimizer) is pageahead.PagedAdamW
    assert optimizer.paging is paging


def test_one_line_for_the_first_that_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    bnb.AdamW(parameters(*SIZES), optim_bits=8, is_paged=True)
    bnb.PagedLion(parameters(*SIZES))
    assert capsys.readouterr().err == (
        "pageahead: replaced bitsandbytes' paged optimizer: bitsandbytes.optim.adamw.AdamW, 8-bit, "
        f"is now paged by pageahead {pageahead.__version__} (streamed)\n"
    )


def test_other_ranks_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert isinstance(bnb.PagedAdam(parameters(*SIZES)), PagedOptimizer)
    assert capsys.readouterr().err == ""


def test_a_subclass_from_elsewhere_is_included() -> None:
    mine, theirs = parameters(*SIZES), parameters(*SIZES)
    optimizer = Renamed(mine, 1e-2)
    assert isinstance(optimizer, PagedOptimizer)
    assert optimizer.describe() == "kept at 0.01"
    assert str(type(optimizer)) == str(Renamed)
    expected = bnb.AdamW(theirs, lr=1e-2, optim_bits=8)
    for one in (optimizer, expected):
        train(one, range(3))
    assert_same_bits(optimizer, expected)


def test_what_pytorch_leaves_in_a_class_is_not_its_own_method() -> None:
    class Late(Optimizer2State):
        def __init__(self, params: Any, is_paged: bool) -> None:
            super().__init__("adam", params, is_paged=is_paged)

    Late(parameters(*SIZES), is_paged=False)
    assert "step" in vars(Late)  # PyTorch's hooks around bitsandbytes' step
    assert isinstance(Late(parameters(*SIZES), is_paged=True), PagedOptimizer)


@pytest.mark.parametrize(
    ("kind", "method"),
    [(OwnUpdate, "update_step"), (MixedIn, "step"), (HidesOurs, "release")],
)
def test_a_subclass_with_a_method_that_paging_relies_on_is_left_alone(
    kind: Any, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        optimizer = kind(parameters(*SIZES), is_paged=True)
        assert type(optimizer) is kind
        with pytest.warns(UserWarning, match="not supported on CPU"):
            train(optimizer, range(1))
    text = f"{kind.__module__}.{kind.__qualname__}"
    assert capsys.readouterr().err == (f"pageahead: left alone: {text}: it has its own {method}\n")


def test_another_family_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert type(Lamb(parameters(*SIZES))) is Lamb
    assert capsys.readouterr().err == (
        f"pageahead: left alone: {__name__}.Lamb: its update is 'lamb'; "
        "pageahead has adam, ademamix, lion\n"
    )


def test_installing_twice_and_uninstalling() -> None:
    pageahead.install()
    pageahead.uninstall()
    assert not hasattr(Optimizer1State.__init__, "__wrapped__")
    assert not hasattr(Optimizer2State.__init__, "__wrapped__")
    assert type(bnb.PagedAdamW(parameters(*SIZES))) is bnb.PagedAdamW
    pageahead.uninstall()
    pageahead.install()
    assert isinstance(bnb.PagedAdamW(parameters(*SIZES)), PagedOptimizer)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEAHEAD_STRATEGY", "sequential")
    optimizer = bnb.PagedAdamW(parameters(*SIZES))
    train(optimizer, range(1))
    assert paths(optimizer)[0] == "sequential"


def test_a_wrong_setting_is_named_at_once_and_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pageahead.uninstall()
    monkeypatch.setenv("PAGEAHEAD_STAGING", "3")
    with pytest.raises(ValueError, match=r"staging=3 is too small"):
        pageahead.install()
    assert not hasattr(Optimizer2State.__init__, "__wrapped__")


def test_errors_are_bitsandbytes_own() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        bnb.AdamW(parameters(*SIZES), lr=-1.0, is_paged=True)
    with pytest.raises(TypeError, match="nonsense"):
        bnb.AdamW(parameters(*SIZES), nonsense=1, is_paged=True)
    with pytest.raises(TypeError, match="required positional argument"):
        Optimizer2State(is_paged=True)
    with pytest.raises(ValueError, match="empty parameter list"):
        bnb.AdamW([], is_paged=True)


def test_hooks_and_schedulers_work_as_on_any_optimizer() -> None:
    listed = parameters(*SIZES)
    optimizer = bnb.PagedAdamW(listed, lr=1.0)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    set_gradients(listed, 0)
    optimizer.step()
    scheduler.step()
    assert seen == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert paths(optimizer)[0] == "streamed"


def test_its_class_makes_what_the_original_would() -> None:
    ours = bnb.AdamW(parameters(*SIZES), is_paged=True)
    kind: Any = type(ours)
    assert type(kind(parameters(*SIZES))) is bnb.AdamW
    assert type(kind(parameters(*SIZES), is_paged=True)) is kind

    class Below(kind):
        pass

    assert isinstance(Below(parameters(*SIZES), is_paged=True), Below)


def test_a_deep_copy_is_ours_too() -> None:
    optimizer = bnb.PagedAdamW(parameters(*SIZES), lr=0.25)
    train(optimizer, range(1))
    copied = copy.deepcopy(optimizer)
    assert type(copied) is type(optimizer)
    assert_same_bits(copied, optimizer)
    for one in (optimizer, copied):
        train(one, range(1, 3))
    assert_same_bits(copied, optimizer)


def test_what_is_pickled_is_bitsandbytes_own() -> None:
    """A class that was made for the purpose cannot be imported where it is unpickled."""
    optimizer = bnb.PagedAdamW(parameters(*SIZES), lr=0.25)
    train(optimizer, range(1))
    copied = pickle.loads(pickle.dumps(optimizer))
    assert type(copied) is bnb.PagedAdamW
    assert copied.param_groups[0]["lr"] == 0.25
    first, second = (next(iter(one.state.values())) for one in (optimizer, copied))
    assert torch.equal(first["state1"], second["state1"])
    assert first["state1"].data_ptr() != second["state1"].data_ptr()


def test_groups_that_are_added_later() -> None:
    mine, theirs = parameters(*SIZES), parameters(*SIZES)
    optimizer, expected = bnb.PagedAdamW(mine[:1]), legacy("PagedAdamW", theirs[:1])
    for one, listed in ((optimizer, mine), (expected, theirs)):
        one.add_param_group({"params": listed[1:], "lr": 0.1})
        train(one, range(2))
    assert_same_bits(optimizer, expected)


def test_updates_in_backward_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEAHEAD_IN_BACKWARD", "1")
    mine, theirs = parameters(*SIZES), parameters(*SIZES)
    optimizer, expected = bnb.PagedAdamW(mine), legacy("PagedAdamW", theirs)
    for listed in (mine, theirs):
        sum((one**2).sum() for one in listed).backward()
    before = mine[0].detach().clone()
    assert not torch.equal(before, parameters(*SIZES)[0])  # backward has updated it already
    optimizer.step()
    expected.step()
    assert_same_bits(optimizer, expected)
