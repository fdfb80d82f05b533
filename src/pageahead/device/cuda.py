"""CUDA as a device: PyTorch's streams and copies, plus managed memory from cuda-bindings."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pageahead.device import managed, pinning, topology
from pageahead.device.protocol import EventNotRecordedError, Memory
from pageahead.device.runtime import shared_runtime

__all__ = ["CudaBlock", "CudaDevice", "CudaEvent", "CudaStream"]


class CudaEvent:
    """A recorded CUDA event; goes back to its pool when nobody holds it any more."""

    __slots__ = ("_pool", "raw")

    def __init__(self, pool: list[torch.cuda.Event] | None = None) -> None:
        self._pool = pool
        self.raw: torch.cuda.Event | None = None

    def synchronize(self) -> None:
        if self.raw is None:
            raise EventNotRecordedError
        self.raw.synchronize()

    def __del__(self) -> None:
        if self._pool is not None and self.raw is not None:
            self._pool.append(self.raw)


class CudaStream:
    """A stream as PyTorch knows it, whose events come from a pool."""

    __slots__ = ("_pool", "handle", "raw")

    def __init__(self, raw: torch.cuda.Stream, pool: list[torch.cuda.Event]) -> None:
        self.raw = raw
        self.handle = raw.cuda_stream
        self._pool = pool

    def record(self) -> CudaEvent:
        event = CudaEvent(self._pool)
        try:
            raw = self._pool.pop()
        except IndexError:
            raw = torch.cuda.Event()
        raw.record(self.raw)
        event.raw = raw
        return event

    def wait(self, event: CudaEvent) -> None:
        if event.raw is None:
            raise EventNotRecordedError
        event.raw.wait(self.raw)


class CudaBlock:
    """A memory pool of its own: PyTorch hands a pool's memory back when the pool goes."""

    __slots__ = ("_device", "_pool")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):  # a pool belongs to the device that is current
            self._pool = torch.cuda.MemPool()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._pool, self._device):
            return torch.zeros(shape, dtype=dtype, device=self._device)


class CudaDevice:
    """One GPU. See `pageahead.device.protocol.Device`."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._process = os.getpid()
        self._runtime = shared_runtime()
        self._pool: list[torch.cuda.Event] = []
        self._streams: dict[str, CudaStream] = {}
        self._making = threading.Lock()
        self._free: tuple[int, float, int] | None = None
        """Driver-free bytes and fraction at the last `free_bytes`, and its answer."""
        # bitsandbytes launches on the legacy default stream whatever stream is current.
        self._compute = CudaStream(torch.cuda.default_stream(device), self._pool)

    def stream(self, role: str) -> CudaStream:
        known = self._streams.get(role)
        if known is None:
            with self._making:  # two threads that step for the first time get one stream
                known = self._streams.get(role)
                if known is None:
                    known = self._streams[role] = self._new_stream()
        return known

    def _new_stream(self) -> CudaStream:
        with torch.cuda.device(self.torch_device):
            handle = self._runtime.create_stream(priority=-1)
        return CudaStream(torch.cuda.ExternalStream(handle, self.torch_device), self._pool)

    def compute_stream(self) -> CudaStream:
        return self._compute

    def caller_stream(self) -> CudaStream:
        if self._compute_is_current():
            return self._compute
        return CudaStream(torch.cuda.current_stream(self.torch_device), self._pool)

    def computing(self) -> AbstractContextManager[Any]:
        if self._compute_is_current() and torch.cuda.current_device() == self.torch_device.index:
            return nullcontext()
        return torch.cuda.stream(self._compute.raw)

    def _compute_is_current(self) -> bool:
        # A fiftieth of the host time of making a Stream; each step waits for it.
        current = torch._C._cuda_getCurrentRawStream(self.torch_device.index)
        return bool(current == self._compute.handle)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, stream: Any) -> None:
        if source.dim() == 1:
            self._runtime.copy_async(
                destination.data_ptr(), source.data_ptr(), source.nbytes, stream.handle
            )
        else:
            self._runtime.copy_rows_async(
                destination.data_ptr(),
                destination.stride(0),
                source.data_ptr(),
                source.stride(0),
                source.shape[1],
                source.shape[0],
                stream.handle,
            )

    def zero(self, tensor: torch.Tensor, *, stream: Any) -> None:
        with torch.cuda.stream(stream.raw):
            tensor.zero_()

    def keep(self, tensor: torch.Tensor) -> None:
        # Memory of the compute stream's own pool is reused in that stream's order anyway.
        if not self._compute_is_current():
            tensor.record_stream(self._compute.raw)

    def prefetch(self, tensor: torch.Tensor, *, stream: Any) -> None:
        managed.prefetch(tensor, self.torch_device, stream.handle)

    def slot(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        fraction = _memory_fraction(self.torch_device)
        if self._free is None or self._free[:2] != (free, fraction):
            usable = free
            if fraction < 1.0:
                # What PyTorch has reserved and not allocated is not free: after a backward it is
                # the room of the activations, which the next forward wants again, and a block,
                # being a pool of its own, could not be cut from it anyway.
                reserved = torch.cuda.memory_reserved(self.torch_device)
                usable = max(0, min(free, int(fraction * total) - reserved))
            # Our share of the cap only changes with what the driver has left: asked again then.
            self._free = free, fraction, usable
        return self._free[2]

    def memory(self) -> Memory:
        stats = torch.cuda.memory_stats(self.torch_device)
        allocated = stats.get("allocated_bytes.all.current", 0)
        peak = stats.get("allocated_bytes.all.peak", 0)
        return Memory(allocated, peak, stats.get("reserved_bytes.all.current", 0) - allocated)

    def block(self) -> CudaBlock:
        return CudaBlock(self.torch_device)

    def near_cpus(self) -> frozenset[int]:
        return topology.cpus_near(self.torch_device)

    def pin(self, address: int, nbytes: int) -> bool:
        return pinning.pin(address, nbytes, self.torch_device)

    def unpin(self, address: int) -> None:
        if self._process == os.getpid():  # a forked child has no CUDA
            pinning.unpin(address)

    def managed(self, nbytes: int, *, allow_oversubscription: bool) -> torch.Tensor:
        return managed.allocate(
            nbytes, self.torch_device, allow_oversubscription=allow_oversubscription
        )

    def lookahead_obstacle(self) -> str | None:
        if managed.concurrent_access(self.torch_device):
            return None
        return "this GPU has no concurrent managed access: pages cannot move while a kernel runs"

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def drain(self) -> None:
        if self._process == os.getpid():
            for stream in (self._compute, *self._streams.values()):
                stream.raw.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


def _memory_fraction(device: torch.device) -> float:
    """What ``set_per_process_memory_fraction`` was last given; the driver does not know of it."""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not in every PyTorch
    return 1.0 if ask is None else float(ask(device))
