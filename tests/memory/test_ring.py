"""Slots of one size, and copies between them and the arena."""

from __future__ import annotations

import weakref

import pytest
import torch

from pageahead.device.cpu import CpuDevice
from pageahead.memory.arena import Arena
from pageahead.memory.layout import Item, StateShape, cut
from pageahead.memory.ring import Ring
from pageahead.memory.transfer import ManagedTransfer, StreamedTransfer

SHAPE = StateShape(1024, ((2, 4), (1, 4)))


def test_slots_are_distinct_memory_of_one_size() -> None:
    ring = Ring(CpuDevice(), 3, 1000)
    assert [slot.index for slot in ring.slots] == [0, 1, 2]
    assert ring.nbytes == 3000
    for slot in ring.slots:
        slot.memory.fill_(slot.index)
    assert [int(slot.memory.sum()) for slot in ring.slots] == [0, 1000, 2000]


def test_slots_are_given_back_after_the_last_copy() -> None:
    device = CpuDevice()
    ring = Ring(device, 1, 1000)
    died = weakref.ref(ring.slots[0].memory)
    ran: list[bool] = []
    gone = weakref.ref(ring)
    device.stream("write_back").launch(lambda: ran.append(died() is not None))
    del ring
    assert gone() is None
    assert ran == [True]
    assert died() is None


def test_streamed_transfer_brings_slices_in_and_home() -> None:
    device = CpuDevice()
    arena = Arena(device)
    chunks = cut([Item(0, SHAPE, arena.grow(SHAPE.nbytes))], target=4096, limit=8192)
    assert len(chunks) > 1
    ring = Ring(device, 1, max(chunk.nbytes for chunk in chunks))
    (slot,) = ring.slots
    state1 = arena.tensor_at(0, (2, 1024), torch.float32)
    state2 = arena.tensor_at(state1.nbytes, (1024,), torch.float32)
    state1.copy_(torch.arange(2048.0).view(2, 1024))
    state2.copy_(torch.arange(1024.0))
    transfer = StreamedTransfer(device, arena)
    stream = device.stream("fetch")
    for _ in range(2):  # views are made once and used again
        for chunk in chunks:
            transfer.fetch(chunk, slot, stream=stream)
            device.drain()
            (part,) = chunk.slices
            size = part.stop - part.start
            rows, last = (
                slot.memory[offset : offset + 4 * count * size].view(torch.float32)
                for offset, count in zip(part.offsets, (2, 1), strict=True)
            )
            assert torch.equal(rows.view(2, size), state1[:, part.start : part.stop])
            assert torch.equal(last, state2[part.start : part.stop])
            slot.memory[: chunk.nbytes].view(torch.float32).add_(1.0)
            transfer.write_back(chunk, slot, stream=stream)
            device.drain()
    assert torch.equal(state1, torch.arange(2048.0).view(2, 1024) + 2)
    assert torch.equal(state2, torch.arange(1024.0) + 2)


def test_managed_state_is_never_written_back() -> None:
    device = CpuDevice()
    (chunk,) = cut([Item(0, SHAPE, 0)], target=0, limit=0)
    transfer = ManagedTransfer(device, lambda chunk: [])
    assert not transfer.copies
    with pytest.raises(AssertionError, match="updated in place"):
        transfer.write_back(chunk, Ring(device, 1, 1).slots[0], stream=device.stream("fetch"))
