"""Whether a state dict fits an optimizer: everything is checked, nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from pageahead.memory.layout import BLOCK
from pageahead.optim.base import WRAPPED
from pageahead.optim.resharding import share
from pageahead.optim.routing import Candidate, state_shape
from pageahead.optim.sharded import local

if TYPE_CHECKING:
    from pageahead.optim.paged import PagedOptimizer

__all__ = ["WRAPPED", "CheckpointError", "Saved", "check_fit", "count_of"]

QMAP_NUMEL = 256
UNORM = ((1,), torch.float32)
"""Shape and dtype of ``unorm_vec``, which only limited updates (``max_unorm``) have."""

NUMBERS = ("lr", "eps", "weight_decay", "alpha")
"""Hyperparameters that every update reads as numbers."""


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


def check_fit(
    optimizer: PagedOptimizer, state_dict: Mapping[str, Any]
) -> tuple[list[Saved], list[dict[str, Any]]]:
    """Check that a state dict fits.

    Returns:
        The state of each parameter that has some, and the groups without their parameters.

    Raises:
        CheckpointError: it does not fit; says where, what was found and what was expected.
    """
    missing = {"state", "param_groups"} - set(state_dict)
    if missing:
        raise CheckpointError(f"not an optimizer state dict: it has no {' and no '.join(missing)}")
    groups, states = state_dict["param_groups"], state_dict["state"]
    _check_groups(optimizer.param_groups, groups)
    if not isinstance(states, Mapping):
        raise CheckpointError(f"state is a {type(states).__name__}, not a dict")
    places = _places(optimizer, groups)
    saved = []
    for key, entries in _joined(states, places).items():
        if key not in places:
            raise CheckpointError(
                f"the state dict has state for a parameter {key!r} it never lists"
            )
        wrapped = entries.get(WRAPPED, {}) if isinstance(entries, Mapping) else None
        if not isinstance(wrapped, Mapping):
            raise CheckpointError(f"the state of parameter {key!r} is not a dict")
        flat = {**entries, **wrapped}
        flat.pop(WRAPPED, None)
        # torch.distributed.checkpoint makes such an entry of each name it finds nothing under.
        if any(not _is_nothing(value) for value in flat.values()):
            saved.append(_check_share(optimizer, places[key], flat))
    return saved, groups


def _check_groups(current: Sequence[Mapping[str, Any]], loaded: object) -> None:
    if not isinstance(loaded, list) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in loaded
    ):
        raise CheckpointError("param_groups is not a list of groups, each with a list of 'params'")
    sizes, found = ([len(group["params"]) for group in groups] for groups in (current, loaded))
    if sizes != found:
        raise CheckpointError(
            f"the state dict has parameter groups of {found} parameters, this optimizer of {sizes}"
        )
    for number, (group, other) in enumerate(zip(current, loaded, strict=True)):
        for key in NUMBERS:
            if key in group and not _is_number(other.get(key, 0.0)):
                raise CheckpointError(f"{key} of group {number} is {other[key]!r}, not a number")
        betas = other.get("betas", group["betas"])
        if (
            not isinstance(betas, (list, tuple))
            or len(betas) != len(group["betas"])
            or not all(map(_is_number, betas))
        ):
            raise CheckpointError(
                f"betas of group {number} are {betas!r}; this optimizer has {group['betas']!r}"
            )


def _places(
    optimizer: PagedOptimizer, groups: Sequence[Mapping[str, Any]]
) -> dict[Any, tuple[int, int, torch.Tensor]]:
    """Where the parameter is that each key of the saved groups stands for."""
    listed = list(optimizer._listed())
    keys = list(chain.from_iterable(group["params"] for group in groups))
    try:
        places = dict(zip(keys, listed, strict=True))
    except TypeError:  # unhashable
        raise CheckpointError(
            f"'params' of the groups are not keys of its state: {keys[:3]}"
        ) from None
    for key, (gindex, pindex, parameter) in zip(keys, listed, strict=True):
        if places[key][2] is not parameter:
            raise CheckpointError(
                f"the state dict lists parameter {key!r} twice, this optimizer has two parameters "
                f"in these places: {places[key][:2]} and {(gindex, pindex)} (group, number)"
            )
    if len(places) != len({parameter for _, _, parameter in listed}):
        raise CheckpointError(
            f"this optimizer lists a parameter twice, the state dict has {len(places)} parameters "
            f"for its {len({parameter for _, _, parameter in listed})}"
        )
    return places


def _joined(states: Mapping[Any, Any], places: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Join what `torch.distributed.checkpoint.load` has put under the text of a key.

    It loads tensors in place, but writes everything else below ``str(key)``: ``state[0]`` keeps
    its old step beside the right one in ``state["0"]``.
    """
    texts = {str(key): key for key in places if isinstance(key, int) and str(key) not in places}
    joined = dict(states)
    for text in texts.keys() & states.keys():
        loaded, key = joined.pop(text), texts[text]
        known = states.get(key)
        if not isinstance(loaded, Mapping) or not isinstance(known, Mapping):
            joined[key] = loaded
        else:
            joined[key] = {**known, **loaded}
            if isinstance(known.get(WRAPPED), Mapping) and isinstance(loaded.get(WRAPPED), Mapping):
                joined[key][WRAPPED] = {**known[WRAPPED], **loaded[WRAPPED]}
    return joined


def _is_nothing(value: object) -> bool:
    return isinstance(value, Mapping) and not value


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_meta
    return isinstance(value, (int, float))


def _check_share(
    optimizer: PagedOptimizer, place: tuple[int, int, torch.Tensor], entries: Mapping[str, Any]
) -> Saved:
    """Check this process's part of the saved state of a parameter that may be sharded."""
    gindex, pindex, parameter = place
    config = optimizer.get_config(gindex, pindex, optimizer.param_groups[gindex])
    try:
        part, elsewhere = share(parameter, entries, config, optimizer.optimizer_name)
    except ValueError as error:
        what = f"state of parameter {pindex} of group {gindex}"
        raise CheckpointError(f"{what}: {error}") from error
    checked = _check_entries(optimizer, parameter, gindex, pindex, part)
    return replace(checked, elsewhere=elsewhere)


def _check_entries(
    optimizer: PagedOptimizer,
    parameter: torch.Tensor,
    gindex: int,
    pindex: int,
    entries: Mapping[str, Any],
) -> Saved:
    what = f"state of parameter {pindex} of group {gindex} (shape {tuple(parameter.shape)})"
    name = optimizer.optimizer_name
    lost = sorted(str(key) for key, value in entries.items() if _is_nothing(value))
    if lost:
        raise CheckpointError(
            f"{what}: nothing is left of {lost}. PyTorch loses wrapped tensors on the way back "
            f"from a flat state dict. Use flatten_optimizer_state_dict=False for what others "
            f"saved; what get_optimizer_state_dict() makes flat of this one comes back."
        )
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
            if count_of(value) is None:
                raise CheckpointError(f"{what}: step is {value!r}; a count was expected")
            continue
        shape, kind = expected.get(key, UNORM)
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{what}: {key} is a {type(value).__name__}, not a tensor")
        if value.layout != torch.strided or value.is_meta or not _has_data(value):
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


def _has_data(tensor: torch.Tensor) -> bool:
    """Whether a dense tensor's storage is as large as it says; one that was freed is not."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.numel() == 0:
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def count_of(value: object) -> int | None:
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
