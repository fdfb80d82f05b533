"""Streams, events, copies, prefetch and pinning, for CUDA and for the CPU.

`device_for` is how the rest of the package gets a device; nothing above this folder knows which
kind it has.
"""

from __future__ import annotations

import torch

from pageahead.device.cpu import CpuDevice
from pageahead.device.protocol import Block, Device, Event, Stream

__all__ = ["Block", "Device", "Event", "Stream", "device_for"]

_devices: dict[torch.device, Device] = {}


def device_for(device: torch.device) -> Device:
    """Return the process's one `Device` for a PyTorch device, making it the first time.

    Raises:
        ValueError: for a device type other than ``cuda`` and ``cpu``.
    """
    known = _devices.get(device)
    if known is None:
        if device.type == "cuda":
            from pageahead.device.cuda import CudaDevice

            known = CudaDevice(device)
        elif device.type == "cpu":
            known = CpuDevice()
        else:
            raise ValueError(
                f"pageahead moves optimizer state for CUDA and CPU parameters; this one is on "
                f"{device}. Use bitsandbytes' own optimizer there."
            )
        known = _devices.setdefault(device, known)  # two threads may have come here at once
    return known
