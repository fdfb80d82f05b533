"""What there is on this machine that paging needs, and what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
import torch
from pydantic import BaseModel

from pageahead.device import device_for, managed
from pageahead.device.topology import cpus_near, pci_address
from pageahead.experiment.identity import Identity
from pageahead.experiment.table import amount
from pageahead.memory import host
from pageahead.memory.arena import Arena
from pageahead.memory.ranks import local_ranks

__all__ = ["Finding", "findings"]

TRIAL_BYTES = 64 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Finding(BaseModel):
    """One thing that was looked at.

    Attributes:
        name: what.
        value: what there is.
        state: ``good``, ``info`` (neither good nor bad), ``slow`` (works, slower than it could) or
            ``bad`` (something does not work).
        advice: what to do about it; empty where there is nothing to do.
    """

    name: str
    value: str
    state: Literal["good", "info", "slow", "bad"] = "good"
    advice: str = ""


def findings(identity: Identity) -> list[Finding]:
    """Look at everything, once. Takes and gives back 64 MiB of page-locked memory."""
    found = [_gpu(identity), _library(identity), *_kinds(identity), _host_memory()]
    if identity.type == "cuda":
        found += [*_page_locking(identity.device), _managed(identity.device)]
        found.append(_node(identity.device))
    return [*found, *_huge_pages()]


def _gpu(identity: Identity) -> Finding:
    if identity.type == "cpu":
        return Finding(
            name="GPU",
            value=f"none that PyTorch {torch.__version__} can use",
            state="info",
            advice="bits and order can be checked here (pageahead verify), speed cannot",
        )
    free, total = torch.cuda.mem_get_info(identity.device)
    return Finding(
        name="GPU",
        value=f"{identity.name}, {amount(free)} of {amount(total)} free, CUDA {torch.version.cuda}",
    )


def _library(identity: Identity) -> Finding:
    version = importlib.metadata.version("bitsandbytes")
    right = identity.library.startswith("libbitsandbytes_")
    return Finding(
        name="bitsandbytes",
        value=f"{version}, {identity.library}",
        state="good" if right else "bad",
        advice="" if right else "python -m bitsandbytes says why its native library is missing",
    )


def _kinds(identity: Identity) -> Iterator[Finding]:
    if "microsoft" in platform.release().lower():
        yield Finding(
            name="platform",
            value="WSL2",
            state="slow",
            advice="page-locked memory is limited to part of the VM's: set memory= in .wslconfig",
        )
    elif sys.platform != "linux":
        yield Finding(
            name="platform",
            value=platform.platform(),
            state="info",
            advice="pageahead is tested on Linux only",
        )
    if identity.type == "cuda" and torch.cuda.get_device_properties(identity.device).is_integrated:
        yield Finding(
            name="memory of the GPU",
            value="is the host's (integrated GPU)",
            state="info",
            advice="paging moves state within one memory here: use bitsandbytes without paging",
        )


def _host_memory() -> Finding:
    available = host.available_bytes()
    total = psutil.virtual_memory().total
    ranks = local_ranks()
    share = f" (this one of {ranks} ranks)" if ranks > 1 else ""
    return Finding(
        name="host memory",
        value=f"{amount(available)} available of {amount(total)}{share}",
    )


def _page_locking(device: torch.device) -> Iterator[Finding]:
    limit = _locked_limit()
    arena = Arena(device_for(device))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says is said here
            arena.grow(TRIAL_BYTES)
    except host.HostMemoryError as error:
        yield Finding(name="page-locking", value="not tried", state="bad", advice=str(error))
        return
    yield Finding(
        name="page-locking",
        value=f"{'works' if arena.pinned else 'refused'}; limit on locked memory: {limit}",
        state="good" if arena.pinned else "slow",
        advice=""
        if arena.pinned
        else "raise it (ulimit -l; docker run --ulimit memlock=-1): without, copies are pageable",
    )


def _locked_limit() -> str:
    try:
        import resource
    except ImportError:
        return "unknown"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "none" if soft == resource.RLIM_INFINITY else amount(soft)


def _managed(device: torch.device) -> Finding:
    name = "managed memory"
    only = "only for strategies lookahead and sequential; streamed needs none"
    try:
        concurrent = managed.concurrent_access(device)
    except ImportError:
        return Finding(
            name=name,
            value="cannot be prefetched: no cuda-bindings",
            state="info",
            advice=f"pip install 'pageahead[cuda{str(torch.version.cuda).split('.')[0]}]'; {only}",
        )
    version = importlib.metadata.version("cuda-bindings")
    return Finding(
        name=name,
        value=f"{'with' if concurrent else 'without'} concurrent access, cuda-bindings {version}",
        state="good" if concurrent else "info",
        advice="" if concurrent else only,
    )


def _node(device: torch.device) -> Finding:
    near = cpus_near(device)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding(
        name="CPUs near the GPU",
        value=f"{len(near)} of {usable} usable ones ({pci_address(device)})" if near else "unknown",
        state="good" if near else "info",
        advice="" if near else "pages come from wherever the process runs",
    )


def _huge_pages() -> Iterator[Finding]:
    try:
        words = HUGE_PAGES.read_text()
    except OSError:
        return
    chosen = words[words.find("[") + 1 : words.find("]")]
    yield Finding(
        name="huge pages",
        value=chosen,
        state="slow" if chosen == "never" else "good",
        advice=f"the first step takes longer; echo madvise > {HUGE_PAGES}"
        if chosen == "never"
        else "",
    )
