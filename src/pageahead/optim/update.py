"""One update of one slice of one parameter, by bitsandbytes' kernels.

The arithmetic is bitsandbytes'; what is here is which arguments its classes pass, so that a slice
gets the same ones as the whole. Source: bitsandbytes 0.50.2, ``optim/optimizer.py`` and
``optim/ademamix.py``.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import bitsandbytes  # noqa: F401  (registers the operators)
import torch

from pageahead.device.managed import on_device
from pageahead.memory.layout import BLOCK
from pageahead.optim.active import Active
from pageahead.optim.kernels import launched
from pageahead.optim.sharded import local

__all__ = ["MAX_LAUNCH", "StateViews", "launch"]

MAX_LAUNCH = 1 << 30
"""Elements of one launch; bitsandbytes counts them in an int32, AdEMAMix twice as many."""

SIGNED_ZERO = 127
"""The code of 0.0 in bitsandbytes' signed quantization map; in the unsigned one it is 0."""


@dataclass(frozen=True, slots=True)
class StateViews:
    """The state of elements ``[start, stop)`` of a parameter.

    Attributes:
        start, stop: elements; 0 and the parameter's count for a whole one.
        whole: whether that is the whole parameter, whose shape the views then have.
        state1, state2: views into a slot or into the state tensors; AdEMAMix's `state1` has two
            rows, which follow each other directly.
        absmax1, absmax2: 8-bit only; one value per block of 256 elements (AdEMAMix: two rows).
        qmap1, qmap2: 8-bit only; the quantization maps.
        unorm: where the update's norm is left, if it is limited.
    """

    start: int
    stop: int
    whole: bool
    state1: torch.Tensor
    state2: torch.Tensor | None
    absmax1: torch.Tensor | None = None
    absmax2: torch.Tensor | None = None
    qmap1: torch.Tensor | None = None
    qmap2: torch.Tensor | None = None
    unorm: torch.Tensor | None = None
    addresses: tuple[ctypes.c_void_p | None, ...] = field(init=False, repr=False)
    """Of `state1`, `state2`, `qmap1`, `qmap2`, `absmax1` and `absmax2`, and..."""
    count: ctypes.c_int32 = field(init=False, repr=False)
    """...how many elements, as C takes them."""

    def __post_init__(self) -> None:
        tensors = self.state1, self.state2, self.qmap1, self.qmap2, self.absmax1, self.absmax2
        found = (None if one is None else ctypes.c_void_p(one.data_ptr()) for one in tensors)
        object.__setattr__(self, "addresses", tuple(found))
        object.__setattr__(self, "count", ctypes.c_int32(self.stop - self.start))


def launch(name: str, active: Active, views: StateViews) -> None:
    """Launch the update of one slice on the compute stream.

    Args:
        name: bitsandbytes' ``optimizer_name``: ``adam``, ``lion`` or ``ademamix``.
        active: the parameter, opened for this step; parameter and gradient are contiguous.
        views: its state, already on the device.
    """
    if views.stop == views.start:
        return  # a launch without blocks is a CUDA error, after which bitsandbytes ends the process
    config, step = active.config, active.step
    assert config is not None
    parameter = active.parameter
    gradient = parameter.grad
    assert gradient is not None
    if active.sharded:
        parameter, gradient = local(parameter), local(gradient)
    values = config.values
    third = _third_moment(values, step) if name == "ademamix" else None
    if gradient.is_cuda and launched(name, gradient, parameter, views, config, step, third):
        return
    beta3, alpha = third or (0.0, 0.0)
    if not views.whole:
        parameter = parameter.detach().view(-1)[views.start : views.stop]
        gradient = gradient.view(-1)[views.start : views.stop]
    if views.absmax1 is None:
        _update_32bit(name, gradient, parameter, views, values, step, beta3, alpha)
    elif name == "ademamix" and gradient.is_cuda:
        _update_ademamix_8bit_cuda(gradient, parameter, views, values, step, beta3, alpha)
    else:
        _update_8bit(name, gradient, parameter, views, values, step, beta3, alpha)


@cache
def _operators(on_cuda: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    """bitsandbytes' 32-bit and 8-bit update operators.

    For CUDA the functions registered for them, called directly: PyTorch's dispatcher would take as
    much host time again (19 instead of 10 microseconds a call), and it has nothing to choose here.
    """
    if on_cuda:
        from bitsandbytes.backends.cuda import ops

        return ops._optimizer_update_32bit_impl, ops._optimizer_update_8bit_blockwise_impl
    operators = torch.ops.bitsandbytes
    return (
        operators.optimizer_update_32bit.default,
        operators.optimizer_update_8bit_blockwise.default,
    )


def _third_moment(config: Mapping[str, Any], step: int) -> tuple[float, float]:
    """AdEMAMix's ``beta3`` and ``alpha`` of this step; it warms both up."""
    beta1, _, *third = config["betas"]
    beta3 = third[0] if third else 0.0
    alpha = config["alpha"]
    if config["t_alpha"]:
        alpha = min(step * alpha / config["t_alpha"], alpha)
    if config["t_beta3"]:
        log1, log3 = math.log(beta1), math.log(beta3)
        scale = step / config["t_beta3"]
        beta3 = min(math.exp((log1 * log3) / (((1 - scale) * log3) + (scale * log1))), beta3)
    return beta3, alpha


def _update_32bit(
    name: str,
    gradient: torch.Tensor,
    parameter: torch.Tensor,
    views: StateViews,
    config: Mapping[str, Any],
    step: int,
    beta3: float,
    alpha: float,
) -> None:
    limited = config["max_unorm"] > 0.0
    update, _ = _operators(gradient.is_cuda)
    update(
        name,
        gradient,
        parameter,
        views.state1,
        views.state2,
        views.unorm if limited else None,
        config["max_unorm"],
        float(torch.norm(parameter.detach().float())) if limited else 0.0,
        config["betas"][0],
        config["betas"][1],
        beta3,
        alpha,
        config["eps"],
        config["weight_decay"],
        step,
        config["lr"],
        1.0,
        config["skip_zeros"],
    )


def _update_8bit(
    name: str,
    gradient: torch.Tensor,
    parameter: torch.Tensor,
    views: StateViews,
    config: Mapping[str, Any],
    step: int,
    beta3: float,
    alpha: float,
) -> None:
    _, update = _operators(gradient.is_cuda)
    update(
        name,
        gradient,
        parameter,
        views.state1,
        views.state2,
        config["betas"][0],
        config["betas"][1],
        beta3,
        alpha,
        config["eps"],
        step,
        config["lr"],
        views.qmap1,
        views.qmap2,
        views.absmax1,
        views.absmax2,
        config["weight_decay"],
        1.0,
        config["skip_zeros"],
    )


def _update_ademamix_8bit_cuda(
    gradient: torch.Tensor,
    parameter: torch.Tensor,
    views: StateViews,
    config: Mapping[str, Any],
    step: int,
    beta3: float,
    alpha: float,
) -> None:
    """Give the kernel whole blocks, and the absmax rows where it looks for them.

    The kernel finds the second row's absmax at block ``(n + i) / 256``, where ``n`` is the size of
    the slice: right behind the first row's, if ``n`` is a multiple of 256. If not, the last block
    of the first row and the first block of the second share an entry and race; padding to whole
    blocks gives them one each, which is what the CPU operator computes.
    """
    assert views.absmax1 is not None and views.state2 is not None
    count = views.stop - views.start
    absmax1 = views.absmax1.contiguous()
    if count % BLOCK == 0:
        aligned = replace(views, absmax1=absmax1)
        _update_8bit("ademamix", gradient, parameter, aligned, config, step, beta3, alpha)
    else:
        size = -(-count // BLOCK) * BLOCK
        flat = parameter.detach().view(-1)
        moments = on_device(views.state1, parameter.device).view(2, count)
        second = on_device(views.state2, parameter.device).view(-1)
        p, g, state2 = (_padded(one, size) for one in (flat, gradient, second))
        state1 = torch.nn.functional.pad(moments, (0, size - count), value=SIGNED_ZERO)
        padded = replace(views, state1=state1, state2=state2, absmax1=absmax1)
        _update_8bit("ademamix", g, p, padded, config, step, beta3, alpha)
        flat.copy_(p[:count])
        moments.copy_(state1[:, :count])
        second.copy_(state2[:count])
    if absmax1 is not views.absmax1:
        views.absmax1.copy_(absmax1)


def _padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, size - flat.numel()))
