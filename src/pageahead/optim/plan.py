"""From active parameters to chunks, and from chunks to the views their updates need."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from pageahead.memory.layout import BLOCK, Chunk, Item, Slice, StateShape, cut, pack
from pageahead.memory.ring import Slot
from pageahead.optim.homes import Home
from pageahead.optim.paging import Paging
from pageahead.optim.rates import TYPICAL, Rates
from pageahead.optim.sharded import local
from pageahead.optim.update import MAX_LAUNCH, StateViews
from pageahead.pipeline.pipeline import EARLY

__all__ = ["SLOTS", "StepPlan", "backward_slots", "chunk_bytes", "early_chunks", "ring_bytes"]

SLOTS = 4
"""Chunks in flight: one coming in, one being updated, one going home, one to even out the pace.
More would not help: the slowest of the three stages sets it, however fast the others are."""

BACKWARD_SHARE = 8
"""One part in so many of the streamed state is what a ring for updates in backward may hold..."""

BACKWARD_LARGEST = 2 << 30
"""...but no more bytes than these: what moves beside forward is then a quarter of a large state."""

BEGIN_SECONDS = 100e-6
"""What the host takes at least from a step's first fetch to its first update, and..."""

PREPARE_SECONDS = 4e-6
"""...for each parameter, which it checks before a step may update any."""

CHUNK_OVERHEAD_SECONDS = 10e-6
"""What a chunk costs the link beside its bytes: a copy's start-up and its events (H200)."""

SMALLEST_CHUNK = 4 << 20
"""Bytes: below this the host takes longer to launch a chunk than the link to carry it."""

LARGEST_CHUNK = 32 << 20
WHOLE_PARAMETER_SLACK = 1.65
"""A parameter up to this many chunks large is not cut: a plain copy starts faster than one of rows,
which moves the size where halves become better from the square root of 2 to about this."""


@dataclass(eq=False, slots=True)
class StepPlan:
    """The chunks of one set of active parameters, and the views of their state.

    Views of slots and state tensors are made once and kept; views of gradients and parameters are
    never kept, because both may be new tensors at the next step.
    """

    parameters: tuple[torch.Tensor, ...]
    homes: tuple[Home, ...]
    states: Mapping[torch.Tensor, dict[str, Any]]
    chunks: tuple[Chunk, ...]
    _views: dict[tuple[int, int], list[tuple[int, list[StateViews]]]] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        parameters: Sequence[torch.Tensor],
        homes: Sequence[Home],
        states: Mapping[torch.Tensor, dict[str, Any]],
        *,
        target: int,
        limit: int,
        apart: bool = False,
    ) -> StepPlan:
        """Cut a step into chunks; see `pageahead.memory.layout.cut` for the keywords.

        `states` is looked at when a chunk's views are first needed.
        """
        items = [
            Item(id(parameter), home.shape, home.offset if home.paged else None)
            for parameter, home in zip(parameters, homes, strict=True)
        ]
        chunks = cut(items, target=target, limit=limit, apart=apart)
        return cls(tuple(parameters), tuple(homes), states, chunks)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest chunk."""
        return max((chunk.nbytes for chunk in self.chunks), default=0)

    def is_for(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether this plan was built for exactly these parameters, in this order."""
        return len(parameters) == len(self.parameters) and all(
            map(is_, parameters, self.parameters)
        )

    def views(self, chunk: Chunk, slot: Slot | None) -> list[tuple[int, list[StateViews]]]:
        """For each slice of `chunk`: the item's number, and the views of each of its launches."""
        key = (chunk.index, -1 if slot is None else slot.index)
        known = self._views.get(key)
        if known is None:
            known = [(one.item, list(self._launches(one, slot))) for one in chunk.slices]
            self._views[key] = known
        return known

    def _launches(self, part: Slice, slot: Slot | None) -> Iterator[StateViews]:
        home, state = self.homes[part.item], self.states[self.parameters[part.item]]
        shape = tuple(local(self.parameters[part.item]).shape)
        tensors = home.tensors
        if home.paged and slot is not None:
            tensors = tuple(
                slot.memory[offset : offset + rows * itemsize * (part.stop - part.start)]
                .view(tensor.dtype)
                .view((rows, -1) if rows > 1 else (-1,))
                for (rows, itemsize), offset, tensor in zip(
                    home.shape.tensors, part.offsets, home.tensors, strict=True
                )
            )
            base = part.start
        else:
            base = 0
        step = MAX_LAUNCH if part.stop - part.start > MAX_LAUNCH else max(1, part.stop - part.start)
        for start in range(part.start, max(part.stop, part.start + 1), step):
            stop = min(start + step, part.stop)
            whole = start == 0 and stop == home.shape.numel
            pieces = [
                tensor.reshape((rows, *shape) if rows > 1 else shape)
                if whole
                else _flat(tensor, rows)[..., start - base : stop - base]
                for tensor, (rows, _) in zip(tensors, home.shape.tensors, strict=True)
            ]
            blocks = slice(start // BLOCK, -(-stop // BLOCK))
            yield StateViews(
                start,
                stop,
                whole,
                pieces[0],
                pieces[1] if len(pieces) > 1 else None,
                _blocks(state.get("absmax1"), blocks),
                _blocks(state.get("absmax2"), blocks),
                state.get("qmap1"),
                state.get("qmap2"),
                state.get("unorm_vec"),
            )


def chunk_bytes(
    states: Iterable[StateShape],
    staging: int | None,
    rates: Rates = TYPICAL,
    *,
    in_backward: bool = False,
) -> tuple[int, int]:
    """Choose `target` and `limit` for `cut`, in bytes, for a step that moves these states.

    Each chunk costs a fixed overhead, and the first one's way home starts when all of it has come
    and been updated. For ``total / chunk`` chunks that is
    ``total / chunk * overhead + chunk * (1 / bandwidth + update time per byte)``. But as long as
    the host is preparing the step, the first chunk's transfer costs nothing: up to what comes in
    meanwhile, a chunk only costs its update time. The least of this is at the chunk chosen here.
    A step that is updated `in_backward` is prepared bit by bit.
    """
    total = count = 0
    update_seconds = 0.0
    for state in states:
        total += state.nbytes
        count += 1
        update_seconds += state.numel * rates.update_seconds[state.tensors[0][1]]
    bandwidth = rates.link_bytes_per_second
    update = update_seconds / max(total, 1)
    overhead = total * CHUNK_OVERHEAD_SECONDS
    beyond = math.sqrt(overhead / (1 / bandwidth + update))
    within = math.sqrt(overhead / update) if update else math.inf
    preparing = 0.0 if in_backward else BEGIN_SECONDS + PREPARE_SECONDS * count
    hidden = preparing * bandwidth
    best = min(max(beyond, hidden), within)
    target = int(min(max(best, SMALLEST_CHUNK), LARGEST_CHUNK))
    limit = int(target * WHOLE_PARAMETER_SLACK)
    if staging is not None:
        limit = min(limit, staging // SLOTS)
    return min(target, limit), limit


def early_chunks(parameters: int, slot_bytes: int, rates: Rates = TYPICAL) -> int:
    """How many chunks to send for before a step over so many parameters is prepared.

    As many as come in meanwhile, so that the link does not idle; not more, because sending takes
    the host's time, and the way home starts with the first update.
    """
    arriving = slot_bytes / rates.link_bytes_per_second
    return max(EARLY, math.ceil(parameters * PREPARE_SECONDS / arriving)) if slot_bytes else EARLY


def backward_slots(slot_bytes: int, state_bytes: int, staging: int | None) -> int:
    """How many slots a ring has whose chunks are updated during backward.

    Backward brings gradients at its own pace, now fast, now slow. What is fetched ahead before it
    starts and what may still be on its way home when it ends evens that out, and moves that much
    of the state beside forward.
    """
    bytes_of_ring = min(state_bytes // BACKWARD_SHARE, BACKWARD_LARGEST)
    if staging is not None:
        bytes_of_ring = min(staging, state_bytes)  # more slots than chunks would stay empty
    return max(SLOTS, bytes_of_ring // max(slot_bytes, 1))


def ring_bytes(states: Sequence[StateShape], paging: Paging) -> int:
    """The most device memory that the ring takes for a step that moves these states."""
    _, limit = chunk_bytes(states, paging.staging, in_backward=paging.in_backward)
    slot = min(limit, sum(pack(one, one.numel)[1] for one in states))
    if paging.in_backward:
        total = sum(one.nbytes for one in states)
        return slot * backward_slots(slot, total, paging.staging)
    return slot * SLOTS


def _flat(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor.view(rows, -1) if rows > 1 else tensor.view(-1)


def _blocks(absmax: torch.Tensor | None, blocks: slice) -> torch.Tensor | None:
    """The absmax of some blocks; AdEMAMix keeps two rows of them."""
    return None if absmax is None else absmax[..., blocks]
