"""What a steady step may not do: allocate, synchronize, leak."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter

import psutil
import pytest
import torch

from pageahead import Paging

from .support import candidate, gradients, parameters

SHAPES = ((5_000,), (2_000_000,), (200_000,), (30_000,), (6_000_000,), (150_000,))


STREAMS = """
import torch, pageahead
from pageahead.device import device_for
torch.zeros(1, device="cuda")
device = device_for(torch.device("cuda", 0))
free, _ = torch.cuda.mem_get_info()
streams = [device.stream(role) for role in ("fetch", "write-back")]
torch.cuda.synchronize()
print(free - torch.cuda.mem_get_info()[0], streams[0].handle != streams[1].handle)
"""


def _train(optimizer: object, params: list[torch.nn.Parameter], steps: int) -> None:
    for step in range(steps):
        for p, gradient in zip(params, gradients(SHAPES, torch.float16, step), strict=True):
            p.grad = gradient
        optimizer.step()  # type: ignore[attr-defined]


@pytest.mark.parametrize("bits", [8, 32])
def test_reserved_memory_does_not_grow(bits: int) -> None:
    params = parameters(SHAPES, torch.float16)
    optimizer = candidate("PagedAdamW", params, bits, Paging())
    _train(optimizer, params, 5)
    after_five = torch.cuda.memory_reserved()
    _train(optimizer, params, 45)
    assert torch.cuda.memory_reserved() == after_five


@pytest.mark.parametrize("family", ["PagedAdamW", "PagedLion", "PagedAdEMAMix"])
@pytest.mark.parametrize("bits", [8, 32])
def test_a_step_synchronizes_only_at_its_end(bits: int, family: str) -> None:
    params = parameters(SHAPES, torch.float16)
    optimizer = candidate(family, params, bits, Paging(staging=8 << 20))
    _train(optimizer, params, 3)
    for p, gradient in zip(params, gradients(SHAPES, torch.float16, 9), strict=True):
        p.grad = gradient
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        optimizer.step()
    calls = Counter(event.name for event in profile.events() if event.name.startswith("cuda"))
    # Leaving the profiler synchronizes the device once itself.
    calls["cudaDeviceSynchronize"] -= 1
    forbidden = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMalloc", "cudaFree")
    assert {name: calls[name] for name in forbidden if calls[name] > 0} == {}
    assert calls["cudaMemcpy"] == 0
    assert 1 <= calls["cudaEventSynchronize"] <= 2
    assert calls["cudaMemcpyAsync"] + calls["cudaMemcpy2DAsync"] > 4
    assert calls["cudaLaunchKernel"] + calls["cudaLaunchKernelExC"] >= len(SHAPES)


def test_no_hidden_item() -> None:
    params = parameters(SHAPES, torch.float16)
    optimizer = candidate("PagedAdamW", params, 8, Paging())
    _train(optimizer, params, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("strategy", ["streamed", "lookahead"])
def test_twenty_optimizers_leave_nothing_behind(strategy: str) -> None:
    params = parameters(SHAPES, torch.float16)
    process = psutil.Process(os.getpid())

    def cycle() -> None:
        optimizer = candidate("PagedAdamW", params, 32, Paging(strategy=strategy))
        _train(optimizer, params, 2)

    for _ in range(3):
        cycle()
    torch.cuda.synchronize()
    gc.collect()
    host, reserved = process.memory_info().rss, torch.cuda.memory_reserved()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        cycle()
    torch.cuda.synchronize()
    gc.collect()
    state_bytes = sum(p.numel() for p in params) * 8
    assert process.memory_info().rss - host < state_bytes / 2
    assert torch.cuda.memory_reserved() == reserved
    assert torch.cuda.mem_get_info()[0] >= free - (8 << 20)


def test_streams_take_next_to_no_memory() -> None:
    """In a process of its own: nobody has asked PyTorch for a stream there, which takes 70 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", STREAMS], capture_output=True, text=True, timeout=300, check=True
    )
    taken, distinct = done.stdout.split()
    assert int(taken) < 16 << 20
    assert distinct == "True"
