"""`routes()`: for each parameter where its state lives, and a reason that a user can read."""

from __future__ import annotations

import warnings

import pytest
import torch
from bitsandbytes.optim.optimizer import MockArgs

from pageahead import Paging, Route
from pageahead.device.cpu import CpuDevice
from pageahead.optim.active import Active
from pageahead.optim.engine import Engine, Mode
from pageahead.optim.homes import Home
from pageahead.optim.paged import PagedOptimizer
from pageahead.optim.routing import choose, state_dtype, state_shape
from tests.support import (
    CPU,
    STRATEGIES,
    assert_same_bits,
    cpu_device,
    legacy,
    ours,
    parameters,
    paths,
    train,
)

SMALL = "under 100,000 elements, where paging would cost more than it saves"
LARGE = "100,000 elements or more"
PLANNED = " (planned: it has no state yet)"


def reasons(optimizer: PagedOptimizer) -> list[str]:
    return [route.reason for route in optimizer.routes()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_size_decides(strategy: str) -> None:
    optimizer = ours(
        "PagedAdamW",
        parameters(99_999, 100_000, (250, 400), 0, 7),
        paging=Paging(strategy=strategy),
    )
    expected = ["resident", strategy, strategy, "resident", "resident"]
    assert paths(optimizer) == expected
    assert reasons(optimizer) == [
        reason + PLANNED for reason in (SMALL, LARGE, LARGE, SMALL, SMALL)
    ]
    train(optimizer, range(1))
    assert paths(optimizer) == expected
    assert reasons(optimizer) == [SMALL, LARGE, LARGE, SMALL, SMALL]


def test_a_route_says_which_parameter_it_is_about() -> None:
    optimizer = ours(
        "PagedAdEMAMix8bit",
        [{"params": parameters(10)}, {"params": parameters(3, (500, 300))}],
    )
    train(optimizer, range(1))
    assert optimizer.routes()[2] == Route(
        group=1,
        index=1,
        shape=(500, 300),
        numel=150_000,
        device="cpu",
        state_bytes=3 * 150_000,
        path="streamed",
        reason=LARGE,
    )
    assert [(route.group, route.index) for route in optimizer.routes()] == [(0, 0), (1, 0), (1, 1)]
    assert optimizer.routes()[0].state_bytes == 3 * 4 * 10  # too small for 8 bits


@pytest.mark.parametrize(
    ("name", "per_element"),
    [
        ("PagedAdamW32bit", 8),
        ("PagedAdamW8bit", 2),
        ("PagedLion32bit", 4),
        ("PagedLion8bit", 1),
        ("PagedAdEMAMix32bit", 12),
        ("PagedAdEMAMix8bit", 3),
    ],
)
def test_state_bytes_are_those_of_the_state_tensors(name: str, per_element: int) -> None:
    optimizer = ours(name, parameters(120_000))
    assert optimizer.routes()[0].state_bytes == 120_000 * per_element
    train(optimizer, range(1))
    (state,) = optimizer.state.values()
    held = sum(state[key].nbytes for key in ("state1", "state2") if key in state)
    assert optimizer.routes()[0].state_bytes == held == 120_000 * per_element


def test_planning_makes_no_state() -> None:
    optimizer = ours("PagedAdamW", parameters(120_000))
    optimizer.routes()
    assert not optimizer.state
    assert not optimizer._engines


def test_frozen_parameters() -> None:
    found = parameters(120_000, 10)
    found[0].requires_grad_(False)
    route = ours("PagedAdamW", found).routes()[0]
    assert (route.path, route.reason) == ("none", "frozen: no gradient, no state")
    assert route.state_bytes == 0


def test_a_parameter_without_gradients_stays_planned() -> None:
    optimizer = ours("PagedAdamW", parameters(120_000, 130_000))
    train(optimizer, range(1), absent=[1])
    assert reasons(optimizer) == [LARGE, LARGE + PLANNED]


def test_budget_in_the_reason() -> None:
    optimizer = ours("PagedAdamW", parameters(*[100_000] * 4), paging=Paging(hbm_budget=0.5))
    train(optimizer, range(1))
    assert paths(optimizer) == ["resident", "streamed", "resident", "streamed"]
    assert set(reasons(optimizer)) == {
        "within hbm_budget=0.5",
        "100,000 elements or more, beyond hbm_budget=0.5",
    }


def test_limited_update_norm() -> None:
    args = MockArgs(
        {"optim_bits": 32, "min_8bit_size": 4096, "max_unorm": 1.0, "skip_zeros": False}
    )
    optimizer = ours(
        "PagedAdamW", parameters(120_000, 5), args=args, paging=Paging(hbm_budget=2_000_000)
    )
    assert reasons(optimizer) == [
        "max_unorm limits the norm of the whole update" + PLANNED,
        SMALL + PLANNED,
    ]


def test_lookahead_with_one_active_parameter_is_sequential() -> None:
    one_only = "one active parameter: there is no next one to look ahead to"
    lookahead = Paging(strategy="lookahead")
    expected = legacy("PagedAdamW", parameters(120_000, 130_000, 10))
    optimizer = ours("PagedAdamW", parameters(120_000, 130_000, 10), paging=lookahead)
    for one in (expected, optimizer):
        train(one, [0], absent=[1])
    assert paths(optimizer)[0] == "sequential"
    assert reasons(optimizer)[0] == one_only
    for one in (expected, optimizer):
        train(one, [1])
    assert paths(optimizer) == ["lookahead", "lookahead", "resident"]
    assert reasons(optimizer)[:2] == [LARGE, LARGE]
    assert_same_bits(optimizer, expected)


def test_lookahead_without_concurrent_access_is_sequential_and_warns_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    obstacle = "this GPU has no concurrent managed access"
    monkeypatch.setattr(CpuDevice, "lookahead_obstacle", lambda self: obstacle)
    synchronized: list[int] = []
    monkeypatch.setattr(CpuDevice, "synchronize", lambda self: synchronized.append(1))
    expected = legacy("PagedAdamW8bit", parameters(120_000, 130_000))
    optimizer = ours(
        "PagedAdamW8bit", parameters(120_000, 130_000), paging=Paging(strategy="lookahead")
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(optimizer, range(3))
    assert [str(warning.message) for warning in caught] == [
        f"strategy='lookahead' runs as 'sequential': {obstacle}"
    ]
    assert caught[0].category is RuntimeWarning
    assert paths(optimizer) == ["sequential"] * 2
    assert reasons(optimizer) == [obstacle] * 2
    assert len(synchronized) == 6  # after each of two parameters in three steps
    train(expected, range(3))
    assert_same_bits(optimizer, expected)


@pytest.mark.parametrize("strategy", ["streamed", "sequential"])
def test_other_strategies_do_not_ask_for_concurrent_access(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "lookahead_obstacle", lambda self: "no")
    optimizer = ours("PagedAdamW", parameters(120_000, 130_000), paging=Paging(strategy=strategy))
    train(optimizer, range(1))
    assert paths(optimizer) == [strategy] * 2


def test_lookahead_over_several_devices_is_sequential() -> None:
    engine = Engine(cpu_device(), "adam", Paging(strategy="lookahead"))
    shape = state_shape("adam", torch.float32, 120_000)
    home = Home(True, LARGE, shape, CPU)
    actives = [Active(torch.empty(0), {}, 0, number, home) for number in range(2)]
    assert engine._mode_for(actives, several_devices=False) == Mode("lookahead")
    assert engine._mode_for(actives, several_devices=True) == Mode(
        "sequential", "parameters are on several devices"
    )


def test_lookahead_without_paged_parameters_falls_back_to_nothing() -> None:
    optimizer = ours("PagedAdamW", parameters(10, 20), paging=Paging(strategy="lookahead"))
    train(optimizer, range(1))
    assert paths(optimizer) == ["resident"] * 2


def test_choose_asks_for_whole_budget_left() -> None:
    """What earlier parameters took is not given twice."""
    optimizer = ours("PagedAdamW", parameters(100_000))
    candidate = optimizer._candidate(optimizer.param_groups[0]["params"][0], 0, 0)
    paging = Paging(hbm_budget=1_000_000)
    assert choose([candidate], paging, 0, 200_000)[0][0] == "resident"
    assert choose([candidate], paging, 0, 200_001)[0][0] == "paged"


@pytest.mark.parametrize(
    ("width", "numel", "dtype"),
    [(32, 10**6, torch.float32), (8, 4_096, torch.uint8), (8, 4_095, torch.float32)],
)
def test_state_dtype_is_bitsandbytes_rule(width: int, numel: int, dtype: torch.dtype) -> None:
    assert state_dtype({"optim_bits": width, "min_8bit_size": 4_096}, numel) == dtype
