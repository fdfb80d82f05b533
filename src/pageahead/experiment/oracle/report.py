"""What a run says: one table, counts, and what failed. Computed from the records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pageahead.experiment.oracle.records import (
    CellRecord,
    Difference,
    ExcludedRecord,
    FailureRecord,
    Record,
)
from pageahead.experiment.table import amount

__all__ = ["SHOWN_FAILURES", "describe", "notes", "table"]

SHOWN_FAILURES = 10


def table(records: Sequence[Record]) -> Table:
    """Cells that are equal, of all that were checked, by optimizer and movement."""
    cells = [record for record in records if isinstance(record, CellRecord)]
    movements = list(dict.fromkeys(cell.movement for cell in cells))
    shown = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    shown.add_column("optimizer", no_wrap=True)
    shown.add_column("bits", justify="right")
    for movement in movements:
        shown.add_column(movement.replace("+", "\n"), justify="right")
    by_row: dict[tuple[str, int], dict[str, list[CellRecord]]] = {}
    for cell in cells:
        row = by_row.setdefault((cell.family, cell.bits), {})
        row.setdefault(cell.movement, []).append(cell)
    for (family, bits), row in sorted(by_row.items()):
        entries = [_entry(row.get(movement, [])) for movement in movements]
        shown.add_row(family, str(bits), *entries)
    return shown


def notes(records: Sequence[Record]) -> list[str]:
    """What a reader of the table has to know: how it was compared, and what failed."""
    cells = [record for record in records if isinstance(record, CellRecord)]
    good = [cell for cell in cells if cell.result == "equal"]
    bitwise = sum(cell.bitwise for cell in good)
    said = [
        f"{len(good):,} of {len(cells):,} cells equal to bitsandbytes on {_devices(cells)}: "
        f"{bitwise:,} bit for bit, {len(good) - bitwise:,} within a tolerance. A cell is one "
        f"optimizer, its parameters and one way of moving its state; {_compared(good)}."
    ]
    said += _references(good)
    said += [
        f"Cannot be compared ({record.cells:,} cells of the whole product): {record.reason}."
        for record in records
        if isinstance(record, ExcludedRecord)
    ]
    bad = [cell for cell in cells if cell.result != "equal"]
    said += [f"FAILED {cell.case}: {describe(cell)}" for cell in bad[:SHOWN_FAILURES]]
    if len(bad) > SHOWN_FAILURES:
        said.append(f"... and {len(bad) - SHOWN_FAILURES:,} more.")
    said += [_smallest(record) for record in records if isinstance(record, FailureRecord)]
    return said


def describe(record: CellRecord | FailureRecord) -> str:
    """What went wrong, in a sentence."""
    if record.difference is not None:
        return _difference(record.difference)
    words = {"wrong_path": "state took another path: ", "different": "", "failed": ""}
    return f"{words.get(record.result, '')}{record.problem}"


def _entry(cells: Sequence[CellRecord]) -> Text:
    if not cells:
        return Text("-")
    good = sum(cell.result == "equal" for cell in cells)
    if good == len(cells):
        return Text(f"{good:,}", style="green")
    return Text(f"{good:,} of {len(cells):,}", style="bold red")


def _devices(cells: Sequence[CellRecord]) -> str:
    return " and ".join(sorted({cell.device for cell in cells}))


def _compared(cells: Sequence[CellRecord]) -> str:
    if not cells:
        return "none was compared to its end"
    steps = sorted({cell.steps for cell in cells})
    counts = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
    taken = sum(cell.steps for cell in cells)
    after = sum(len(cell.compared_steps) for cell in cells)
    tensors = sum(cell.tensors * len(cell.compared_steps) for cell in cells)
    moved = sum(cell.copied_bytes + cell.prefetched_bytes for cell in cells)
    return (
        f"{counts} steps each, every parameter and all of its state compared after {after:,} of "
        f"{taken:,} steps, the last ones included ({tensors:,} tensors); {amount(moved)} moved"
    )


def _references(cells: Sequence[CellRecord]) -> list[str]:
    """References that are not simply the class of the same name, and tolerances."""
    counts: Counter[tuple[str, str | None]] = Counter()
    for cell in cells:
        counts.update(
            {(one.why, one.tolerance) for one in cell.references if one.why or one.tolerance}
        )
    said = []
    for (why, tolerance), count in sorted(counts.items(), key=str):
        how = f"within a tolerance: {tolerance}" if tolerance else "bit for bit"
        reason = f"{why}; " if why else ""
        said.append(f"Another reference in {count:,} cells: {reason}{how}.")
    return said


def _smallest(record: FailureRecord) -> str:
    if not record.reproduced:
        return (
            f"{record.case} did not fail again when it ran alone, so that it depends on timing or "
            f"on what ran before: {record.command}"
        )
    return (
        f"Smallest failing case ({record.attempts} tried): {record.smallest}\n"
        f"  {describe(record)}\n"
        f"  again: {record.command}"
    )


def _difference(difference: Difference) -> str:
    where = f"step {difference.step}, parameter {difference.parameter}, {difference.name}"
    if difference.index is None:
        return f"{where}: {difference.expected} expected, {difference.found} found"
    index = ", ".join(map(str, difference.index))
    remark = f"; {difference.remark}" if difference.remark else ""
    return (
        f"{where}[{index}]: {difference.expected} ({difference.expected_bits}) expected, "
        f"{difference.found} ({difference.found_bits}) found; {difference.differing:,} of "
        f"{difference.elements:,} elements differ{remark}"
    )
