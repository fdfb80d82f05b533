"""The first rule: the same bits as bitsandbytes, whatever moves the state and however it is cut."""

from __future__ import annotations

import inspect

import bitsandbytes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pageahead
from pageahead import Paging
from pageahead.optim import plan as plan_module
from pageahead.optim.paged import PagedOptimizer
from tests.support import (
    CLASSES,
    MIB,
    STRATEGIES,
    TINY_RING,
    assert_same_bits,
    chunk_count,
    is_cut,
    legacy,
    ours,
    set_gradients,
    train,
)
from tests.support import parameters as make_parameters

# Around bitsandbytes' limits of 4,096 (8-bit) and 100,000 elements (paged), most of them no
# multiple of 256, the 8-bit block; the last is cut into slices whatever the class.
SIZES = (
    99_999,
    100_000,
    (),
    (17, 6_001),
    4_095,
    100_001,
    4_096,
    (2, 3, 25_600),
    0,
    1,
    300_001,
)
STEPS = 6


def absent(step: int) -> set[int]:
    """Parameters without a gradient: different ones at each step, and all of them return."""
    return {number for number in range(len(SIZES)) if (number + 2 * step) % 5 == 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_equals_legacy(name: str, dtype: torch.dtype) -> None:
    expected = legacy(name, make_parameters(*SIZES, dtype=dtype), lr=1e-2)
    arms = [
        ours(
            name,
            make_parameters(*SIZES, dtype=dtype),
            lr=1e-2,
            paging=Paging(strategy=strategy, staging=MIB),
        )
        for strategy in STRATEGIES
    ]
    for step in range(STEPS):
        for optimizer in (expected, *arms):
            train(optimizer, [step], absent(step))
        if step in (0, STEPS - 1):
            for arm in arms:
                assert_same_bits(arm, expected)
    for arm, strategy in zip(arms, STRATEGIES, strict=True):
        large = [route for route in arm.routes() if route.numel >= 100_000]
        assert [route.path for route in large] == [strategy] * 5
    assert is_cut(arms[0])


@given(
    name=st.sampled_from(CLASSES),
    sizes=st.lists(st.integers(100_000, 180_000), min_size=1, max_size=3),
    strategy=st.sampled_from(STRATEGIES),
    seed=st.integers(0, 1_000),
)
@settings(max_examples=20, deadline=None)
def test_random_sizes_equal_legacy(name: str, sizes: list[int], strategy: str, seed: int) -> None:
    expected = legacy(name, make_parameters(*sizes, seed=seed))
    mine = ours(
        name, make_parameters(*sizes, seed=seed), paging=Paging(strategy=strategy, staging=MIB)
    )
    for optimizer in (expected, mine):
        train(optimizer, range(seed, seed + 2))
    assert_same_bits(mine, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_hyperparameters_reach_the_kernels(name: str) -> None:
    betas = (0.8, 0.95, 0.97) if "AdEMAMix" in name else (0.8, 0.95)
    settings = {"lr": 3e-2, "betas": betas, "weight_decay": 0.1}
    if "Lion" not in name:
        settings["eps"] = 1e-3
    if "AdEMAMix" in name:
        settings["alpha"] = 2.5
    expected, mine = (
        make(name, make_parameters(120_000, 50), **settings) for make in (legacy, ours)
    )
    plain = ours(name, make_parameters(120_000, 50))
    for optimizer in (expected, mine, plain):
        train(optimizer, range(4))
    assert_same_bits(mine, expected)
    assert not torch.equal(plain.param_groups[0]["params"][0], mine.param_groups[0]["params"][0])


@pytest.mark.parametrize("name", ["PagedAdEMAMix", "PagedAdEMAMix8bit", "PagedAdEMAMix32bit"])
@pytest.mark.parametrize(
    "schedules",
    [{"t_alpha": 4}, {"t_beta3": 4}, {"t_alpha": 5, "t_beta3": 3}],
    ids=["t_alpha", "t_beta3", "both"],
)
def test_ademamix_warms_up(name: str, schedules: dict[str, int]) -> None:
    """Over the end of the schedules; the constant hyperparameters give other bits."""
    expected, mine, constant = (
        legacy(name, make_parameters(120_000, 300), **schedules),
        ours(name, make_parameters(120_000, 300), paging=TINY_RING, **schedules),
        ours(name, make_parameters(120_000, 300)),
    )
    for optimizer in (expected, mine, constant):
        train(optimizer, range(7))
    assert_same_bits(mine, expected)
    one, other = (
        optimizer.state[optimizer.param_groups[0]["params"][0]]["state1"]
        for optimizer in (mine, constant)
    )
    same_moments = torch.equal(one, other)
    assert same_moments == ("t_beta3" not in schedules)
    assert not torch.equal(mine.param_groups[0]["params"][0], constant.param_groups[0]["params"][0])


def test_paged_ademamix_32bit_equals_ademamix_of_32_bits() -> None:
    """bitsandbytes' own class has a `state1` of half the size and no schedules."""
    expected = bitsandbytes.optim.AdEMAMix(make_parameters(130_000), optim_bits=32)
    other = pageahead.PagedAdEMAMix(make_parameters(130_000), optim_bits=32)
    mine = pageahead.PagedAdEMAMix32bit(make_parameters(130_000), paging=TINY_RING)
    for optimizer in (expected, other, mine):
        train(optimizer, range(5))
    assert_same_bits(mine, expected)
    assert_same_bits(other, expected)
    (state,) = mine.state.values()
    assert state["state1"].shape == (2, 130_000)


@pytest.mark.parametrize("optim_bits", [8, 32])
def test_ademamix_with_two_betas(optim_bits: int) -> None:
    """bitsandbytes takes a third of 0 then."""
    settings = {"betas": (0.9, 0.999), "optim_bits": optim_bits}
    expected, mine = (
        make("PagedAdEMAMix", make_parameters(120_000), **settings) for make in (legacy, ours)
    )
    for optimizer in (expected, mine):
        train(optimizer, range(2))
    assert_same_bits(mine, expected)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("whole", [True, False], ids=["resident", "streamed"])
def test_many_launches_of_one_slice_equal_one(
    name: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bitsandbytes counts in an int32: larger slices take several launches."""
    paging = Paging(hbm_budget=1.0 if whole else 0, staging=MIB)
    expected = ours(name, make_parameters(130_001), paging=paging)
    train(expected, range(3))
    monkeypatch.setattr(plan_module, "MAX_LAUNCH", 256 * 30)
    mine = ours(name, make_parameters(130_001), paging=paging)
    train(mine, range(3))
    assert mine.routes()[0].path == ("resident" if whole else "streamed")
    assert_same_bits(mine, expected)


def test_small_parameters_travel_together() -> None:
    mine = ours("PagedLion8bit", make_parameters(*[100_000] * 10), paging=Paging(staging=4 * MIB))
    train(mine, range(1))
    assert chunk_count(mine) == 1


@pytest.mark.parametrize("name", CLASSES)
def test_classes_are_bitsandbytes_own_with_one_keyword_more(name: str) -> None:
    mine, theirs = getattr(pageahead, name), getattr(bitsandbytes.optim, name)
    assert issubclass(mine, PagedOptimizer)
    assert issubclass(mine, theirs)
    own, base = inspect.signature(mine), inspect.signature(theirs)
    assert list(own.parameters.values())[:-1] == list(base.parameters.values())
    assert own.parameters["paging"].kind is inspect.Parameter.KEYWORD_ONLY
    assert own.parameters["paging"].default is None


def test_positional_arguments_are_bitsandbytes_own() -> None:
    expected = bitsandbytes.optim.AdamW(make_parameters(120_000), 1e-2, (0.5, 0.9), 1e-6, 0.2)
    mine = pageahead.PagedAdamW(make_parameters(120_000), 1e-2, (0.5, 0.9), 1e-6, 0.2)
    for optimizer in (expected, mine):
        set_gradients(optimizer.param_groups[0]["params"], 0)
        optimizer.step()
    assert_same_bits(mine, expected)
