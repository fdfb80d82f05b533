"""Which device this process computes on and which native library bitsandbytes loaded."""

from __future__ import annotations

import os
import platform
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from bitsandbytes.cextension import ErrorHandlerMockBNBNativeLibrary, lib

from pageahead.experiment.cells import DeviceType

__all__ = ["Identity", "IdentityError", "identify", "scrub"]


class IdentityError(RuntimeError):
    """This machine or installation is not what was asked for."""


@dataclass(frozen=True)
class Identity:
    """Where measurements are made.

    Attributes:
        device: the PyTorch device, with its index on a GPU.
        type: its type.
        name: the GPU's name, or a description of the CPU.
        library: file name of bitsandbytes' native library; ``none`` if it loaded none.
    """

    device: torch.device
    type: DeviceType
    name: str
    library: str


def identify(wanted: Literal["auto", "cpu", "cuda"]) -> Identity:
    """Choose the device and check that bitsandbytes is able to use it.

    Raises:
        IdentityError: there is no GPU although one was asked for, or bitsandbytes did not load
            its CUDA library. Nothing has been measured.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise IdentityError(
            f"--device cuda: PyTorch {torch.__version__} sees no CUDA GPU here. Use --device cpu "
            f"for what can be seen without one: bits and order, no speed."
        )
    library = _library()
    if wanted == "cpu" or not available:
        cpus = len(os.sched_getaffinity(0))
        name = f"CPU ({platform.machine()}, {cpus} usable)"
        return Identity(torch.device("cpu"), "cpu", name, library)
    if not library.startswith("libbitsandbytes_cuda"):
        raise IdentityError(
            f"bitsandbytes loaded {library!r}, which has no CUDA kernels, although PyTorch "
            f"{torch.__version__} sees a GPU. `python -m bitsandbytes` says why."
        )
    device = torch.device("cuda", torch.cuda.current_device())
    return Identity(device, "cuda", torch.cuda.get_device_name(device), library)


def scrub(text: str) -> str:
    """Take the folders of absolute paths and this host's name out of a message."""
    without_folders = re.sub(r"(?<![\w/.:])/(?:[\w.@+~-]+/)+", "", text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "<host>", without_folders)


def _library() -> str:
    if isinstance(lib, ErrorHandlerMockBNBNativeLibrary):
        return "none"
    return Path(lib._lib._name).name
