"""Which CPUs are near a GPU: those on the memory node that its link ends at (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["cpus_near", "parse_cpu_list", "pci_address"]

_DEVICES = Path("/sys/bus/pci/devices")


def cpus_near(device: torch.device, devices: Path = _DEVICES) -> frozenset[int]:
    """CPUs near `device` that this process may use; empty where nothing is known.

    Memory comes from the node of the CPU that touches it first, and copies from another node's
    memory take a detour.
    """
    address = pci_address(device)
    if address is None or not hasattr(os, "sched_getaffinity"):
        return frozenset()
    try:
        near = parse_cpu_list((devices / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()
    return near & frozenset(os.sched_getaffinity(0))


def pci_address(device: torch.device) -> str | None:
    """The address as Linux writes it, ``0000:3b:00.0``; None where PyTorch does not tell."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(number is None for number in numbers):
        return None
    domain, bus, slot = numbers
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def parse_cpu_list(text: str) -> frozenset[int]:
    """Numbers of a list such as ``0-3,8``, as the kernel writes them."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
