"""The CPU as a device: worker threads as streams, real events.

A stream is a thread with a queue, so copies on different streams really run at the same time as
the update, and an ordering mistake really shows. Updates are ordinary CPU operators: they run in
the calling thread, which is therefore both the caller's and the compute stream.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pageahead.device.protocol import EventNotRecordedError, Memory

__all__ = ["CpuBlock", "CpuDevice", "CpuEvent", "HostStream", "WorkerStream"]

# Intel MKL, which PyTorch's CPU builds contain, looks at the kind of CPU in its first vector-math
# call, without a lock: a thread that comes meanwhile may take the roots of its whole share with
# half the digits (docs/pitfalls.md, 37). One thread makes that call here, before any update does.
torch.ones(1, dtype=torch.float32, device="cpu").sqrt()


class CpuEvent:
    """Done once everything before it in its stream has run; carries that stream's failure.

    Waiting holds no lock that the worker needs. With `threading.Event` it would: a finalizer that
    the garbage collector runs in the middle of its `wait`, and that waits for the same worker,
    would never return.
    """

    __slots__ = ("_done", "_failure", "_recorded", "_waiters")

    def __init__(self) -> None:
        self._done = False
        self._failure: BaseException | None = None
        self._recorded = False
        self._waiters: list[threading.Lock] = []

    def synchronize(self) -> None:
        """Block until done. Raises the error of an operation before it that failed."""
        if not self._recorded:
            raise EventNotRecordedError
        gate = threading.Lock()
        gate.acquire()
        self._waiters.append(gate)  # before the look at `_done`: `_complete` sees one or the other
        if not self._done:
            gate.acquire()
        if self._failure is not None:
            raise self._failure

    def _mark_recorded(self) -> CpuEvent:
        self._recorded = True
        return self

    def _complete(self, failure: BaseException | None = None) -> None:
        self._failure = failure
        self._done = True
        while self._waiters:
            self._waiters.pop().release()


class WorkerStream:
    """A thread that runs what it is given, in order."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"pageahead-{name}", daemon=True)
        self._thread.start()

    def launch(self, operation: Callable[[], object]) -> None:
        """Enqueue a call. If it raises, later events carry the error until `clear`."""
        self._queue.put(operation)

    def record(self) -> CpuEvent:
        event = CpuEvent()._mark_recorded()
        self._queue.put(lambda: event._complete(self._failure))
        return event

    def clear(self) -> None:
        """Forget a failure, once everything enqueued before has run."""

        def forget() -> None:
            self._failure = None

        self._queue.put(forget)

    def wait(self, event: CpuEvent) -> None:
        if not event._recorded:
            raise EventNotRecordedError
        self.launch(event.synchronize)

    def is_current(self) -> bool:
        """Whether the calling thread is this stream's own."""
        return threading.current_thread() is self._thread

    def _work(self) -> None:
        while True:
            operation = self._queue.get()
            try:
                operation()
            except BaseException as error:  # handed on through events
                self._failure = self._failure or error
            del operation  # an idle stream keeps no tensor alive


class HostStream:
    """The calling thread: what was called before has run already."""

    def record(self) -> CpuEvent:
        event = CpuEvent()._mark_recorded()
        event._complete()
        return event

    def wait(self, event: CpuEvent) -> None:
        event.synchronize()


class CpuBlock:
    """Ordinary tensors, which need no memory of their own to go one by one."""

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


class CpuDevice:
    """Parameters and slots in ordinary memory. See `pageahead.device.protocol.Device`.

    Attributes:
        free: what `free_bytes` says. Host memory kept out of the host arena gains nothing, so there
            is none; a test sets it to see what happens on a GPU with so much.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.free = 0
        self._host = HostStream()
        self._streams: dict[str, WorkerStream] = {}
        self._making = threading.Lock()
        self._process = os.getpid()

    def stream(self, role: str) -> WorkerStream:
        if self._process != os.getpid():  # threads do not survive a fork
            self._streams, self._process = {}, os.getpid()
        known = self._streams.get(role)
        if known is None:
            with self._making:  # two threads that step for the first time get one stream
                known = self._streams.get(role)
                if known is None:
                    known = self._streams[role] = WorkerStream(role)
        return known

    def compute_stream(self) -> HostStream:
        return self._host

    def caller_stream(self) -> HostStream:
        return self._host

    def computing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, stream: Any) -> None:
        stream.launch(lambda: destination.copy_(source))

    def zero(self, tensor: torch.Tensor, *, stream: Any) -> None:
        stream.launch(tensor.zero_)

    def keep(self, tensor: torch.Tensor) -> None:
        pass  # updates have run when their launch returns

    def prefetch(self, tensor: torch.Tensor, *, stream: Any) -> None:
        # Ordinary memory has nowhere to migrate to; reading it keeps the order observable.
        if isinstance(stream, WorkerStream):
            stream.launch(lambda: tensor.view(-1)[:1].clone())

    def slot(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def free_bytes(self) -> int:
        return self.free

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
        streams = list(self._streams.values())
        if self._process != os.getpid() or any(stream.is_current() for stream in streams):
            # A finalizer may run in a worker, which cannot wait for itself. It need not: what is
            # enqueued keeps its tensors alive.
            return
        events = [stream.record() for stream in streams]
        for stream in streams:
            stream.clear()
        failures: list[Exception] = []
        for event in events:  # all of them: one stream's failure leaves the others running
            try:
                event.synchronize()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def synchronize(self) -> None:
        self.drain()
