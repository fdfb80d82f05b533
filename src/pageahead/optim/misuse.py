"""What does not go together with updates in backward, as far as it can be known."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from pageahead.optim.paging import Paging
from pageahead.optim.sharded import is_sharded

if TYPE_CHECKING:
    from pageahead.optim.paged import PagedOptimizer

__all__ = ["changed_groups", "groups_of", "other_users", "refuse_kept_shards"]


def other_users(optimizer: PagedOptimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Raise `RuntimeError` if something works on the gradients that comes after the hooks.

    Nothing says so: `DistributedDataParallel` and a `GradScaler` know their parameters and
    optimizers, not the other way round. So all objects are looked through, once.
    """
    ours = {id(parameter) for parameter in parameters}
    if _other_user(optimizer, ours):
        gc.collect()  # one that nobody can reach any more does nothing, but is among all objects
        if obstacle := _other_user(optimizer, ours):
            raise RuntimeError(f"{obstacle} Nothing was updated.")


def _other_user(optimizer: PagedOptimizer, ours: Container[int]) -> str:
    for one in gc.get_objects():
        if not issubclass(type(one), (DistributedDataParallel, torch.amp.GradScaler)):
            continue
        with suppress(AttributeError):  # of one whose making failed: an exception may keep it
            if isinstance(one, torch.amp.GradScaler):
                if _scales_for(one, optimizer):
                    return (
                        "in_backward=True with a GradScaler in use: gradients are scaled until "
                        "scaler.step(), which comes after the updates. Use in_backward=False, or "
                        "bfloat16 without a scaler. If the scaler is another model's, which it "
                        "does not say, delete it first."
                    )
            elif any(id(parameter) in ours for parameter in one.parameters()):
                return (
                    "in_backward=True under DistributedDataParallel: it averages gradients after "
                    "they were used. Use in_backward=False, or fully_shard (FSDP2), which averages "
                    "before."
                )
    return ""


def refuse_kept_shards(paging: Paging, parameters: Iterable[torch.Tensor]) -> None:
    """Raise `ValueError` if gradients of sharded parameters would be kept after their update.

    `clip_grad_norm_` changes the local parts of such gradients without PyTorch counting it, and
    parts that were reduced together share one count. So a change that has no effect could not be
    noticed; a gradient that is freed cannot be changed.
    """
    for parameter in parameters:
        if is_sharded(parameter) and not paging.free_grads:
            raise ValueError(
                f"in_backward=True with a sharded parameter (DTensor, shape "
                f"{tuple(parameter.shape)}) needs free_grads=True: clipping its gradient after the "
                f"update has no effect, and could not be noticed if the gradient were kept."
            )


def _scales_for(scaler: torch.amp.GradScaler, optimizer: PagedOptimizer) -> bool:
    if not scaler.is_enabled() or scaler._scale is None:  # it has scaled nothing yet
        return False
    known = scaler._per_optimizer_states
    return not known or id(optimizer) in known


def groups_of(optimizer: PagedOptimizer) -> list[dict[str, Any]]:
    """The hyperparameters of every group."""
    return [
        # Lists can be changed in place: `betas`.
        {
            key: list(value) if isinstance(value, list) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def changed_groups(optimizer: PagedOptimizer, before: Sequence[dict[str, Any]]) -> str:
    """Say which hyperparameters are not what they were, or nothing."""
    now = groups_of(optimizer)
    for number, (one, other) in enumerate(zip(before, now, strict=False)):
        for key in one.keys() | other.keys():
            if not _same(one.get(key), other.get(key)):
                return (
                    f"{key} of group {number} was {one.get(key)!r} when backward began and "
                    f"is {other.get(key)!r} now. Set hyperparameters before backward or after "
                    f"step()"
                )
    return ""


def _same(one: Any, other: Any) -> bool:
    if one is other:  # NaN, too
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(one == other)
