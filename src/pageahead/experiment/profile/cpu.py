"""The same without a GPU: the CPU device's own operations, timed where they run.

Its streams are worker threads, so that what overlaps here overlaps really. What a copy between two
places in host memory takes says nothing about a link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pageahead.device
from pageahead.device.cpu import CpuDevice, CpuEvent, WorkerStream
from pageahead.experiment.profile.activity import Activity, Direction
from pageahead.experiment.profile.records import Source

__all__ = ["CpuCollector", "TimedDevice", "TimedStream"]

DIRECTIONS: dict[str, Direction] = {
    "fetch": "to_device",
    "prefetch": "to_device",
    "write_back": "to_host",
}

Note = Callable[[Activity], None]


class TimedStream(WorkerStream):
    """A worker that notes its waits, and what `timed` makes of an operation."""

    def __init__(self, role: str, note: Note) -> None:
        super().__init__(role)
        self.role = role
        self._note = note

    def wait(self, event: CpuEvent) -> None:
        super().wait(event)
        now = time.perf_counter_ns()
        self._note(Activity("wait", now, now, stream=self.role))

    def timed(self, operation: Callable[[], object], activity: Activity) -> None:
        """Launch `operation`; note `activity` with the time that it took."""

        def run() -> None:
            begun = time.perf_counter_ns()
            operation()
            self._note(activity._replace(start=begun, end=time.perf_counter_ns()))

        self.launch(run)


class TimedDevice(CpuDevice):
    """A CPU device whose copies, waits and synchronizations are noted."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def stream(self, role: str) -> TimedStream:
        known = self._streams.get(role)
        if not isinstance(known, TimedStream):
            known = self._streams[role] = TimedStream(role, self._note)
        return known

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, stream: Any) -> None:
        stream.timed(
            lambda: destination.copy_(source),
            Activity(
                "copy",
                0,
                0,
                stream=stream.role,
                direction=DIRECTIONS.get(stream.role, "other"),
                nbytes=source.nbytes,
            ),
        )

    def zero(self, tensor: torch.Tensor, *, stream: Any) -> None:
        stream.timed(tensor.zero_, Activity("fill", 0, 0, stream=stream.role, nbytes=tensor.nbytes))

    def prefetch(self, tensor: torch.Tensor, *, stream: Any) -> None:
        super().prefetch(tensor, stream=stream)
        now = time.perf_counter_ns()
        self._note(Activity("call", now, now, "cudaMemPrefetchAsync"))

    def synchronize(self) -> None:
        begun = time.perf_counter_ns()
        super().synchronize()
        self._note(Activity("synchronization", begun, time.perf_counter_ns(), "device"))


class _Updates(TorchDispatchMode):
    """Notes each bitsandbytes update, which has run when it returns."""

    def __init__(self, note: Note) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "bitsandbytes":
            return func(*args, **(kwargs or {}))
        begun = time.perf_counter_ns()
        done = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        self._note(Activity("kernel", begun, time.perf_counter_ns(), name, "compute"))
        return done


class CpuCollector:
    """Takes the CPU device's place until `close`. See `collector.Collector`."""

    source: Source = "cpu"

    def __init__(self) -> None:
        self._found: list[Activity] = []
        self._device = TimedDevice(self._found.append)
        self._mode = _Updates(self._found.append)
        devices = pageahead.device._devices
        self._before = devices.get(self._device.torch_device)
        devices[self._device.torch_device] = self._device
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._open = True

    def now(self) -> int:
        return time.perf_counter_ns()

    def take(self) -> list[Activity]:
        self._device.drain()
        found = list(self._found)
        self._found.clear()  # the same list: streams hold on to it
        return found

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        devices = pageahead.device._devices
        if self._before is None:
            devices.pop(self._device.torch_device, None)
        else:
            devices[self._device.torch_device] = self._before
