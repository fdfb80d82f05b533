"""A device that does everything in the worst order that its events allow, and writes it down.

Nothing runs when it is enqueued. Whenever somebody waits, operations run one by one, each from a
stream picked at random among those whose first operation may run; each seed prefers some streams
and starves others. A missing event therefore shows as wrong bytes under some seed, on one thread,
the same way every time. `log` has every operation in the order in which it was *enqueued*.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from pageahead.device.cpu import CpuBlock
from pageahead.device.protocol import EventNotRecordedError, Memory

__all__ = ["LazyDevice", "LazyStream"]


@dataclass(eq=False)
class LazyEvent:
    """A point in a stream."""

    stream: LazyStream | None
    number: int
    done: bool = False

    def synchronize(self) -> None:
        if self.stream is None:
            raise EventNotRecordedError
        self.stream.device.log.append(f"host waits for {self}")
        self.stream.device.run_until(lambda: self.done)

    def __str__(self) -> str:
        assert self.stream is not None
        return f"{self.stream.name} {self.number}"


class LazyStream:
    """A queue of operations; each is called once its turn has come."""

    def __init__(self, device: LazyDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.queue: deque[LazyEvent | Callable[[], object]] = deque()
        self.weight = 1.0
        self._events = 0

    def launch(self, operation: Callable[[], object], label: str = "") -> None:
        self.queue.append(operation)
        self.device.log.append(f"{self.name}: {label}")
        self.device.progress()

    def record(self) -> LazyEvent:
        self._events += 1
        event = LazyEvent(self, self._events)

        def complete() -> None:
            event.done = True

        self.queue.append(complete)
        self.device.log.append(f"{self.name}: records {self._events}")
        self.device.progress()
        return event

    def wait(self, event: LazyEvent) -> None:
        if event.stream is None:
            raise EventNotRecordedError
        self.queue.append(event)
        self.device.log.append(f"{self.name}: waits for {event}")

    def can_run(self) -> bool:
        if not self.queue:
            return False
        first = self.queue[0]
        return first.done if isinstance(first, LazyEvent) else True

    def run_one(self) -> None:
        first = self.queue.popleft()
        if not isinstance(first, LazyEvent):
            first()


class HostStream(LazyStream):
    """The calling thread: what was called has run, and a wait blocks."""

    def record(self) -> LazyEvent:
        event = super().record()
        self.device.run_until(lambda: event.done)
        return event

    def wait(self, event: LazyEvent) -> None:
        super().wait(event)
        self.device.run_until(lambda: event.done)
        self.queue.clear()


class LazyDevice:
    """See `pageahead.device.protocol.Device`.

    Args:
        seed: of the order in which operations run.
        host_computes: run updates in the calling thread, as CPU operators do; otherwise the compute
            and the caller's streams are queues like the others.
    """

    def __init__(self, seed: int, *, host_computes: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self.log: list[str] = []
        self.labels: dict[int, str] = {}
        self.random = random.Random(seed)
        self._streams: dict[str, LazyStream] = {}
        self._slots = 0
        make = HostStream if host_computes else LazyStream
        self._compute = self._add(make(self, "compute"))
        self._caller = self._compute if host_computes else self._add(make(self, "caller"))

    def _add(self, stream: LazyStream) -> LazyStream:
        stream.weight = self.random.choice((0.001, 1.0, 1_000.0))
        self._streams[stream.name] = stream
        return stream

    def stream(self, role: str) -> LazyStream:
        if role not in self._streams:
            self._add(LazyStream(self, role))
        return self._streams[role]

    def compute_stream(self) -> LazyStream:
        return self._compute

    def caller_stream(self) -> LazyStream:
        return self._caller

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, stream: LazyStream) -> None:
        what = f"copies {self._label(source)} to {self._label(destination)}"
        stream.launch(lambda: destination.copy_(source), what)

    def zero(self, tensor: torch.Tensor, *, stream: LazyStream) -> None:
        stream.launch(tensor.zero_, f"zeroes {self._label(tensor)}")

    def keep(self, tensor: torch.Tensor) -> None:
        pass  # what is launched holds its tensors

    def prefetch(self, tensor: torch.Tensor, *, stream: LazyStream) -> None:
        stream.launch(lambda: None, f"prefetches {self._label(tensor)}")

    def slot(self, nbytes: int) -> torch.Tensor:
        slot = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)  # what was there before
        self.labels[slot.data_ptr()] = f"slot {self._slots}"
        self._slots += 1
        return slot

    def free_bytes(self) -> int:
        return 0

    def memory(self) -> Memory:
        return Memory(0, 0, 0)

    def block(self) -> CpuBlock:
        return CpuBlock()

    def near_cpus(self) -> frozenset[int]:
        return frozenset()

    def pin(self, address: int, nbytes: int) -> bool:
        return True

    def unpin(self, address: int) -> None:
        pass

    def managed(self, nbytes: int, *, allow_oversubscription: bool) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def lookahead_obstacle(self) -> str | None:
        return None

    def capturing(self) -> bool:
        return False

    def drain(self) -> None:
        self.log.append("host drains")
        self.run_until(lambda: not any(stream.queue for stream in self._streams.values()))

    def synchronize(self) -> None:
        self.log.append("host synchronizes")
        self.run_until(lambda: not any(stream.queue for stream in self._streams.values()))

    def _label(self, tensor: torch.Tensor) -> str:
        return self.labels.get(tensor.data_ptr(), "memory")

    def progress(self) -> None:
        """Run a few operations ahead of anybody waiting for them."""
        for _ in range(self.random.choice((0, 0, 1, 4))):
            if not self._run_one():
                return

    def run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            assert self._run_one(), "deadlock: each stream waits for another"

    def _run_one(self) -> bool:
        ready = [stream for stream in self._streams.values() if stream.can_run()]
        if ready:
            weights = [stream.weight for stream in ready]
            self.random.choices(ready, weights)[0].run_one()
        return bool(ready)
