"""What is refused on the GPU: a Python error, nothing changed, the process lives on."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings

import pytest
import torch

import pageahead
from pageahead import Paging
from pageahead.device import managed
from pageahead.device.cuda import CudaDevice, CudaEvent
from pageahead.device.protocol import EventNotRecordedError
from pageahead.device.runtime import shared_runtime

from .support import candidate, differences, gradients, legacy, parameters

SHAPES = ((1_000_000,), (5_000,))


def _assign(params: list[torch.nn.Parameter], seed: int) -> None:
    for p, gradient in zip(params, gradients(SHAPES, torch.float32, seed), strict=True):
        p.grad = gradient


def test_refused_page_lock_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal by CUDA itself, then a step: bitsandbytes ends the process on a stale error."""
    real = torch.cuda.cudart().cudaHostRegister

    class Refusing:
        def __getattr__(self, name: str) -> object:
            return getattr(real_cudart, name)

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> object:
            return real(0, nbytes, flags)  # a null address: CUDA's own refusal

    real_cudart = torch.cuda.cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Refusing())
    theirs, ours = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    one, other = legacy("PagedAdamW", theirs, 8), candidate("PagedAdamW", ours, 8, Paging())
    _assign(ours, 0)
    with pytest.warns(RuntimeWarning, match="refused to page-lock"):
        other.step()
    assert shared_runtime().clear_error() == 0
    _assign(theirs, 0)
    one.step()
    for seed in range(1, 4):
        _assign(theirs, seed)
        _assign(ours, seed)
        one.step()
        other.step()
    torch.cuda.synchronize()
    assert not other.state[ours[0]]["state1"].is_pinned()
    assert differences(one, theirs, other, ours) == []


def test_arena_is_page_locked() -> None:
    ours = parameters(SHAPES, torch.float32)
    other = candidate("PagedAdamW", ours, 8, Paging())
    _assign(ours, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.step()
    assert other.state[ours[0]]["state1"].is_pinned()
    assert other.state[ours[0]]["state2"].is_pinned()


def test_capture_is_refused_before_anything_changes() -> None:
    ours = parameters(SHAPES, torch.float32)
    other = candidate("PagedAdamW", ours, 8, Paging())
    _assign(ours, 0)
    other.step()
    before = [p.detach().clone() for p in ours]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="graph is being captured"), torch.cuda.graph(graph):
        other.step()
    torch.cuda.synchronize()
    assert all(torch.equal(p, q) for p, q in zip(before, ours, strict=True))
    other.step()
    assert not torch.equal(before[0], ours[0])


def test_managed_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = parameters(SHAPES, torch.float32)
    before = [p.detach().clone() for p in ours]
    other = candidate("PagedAdamW", ours, 32, Paging(strategy="lookahead"))
    _assign(ours, 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 20, 1 << 30))
    with pytest.raises(MemoryError, match=r"8,000,000|4,000,000"):
        other.step()
    assert not other.state
    assert all(torch.equal(p, q) for p, q in zip(before, ours, strict=True))
    monkeypatch.undo()
    other.step()
    assert not torch.equal(before[0], ours[0])


def test_managed_memory_is_freed() -> None:
    device = torch.device("cuda", 0)
    gc.collect()  # optimizers of the tests before this one
    before = managed.allocated_bytes(device)
    ours = parameters(SHAPES, torch.float32)
    other = candidate("PagedAdamW", ours, 32, Paging(strategy="lookahead"))
    _assign(ours, 0)
    other.step()
    assert managed.allocated_bytes(device) == before + 8_000_000
    kept = other.state[ours[0]]["state1"]
    del other
    assert managed.allocated_bytes(device) == before + 4_000_000
    assert float(kept.abs().sum()) > 0
    del kept
    assert managed.allocated_bytes(device) == before


def test_max_unorm_needs_a_budget() -> None:
    from bitsandbytes.optim.optimizer import MockArgs

    settings = {"optim_bits": 32, "min_8bit_size": 4096, "max_unorm": 0.5, "skip_zeros": False}
    ours = parameters(SHAPES, torch.float32)
    _assign(ours, 0)
    before = [p.detach().clone() for p in ours]
    refused = pageahead.PagedAdamW(ours, args=MockArgs(settings), paging=Paging(hbm_budget=0))
    with pytest.raises(ValueError, match="max_unorm"):
        refused.step()
    assert all(torch.equal(p, q) for p, q in zip(before, ours, strict=True))
    allowed = pageahead.PagedAdamW(ours, args=MockArgs(settings), paging=Paging(hbm_budget=1.0))
    allowed.step()
    assert allowed.state[ours[0]]["state1"].is_cuda


def test_parameter_that_moved() -> None:
    ours = parameters(SHAPES, torch.float32)
    other = candidate("PagedAdamW", ours, 8, Paging())
    _assign(ours, 0)
    other.step()
    with torch.no_grad():
        moved = ours[0].detach().cpu()
    ours[0].data = moved
    ours[0].grad = torch.ones_like(moved)
    before = moved.clone()
    with pytest.raises(RuntimeError, match="cuda:0"):
        other.step()
    assert torch.equal(ours[0].detach(), before)


def test_event_never_recorded_raises() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    with pytest.raises(EventNotRecordedError):
        device.stream("fetch").wait(CudaEvent())
    with pytest.raises(EventNotRecordedError):
        CudaEvent().synchronize()


def test_zero_size_parameter() -> None:
    shapes = ((0,), (200_000,), (0, 7))
    theirs, ours = parameters(shapes, torch.float32), parameters(shapes, torch.float32)
    other = candidate("PagedAdamW", ours, 8, Paging())
    one = legacy("PagedAdamW", theirs[1:2], 8)
    for seed in range(3):
        for p, q, gradient in zip(
            theirs, ours, gradients(shapes, torch.float32, seed), strict=True
        ):
            p.grad, q.grad = gradient, gradient.clone()
        one.step()
        other.step()
    torch.cuda.synchronize()
    assert torch.equal(theirs[1], ours[1])
    assert other.state[ours[0]]["step"] == 3


def test_other_strategies_say_what_to_install() -> None:
    """Without cuda-bindings `lookahead` names the package, and `streamed` works."""
    program = """
import sys
sys.modules["cuda.bindings"] = None
import torch, pageahead
from pageahead import Paging
p = torch.nn.Parameter(torch.randn(200_000, device="cuda"))
p.grad = torch.ones_like(p)
pageahead.PagedAdamW(
    [p], paging=Paging(strategy="streamed")).step()
q = [torch.nn.Parameter(torch.randn(200_000, device="cuda")) for _ in range(2)]
for one in q: one.grad = torch.ones_like(one)
try:
    pageahead.PagedAdamW(q, paging=Paging(strategy="lookahead")).step()
except ImportError as error:
    assert "pageahead[cuda13]" in str(error), error
    print("named")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert "named" in done.stdout, done.stderr
