"""Prefetching managed memory on an explicit stream, for CUDA 12 and CUDA 13.

The runtime call changed its signature: before CUDA 13 the destination is a device ordinal, from 13
on it is a ``cudaMemLocation`` followed by flags. Which one a process has is decided by the loaded
``cuda.bindings``, so that is what is asked. bitsandbytes' own ``cprefetch`` is not touched: it
always uses stream 0.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["Prefetch", "bindings_major", "check", "load_runtime", "make_prefetch"]

#: ``prefetch(address, nbytes, device ordinal, raw stream)``
Prefetch = Callable[[int, int, int, int], None]


def load_runtime() -> tuple[ModuleType, int]:
    """Return ``cuda.bindings.runtime`` and the major CUDA version it was built for.

    Raises:
        ImportError: if cuda-bindings is not installed, with what to install.
    """
    try:
        import cuda.bindings
        from cuda.bindings import runtime
    except ImportError as error:
        raise ImportError(
            "strategies over managed memory need the cuda-bindings package of your CUDA version: "
            "pip install 'pageahead[cuda13]' (or 'pageahead[cuda12]'). The default strategy, "
            "'streamed', does not need it."
        ) from error
    return runtime, bindings_major(cuda.bindings.__version__)


def bindings_major(version: str) -> int:
    """The CUDA major version that a cuda-bindings version string is for: ``'13.0.1'`` → 13."""
    return int(version.split(".", 1)[0])


def make_prefetch(runtime: Any, major: int) -> Prefetch:
    """Return the prefetch call for `runtime`, a ``cuda.bindings.runtime`` for CUDA `major`.

    The returned function enqueues the migration of ``[address, address + nbytes)`` to a device on
    a raw stream (an integer ``cudaStream_t``) and raises `RuntimeError` if CUDA refuses.
    """
    if major >= 13:
        locations: dict[int, Any] = {}

        def prefetch(address: int, nbytes: int, device: int, stream: int) -> None:
            location = locations.get(device)
            if location is None:
                location = runtime.cudaMemLocation()
                location.type = runtime.cudaMemLocationType.cudaMemLocationTypeDevice
                location.id = device
                locations[device] = location
            flags = 0  # reserved by CUDA
            check(runtime.cudaMemPrefetchAsync(address, nbytes, location, flags, stream))
    else:

        def prefetch(address: int, nbytes: int, device: int, stream: int) -> None:
            check(runtime.cudaMemPrefetchAsync(address, nbytes, device, stream))

    return prefetch


def check(result: tuple[Any, ...]) -> Any:
    """Return what a cuda-bindings call gave beside its status; `RuntimeError` on a failure."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA refused: {status.name} ({int(status)})")
    return values[0] if values else None
