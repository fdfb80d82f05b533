"""How much host memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

from pageahead.memory.ranks import held, local_ranks

__all__ = ["HostMemoryError", "available_bytes", "require"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number where there is no limit


class HostMemoryError(MemoryError):
    """Optimizer state would not fit in host memory. Raised before any of it is allocated."""


def require(nbytes: int) -> None:
    """Raise `HostMemoryError` if `nbytes` more bytes of host memory are not available."""
    available = available_bytes()
    if nbytes > available:
        ranks = local_ranks()
        share = f" (this process's share among {ranks} on this host)" if ranks > 1 else ""
        raise HostMemoryError(
            f"optimizer state needs {nbytes:,} bytes of host memory, but only {available:,} bytes "
            f"are available{share}. Use 8-bit state, a larger machine or container limit, or "
            f"Paging(hbm_budget=...) to keep part of the state on the GPU."
        )


def available_bytes() -> int:
    """Bytes this process may take without the kernel having to kill something.

    The smaller of what the machine and each enclosing cgroup have left. Where a launcher started
    several ranks on this host (``LOCAL_WORLD_SIZE``): an even share of that and of what they hold
    already, less what this one holds.
    """
    limits: list[int] = [psutil.virtual_memory().available, *_cgroup_bytes_left()]
    left = max(0, min(limits))
    ranks = local_ranks()
    if ranks == 1:
        return left
    mine, total = held()
    return max(0, min(left, (left + total) // ranks - mine))


def _cgroup_bytes_left(
    membership: Path = Path("/proc/self/cgroup"), root: Path = _CGROUP_ROOT
) -> list[int]:
    """What each cgroup (v1 or v2) around this process still allows."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        # A container sees its own group at the mount point while the path names the host's.
        for folder in {group, *group.parents, top}:
            if folder == top or top in folder.parents:
                left += _group_bytes_left(folder, limit, usage)
    return left


def _group_bytes_left(folder: Path, limit: str, usage: str) -> list[int]:
    try:
        most, used = (folder / limit).read_text().strip(), (folder / usage).read_text().strip()
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    if most == "max" or int(most) >= _UNLIMITED:
        return []
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return [int(most) - int(used) + reclaimable]
