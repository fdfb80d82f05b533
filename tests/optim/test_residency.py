"""State kept on the device under ``hbm_budget``: as promised, and with the same bits."""

from __future__ import annotations

import pytest

from pageahead import Paging
from pageahead.optim.paged import PagedOptimizer
from tests.support import (
    CLASSES,
    CPU,
    MIB,
    STRATEGIES,
    assert_same_bits,
    legacy,
    ours,
    parameters,
    paths,
    train,
)

SIZES = (100_000, 120_000, 50, 150_000, 100_000, 110_000, 200_000)
LARGE = sum(size for size in SIZES if size >= 100_000)


def resident_bytes(optimizer: PagedOptimizer) -> int:
    """State bytes of large parameters on the device, measured on the tensors themselves."""
    return sum(
        state[key].nbytes
        for parameter, state in optimizer.state.items()
        for key in ("state1", "state2")
        if key in state and parameter.numel() >= 100_000 and not in_arena(optimizer, state[key])
    )


def in_arena(optimizer: PagedOptimizer, tensor: object) -> bool:
    arena = optimizer._engines[CPU].arena
    assert arena is not None
    return any(
        segment.data_ptr() <= tensor.data_ptr() < segment.data_ptr() + segment.nbytes  # type: ignore[attr-defined]
        for segment in arena._segments
    )


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("budget", [0.4, 500_000])
def test_same_bits(name: str, budget: float) -> None:
    expected = legacy(name, parameters(*SIZES))
    optimizer = ours(name, parameters(*SIZES), paging=Paging(hbm_budget=budget, staging=MIB))
    for one in (expected, optimizer):
        train(one, range(2))
        train(one, [2], absent=[0, 3])
    assert {"resident", "streamed"} <= set(paths(optimizer))
    assert_same_bits(optimizer, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy: str) -> None:
    expected = legacy("PagedAdamW", parameters(*SIZES))
    paging = Paging(strategy=strategy, hbm_budget=0.5, staging=MIB)
    optimizer = ours("PagedAdamW", parameters(*SIZES), paging=paging)
    for one in (expected, optimizer):
        train(one, range(3))
    assert {"resident", strategy} == set(paths(optimizer))
    assert_same_bits(optimizer, expected)


@pytest.mark.parametrize("budget", [0, 0.0, 1, 0.2, 0.5, 0.9, 2_000_000, 1.0, 10**9])
def test_budget_is_kept_and_used(budget: float) -> None:
    optimizer = ours("PagedAdamW", parameters(*SIZES), paging=Paging(hbm_budget=budget))
    promised = [route.path for route in optimizer.routes()]
    train(optimizer, range(1))
    assert paths(optimizer) == promised
    total = 8 * LARGE
    allowed = budget * total if isinstance(budget, float) else budget
    held = resident_bytes(optimizer)
    assert held == sum(
        route.state_bytes
        for route in optimizer.routes()
        if route.path == "resident" and route.numel >= 100_000
    )
    assert held <= allowed
    assert min(allowed, total) - held <= 8 * max(SIZES)  # at most one parameter's worth is left
    if allowed >= total:
        assert set(paths(optimizer)) == {"resident"}


def test_small_parameters_do_not_count() -> None:
    optimizer = ours("PagedAdamW", parameters(*[90_000] * 5), paging=Paging(hbm_budget=0))
    train(optimizer, range(1))
    assert set(paths(optimizer)) == {"resident"}


def test_parameters_that_appear_later_get_what_is_left() -> None:
    paging = Paging(hbm_budget=1_700_000)
    optimizer = ours("PagedAdamW", parameters(*[100_000] * 5), paging=paging)
    train(optimizer, range(1), absent=[0, 1, 2, 3])
    assert paths(optimizer)[4] == "resident"
    train(optimizer, range(1, 2))
    assert resident_bytes(optimizer) == 1_600_000


def test_a_share_counts_a_parameter_listed_twice_once() -> None:
    found = parameters(100_000, 100_000)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = ours(
            "PagedAdamW", [found[0], found[0], found[1]], paging=Paging(hbm_budget=0.5)
        )
    train(optimizer, range(1))
    assert resident_bytes(optimizer) == 800_000


def test_frozen_parameters_do_not_count() -> None:
    found = parameters(*[100_000] * 4)
    for parameter in found[2:]:
        parameter.requires_grad_(False)
    optimizer = ours("PagedAdamW", found, paging=Paging(hbm_budget=0.5))
    train(optimizer, range(1), absent=[2, 3])
    assert resident_bytes(optimizer) == 800_000
