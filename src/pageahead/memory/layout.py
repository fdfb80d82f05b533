"""Chunks and slots: which bytes travel together, and where they land. Pure arithmetic.

A parameter's state is a few **state tensors** (``state1``, ``state2``), each of one or two **rows**
of as many elements as the parameter has (AdEMAMix keeps two moments in ``state1``). In the arena
the state tensors of consecutive parameters lie back to back, and a slot holds a chunk in the very
same arrangement, in whatever order the parameters are updated; so a run of whole parameters is one
contiguous copy. A parameter too large for a
chunk is cut at multiples of 256 elements, bitsandbytes' 8-bit block, and each slice takes one copy,
of two dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BLOCK", "Chunk", "Item", "Piece", "Slice", "StateShape", "cut", "pack"]

BLOCK = 256
"""Elements of one 8-bit block, which shares an absmax: slices start at multiples of it."""

ALIGNMENT = 256
"""Bytes to which each state tensor is aligned, as CUDA's own allocations are."""


LARGEST_PITCH = (1 << 31) - 1
"""Bytes: CUDA's limit for the distance of rows in a two-dimensional copy."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state tensors of one parameter.

    Attributes:
        numel: elements of the parameter.
        tensors: for each state tensor its number of rows and the bytes of one element.
    """

    numel: int
    tensors: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the state tensors themselves, without padding."""
        return sum(rows * itemsize for rows, itemsize in self.tensors) * self.numel


@dataclass(frozen=True, slots=True)
class Item:
    """One active parameter, in step order.

    Attributes:
        identity: the same for the same parameter, which may be listed twice.
        state: its state tensors.
        offset: byte of the arena at which its state starts; None for a resident parameter, whose
            state does not travel.
    """

    identity: int
    state: StateShape
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``[start, stop)`` of item number `item`; byte `offsets` of its state in the slot."""

    item: int
    start: int
    stop: int
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One copy: `rows` times `nbytes` bytes, from `arena` in the arena and `slot` in the slot on.

    A second row lies `arena_pitch` bytes after the first in the arena and `slot_pitch` bytes after
    it in the slot, and so on: the rows of a slice take one two-dimensional copy together.
    """

    arena: int
    slot: int
    nbytes: int
    rows: int = 1
    arena_pitch: int = 0
    slot_pitch: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one fetch brings, one event announces and one write-back takes away.

    Attributes:
        index: position in the plan.
        slices: what is updated while the chunk is in its slot, in step order; resident items ride
            along with no bytes of their own.
        pieces: the copies.
        nbytes: bytes of slot it needs.
        after: index of the last earlier chunk with bytes of this one, which must be written back
            before this one is fetched: a parameter listed twice.
    """

    index: int
    slices: tuple[Slice, ...]
    pieces: tuple[Piece, ...]
    nbytes: int
    after: int | None = None


def pack(state: StateShape, numel: int, base: int = 0) -> tuple[tuple[int, ...], int]:
    """Lay out the state of `numel` elements from byte `base` on; return offsets and the end."""
    offsets = []
    end = base
    for rows, itemsize in state.tensors:
        offsets.append(end)
        end = _align(end + rows * itemsize * numel)
    return tuple(offsets), end


def cut(
    items: Sequence[Item], *, target: int, limit: int, apart: bool = False
) -> tuple[Chunk, ...]:
    """Divide a step into chunks.

    Args:
        items: the active parameters in step order.
        target: bytes to fill a chunk with; also the size of the slices of a parameter that is cut.
        limit: bytes above which a parameter is cut, and which no chunk exceeds (a chunk of one
            whole parameter excepted where `limit` is 0: nothing is cut then). With `target` 0,
            too, every parameter is a chunk of its own.
        apart: let each resident item be a chunk of its own, without bytes, instead of riding along
            with its neighbours: for chunks that are updated when all of their gradients are there.
    """
    plan = _Plan()
    for number, item in enumerate(items):
        numel = item.state.numel
        if item.offset is None and apart:
            plan.stay(Slice(number, 0, numel, ()))
            continue
        if item.offset is None:
            plan.slices.append(Slice(number, 0, numel, ()))
            continue
        whole = pack(item.state, numel)[1]
        if limit == 0 or whole <= limit:
            joins = plan.nbytes + whole <= target and item.identity not in plan.holds
            if plan.moving and not joins:
                plan.close()
            after = plan.holder.get(item.identity)
            plan.move(number, item, 0, numel, after)
            continue
        if plan.moving:
            plan.close()
        after = plan.holder.get(item.identity)
        size = _slice_elements(item.state, target, limit)
        for start in range(0, numel, size):
            plan.move(number, item, start, min(start + size, numel), after)
            plan.close()
    if plan.slices:
        plan.close()
    return tuple(plan.chunks)


class _Plan:
    """The chunk being filled, and those done."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.holder: dict[int, int] = {}
        """For each identity the last closed chunk with bytes of it."""
        self._start()

    def _start(self) -> None:
        self.slices: list[Slice] = []
        self.moving: list[tuple[int, Item]] = []
        """Where in `slices` those are that travel, and what they are of."""
        self.holds: set[int] = set()
        self.nbytes = 0
        self.after: int | None = None

    def move(self, number: int, item: Item, start: int, stop: int, after: int | None) -> None:
        self.moving.append((len(self.slices), item))
        self.slices.append(Slice(number, start, stop, ()))
        self.holds.add(item.identity)
        self.nbytes = pack(item.state, stop - start, self.nbytes)[1]
        if after is not None:
            self.after = after if self.after is None else max(after, self.after)

    def stay(self, part: Slice) -> None:
        """A chunk that goes nowhere, beside the one that is being filled."""
        self.chunks.append(Chunk(len(self.chunks), (part,), (), 0))

    def close(self) -> None:
        pieces: list[Piece] = []
        end = 0
        # In the arena's order, which need not be the step's: backward goes the other way.
        for place, item in sorted(self.moving, key=lambda one: one[1].offset or 0):
            part = self.slices[place]
            offsets, end = pack(item.state, part.stop - part.start, end)
            self.slices[place] = Slice(part.item, part.start, part.stop, offsets)
            for piece in _pieces(item, part.start, part.stop, offsets):
                _join(pieces, piece)
        chunk = Chunk(len(self.chunks), tuple(self.slices), tuple(pieces), self.nbytes, self.after)
        self.chunks.append(chunk)
        self.holder.update(dict.fromkeys(self.holds, chunk.index))
        self._start()


def _pieces(item: Item, start: int, stop: int, offsets: Sequence[int]) -> list[Piece]:
    """The copies of elements ``[start, stop)`` to those offsets in the slot."""
    assert item.offset is not None
    state = item.state
    sources, _ = pack(state, state.numel, item.offset)
    rows = [
        Piece(
            source + (row * state.numel + start) * itemsize,
            slot + row * (stop - start) * itemsize,
            (stop - start) * itemsize,
        )
        for (count, itemsize), source, slot in zip(state.tensors, sources, offsets, strict=True)
        for row in range(count)
    ]
    return rows if stop - start == state.numel else _stacked(rows)


def _join(pieces: list[Piece], piece: Piece) -> None:
    """Append a copy, to the last one if it goes on where that ends."""
    if pieces and pieces[-1].rows == piece.rows == 1:
        last = pieces[-1]
        gap = piece.slot - (last.slot + last.nbytes)
        # Padding between state tensors is the same on both sides: it travels along.
        if 0 <= gap < ALIGNMENT and piece.arena - (last.arena + last.nbytes) == gap:
            pieces[-1] = Piece(last.arena, last.slot, last.nbytes + gap + piece.nbytes)
            return
    pieces.append(piece)


def _stacked(rows: list[Piece]) -> list[Piece]:
    """Rows of one length at one distance from each other as one piece; others as they are."""
    first = rows[0]
    if len(rows) == 1:
        return rows
    arena_pitch, slot_pitch = rows[1].arena - first.arena, rows[1].slot - first.slot
    even = all(
        row.nbytes == first.nbytes
        and row.arena - first.arena == number * arena_pitch
        and row.slot - first.slot == number * slot_pitch
        for number, row in enumerate(rows)
    )
    if not even or arena_pitch > LARGEST_PITCH:
        return rows
    return [Piece(first.arena, first.slot, first.nbytes, len(rows), arena_pitch, slot_pitch)]


def _slice_elements(state: StateShape, target: int, limit: int) -> int:
    """Elements per slice: equal, whole blocks, about `target` and at most `limit` bytes."""
    per_element = state.nbytes // state.numel
    slices = max(round(state.nbytes / target), math.ceil(state.nbytes / limit))
    equal = math.ceil(state.numel / slices / BLOCK)
    most = (limit - ALIGNMENT * len(state.tensors)) // (per_element * BLOCK)
    if most < 1:
        raise ValueError(f"a chunk of {limit} bytes does not hold the state of {BLOCK} elements")
    return min(equal, most) * BLOCK


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
