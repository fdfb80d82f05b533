"""Page-locking ordinary host memory through the CUDA runtime PyTorch uses."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache

import torch

__all__ = ["clear_runtime_error", "pin", "unpin"]

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
    clear_runtime_error()
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
        clear_runtime_error()


def clear_runtime_error() -> int:
    """Clear the calling thread's last CUDA runtime error and return its number (0: none)."""
    return int(_last_error()())


@cache
def _last_error() -> ctypes._NamedFuncPointer:
    # The error is kept per copy of libcudart: it has to be cleared in the very one that PyTorch and
    # bitsandbytes share, which is the one already mapped into this process.
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libcudart" in line}
    # A PyTorch with the runtime linked in statically exports its functions from libtorch_cuda.
    library = ctypes.CDLL(sorted(paths)[0]) if paths else ctypes.CDLL(None)
    function = library.cudaGetLastError
    function.restype = ctypes.c_int
    return function
