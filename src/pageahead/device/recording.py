"""A device that writes down every operation, under CUDA's rules, on CPU tensors.

Nothing here orders two streams: not the calling thread, in which everything really runs, and not
the order in which operations are enqueued. What may be relied on is in the trace, as events and
waits, and `pageahead.pipeline.ordering` finds what relies on more. Copies and updates also run, at
once and in program order, so that the real optimizer gives its real results on this device.

The caller and the host take part. What they do between steps is said with `RecordedStream.reads`
and `.writes`, `RecordingDevice.host_reads` and `.host_writes`; without it, no fault in the order of
a step towards its surroundings could show.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pageahead.device
from pageahead.device.cpu import CpuBlock
from pageahead.device.protocol import EventNotRecordedError, Memory
from pageahead.device.trace import HOST, Names, Operation, Range, ranges_of

__all__ = ["RecordedEvent", "RecordedStream", "RecordingDevice"]

ONLY_READ = {"g", "qmap1", "qmap2"}
"""Arguments of bitsandbytes' update operators that its kernels read; they declare all mutable."""


class RecordedEvent:
    """A point in a stream; its name says which: ``fetch 3`` is the third one on ``fetch``."""

    __slots__ = ("_device", "name")

    def __init__(self, device: RecordingDevice | None = None, name: str | None = None) -> None:
        self._device = device
        self.name = name

    def synchronize(self) -> None:
        if self._device is None or self.name is None:
            raise EventNotRecordedError
        self._device.note(HOST, "waits for", waits=(self.name,))


class RecordedStream:
    """A stream, ordered against no other."""

    def __init__(self, device: RecordingDevice, name: str) -> None:
        self._device = device
        self._events = 0
        self.name = name

    def record(self) -> RecordedEvent:
        self._events += 1
        event = f"{self.name} {self._events}"
        self._device.note(self.name, "records", records=event)
        return RecordedEvent(self._device, event)

    def wait(self, event: RecordedEvent) -> None:
        if event.name is None:
            raise EventNotRecordedError
        self._device.note(self.name, "waits for", waits=(event.name,))

    def reads(self, *tensors: torch.Tensor | None) -> None:
        """Note an operation, enqueued now by whoever owns this stream, that reads tensors."""
        self._device.note(self.name, "reads", reads=ranges_of(tensors))

    def writes(self, *tensors: torch.Tensor | None) -> None:
        """Note one that writes tensors, or gets their memory for other use."""
        self._device.note(self.name, "writes", writes=ranges_of(tensors))


class RecordingDevice:
    """Records what is enqueued. See `pageahead.device.protocol.Device`.

    Attributes:
        trace: every operation so far, in program order.
        names: what to call memory when the trace is printed; add to it freely.
        kept: memory that `keep` was called for, and the event that whoever gets it next waits for.
        caller: the stream that is current unless `using` says otherwise.
        compute: the stream of updates, CUDA's legacy default stream.
        free: what `free_bytes` says.
    """

    def __init__(self, *, execute: bool = True) -> None:
        """Args:
        execute: also run copies and updates; False where only their order is of interest.
        """
        self.torch_device = torch.device("cpu")
        self.trace: list[Operation] = []
        self.names = Names()
        self.kept: list[tuple[Range, RecordedEvent]] = []
        self.caller = RecordedStream(self, "caller")
        self.compute = RecordedStream(self, "compute")
        self.free = 0
        self._execute = execute
        self._current = self.caller
        self._ours: dict[str, RecordedStream] = {}
        self._others: dict[str, RecordedStream] = {}
        self._pinned: dict[int, Range] = {}
        self._memory: list[ctypes.Array[ctypes.c_char]] = []
        self._slots = 0

    # --- what surrounds a step ------------------------------------------------------------------

    @contextmanager
    def installed(self) -> Iterator[RecordingDevice]:
        """Be the device of CPU parameters; make optimizers and call them inside."""
        devices = pageahead.device._devices
        before = devices.get(self.torch_device)
        devices[self.torch_device] = self
        try:
            with _Launches(self, execute=self._execute):
                yield self
        finally:
            if before is None:
                del devices[self.torch_device]
            else:
                devices[self.torch_device] = before

    def other_stream(self, name: str) -> RecordedStream:
        """A stream of the user's, beside `caller`."""
        return self._others.setdefault(name, RecordedStream(self, name))

    @contextmanager
    def using(self, stream: RecordedStream) -> Iterator[None]:
        """Make a stream the current one, as ``torch.cuda.stream`` does."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def host_reads(self, *tensors: torch.Tensor | None) -> None:
        """Note that the host reads tensors now, without waiting for anything."""
        self.note(HOST, "reads", reads=ranges_of(tensors))

    def host_writes(self, *tensors: torch.Tensor | None) -> None:
        """Note that the host writes tensors now, without waiting for anything."""
        self.note(HOST, "writes", writes=ranges_of(tensors))

    def describe(self, since: int = 0) -> str:
        """The trace as text, one operation a line, from operation number `since` on."""
        return "\n".join(self.names.describe(one) for one in self.trace[since:])

    def note(self, agent: str, what: str, **details: Any) -> None:
        """Append an operation; `details` are fields of `Operation`."""
        self.trace.append(Operation(len(self.trace), agent, what, **details))

    # --- the protocol ---------------------------------------------------------------------------

    def stream(self, role: str) -> RecordedStream:
        return self._ours.setdefault(role, RecordedStream(self, role))

    def compute_stream(self) -> RecordedStream:
        return self.compute

    def caller_stream(self) -> RecordedStream:
        return self._current

    def computing(self) -> AbstractContextManager[Any]:
        return self.using(self.compute)

    def copy(
        self, destination: torch.Tensor, source: torch.Tensor, *, stream: RecordedStream
    ) -> None:
        self.note(stream.name, "copies", reads=ranges_of([source]), writes=ranges_of([destination]))
        if self._execute:
            destination.copy_(source)

    def zero(self, tensor: torch.Tensor, *, stream: RecordedStream) -> None:
        self.note(stream.name, "zeroes", writes=ranges_of([tensor]))
        if self._execute:
            tensor.zero_()

    def keep(self, tensor: torch.Tensor) -> None:
        self.kept.append((ranges_of([tensor])[0], self.compute.record()))

    def prefetch(self, tensor: torch.Tensor, *, stream: RecordedStream) -> None:
        self.note(stream.name, "prefetches", migrates=ranges_of([tensor]))

    def slot(self, nbytes: int) -> torch.Tensor:
        # Whoever had this memory last on the current stream, to whose pool it belongs, may still be
        # using it there; so may whoever gets it next. Both are accesses of that stream.
        stream = self._current
        tensor, bytes_of = self._allocate(nbytes, stream.name)
        self.names.give_range(bytes_of, f"slot {self._slots}")
        self._slots += 1
        self.note(stream.name, "had the memory of", writes=(bytes_of,))
        return tensor

    def free_bytes(self) -> int:
        return self.free

    def memory(self) -> Memory:
        return Memory(0, 0, 0)

    def block(self) -> CpuBlock:
        return CpuBlock()

    def near_cpus(self) -> frozenset[int]:
        return frozenset()

    def pin(self, address: int, nbytes: int) -> bool:
        pinned = Range(address, address + nbytes)
        self.names.give_range(pinned, f"arena {len(self._pinned)}")
        self._pinned[address] = pinned
        self.note(HOST, "page-locks", writes=(pinned,))
        return True

    def unpin(self, address: int) -> None:
        self.note(HOST, "frees", writes=(self._pinned[address],))

    def managed(self, nbytes: int, *, allow_oversubscription: bool) -> torch.Tensor:
        tensor, bytes_of = self._allocate(nbytes, HOST)
        self.names.give_range(bytes_of, f"managed memory at {bytes_of.start:#x}")
        self.note(HOST, "zeroes", writes=(bytes_of,))
        return tensor

    def lookahead_obstacle(self) -> str | None:
        return None

    def capturing(self) -> bool:
        return False

    def drain(self) -> None:
        self._idle("drains", [self.compute, *self._ours.values()])

    def synchronize(self) -> None:
        streams = [self.caller, self.compute, *self._ours.values(), *self._others.values()]
        self._idle("synchronizes", streams)

    def _idle(self, what: str, streams: list[RecordedStream]) -> None:
        self.note(HOST, what, idles=tuple(stream.name for stream in streams))

    def _allocate(self, nbytes: int, owner: str) -> tuple[torch.Tensor, Range]:
        """Memory whose end is noted; its addresses are never given to anything else."""
        memory = (ctypes.c_char * nbytes)()
        self._memory.append(memory)
        address = ctypes.addressof(memory)
        bytes_of = Range(address, address + nbytes)
        # Dies with the last tensor over it, while the memory itself stays.
        view = (ctypes.c_char * nbytes).from_buffer(memory)
        weakref.finalize(view, self._free, bytes_of, owner).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8), bytes_of

    def _free(self, bytes_of: Range, owner: str) -> None:
        if owner == HOST:  # managed memory: freeing it waits for the whole device
            self.synchronize()
            self.note(HOST, "frees", writes=(bytes_of,))
        else:
            self.note(owner, "gets the memory of", writes=(bytes_of,))


class _Launches(TorchDispatchMode):
    """Notes each bitsandbytes update where it is launched, with the tensors it is launched with."""

    def __init__(self, device: RecordingDevice, *, execute: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._execute = execute

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "bitsandbytes":
            return func(*args, **kwargs)
        named = dict(zip((one.name for one in func._schema.arguments), args, strict=False))
        tensors = {
            key: one for key, one in (named | kwargs).items() if isinstance(one, torch.Tensor)
        }
        # On the compute stream whatever stream is current: that is where bitsandbytes launches.
        self._device.note(
            self._device.compute.name,
            "updates",
            reads=ranges_of(one for key, one in tensors.items() if key in ONLY_READ),
            writes=ranges_of(one for key, one in tensors.items() if key not in ONLY_READ),
        )
        return func(*args, **kwargs) if self._execute else None
