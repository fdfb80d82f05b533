"""CUDA managed memory: bounded, prefetched on explicit streams, freed with its last tensor."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from functools import cache
from typing import Any

import torch

from pageahead.device.prefetch import Prefetch, check, load_runtime, make_prefetch

__all__ = ["allocate", "allocated_bytes", "concurrent_access", "on_device", "prefetch"]

_ATTACH_GLOBAL = 1  # cudaMemAttachGlobal
_CONCURRENT_MANAGED_ACCESS = 89  # cudaDevAttrConcurrentManagedAccess

_allocated: dict[torch.device, int] = {}
_lock = threading.RLock()
"""Reentrant: the collector may free an old optimizer's memory while this thread allocates."""


@cache
def _runtime() -> tuple[Any, Prefetch]:
    runtime, major = load_runtime()
    return runtime, make_prefetch(runtime, major)


@cache
def concurrent_access(device: torch.device) -> bool:
    """Whether the GPU can migrate pages while a kernel runs."""
    runtime, _ = _runtime()
    attribute = runtime.cudaDeviceAttr(_CONCURRENT_MANAGED_ACCESS)
    return bool(check(runtime.cudaDeviceGetAttribute(attribute, device.index)))


def allocated_bytes(device: torch.device) -> int:
    """Bytes of managed memory this package holds for `device`."""
    return _allocated.get(device, 0)


def allocate(nbytes: int, device: torch.device, *, allow_oversubscription: bool) -> torch.Tensor:
    """Return zeroed managed memory as a CPU-typed ``uint8`` tensor of `nbytes` bytes.

    The memory is freed when the last tensor over it is gone.

    Raises:
        MemoryError: if all managed memory held would exceed the free memory of the GPU, which can
            hang it, unless `allow_oversubscription`.
    """
    runtime, _ = _runtime()
    free, total = torch.cuda.mem_get_info(device)
    with _lock:
        wanted = allocated_bytes(device) + nbytes
        if wanted > free and not allow_oversubscription:
            raise MemoryError(
                f"optimizer state in managed memory would come to {wanted:,} bytes, but only "
                f"{free:,} of {total:,} bytes are free on {device}; oversubscribing a GPU can hang "
                f"it. Use strategy='streamed', which needs no managed memory, or "
                f"Paging(allow_oversubscription=True)."
            )
        with torch.cuda.device(device):
            address = int(check(runtime.cudaMallocManaged(nbytes, _ATTACH_GLOBAL)))
            check(runtime.cudaMemsetAsync(address, 0, nbytes, 0))
            check(runtime.cudaStreamSynchronize(0))
        _allocated[device] = allocated_bytes(device) + nbytes
    buffer = (ctypes.c_char * nbytes).from_address(address)
    # At exit the driver takes everything back; calling CUDA then may find it gone.
    weakref.finalize(buffer, _free, address, nbytes, device, os.getpid()).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8)


def prefetch(tensor: torch.Tensor, device: torch.device, stream: int) -> None:
    """Enqueue the migration of a managed tensor's pages to `device` on a raw stream."""
    _, enqueue = _runtime()
    enqueue(tensor.data_ptr(), tensor.nbytes, device.index, stream)


class _Bytes:
    """What PyTorch asks for to make a CUDA tensor of memory that somebody else holds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.held = tensor  # for as long as the CUDA tensor lives
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same memory as a tensor of `device`, for PyTorch's own operations.

    Args:
        tensor: contiguous; a tensor of `device`, or a CPU-typed one over managed memory.
        device: that it is to be a tensor of.
    """
    if tensor.device.type == device.type:
        return tensor
    flat = torch.as_tensor(_Bytes(tensor), device=device)
    return flat.view(tensor.dtype).view(tensor.shape)


def _free(address: int, nbytes: int, device: torch.device, process: int) -> None:
    if os.getpid() != process:  # a forked child has no CUDA
        return
    runtime, _ = _runtime()
    torch.cuda.synchronize(device)  # nothing may still be reading it
    with _lock:
        check(runtime.cudaFree(address))
        _allocated[device] -= nbytes
