from __future__ import annotations

import bitsandbytes
import pytest
import torch

import pageahead
from pageahead.experiment.compare import compare

NUMEL = 131_072


def stepped(kind, **options):
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(2, NUMEL, generator=generator).half()
    parameters = [torch.nn.Parameter(values[0] * 0.02), torch.nn.Parameter(values[0, :64] * 0.02)]
    optimizer = kind(parameters, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = values[1, : parameter.numel()] * 0.01
        optimizer.step()
    return optimizer


@pytest.fixture
def legacy():
    return stepped(bitsandbytes.optim.AdamW8bit)


@pytest.fixture
def ours():
    return stepped(pageahead.PagedAdamW8bit)


def first_state(optimizer):
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


def test_equal_optimizers_are_equal_and_everything_was_looked_at(legacy, ours) -> None:
    result = compare(legacy, ours)
    assert result.equal
    assert result.examples == []
    # Large: parameter, state1, state2, absmax1, absmax2, qmap1, qmap2. Small: its 32-bit state.
    assert result.tensors == 7 + 3
    blocks = NUMEL // 256
    large = NUMEL * (2 + 1 + 1) + 4 * (blocks + blocks + 256 + 256)
    assert result.nbytes == large + 64 * (2 + 4 + 4)


@pytest.mark.parametrize("name", ["state1", "state2", "absmax1", "absmax2", "qmap1"])
def test_one_flipped_bit_of_state_is_found(legacy, ours, name) -> None:
    state = first_state(ours)
    state[name] = state[name].clone()
    state[name].view(-1).view(torch.uint8)[-1] ^= 1
    result = compare(legacy, ours)
    assert not result.equal
    size = state[name].nbytes
    assert result.examples == [f"parameter 0, {name}: 1 of {size:,} bytes differ"]


def test_one_flipped_bit_of_a_parameter_is_found(legacy, ours) -> None:
    ours.param_groups[0]["params"][1].data.view(torch.uint8)[3] ^= 0x80
    assert compare(legacy, ours).examples == ["parameter 1, parameter: 1 of 128 bytes differ"]


def test_bits_count_not_values(legacy, ours) -> None:
    for optimizer, zero in ((legacy, 0.0), (ours, -0.0)):
        optimizer.param_groups[0]["params"][1].data[0] = zero
        first_state(optimizer)["absmax1"][0] = float("nan")
    assert compare(legacy, ours).examples == ["parameter 1, parameter: 1 of 128 bytes differ"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.update(step=7), "step: 2 in legacy, 7 here"),
        (lambda state: state.pop("absmax2"), "absmax2: a tensor in legacy, None here"),
        (lambda state: state.update(extra=1), "extra: None in legacy, 1 here"),
        (
            lambda state: state.update(state1=state["state1"].view(torch.int8)),
            "state1: torch.uint8 of shape (131072,) in legacy, torch.int8 of shape (131072,) here",
        ),
    ],
)
def test_other_differences_are_named(legacy, ours, change, said) -> None:
    change(first_state(ours))
    assert compare(legacy, ours).examples == [f"parameter 0, {said}"]


def test_many_differences_are_counted_and_a_few_spelt_out(legacy, ours) -> None:
    for state in ours.state.values():
        for name, value in state.items():
            state[name] = value + 1
    result = compare(legacy, ours)
    assert result.differences == 6 + 1 + 2 + 1
    assert len(result.examples) == 5
