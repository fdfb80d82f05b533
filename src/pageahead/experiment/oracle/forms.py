"""How a problem's values are handed to an optimizer: memory formats, padding, another device."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from pageahead.memory.layout import BLOCK

__all__ = ["AsGiven", "Contiguous", "Form", "OnCpu"]


class Form(Protocol):
    """Makes tensors that are new to the optimizer and hold a problem's values."""

    def parameter(self, number: int, values: torch.Tensor) -> torch.Tensor:
        """Initial values of a parameter."""

    def gradient(self, number: int, step: int, values: torch.Tensor) -> torch.Tensor:
        """A gradient."""


class AsGiven:
    """In the memory format that a case names: see `pageahead.experiment.oracle.case.FORMS`."""

    def __init__(self, form: str) -> None:
        self._form = form

    def parameter(self, number: int, values: torch.Tensor) -> torch.Tensor:
        if self._form == "channels_last" and values.dim() == 4:
            return values.to(memory_format=torch.channels_last, copy=True)
        if self._form == "strided":
            return (_transposed, _every_second, torch.clone)[number % 3](values)
        return values.clone()

    def gradient(self, number: int, step: int, values: torch.Tensor) -> torch.Tensor:
        # A backward pass is free to choose another format at each step.
        if self._form == "channels_last" and values.dim() == 4 and step % 2 == 0:
            return values.to(memory_format=torch.channels_last, copy=True)
        if self._form == "strided":
            return (_every_second, _transposed, _expanded)[(number + step) % 3](values)
        return values.clone()


class Contiguous:
    """Contiguous copies; those of some parameters flat, with zeros up to whole blocks behind."""

    def __init__(self, form: str, padded: Collection[int] = ()) -> None:
        self._as_given = AsGiven(form)
        self._padded = padded

    def parameter(self, number: int, values: torch.Tensor) -> torch.Tensor:
        return _padded(values) if number in self._padded else values.clone()

    def gradient(self, number: int, step: int, values: torch.Tensor) -> torch.Tensor:
        given = self._as_given.gradient(number, step, values)  # the values may depend on the form
        return _padded(given) if number in self._padded else given.contiguous()


class OnCpu:
    """Copies on the CPU."""

    def parameter(self, number: int, values: torch.Tensor) -> torch.Tensor:
        return values.cpu().clone()

    def gradient(self, number: int, step: int, values: torch.Tensor) -> torch.Tensor:
        return values.cpu().clone()


def _transposed(values: torch.Tensor) -> torch.Tensor:
    """First and last dimension swapped in memory."""
    if values.dim() < 2:
        return values.clone()
    return values.transpose(0, -1).contiguous().transpose(0, -1)


def _every_second(values: torch.Tensor) -> torch.Tensor:
    """With a gap after each element, which is not to be touched."""
    if values.dim() == 0:
        return values.clone()
    wide = torch.full((*values.shape, 2), torch.nan, dtype=values.dtype, device=values.device)
    wide[..., 0] = values
    return wide[..., 0]


def _expanded(values: torch.Tensor) -> torch.Tensor:
    """The first row for all rows, as the gradient of a sum has it: other values, stride 0."""
    if values.dim() == 0:
        return values.clone()
    return values[:1].clone().expand_as(values)


def _padded(values: torch.Tensor) -> torch.Tensor:
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK))
