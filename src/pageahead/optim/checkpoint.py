"""Loading a state dict: everything is checked, then memory is taken, then tensors are copied in.

Nothing of the optimizer changes before the whole state dict is known to fit, and no tensor takes
a detour: each is copied from where it is to where state lives here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from pageahead.memory.layout import BLOCK
from pageahead.optim.resharding import requantize, share
from pageahead.optim.routing import Candidate, state_shape
from pageahead.optim.sharded import local

if TYPE_CHECKING:
    from pageahead.optim.paged import PagedOptimizer

__all__ = ["CheckpointError", "load"]

WRAPPED = "__bnb_optimizer_quant_state__"
"""Under this key bitsandbytes keeps the tensors that FSDP must not gather."""

QMAP_NUMEL = 256
UNORM = ((1,), torch.float32)
"""Shape and dtype of ``unorm_vec``, which only limited updates (``max_unorm``) have."""


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
    elsewhere: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Scales for `pageahead.optim.resharding.requantize`, of 8-bit state that is cut elsewhere."""


def load(optimizer: PagedOptimizer, state_dict: dict[str, Any]) -> None:
    """Load `state_dict` into `optimizer`. See `PagedOptimizer.load_state_dict`."""
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"not an optimizer state dict but a {type(state_dict).__name__}")
    state_dict = dict(state_dict)  # hooks may change it; the caller's stays as it is
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
            state[key] = _count(value)
        elif key in ("state1", "state2"):
            state[key].copy_(value)
        else:
            state[key] = value.detach().to(saved.parameter.device, copy=True)
    requantize(state, saved.elsewhere)


def _check(
    optimizer: PagedOptimizer, state_dict: Mapping[str, Any]
) -> tuple[list[Saved], list[dict[str, Any]]]:
    missing = {"state", "param_groups"} - set(state_dict)
    if missing:
        raise CheckpointError(f"not an optimizer state dict: it has no {' and no '.join(missing)}")
    current, loaded = optimizer.param_groups, state_dict["param_groups"]
    if not isinstance(loaded, list) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in loaded
    ):
        raise CheckpointError("param_groups is not a list of groups, each with a list of 'params'")
    if not isinstance(state_dict["state"], Mapping):
        raise CheckpointError(f"state is a {type(state_dict['state']).__name__}, not a dict")
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
        wrapped = entries.get(WRAPPED, {}) if isinstance(entries, Mapping) else None
        if not isinstance(wrapped, Mapping):
            raise CheckpointError(f"the state of parameter {key!r} is not a dict")
        if entries:
            gindex, pindex, parameter = places[key]
            flat = {**entries, **wrapped}
            flat.pop(WRAPPED, None)
            config = optimizer.get_config(gindex, pindex, optimizer.param_groups[gindex])
            try:
                flat, elsewhere = share(parameter, flat, config, optimizer.optimizer_name)
            except ValueError as error:
                what = f"state of parameter {pindex} of group {gindex}"
                raise CheckpointError(f"{what}: {error}") from error
            one = _check_entries(optimizer, parameter, gindex, pindex, flat)
            saved.append(replace(one, elsewhere=elsewhere))
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
        raise CheckpointError(f"{what}: no 'state1' among {sorted(map(str, entries))}")
    dtype = getattr(entries["state1"], "dtype", type(entries["state1"]).__name__)
    if dtype not in (torch.float32, torch.uint8):
        raise CheckpointError(f"{what}: state1 is {dtype}; float32 or uint8 was expected")
    part = local(parameter)
    expected = _expected(name, dtype, part)
    if name == "ademamix" and tuple(entries["state1"].shape) == tuple(part.shape) and part.dim():
        raise CheckpointError(
            f"{what}: state1 has the parameter's own shape, but AdEMAMix keeps two moments in it. "
            f"This is a checkpoint of bitsandbytes' AdEMAMix32bit or PagedAdEMAMix32bit, whose "
            f"kernels write past the end of their state; its values cannot be trusted. Train with "
            f"AdEMAMix(optim_bits=32) or PagedAdEMAMix(optim_bits=32) instead."
        )
    max_unorm = optimizer.get_config(gindex, pindex, optimizer.param_groups[gindex])["max_unorm"]
    if max_unorm > 0.0 and "unorm_vec" not in entries:  # was not limited when it was saved
        entries = {**entries, "unorm_vec": torch.zeros(1)}
    absent = {"step", *expected} - set(entries)
    unknown = set(entries) - set(expected) - {"step", "unorm_vec"}
    if absent or unknown:
        raise CheckpointError(
            f"{what}: "
            + "; ".join(
                f"{label} {sorted(map(str, keys))}"
                for label, keys in (("missing", absent), ("unknown", unknown))
                if keys
            )
            + f". {type(optimizer).__name__} with {dtype} state has {['step', *sorted(expected)]}."
        )
    for key, value in entries.items():
        if key == "step":
            if _count(value) is None:
                raise CheckpointError(f"{what}: step is {value!r}; a count was expected")
            continue
        shape, kind = expected.get(key, UNORM)
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{what}: {key} is a {type(value).__name__}, not a tensor")
        if value.layout != torch.strided or value.is_meta:
            raise CheckpointError(
                f"{what}: {key} has layout {value.layout} on {value.device}; a dense tensor with "
                f"data was expected"
            )
        if tuple(value.shape) != shape or value.dtype != kind:
            raise CheckpointError(
                f"{what}: {key} is {value.dtype} of shape {tuple(value.shape)}; "
                f"{kind} of shape {shape} was expected"
            )
    limited = max_unorm > 0.0 and dtype == torch.float32
    shape_of_state = state_shape(name, dtype, part.numel())
    return Saved(parameter, gindex, pindex, entries, Candidate(parameter, shape_of_state, limited))


def _count(value: object) -> int | None:
    """A saved step as an int, whether it is a number or a tensor of one; None if it is neither."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if isinstance(value, (int, float)) and value >= 0 and float(value).is_integer():
        return int(value)
    return None


def _expected(
    name: str, dtype: torch.dtype, parameter: torch.Tensor
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The tensors a parameter's state has, with shape and dtype."""
    shape = tuple(parameter.shape)
    two_rows = name == "ademamix"
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
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
