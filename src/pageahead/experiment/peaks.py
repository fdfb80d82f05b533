"""Peak memory of a candidate beside legacy's: which records belong together, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable

from pageahead.experiment.evidence import PeakRecord

__all__ = ["Pair", "apart", "excess", "pairs"]

Pair = tuple[PeakRecord | None, PeakRecord | None]
"""Legacy's record and the candidate's. None: not measured."""


def pairs(records: Iterable[PeakRecord], strategy: str) -> dict[str, Pair]:
    """For each cell the strategy's last record, and legacy's last before it.

    Beside that one it was measured, even if another file has the cell with another strategy.
    """
    legacy: dict[str, PeakRecord] = {}
    found: dict[str, Pair] = {}
    for one in records:
        if one.arm == "legacy":
            legacy[one.cell] = one
        elif one.arm == strategy:
            found[one.cell] = legacy.get(one.cell), one
    for cell, last in legacy.items():
        before, ours = found.get(cell, (None, None))
        found[cell] = before or last, ours
    return found


def excess(legacy: PeakRecord, ours: PeakRecord) -> int:
    """Bytes that the candidate took beyond legacy's and its ring; 0 or less is within."""
    return ours.taken - legacy.taken - ours.staging


def apart(legacy: PeakRecord, ours: PeakRecord, limit: int) -> bool:
    """Whether what was taken of the GPU before differs by more than `limit` bytes."""
    return abs(ours.driver_before - legacy.driver_before) > limit
