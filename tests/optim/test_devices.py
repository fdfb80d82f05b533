"""Groups whose parameters are on several devices: one pipeline each."""

from __future__ import annotations

import pytest
import torch

from pageahead import Paging
from tests.support import (
    CPU,
    MIB,
    STRATEGIES,
    assert_same_bits,
    legacy,
    ours,
    parameters,
    set_gradients,
)

OTHER = torch.device("cpu", 1)
SIZES = (120_000, 300, 130_001, 100_000)


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a second CPU, which has memory, threads and a pipeline too."""

    device = property(lambda self: OTHER)  # type: ignore[assignment]


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().as_subclass(Elsewhere)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedAdEMAMix32bit"])
def test_each_device_has_a_pipeline(name: str, strategy: str) -> None:
    plain = parameters(*SIZES)
    mixed = [
        torch.nn.Parameter(elsewhere(one) if number % 2 == 0 else one.detach().clone())
        for number, one in enumerate(plain)
    ]
    groups = [{"params": mixed[:2]}, {"params": mixed[2:], "lr": 0.01}]
    optimizer = ours(name, groups, lr=0.02, paging=Paging(strategy=strategy, staging=MIB))
    stock = legacy(name, [{"params": plain[:2]}, {"params": plain[2:], "lr": 0.01}], lr=0.02)
    for step in range(3):
        set_gradients(plain, step)
        for mine, theirs in zip(mixed, plain, strict=True):
            assert theirs.grad is not None
            mine.grad = (
                elsewhere(theirs.grad) if isinstance(mine, Elsewhere) else theirs.grad.clone()
            )
        optimizer.step()
        stock.step()
    assert optimizer._engines.keys() == {CPU, OTHER}
    moved = [[one.paged for one in map(optimizer._homes.get, group["params"])] for group in groups]  # type: ignore[union-attr]
    assert moved == [[True, False], [True, True]]
    for device, engine in optimizer._engines.items():
        assert engine._plan is not None
        found = engine._plan[0].parameters
        assert [one.device for one in found] == [device] * 2
    assert_same_bits(optimizer, stock)
