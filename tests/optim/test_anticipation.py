"""A step fetches its first chunks before it has checked anything: nobody may notice."""

from __future__ import annotations

import pytest
import torch

from pageahead import Paging
from pageahead.device.cpu import CpuDevice

from ..support import assert_same_bits, legacy, ours, parameters, train

SIZES = (100_000, 150_000, 200, 120_000)
PAGING = Paging(staging=1 << 20)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy that was enqueued."""
    found: list[int] = []
    copy = CpuDevice.copy

    def counting(self: CpuDevice, destination: torch.Tensor, source: torch.Tensor, **kw: object):
        found.append(source.nbytes)
        copy(self, destination, source, **kw)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuDevice, "copy", counting)
    return found


def test_each_byte_moves_once_each_way(copies: list[int]) -> None:
    optimizer = ours("PagedAdamW", parameters(*SIZES), paging=PAGING)
    train(optimizer, range(1))
    first = sum(copies)
    copies.clear()
    train(optimizer, range(1, 2))
    assert sum(copies) == first


@pytest.mark.parametrize("spoiled", [0, 3])
def test_a_refused_step_leaves_nothing_in_flight(spoiled: int, copies: list[int]) -> None:
    arms = [
        make("PagedAdamW", parameters(*SIZES), **more)
        for make, more in ((legacy, {}), (ours, {"paging": PAGING}))
    ]
    for optimizer in arms:
        train(optimizer, range(2))
    parameter = arms[1].param_groups[0]["params"][spoiled]
    copies.clear()
    good = parameter.grad
    parameter.grad = torch.ones(SIZES[spoiled]).to_sparse()
    with pytest.raises(TypeError, match="dense"):
        arms[1].step()
    assert copies  # it had been anticipated
    [engine] = arms[1]._engines.values()
    assert not engine._pipeline._flights
    parameter.grad = good
    for optimizer in arms:
        train(optimizer, range(2, 4))
    assert_same_bits(arms[1], arms[0])


def test_state_edited_between_steps_is_what_the_next_one_reads() -> None:
    arms = [
        make("PagedAdamW", parameters(*SIZES), **more)
        for make, more in ((legacy, {}), (ours, {"paging": PAGING}))
    ]
    for optimizer in arms:
        train(optimizer, range(2))
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["state1"].mul_(0.5)
        train(optimizer, range(2, 4))
    assert_same_bits(arms[1], arms[0])


def test_a_closure_that_edits_state_comes_first() -> None:
    arms = [
        make("PagedAdamW", parameters(*SIZES), **more)
        for make, more in ((legacy, {}), (ours, {"paging": PAGING}))
    ]
    for optimizer in arms:
        train(optimizer, range(2))

        def closure(optimizer: torch.optim.Optimizer = optimizer) -> float:
            for parameter in optimizer.param_groups[0]["params"]:
                optimizer.state[parameter]["state1"].zero_()
            return 1.0

        assert optimizer.step(closure) == 1.0
    assert_same_bits(arms[1], arms[0])
