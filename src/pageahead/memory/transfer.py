"""The two ways a chunk's state reaches the device: copied into a slot, or migrated in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from pageahead.device.protocol import Device, Stream
from pageahead.memory.arena import Arena
from pageahead.memory.layout import Chunk, Piece
from pageahead.memory.ring import Slot

__all__ = ["ManagedTransfer", "StreamedTransfer", "Transfer"]


class Transfer(Protocol):
    """How chunks move. The pipeline decides when."""

    copies: bool
    """Whether a chunk occupies a slot and has to be written back."""

    def fetch(self, chunk: Chunk, slot: Slot | None, *, stream: Stream) -> None:
        """Enqueue everything that brings `chunk` to the device."""

    def clear(self, slot: Slot, nbytes: int, *, stream: Stream) -> None:
        """Enqueue the zeroing of what a slot holds, in the place of fetching zeros."""

    def write_back(self, chunk: Chunk, slot: Slot, *, stream: Stream) -> None:
        """Enqueue everything that brings `chunk` home."""


class StreamedTransfer:
    """Copies between the arena and slots. One plan's: it keeps the views of its chunks."""

    copies = True

    def __init__(self, device: Device, arena: Arena) -> None:
        self._device = device
        self._arena = arena
        self._views: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def fetch(self, chunk: Chunk, slot: Slot | None, *, stream: Stream) -> None:
        assert slot is not None
        for in_slot, in_arena in self._pairs(chunk, slot):
            self._device.copy(in_slot, in_arena, stream=stream)

    def clear(self, slot: Slot, nbytes: int, *, stream: Stream) -> None:
        self._device.zero(slot.memory[:nbytes], stream=stream)

    def write_back(self, chunk: Chunk, slot: Slot, *, stream: Stream) -> None:
        for in_slot, in_arena in self._pairs(chunk, slot):
            self._device.copy(in_arena, in_slot, stream=stream)

    def _pairs(self, chunk: Chunk, slot: Slot) -> list[tuple[torch.Tensor, torch.Tensor]]:
        key = (chunk.index, slot.index)
        pairs = self._views.get(key)
        if pairs is None:
            pairs = [self._pair(piece, slot) for piece in chunk.pieces]
            self._views[key] = pairs
        return pairs

    def _pair(self, piece: Piece, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
        further = piece.rows - 1
        in_slot = slot.memory[piece.slot :][: further * piece.slot_pitch + piece.nbytes]
        in_arena = self._arena.bytes_at(piece.arena, further * piece.arena_pitch + piece.nbytes)
        if not further:
            return in_slot, in_arena
        shape = (piece.rows, piece.nbytes)
        return (
            in_slot.as_strided(shape, (piece.slot_pitch, 1)),
            in_arena.as_strided(shape, (piece.arena_pitch, 1)),
        )


class ManagedTransfer:
    """Migration requests for managed state tensors: first `state1`, then `state2`."""

    copies = False

    def __init__(self, device: Device, tensors: Callable[[Chunk], Sequence[torch.Tensor]]) -> None:
        self._device = device
        self._tensors = tensors

    def fetch(self, chunk: Chunk, slot: Slot | None, *, stream: Stream) -> None:
        for tensor in self._tensors(chunk):
            self._device.prefetch(tensor, stream=stream)

    def clear(self, slot: Slot, nbytes: int, *, stream: Stream) -> None:
        raise AssertionError("managed state has no slots")

    def write_back(self, chunk: Chunk, slot: Slot, *, stream: Stream) -> None:
        raise AssertionError("managed state is updated in place")
