"""Iterations that give the same bits each time, so that optimizers can be compared by them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["difference", "repeatable"]

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Ask every kernel for its deterministic form; `difference` says whether they all had one."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic  # a module whose attribute is a property
    fill = filling.fill_uninitialized_memory
    workspace = os.environ.get(CUBLAS)
    os.environ[CUBLAS] = ":4096:8"  # read by cuBLAS when it starts
    # Not `warn_only`: flash attention would take that as leave to be non-deterministic.
    torch.use_deterministic_algorithms(True)
    # It would write every new activation once more, which is time that no training run spends.
    filling.fill_uninitialized_memory = False
    try:
        if device.type == "cuda":
            # Flash attention has a deterministic backward pass; the memory-efficient one has none.
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                yield
        else:
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        filling.fill_uninitialized_memory = fill
        if workspace is None:
            del os.environ[CUBLAS]
        else:
            os.environ[CUBLAS] = workspace


def difference(model: torch.nn.Module, text: torch.Tensor) -> str | None:
    """Go forward and backward over `text` twice; say what differed, None if nothing did."""
    first = _gradients(model, text)
    second = _gradients(model, text)
    names = [
        name
        for (name, _), one, other in zip(model.named_parameters(), first, second, strict=True)
        if not torch.equal(one.view(torch.int16), other.view(torch.int16))
    ]
    if not names:
        return None
    return (
        f"forward and backward over the same tokens gave other gradients the second time, in "
        f"{len(names)} of {len(first)} parameters ({', '.join(names[:3])})"
    )


def _gradients(model: torch.nn.Module, text: torch.Tensor) -> list[torch.Tensor]:
    model(text).backward()
    gradients = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients
