"""Which ways of training fit in memory together, before anything is allocated.

Every optimizer changes its model, so every way has parameters of its own, and they cannot all be
held at once. They are put into groups that take turns; each has the baseline and the model alone
(which borrows the baseline's parameters, since it changes none), so that ratios are always within
one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pageahead.experiment.training.cells import ArmSpec, TrainingCell
from pageahead.experiment.training.gpt import Shape
from pageahead.memory import host

__all__ = ["DoesNotFitError", "Grouping", "Memory", "available", "group", "of_arm", "shared"]

MOST_HBM = 100 * 10**9  # of an H200's 141: the caching allocator needs room
MOST_HOST = 90 * 10**9
SHARE = 0.9  # of what is free now
PARAMETER_BYTES = 2  # BF16, and so are gradients
RING_BYTES = 4 * (32 << 20)
BACKWARD_RING_BYTES = 2 << 30  # at most; chunks come in at the pace of backward, so it is longer
CUDA_BYTES = 1 << 30  # cuBLAS, buffers of the link's measurement, rounding by the allocator


class DoesNotFitError(RuntimeError):
    """Not even the baseline fits in memory; nothing was allocated."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the GPU's memory and of the host's."""

    hbm: int
    host: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.hbm + other.hbm, self.host + other.host)

    def within(self, limit: Memory) -> bool:
        return self.hbm <= limit.hbm and self.host <= limit.host

    def __str__(self) -> str:
        return f"{self.hbm / 1e9:.3g} GB of HBM and {self.host / 1e9:.3g} GB of host memory"


@dataclass(frozen=True)
class Grouping:
    """The ways of each group beside the baseline, and the reasons why others are left out."""

    groups: list[list[ArmSpec]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def available(device: torch.device) -> Memory:
    """What may be taken of `device` and of the host."""
    left = int(SHARE * host.available_bytes())
    if device.type == "cpu":
        return Memory(min(left // 2, MOST_HBM), min(left // 2, MOST_HOST))
    free, _ = torch.cuda.mem_get_info(device)
    return Memory(min(int(SHARE * free), MOST_HBM), min(left, MOST_HOST))


def shared(shape: Shape, cell: TrainingCell, tokens: int) -> Memory:
    """What every group takes: the baseline, and one iteration's gradients and activations."""
    weights = shape.parameters * PARAMETER_BYTES
    # Of a block and in widths: its two norms' inputs and outputs, query, key and value, attention's
    # result twice, and the perceptron's 4 before and 4 after its activation.
    block = 17 * shape.width * PARAMETER_BYTES
    # Logits and their gradient in BF16, and in 32 bit with their log-softmax.
    head = 16 * shape.vocabulary
    activations = int(1.1 * tokens * (shape.layers * block + head))
    return Memory(2 * weights + _state_bytes(shape, cell) + activations + CUDA_BYTES)


def of_arm(arm: ArmSpec, shape: Shape, cell: TrainingCell) -> Memory:
    """What one way of working takes beyond `shared`."""
    weights = shape.parameters * PARAMETER_BYTES
    state = _state_bytes(shape, cell)
    if arm.way == "model":
        return Memory(0)
    if arm.way == "torch":
        return Memory(3 * weights)  # its two moments have the parameters' dtype
    budget = arm.budget or 0
    resident = int(budget * state) if isinstance(budget, float) else budget
    streamed = max(0, state - resident)
    ring = RING_BYTES
    if arm.way == "during":
        ring = max(ring, min(streamed // 8, BACKWARD_RING_BYTES))
    return Memory(weights + resident + ring, streamed)


def group(
    arms: Sequence[ArmSpec], shape: Shape, cell: TrainingCell, tokens: int, limit: Memory
) -> Grouping:
    """Fill one group after the other, in order; ways with the same budget stay together.

    Raises:
        DoesNotFitError: not even the baseline fits.
    """
    base = shared(shape, cell, tokens)
    if not base.within(limit):
        raise DoesNotFitError(f"the baseline needs about {base}; there are {limit}")
    model = [arm for arm in arms if arm.way == "model"]
    result = Grouping([list(model)])
    taken = base
    for unit in _units([arm for arm in arms if arm.way != "model"], base, shape, cell, limit):
        needed = sum((of_arm(arm, shape, cell) for arm in unit), Memory(0))
        if not (base + needed).within(limit):
            result.left_out.update(
                {
                    arm.name: f"it would take about {base + needed}; there are {limit}"
                    for arm in unit
                }
            )
            continue
        if not (taken + needed).within(limit):
            result.groups.append(list(model))
            taken = base
        result.groups[-1].extend(unit)
        taken += needed
    return result


def _units(
    arms: Sequence[ArmSpec], base: Memory, shape: Shape, cell: TrainingCell, limit: Memory
) -> list[list[ArmSpec]]:
    """Ways of one budget together where they fit together at all, else each by itself."""
    by_budget: dict[int | float | None, list[ArmSpec]] = {}
    for arm in arms:
        by_budget.setdefault(arm.budget, []).append(arm)
    units = []
    for unit in by_budget.values():
        needed = sum((of_arm(arm, shape, cell) for arm in unit), base)
        units += [unit] if needed.within(limit) else [[arm] for arm in unit]
    return units


def _state_bytes(shape: Shape, cell: TrainingCell) -> int:
    """AdamW's two moments, and with 8 bits a scale in 32 bit for each 256 elements of each."""
    scales = shape.parameters // 256 * 8 if cell.bits == 8 else 0
    return 2 * shape.parameters * cell.bits // 8 + scales
