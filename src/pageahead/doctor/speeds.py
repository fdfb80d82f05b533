"""How fast this machine moves state, and updates it."""

from __future__ import annotations

from statistics import median

import torch
from pydantic import BaseModel

from pageahead.device import device_for
from pageahead.device.pinning import pageable_and_locked
from pageahead.experiment.evidence import LinkRecord
from pageahead.experiment.link import measure_link
from pageahead.optim.rates import rates_of

__all__ = ["Speeds", "measure"]

COPY_BYTES = 1 << 30
REPEATS = 5


class Speeds(BaseModel):
    """Measured here and now; GB/s are 1e9 bytes per second.

    Attributes:
        link: page-locked copies in either direction alone, and both at once.
        pageable: copies to the GPU from memory that is not page-locked.
        device_memory: bytes read and written by a copy within the GPU's memory.
        update_elements: elements per second of AdamW's kernels, by bits of state.
    """

    link: LinkRecord
    pageable: float | None
    device_memory: float
    update_elements: dict[int, float]

    @property
    def to_device(self) -> float:
        return median(self.link.to_device)

    @property
    def to_host(self) -> float:
        return median(self.link.to_host)


def measure(device: torch.device) -> Speeds:
    """Take a few seconds, 2 GiB of device memory and half a GiB of host memory."""
    rates = rates_of(device_for(device), "adam")
    both = pageable_and_locked(device)
    return Speeds(
        link=measure_link(device),
        pageable=None if both is None else both[0],
        device_memory=_device_memory(device),
        update_elements={8 * size: 1 / rates.update_seconds[size] for size in (1, 4)},
    )


def _device_memory(device: torch.device) -> float:
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    destination.copy_(source)
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(REPEATS):
        destination.copy_(source)
    done.record()
    done.synchronize()
    return 2 * REPEATS * COPY_BYTES / float(begun.elapsed_time(done)) / 1e6
