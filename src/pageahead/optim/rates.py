"""How fast this machine moves and updates state: what chunk sizes are chosen from."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pageahead.device import Device
from pageahead.memory.layout import BLOCK
from pageahead.optim.active import Active
from pageahead.optim.hyperparameters import Hyperparameters
from pageahead.optim.update import StateViews, launch

__all__ = ["TYPICAL", "Rates", "rates_of"]

logger = logging.getLogger("pageahead")


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured once for each device and optimizer.

    Attributes:
        link_bytes_per_second: what one direction carries while the other is busy, too.
        update_seconds: of one element, by the bytes of one state element (1 or 4).
    """

    link_bytes_per_second: float
    update_seconds: Mapping[int, float]


TYPICAL = Rates(50e9, {1: 37e-12, 4: 15e-12})
"""PCIe 5 x16 and AdamW's kernels on an H200: where nothing is measured, or that fails."""

COPY_BYTES = 8 << 20  # from here on copies reach nearly all of the link
COPIES = 6
ELEMENTS = 1 << 20
LAUNCHES = 4
CONFIG = {
    "betas": (0.9, 0.999, 0.9999),
    "alpha": 5.0,
    "t_alpha": None,
    "t_beta3": None,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "lr": 0.0,
    "max_unorm": 0.0,
    "skip_zeros": False,
}

_known: dict[tuple[torch.device, str], Rates] = {}


def rates_of(device: Device, name: str) -> Rates:
    """The rates of a device for bitsandbytes' optimizer `name`; takes milliseconds, once."""
    kind = device.torch_device
    if kind.type != "cuda":
        return TYPICAL
    rates = _known.get((kind, name))
    if rates is None:
        try:
            rates = Rates(_link(device), {size: _update(device, name, size) for size in (1, 4)})
        except torch.OutOfMemoryError:
            rates = TYPICAL
        logger.debug("%s, %s: %s", kind, name, rates)
        _known[kind, name] = rates
    return rates


def _link(device: Device) -> float:
    fetch, write_back = device.stream("fetch"), device.stream("write_back")
    with device.computing():
        slots = [device.slot(COPY_BYTES) for _ in range(2)]
    hosts = [torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    # compute → fetch, write-back: this memory may still be in use there.
    for stream in (fetch, write_back):
        stream.wait(device.compute_stream().record())
    device.drain()

    def run(copies: int) -> float:
        begun = time.perf_counter()
        for _ in range(copies):
            device.copy(slots[0], hosts[0], stream=fetch)
            device.copy(hosts[1], slots[1], stream=write_back)
        device.drain()
        return time.perf_counter() - begun

    run(1)
    return COPIES * COPY_BYTES / run(COPIES)


def _update(device: Device, name: str, itemsize: int) -> float:
    gpu = device.torch_device
    with torch.no_grad(), device.computing():
        parameter = torch.nn.Parameter(torch.zeros(ELEMENTS, dtype=torch.bfloat16, device=gpu))
        parameter.grad = torch.zeros_like(parameter)
        active = Active(parameter, {}, 0, 0, config=Hyperparameters.of(CONFIG), step=1)
        views = _state(name, itemsize, gpu)
        launch(name, active, views)
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(LAUNCHES):
            launch(name, active, views)
        done.record()
        done.synchronize()
        return float(begun.elapsed_time(done)) / 1e3 / LAUNCHES / ELEMENTS


def _state(name: str, itemsize: int, gpu: torch.device) -> StateViews:
    rows = 2 if name == "ademamix" else 1
    shape = (rows, ELEMENTS) if rows > 1 else (ELEMENTS,)
    blocks = (rows, ELEMENTS // BLOCK) if rows > 1 else (ELEMENTS // BLOCK,)
    dtype = torch.uint8 if itemsize == 1 else torch.float32

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        return torch.zeros(shape, dtype=dtype, device=gpu)

    small: dict[str, Any] = {}
    if itemsize == 1:
        small = {
            "absmax1": zeros(blocks, torch.float32),
            "absmax2": zeros((ELEMENTS // BLOCK,), torch.float32),
            "qmap1": torch.linspace(-1, 1, 256, device=gpu),
            "qmap2": torch.linspace(0, 1, 256, device=gpu),
        }
    state2 = None if name == "lion" else zeros((ELEMENTS,), dtype)
    return StateViews(0, ELEMENTS, True, zeros(shape, dtype), state2, **small)
