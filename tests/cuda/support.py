"""Parameters, gradients and comparisons shared by the CUDA tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bitsandbytes as bnb
import torch

import pageahead
from pageahead import Paging

SHAPES = ((64,), (300, 1000), (99_999,), (100_000,), (100_001,), (1_000_000,), (256, 256, 8))
ALIGNED = ((4096,), (300, 1024), (102_400,), (1_048_576,), (256, 256, 8))


def parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int = 0
) -> list[torch.nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, device="cuda").to(dtype))
        for shape in shapes
    ]


def gradients(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1000 + seed)
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]


def legacy(family: str, params: list[torch.nn.Parameter], bits: int, **kwargs: Any) -> Any:
    return getattr(bnb.optim, family)(params, optim_bits=bits, **kwargs)


def candidate(
    family: str, params: list[torch.nn.Parameter], bits: int, paging: Paging, **kwargs: Any
) -> Any:
    return getattr(pageahead, family)(params, optim_bits=bits, paging=paging, **kwargs)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def differences(
    one: Any,
    one_params: Sequence[torch.Tensor],
    other: Any,
    other_params: Sequence[torch.Tensor],
) -> list[str]:
    """Name every parameter and state tensor whose bits differ between two optimizers."""
    found = []
    for number, (p, q) in enumerate(zip(one_params, other_params, strict=True)):
        if not torch.equal(bits_of(p), bits_of(q)):
            found.append(f"parameter {number}")
        mine, theirs = one.state.get(p, {}), other.state.get(q, {})
        if set(mine) != set(theirs):
            found.append(f"parameter {number}: keys {set(mine) ^ set(theirs)}")
        for key in set(mine) & set(theirs):
            if isinstance(mine[key], torch.Tensor):
                if not torch.equal(bits_of(mine[key]), bits_of(theirs[key])):
                    found.append(f"parameter {number}: {key}")
            elif mine[key] != theirs[key]:
                found.append(f"parameter {number}: {key} {mine[key]} {theirs[key]}")
    return found
