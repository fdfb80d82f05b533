"""Which strategies share a process with legacy, and which a cell has to do without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pageahead.experiment.arms import MANAGED_STRATEGIES
from pageahead.experiment.cells import Cell, DeviceType
from pageahead.memory.host import available_bytes

__all__ = ["MANAGED_LIMIT_BYTES", "CellPlan", "plan_cell"]

#: Managed memory one process may hold. Far below any GPU's memory: near it, migration thrashes.
MANAGED_LIMIT_BYTES = 4 << 30
#: Host memory that a process takes beside state: bitsandbytes, PyTorch, buffers of the link.
HOST_RESERVE_BYTES = 4 << 30


@dataclass(frozen=True)
class CellPlan:
    """The processes of one cell.

    Attributes:
        processes: the strategies measured beside legacy in each.
        left_out: strategies that are not measured, with the reason.
    """

    processes: list[list[str]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def plan_cell(
    cell: Cell,
    strategies: Sequence[str],
    device: DeviceType,
    *,
    gpu_bytes: int | None = None,
    oversubscribe: bool = False,
) -> CellPlan:
    """Put each strategy into a process in which at most one other than legacy is managed.

    Args:
        cell: what is to be measured.
        strategies: against legacy; named twice counts once.
        device: of what kind.
        gpu_bytes: the GPU's memory, where it is known.
        oversubscribe: whether cells may take more device memory than there is.
    """
    plan = CellPlan()
    wanted = list(dict.fromkeys(strategies))
    together = 2 * cell.state_bytes(device)
    if cell.residency == "oversubscribed":
        reason = _why_not_oversubscribed(cell, device, gpu_bytes, oversubscribe)
        if reason is not None:
            plan.left_out.update(dict.fromkeys(wanted, reason))
            return plan
    managed = [strategy for strategy in wanted if strategy in MANAGED_STRATEGIES]
    if not cell.optimizer.legacy_pages:
        for strategy in managed:
            plan.left_out[strategy] = "legacy does not page here; see the preset 'source'"
        managed = []
    elif together > MANAGED_LIMIT_BYTES:
        for strategy in managed:
            plan.left_out[strategy] = (
                f"with legacy it would take {together / 2**30:.2f} GiB of managed memory; the "
                f"limit is {MANAGED_LIMIT_BYTES / 2**30:.3g} GiB"
            )
        managed = []
    first = [s for s in wanted if s not in MANAGED_STRATEGIES or s in managed[:1]]
    plan.processes.extend(process for process in [first] if process)
    plan.processes.extend([strategy] for strategy in managed[1:])
    return plan


def _why_not_oversubscribed(
    cell: Cell, device: DeviceType, gpu_bytes: int | None, oversubscribe: bool
) -> str | None:
    if device == "cpu":
        return "only a GPU's memory can be oversubscribed"
    if not oversubscribe:
        return "it can hang a GPU, and is measured only with --oversubscribe"
    state = cell.state_bytes(device)
    # Legacy's, a candidate's, and room for the GPU's own to be evicted to.
    needed, available = 3 * state + HOST_RESERVE_BYTES, available_bytes()
    if available < needed:
        return (
            f"it takes {needed / 2**30:.3g} GiB of host memory, and {available / 2**30:.3g} GiB "
            f"are available"
        )
    if gpu_bytes is not None and gpu_bytes < 4 * state:
        return (
            f"it takes a GPU of {4 * state / 2**30:.3g} GiB, and this has {gpu_bytes / 2**30:.3g}"
        )
    return None
