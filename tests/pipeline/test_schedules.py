"""The order of a step is right if no order that its events allow gives other bytes.

Steps over random layouts run on a device that executes in adverse random orders. The update adds
the gradient to every byte of state and to the parameter, so a byte that was read too early or
overwritten too late ends up with another sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pageahead.memory.layout import Chunk, Item, StateShape, cut, pack
from pageahead.memory.ring import Ring, Slot
from pageahead.memory.transfer import ManagedTransfer, StreamedTransfer
from pageahead.pipeline import Pipeline, Plan
from tests.lazy import LazyDevice

LIMIT = 2048
SLOTS = 3

SHAPES = st.builds(
    StateShape,
    numel=st.integers(1, 3000),
    tensors=st.sampled_from([((1, 1),), ((1, 1), (1, 1)), ((2, 1), (1, 1))]),
)
PARAMETERS = st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=5)
"""Shape, and whether it is resident."""


class FlatArena:
    """As much of an `Arena` as a transfer needs."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.memory[offset : offset + nbytes]


class World:
    """Parameters of one byte per element, whose state lies in a flat arena."""

    def __init__(self, device: LazyDevice, parameters: Sequence[tuple[StateShape, bool]]) -> None:
        self.device = device
        self.items: list[Item] = []
        end = 0
        for identity, (shape, resident) in enumerate(parameters):
            self.items.append(Item(identity, shape, None if resident else end))
            end = pack(shape, shape.numel, end)[1]
        self.arena = FlatArena(end)
        self.gradients = [0] * len(parameters)
        self.values = [torch.zeros(shape.numel, dtype=torch.uint8) for shape, _ in parameters]
        self.expected = [0] * len(parameters)
        self.seen: list[list[int]] = []
        self.ring: Ring | None = None

    def plan(self, active: Sequence[int]) -> Plan:
        chunks = cut([self.items[number] for number in active], target=LIMIT // 2, limit=LIMIT)
        slot_bytes = max(chunk.nbytes for chunk in chunks)
        if slot_bytes and (self.ring is None or self.ring.slot_bytes < slot_bytes):
            self.ring = Ring(self.device, SLOTS, slot_bytes)
        transfer = StreamedTransfer(self.device, self.arena)  # type: ignore[arg-type]
        return Plan(chunks, transfer, self.ring, SLOTS if self.ring else 1)

    def step(self, pipeline: Pipeline, plan: Plan, active: Sequence[int], gradient: int) -> None:
        """Write gradients on the caller's stream, step, and read parameters there afterwards."""
        caller = self.device.caller_stream()

        def write() -> None:
            self.gradients = [gradient + number for number in range(len(self.items))]

        def read() -> None:
            self.seen.append([int(value[0]) for value in self.values])

        caller.launch(write, "writes gradients")
        pipeline.begin(plan, lambda chunk, slot: self._update(active, chunk, slot))
        for chunk in plan.chunks:
            pipeline.advance(chunk)
        pipeline.finish()
        caller.launch(read, "reads parameters")
        for number in active:
            self.expected[number] = (self.expected[number] + gradient + number) % 256

    def _update(self, active: Sequence[int], chunk: Chunk, slot: Slot | None) -> None:
        compute = self.device.compute_stream()
        for part in chunk.slices:
            number = active[part.item]
            compute.launch(
                lambda part=part, number=number: self._add(number, part, slot), "updates"
            )

    def _add(self, number: int, part: object, slot: Slot | None) -> None:
        start, stop, offsets = part.start, part.stop, part.offsets  # type: ignore[attr-defined]
        self.values[number][start:stop] += self.gradients[number]
        for offset, (rows, itemsize) in zip(
            offsets, self.items[number].state.tensors, strict=bool(offsets)
        ):
            assert slot is not None
            slot.memory[offset : offset + rows * (stop - start) * itemsize] += self.gradients[
                number
            ]

    def assert_state(self) -> None:
        """Every byte of paged state in the arena is what the updates add up to."""
        for number, item in enumerate(self.items):
            if item.offset is not None:
                offsets, _ = pack(item.state, item.state.numel, item.offset)
                for offset, (rows, itemsize) in zip(offsets, item.state.tensors, strict=True):
                    stored = self.arena.bytes_at(offset, rows * itemsize * item.state.numel)
                    assert torch.all(stored == self.expected[number])

    def assert_parameters(self) -> None:
        for number, value in enumerate(self.values):
            assert torch.all(value == self.expected[number])


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[list[tuple[StateShape, bool]], list[list[int]]]:
    """Parameters, and for each of a few steps which are active, in which order, some twice."""
    found = draw(PARAMETERS)
    listing = st.lists(st.integers(0, len(found) - 1), min_size=1, max_size=6)
    listings = draw(st.lists(listing, min_size=1, max_size=2))
    steps = draw(st.lists(st.sampled_from(listings), min_size=1, max_size=4))
    return found, steps


@given(
    scenario=scenarios(),
    seed=st.integers(0, 10_000),
    overlap=st.booleans(),
    before=st.lists(st.sets(st.sampled_from(["prime", "abandon"])), min_size=4, max_size=4),
)
@settings(max_examples=400, deadline=None)
def test_streamed_steps_give_the_same_bytes_in_every_order(
    scenario: tuple[list[tuple[StateShape, bool]], list[list[int]]],
    seed: int,
    overlap: bool,
    before: list[set[str]],
) -> None:
    found, steps = scenario
    device = LazyDevice(seed)
    world = World(device, found)
    pipeline = Pipeline(device, fetch="fetch", overlap=overlap)
    plan: Plan | None = None
    snapshots = []
    for number, active in enumerate(steps):
        if plan is not None and "prime" in before[number]:
            pipeline.prime(plan)  # the last step's, whether or not it fits this one
        if "abandon" in before[number]:
            pipeline.abandon()
        if plan is None or active != steps[number - 1]:
            pipeline.forget_plan()
            plan = world.plan(active)
        world.step(pipeline, plan, active, gradient=3 * number + 1)
        snapshots.append(list(world.expected))
        if not overlap:  # the completed-step contract: the host may look without waiting
            world.assert_state()
            world.assert_parameters()
    pipeline.settle()
    world.assert_state()
    device.drain()
    world.assert_parameters()
    assert world.seen == snapshots


@given(
    count=st.integers(1, 5), steps=st.integers(1, 3), depth=st.integers(0, 1), seed=st.integers(0)
)
@settings(max_examples=100, deadline=None)
def test_managed_state_is_updated_after_its_prefetch(
    count: int, steps: int, depth: int, seed: int
) -> None:
    device = LazyDevice(seed)
    arrived: list[int] = []
    tensors = [torch.zeros(1) for _ in range(count)]
    device.prefetch = lambda tensor, *, stream: stream.launch(  # type: ignore[method-assign]
        lambda: arrived.append(int(tensor.data_ptr()))
    )
    items = [Item(number, StateShape(1, ((1, 4),)), 0) for number in range(count)]
    plan = Plan(
        cut(items, target=0, limit=0),
        ManagedTransfer(device, lambda chunk: [tensors[chunk.index]]),
        None,
        depth,
    )

    def update(chunk: Chunk, slot: Slot | None) -> None:
        def check() -> None:
            arrived.remove(tensors[chunk.index].data_ptr())  # ValueError if it has not come

        assert slot is None
        device.compute_stream().launch(check)

    pipeline = Pipeline(device, fetch="prefetch", overlap=False)
    for _ in range(steps):
        pipeline.begin(plan, update)
        for chunk in plan.chunks:
            pipeline.advance(chunk)
        pipeline.finish()
        assert arrived == []
