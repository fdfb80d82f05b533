"""What a device can do for the pipeline, in five verbs.

``event = stream.record()`` hands on a point in a stream as a value, ``stream.wait(event)`` orders
a stream after it, ``event.synchronize()`` makes the host wait, ``device.copy(destination, source,
stream=...)`` and ``device.prefetch(tensor, stream=...)`` move bytes. Nothing about ordering is
implied: two operations on different streams are unordered unless one of these lines says otherwise.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["Block", "Device", "Event", "EventNotRecordedError", "Memory", "Stream"]


class EventNotRecordedError(RuntimeError):
    """A wait on an event that was never recorded. CUDA would silently wait for nothing."""

    def __init__(self) -> None:
        super().__init__(
            "waiting for an event that was never recorded; take events from stream.record()"
        )


class Memory(NamedTuple):
    """Bytes of a device's memory.

    Attributes:
        allocated: in tensors now.
        peak: in tensors at the most, since the process began or somebody reset PyTorch's count.
        kept: taken from the driver, and in no tensor now.
    """

    allocated: int
    peak: int
    kept: int


class Event(Protocol):
    """A point in a stream. Comes from `Stream.record`, is waited for any number of times."""

    def synchronize(self) -> None:
        """Block the host until everything before this point has run."""


class Stream(Protocol):
    """An ordered queue of operations. Long-lived: one per role, process and device."""

    def record(self) -> Event:
        """Return the point after everything enqueued on this stream so far."""

    def wait(self, event: Any) -> None:
        """Let everything enqueued on this stream from now on run after `event`.

        `event` must come from a stream of the same device.
        """


class Block(Protocol):
    """Device memory that returns to the driver once the block and all tensors from it are gone."""

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a new zeroed tensor, with a storage of its own."""


class Device(Protocol):
    """One device: its streams, its memory and the two ways of moving bytes.

    A `stream` argument is one of this device's own.
    """

    torch_device: torch.device

    def stream(self, role: str) -> Stream:
        """The process's stream for `role` (``fetch``, ``write_back``, ``prefetch``)."""

    def compute_stream(self) -> Stream:
        """The stream that bitsandbytes' updates run on, whatever stream is current."""

    def caller_stream(self) -> Stream:
        """The stream that is current where the caller stands."""

    def computing(self) -> AbstractContextManager[Any]:
        """A context in which PyTorch's own operations, too, run on the compute stream."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, stream: Any) -> None:
        """Enqueue a copy of `source` to `destination`, which have one shape.

        Both are flat ``uint8`` tensors, or both two-dimensional ones with contiguous rows.
        """

    def zero(self, tensor: torch.Tensor, *, stream: Any) -> None:
        """Enqueue the zeroing of a flat ``uint8`` tensor."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep memory from being given to anything else before the compute stream is done with it.

        What is enqueued on that stream so far, that is; the tensor itself may go right away.
        """

    def prefetch(self, tensor: torch.Tensor, *, stream: Any) -> None:
        """Enqueue the migration of a managed tensor's pages to this device."""

    def slot(self, nbytes: int) -> torch.Tensor:
        """Uninitialized device memory: a one-dimensional ``uint8`` tensor of `nbytes` bytes."""

    def free_bytes(self) -> int:
        """Bytes of device memory that this process could still take. One driver call."""

    def memory(self) -> Memory:
        """What PyTorch has of the device's memory. Takes it about 0.1 ms to say."""

    def block(self) -> Block:
        """Device memory for state that stays, apart from what PyTorch keeps for reuse."""

    def near_cpus(self) -> frozenset[int]:
        """CPUs whose memory copies to and from this device reach directly; empty if unknown."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Page-lock host memory for copies; False (after a warning) where that is refused."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def managed(self, nbytes: int, *, allow_oversubscription: bool) -> torch.Tensor:
        """Zeroed managed memory as a ``uint8`` tensor, freed with the last tensor over it."""

    def lookahead_obstacle(self) -> str | None:
        """Why managed memory cannot be migrated while kernels run here; None if it can."""

    def capturing(self) -> bool:
        """Whether the caller's stream is being captured into a graph."""

    def drain(self) -> None:
        """Block the host until every stream of ours on this device is idle."""

    def synchronize(self) -> None:
        """Block the host until the whole device is idle."""
