"""Page-locking ordinary host memory through the CUDA runtime PyTorch uses."""

from __future__ import annotations

import warnings

import torch

from pageahead.device.runtime import shared_runtime

__all__ = ["pin", "unpin"]

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every CUDA context of the process


def pin(address: int, nbytes: int) -> bool:
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
        f"CUDA refused to page-lock {nbytes:,} bytes of host memory (error {status}); optimizer "
        f"state is copied from pageable memory, which is correct but several times slower. "
        f"Usual causes: a limit on locked memory (`ulimit -l`, the container's memlock limit) or "
        f"too little free host memory.",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def unpin(address: int) -> None:
    """Undo `pin`. An error here (the context is gone at exit) is cleared, not raised."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        shared_runtime().clear_error()
