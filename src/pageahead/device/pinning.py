"""Page-locking ordinary host memory through the CUDA runtime PyTorch uses."""

from __future__ import annotations

import time
import warnings
from contextlib import suppress

import torch

from pageahead.device.runtime import shared_runtime

__all__ = ["pageable_and_locked", "pin", "unpin"]

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every CUDA context of the process
SAMPLE_BYTES = 8 << 20
REPEATS = 8


def pin(address: int, nbytes: int, device: torch.device) -> bool:
    """Register ``[address, address + nbytes)`` with CUDA; both in bytes, page-aligned.

    Returns False, after one warning, where CUDA refuses. The refusal is cleared from the runtime:
    bitsandbytes looks at the runtime's last error after each of its kernels and ends the process
    if there is one, whoever caused it.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, PORTABLE))
    if status == 0:
        return True
    shared_runtime().clear_error()
    warnings.warn(
        f"CUDA refused to page-lock {nbytes:,} bytes of host memory (error {status}). Results are "
        f"the same, but optimizer state is copied from pageable memory, {_slower(device)}. Usual "
        f"causes: a limit on locked memory (`ulimit -l`; for a container `--ulimit memlock=-1`; in "
        f"WSL2 half of its memory, see .wslconfig) or too little free host memory. `pageahead "
        f"doctor` shows both. Less state to copy: 8-bit state, or Paging(hbm_budget=...).",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def unpin(address: int) -> None:
    """Undo `pin`. An error here (the context is gone at exit) is cleared, not raised."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        shared_runtime().clear_error()


def pageable_and_locked(device: torch.device) -> tuple[float, float] | None:
    """GB/s (1e9 bytes) of copies to the device from pageable and from page-locked memory.

    None where not even a few MiB may be page-locked. Takes milliseconds.
    """
    try:
        locked = torch.zeros(SAMPLE_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        shared_runtime().clear_error()
        return None
    there = torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device=device)
    return _rate(there, torch.zeros(SAMPLE_BYTES, dtype=torch.uint8)), _rate(there, locked)


def _rate(there: torch.Tensor, here: torch.Tensor) -> float:
    there.copy_(here, non_blocking=True)  # the first one finds the link asleep
    torch.cuda.synchronize(there.device)
    begun = time.perf_counter()
    for _ in range(REPEATS):
        there.copy_(here, non_blocking=True)
    torch.cuda.synchronize(there.device)
    return REPEATS * SAMPLE_BYTES / (time.perf_counter() - begun) / 1e9


def _slower(device: torch.device) -> str:
    rates = None
    with suppress(torch.OutOfMemoryError):
        rates = pageable_and_locked(device)
    if rates is None:
        return "several times slower"
    pageable, locked = rates
    return f"at {pageable:.1f} instead of {locked:.1f} GB/s here, and not beside other work"
