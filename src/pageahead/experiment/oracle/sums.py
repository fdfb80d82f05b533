"""Sums of a run's cells, small enough to lie in the evidence file that they belong to.

``python -m pageahead.experiment.oracle.sums CELLS.jsonl.gz EVIDENCE.jsonl`` appends them.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pageahead.experiment.evidence import Environment, append
from pageahead.experiment.oracle.records import (
    CellRecord,
    ExcludedRecord,
    Record,
    ReferenceCount,
    SourceRecord,
    SummaryRecord,
    parse,
)

__all__ = ["sums", "sums_of"]


def sums(path: Path) -> Iterator[Record]:
    """The records of a file that `pageahead verify` wrote, with sums instead of cells.

    A `SourceRecord` says which file it was.

    Raises:
        ValueError: it has no cell, or those of several runs.
        pydantic.ValidationError: a line is no record of `pageahead verify`.
    """
    lines = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    records = [parse(line) for line in lines.splitlines()]
    cells = [record for record in records if isinstance(record, CellRecord)]
    runs = {cell.run for cell in cells}
    if len(runs) != 1:
        raise ValueError(f"{path} has cells of {len(runs)} runs; sums are of one")
    (run,) = runs
    yield from (record for record in records if isinstance(record, Environment))
    yield SourceRecord(
        run=run, cells_file=path.name, cells_sha256=hashlib.sha256(lines).hexdigest()
    )
    yield from (record for record in records if isinstance(record, ExcludedRecord))
    yield from sums_of(cells)


def sums_of(cells: Sequence[CellRecord]) -> Iterator[SummaryRecord]:
    """One for each optimizer, width and movement, of cells of one run."""
    groups: dict[tuple[str, int, str], list[CellRecord]] = {}
    for cell in cells:
        groups.setdefault((cell.family, cell.bits, cell.movement), []).append(cell)
    for (family, bits, movement), group in sorted(groups.items()):
        good = [cell for cell in group if cell.result == "equal"]
        yield SummaryRecord(
            run=group[0].run,
            family=family,
            bits=bits,
            movement=movement,
            device=group[0].device,
            cells=len(group),
            results=Counter(cell.result for cell in group),
            bit_for_bit=sum(cell.bitwise for cell in good),
            steps=sum(cell.steps for cell in group),
            compared_steps=sum(len(cell.compared_steps) for cell in group),
            tensors=sum(cell.tensors * len(cell.compared_steps) for cell in group),
            copies=sum(cell.copies for cell in group),
            copied_bytes=sum(cell.copied_bytes for cell in group),
            prefetched_bytes=sum(cell.prefetched_bytes for cell in group),
            references=_references(group),
        )


def _references(cells: Sequence[CellRecord]) -> list[ReferenceCount]:
    counts: Counter[tuple[str, str | None]] = Counter()
    for cell in cells:
        counts.update({(one.why, one.tolerance) for one in cell.references})
    return [
        ReferenceCount(why=why, tolerance=tolerance, cells=count)
        for (why, tolerance), count in sorted(counts.items(), key=str)
    ]


if __name__ == "__main__":
    cells_file, evidence_file = map(Path, sys.argv[1:])
    for one in sums(cells_file):
        append(evidence_file, one)
