"""What test modules share: the twelve classes and their models, gradients, and bits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import bitsandbytes
import torch

import pageahead
from pageahead import Paging
from pageahead.device import device_for
from pageahead.device.cpu import CpuDevice
from pageahead.optim.paged import PagedOptimizer

FAMILIES = ("Adam", "AdamW", "Lion", "AdEMAMix")
CLASSES = [f"Paged{family}{bits}" for family in FAMILIES for bits in ("", "8bit", "32bit")]
STRATEGIES = ("streamed", "lookahead", "sequential")

CPU = torch.device("cpu")
MIB = 1 << 20
TINY_RING = Paging(staging=MIB)
"""A quarter of this is a chunk: parameters of 100,000 elements are cut into slices."""


def ours(name: str, parameters: Iterable[Any], **kwargs: Any) -> PagedOptimizer:
    """Make pageahead's class of this name."""
    return getattr(pageahead, name)(parameters, **kwargs)


def legacy(name: str, parameters: Iterable[Any], **kwargs: Any) -> torch.optim.Optimizer:
    """Make what bitsandbytes' class of this name is on CPU: the class that is not paged.

    bitsandbytes' paged classes warn on CPU and behave like these; but ``PagedAdEMAMix*`` fail
    there, and ``*AdEMAMix32bit`` have a `state1` of half the size that their kernels need.
    """
    family = name.removeprefix("Paged")
    for bits in (8, 32):
        if family.endswith(f"{bits}bit"):
            family = family.removesuffix(f"{bits}bit")
            kwargs["optim_bits"] = bits
    return getattr(bitsandbytes.optim, family)(parameters, **kwargs)


def parameters(
    *shapes: int | tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.nn.Parameter]:
    """Make seeded parameters: equal arguments give equal bits."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def set_gradients(
    parameters: Sequence[torch.Tensor], step: int, absent: Collection[int] = ()
) -> None:
    """Give every parameter a new gradient that depends on `step` and its position, or None."""
    for number, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(1_000 * step + number)
        gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** -(number % 3)
        parameter.grad = None if number in absent else gradient.to(parameter.dtype)


def train(
    optimizer: torch.optim.Optimizer, steps: Iterable[int], absent: Collection[int] = ()
) -> None:
    """Step over seeded gradients; a parameter listed twice has one gradient."""
    for step in steps:
        set_gradients(unique_parameters(optimizer), step, absent)
        optimizer.step()


def unique_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    listed = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return list(dict.fromkeys(listed))


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in logical order."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def assert_same_bits(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Compare the parameters and the whole state of two optimizers bit for bit."""
    for optimizer in (one, other):
        if isinstance(optimizer, PagedOptimizer):
            optimizer.synchronize()
    pairs = zip(unique_parameters(one), unique_parameters(other), strict=True)
    for number, (mine, theirs) in enumerate(pairs):
        assert bits(mine) == bits(theirs), f"parameter {number} differs"
        state, expected = one.state.get(mine, {}), other.state.get(theirs, {})
        assert set(state) == set(expected), f"parameter {number}: {set(state)} {set(expected)}"
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert state[key].dtype == value.dtype, f"{key} of parameter {number}"
                assert state[key].shape == value.shape, f"{key} of parameter {number}"
                assert bits(state[key]) == bits(value), f"{key} of parameter {number} differs"
            else:
                assert state[key] == value, f"{key} of parameter {number} differs"


class Snapshot:
    """Everything a refused call must leave alone: parameters, gradients, state and groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before = self._take()

    def _take(self) -> dict[str, Any]:
        taken: dict[str, Any] = {}
        if isinstance(self._optimizer, PagedOptimizer):
            self._optimizer.synchronize()
        for number, parameter in enumerate(unique_parameters(self._optimizer)):
            taken[f"parameter {number}"] = _image(parameter)
            taken[f"gradient {number}"] = _image(parameter.grad)
            for key, value in self._optimizer.state.get(parameter, {}).items():
                taken[f"{key} of {number}"] = _image(value)
        for number, group in enumerate(self._optimizer.param_groups):
            taken[f"group {number}"] = {
                key: value for key, value in group.items() if key != "params"
            }
        return taken

    def assert_unchanged(self) -> None:
        after = self._take()
        assert set(after) == set(self._before)
        for key, value in self._before.items():
            assert after[key] == value, f"{key} changed"


def _image(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    described = (id(value), value.dtype, tuple(value.shape), value.device, value.layout)
    if value.layout != torch.strided or value.device.type == "meta":
        return described
    return (*described, value.stride(), bits(value))


def paths(optimizer: PagedOptimizer) -> list[str]:
    return [route.path for route in optimizer.routes()]


def chunk_count(optimizer: PagedOptimizer) -> int:
    """Chunks of the last step on the CPU."""
    prepared = optimizer._engines[CPU]._plan
    assert prepared is not None
    return len(prepared[0].chunks)


def cpu_device() -> CpuDevice:
    device = device_for(CPU)
    assert isinstance(device, CpuDevice)
    return device


def is_cut(optimizer: PagedOptimizer) -> bool:
    """Whether the last step cut a parameter into slices."""
    prepared = optimizer._engines[CPU]._plan
    assert prepared is not None
    return any(part.start > 0 for chunk in prepared[0].chunks for part in chunk.slices)


class UsesOldValue(torch.autograd.Function):
    """Needs the value of `w` in backward, although no gradient goes there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (w,) = ctx.saved_tensors
        return grad * w.sum(), None
