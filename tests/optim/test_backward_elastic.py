"""Updates during backward while state moves between device and host."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pageahead.optim import plan
from tests.optim.test_backward import loss_of, net
from tests.optim.test_elastic import RESERVE, Gpu, gpu, impatient, paging  # noqa: F401
from tests.support import assert_same_bits, legacy, ours

MOST = 8 * 600_000
"""More bytes than all of the state that can be paged."""


pytestmark = pytest.mark.filterwarnings("ignore:zero_grad\\(\\) without step")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SMALLEST_CHUNK", 128 << 10)
    monkeypatch.setattr(plan, "LARGEST_CHUNK", 128 << 10)


def made(gpu: Gpu, name: str, model: Any, **settings: Any) -> Any:  # noqa: F811
    settings = {"in_backward": True, **settings}
    return gpu.of(ours(name, model.parameters(), lr=1e-2, paging=paging(**settings)))


@pytest.mark.parametrize("free_grads", [False, True], ids=["grads kept", "grads freed"])
@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedAdamW32bit", "PagedAdEMAMix"])
@pytest.mark.usefixtures("impatient")
def test_bits_do_not_depend_on_residency(
    gpu: Gpu,  # noqa: F811
    name: str,
    write_back: str,
    free_grads: bool,
) -> None:
    theirs, mine = net(), net()
    expected = legacy(name, theirs.parameters(), lr=1e-2)
    optimizer = made(gpu, name, mine, write_back=write_back, free_grads=free_grads)
    chance = random.Random(0)
    seen = set()
    for step in range(12):
        gpu.room = chance.choice([-RESERVE, MOST // 3, MOST // 2, 2 * MOST])
        for model, one in ((theirs, expected), (mine, optimizer)):
            loss_of(model, step, optional=step % 5 != 3).backward()
            one.step()
            one.zero_grad()
        if step % 4 == 2:
            optimizer.release(MOST // 4)
        seen.add(optimizer.residency().resident)
    optimizer.state_dict()
    assert_same_bits(optimizer, expected)
    assert len(seen) > 2


def test_it_decides_after_the_first_backward(gpu: Gpu) -> None:  # noqa: F811
    gpu.room = 2 * MOST
    model = net()
    optimizer = made(gpu, "PagedAdamW32bit", model)
    loss_of(model, 0).backward()
    assert optimizer.residency().resident == 0
    optimizer.step()
    optimizer.zero_grad()
    where = optimizer.residency()
    assert (where.host, where.slots) == (0, 0)
    assert where.resident == 8 * sum(p.numel() for p in model.parameters() if p.dim() > 1)


def test_release_lets_go_of_a_ring_that_was_filled_early(gpu: Gpu) -> None:  # noqa: F811
    theirs, mine = net(), net()
    expected = legacy("PagedAdamW32bit", theirs.parameters(), lr=1e-2)
    optimizer = made(gpu, "PagedAdamW32bit", mine, hbm_budget=0)
    for step in range(4):
        for model, one in ((theirs, expected), (mine, optimizer)):
            loss_of(model, step).backward()
            one.step()
            one.zero_grad()
        slots = optimizer.residency().slots
        assert slots > 0
        assert optimizer.release(1) == slots
        assert optimizer.residency().slots == 0
    assert_same_bits(optimizer, expected)


def test_release_in_the_middle_of_backward_waits(gpu: Gpu) -> None:  # noqa: F811
    model = net()
    optimizer = made(gpu, "PagedAdamW32bit", model, hbm_budget=0)
    loss_of(model, 0).backward()
    assert optimizer.release(1) == 0
    optimizer.zero_grad()
    assert optimizer.release(1) > 0
