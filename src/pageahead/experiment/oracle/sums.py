"""Sums of a run's cells, small enough to lie in the evidence file that they belong to.

``python -m pageahead.experiment.oracle.sums CELLS.jsonl.gz EVIDENCE.jsonl`` appends them.
"""

from __future__ import annotations

import gzip
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from pageahead.experiment.evidence import Environment, append
from pageahead.experiment.gate.reading import read_one
from pageahead.experiment.oracle.records import (
    CellRecord,
    ExcludedRecord,
    Record,
    ReferenceCount,
    SourceRecord,
    SummaryRecord,
)
from pageahead.files import check_apart, check_regular

__all__ = ["sums", "sums_of"]


def sums(path: Path) -> list[Record]:
    """The environment of a run of `pageahead verify`, and sums of its cells.

    A `SourceRecord` says which file it was.

    Raises:
        ValueError: the file has no cell, or those of several runs, or not their environment, or a
            line that is no record.
        OSError: it cannot be read.
    """
    records, problems = read_one(path)
    if problems:
        raise ValueError(problems[0])
    once = {(one.run, one.case, one.result): one for one in records if isinstance(one, CellRecord)}
    runs = {run for run, _, _ in once}
    if len(runs) != 1:
        raise ValueError(f"{path.name} has cells of {len(runs)} runs of verify; sums are of one")
    (run,) = runs
    about = [one for one in records if isinstance(one, Environment) and one.run == run]
    if not about:
        raise ValueError(f"{path.name} does not say on what machine run {run} was")
    lines = path.read_bytes()
    if path.suffix == ".gz":
        lines = gzip.decompress(lines)
    return [
        about[-1],
        SourceRecord(run=run, cells_file=path.name, cells_sha256=hashlib.sha256(lines).hexdigest()),
        *(one for one in records if isinstance(one, ExcludedRecord) and one.run == run),
        *sums_of(list(once.values())),
    ]


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


def main(
    cells: Annotated[Path, typer.Argument(metavar="CELLS.jsonl.gz", exists=True, dir_okay=False)],
    evidence: Annotated[Path, typer.Argument(metavar="EVIDENCE.jsonl", dir_okay=False)],
) -> None:
    """Append the sums of the cells that `pageahead verify --out` wrote to a file of evidence."""
    check_apart({"EVIDENCE.jsonl": evidence}, [cells])
    check_regular(evidence, "EVIDENCE.jsonl")
    try:
        for one in sums(cells):
            append(evidence, one)
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
