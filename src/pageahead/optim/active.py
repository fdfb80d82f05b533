"""The parameters one step updates, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Active", "GetConfig", "check", "collect", "make_contiguous"]

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

GetConfig = Callable[[int, int, Mapping[str, Any]], Mapping[str, Any]]
"""bitsandbytes' ``get_config(group index, parameter index, group)``."""


@dataclass(slots=True)
class Active:
    """One listing of a parameter that has a gradient. Lives for one step.

    Attributes:
        parameter: on whose ``grad`` the update depends.
        group: its parameter group; `gindex` and `pindex` are its place.
        state: its entry of ``optimizer.state``, empty until state is made.
        config: hyperparameters, read when its first slice is updated.
        step: the number of this update, from 1.
    """

    parameter: torch.Tensor
    group: Mapping[str, Any]
    gindex: int
    pindex: int
    state: dict[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    step: int = 0

    def open(self, get_config: GetConfig) -> None:
        """Read hyperparameters and count the step, as bitsandbytes does before each update."""
        self.config = get_config(self.gindex, self.pindex, self.group)
        self.state["step"] += 1
        self.step = self.state["step"]


def collect(
    groups: Iterable[Mapping[str, Any]], done: Container[torch.Tensor] = ()
) -> list[Active]:
    """Return the parameters with a gradient, in group order, one entry per listing.

    Args:
        groups: ``param_groups``.
        done: parameters that are left out.

    Raises:
        TypeError: a gradient is sparse, or its dtype is not the parameter's or not one that
            bitsandbytes' kernels have.
        ValueError: a gradient is on another device or of another shape than its parameter.
    """
    found = []
    for gindex, group in enumerate(groups):
        for pindex, parameter in enumerate(group["params"]):
            if parameter.grad is None or (done and parameter in done):
                continue
            check(parameter, parameter.grad, gindex, pindex)
            found.append(Active(parameter, group, gindex, pindex))
    return found


def check(parameter: torch.Tensor, gradient: torch.Tensor, gindex: int, pindex: int) -> None:
    """Check that a gradient is one that bitsandbytes can update its parameter with.

    Raises:
        TypeError, ValueError: as `collect`.
    """
    if (
        gradient.dtype != parameter.dtype
        or gradient.dtype not in SUPPORTED_DTYPES
        or gradient.layout != torch.strided
        or parameter.layout != torch.strided
        or gradient.device != parameter.device
        or gradient.shape != parameter.shape
    ):
        _refuse(parameter, gradient, gindex, pindex)


def make_contiguous(actives: Iterable[Active]) -> None:
    """Replace non-contiguous parameters and gradients by contiguous ones, as bitsandbytes does."""
    for active in actives:
        parameter = active.parameter
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        if parameter.grad is not None and not parameter.grad.is_contiguous():
            parameter.grad = parameter.grad.contiguous()


def _refuse(parameter: torch.Tensor, gradient: torch.Tensor, gindex: int, pindex: int) -> None:
    what = (
        f"parameter {pindex} of group {gindex} (shape {tuple(parameter.shape)}, "
        f"{parameter.dtype}, {parameter.device})"
    )
    nothing = "Nothing was updated."
    if gradient.layout != torch.strided or parameter.layout != torch.strided:
        raise TypeError(
            f"{what} has a {gradient.layout} gradient; paged optimizers take dense ones. Make it "
            f"dense (for an embedding: sparse=False). {nothing}"
        )
    if gradient.device != parameter.device:
        raise ValueError(
            f"{what} has its gradient on {gradient.device}; both must be on one device. {nothing}"
        )
    if gradient.dtype not in SUPPORTED_DTYPES or parameter.dtype not in SUPPORTED_DTYPES:
        raise TypeError(
            f"{what} has a {gradient.dtype} gradient; bitsandbytes updates float16, bfloat16 and "
            f"float32. {nothing}"
        )
    if gradient.dtype != parameter.dtype:
        raise TypeError(
            f"{what} has a {gradient.dtype} gradient; bitsandbytes chooses the kernel by the "
            f"gradient's dtype alone and would read the parameter as the wrong bytes. Cast one to "
            f"the other's dtype. {nothing}"
        )
    raise ValueError(f"{what} has a gradient of shape {tuple(gradient.shape)}. {nothing}")
