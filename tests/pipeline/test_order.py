"""The order in which a step is enqueued, written out line by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pageahead.memory.layout import Chunk, Item, StateShape, cut
from pageahead.memory.ring import Ring, Slot
from pageahead.memory.transfer import ManagedTransfer, StreamedTransfer
from pageahead.pipeline import Pipeline, Plan
from tests.lazy import LazyDevice, LazyStream

SHAPE = StateShape(256, ((1, 1), (1, 1)))
CHUNK = SHAPE.nbytes


class NamedArena:
    """Memory whose views are labelled with the chunk they hold."""

    def __init__(self, device: LazyDevice, chunks: int) -> None:
        self.memory = torch.zeros(chunks * CHUNK, dtype=torch.uint8)
        for index in range(chunks):
            device.labels[self.bytes_at(index * CHUNK, 1).data_ptr()] = f"arena {index}"

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        return self.memory[offset : offset + nbytes]


def streamed(device: LazyDevice, listed: Sequence[int], *, slots: int) -> Plan:
    """A plan of one chunk per listed parameter."""
    items = [Item(number, SHAPE, number * CHUNK) for number in listed]
    arena = NamedArena(device, max(listed) + 1)
    transfer = StreamedTransfer(device, arena)  # type: ignore[arg-type]
    return Plan(cut(items, target=CHUNK, limit=CHUNK), transfer, Ring(device, slots, CHUNK), slots)


def managed(device: LazyDevice, count: int, *, depth: int) -> Plan:
    """A plan of `count` parameters with two state tensors each."""
    tensors = [(torch.zeros(1), torch.zeros(1)) for _ in range(count)]
    for number, pair in enumerate(tensors):
        for name, tensor in zip(("state1", "state2"), pair, strict=True):
            device.labels[tensor.data_ptr()] = f"{name} of {number}"
    items = [Item(number, SHAPE, 0) for number in range(count)]
    transfer = ManagedTransfer(device, lambda chunk: tensors[chunk.index])
    return Plan(cut(items, target=0, limit=0), transfer, None, depth)


def run(device: LazyDevice, pipeline: Pipeline, plan: Plan) -> list[str]:
    """Run one step and return what it enqueued."""
    device.log.clear()

    def update(chunk: Chunk, slot: Slot | None) -> None:
        where = "" if slot is None else f" in slot {slot.index}"
        device.compute_stream().launch(lambda: None, f"updates {chunk.index}{where}")  # type: ignore[attr-defined]

    pipeline.begin(plan, update)
    for chunk in plan.chunks:
        pipeline.advance(chunk)
    pipeline.finish()
    return list(device.log)


def test_streamed_step() -> None:
    device = LazyDevice(0)
    plan = streamed(device, [0, 1, 2], slots=2)
    assert run(device, Pipeline(device, fetch="fetch", overlap=False), plan) == [
        "caller: records 1",
        "compute: waits for caller 1",  # gradients are written
        "compute: records 1",
        "fetch: waits for compute 1",  # new slots: their memory is free
        "fetch: copies arena 0 to slot 0",
        "fetch: records 1",
        "fetch: copies arena 1 to slot 1",
        "fetch: records 2",
        "compute: waits for fetch 1",  # the chunk has arrived
        "compute: updates 0 in slot 0",
        "compute: records 2",
        "write_back: waits for compute 2",  # the update is done with the slot
        "write_back: copies slot 0 to arena 0",
        "write_back: records 1",
        "fetch: waits for write_back 1",  # what the slot held has left it
        "fetch: copies arena 2 to slot 0",
        "fetch: records 3",
        "compute: waits for fetch 2",
        "compute: updates 1 in slot 1",
        "compute: records 3",
        "write_back: waits for compute 3",
        "write_back: copies slot 1 to arena 1",
        "write_back: records 2",
        "compute: waits for fetch 3",
        "compute: updates 2 in slot 0",
        "compute: records 4",
        "write_back: waits for compute 4",
        "write_back: copies slot 0 to arena 2",
        "write_back: records 3",
        "compute: records 5",
        "caller: waits for compute 5",  # parameters are written
        "host waits for compute 5",  # any stream may read them
        "host waits for write_back 3",  # and the state
    ]


def test_overlap_returns_without_the_host_waiting() -> None:
    device = LazyDevice(0)
    plan = streamed(device, [0, 1, 2], slots=2)
    log = run(device, Pipeline(device, fetch="fetch", overlap=True), plan)
    assert log[-2:] == ["compute: records 5", "caller: waits for compute 5"]
    assert not [line for line in log if line.startswith("host")]


def test_next_step_waits_for_each_slot_and_each_chunk_by_itself() -> None:
    device = LazyDevice(0)
    plan = streamed(device, [0, 1, 2], slots=2)
    pipeline = Pipeline(device, fetch="fetch", overlap=True)
    run(device, pipeline, plan)
    log = run(device, pipeline, plan)
    assert log[2:10] == [
        "fetch: waits for write_back 2",  # slot 1 is empty
        "fetch: waits for write_back 1",  # chunk 0 is at home
        "fetch: copies arena 0 to slot 1",
        "fetch: records 4",
        "fetch: waits for write_back 3",
        "fetch: waits for write_back 2",
        "fetch: copies arena 1 to slot 0",
        "fetch: records 5",
    ]


def test_next_step_waits_for_everything_where_a_parameter_is_listed_twice() -> None:
    device = LazyDevice(0)
    plan = streamed(device, [0, 1, 0], slots=3)
    pipeline = Pipeline(device, fetch="fetch", overlap=True)
    run(device, pipeline, plan)
    log = run(device, pipeline, plan)
    assert log.index("fetch: waits for write_back 3") < log.index("fetch: copies arena 0 to slot 0")


def test_changed_plan_fetches_after_the_last_write_back() -> None:
    device = LazyDevice(0)
    pipeline = Pipeline(device, fetch="fetch", overlap=True)
    run(device, pipeline, streamed(device, [0, 1, 2], slots=2))
    log = run(device, pipeline, streamed(device, [0, 2], slots=2))
    first = log.index("fetch: waits for write_back 3")
    assert first < log.index("fetch: copies arena 0 to slot 2")


def test_repeated_parameter_is_not_fetched_before_its_first_update() -> None:
    device = LazyDevice(0)
    plan = streamed(device, [0, 1, 0], slots=3)
    assert plan.chunks[2].after == 0
    log = run(device, Pipeline(device, fetch="fetch", overlap=False), plan)
    again = log.index("fetch: copies arena 0 to slot 2")
    assert log[again - 1] == "fetch: waits for write_back 1"  # after the first one went home
    assert log.index("write_back: copies slot 0 to arena 0") < again


def test_repeated_parameter_is_fetched_in_the_next_step_after_its_last_update() -> None:
    device = LazyDevice(0)
    plan = streamed(device, [0, 1, 0], slots=3)
    pipeline = Pipeline(device, fetch="fetch", overlap=True)
    run(device, pipeline, plan)
    log = run(device, pipeline, plan)
    # Chunk 2 wrote these bytes last, but neither slot 0 nor chunk 0 knows.
    waited = log.index("fetch: waits for write_back 3")
    assert waited < log.index("fetch: copies arena 0 to slot 0")


def test_lookahead_is_one_ahead_with_one_event_for_both_states() -> None:
    device = LazyDevice(0)
    plan = managed(device, 3, depth=1)
    assert run(device, Pipeline(device, fetch="prefetch", overlap=False), plan) == [
        "caller: records 1",
        "compute: waits for caller 1",
        "prefetch: prefetches state1 of 0",
        "prefetch: prefetches state2 of 0",
        "prefetch: records 1",
        "compute: waits for prefetch 1",
        "compute: updates 0",
        "prefetch: prefetches state1 of 1",
        "prefetch: prefetches state2 of 1",
        "prefetch: records 2",
        "compute: waits for prefetch 2",
        "compute: updates 1",
        "prefetch: prefetches state1 of 2",
        "prefetch: prefetches state2 of 2",
        "prefetch: records 3",
        "compute: waits for prefetch 3",
        "compute: updates 2",
        "compute: records 1",
        "caller: waits for compute 1",
        "host waits for compute 1",
    ]


def test_sequential_prefetches_on_the_compute_stream_and_synchronizes() -> None:
    device = LazyDevice(0)
    plan = managed(device, 2, depth=0)
    log = run(device, Pipeline(device, fetch="prefetch", overlap=False), plan)
    assert log[2:14] == [
        "compute: prefetches state1 of 0",
        "compute: prefetches state2 of 0",
        "compute: records 1",
        "compute: waits for compute 1",
        "compute: updates 0",
        "host synchronizes",
        "compute: prefetches state1 of 1",
        "compute: prefetches state2 of 1",
        "compute: records 2",
        "compute: waits for compute 2",
        "compute: updates 1",
        "host synchronizes",
    ]


def test_resident_items_move_nothing() -> None:
    device = LazyDevice(0)
    chunks = cut([Item(0, SHAPE), Item(1, SHAPE)], target=CHUNK, limit=CHUNK)
    transfer = StreamedTransfer(device, NamedArena(device, 1))  # type: ignore[arg-type]
    plan = Plan(chunks, transfer, None, 1)
    log = run(device, Pipeline(device, fetch="fetch", overlap=False), plan)
    assert log == [
        "caller: records 1",
        "compute: waits for caller 1",
        "compute: updates 0",
        "compute: records 1",
        "caller: waits for compute 1",
        "host waits for compute 1",
    ]


class UpdateError(Exception):
    pass


def test_failing_update_still_sends_its_chunk_home() -> None:
    device = LazyDevice(0)
    plan = streamed(device, [0, 1, 2], slots=2)
    pipeline = Pipeline(device, fetch="fetch", overlap=False)

    def update(chunk: Chunk, slot: Slot | None) -> None:
        if chunk.index == 1:
            raise UpdateError

    pipeline.begin(plan, update)
    pipeline.advance(plan.chunks[0])
    with pytest.raises(UpdateError):
        pipeline.advance(plan.chunks[1])
    assert "write_back: copies slot 1 to arena 1" in device.log
    pipeline.finish(failed=True)
    assert device.log[-1] == "host drains"
    assert not any(stream.queue for stream in device._streams.values())
    assert run(device, pipeline, plan)[-1] == "host waits for write_back 5"


def test_error_of_the_update_is_shown_even_if_the_way_home_fails() -> None:
    device = LazyDevice(0)
    plan = streamed(device, [0], slots=1)
    pipeline = Pipeline(device, fetch="fetch", overlap=False)

    def update(chunk: Chunk, slot: Slot | None) -> None:
        raise UpdateError

    def copy(destination: torch.Tensor, source: torch.Tensor, *, stream: LazyStream) -> None:
        raise OSError("cannot copy")

    pipeline.begin(plan, update)
    device.copy = copy  # type: ignore[method-assign]
    with pytest.raises(UpdateError):
        pipeline.advance(plan.chunks[0])


def test_failed_step_forgets_events_that_carry_the_failure() -> None:
    """On a device whose events carry failures, a kept one would fail the next step as well."""
    device = LazyDevice(0)
    plan = streamed(device, [0, 1], slots=2)
    pipeline = Pipeline(device, fetch="fetch", overlap=False)
    pipeline.begin(plan, lambda chunk, slot: None)
    pipeline.advance(plan.chunks[0])
    pipeline.finish(failed=True)
    log = run(device, pipeline, plan)
    assert log[2:4] == ["fetch: copies arena 0 to slot 0", "fetch: records 3"]


def test_finish_after_a_begin_that_failed() -> None:
    device = LazyDevice(0)

    def caller_stream() -> None:
        raise UpdateError

    device.caller_stream = caller_stream  # type: ignore[assignment, method-assign]
    pipeline = Pipeline(device, fetch="fetch", overlap=False)
    plan = streamed(device, [0], slots=1)
    with pytest.raises(UpdateError):
        pipeline.begin(plan, lambda chunk, slot: None)
    pipeline.finish(failed=True)
    assert device.log == ["host drains"]


def test_primed_chunks_are_fetched_once_and_before_the_callers_stream_is_asked() -> None:
    device = LazyDevice(0)
    plan = streamed(device, [0, 1, 2], slots=2)
    pipeline = Pipeline(device, fetch="fetch", overlap=False)
    pipeline.prime(plan)
    primed = [line for line in device.log if "copies" in line]
    assert primed == ["fetch: copies arena 0 to slot 0", "fetch: copies arena 1 to slot 1"]
    log = run(device, pipeline, plan)
    assert log[:2] == ["caller: records 1", "compute: waits for caller 1"]
    fetched = [line for line in log if line.startswith("fetch: copies")]
    assert fetched == ["fetch: copies arena 2 to slot 0"]


def test_another_plan_than_the_primed_one_starts_anew() -> None:
    device = LazyDevice(0)
    pipeline = Pipeline(device, fetch="fetch", overlap=False)
    primed = streamed(device, [0, 1, 2], slots=2)
    other = Plan(primed.chunks[1:], primed.transfer, primed.ring, 2)
    pipeline.prime(primed)
    log = run(device, pipeline, other)
    fetched = [line for line in log if line.startswith("fetch: copies")]
    assert fetched == ["fetch: copies arena 1 to slot 0", "fetch: copies arena 2 to slot 1"]


@pytest.mark.parametrize("early", [1, 3])
def test_priming_sends_for_as_many_chunks_as_the_plan_says(early: int) -> None:
    device = LazyDevice(0)
    plan = replace(streamed(device, [0, 1, 2, 3], slots=4), early=early)
    Pipeline(device, fetch="fetch", overlap=False).prime(plan)
    assert sum("fetch: copies" in line for line in device.log) == early


def test_priming_another_plan_waits_for_overlapped_write_backs() -> None:
    device = LazyDevice(0)
    pipeline = Pipeline(device, fetch="fetch", overlap=True)
    run(device, pipeline, streamed(device, [0, 1, 2], slots=2))
    another = streamed(device, [0, 1, 2], slots=2)
    before = len(device.log)
    pipeline.prime(another)
    assert "fetch: waits for write_back 3" in device.log[before : before + 3]


def test_abandoning_waits_for_what_was_primed_and_for_nothing_else() -> None:
    device = LazyDevice(0)
    plan = streamed(device, [0, 1], slots=2)
    pipeline = Pipeline(device, fetch="fetch", overlap=False)
    pipeline.abandon()
    assert device.log == []
    pipeline.prime(plan)
    pipeline.abandon()
    assert device.log[-1] == "host drains"
    fetched = [line for line in run(device, pipeline, plan) if line.startswith("fetch: copies")]
    assert len(fetched) == 2
