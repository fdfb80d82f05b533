"""One launch of one slice: the arguments bitsandbytes' kernels take."""

from __future__ import annotations

import pytest
import torch

from pageahead.memory.layout import StateShape
from pageahead.optim import update
from pageahead.optim.active import Active
from pageahead.optim.hyperparameters import Hyperparameters
from pageahead.optim.plan import chunk_bytes
from pageahead.optim.update import StateViews, launch
from tests.support import MIB, bits, legacy, ours, parameters, set_gradients, train

CONFIG = {
    "betas": (0.9, 0.999, 0.9999),
    "alpha": 5.0,
    "t_alpha": None,
    "t_beta3": None,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "lr": 1e-2,
    "max_unorm": 0.0,
    "skip_zeros": False,
}

TENSORS = ("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2")


def ademamix_state(numel: int) -> tuple[torch.nn.Parameter, dict[str, torch.Tensor]]:
    """A parameter and its 8-bit AdEMAMix state after a few steps; the next gradient is set."""
    optimizer = legacy("PagedAdEMAMix8bit", parameters(numel))
    train(optimizer, range(5))
    (parameter,) = optimizer.param_groups[0]["params"]
    set_gradients([parameter], 5)
    return parameter, optimizer.state[parameter]


@pytest.mark.parametrize("numel", [5_120, 5_121, 5_375, 4_097])
@pytest.mark.parametrize("strided", [True, False], ids=["strided absmax", "contiguous absmax"])
def test_ademamix_in_whole_blocks_is_what_the_cpu_computes(numel: int, strided: bool) -> None:
    """What is passed to the CUDA kernel, run through the CPU operator.

    The kernel takes the second moment's absmax from block ``(n + i) / 256`` on, so `n` has to be a
    multiple of 256 and both rows of absmax have to follow each other.
    """
    parameter, state = ademamix_state(numel)
    before = {key: value.clone() for key, value in state.items() if torch.is_tensor(value)}
    weight = parameter.detach().clone()
    absmax1 = before["absmax1"].clone()
    if strided:  # a slice's columns of the whole parameter's absmax
        absmax1 = torch.cat([absmax1, torch.full((2, 3), 7.0)], dim=1)[:, :-3]
        assert not absmax1.is_contiguous()
    before["absmax1"] = absmax1
    views = StateViews(0, numel, False, *(before[key] for key in TENSORS))
    arguments = (parameter.grad, weight, views, CONFIG, 6, 0.9999, 5.0)
    update._update_ademamix_8bit_cuda(*arguments)
    whole = StateViews(0, numel, True, *(state[key] for key in TENSORS))
    config = Hyperparameters.of(CONFIG)
    launch("ademamix", Active(parameter, {}, 0, 0, config=config, step=6), whole)
    assert bits(weight) == bits(parameter)
    assert bits(absmax1) == bits(state["absmax1"])
    for key in ("state1", "state2", "absmax2"):
        assert bits(before[key]) == bits(state[key]), key


def test_code_of_zero() -> None:
    """Padding has to be zero, or its values would count for the block's absmax."""
    _, state = ademamix_state(4_096)
    assert state["qmap1"][update.SIGNED_ZERO] == 0.0
    assert state["qmap2"][0] == 0.0


def test_the_kernel_gets_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []
    real = update._update_8bit

    def spy(name: str, gradient: torch.Tensor, parameter: torch.Tensor, views: StateViews, *more):  # type: ignore[no-untyped-def]
        assert views.absmax1 is not None
        assert views.state1.numel() == 2 * gradient.numel() == 2 * parameter.numel()
        seen.append((gradient.numel(), views.absmax1.is_contiguous()))
        real(name, gradient, parameter, views, *more)

    monkeypatch.setattr(update, "_update_8bit", spy)
    for numel in (5_120, 5_121):
        parameter, state = ademamix_state(numel)
        state["absmax1"] = state["absmax1"].t().contiguous().t()
        assert not state["absmax1"].is_contiguous()
        views = StateViews(0, numel, True, *(state[key] for key in TENSORS))
        update._update_ademamix_8bit_cuda(
            parameter.grad, parameter.detach(), views, CONFIG, 6, 0.9999, 5.0
        )
    assert seen == [(5_120, True), (5_376, True)]


def test_nothing_is_launched_for_no_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch without blocks is a CUDA error, after which bitsandbytes ends the process."""
    launched: list[str] = []
    monkeypatch.setattr(update, "_update_32bit", lambda name, *_: launched.append(name))
    optimizer = ours("PagedAdamW", parameters(0, 3))
    train(optimizer, range(1))
    assert launched == ["adam"]


@pytest.mark.parametrize("numel", [0, 10**6, 10**8, 10**10])
@pytest.mark.parametrize("itemsize", [1, 4])
@pytest.mark.parametrize("staging", [None, MIB, 64 * MIB])
def test_chunk_sizes_are_within_bounds(numel: int, itemsize: int, staging: int | None) -> None:
    adam = StateShape(numel, ((1, itemsize), (1, itemsize)))
    target, limit = chunk_bytes([adam], staging)
    assert 0 < target <= limit <= 53 * MIB
    if staging is not None:
        assert 4 * limit <= staging
    larger, _ = chunk_bytes([adam] * 4, staging)
    assert larger >= target


def test_the_longer_an_update_takes_the_smaller_a_chunk() -> None:
    """As many bytes of 8-bit state are four times as many elements to update."""
    wide, narrow = StateShape(2**25, ((1, 4),)), StateShape(2**27, ((1, 1),))
    assert wide.nbytes == narrow.nbytes
    assert chunk_bytes([narrow], None)[0] < chunk_bytes([wide], None)[0]


def test_what_comes_in_while_a_step_is_prepared_costs_nothing() -> None:
    """So more parameters, which take longer to check, make larger chunks; not so in backward."""

    def target(parameters: int, *, in_backward: bool) -> int:
        states = [StateShape(2**28 // parameters, ((1, 4), (1, 4)))] * parameters
        return chunk_bytes(states, None, in_backward=in_backward)[0]

    assert target(4, in_backward=False) == target(4, in_backward=True)
    assert target(512, in_backward=False) > target(4, in_backward=False)
    assert target(512, in_backward=True) == target(4, in_backward=True)
    # Eight of 4 Mi elements, 8-bit: whole, not as halves.
    _, limit = chunk_bytes([StateShape(4 * MIB, ((1, 1), (1, 1)))] * 8, None)
    assert limit >= 8 * MIB
