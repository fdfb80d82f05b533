"""Which strategies share a process with legacy, and which a cell has to do without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pageahead.experiment.arms import MANAGED_STRATEGIES
from pageahead.experiment.cells import Cell, DeviceType

__all__ = ["MANAGED_LIMIT_BYTES", "CellPlan", "plan_cell"]

#: Managed memory one process may hold. Far below any GPU's memory: near it, migration thrashes.
MANAGED_LIMIT_BYTES = 4 << 30


@dataclass(frozen=True)
class CellPlan:
    """The processes of one cell.

    Attributes:
        processes: the strategies measured beside legacy in each.
        left_out: strategies that are not measured, with the reason.
    """

    processes: list[list[str]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def plan_cell(cell: Cell, strategies: Sequence[str], device: DeviceType) -> CellPlan:
    """Put each strategy into a process in which at most one other than legacy is managed."""
    plan = CellPlan()
    wanted = list(dict.fromkeys(strategies))
    together = 2 * cell.state_bytes(device)
    managed = [strategy for strategy in wanted if strategy in MANAGED_STRATEGIES]
    if not cell.optimizer.legacy_pages:
        for strategy in managed:
            plan.left_out[strategy] = "legacy does not page here; see the preset 'source'"
        managed = []
    elif together > MANAGED_LIMIT_BYTES:
        for strategy in managed:
            plan.left_out[strategy] = (
                f"with legacy it would take {together / 2**30:.2f} GiB of managed memory; the "
                f"limit is {MANAGED_LIMIT_BYTES / 2**30:g} GiB"
            )
        managed = []
    first = [s for s in wanted if s not in MANAGED_STRATEGIES or s in managed[:1]]
    plan.processes.extend(process for process in [first] if process)
    plan.processes.extend([strategy] for strategy in managed[1:])
    return plan
