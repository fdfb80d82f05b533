"""Moving the state of whole parameters between device and arena, all of them or none.

A parameter that becomes resident keeps its place in the arena, for its return. Its state tensors
are replaced in ``optimizer.state`` and in its `Home`, so that state is where it is found.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pageahead.device import Block, device_for
from pageahead.optim.engine import Engine
from pageahead.optim.homes import Home

__all__ = ["GROUP_BYTES", "KEYS", "Member", "give_blocks", "groups", "to_device", "to_host"]

GROUP_BYTES = 20 << 20
"""Resident state that shares a block and goes home together. PyTorch takes memory for tensors of 1
to 10 MiB from the driver 20 MiB at a time, and gives it back only when nothing is left in it."""

KEYS = ("state1", "state2")
"""bitsandbytes' names of the tensors that move, in the order that a `Home` has them."""


class Source(Protocol):
    """Hands out zeroed tensors: a `StateSource` of the arena, or a `Block` of device memory."""

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False, slots=True)
class Member:
    """A parameter whose state may move, and where it is."""

    parameter: torch.Tensor
    home: Home


def give_blocks(homes: Iterable[Home]) -> None:
    """Give homes that become resident, in step order, the blocks that their state is made in."""
    filled: dict[torch.device, tuple[Block, int]] = {}
    for home in homes:
        block, nbytes = filled.get(home.device, (None, 0))
        if block is None or nbytes >= GROUP_BYTES:
            block, nbytes = device_for(home.device).block(), 0
        home.block = block
        filled[home.device] = block, nbytes + home.shape.nbytes


def groups(members: Iterable[Member]) -> list[list[Member]]:
    """Divide resident members into those that share a block, in step order."""
    by_block: dict[int, list[Member]] = {}
    for member in members:
        block = member.home.block
        by_block.setdefault(id(member) if block is None else id(block), []).append(member)
    return list(by_block.values())


def to_host(
    engine: Engine,
    states: MutableMapping[torch.Tensor, dict[str, Any]],
    members: Sequence[Member],
) -> None:
    """Move resident state to the arena, to its old place where it has one.

    Raises:
        HostMemoryError: there is no room; like after any other error, nothing has moved.
    """
    engine.settle()
    new = [member.home for member in members if not member.home.placed]
    engine.reserve(new)
    try:
        copies = [_copies(member, engine.source(member.home)) for member in members]
    except BaseException:
        if new:
            engine.release_last()
        for home in new:
            home.placed = False
        raise
    engine.forget_plan()  # its views would keep the old tensors
    for member, tensors in zip(members, copies, strict=True):
        _replace(states, member, tensors, None)


def to_device(
    engine: Engine,
    states: MutableMapping[torch.Tensor, dict[str, Any]],
    members: Sequence[Member],
) -> None:
    """Move streamed state to blocks of device memory. After an error nothing has moved."""
    engine.settle()
    # The homes' twins carry the blocks until every copy is made.
    twins = [Home(False, "", one.home.shape, one.home.device) for one in members]
    give_blocks(twins)
    copies = []
    for member, twin in zip(members, twins, strict=True):
        assert twin.block is not None
        copies.append(_copies(member, twin.block))
    engine.forget_plan()
    for member, twin, tensors in zip(members, twins, copies, strict=True):
        _replace(states, member, tensors, twin.block)


def _copies(member: Member, source: Source) -> tuple[torch.Tensor, ...]:
    """Equal tensors from `source`. The host waits for each copy, so any stream may use them."""
    return tuple(
        source.tensor(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        for tensor in member.home.tensors
    )


def _replace(
    states: MutableMapping[torch.Tensor, dict[str, Any]],
    member: Member,
    tensors: tuple[torch.Tensor, ...],
    block: Block | None,
) -> None:
    home = member.home
    states[member.parameter].update(zip(KEYS, tensors, strict=False))
    home.tensors = tensors
    home.paged = block is None
    home.block = block  # last: the memory returns to the driver if no tensor is left in it
