"""Every cell of one strategy, whether the gate counts it or not."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from pageahead.experiment.arms import MANAGED_STRATEGIES
from pageahead.experiment.cells import CELLS, MATRIX
from pageahead.experiment.evidence import CandidateRecord, CellRecord, PeakRecord
from pageahead.experiment.gate.criteria import counted_peaks, why_not_comparable
from pageahead.experiment.gate.decision import Decision
from pageahead.experiment.gate.measured import Measured, of_rounds
from pageahead.experiment.gate.reading import Evidence
from pageahead.experiment.peaks import excess
from pageahead.experiment.summary import gigabytes_per_second

__all__ = ["Bandwidth", "PeakRow", "Row", "bandwidth", "peak_rows", "rows"]

NOT_MATRIX = "no part of the gate"


@dataclass(frozen=True)
class Bandwidth:
    """GB/s (1e9 bytes): state of a cell over the median step, and what the link can do.

    Attributes:
        legacy: of bitsandbytes' step; None where it does not page, and nothing crosses the link.
        ours: of the candidate's.
        link: the median of page-locked copies in the same process: each way with both directions
            busy where the candidate copies both ways, to the device where it does not.
        both_ways: whether the candidate copies state in and out within its step.
    """

    legacy: float | None
    ours: float
    link: float
    both_ways: bool

    @property
    def share(self) -> float:
        """Of the link."""
        return self.ours / self.link


@dataclass(frozen=True)
class Row:
    """A cell.

    Attributes:
        name: as in the evidence.
        role: what the gate takes it for.
        measured: its figures; None where there are none to show.
        remark: why the gate does not count it; empty if it does.
        bandwidth: where state crosses the link and the link was measured.
    """

    name: str
    role: str
    measured: Measured | None
    remark: str
    bandwidth: Bandwidth | None

    @property
    def counted(self) -> bool:
        return not self.remark


@dataclass(frozen=True)
class PeakRow:
    """Device memory of a cell, each arm in a process of its own. None: not measured."""

    name: str
    legacy: PeakRecord | None
    ours: PeakRecord | None

    @property
    def within(self) -> bool | None:
        """Whether criterion 6 holds for it; None where that is not known."""
        if self.legacy is None or self.ours is None or why_not_comparable(self.legacy, self.ours):
            return None
        return excess(self.legacy, self.ours) <= 0


def rows(evidence: Evidence, decision: Decision) -> list[Row]:
    """The matrix in its order, then what is outside of it."""
    last: dict[str, tuple[CellRecord, CandidateRecord]] = {}
    for record in evidence.cells:
        for candidate in record.candidates:
            if candidate.strategy == decision.strategy:
                last[record.cell] = (record, candidate)
    found = []
    collection = decision.collection
    order = [cell.name for cell in MATRIX.cells]
    seen = [*collection.cells, *collection.incomplete, *collection.others]
    for name in sorted(
        dict.fromkeys(seen), key=lambda one: order.index(one) if one in order else len(order)
    ):
        measured = collection.cells.get(name)
        remark = "" if measured else collection.incomplete.get(name, NOT_MATRIX)
        if measured is None and name in last:
            measured, problem = _uncounted(*last[name])
            remark = problem or remark
        role = CELLS[name].role if name in CELLS else "extra"
        speed = bandwidth(measured, decision.strategy) if measured else None
        found.append(Row(name, role, measured, remark, speed))
    return found


def bandwidth(measured: Measured, strategy: str) -> Bandwidth | None:
    """How near a cell came to the link; None where its state does not cross it."""
    link = measured.link
    if link is None or measured.cell.residency != "host" or not measured.state_bytes:
        return None
    both_ways = measured.streamed_bytes > 0
    if not both_ways and strategy not in MANAGED_STRATEGIES:
        return None
    moved = measured.streamed_bytes if both_ways else measured.state_bytes
    legacy = None
    if measured.cell.optimizer.legacy_pages:
        legacy = gigabytes_per_second(measured.state_bytes, measured.legacy_ms)
    return Bandwidth(
        legacy,
        gigabytes_per_second(moved, measured.candidate_ms),
        link.duplex_median if both_ways else median(link.to_device),
        both_ways,
    )


def peak_rows(evidence: Evidence, strategy: str) -> list[PeakRow]:
    """Cells with a peak of legacy or of the strategy, in the order of the matrix."""
    peaks = counted_peaks(evidence, strategy)
    return [PeakRow(cell.name, *peaks[cell.name]) for cell in MATRIX.cells if cell.name in peaks]


def _uncounted(record: CellRecord, candidate: CandidateRecord) -> tuple[Measured | None, str]:
    """Its figures, or why there are none."""
    if record.cell not in CELLS:
        return None, "a cell that this version does not know"
    try:
        return of_rounds(record, candidate), ""
    except (ArithmeticError, ValueError) as error:
        return None, f"its times cannot be used: {error}"
