"""Giving back the managed memory of bitsandbytes' paged optimizers, which they never free."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from bitsandbytes.cextension import lib
from bitsandbytes.functional import GlobalPageManager

__all__ = ["cuda_free", "free_managed_state", "managed_state"]


def managed_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The state tensors of a bitsandbytes optimizer that lie in managed memory."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and getattr(value, "is_paged", False)
    ]


def cuda_free(address: int) -> None:
    """``cudaFree`` of the runtime that bitsandbytes is linked with, found through its library."""
    status = int(lib.cudaFree(ctypes.c_void_p(address)))
    if status != 0:
        raise RuntimeError(f"cudaFree refused managed memory of bitsandbytes: error {status}")


def free_managed_state(
    optimizer: torch.optim.Optimizer, free: Callable[[int], None] = cuda_free
) -> int:
    """Free an optimizer's managed memory and forget its state. Returns the bytes freed.

    The device must be idle. The optimizer is of no use afterwards.

    Raises:
        RuntimeError: bitsandbytes' list of managed tensors is not exactly this optimizer's, so
            that something would stay behind; or CUDA refused. Nothing is freed in the first case.
    """
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in managed_state(optimizer)}
    listed = GlobalPageManager.get_instance().paged_tensors
    if {tensor.data_ptr() for tensor in listed} != set(sizes):
        raise RuntimeError(
            f"bitsandbytes lists {len(listed)} managed tensors, but the legacy optimizer has "
            f"{len(sizes)}"
        )
    # No tensor may be left over memory that is gone.
    optimizer.state.clear()
    listed.clear()
    for address in sizes:
        free(address)
    return sum(sizes.values())
