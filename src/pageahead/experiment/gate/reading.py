"""Evidence files, of every kind, as one collection of records."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from pageahead.experiment import evidence
from pageahead.experiment.evidence import why_invalid
from pageahead.experiment.oracle import records as oracle

__all__ = ["Evidence", "Record", "gather", "read", "read_one"]

Record = evidence.Record | oracle.Record
_adapter: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


@dataclass
class Evidence:
    """Records by kind, each in the order of the files.

    Attributes:
        environments: by run.
        cells, peaks, summaries, failed, left_out: of `pageahead bench`.
        profiles: of `pageahead profile`.
        setups: runs that failed before they measured anything.
        verified, verified_summaries: of `pageahead verify`.
        problems: lines that are no records, with file and number.
    """

    environments: dict[str, evidence.Environment] = field(default_factory=dict)
    cells: list[evidence.CellRecord] = field(default_factory=list)
    peaks: list[evidence.PeakRecord] = field(default_factory=list)
    profiles: list[evidence.ProfileRecord] = field(default_factory=list)
    summaries: list[evidence.SummaryRecord] = field(default_factory=list)
    failed: list[evidence.FailedRecord] = field(default_factory=list)
    left_out: list[evidence.LeftOutRecord] = field(default_factory=list)
    setups: list[evidence.SetupFailedRecord] = field(default_factory=list)
    verified: list[oracle.CellRecord] = field(default_factory=list)
    verified_summaries: list[oracle.SummaryRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(paths: Sequence[Path]) -> Evidence:
    """Read files, ``.jsonl`` or ``.jsonl.gz``. A line that is no record costs that line alone."""
    read_each = [read_one(path) for path in paths]
    found = gather(record for records, _ in read_each for record in records)
    found.problems += [problem for _, problems in read_each for problem in problems]
    return found


def read_one(path: Path) -> tuple[list[Record], list[str]]:
    """The records of one file, and what is wrong with each line that is none."""
    records: list[Record] = []
    problems: list[str] = []
    number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                try:
                    records.append(_adapter.validate_json(line))
                except ValidationError as error:
                    problems.append(f"{path.name}, line {number}: {why_invalid(error)}")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            # Lines unpacked before that count like any others.
            problems.append(f"{path.name}, after line {number}: cannot be unpacked ({error})")
    return records, problems


def gather(records: Iterable[Record]) -> Evidence:
    """Sort records by kind. Of kinds that the gate does not use, none is kept."""
    found = Evidence()
    for record in records:
        match record:
            case evidence.Environment():
                found.environments[record.run] = record
            case evidence.CellRecord():
                found.cells.append(record)
            case evidence.PeakRecord():
                found.peaks.append(record)
            case evidence.ProfileRecord():
                found.profiles.append(record)
            case evidence.SummaryRecord():
                found.summaries.append(record)
            case evidence.FailedRecord():
                found.failed.append(record)
            case evidence.LeftOutRecord():
                found.left_out.append(record)
            case evidence.SetupFailedRecord():
                found.setups.append(record)
            case oracle.CellRecord():
                found.verified.append(record)
            case oracle.SummaryRecord():
                found.verified_summaries.append(record)
            case _:
                pass
    return found
