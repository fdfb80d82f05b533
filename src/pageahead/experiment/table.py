"""The table of a run, and what has to be said under it. Computed from the records alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pageahead.experiment.evidence import (
    CandidateRecord,
    CellRecord,
    FailedRecord,
    LeftOutRecord,
    LinkRecord,
    Record,
)
from pageahead.experiment.link import merged
from pageahead.experiment.protocol import Protocol
from pageahead.experiment.summary import gigabytes_per_second, round_ratios
from pageahead.experiment.verdict import FEWEST_ROUNDS, verdict

__all__ = ["amount", "milliseconds", "notes", "results"]

NONE = "-"


def results(records: Sequence[Record]) -> Table:
    """One row for each candidate in each cell."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)  # every column counts
    for header in ("optimizer", "layout"):
        table.add_column(header, no_wrap=True)
    table.add_column("state", justify="right", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    for header in ("legacy\nms", "ours\nms", "ratio", "range by\nround", "GB/s\nway", "of\nlink"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("bits\nequal")
    for record in records:
        if isinstance(record, CellRecord):
            for candidate in record.candidates:
                table.add_row(*_row(record, candidate))
        elif isinstance(record, FailedRecord) and record.what == "steps":
            optimizer, _, layout = record.cell.partition("/")
            failed = Text("failed", style="bold red")
            for strategy in record.strategies:
                table.add_row(optimizer, layout, NONE, strategy, *[NONE] * 6, failed)
    return table


def notes(records: Sequence[Record]) -> list[str]:
    """What a reader of the table has to know, one sentence or two each."""
    cells = [record for record in records if isinstance(record, CellRecord)]
    said = []
    if cells:
        said.append(_how(cells))
        said += _verdicts(cells)
    if any(cell.device == "cpu" for cell in cells):
        said.append(_cpu(cells))
    links = [cell.link for cell in cells if cell.link is not None]
    if links:
        said.append(_link(merged(links)))
    for record in records:
        if isinstance(record, FailedRecord):
            strategies = ", ".join(record.strategies)
            what = "" if record.what == "steps" else f"{record.what}: "
            said.append(f"FAILED {record.cell} ({strategies}): {what}{record.reason}")
        elif isinstance(record, LeftOutRecord):
            said.append(f"{record.cell}: {record.strategy} left out; {record.reason}.")
        elif isinstance(record, CellRecord):
            said += _differences(record)
    return said


def amount(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def _row(cell: CellRecord, candidate: CandidateRecord) -> list[str | Text]:
    compared = candidate.ratio
    equal = candidate.comparison.equal
    return [
        cell.optimizer,
        cell.layout if cell.residency == "host" else f"{cell.layout}@{cell.residency}",
        amount(cell.state_bytes),
        candidate.strategy,
        milliseconds(cell.legacy.wall.median),
        milliseconds(candidate.wall.median),
        f"{compared.overall:.2f}",
        f"{compared.lowest:.2f}-{compared.highest:.2f}",
        *_bandwidth(cell, candidate),
        Text("yes") if equal else Text("NO", style="bold red"),
    ]


def _bandwidth(cell: CellRecord, candidate: CandidateRecord) -> tuple[str, str]:
    """GB/s each way, and that as a share of what the link can do; only where both are known."""
    if "streamed" not in candidate.routes or cell.link is None:
        return NONE, NONE
    moved = candidate.routes["streamed"].state_bytes
    reached = gigabytes_per_second(moved, candidate.wall.median)
    return f"{reached:.1f}", f"{reached / cell.link.duplex_median:.0%}"


def milliseconds(value: float) -> str:
    """To a microsecond, or a tenth of a millisecond where there are hundreds; hours do not fit."""
    if value >= 1e7:
        return f"{value:.3g}"
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _how(cells: Sequence[CellRecord]) -> str:
    protocols = dict.fromkeys(cell.protocol for cell in cells)
    counts = "; ".join(_counts(protocol) for protocol in protocols)
    devices = ", ".join(dict.fromkeys(cell.device_name for cell in cells))
    return (
        f"{devices}. FP16 parameters. ms: median host wall time of a step; ratio: legacy / ours, "
        f"the median of the rounds, and their range. {counts}."
    )


def _counts(protocol: Protocol) -> str:
    return (
        f"{protocol.warmups} warm-ups, then {protocol.rounds} rounds of {protocol.repetitions} "
        f"steps, interleaved in one process per cell"
    )


def _verdicts(cells: Sequence[CellRecord]) -> list[str]:
    """Of each verdict, the candidates that have it."""
    by_name: dict[str, list[str]] = {}
    for cell in cells:
        for candidate in cell.candidates:
            ratios = round_ratios(cell.legacy.timings.wall_ms, candidate.timings.wall_ms)
            by_name.setdefault(verdict(ratios).name, []).append(
                f"{cell.cell} ({candidate.strategy})"
            )
    few = any(cell.protocol.rounds < FEWEST_ROUNDS for cell in cells)
    too_few = f" ({FEWEST_ROUNDS} rounds or more are needed to decide)" if few else ""
    return [
        f"{name}{too_few if name == 'UNDECIDED' else ''}: {', '.join(who)}."
        for name, who in by_name.items()
    ]


def _cpu(cells: Sequence[CellRecord]) -> str:
    divisors: dict[int, list[str]] = {}
    for cell in cells:
        divisors.setdefault(cell.cpu_divisor, []).append(cell.layout)
    scaled = "; ".join(
        f"1/{divisor} ({', '.join(dict.fromkeys(layouts))})"
        for divisor, layouts in divisors.items()
        if divisor > 1
    )
    return (
        f"CPU: large parameters are scaled to {scaled} of the layout's size, but no smaller than "
        f"131,072 elements. Bits and order are checked for real; CPU timings are NO evidence of "
        f"transfer speed, as nothing crosses a link here."
    )


def _link(link: LinkRecord) -> str:
    return (
        f"Link, page-locked copies of 256 MiB, GB/s (1e9 bytes): {median(link.to_device):.1f} to "
        f"the GPU, {median(link.to_host):.1f} to the host, {link.duplex_median:.1f} each way with "
        f"both directions busy. GB/s each way of a step: state bytes / median step; its share is "
        f"of the duplex figure measured in the same process."
    )


def _differences(cell: CellRecord) -> list[str]:
    return [
        f"NOT EQUAL {cell.cell} ({candidate.strategy}): {candidate.comparison.differences} of "
        f"{candidate.comparison.tensors} tensors differ from legacy; "
        f"{'; '.join(candidate.comparison.examples)}"
        for candidate in cell.candidates
        if not candidate.comparison.equal
    ]
