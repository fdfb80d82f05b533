"""Loading a state dict: everything is checked, then memory is taken, then tensors are copied in.

Nothing of the optimizer changes before the whole state dict is known to fit, and no tensor takes
a detour: each is copied from where it is to where state lives here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from pageahead.memory.layout import BLOCK
from pageahead.optim.routing import Candidate, state_shape

if TYPE_CHECKING:
    from pageahead.optim.paged import PagedOptimizer

__all__ = ["CheckpointError", "load"]

WRAPPED = "__bnb_optimizer_quant_state__"
"""Under this key bitsandbytes keeps the tensors that FSDP must not gather."""

QMAP_NUMEL = 256


class CheckpointError(ValueError):
    """A state dict does not fit the optimizer. Raised before anything is changed."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The checked state of one parameter."""

    parameter: torch.Tensor
    gindex: int
    pindex: int
    entries: Mapping[str, Any]
    candidate: Candidate


def load(optimizer: PagedOptimizer, state_dict: dict[str, Any]) -> None:
    """Load `state_dict` into `optimizer`. See `PagedOptimizer.load_state_dict`."""
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    saved, groups = _check(optimizer, state_dict)
    optimizer._adopt_state(saved, groups)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def fill(state: dict[str, Any], saved: Saved) -> None:
    """Give a parameter's `state` the checked entries: copied into the state tensors it has."""
    for key, value in saved.entries.items():
        if key == "step":
            state[key] = int(value)
        elif key in ("state1", "state2"):
            state[key].copy_(value)
        else:
            state[key] = value.detach().to(saved.parameter.device, copy=True)


def _check(
    optimizer: PagedOptimizer, state_dict: Mapping[str, Any]
) -> tuple[list[Saved], list[dict[str, Any]]]:
    missing = {"state", "param_groups"} - set(state_dict)
    if missing:
        raise CheckpointError(f"not an optimizer state dict: it has no {' and no '.join(missing)}")
    current, loaded = optimizer.param_groups, state_dict["param_groups"]
    sizes, found = ([len(group["params"]) for group in groups] for groups in (current, loaded))
    if sizes != found:
        raise CheckpointError(
            f"the state dict has parameter groups of {found} parameters, this optimizer of {sizes}"
        )
    keys = chain.from_iterable(group["params"] for group in loaded)
    places = dict(zip(keys, optimizer._listed(), strict=True))
    saved = []
    for key, entries in state_dict["state"].items():
        if key not in places:
            raise CheckpointError(
                f"the state dict has state for a parameter {key!r} it never lists"
            )
        if entries:
            gindex, pindex, parameter = places[key]
            flat = {**entries, **entries.get(WRAPPED, {})}
            flat.pop(WRAPPED, None)
            saved.append(_check_entries(optimizer, parameter, gindex, pindex, flat))
    groups = [
        {**group, **{key: value for key, value in other.items() if key != "params"}}
        for group, other in zip(current, loaded, strict=True)
    ]
    return saved, groups


def _check_entries(
    optimizer: PagedOptimizer,
    parameter: torch.Tensor,
    gindex: int,
    pindex: int,
    entries: Mapping[str, Any],
) -> Saved:
    what = f"state of parameter {pindex} of group {gindex} (shape {tuple(parameter.shape)})"
    name = optimizer.optimizer_name
    if "state1" not in entries:
        raise CheckpointError(f"{what}: no 'state1' among {sorted(entries)}")
    dtype = entries["state1"].dtype
    if dtype not in (torch.float32, torch.uint8):
        raise CheckpointError(f"{what}: state1 is {dtype}; float32 or uint8 was expected")
    expected = _expected(name, dtype, parameter)
    if (
        name == "ademamix"
        and tuple(entries["state1"].shape) == tuple(parameter.shape)
        and parameter.dim()
    ):
        raise CheckpointError(
            f"{what}: state1 has the parameter's own shape, but AdEMAMix keeps two moments in it. "
            f"This is a checkpoint of bitsandbytes' AdEMAMix32bit or PagedAdEMAMix32bit, whose "
            f"kernels write past the end of their state; its values cannot be trusted. Train with "
            f"AdEMAMix(optim_bits=32) or PagedAdEMAMix(optim_bits=32) instead."
        )
    optional = {"unorm_vec"}
    absent = set(expected) - set(entries)
    unknown = set(entries) - set(expected) - optional
    if absent or unknown:
        raise CheckpointError(
            f"{what}: "
            + "; ".join(
                f"{label} {sorted(keys)}"
                for label, keys in (("missing", absent), ("unknown", unknown))
                if keys
            )
            + f". {type(optimizer).__name__} with {dtype} state has {sorted(expected)}."
        )
    for key, want in expected.items():
        value = entries[key]
        if want is None:
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise CheckpointError(f"{what}: step is a tensor of {value.numel()} elements")
            continue
        shape, kind = want
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{what}: {key} is a {type(value).__name__}, not a tensor")
        if tuple(value.shape) != shape or value.dtype != kind:
            raise CheckpointError(
                f"{what}: {key} is {value.dtype} of shape {tuple(value.shape)}; "
                f"{kind} of shape {shape} was expected"
            )
    limited = "unorm_vec" in entries
    shape_of_state = state_shape(name, dtype, parameter.numel())
    return Saved(parameter, gindex, pindex, entries, Candidate(parameter, shape_of_state, limited))


def _expected(
    name: str, dtype: torch.dtype, parameter: torch.Tensor
) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """Keys a parameter's state has, with shape and dtype of those that are tensors."""
    shape = tuple(parameter.shape)
    two_rows = name == "ademamix"
    expected: dict[str, tuple[tuple[int, ...], torch.dtype] | None] = {
        "step": None,
        "state1": ((2, *shape) if two_rows else shape, dtype),
    }
    if name != "lion":
        expected["state2"] = (shape, dtype)
    if dtype == torch.uint8:
        blocks = -(-parameter.numel() // BLOCK)
        expected["absmax1"] = ((2, blocks) if two_rows else (blocks,), torch.float32)
        expected["qmap1"] = ((QMAP_NUMEL,), torch.float32)
        if name != "lion":
            expected["absmax2"] = ((blocks,), torch.float32)
            expected["qmap2"] = ((QMAP_NUMEL,), torch.float32)
    return expected
