"""What an evidence file already has, so that a run goes on where another was stopped."""

from __future__ import annotations

from collections.abc import Sequence

from pageahead.experiment.evidence import (
    CellRecord,
    Environment,
    LeftOutRecord,
    PeakRecord,
    TrainingRecord,
)
from pageahead.experiment.gate.reading import Record
from pageahead.experiment.gate.thresholds import THRESHOLDS
from pageahead.experiment.messages import (
    CellRequest,
    MeasureRequest,
    PeakRequest,
    TrainingRequest,
)
from pageahead.experiment.peaks import apart, pairs
from pageahead.experiment.training.gpt import shape_for

__all__ = ["Done", "same_conditions"]

Measured = CellRecord | PeakRecord | TrainingRecord


class Done:
    """The measured records of a file that a run here and now would make again.

    Those of the same code (by its digest), PyTorch, bitsandbytes and device. Which of them answers
    a request is decided by cell, strategies and protocol. A failed cell is not done, nor are peaks
    that the gate would not compare, because more of the GPU was taken before one of them.

    Args:
        records: of the file.
        environment: here and now.
    """

    def __init__(self, records: Sequence[Record], environment: Environment) -> None:
        runs = {
            record.run
            for record in records
            if isinstance(record, Environment) and same_conditions(record, environment)
        }
        self._measured = [
            record for record in records if isinstance(record, Measured) and record.run in runs
        ]
        self._peaks_apart = _peaks_apart(self._measured)
        self._left_out = {
            (record.cell, record.strategy, record.reason)
            for record in records
            if isinstance(record, LeftOutRecord) and record.run in runs
        }

    def answer(self, request: MeasureRequest) -> Measured | None:
        """The record that answers `request` already; None if there is none."""
        if isinstance(request, PeakRequest) and request.cell in self._peaks_apart:
            return None
        for record in self._measured:
            if record.cell == request.cell and _answers(record, request):
                return record
        return None

    def said(self, record: LeftOutRecord) -> bool:
        """Whether the file already has that this is left out, for the same reason."""
        return (record.cell, record.strategy, record.reason) in self._left_out


def same_conditions(one: Environment, other: Environment) -> bool:
    """Whether two runs had the same code, PyTorch, bitsandbytes and device."""
    return (
        one.device == other.device
        and one.gpu == other.gpu
        and one.library == other.library
        and one.torch == other.torch
        and one.bitsandbytes == other.bitsandbytes
        and one.source_sha256 == other.source_sha256
    )


def _peaks_apart(records: Sequence[Measured]) -> set[str]:
    """Cells with a strategy whose process found more taken than legacy's beside it, or less."""
    peaks = [record for record in records if isinstance(record, PeakRecord)]
    return {
        cell
        for strategy in {record.arm for record in peaks} - {"legacy"}
        for cell, (legacy, ours) in pairs(peaks, strategy).items()
        if legacy and ours and apart(legacy, ours, THRESHOLDS.taken_before)
    }


def _answers(record: Measured, request: MeasureRequest) -> bool:
    if isinstance(record, CellRecord):
        return (
            isinstance(request, CellRequest)
            and [one.strategy for one in record.candidates] == request.strategies
            and record.protocol == request.protocol
        )
    if isinstance(record, PeakRecord):
        return (
            isinstance(request, PeakRequest)
            and [record.arm] == request.strategies
            and record.steps == request.protocol.warmups
        )
    if not isinstance(request, TrainingRequest):
        return False
    found = {arm.arm for group in record.groups for arm in group.arms} | record.left_out.keys()
    return (
        found >= set(request.strategies)
        and record.protocol == request.protocol
        and record.parameters == shape_for(request.parameters).parameters
    )
