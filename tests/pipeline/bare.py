"""The pipeline alone on the recording device, driven in any order of chunks.

`PagedOptimizer.step` advances chunks in the order of the plan. Gradient hooks will advance them as
backward finishes them, which is another order, with chunks in other slots from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pageahead.device.recording import RecordingDevice
from pageahead.device.trace import ranges_of
from pageahead.memory.layout import Chunk, Item, Slice, StateShape, cut, pack
from pageahead.memory.ring import Ring, Slot
from pageahead.memory.transfer import StreamedTransfer
from pageahead.pipeline import Plan

LIMIT = 2048
"""Bytes of a chunk at most."""


class FlatArena:
    """As much of an `Arena` as a transfer needs."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.memory[offset : offset + nbytes]


@dataclass(frozen=True)
class BareStep:
    """One step.

    Attributes:
        active: positions of the parameters that are updated, in order; some maybe twice.
        swaps: pairs of chunks that change places in the order in which they are advanced.
        primed: the first chunks are sent for before the step begins.
        refused: no step follows; what was sent for is taken back.
    """

    active: tuple[int, ...]
    swaps: tuple[tuple[int, int], ...] = ()
    primed: bool = False
    refused: bool = False


@dataclass(frozen=True)
class BareScenario:
    """Parameters of one byte per element, and steps over them.

    Attributes:
        shapes: of the parameters' state; those at the positions in `resident` do not travel.
        steps: in order.
        slots: of the ring; of these `spare` are never used to fetch ahead.
        overlap: write-backs may go on after a step.
    """

    shapes: tuple[StateShape, ...]
    steps: tuple[BareStep, ...]
    resident: tuple[int, ...] = ()
    slots: int = 4
    spare: int = 1
    overlap: bool = False


class Bare:
    """A run of a scenario; what it leaves behind is in `device`, `arena` and `values`."""

    def __init__(self, scenario: BareScenario, pipeline: Any) -> None:
        self.scenario = scenario
        self.device = RecordingDevice()
        self.third = self.device.other_stream("third")
        self._items: list[Item] = []
        end = 0
        for number, shape in enumerate(scenario.shapes):
            self._items.append(Item(number, shape, None if number in scenario.resident else end))
            end = pack(shape, shape.numel, end)[1]
        self.arena = FlatArena(end)
        self.values = [torch.zeros(shape.numel, dtype=torch.uint8) for shape in scenario.shapes]
        self._gradients = [torch.zeros_like(value) for value in self.values]
        self._expected = [0] * len(self.values)
        self._ring: Ring | None = None
        self._pipeline = pipeline(self.device, fetch="fetch", overlap=scenario.overlap)
        self._plan: tuple[tuple[int, ...], Plan] | None = None

    def run(self) -> None:
        for number, step in enumerate(self.scenario.steps):
            self._step(number + 1, step)
        self._pipeline.settle()
        self.device.host_reads(self.arena.memory)

    def wrong(self) -> list[str]:
        """Which parameters or state hold something else than the sum of their gradients."""
        found = []
        for number, (item, value) in enumerate(zip(self._items, self.values, strict=True)):
            if not torch.all(value == self._expected[number]):
                found.append(f"parameter {number}")
            if item.offset is None:
                continue
            offsets, _ = pack(item.state, item.state.numel, item.offset)
            for offset, (rows, itemsize) in zip(offsets, item.state.tensors, strict=True):
                state = self.arena.bytes_at(offset, rows * itemsize * item.state.numel)
                if not torch.all(state == self._expected[number]):
                    found.append(f"state of {number}")
        return found

    def _step(self, gradient: int, step: BareStep) -> None:
        if step.primed and self._plan is not None:
            self._pipeline.prime(self._plan[1])
            if step.refused:
                self._pipeline.abandon()
                return
        caller = self.device.caller
        caller.reads(*self.values)
        for number in step.active:
            self._gradients[number].fill_(gradient + number)
            self._expected[number] = (self._expected[number] + gradient + number) % 256
        caller.writes(*self._gradients)
        plan = self._plan_for(step.active)
        order = list(plan.chunks)
        if not any(chunk.after is not None for chunk in order):  # not defined for repeats
            for one, other in step.swaps:
                one, other = one % len(order), other % len(order)
                order[one], order[other] = order[other], order[one]
        self._pipeline.begin(plan, lambda chunk, slot: self._update(step.active, chunk, slot))
        for chunk in order:
            self._pipeline.advance(chunk)
        self._pipeline.finish()
        caller.reads(*self.values)
        if not self.scenario.overlap:
            self.third.reads(*self.values, self.arena.memory)
            self.device.host_reads(*self.values, self.arena.memory)
        caller.writes(*self._gradients)
        caller.wait(self.third.record())

    def _plan_for(self, active: tuple[int, ...]) -> Plan:
        if self._plan is not None and self._plan[0] == active:
            return self._plan[1]
        self._pipeline.forget_plan()
        self._plan = None
        items = [self._items[number] for number in active]
        chunks = cut(items, target=LIMIT // 2, limit=LIMIT)
        slot_bytes = max(chunk.nbytes for chunk in chunks)
        if slot_bytes and (self._ring is None or self._ring.slot_bytes < slot_bytes):
            self._ring = None
            self._ring = Ring(self.device, self.scenario.slots, slot_bytes)
        transfer = StreamedTransfer(self.device, self.arena)  # type: ignore[arg-type]
        depth = self.scenario.slots - self.scenario.spare
        plan = Plan(chunks, transfer, self._ring, depth)
        self._plan = active, plan
        return plan

    def _update(self, active: Sequence[int], chunk: Chunk, slot: Slot | None) -> None:
        for part in chunk.slices:
            self._update_slice(active[part.item], part, slot)

    def _update_slice(self, number: int, part: Slice, slot: Slot | None) -> None:
        gradient = self._gradients[number][part.start : part.stop]
        value = self.values[number][part.start : part.stop]
        value += gradient
        state = []
        for offset, (rows, itemsize) in zip(
            part.offsets, self._items[number].state.tensors, strict=bool(part.offsets)
        ):
            assert slot is not None
            state.append(slot.memory[offset : offset + rows * (part.stop - part.start) * itemsize])
            state[-1] += gradient[:1]
        self.device.note(
            "compute", "updates", reads=ranges_of([gradient]), writes=ranges_of([value, *state])
        )
