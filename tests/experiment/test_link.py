"""The arithmetic and the order of the link's measurement, on streams that only take notes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch

from pageahead.experiment import link
from pageahead.experiment.evidence import LinkRecord


class Timeline:
    """What the host's clock shows: it moves on when the host waits."""

    now = 0.0
    streams: ClassVar[list[Stream]] = []


class Stream:
    """Runs a copy in 2 ms; the second stream that is made in 4."""

    def __init__(self, device) -> None:
        Timeline.streams.append(self)
        self.milliseconds = 2.0 * len(Timeline.streams)
        self.now = 0.0
        self.waited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)
        self.now = max(self.now, event.at)


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.synchronized = False

    def record(self, stream: Stream) -> None:
        stream.now = max(stream.now, Timeline.now)
        self.at = stream.now

    def elapsed_time(self, end: Event) -> float:
        assert end.synchronized
        return end.at - self.at

    def synchronize(self) -> None:
        self.synchronized = True
        Timeline.now = max(Timeline.now, self.at)


@pytest.fixture
def copies(monkeypatch):
    """Stream by stream, the addresses that were copied between."""
    current: list[Stream] = []
    seen: list[tuple[Stream, int, int]] = []
    make = torch.empty

    def copy_(self, source, non_blocking):
        assert non_blocking
        seen.append((current[-1], self.data_ptr(), source.data_ptr()))
        current[-1].now += current[-1].milliseconds
        return self

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(Timeline, "streams", [])
    monkeypatch.setattr(Timeline, "now", 0.0)
    monkeypatch.setattr(link, "BUFFER_BYTES", 1_000_000)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        torch, "empty", lambda *size, dtype, pin_memory: make(*size, dtype=dtype).fill_(pin_memory)
    )
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return seen


def test_duplex_is_one_directions_bytes_over_the_time_both_take(copies) -> None:
    record = link.measure_link(torch.device("cpu"))
    # A megabyte in 2 ms one way and in 4 ms the other.
    assert record.to_device == pytest.approx([0.5] * link.SAMPLES)
    assert record.to_host == pytest.approx([0.25] * link.SAMPLES)
    assert record.duplex == pytest.approx([0.25] * link.SAMPLES)


def test_each_stream_keeps_to_its_own_two_buffers(copies) -> None:
    link.measure_link(torch.device("cpu"))
    pairs = {(id(stream), destination, source) for stream, destination, source in copies}
    assert len(pairs) == 2
    assert len({address for _, *addresses in pairs for address in addresses}) == 4


def test_both_directions_start_together(copies) -> None:
    link.measure_link(torch.device("cpu"))
    to_device, to_host = Timeline.streams
    assert to_host.waited[-1] is to_device.waited[-1]


def test_merging_keeps_every_sample() -> None:
    before = LinkRecord(to_device=[1.0], to_host=[2.0], duplex=[3.0, 9.0])
    after = LinkRecord(to_device=[4.0], to_host=[5.0], duplex=[6.0])
    both = link.merged([before, after])
    assert (both.to_device, both.to_host, both.duplex) == ([1.0, 4.0], [2.0, 5.0], [3.0, 9.0, 6.0])
    assert both.duplex_median == 6.0
