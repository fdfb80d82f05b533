"""Which settings pageahead chooses for AdamW over so many parameters here, and why."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pydantic import BaseModel

from pageahead.device import device_for
from pageahead.doctor.speeds import Speeds
from pageahead.experiment.table import amount
from pageahead.memory import host
from pageahead.memory.layout import StateShape
from pageahead.optim.paging import Paging
from pageahead.optim.plan import SLOTS, backward_slots, chunk_bytes
from pageahead.optim.rates import rates_of
from pageahead.optim.reserve import LEAST
from pageahead.optim.routing import state_shape

__all__ = ["Choice", "choices"]

MIB = 1 << 20
PARAMETER = 1 << 24
"""Elements of one of the parameters that the model is thought to be made of."""


class Choice(BaseModel):
    """A setting of `Paging`, its value here, and the reason."""

    bits: int
    setting: str
    value: str
    why: str


def choices(device: torch.device, parameters: int, speeds: Speeds) -> list[Choice]:
    """The settings for 8-bit and for 32-bit state."""
    return [one for bits in (8, 32) for one in _choices(device, parameters, bits, speeds)]


def _choices(device: torch.device, parameters: int, bits: int, speeds: Speeds) -> Iterator[Choice]:
    dtype = torch.uint8 if bits == 8 else torch.float32
    states = [
        state_shape("adam", dtype, min(PARAMETER, parameters - start))
        for start in range(0, parameters, PARAMETER)
    ]
    total = sum(one.nbytes for one in states)
    paging = Paging(hbm_budget="auto")
    reserve = LEAST if paging.hbm_reserve is None else paging.hbm_reserve
    room = max(0, device_for(device).free_bytes() - reserve)
    kept = min(total, room)
    yield _budget(bits, total, kept, room, reserve)
    if kept == total:
        return
    streamed = total - kept
    if streamed > host.available_bytes():
        yield Choice(
            bits=bits,
            setting="host memory",
            value="too little",
            why=f"{amount(streamed)} would have to go there, of which "
            f"{amount(host.available_bytes())} are available",
        )
    yield from _movement(device, bits, states, streamed, speeds)


def _budget(bits: int, total: int, kept: int, room: int, reserve: int) -> Choice:
    part = "all" if kept == total else f"{kept / total:.0%} of"
    why = (
        f"{part} {amount(total)} of state fit in the {amount(room)} free now beyond "
        f"{amount(reserve)}; a model leaves less, and its activations as much again, which shows "
        f"after the first backward"
    )
    return Choice(bits=bits, setting="hbm_budget", value="auto", why=why)


def _movement(
    device: torch.device, bits: int, states: list[StateShape], streamed: int, speeds: Speeds
) -> Iterator[Choice]:
    target, _ = chunk_bytes(states, None, rates_of(device_for(device), "adam"))
    duplex = speeds.link.duplex_median * 1e9
    moving = streamed / duplex
    updating = sum(one.numel for one in states) / speeds.update_elements[bits]
    yield Choice(
        bits=bits,
        setting="staging",
        value=f"{SLOTS * target / MIB:.0f} MiB",
        why=f"{SLOTS} slots of {target / MIB:.1f} MiB: larger ones add to the first and last copy, "
        f"smaller ones cost more starts",
    )
    slower = "the link" if moving > updating else "the kernel"
    yield Choice(
        bits=bits,
        setting="a step's time",
        value=f"{1e3 * max(moving, updating):.0f} ms",
        why=f"{slower} decides: {1e3 * moving:.0f} ms to move {amount(streamed)} both ways at "
        f"{duplex / 1e9:.1f} GB/s, {1e3 * updating:.0f} ms to update",
    )
    ring = target * backward_slots(target, streamed, None)
    yield Choice(
        bits=bits,
        setting="in_backward",
        value="worth a try",
        why=f"hides those {1e3 * moving:.0f} ms behind forward and backward as far as they take as "
        f"long; its ring takes {ring / MIB:.0f} MiB",
    )
