"""One backward whose updates run from gradient hooks, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pageahead.memory.layout import Chunk
from pageahead.optim.active import Active
from pageahead.optim.engine import Engine
from pageahead.optim.sharded import is_sharded, local, wrap

__all__ = ["Expected", "Lane", "Mark", "Wave", "is_placeholder", "order_free", "placeholder"]


@dataclass(eq=False, slots=True)
class Expected:
    """A parameter whose gradient is expected.

    Attributes:
        active: its place.
        chunks: indices of those with a part of its state, in order.
        left: how many of these are not updated.
        gradient: the one that was checked; None before it came and after the last update.
    """

    active: Active
    chunks: list[int] = field(default_factory=list)
    left: int = 0
    gradient: torch.Tensor | None = None


@dataclass(eq=False, slots=True)
class Lane:
    """What a wave does on one device.

    Attributes:
        engine: of the device.
        actives: the parameters that are expected, in the plan's order.
        chunks: the plan's.
        members: for each chunk the parameters with a part in it.
        missing: for each chunk how many of these have no gradient yet.
        last: index of the chunk updated last, of those that travel.
        in_order: whether they came in the plan's order so far.
    """

    engine: Engine
    actives: list[Active]
    chunks: Sequence[Chunk] = ()
    members: list[list[Expected]] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    last: int = -1
    in_order: bool = True

    def expect(self, chunks: Sequence[Chunk]) -> Sequence[Expected]:
        """Take the plan's chunks; return what is expected from now on."""
        self.chunks = chunks
        everyone = [Expected(active) for active in self.actives]
        for chunk in chunks:
            members = [everyone[item] for item in dict.fromkeys(part.item for part in chunk.slices)]
            self.members.append(members)
            self.missing.append(len(members))
            for one in members:
                one.chunks.append(chunk.index)
                one.left += 1
        return everyone

    def ready(self, arrived: Expected) -> Iterator[Chunk]:
        """The chunks that wait for nothing any more now that this gradient is there."""
        for index in arrived.chunks:
            self.missing[index] -= 1
            if not self.missing[index]:
                chunk = self.chunks[index]
                if chunk.nbytes:
                    self.in_order = self.in_order and index > self.last
                    self.last = index
                yield chunk

    def updated(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        """The parameters that are done now that this chunk is."""
        for one in self.members[chunk.index]:
            one.left -= 1
            if not one.left:
                one.gradient = None
                yield one.active.parameter


@dataclass(eq=False, slots=True)
class Mark:
    """A gradient when its parameter was updated: later edits would be lost."""

    gradient: torch.Tensor
    version: int


@dataclass(eq=False, slots=True)
class Wave:
    """One backward.

    Attributes:
        lanes: by device.
        groups: the parameter groups' hyperparameters when it opened.
        expected: what is expected, by ``id(parameter)``, whose hash costs less than a tensor's.
        arrived: parameters whose hook has fired, expected or not, by ``id``, in that order.
        updated: those of them that are updated, with their gradients.
        problem: what went wrong first; nothing more is updated then, and no step follows.
        finished: whether the engines are closed.
    """

    lanes: dict[torch.device, Lane]
    groups: list[dict[str, Any]]
    expected: dict[int, tuple[Lane, Expected]] = field(default_factory=dict)
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)
    updated: dict[torch.Tensor, Mark] = field(default_factory=dict)
    problem: str = ""
    finished: bool = False


def order_free(listing: Iterable[Active], parameters: Iterable[torch.Tensor]) -> list[Active]:
    """The listings of these parameters, in their order, of those that may be updated in any order.

    One that is listed twice is left to `step`, and so are two over the same memory: there the order
    of updates counts, which is the listing's.
    """
    places: dict[int, Active | None] = dict.fromkeys(map(id, parameters))
    twice = set()
    for active in listing:
        number = id(active.parameter)
        if number in places:
            if places[number] is not None:
                twice.add(number)
            places[number] = active
    found = [active for active in places.values() if active is not None]
    parts = [local(one.parameter) if one.sharded else one.parameter for one in found]
    addresses = [part.data_ptr() for part in parts]
    if not twice and len(set(addresses)) == len(addresses):
        return found
    users = Counter(addresses)
    return [
        active
        for active, part, address in zip(found, parts, addresses, strict=True)
        if id(active.parameter) not in twice and (users[address] == 1 or not part.numel())
    ]


def placeholder(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient without memory. An edit in place raises, and any norm of it is NaN."""
    nan = torch.full((), float("nan"), dtype=gradient.dtype, device=gradient.device)
    part = nan.expand(local(gradient).shape)
    return wrap(gradient, part, tuple(gradient.shape)) if is_sharded(gradient) else part


def is_placeholder(gradient: torch.Tensor) -> bool:
    part = local(gradient)
    return part.numel() > 1 and not any(part.stride())
