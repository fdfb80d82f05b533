"""What the link between host and GPU can do at best: large page-locked copies, both directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageahead.experiment.evidence import LinkRecord
from pageahead.experiment.summary import gigabytes_per_second

__all__ = ["measure_link", "merged"]

BUFFER_BYTES = 256 << 20
COPIES_IN_FLIGHT = 16  # a sample is 4 GiB each way, so that its ends do not matter
SAMPLES = 5

Copies = tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor]


def measure_link(device: torch.device) -> LinkRecord:
    """Measure each direction alone, then both at once, in GB/s each way.

    Takes half a GiB of page-locked host memory and as much of the GPU's for a second or two.
    """
    host_in, host_out = (
        torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
    )
    device_in, device_out = (
        torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
    )
    to_device = (torch.cuda.Stream(device), device_in, host_in)
    to_host = (torch.cuda.Stream(device), host_out, device_out)
    torch.cuda.synchronize(device)
    return LinkRecord(
        to_device=_samples([to_device]),
        to_host=_samples([to_host]),
        duplex=_samples([to_device, to_host]),
    )


def merged(records: Sequence[LinkRecord]) -> LinkRecord:
    """All samples of several measurements in one record."""
    return LinkRecord(
        to_device=[sample for record in records for sample in record.to_device],
        to_host=[sample for record in records for sample in record.to_host],
        duplex=[sample for record in records for sample in record.duplex],
    )


def _samples(directions: Sequence[Copies]) -> list[float]:
    _milliseconds(directions)  # the first copies find the link asleep
    moved = BUFFER_BYTES * COPIES_IN_FLIGHT
    return [gigabytes_per_second(moved, _milliseconds(directions)) for _ in range(SAMPLES)]


def _milliseconds(directions: Sequence[Copies]) -> float:
    """From the start of all copies to the end of the last, whichever direction that is."""
    start = torch.cuda.Event(enable_timing=True)
    ends = []
    start.record(directions[0][0])
    for stream, _, _ in directions:
        stream.wait_event(start)
    # Alternating, so that neither direction has a head start of more than one launch.
    for _ in range(COPIES_IN_FLIGHT):
        for stream, destination, source in directions:
            with torch.cuda.stream(stream):
                destination.copy_(source, non_blocking=True)
    for stream, _, _ in directions:
        end = torch.cuda.Event(enable_timing=True)
        end.record(stream)
        ends.append(end)
    for end in ends:
        end.synchronize()
    return max(float(start.elapsed_time(end)) for end in ends)
