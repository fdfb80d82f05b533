"""What ranks do in the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bitsandbytes.functional import dequantize_blockwise
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from pageahead.optim.paged import PagedOptimizer
from pageahead.optim.sharded import local, wrap
from tests.distributed.work import Weights, sharded, state, train, train_alone, weights, whole
from tests.support import TINY_RING, legacy, ours

Make = Callable[[], Any]
Result = tuple[Weights, list[dict[str, Any]], list[dict[str, Any]], Weights]
"""Weights and state as saved or loaded, values of the moments, and weights some steps later."""


def values(optimizer: PagedOptimizer) -> list[dict[str, Any]]:
    """The moments that 8-bit codes stand for, of whole parameters; 32-bit ones as they are."""
    found = []
    for parameter, entries in optimizer.state.items():
        moments = {}
        for key in ("state1", "state2"):
            if key not in entries:
                continue
            part = entries[key]
            lines = part.dim() - parameter.dim()
            if part.dtype == torch.uint8 and part.numel():
                scales, qmap = entries[key.replace("state", "absmax")], entries[f"qmap{key[-1]}"]
                pieces = zip(part, scales, strict=True) if lines else [(part, scales)]
                made = [
                    dequantize_blockwise(codes.reshape(-1), absmax=scale, code=qmap, blocksize=256)
                    for codes, scale in pieces
                ]
                part = torch.stack(made).view(part.shape)
            elif part.dtype == torch.uint8:
                part = part.float()
            if isinstance(parameter, DTensor):
                shape = (*part.shape[:lines], *parameter.shape)
                part = wrap(parameter, part, shape, lines)
            moments[key] = whole(part)
        found.append(moments)
    return found


def _options(flat: bool) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=flat)


def save(
    folder: Path, name: str, make: Make, steps: int, later: int, flat: bool, wait: bool = True
) -> Result:
    """Train, save, and train on; with `wait` False while it is being saved."""
    model = sharded(make())
    optimizer = ours(name, model.parameters(), lr=1e-2, paging=TINY_RING)
    train(model, optimizer, range(steps))
    saved = weights(model), state(optimizer), values(optimizer)
    contents = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_options(flat)),
    }
    if wait:
        dcp.save(contents, checkpoint_id=folder)
        train(model, optimizer, range(steps, steps + later))
    else:
        # A group of its own: training goes on in the other one.
        group = dist.new_group(backend="gloo")
        future = dcp.async_save(contents, checkpoint_id=folder, process_group=group)
        train(model, optimizer, range(steps, steps + later))
        future.result()
    return *saved, weights(model)


def load(folder: Path, name: str, make: Make, steps: int, later: int, flat: bool) -> Result:
    """Load into a new model and optimizer, and train on."""
    model = sharded(make())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    optimizer = ours(name, model.parameters(), lr=1.0, paging=TINY_RING)
    contents = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_options(flat)),
    }
    dcp.load(contents, checkpoint_id=folder)
    set_model_state_dict(model, contents["model"])
    set_optimizer_state_dict(model, optimizer, contents["optimizer"], options=_options(flat))
    loaded = weights(model), state(optimizer), values(optimizer)
    train(model, optimizer, range(steps, steps + later))
    return *loaded, weights(model)


def load_whole(folder: Path, name: str, make: Make, steps: int, later: int) -> Result:
    """Load into a model that is not sharded, from one file of whole tensors."""
    file = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, file)
    contents = torch.load(file, weights_only=False)
    model = make()
    optimizer = ours(name, model.parameters(), lr=1.0, paging=TINY_RING)
    set_model_state_dict(model, contents["model"])
    set_optimizer_state_dict(model, optimizer, contents["optimizer"])
    loaded = weights(model), state(optimizer), values(optimizer)
    train_alone(model, optimizer, range(steps, steps + later), 1)
    return *loaded, weights(model)


def full(name: str, make: Make, steps: int, later: int) -> tuple[Weights, Weights]:
    """Gather a whole state dict, load it into a model that is not sharded; weights of both later.

    Rank 0 alone gets it.
    """
    model = sharded(make())
    optimizer = ours(name, model.parameters(), lr=1e-2)
    train(model, optimizer, range(steps))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    contents = get_optimizer_state_dict(model, optimizer, options=options)
    found = weights(model)
    train(model, optimizer, range(steps, steps + later))
    expected = weights(model)
    if dist.get_rank():
        return expected, expected
    plain = make()
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), found, strict=True):
            parameter.copy_(torch.from_numpy(value))
    other = ours(name, plain.parameters())
    set_optimizer_state_dict(plain, other, contents)
    train_alone(plain, other, range(steps, steps + later), 1)
    return expected, weights(plain)


def from_bitsandbytes(name: str, make: Make, steps: int, later: int) -> tuple[Weights, Weights]:
    """Each rank takes its part of bitsandbytes' own state dict; weights some steps later."""
    plain = make()
    stock = legacy(name, plain.parameters(), lr=1e-2)
    train_alone(plain, stock, range(steps), 1)
    model = sharded(make())
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            part = -(-len(theirs) // dist.get_world_size())
            first, rows = dist.get_rank() * part, len(mine.to_local())
            mine.to_local().copy_(theirs[first : first + rows])
    optimizer = ours(name, model.parameters())
    optimizer.load_state_dict(stock.state_dict())
    train_alone(plain, stock, range(steps, steps + later), 1)
    train(model, optimizer, range(steps, steps + later))
    return weights(plain), weights(model)


def refused(name: str, make: Make, change: Callable[[dict[str, Any]], None]) -> str:
    """Change the first parameter's entries of a state dict, load it; the error's text."""
    model = sharded(make())
    optimizer = ours(name, model.parameters())
    train(model, optimizer, range(1))
    before = [
        local(one).clone()
        for one in optimizer.state[next(model.parameters())].values()
        if isinstance(one, torch.Tensor)
    ]
    state_dict = optimizer.state_dict()
    change(state_dict["state"][0])
    try:
        optimizer.load_state_dict(state_dict)
    except ValueError as error:
        after = [
            one
            for one in optimizer.state[next(model.parameters())].values()
            if isinstance(one, torch.Tensor)
        ]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return f"{type(error).__name__}: {error}"
    return ""


def replicate(entries: dict[str, Any]) -> None:
    from torch.distributed.tensor import Replicate

    entries["state1"] = entries["state1"].redistribute(placements=[Replicate()])


def shorten(entries: dict[str, Any]) -> None:
    entries["state1"] = entries["state1"].to_local()[1:]


def spoil_places(entries: dict[str, Any]) -> None:
    local(entries["absmax1"])[0, 0] = 256


def narrow_scales(entries: dict[str, Any]) -> None:
    entries["absmax1"] = entries["absmax1"][:, :-1]


def distribute(name: str, make: Make, steps: int, later: int, broadcast: bool) -> Any:
    """Gather whole state, load it into another sharded optimizer; weights of both later."""
    model = sharded(make())
    optimizer = ours(name, model.parameters(), lr=1e-2)
    train(model, optimizer, range(steps))
    options = StateDictOptions(full_state_dict=True, cpu_offload=broadcast)
    model_state = get_model_state_dict(model, options=options)
    contents = get_optimizer_state_dict(model, optimizer, options=options)
    train(model, optimizer, range(steps, steps + later))
    other = sharded(make())
    resumed = ours(name, other.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(other, model_state, options=options)
    set_optimizer_state_dict(other, resumed, contents, options=options)
    train(other, resumed, range(steps, steps + later))
    return weights(model), weights(other)
