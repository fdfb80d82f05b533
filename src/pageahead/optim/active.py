"""The parameters one step updates, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from pageahead.optim.hyperparameters import Hyperparameters
from pageahead.optim.sharded import check_gradient, is_sharded, local, wait_for

if TYPE_CHECKING:
    from pageahead.optim.homes import Home

__all__ = ["Active", "GetConfig", "Listing", "check", "collect", "make_contiguous"]

STRIDED = torch.strided
SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

GetConfig = Callable[[int, int, Mapping[str, Any]], Hyperparameters]
"""bitsandbytes' ``get_config(group index, parameter index, group)``, as a step uses it."""


@dataclass(slots=True)
class Active:
    """One listing of a parameter, and what a step knows of it while it has a gradient.

    Attributes:
        parameter: on whose ``grad`` the update depends.
        group: its parameter group; `gindex` and `pindex` are its place.
        home: where its state lives; None until it has a place.
        state: its entry of ``optimizer.state``, as of this step; empty until state is made.
        config: hyperparameters; None until its first slice is updated.
        step: the number of this update, from 1.
        sharded: whether the parameter is one process's part of it.
        device: where the parameter was when its gradient was checked, and
        contiguous: whether it and the gradient were.
    """

    parameter: torch.Tensor
    group: Mapping[str, Any]
    gindex: int
    pindex: int
    home: Home | None = None
    state: dict[str, Any] = field(default_factory=dict)
    config: Hyperparameters | None = None
    step: int = 0
    sharded: bool = field(init=False)
    device: torch.device | None = None
    contiguous: bool = False

    def __post_init__(self) -> None:
        # Once, and not for each parameter in each step.
        self.sharded = is_sharded(self.parameter)

    def open(self, get_config: GetConfig) -> None:
        """Read hyperparameters and count the step, as bitsandbytes does before each update."""
        self.config = get_config(self.gindex, self.pindex, self.group)
        self.step = self.state["step"] = self.state["step"] + 1


class Listing:
    """Everything an optimizer lists, in group order; kept from step to step while it is the same.

    A step over many small parameters is bound by what the host does for each of them before the
    first update may start.
    """

    def __init__(self) -> None:
        self._groups: list[Mapping[str, Any]] = []
        self._counts: list[int] = []
        self._parameters: list[torch.Tensor] = []
        self._entries: list[Active] = []

    def of(self, groups: Sequence[Mapping[str, Any]]) -> Sequence[Active]:
        """An entry for each listing in ``param_groups``."""
        listed = list(chain.from_iterable(group["params"] for group in groups))
        known = self._entries
        if not (
            len(listed) == len(known)
            and len(groups) == len(self._groups)
            and all(map(is_, groups, self._groups))
            and all(map(is_, listed, self._parameters))
            and [len(group["params"]) for group in groups] == self._counts
        ):
            self._groups = list(groups)
            self._counts = [len(group["params"]) for group in groups]
            self._parameters = listed
            self._entries = [
                Active(parameter, group, gindex, pindex)
                for gindex, group in enumerate(groups)
                for pindex, parameter in enumerate(group["params"])
            ]
        return self._entries


def collect(listing: Iterable[Active], done: Container[torch.Tensor] = ()) -> list[Active]:
    """Return the listings whose parameter has a gradient, in order.

    Args:
        listing: all of the optimizer's.
        done: parameters that are left out.

    Raises:
        TypeError: a gradient is sparse, or its dtype is not the parameter's or not one that
            bitsandbytes' kernels have.
        ValueError: a gradient is on another device, of another shape or sharded differently than
            its parameter.
    """
    found = []
    for active in listing:
        parameter = active.parameter
        gradient = parameter.grad
        if gradient is None or (done and parameter in done):
            continue
        check(parameter, gradient, active)
        active.config = None
        found.append(active)
    return found


def check(parameter: torch.Tensor, gradient: torch.Tensor, active: Active) -> None:
    """Check that a gradient is one that bitsandbytes can update its parameter with.

    Notes what later checks of the same step need: asking a tensor again takes as long again.

    Raises:
        TypeError, ValueError: as `collect`.
    """
    device = parameter.device
    if (
        (dtype := gradient.dtype) is not parameter.dtype
        or dtype not in SUPPORTED_DTYPES
        or gradient.layout is not STRIDED
        or parameter.layout is not STRIDED
        or gradient.device != device
        or gradient.shape != parameter.shape
    ):
        _refuse(parameter, gradient, active)
    active.device = device
    # Of a sharded one that is for the parts of this process to say.
    active.contiguous = (
        not active.sharded and parameter.is_contiguous() and gradient.is_contiguous()
    )
    if active.sharded or (type(gradient) is not torch.Tensor and is_sharded(gradient)):
        check_gradient(parameter, gradient, _describe(active))


def make_contiguous(actives: Iterable[Active]) -> None:
    """Replace non-contiguous parameters and gradients by contiguous ones, as bitsandbytes does.

    Call it after `check`.
    """
    for active in actives:
        if active.contiguous:
            continue
        parameter = active.parameter
        gradient = parameter.grad
        if active.sharded:
            parameter = local(parameter)
            if gradient is not None:
                wait_for(gradient)
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        if gradient is not None and not local(gradient).is_contiguous():
            active.parameter.grad = gradient.contiguous()


def _describe(active: Active) -> str:
    parameter = active.parameter
    return (
        f"parameter {active.pindex} of group {active.gindex} (shape {tuple(parameter.shape)}, "
        f"{parameter.dtype}, {parameter.device})"
    )


def _refuse(parameter: torch.Tensor, gradient: torch.Tensor, active: Active) -> None:
    what = _describe(active)
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
