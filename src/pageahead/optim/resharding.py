"""The state of sharded parameters in state dicts.

In ``state_dict()`` the state tensors of a sharded parameter are `DTensor`, placed as the parameter
is, so that ``torch.distributed.checkpoint`` saves each process's part and loads it on any number of
processes. With 8-bit state ``absmax`` is a `DTensor`, too, arranged by rows of the parameter: see
`pageahead.optim.blocks`. What is loaded may be that, or whole tensors in bitsandbytes' format, of
which each process takes its part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pageahead.memory.layout import BLOCK
from pageahead.optim.base import WRAPPED
from pageahead.optim.blocks import by_blocks, by_rows, first_scales, row_width
from pageahead.optim.sharded import (
    check_shard,
    is_sharded,
    local,
    moved_placements,
    shards,
    wrap,
)

__all__ = ["requantize", "share", "shared"]

STATES = ("state1", "state2")
SCALES = {"absmax1": "state1", "absmax2": "state2"}


# --- saving -----------------------------------------------------------------------------------


def shared(state_dict: dict[str, Any], parameters: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Replace the state of sharded parameters by `DTensor`, in place.

    Their entries are not wrapped as bitsandbytes does: FSDP2 gathers nothing, and
    ``flatten_optimizer_state_dict=True`` asks for them by their names.

    Args:
        state_dict: bitsandbytes', with local tensors.
        parameters: all that the optimizer lists, in order.
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for key, parameter in dict(zip(keys, parameters, strict=True)).items():
        entries = state_dict["state"].get(key)
        if entries and is_sharded(parameter):
            flat = {**entries, **entries.get(WRAPPED, {})}
            flat.pop(WRAPPED, None)
            state_dict["state"][key] = {
                name: _whole(parameter, name, value) for name, value in flat.items()
            }
    return state_dict


def _whole(parameter: torch.Tensor, name: str, value: Any) -> Any:
    """The `DTensor` that a process's state tensor or scales are a part of."""
    assert is_sharded(parameter)
    shape = tuple(parameter.shape)
    if name in STATES:
        lines = tuple(value.shape[: value.dim() - len(shape)])
        return wrap(parameter, value, (*lines, *shape), len(lines))
    if name in SCALES:
        lines = tuple(value.shape[:-1])
        numel = _row_numel(parameter)
        scales = by_rows(value, _rows(local(parameter)), numel)
        return wrap(parameter, scales, (*lines, _rows(parameter), row_width(numel)), len(lines))
    return value


# --- loading ----------------------------------------------------------------------------------


def share(
    parameter: torch.Tensor,
    entries: Mapping[str, Any],
    config: Mapping[str, Any],
    optimizer_name: str,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Take this process's part of the saved state of a parameter.

    Args:
        parameter: the parameter.
        entries: its saved state, not wrapped. What no format has is left for others to refuse.
        config: bitsandbytes' hyperparameters for the parameter.
        optimizer_name: bitsandbytes'.

    Returns:
        The entries, of the shapes that bitsandbytes gives them for the local part of `parameter`;
        and, for each of ``absmax1`` and ``absmax2`` whose blocks lay elsewhere when they were
        saved, scales by rows for `requantize`, which comes after the state tensors were copied.

    Raises:
        ValueError: the entries are sharded, and not as `parameter` is; or it is sharded in a way
            that its state does not take.
    """
    shares = dict(entries)
    dtype = getattr(entries.get("state1"), "dtype", None)
    if dtype is not None:
        check_shard(parameter, config, dtype)
    elsewhere: dict[str, torch.Tensor] = {}
    for name in (*STATES, *SCALES):
        value = entries.get(name)
        if isinstance(value, torch.Tensor):
            lines = int(optimizer_name == "ademamix" and name.endswith("1"))
            shares[name] = _part(parameter, name, value, lines)
    for name in SCALES:
        value = shares.get(name)
        lines = int(optimizer_name == "ademamix" and name == "absmax1")
        if isinstance(value, torch.Tensor) and value.dim() == lines + 2:
            shares[name], aligned = _blocks_of(local(parameter), name, value)
            if not aligned:
                elsewhere[name] = value
    return shares, elsewhere


def requantize(state: Mapping[str, Any], elsewhere: Mapping[str, torch.Tensor]) -> None:
    """Give 8-bit state, after its codes were copied, scales by the blocks that it has here.

    Args:
        state: a parameter's; ``absmax*`` and the codes in ``state*`` are changed in place.
        elsewhere: from `share`.
    """
    for name, rows in elsewhere.items():
        codes, qmap = state[SCALES[name]], state[name.replace("absmax", "qmap")]
        lines = [(codes, rows, state[name])]
        if rows.dim() == 3:
            lines = list(zip(codes, rows, state[name], strict=True))
        for line, scales, absmax in lines:
            absmax.copy_(by_blocks(line, scales, qmap, line))


def _part(parameter: torch.Tensor, name: str, value: torch.Tensor, lines: int) -> torch.Tensor:
    """What this process has of a saved tensor, a `DTensor` or a whole one."""
    if is_sharded(value):
        if not shards(value) and not shards(parameter):
            return local(value)
        if is_sharded(parameter) and value.placements == moved_placements(parameter, lines):
            return local(value)
        placed = parameter.placements if is_sharded(parameter) else "none: it is not sharded"
        raise ValueError(
            f"{name} was saved with placements {value.placements}, the parameter has {placed}. "
            f"Load it through torch.distributed.checkpoint, which deals it out as it is needed"
        )
    if not is_sharded(parameter) or not shards(parameter):
        return value
    whole = tuple(parameter.shape)
    if name in SCALES:
        rows, numel = _rows(parameter), _row_numel(parameter)
        if value.dim() == lines + 1 and value.shape[-1] == -(-rows * numel // BLOCK):
            value = by_rows(value, rows, numel)
        whole = (rows, row_width(numel))
    if tuple(value.shape[lines:]) != whole:
        return value  # whoever knows the right shape says so
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(
        whole, parameter.device_mesh, parameter.placements
    )
    for dimension, (size, offset) in enumerate(zip(shape, offsets, strict=True)):
        value = value.narrow(lines + dimension, offset if size else 0, size)
    return value


def _blocks_of(part: torch.Tensor, name: str, scales: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Scales by blocks from scales by rows, and whether they are right for every element."""
    rows, numel = _rows(part), _row_numel(part)
    if tuple(scales.shape[-2:]) != (rows, row_width(numel)) or scales.dtype != torch.float32:
        raise ValueError(
            f"{name} is {scales.dtype} of shape {tuple(scales.shape)}; {rows} rows of "
            f"{row_width(numel)} float32 were expected"
        )
    scales = scales.cpu()
    places = scales[..., 0]
    if not bool(((places >= 0) & (places < BLOCK) & (places == places.floor())).all()):
        raise ValueError(f"{name} does not say where in its block each row starts")
    absmax = first_scales(scales, rows * numel, numel)
    back = by_rows(absmax, rows, numel).view(torch.int32)
    return absmax, torch.equal(back, scales.contiguous().view(torch.int32))


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _row_numel(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:])
