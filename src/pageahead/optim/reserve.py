"""How much device memory ``hbm_budget="auto"`` leaves free for what may grow between two steps.

What the user says, or room for a batch twice as long as the first: as many bytes as its activations
took, less what PyTorch has kept of longer batches since, and at least `LEAST` in any case. How much
grows where batches differ is measured in ``benchmarks/memory_growth.py``.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pageahead.device import device_for
from pageahead.device.protocol import Memory
from pageahead.optim.sharded import local
from pageahead.optim.wave import is_placeholder

__all__ = ["LEAST", "Reserve"]

logger = logging.getLogger("pageahead")

LEAST = 1 << 30
"""Bytes that stay free where neither the user nor a backward asks for more."""


@dataclass(slots=True)
class _Learned:
    """What the first backward showed of one device.

    Attributes:
        activations: bytes that they took.
        kept: bytes that PyTorch kept when they were gone.
        free: bytes that were free when it was last asked, and `reserve` was the answer.
    """

    activations: int
    kept: int
    free: int = -1
    reserve: int = 0


class Reserve:
    """The reserve of one optimizer.

    Args:
        fixed: bytes, of every device; None to learn them.
    """

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self._peak_before: dict[torch.device, int] = {}
        self._allocated: dict[torch.device, int] = {}
        self._learned: dict[torch.device, _Learned] = {}
        if fixed is None:
            _all.add(self)

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Call when parameters are there, before their backward: earlier peaks are not its."""
        if self._fixed is None:
            for device in {parameter.device for parameter in parameters} - self._peak_before.keys():
                self._peak_before[device] = _memory(device).peak

    def backward_began(self, device: torch.device) -> None:
        """Call when backward has the first gradient of a device: activations are there yet."""
        if self._fixed is None and device not in self._allocated:
            self._allocated[device] = _memory(device).allocated

    def learn(self, parameters: Iterable[torch.Tensor]) -> None:
        """Call before the first step after a backward, with all parameters."""
        if self._fixed is not None:
            return
        gradients: Counter[torch.device] = Counter()
        for parameter in dict.fromkeys(parameters):
            gradient = parameter.grad
            nbytes = 0
            if gradient is not None and not is_placeholder(gradient):
                nbytes = local(gradient).nbytes
            gradients[parameter.device] += nbytes
        for device, nbytes in gradients.items():
            self._learn(device, nbytes)

    def _learn(self, device: torch.device, gradients: int) -> None:
        memory = _memory(device)
        most = self._allocated.get(device, 0)
        if memory.peak != self._peak_before.get(device):
            most = max(most, memory.peak)  # nobody took more before: it is this backward's
        # Gradients came after the peak, and the next batch does not find them.
        activations = max(0, most - (memory.allocated - gradients))
        self._learned[device] = _Learned(activations, memory.kept)
        logger.info(
            "hbm_reserve: activations of the first backward took %s bytes of %s",
            f"{activations:,}",
            device,
        )

    def of(self, device: torch.device, free: int) -> int:
        """Bytes that are to stay free of a device that has `free`."""
        if self._fixed is not None:
            return self._fixed
        known = self._learned.get(device)
        if known is None:
            return LEAST
        if known.free != free:  # PyTorch took or gave back something: it may keep more now
            grown = max(0, _memory(device).kept - known.kept)
            known.reserve = max(LEAST, _activations(device) - grown)
            known.free = free
        return known.reserve


_all: weakref.WeakSet[Reserve] = weakref.WeakSet()


def _memory(device: torch.device) -> Memory:
    if device.type not in ("cuda", "cpu"):
        return Memory(0, 0, 0)  # such parameters are refused, with the reason, by a step
    return device_for(device).memory()


def _activations(device: torch.device) -> int:
    """Of any optimizer's first backward: two that share a model have to leave the same room."""
    return max(
        (one._learned[device].activations for one in list(_all) if device in one._learned),
        default=0,
    )
