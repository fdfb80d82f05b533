"""What one criterion or clause comes to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Literal

from pageahead.experiment.cells import MATRIX, Cell, Role
from pageahead.experiment.gate.measured import Collection, Measured

__all__ = ["WIDTHS", "Finding", "Status", "beside", "find", "mean_ratio", "of_width", "wanted"]

Status = Literal["passed", "failed", "missing"]

#: Bits of state, and the optimizer whose cells are that width's.
WIDTHS = {8: "adamw8", 32: "adamw32"}


@dataclass(frozen=True)
class Finding:
    """A criterion (1 to 6) or a NO-GO clause (A to C).

    Attributes:
        key: its number or letter.
        title: what has to hold; of a clause, what must not.
        status: ``failed`` also where a clause applies.
        figures: sentences with the numbers.
        cells: those behind it.
        missing: what would be needed besides, as ``name: reason``; empty where it passed.
    """

    key: str
    title: str
    status: Status
    figures: Sequence[str]
    cells: Sequence[str] = field(default_factory=list)
    missing: Sequence[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{'criterion' if self.key.isdigit() else 'clause'} {self.key}"


def find(
    key: str,
    title: str,
    *,
    failed: bool,
    figures: Sequence[str],
    cells: Iterable[Measured] = (),
    missing: Sequence[str] = (),
) -> Finding:
    """A finding whose status follows: what failed is failed, whatever else is missing."""
    status: Status = "failed" if failed else "missing" if missing else "passed"
    return Finding(key, title, status, figures, [cell.name for cell in cells], missing)


def wanted(
    collection: Collection, cells: Iterable[Cell], roles: Iterable[Role]
) -> tuple[list[Measured], list[str]]:
    """The cells of some roles that there are, and what is missing of them, with the reason."""
    present, missing = [], []
    chosen = set(roles)
    for cell in cells:
        if cell.role not in chosen:
            continue
        measured = collection.cells.get(cell.name)
        if measured is not None:
            present.append(measured)
        if measured is None:
            reason = collection.incomplete.get(cell.name, "not measured")
            missing.append(f"{cell.name}: {reason}")
        elif not measured.raw:
            missing.append(f"{cell.name}: raw rounds; there are published figures only")
    return present, missing


def of_width(cells: Iterable[Measured], optimizer: str) -> list[Measured]:
    """Those of one optimizer."""
    return [cell for cell in cells if cell.cell.optimizer.name == optimizer]


def mean_ratio(cells: Sequence[Measured]) -> float:
    """Geometric mean of legacy / candidate. There has to be a cell."""
    return geometric_mean(cell.ratio for cell in cells)


def beside(value: float, least: float) -> str:
    """A figure to four digits, or to as many as tell on which side of the line it is."""
    for digits in range(4, 17):
        said = f"{value:.{digits}g}"
        if (float(said) < least) == (value < least):
            break
    return said


def needed_cells() -> list[Cell]:
    """The matrix, but for what is measured only where somebody asks for it."""
    return [cell for cell in MATRIX.cells if cell.residency != "oversubscribed"]
