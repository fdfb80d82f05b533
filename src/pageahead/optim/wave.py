"""One backward whose updates run from gradient hooks, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pageahead.memory.layout import Chunk
from pageahead.optim.active import Active
from pageahead.optim.engine import Engine

__all__ = ["Lane", "Mark", "Wave", "is_placeholder", "placeholder"]


@dataclass(eq=False, slots=True)
class Lane:
    """What a wave does on one device.

    Attributes:
        engine: of the device.
        actives: the parameters that are expected, in the plan's order.
        chunks: the plan's.
        missing: for each chunk the parameters whose gradient has not arrived.
        chunks_of: for each parameter the chunks with a part of its state, in order.
        left: for each parameter how many of these are not updated.
        active_of: for each parameter its place.
        last: index of the chunk updated last, of those that travel.
        in_order: whether they came in the plan's order so far.
    """

    engine: Engine
    actives: list[Active]
    chunks: Sequence[Chunk] = ()
    missing: list[set[torch.Tensor]] = field(default_factory=list)
    chunks_of: dict[torch.Tensor, list[int]] = field(default_factory=dict)
    left: dict[torch.Tensor, int] = field(default_factory=dict)
    active_of: dict[torch.Tensor, Active] = field(default_factory=dict)
    last: int = -1
    in_order: bool = True

    def expect(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks
        for active in self.actives:
            self.active_of[active.parameter] = active
        for chunk in chunks:
            parameters = [self.actives[part.item].parameter for part in chunk.slices]
            self.missing.append(set(parameters))
            for parameter in dict.fromkeys(parameters):
                self.chunks_of.setdefault(parameter, []).append(chunk.index)
        self.left = {parameter: len(chunks) for parameter, chunks in self.chunks_of.items()}

    def ready(self, parameter: torch.Tensor) -> Iterator[Chunk]:
        """The chunks that wait for nothing any more now that this gradient is there."""
        for index in self.chunks_of[parameter]:
            self.missing[index].discard(parameter)
            if not self.missing[index]:
                chunk = self.chunks[index]
                if chunk.nbytes:
                    self.in_order = self.in_order and index > self.last
                    self.last = index
                yield chunk

    def updated(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        """The parameters that are done now that this chunk is."""
        for parameter in dict.fromkeys(self.actives[part.item].parameter for part in chunk.slices):
            self.left[parameter] -= 1
            if not self.left[parameter]:
                yield parameter


@dataclass(frozen=True, slots=True)
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
        arrived: parameters whose hook has fired, in that order.
        updated: those of them that are updated, with their gradients.
        problem: what went wrong first; nothing more is updated then, and no step follows.
        finished: whether the engines are closed.
    """

    lanes: dict[torch.device, Lane]
    groups: list[dict[str, Any]]
    arrived: dict[torch.Tensor, None] = field(default_factory=dict)
    updated: dict[torch.Tensor, Mark] = field(default_factory=dict)
    problem: str = ""
    finished: bool = False


def placeholder(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient without memory. An edit in place raises, and any norm of it is NaN."""
    nan = torch.full((), float("nan"), dtype=gradient.dtype, device=gradient.device)
    return nan.expand(gradient.shape)


def is_placeholder(gradient: torch.Tensor) -> bool:
    return gradient.numel() > 1 and not any(gradient.stride())
