"""A decision on a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pageahead.experiment.cells import MATRIX
from pageahead.experiment.gate.decision import Decision
from pageahead.experiment.gate.finding import Finding
from pageahead.experiment.gate.measured import Measured
from pageahead.experiment.gate.wording import EXPLANATIONS, grouped, why, word
from pageahead.experiment.table import milliseconds

__all__ = ["show"]

STYLES = {
    "passed": "green",
    "failed": "bold red",
    "missing": "yellow",
    "GO": "bold green",
    "NO-GO": "bold red",
    "INCOMPLETE": "bold yellow",
}
NONE = "-"


def show(decision: Decision, output: Console) -> None:
    """Print the verdict and why, each criterion and clause, the cells and their limits."""
    output.print(Text(f"{decision.verdict}: {why(decision)}", STYLES[decision.verdict]))
    output.print(f"{decision.strategy} on {decision.device}", highlight=False, markup=False)
    for finding in decision.findings:
        _show_finding(finding, output)
    output.print()
    output.print(_cells(decision))
    for note in (*EXPLANATIONS, *decision.notes):
        output.print(note, highlight=False, markup=False, soft_wrap=True)


def _show_finding(finding: Finding, output: Console) -> None:
    line = Text(f"{finding.name} ")
    line.append(word(finding), STYLES[finding.status])
    line.append(f": {finding.title}")
    output.print(line, soft_wrap=True)
    for figure in finding.figures:
        output.print(f"    {figure}", highlight=False, markup=False, soft_wrap=True)
    for missing in grouped(finding.missing):
        output.print(f"    missing: {missing}", highlight=False, markup=False, soft_wrap=True)


def _cells(decision: Decision) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for header in ("cell", "role"):
        table.add_column(header, no_wrap=True)
    for header in ("legacy\nms", "ours\nms", "ratio", "interval"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for header in ("update\nms", "limit:\noverlap", "limit:\nlink"):
        table.add_column(header, justify="right", no_wrap=True)
    for cell in MATRIX.cells:
        measured = decision.collection.cells.get(cell.name)
        if measured is not None:
            table.add_row(*_row(measured))
    return table


def _row(one: Measured) -> list[str]:
    return [
        one.name,
        one.role,
        milliseconds(one.legacy_ms),
        milliseconds(one.candidate_ms),
        _number(one.ratio, 3),
        f"{one.verdict.low:.3f}-{one.verdict.high:.3f}",
        one.verdict.name if one.raw else f"{one.verdict.name}*",
        NONE if one.limit.update_ms is None else milliseconds(one.limit.update_ms),
        _number(one.limit.overlap, 2),
        _number(one.limit.link, 2),
    ]


def _number(value: float | None, places: int) -> str:
    return NONE if value is None else f"{value:.{places}f}"
