"""Copies of whole optimizers, by `copy.deepcopy` and by pickling (as ``torch.save`` does)."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pageahead.optim.paged import PagedOptimizer

__all__ = ["cloned", "deep_copy", "reduced"]

OWN = frozenset(
    {
        "_backward",
        "_elastic",
        "_engines",
        "_homes",
        "_listing",
        "_process",
        "_reserved",
        "_source",
        "mng",
        "page_mng",
        "param_groups",
        "state",
        "step",  # a learning-rate scheduler puts its wrapper of the original's there
    }
)
"""Attributes that a copy does not take over: it makes its own, or they are this process's."""


def reduced(optimizer: PagedOptimizer) -> tuple[Any, ...]:
    """What pickling an optimizer stores: how to rebuild it, and its state.

    State is cloned. To send a tensor to another process, PyTorch moves its storage to shared
    memory: that of the arena must not go there.
    """
    return _rebuild, (
        type(optimizer),
        _attributes(optimizer),
        optimizer.param_groups,
        cloned(optimizer.state_dict()),
    )


def deep_copy(optimizer: PagedOptimizer, memo: dict[int, Any]) -> PagedOptimizer:
    """`copy.deepcopy` of an optimizer; copy its model in the same call to have its parameters."""
    return _rebuild(
        type(optimizer),
        copy.deepcopy(_attributes(optimizer), memo),
        copy.deepcopy(optimizer.param_groups, memo),
        optimizer.state_dict(),
    )


def _attributes(optimizer: PagedOptimizer) -> dict[str, Any]:
    # Hooks stay with the original, as with PyTorch's optimizers.
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in OWN and not (key.startswith("_") and "hook" in key)
    }


def cloned(value: Any) -> Any:
    """The same with every tensor in it, in dicts too, in memory of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: cloned(entry) for key, entry in value.items()}
    return value


def _rebuild(
    cls: type[PagedOptimizer],
    attributes: dict[str, Any],
    groups: list[dict[str, Any]],
    state_dict: dict[str, Any],
) -> PagedOptimizer:
    made = cls.__new__(cls)
    made._take_over(attributes, groups)
    made.load_state_dict(state_dict)
    return made
