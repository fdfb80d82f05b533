"""The ring: device buffers, each of which holds one chunk at a time."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from pageahead.device.protocol import Device

__all__ = ["Ring", "Slot"]


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """A device buffer that holds one chunk.

    Attributes:
        index: position in the ring.
        memory: one-dimensional ``uint8`` tensor.
    """

    index: int
    memory: torch.Tensor


class Ring:
    """A fixed number of slots of one size, on one device."""

    def __init__(self, device: Device, count: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        with device.computing():
            self.slots = [Slot(index, device.slot(slot_bytes)) for index in range(count)]
        # Slots go back to the allocator only when no copy is using them any more.
        weakref.finalize(self, device.drain).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return len(self.slots) * self.slot_bytes
