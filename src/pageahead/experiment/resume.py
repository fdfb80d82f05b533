"""What an evidence file already has, so that a run goes on where another was stopped."""

from __future__ import annotations

from collections.abc import Sequence

from pageahead.experiment.evidence import (
    CellRecord,
    Environment,
    LeftOutRecord,
    PeakRecord,
    Record,
)
from pageahead.experiment.messages import CellRequest, PeakRequest

__all__ = ["Done"]


class Done:
    """The measured records of a file that a run here and now would make again.

    Those of the same code (by its digest), PyTorch, bitsandbytes and device. Which of them answers
    a request is decided by cell, strategies and protocol. A failed cell is not done.

    Args:
        records: of the file.
        environment: here and now.
    """

    def __init__(self, records: Sequence[Record], environment: Environment) -> None:
        runs = {
            record.run
            for record in records
            if isinstance(record, Environment) and _same(record, environment)
        }
        self._measured = [
            record
            for record in records
            if isinstance(record, (CellRecord, PeakRecord)) and record.run in runs
        ]
        self._left_out = {
            (record.cell, record.strategy, record.reason)
            for record in records
            if isinstance(record, LeftOutRecord) and record.run in runs
        }

    def answer(self, request: CellRequest | PeakRequest) -> CellRecord | PeakRecord | None:
        """The record that answers `request` already; None if there is none."""
        for record in self._measured:
            if record.cell == request.cell and _answers(record, request):
                return record
        return None

    def said(self, record: LeftOutRecord) -> bool:
        """Whether the file already has that this is left out, for the same reason."""
        return (record.cell, record.strategy, record.reason) in self._left_out


def _same(one: Environment, other: Environment) -> bool:
    return (
        one.device == other.device
        and one.gpu == other.gpu
        and one.library == other.library
        and one.torch == other.torch
        and one.bitsandbytes == other.bitsandbytes
        and one.source_sha256 == other.source_sha256
    )


def _answers(record: CellRecord | PeakRecord, request: CellRequest | PeakRequest) -> bool:
    if isinstance(record, CellRecord):
        return (
            isinstance(request, CellRequest)
            and [one.strategy for one in record.candidates] == request.strategies
            and record.protocol == request.protocol
        )
    return (
        isinstance(request, PeakRequest)
        and [record.arm] == request.strategies
        and record.steps == request.protocol.warmups
    )
