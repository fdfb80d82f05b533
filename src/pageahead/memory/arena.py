"""Page-locked host memory that holds streamed state.

An arena grows by segments: one when the first parameters get state, another when parameters that
had no gradient before appear. Offsets are into one flat space over all segments, so that the
layout is plain arithmetic; no two segments touch in it.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from pageahead.device.protocol import Device
from pageahead.memory import host, ranks

__all__ = ["Arena"]

_TOUCH_BYTES = 64 << 20  # what one thread touches at a time


class _Pages(mmap.mmap):
    """Private anonymous memory: zeroed, page-aligned, kept alive by each tensor over it."""


class Arena:
    """The host arena of one optimizer on one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._bases: list[int] = []
        self._segments: list[torch.Tensor] = []
        self._pages: list[_Pages] = []
        self.pinned = True
        """False once page-locking was refused for a segment; copies from it are slower."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return sum(len(pages) for pages in self._pages)

    def grow(self, nbytes: int) -> int:
        """Add a segment of `nbytes` zeroed bytes and return the offset at which it starts.

        Raises:
            HostMemoryError: before anything is allocated, if that much is not available.
        """
        host.require(nbytes)
        pages = _map(nbytes)
        ranks.note(nbytes)
        weakref.finalize(pages, _no_longer_held, nbytes, os.getpid()).atexit = False
        segment = torch.frombuffer(pages, dtype=torch.uint8)
        _touch(segment.data_ptr(), nbytes, self._device.near_cpus())
        if self._device.pin(segment.data_ptr(), nbytes):
            release = weakref.finalize(
                pages, _release, self._device, segment.data_ptr(), os.getpid()
            )
            release.atexit = False  # the process's end unlocks them
        else:
            self.pinned = False
        base = 0
        if self._bases:
            base = self._bases[-1] + len(self._pages[-1]) + mmap.PAGESIZE
            base = -(-base // mmap.PAGESIZE) * mmap.PAGESIZE
        self._bases.append(base)
        self._segments.append(segment)
        self._pages.append(pages)
        return base

    def drop_last(self) -> None:
        """Forget the segment added last; its memory goes with the last tensor over it."""
        for kept in (self._bases, self._segments, self._pages):
            kept.pop()

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        """View ``[offset, offset + nbytes)``, which lies in one segment, as ``uint8``."""
        number = bisect.bisect_right(self._bases, offset) - 1
        start = offset - self._bases[number]
        return self._segments[number][start : start + nbytes]

    def tensor_at(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a state tensor with a storage of its own, so that saving it saves it alone."""
        numel = torch.Size(shape).numel()
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        number = bisect.bisect_right(self._bases, offset) - 1
        flat = torch.frombuffer(
            self._pages[number], dtype=dtype, count=numel, offset=offset - self._bases[number]
        )
        return flat.view(shape)


def _map(nbytes: int) -> _Pages:
    if sys.platform == "win32":
        return _Pages(-1, nbytes)  # where nothing forks
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        # A forked child (a DataLoader worker) gets none of it: a copy-on-write of page-locked
        # memory would silently part the addresses that the GPU and this process see.
        pages.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # a kernel without them: small pages, which take longer to make
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _touch(address: int, nbytes: int, near: frozenset[int]) -> None:
    """Let several threads bring in the pages; one alone takes seconds for a few GiB.

    The threads run on the CPUs in `near`, if there are any: pages come from their node's memory.
    """

    def settle() -> None:
        if near and sys.platform == "linux":
            with suppress(OSError):  # not allowed to: pages come from wherever this thread runs
                os.sched_setaffinity(0, near)  # of this thread

    starts = range(0, nbytes, _TOUCH_BYTES)
    count = min(8, len(near) or os.cpu_count() or 1, len(starts))
    with ThreadPoolExecutor(count, initializer=settle) as threads:
        list(
            threads.map(
                lambda start: ctypes.memset(address + start, 0, min(_TOUCH_BYTES, nbytes - start)),
                starts,
            )
        )


def _no_longer_held(nbytes: int, process: int) -> None:
    if os.getpid() == process:
        ranks.note(-nbytes)


def _release(device: Device, address: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has neither the pages nor CUDA
        device.drain()  # the last write-back may still be on its way
        device.unpin(address)
