"""Where each parameter's state lives, and why, in words a user can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pageahead.memory.layout import StateShape
from pageahead.memory.residency import spread
from pageahead.optim.paging import Paging

__all__ = [
    "PAGED_NUMEL",
    "Candidate",
    "Route",
    "budget_words",
    "choose",
    "state_dtype",
    "state_shape",
]

PAGED_NUMEL = 100_000
"""Elements from which bitsandbytes pages a parameter's state."""


@dataclass(frozen=True, slots=True)
class Route:
    """What was decided for one parameter.

    Attributes:
        group, index: its place in ``param_groups``.
        shape, numel, device: of the parameter.
        state_bytes: bytes of its state tensors (``state1`` and ``state2``).
        path: ``streamed``, ``lookahead``, ``sequential`` or ``resident``.
        reason: why that path.
    """

    group: int
    index: int
    shape: tuple[int, ...]
    numel: int
    device: str
    state_bytes: int
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A parameter about to get state: what a route is chosen from.

    Attributes:
        parameter: the parameter.
        shape: of the state tensors that this process makes; its own part of a sharded one's.
        limits_update_norm: whether ``max_unorm`` limits the norm of its update.
    """

    parameter: torch.Tensor
    shape: StateShape
    limits_update_norm: bool

    @property
    def large(self) -> bool:
        """Whether its state may be paged. The size of the whole parameter decides, on each rank."""
        return self.parameter.numel() >= PAGED_NUMEL and self.shape.numel > 0


def state_dtype(config: Mapping[str, Any], numel: int) -> torch.dtype:
    """The dtype of a parameter's state tensors, by bitsandbytes' rule.

    Raises:
        ValueError: ``optim_bits`` is neither 8 nor 32.
    """
    bits = config["optim_bits"]
    if bits not in (8, 32):
        raise ValueError(f"optim_bits={bits} is not supported; state has 8 or 32 bits")
    wide = bits == 32 or numel < config["min_8bit_size"]
    return torch.float32 if wide else torch.uint8


def state_shape(optimizer_name: str, dtype: torch.dtype, numel: int) -> StateShape:
    """The state tensors bitsandbytes gives a parameter: Lion one, AdEMAMix a double first one."""
    size = dtype.itemsize
    tensors = {
        "lion": ((1, size),),
        "adam": ((1, size), (1, size)),
        "ademamix": ((2, size), (1, size)),
    }[optimizer_name]
    return StateShape(numel, tensors)


def choose(
    candidates: Sequence[Candidate],
    paging: Paging,
    pageable_bytes: int,
    resident_bytes: int,
    auto_bytes: int | None = None,
) -> list[tuple[str, str]]:
    """Choose path and reason for parameters that get state now.

    Args:
        candidates: in step order.
        paging: the user's settings.
        pageable_bytes: state bytes of all parameters of 100,000 elements or more.
        resident_bytes: how much of the budget earlier choices took.
        auto_bytes: what ``hbm_budget="auto"`` has for these candidates, whatever earlier ones took.

    Returns:
        For each candidate ``("resident" | "paged", reason)``.

    Raises:
        ValueError: a parameter's update norm is limited (``max_unorm``), which needs its whole
            state on the device, and the budget does not allow that. Nothing has been changed.
    """
    large = [number for number, one in enumerate(candidates) if one.large]
    if auto_bytes is None:
        budget = paging.budget_bytes(pageable_bytes) - resident_bytes
    else:
        budget = auto_bytes
    decided = [("resident", _why_small(one)) for one in candidates]
    must = [number for number in large if candidates[number].limits_update_norm]
    needed = sum(candidates[number].shape.nbytes for number in must)
    if needed > max(budget, 0):
        raise ValueError(
            f"max_unorm > 0 limits the norm of a whole parameter's update, so the state of "
            f"{len(must)} parameter(s), {needed:,} bytes, has to stay on the device; the budget "
            f"has {max(budget, 0):,} bytes left. Pass Paging(hbm_budget={needed + resident_bytes}) "
            f"or more, or set max_unorm=0."
        )
    for number in must:
        decided[number] = ("resident", "max_unorm limits the norm of the whole update")
    rest = [number for number in large if number not in set(must)]
    kept = spread([candidates[number].shape.nbytes for number in rest], budget - needed)
    for position, number in enumerate(rest):
        if position in kept:
            decided[number] = ("resident", f"within {budget_words(paging, auto_bytes)}")
        else:
            decided[number] = ("paged", _why_paged(paging, auto_bytes))
    return decided


def budget_words(paging: Paging, auto_bytes: int | None) -> str:
    """The budget as the user wrote it and, where it is ``"auto"``, what was decided."""
    decided = f" ({auto_bytes:,} bytes)" if auto_bytes is not None else ""
    return f"hbm_budget={paging.hbm_budget!r}{decided}"


def _why_small(candidate: Candidate) -> str:
    if candidate.parameter.numel() >= PAGED_NUMEL:
        return "no element of it is on this rank"
    return f"under {PAGED_NUMEL:,} elements, where paging would cost more than it saves"


def _why_paged(paging: Paging, auto_bytes: int | None) -> str:
    size = f"{PAGED_NUMEL:,} elements or more"
    if paging.hbm_budget == 0 or (paging.hbm_budget == "auto" and not auto_bytes):
        return size
    return f"{size}, beyond {budget_words(paging, auto_bytes)}"
