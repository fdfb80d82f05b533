"""Updates during backward on a GPU: bits, streams, memory."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

import pageahead
from pageahead import Paging
from tests.support import UsesOldValue

from .support import differences

WIDTH = 1024


class Net(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(self.norm(x)))
        return x


def net(dtype: torch.dtype, layers: int = 6) -> Net:
    torch.manual_seed(0)
    return Net(layers).to(device="cuda", dtype=dtype)


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0, rows: int = 64) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(rows, WIDTH, generator=generator, device="cuda")
        (model(x.to(next(model.parameters()).dtype)).float() ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(autouse=True)
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("stream", ["default", "side"])
@pytest.mark.parametrize("free_grads", [False, True], ids=["grads kept", "grads freed"])
@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("family", ["AdamW", "Lion", "AdEMAMix"])
def test_same_bits_as_bitsandbytes(
    family: str, bits: int, write_back: str, free_grads: bool, stream: str
) -> None:
    theirs, mine = net(torch.bfloat16), net(torch.bfloat16)
    expected = getattr(bnb.optim, family)(theirs.parameters(), lr=1e-3, optim_bits=bits)
    paging = Paging(in_backward=True, free_grads=free_grads, write_back=write_back, hbm_budget=0)
    optimizer = getattr(pageahead, f"Paged{family}")(
        mine.parameters(), lr=1e-3, optim_bits=bits, paging=paging
    )
    train(theirs, expected, 5)
    torch.cuda.synchronize()
    chosen = torch.cuda.default_stream() if stream == "default" else torch.cuda.Stream()
    with torch.cuda.stream(chosen):
        train(mine, optimizer, 5)
        optimizer.state_dict()
    torch.cuda.synchronize()
    assert (
        differences(expected, list(theirs.parameters()), optimizer, list(mine.parameters())) == []
    )


def test_many_steps_on_a_side_stream() -> None:
    """Freed gradients are allocated again at once, by the same backward."""
    theirs, mine = net(torch.float32, 12), net(torch.float32, 12)
    expected = bnb.optim.AdamW(theirs.parameters(), lr=1e-3, optim_bits=32)
    paging = Paging(in_backward=True, free_grads=True, write_back="overlap", hbm_budget=0)
    optimizer = pageahead.PagedAdamW32bit(mine.parameters(), lr=1e-3, paging=paging)
    side = torch.cuda.Stream()
    for first in range(0, 40, 10):
        train(theirs, expected, 10, first)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            train(mine, optimizer, 10, first)
        torch.cuda.synchronize()
        for p, q in zip(theirs.parameters(), mine.parameters(), strict=True):
            assert torch.equal(p, q)


def test_freed_gradients_lower_the_peak() -> None:
    peaks = {}
    for free_grads in (False, True):
        model = net(torch.bfloat16, 40)
        # A gradient is freed with the last of its chunk: small ones, of about one parameter each.
        paging = Paging(in_backward=True, free_grads=free_grads, hbm_budget=0, staging=8 << 20)
        optimizer = pageahead.PagedAdamW8bit(model.parameters(), paging=paging)
        # One row: activations, which go while gradients come, take next to nothing.
        train(model, optimizer, 2, rows=1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        train(model, optimizer, 1, rows=1)
        peaks[free_grads] = torch.cuda.max_memory_allocated()
        del model, optimizer
    assert peaks[False] - peaks[True] > 0.8 * 40 * 2 * WIDTH * WIDTH


def test_no_allocation_and_no_device_wide_wait_in_backward() -> None:
    model = net(torch.bfloat16)
    paging = Paging(in_backward=True, write_back="overlap", hbm_budget=0)
    optimizer = pageahead.PagedAdamW8bit(model.parameters(), paging=paging)
    train(model, optimizer, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train(model, optimizer, 1)
    names = {event.key for event in profile.key_averages()}
    for forbidden in ("cudaDeviceSynchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc"):
        # The profiler itself synchronizes the device when it ends.
        assert forbidden not in names or forbidden == "cudaDeviceSynchronize"
    synchronized = [e.count for e in profile.key_averages() if e.key == "cudaDeviceSynchronize"]
    assert sum(synchronized) <= 1


def on_a_side_stream(free_grads: bool = False) -> tuple[nn.Parameter, Any, Any]:
    """A parameter with updates in backward, and the stream that everything is to run on."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device="cuda"))
        paging = Paging(in_backward=True, free_grads=free_grads, hbm_budget=0)
        optimizer = pageahead.PagedAdamW32bit([weight], paging=paging)
    return weight, optimizer, side


def test_a_use_of_the_old_weight_after_its_update_raises_on_a_side_stream() -> None:
    """bitsandbytes' kernels do not tell autograd: the old value would silently be the new one."""
    weight, optimizer, side = on_a_side_stream()

    with torch.cuda.stream(side):
        x = torch.randn(WIDTH, device="cuda", requires_grad=True)
        early = UsesOldValue.apply(x, weight.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (weight * early).sum().backward()
        with pytest.warns(RuntimeWarning, match="zero_grad"):
            optimizer.zero_grad()


@pytest.mark.parametrize("free_grads", [False, True], ids=["grads kept", "grads freed"])
def test_clipping_after_the_update_is_noticed_on_a_side_stream(free_grads: bool) -> None:
    weight, optimizer, side = on_a_side_stream(free_grads)
    with torch.cuda.stream(side):
        (weight**2).sum().backward()
        if free_grads:
            assert weight.grad is not None
            assert weight.grad.norm().isnan()
            with pytest.raises(RuntimeError, match="more than one element"):
                weight.grad.mul_(0.5)
            optimizer.step()
            return
        torch.nn.utils.clip_grad_norm_([weight], 1e-3)
        with pytest.raises(RuntimeError, match="changed or replaced after their update"):
            optimizer.step()
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
