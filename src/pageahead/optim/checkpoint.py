"""State dicts: bitsandbytes' format, both ways, whatever wrote it and wherever its tensors are."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pageahead.optim.fitting import WRAPPED, CheckpointError, Saved, check_fit, count_of
from pageahead.optim.resharding import requantize

if TYPE_CHECKING:
    from pageahead.optim.paged import PagedOptimizer

__all__ = [
    "WRAPPED",
    "CheckpointError",
    "Saved",
    "fill",
    "load",
    "small",
    "unwrapped",
    "will_be_flat",
]

TORCH_HELPERS = "torch.distributed.checkpoint.state_dict"


def load(optimizer: PagedOptimizer, state_dict: dict[str, Any]) -> None:
    """Load `state_dict` into `optimizer`. See `PagedOptimizer.load_state_dict`."""
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"not an optimizer state dict but a {type(state_dict).__name__}")
    state_dict = dict(state_dict)  # hooks may change it; the caller's stays as it is
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    saved, loaded = check_fit(optimizer, state_dict)
    groups = [
        {
            **group,
            # Not shared with the caller's: a learning rate may be a tensor.
            **{key: copy.deepcopy(value) for key, value in other.items() if key != "params"},
            "betas": type(group["betas"])(other.get("betas", group["betas"])),  # JSON has lists
        }
        for group, other in zip(optimizer.param_groups, loaded, strict=True)
    ]
    optimizer._adopt_state(saved, groups)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def small(saved: Sequence[Saved]) -> list[dict[str, Any]]:
    """Copy what stays on the device (``absmax``, ``qmap``) there, for each parameter.

    It takes memory, so it comes before anything is changed. Parameters that share a ``qmap``, as
    bitsandbytes makes them, share the copy.
    """
    qmaps: dict[tuple[Any, ...], torch.Tensor] = {}
    copies = []
    for one in saved:
        device = one.parameter.device
        made: dict[str, Any] = {}
        for key, value in one.entries.items():
            if key == "step":
                made[key] = count_of(value)
            elif key.startswith("qmap"):
                place = device, value.device, value.data_ptr(), value.stride()
                if place not in qmaps:
                    qmaps[place] = value.detach().to(device, copy=True)
                made[key] = qmaps[place]
            elif key not in ("state1", "state2"):
                made[key] = value.detach().to(device, copy=True)
        copies.append(made)
    return copies


def fill(state: dict[str, Any], saved: Saved, made: dict[str, Any]) -> None:
    """Give a parameter's `state` the checked entries: copied into the state tensors it has."""
    for key in ("state1", "state2"):
        if key in saved.entries:
            state[key].copy_(saved.entries[key])
    for key in state.keys() - saved.entries.keys():
        del state[key]
    state.update(made)
    requantize(state, saved.elsewhere)


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict as bitsandbytes wrote it before it kept tensors from FSDP."""
    states = {
        key: {**{k: v for k, v in entries.items() if k != WRAPPED}, **entries.get(WRAPPED, {})}
        for key, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def will_be_flat() -> bool:
    """Whether PyTorch's ``get_optimizer_state_dict`` asks, and will flatten what it gets.

    Back from the flat form it asks ``optimizer.state`` for the names to look for, and so never
    finds wrapped tensors: they would be lost on resume, as bitsandbytes' own are. PyTorch passes
    nothing on that says so; its settings are in its frame alone.
    """
    frame = sys._getframe(1)
    for _ in range(8):  # wrappers of optimizers may stand in between
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_globals.get("__name__") == TORCH_HELPERS:
            info = frame.f_locals.get("info")
            flat = getattr(info, "flatten_optimizer_state_dict", False)
            # FSDP1 gathers between this and the flattening: it needs them wrapped.
            return bool(flat) and not getattr(info, "fsdp_modules", None)
    return False
