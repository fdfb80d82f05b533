"""What profiles show of a strategy: which parts of a step went on at the same time."""

from __future__ import annotations

from dataclasses import dataclass

from pageahead.experiment.cells import CELLS
from pageahead.experiment.gate.reading import Evidence
from pageahead.experiment.profile.analysis import problems, typical
from pageahead.experiment.profile.records import ProfileRecord

__all__ = ["Profiled", "profiles"]


@dataclass(frozen=True)
class Profiled:
    """The typical step of a cell's profile. Its times are those of a traced step.

    Attributes:
        source: who recorded it.
        device_name: of which GPU.
        wall_ms: what the traced step took.
        concurrent_ms: how long at least two of fetch, update and write-back went on at once.
        overlap_ms: how long an update ran while state was on its way.
        both_ways_ms: how long state was on its way in both directions.
        synchronizations: device-wide ones of the host.
        legacy_synchronizations: the same of legacy's step; None where legacy was not profiled.
    """

    source: str
    device_name: str
    wall_ms: float
    concurrent_ms: float
    overlap_ms: float
    both_ways_ms: float
    synchronizations: int
    legacy_synchronizations: int | None

    @property
    def share(self) -> float:
        """Share of the step in which at least two of its parts went on at once."""
        return self.concurrent_ms / self.wall_ms


def profiles(evidence: Evidence, strategy: str) -> tuple[dict[str, Profiled], list[str]]:
    """The profiles of `strategy` that count, by cell, and why others do not.

    Of several of one cell the last that counts.
    """
    found: dict[str, Profiled] = {}
    refused: list[str] = []
    for record in evidence.profiles:
        if record.arm != strategy:
            continue
        reason = _why_not(record, evidence)
        if reason is not None:
            refused.append(f"a profile that does not count, {record.cell}: {reason}")
            continue
        found[record.cell] = _profiled(record, evidence)
    return found, refused


def _why_not(record: ProfileRecord, evidence: Evidence) -> str | None:
    if record.device != "cuda":
        return "of the CPU, where nothing crosses a link"
    # An export of another profiler says which GPU it was, and no more.
    if record.source != "nsys" and record.run not in evidence.environments:
        return f"nothing says on what machine run {record.run} was"
    cell = CELLS.get(record.cell)
    if cell is None:
        return "there is no such cell"
    if (record.residency, record.state_bytes) != (cell.residency, cell.state_bytes("cuda")):
        return (
            f"of {record.state_bytes:,} bytes, {record.residency}; the cell has "
            f"{cell.state_bytes('cuda'):,}, {cell.residency}"
        )
    found = problems(record)
    return found[0] if found else None


def _profiled(record: ProfileRecord, evidence: Evidence) -> Profiled:
    step = typical(record)
    legacy = [
        typical(one).device_synchronizations
        for one in evidence.profiles
        if (one.run, one.cell, one.arm) == (record.run, record.cell, "legacy")
    ]
    return Profiled(
        source=record.source,
        device_name=record.device_name,
        wall_ms=step.wall_ms,
        concurrent_ms=step.concurrent_ms,
        overlap_ms=step.overlap_ms,
        both_ways_ms=step.both_ways_ms,
        synchronizations=step.device_synchronizations,
        legacy_synchronizations=legacy[-1] if legacy else None,
    )
