"""The recording device: what it writes down, and that it computes what bitsandbytes does."""

from __future__ import annotations

import gc

import pytest
import torch

from pageahead.device import device_for
from pageahead.device.protocol import EventNotRecordedError
from pageahead.device.recording import RecordedEvent, RecordingDevice
from pageahead.device.trace import HOST, Names, Range, ranges_of
from pageahead.memory.arena import Arena
from pageahead.memory.ring import Ring
from pageahead.optim.explain import name_memory
from tests.pipeline.recorded import record
from tests.pipeline.scenarios import Scenario, Step, expected
from tests.support import CPU


def test_ranges_are_bytes_and_rows_where_a_tensor_has_gaps() -> None:
    tensor = torch.zeros(4, 8)
    start = tensor.data_ptr()
    assert ranges_of([tensor, None, tensor[:0]]) == (Range(start, start + 128),)
    assert ranges_of([tensor[1:3, 2:4]]) == (
        Range(start + 40, start + 48),
        Range(start + 72, start + 80),
    )


def test_streams_and_the_host_are_agents() -> None:
    device = RecordingDevice()
    tensor = torch.zeros(2)
    bytes_of = ranges_of([tensor])
    event = device.caller.record()
    device.stream("fetch").wait(event)
    event.synchronize()
    device.caller.reads(tensor)
    device.other_stream("third").writes(tensor)
    device.host_reads(tensor)
    device.host_writes(tensor)
    device.drain()
    device.synchronize()
    assert [one.number for one in device.trace] == list(range(9))
    assert [(one.agent, one.records, one.waits) for one in device.trace[:3]] == [
        ("caller", "caller 1", ()),
        ("fetch", None, ("caller 1",)),
        (HOST, None, ("caller 1",)),
    ]
    assert [(one.agent, one.reads, one.writes) for one in device.trace[3:7]] == [
        ("caller", bytes_of, ()),
        ("third", (), bytes_of),
        (HOST, bytes_of, ()),
        (HOST, (), bytes_of),
    ]
    assert device.trace[7].idles == ("compute", "fetch")
    assert device.trace[8].idles == ("caller", "compute", "fetch", "third")


def test_an_event_that_was_never_recorded() -> None:
    device = RecordingDevice()
    with pytest.raises(EventNotRecordedError):
        device.caller.wait(RecordedEvent())
    with pytest.raises(EventNotRecordedError):
        RecordedEvent().synchronize()


def test_the_current_stream_is_the_callers() -> None:
    device = RecordingDevice()
    side = device.other_stream("side")
    assert device.caller_stream() is device.caller
    with device.using(side):
        assert device.caller_stream() is side
        with device.computing():
            assert device.caller_stream() is device.compute_stream()
    assert device.caller_stream() is device.caller


@pytest.mark.parametrize("execute", [True, False])
def test_a_copy_is_noted_and_done_at_once(execute: bool) -> None:
    device = RecordingDevice(execute=execute)
    one, other = torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)
    device.copy(one, other, stream=device.stream("fetch"))
    (operation,) = device.trace
    assert (operation.agent, operation.what) == ("fetch", "copies")
    assert (operation.reads, operation.writes) == (ranges_of([other]), ranges_of([one]))
    assert bool(one.all()) == execute


def test_slots_come_from_the_compute_stream_and_go_back_there_when_unused() -> None:
    device = RecordingDevice()
    ring = Ring(device, 2, 64)
    ranges = [ranges_of([slot.memory]) for slot in ring.slots]
    assert [(one.agent, one.writes) for one in device.trace] == [
        ("compute", bytes_of) for bytes_of in ranges
    ]
    view = ring.slots[0].memory[3:]
    del ring
    assert [(one.what, one.writes) for one in device.trace[2:]] == [
        ("drains", ()),
        ("gets the memory of", ranges[1]),
    ]
    del view
    assert device.trace[-1].writes == ranges[0]


def test_arenas_and_managed_memory_are_given_back_by_the_host() -> None:
    device = RecordingDevice()
    arena = Arena(device)
    arena.grow(100)
    managed = device.managed(64, allow_oversubscription=False)
    pinned, zeroed = device.trace
    assert (pinned.what, zeroed.what) == ("page-locks", "zeroes")
    assert not managed.any()
    del arena, managed
    gc.collect()
    assert [(one.what, one.writes) for one in device.trace[2:]] == [
        ("drains", ()),
        ("frees", pinned.writes),
        ("synchronizes", ()),
        ("frees", zeroed.writes),
    ]


def test_it_is_the_device_of_the_cpu_while_installed() -> None:
    before = device_for(CPU)
    device = RecordingDevice()
    with device.installed():
        assert device_for(CPU) is device
    assert device_for(CPU) is before


@pytest.mark.parametrize("strategy", ["streamed", "lookahead"])
@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedLion32bit", "PagedAdEMAMix"])
def test_the_real_optimizer_gives_its_real_results(name: str, strategy: str) -> None:
    scenario = Scenario(
        "results", (300, 1500, 3000), optimizer=name, strategy=strategy, actions=(Step(), Step())
    )
    outcome, error = record(scenario)
    assert error is None
    assert outcome.differences(expected(scenario)) == []


def test_a_step_as_text() -> None:
    scenario = Scenario("text", (300, 1024, 2048), optimizer="PagedLion32bit", chunk=8192, slots=2)
    device = RecordingDevice(execute=False)
    with scenario.scaled_down(), device.installed():
        parameters = scenario.make_parameters()
        optimizer = scenario.make_optimizer(parameters)
        for number, parameter in enumerate(parameters):
            parameter.grad = scenario.gradient(0, number)
        optimizer.step()
        started = len(device.trace)
        optimizer.step()
        name_memory(device.names, optimizer)
    lines = [line.split(maxsplit=1)[1] for line in device.describe(started).splitlines()]
    assert lines == [
        "fetch       copies chunk 0 → slot 0[0:4,096]",
        "fetch       records fetch 3",
        "fetch       copies chunk 1 → slot 1",
        "fetch       records fetch 4",
        "caller      records caller 2",
        "compute     waits for caller 2",
        "compute     waits for fetch 3",
        "compute     updates gradient 0 → parameter 0, state1 of 0",
        "compute     updates gradient 1 → parameter 1, slot 0[0:4,096]",
        "compute     records compute 5",
        "write_back  waits for compute 5",
        "write_back  copies slot 0[0:4,096] → chunk 0",
        "write_back  records write_back 3",
        "compute     waits for fetch 4",
        "compute     updates gradient 2 → parameter 2, slot 1",
        "compute     records compute 6",
        "write_back  waits for compute 6",
        "write_back  copies slot 1 → chunk 1",
        "write_back  records write_back 4",
        "compute     records compute 7",
        "caller      waits for compute 7",
        "host        waits for compute 7",
        "host        waits for write_back 4",
    ]


def test_a_step_over_managed_memory_as_text() -> None:
    scenario = Scenario(
        "text", (1024, 2048), optimizer="PagedLion32bit", strategy="lookahead", actions=(Step(),)
    )
    device = RecordingDevice(execute=False)
    with scenario.scaled_down(), device.installed():
        parameters = scenario.make_parameters()
        optimizer = scenario.make_optimizer(parameters)
        for number, parameter in enumerate(parameters):
            parameter.grad = scenario.gradient(0, number)
        optimizer.step()
        name_memory(device.names, optimizer)
    text = device.describe()
    assert "prefetch    prefetches state1 of 1\n" in text
    assert "compute     updates gradient 1 → parameter 1, state1 of 1\n" in text


def test_memory_without_a_name_shows_its_address() -> None:
    names = Names()
    assert names.of(Range(0x1000, 0x1400)) == "1,024 bytes at 0x1000"
    names.give_range(Range(0x0, 0x2000), "arena")
    assert names.of(Range(0x1000, 0x1400)) == "arena[4,096:5,120]"
    device = RecordingDevice()
    device.drain()
    assert device.describe() == "    0  host        drains compute"
