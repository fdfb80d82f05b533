"""Making managed memory host-resident: each page is touched by the CPU, which brings it home."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

__all__ = ["HostResidency"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

REGION_BYTES = 4 << 20  # what one thread touches at a time


class HostResidency:
    """Brings tensors' pages to the host, again and again, without changing a byte of them.

    Args:
        tensors: CPU-typed and contiguous, over managed (or ordinary) memory.
        threads: how many touch pages; one alone is several times slower.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], threads: int | None = None) -> None:
        views = [tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors]
        self.nbytes = sum(view.nbytes for view in views)
        self._regions = [
            view[start : start + REGION_BYTES]
            for view in views
            for start in range(0, view.nbytes, REGION_BYTES)
        ]
        self._threads = ThreadPoolExecutor(threads or min(8, len(os.sched_getaffinity(0))))

    def restore(self) -> None:
        """Touch every page. No kernel may be using the memory."""
        list(self._threads.map(_touch, self._regions))


def _touch(region: Bytes) -> None:
    # Written, not only read: a page that was merely read may stay on the device as well. And by
    # way of a copy: numpy skips the assignment of an array to itself.
    pages = region[:: mmap.PAGESIZE]
    pages[:] = pages.copy()
    # A region need not start at a page's start, so its last page may lie past the last stride.
    region[-1:] = region[-1:].copy()
