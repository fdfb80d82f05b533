"""Worker threads as streams: order where an event says so, and only there."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from pageahead.device import device_for
from pageahead.device.cpu import CpuDevice, CpuEvent
from pageahead.device.protocol import EventNotRecordedError
from tests.processes import finished, python

PATIENCE = 10.0
"""Seconds after which something that has to happen has not."""


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.drain()


class Gate:
    """An operation that blocks its stream until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def __call__(self) -> None:
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()


def fail() -> None:
    raise OSError("the copy failed")


def test_a_stream_runs_its_operations_in_order(device: CpuDevice) -> None:
    ran: list[int] = []
    stream = device.stream("fetch")
    stream.launch(lambda: time.sleep(0.02))
    for number in range(100):
        stream.launch(lambda number=number: ran.append(number))
    stream.record().synchronize()
    assert ran == list(range(100))


def test_a_stream_does_not_wait_for_another_by_itself(device: CpuDevice) -> None:
    gate = Gate()
    device.stream("fetch").launch(gate)
    ran: list[int] = []
    device.stream("write_back").launch(lambda: ran.append(1))
    device.stream("write_back").record().synchronize()  # the other stream still blocks
    assert ran == [1]
    gate.open()


def test_wait_orders_a_stream_after_a_slow_operation_of_another(device: CpuDevice) -> None:
    ran: list[str] = []
    fetch, write_back = device.stream("fetch"), device.stream("write_back")
    gate = Gate()
    fetch.launch(gate)
    fetch.launch(lambda: ran.append("fetch"))
    write_back.wait(fetch.record())
    write_back.launch(lambda: ran.append("write back"))
    done = write_back.record()
    time.sleep(0.02)
    assert ran == []
    gate.open()
    done.synchronize()
    assert ran == ["fetch", "write back"]


def test_an_event_stands_for_what_was_enqueued_before_it_only(device: CpuDevice) -> None:
    gate = Gate()
    stream = device.stream("fetch")
    event = stream.record()
    stream.launch(gate)
    event.synchronize()  # would block if it stood for the operation after it
    gate.open()


def test_compute_stream_waits_in_the_calling_thread(device: CpuDevice) -> None:
    ran: list[str] = []
    stream = device.stream("fetch")
    stream.launch(lambda: time.sleep(0.02))
    stream.launch(lambda: ran.append("fetched"))
    device.compute_stream().wait(stream.record())
    assert ran == ["fetched"]
    device.compute_stream().record().synchronize()


def test_waiting_for_an_event_never_recorded_raises(device: CpuDevice) -> None:
    never = CpuEvent()
    for stream in (device.stream("fetch"), device.compute_stream()):
        with pytest.raises(EventNotRecordedError, match="never recorded; take events from"):
            stream.wait(never)
    with pytest.raises(EventNotRecordedError):
        never.synchronize()


def test_copies_run_on_their_stream(device: CpuDevice) -> None:
    gate = Gate()
    stream = device.stream("fetch")
    source, destination = torch.ones(4), torch.zeros(4)
    stream.launch(gate)
    device.copy(destination, source, stream=stream)
    assert torch.equal(destination, torch.zeros(4))
    gate.open()
    stream.record().synchronize()
    assert torch.equal(destination, source)


def test_prefetch_takes_any_stream(device: CpuDevice) -> None:
    stream = device.stream("prefetch")
    device.prefetch(torch.ones(4), stream=stream)
    device.prefetch(torch.empty(0), stream=stream)
    device.prefetch(torch.ones(4), stream=device.compute_stream())
    stream.record().synchronize()


def test_a_failure_is_carried_to_waiters_until_drained(device: CpuDevice) -> None:
    fetch, write_back = device.stream("fetch"), device.stream("write_back")
    before = fetch.record()
    fetch.launch(fail)
    after = fetch.record()
    write_back.wait(after)
    before.synchronize()
    for event in (after, fetch.record(), write_back.record()):
        with pytest.raises(OSError, match="the copy failed"):
            event.synchronize()
    with pytest.raises(OSError, match="the copy failed"):
        device.compute_stream().wait(after)
    with pytest.raises(OSError, match="the copy failed"):
        device.drain()
    device.drain()
    fetch.record().synchronize()
    write_back.record().synchronize()


def test_the_first_failure_is_the_one_carried(device: CpuDevice) -> None:
    stream = device.stream("fetch")
    stream.launch(fail)
    stream.launch(lambda: 1 / 0)
    with pytest.raises(OSError, match="the copy failed"):
        device.drain()


def test_drain_waits_for_every_stream_though_one_failed(device: CpuDevice) -> None:
    ran: list[str] = []
    device.stream("fetch").launch(fail)
    device.stream("write_back").launch(lambda: time.sleep(0.05))
    device.stream("write_back").launch(lambda: ran.append("written"))
    with pytest.raises(OSError, match="the copy failed"):
        device.drain()
    assert ran == ["written"]


def test_synchronize_waits_for_every_stream(device: CpuDevice) -> None:
    ran: list[str] = []
    device.stream("fetch").launch(lambda: time.sleep(0.02))
    device.stream("fetch").launch(lambda: ran.append("fetched"))
    device.synchronize()
    assert ran == ["fetched"]


def test_a_finalizer_may_drain_from_a_worker() -> None:
    """The last tensor over an arena may die there; waiting for oneself would never end."""
    device = CpuDevice()
    stream = device.stream("fetch")
    stream.launch(device.drain)
    done = stream.record()
    waiter = threading.Thread(target=done.synchronize, daemon=True)
    waiter.start()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()


def test_an_idle_stream_keeps_no_tensor_alive(device: CpuDevice) -> None:
    tensor = torch.ones(4)
    died = weakref.ref(tensor)
    device.copy(torch.zeros(4), tensor, stream=device.stream("fetch"))  # and nothing after it
    del tensor
    deadline = time.monotonic() + PATIENCE
    while died() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert died() is None


def test_streams_are_one_per_role(device: CpuDevice) -> None:
    assert device.stream("fetch") is device.stream("fetch")
    assert device.stream("fetch") is not device.stream("write_back")


def test_memory(device: CpuDevice) -> None:
    slot = device.slot(100)
    managed = device.managed(100, allow_oversubscription=False)
    assert slot.dtype == managed.dtype == torch.uint8
    assert slot.shape == managed.shape == (100,)
    assert not managed.any()
    assert device.pin(0, 0)
    device.unpin(0)
    assert device.lookahead_obstacle() is None
    assert not device.capturing()


def test_one_device_per_process() -> None:
    cpu = torch.device("cpu")
    assert device_for(cpu) is device_for(torch.device("cpu"))
    assert device_for(cpu).torch_device == cpu


def test_other_device_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"this one is on meta\. Use bitsandbytes' own optimizer"):
        device_for(torch.device("meta"))


@pytest.mark.timeout(60)
def test_a_finalizer_may_drain_in_the_middle_of_a_wait(device: CpuDevice) -> None:
    """The garbage collector runs finalizers at any line, those of a wait included."""
    stream = device.stream("fetch")
    before = sys.gettrace()
    for line in range(30):
        lines = iter(range(1000))

        def finalizer(frame: FrameType, event: str, argument: object) -> Any:
            if next(lines) == line:  # noqa: B023
                device.drain()
            return finalizer

        stream.launch(lambda: time.sleep(0.01))
        slow = stream.record()
        sys.settrace(finalizer)
        try:
            slow.synchronize()
        finally:
            sys.settrace(before)


FIRST_ROOT = """
import torch
taken, sqrt = [], torch.Tensor.sqrt
def noted(tensor):
    taken.append((tuple(tensor.shape), tensor.dtype, tensor.device.type))
    return sqrt(tensor)
torch.Tensor.sqrt = noted
import pageahead
pageahead.PagedAdamW
assert taken == [((1,), torch.float32, "cpu")], taken
"""


def test_the_first_root_of_a_process_is_taken_by_one_thread(tmp_path: Path) -> None:
    """See docs/pitfalls.md, 37: of several threads at once, one might take it wrongly."""
    ended = finished(python("-c", FIRST_ROOT, folder=tmp_path))
    assert ended.returncode == 0, ended.stderr
