"""Streams: gradients written just before, parameters read just after, nothing waited for twice."""

from __future__ import annotations

import pytest
import torch

from pageahead import Paging

from .support import candidate, gradients, legacy, parameters

SHAPES = ((5_000,), (1_000_000,), (2_000_000,), (50_000,), (3_000_000,))
STRATEGIES = ("streamed", "lookahead", "sequential")
SPIN = 20_000_000  # clock cycles, about 10 ms: far longer than a step


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bits", [8, 32])
def test_gradient_written_on_a_side_stream_just_before(strategy: str, bits: int) -> None:
    theirs, ours = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    one = legacy("PagedAdamW", theirs, bits)
    other = candidate("PagedAdamW", ours, bits, Paging(strategy=strategy))
    side = torch.cuda.Stream()
    for trial in range(20):
        values = gradients(SHAPES, torch.float32, trial)
        for p, value in zip(theirs, values, strict=True):
            p.grad = value.clone()
        one.step()
        for p in ours:
            p.grad = torch.full_like(p, float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            for p, value in zip(ours, values, strict=True):
                p.grad.copy_(value)  # type: ignore[union-attr]
            other.step()
        torch.cuda.synchronize()
        for p, q in zip(theirs, ours, strict=True):
            assert torch.equal(p, q), f"trial {trial}: the step did not wait for the gradient"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_stream_sees_parameters_after_return(strategy: str) -> None:
    theirs, ours = parameters(SHAPES, torch.float16), parameters(SHAPES, torch.float16)
    one = legacy("PagedAdamW", theirs, 32)
    other = candidate("PagedAdamW", ours, 32, Paging(strategy=strategy))
    side, third = torch.cuda.Stream(), torch.cuda.Stream()
    for trial in range(10):
        values = gradients(SHAPES, torch.float16, trial)
        for p, q, value in zip(theirs, ours, values, strict=True):
            p.grad, q.grad = value, value.clone()
        one.step()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            other.step()
        with torch.cuda.stream(third):
            seen = [q.detach().clone() for q in ours]
            states = [other.state[q]["state1"].clone() for q in ours if q.numel() >= 100_000]
        torch.cuda.synchronize()
        for p, copy in zip(theirs, seen, strict=True):
            assert torch.equal(p, copy)
        large = [p for p in theirs if p.numel() >= 100_000]
        for p, copy in zip(large, states, strict=True):
            assert torch.equal(one.state[p]["state1"].cpu(), copy.cpu())


def test_overlap_orders_the_callers_stream() -> None:
    theirs, ours = parameters(SHAPES, torch.float16), parameters(SHAPES, torch.float16)
    one = legacy("PagedAdamW", theirs, 32)
    other = candidate("PagedAdamW", ours, 32, Paging(write_back="overlap"))
    side = torch.cuda.Stream()
    for trial in range(10):
        values = gradients(SHAPES, torch.float16, trial)
        for p, q, value in zip(theirs, ours, values, strict=True):
            p.grad, q.grad = value, value.clone()
        one.step()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            other.step()
            seen = [q.detach().clone() for q in ours]
            state = other.state_dict()
            first = state["state"][1]["__bnb_optimizer_quant_state__"]["state1"].clone()
        side.synchronize()
        for p, copy in zip(theirs, seen, strict=True):
            assert torch.equal(p, copy)
        assert torch.equal(one.state[theirs[1]]["state1"].cpu(), first)
