"""``hbm_budget="auto"`` on a GPU whose memory is capped: taken, given back, released."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pageahead import Paging
from pageahead.device import device_for
from pageahead.optim import elastic, moving
from tests.cuda.support import candidate, differences, gradients, legacy, parameters

MIB = 1 << 20
NUMEL = 4 * MIB
COUNT = 16
STATE = COUNT * NUMEL * 8
"""512 MiB of AdamW's 32-bit state, beside 128 MiB each of float16 parameters and gradients."""
RESERVE = 128 * MIB


def free_bytes() -> int:
    return device_for(torch.device("cuda", torch.cuda.current_device())).free_bytes()


@pytest.fixture
def _capped() -> Iterator[None]:
    """A GPU that has 832 MiB for this process from now on."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    cap = torch.cuda.memory_reserved() + 832 * MIB
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        gc.collect()
        torch.cuda.empty_cache()


def train(optimizer: Any, found: list[torch.nn.Parameter], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for one in found:
            one.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def auto(reserve: int = RESERVE) -> tuple[Any, list[torch.nn.Parameter]]:
    found = parameters([(NUMEL,)] * COUNT, torch.float16)
    optimizer = candidate("PagedAdamW", found, 32, Paging(hbm_reserve=reserve, staging=32 * MIB))
    train(optimizer, found, 1)
    return optimizer, found


@pytest.mark.usefixtures("_capped")
def test_auto_stays_under_the_cap_and_uses_it() -> None:
    optimizer, found = auto()
    now = optimizer.residency()
    assert now.resident > 128 * MIB
    assert now.host > 0
    assert now.resident + now.host == STATE
    assert free_bytes() >= RESERVE - 64 * MIB  # of segments that PyTorch rounds up
    train(optimizer, found, 2)
    assert free_bytes() >= RESERVE


@pytest.mark.usefixtures("_capped")
def test_growth_by_less_than_the_reserve_is_made_good() -> None:
    optimizer, found = auto()
    train(optimizer, found, 2)
    before = optimizer.residency()
    reserved = torch.cuda.memory_reserved()
    ballast = torch.empty(96 * MIB, dtype=torch.uint8, device="cuda")
    assert free_bytes() < RESERVE
    train(optimizer, found, 1)
    given_back = before.resident - optimizer.residency().resident
    assert given_back > 0
    assert free_bytes() >= RESERVE
    # It went back to the driver, not only to PyTorch's cache.
    assert torch.cuda.memory_reserved() <= reserved + ballast.nbytes - given_back + 40 * MIB


@pytest.mark.usefixtures("_capped")
def test_release_makes_room_for_a_retry() -> None:
    optimizer, found = auto(reserve=32 * MIB)
    train(optimizer, found, 1)
    wanted = free_bytes() + 96 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(wanted, dtype=torch.uint8, device="cuda")
    before = optimizer.residency().resident
    freed = optimizer.release(128 * MIB)
    assert freed >= 128 * MIB
    activations = torch.empty(wanted, dtype=torch.uint8, device="cuda")
    del activations
    torch.cuda.empty_cache()
    train(optimizer, found, 2)  # the room is there again, and not taken right back
    assert optimizer.residency().resident <= before - freed


@pytest.mark.usefixtures("_capped")
def test_memory_goes_with_the_optimizer() -> None:
    before = torch.cuda.memory_allocated()
    optimizer, found = auto()
    del optimizer, found
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + MIB
    assert free_bytes() >= 768 * MIB


@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
@pytest.mark.parametrize(
    ("family", "bits"), [("AdamW", 8), ("AdamW", 32), ("Lion", 8), ("AdEMAMix", 32)]
)
def test_moves_change_no_bits(
    family: str, bits: int, write_back: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((102_400,), (300, 1024), (1_048_576,), (256, 256, 8), (64,))
    monkeypatch.setattr(elastic, "PATIENCE", 1)
    monkeypatch.setattr(elastic, "MOST_PATIENCE", 1)
    monkeypatch.setattr(moving, "GROUP_BYTES", MIB)
    mine = parameters(shapes, torch.float16)
    twins = parameters(shapes, torch.float16)
    paging = Paging(hbm_reserve=16 * MIB, staging=MIB, write_back=write_back)
    optimizer = candidate(f"Paged{family}", mine, bits, paging)
    expected = legacy(family, twins, bits)
    device = device_for(mine[0].device)
    seen = []
    for step in range(10):
        free = 14 * MIB if step % 2 else 64 * MIB  # 2 MiB too little, and more than enough
        monkeypatch.setattr(device, "free_bytes", lambda free=free: free)
        for found in (mine, twins):
            for one in found:
                one.grad = None
                one.sum().backward()  # type: ignore[no-untyped-call]
        for one, twin, gradient in zip(
            mine, twins, gradients(shapes, torch.float16, step), strict=True
        ):
            one.grad, twin.grad = gradient, gradient.clone()
        optimizer.step()
        expected.step()
        seen.append(optimizer.residency().resident)
    optimizer.state_dict()
    torch.cuda.synchronize()
    assert differences(optimizer, mine, expected, twins) == []
    assert sum(one != other for one, other in itertools.pairwise(seen)) >= 5, seen


def test_a_reserve_that_nobody_set_is_what_activations_took() -> None:
    """As PyTorch counts them: the most that was allocated beyond what was before the forward."""
    torch.cuda.reset_peak_memory_stats()
    found = parameters([(2048, 2048)] * 4, torch.float16)
    # cuBLAS takes its workspaces, of forward's thread and of backward's, once; they stay.
    torch.autograd.grad((found[1][:8] @ found[0]).float().sum(), found[0])
    optimizer = candidate("PagedAdamW", found, 32, Paging(staging=32 * MIB))
    before = torch.cuda.memory_allocated()
    out = torch.full((16_384, 2048), 0.01, dtype=torch.float16, device="cuda")
    for one in found:
        out = torch.relu(out @ one)
    out.float().square().mean().backward()
    del out
    took = torch.cuda.max_memory_allocated() - before
    assert took > 256 * MIB  # four of 64 MiB, and the loss's
    optimizer.step()
    learned = optimizer._elastic._reserve._learned[found[0].device]
    assert abs(learned.activations - took) < 2 * MIB
