"""The copy of the CUDA runtime that PyTorch and bitsandbytes share, for what PyTorch leaves out.

cuda-bindings cannot serve here: it may carry a runtime of its own, whose last error is another.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import torch

__all__ = ["CudaRuntime", "shared_runtime"]

_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses
_STREAM_NON_BLOCKING = 1  # cudaStreamNonBlocking: not ordered against the legacy default stream


class CudaRuntime:
    """Calls into one ``libcudart``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._memcpy = library.cudaMemcpyAsync
        self._memcpy.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        self._memcpy_rows = library.cudaMemcpy2DAsync
        self._memcpy_rows.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        self._create_stream = library.cudaStreamCreateWithPriority
        self._create_stream.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_uint,
            ctypes.c_int,
        ]
        self._last_error = library.cudaGetLastError

    def create_stream(self, priority: int) -> int:
        """Make a raw, non-blocking stream on the current device; lower priorities go first.

        ``torch.cuda.Stream`` takes one of a pool instead, whose 128 streams are all made with the
        first: 70 MiB of device memory on an H200 (`docs/pitfalls.md`).

        Raises:
            RuntimeError: as `copy_async`.
        """
        stream = ctypes.c_void_p()
        status = self._create_stream(ctypes.byref(stream), _STREAM_NON_BLOCKING, priority)
        if status != 0:
            raise self._refusal("to make a stream", status)
        return stream.value or 0

    def copy_async(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between two addresses on a raw stream.

        A third of the host time of PyTorch's ``copy_`` under a stream context, which matters with
        two copies per chunk.

        Raises:
            RuntimeError: CUDA refuses. The error is cleared: bitsandbytes would end the process.
        """
        status = self._memcpy(destination, source, nbytes, _MEMCPY_DEFAULT, stream)
        if status != 0:
            raise self._refusal(f"to copy {nbytes} bytes", status)

    def copy_rows_async(
        self,
        destination: int,
        destination_pitch: int,
        source: int,
        source_pitch: int,
        nbytes: int,
        rows: int,
        stream: int,
    ) -> None:
        """Enqueue a copy of `rows` rows of `nbytes` bytes, each a pitch after the one before.

        Raises:
            RuntimeError: as `copy_async`.
        """
        status = self._memcpy_rows(
            destination,
            destination_pitch,
            source,
            source_pitch,
            nbytes,
            rows,
            _MEMCPY_DEFAULT,
            stream,
        )
        if status != 0:
            raise self._refusal(f"to copy {rows * nbytes} bytes", status)

    def _refusal(self, what: str, status: int) -> RuntimeError:
        self.clear_error()
        return RuntimeError(f"CUDA refused {what}: error {status}")

    def clear_error(self) -> int:
        """Clear the calling thread's last error and return its number; 0 means none."""
        return int(self._last_error())


@cache
def shared_runtime() -> CudaRuntime:
    """The ``libcudart`` mapped into this process, which bitsandbytes' CUDA library links to."""
    if sys.platform == "win32":  # not tested: there PyTorch brings it along in one place
        found = sorted((Path(torch.__file__).parent / "lib").glob("cudart64_*.dll"))
        if not found:
            raise RuntimeError("PyTorch's folder has no cudart64_*.dll; is this a CUDA build?")
        return CudaRuntime(ctypes.CDLL(str(found[0])))
    with open("/proc/self/maps") as maps:
        fields = (line.split(maxsplit=5) for line in maps)
        paths = {
            parts[5].strip() for parts in fields if len(parts) == 6 and "libcudart" in parts[5]
        }
    if not paths:
        raise RuntimeError(
            "no libcudart is loaded in this process; pageahead needs a CUDA build of PyTorch and "
            "bitsandbytes' CUDA library for it"
        )
    return CudaRuntime(ctypes.CDLL(sorted(paths)[0]))
