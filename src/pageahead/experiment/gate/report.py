"""A decision on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pageahead.experiment.cells import MATRIX
from pageahead.experiment.gate.decision import Decision
from pageahead.experiment.gate.finding import Finding
from pageahead.experiment.gate.measured import Measured
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
#: A clause says what must not be, so that the words of criteria would mislead.
CLAUSE_WORDS = {"passed": "does not apply", "failed": "APPLIES", "missing": "not decided"}
NONE = "-"


def show(decision: Decision, output: Console) -> None:
    """Print the verdict and why, each criterion and clause, the cells and their limits."""
    output.print(Text(f"{decision.verdict}: {_why(decision)}", STYLES[decision.verdict]))
    output.print(f"{decision.strategy} on {decision.device}", highlight=False, markup=False)
    for finding in decision.findings:
        _show_finding(finding, output)
    output.print()
    output.print(_cells(decision))
    for note in (*_explanations(), *decision.notes):
        output.print(note, highlight=False, markup=False, soft_wrap=True)


def _why(decision: Decision) -> str:
    failed = [one.name for one in decision.findings if one.status == "failed"]
    missing = [one.name for one in decision.findings if one.status == "missing"]
    if failed:
        return f"failed: {', '.join(failed)}"
    if missing:
        return f"nothing failed, but something is missing for {', '.join(missing)}"
    return "all criteria hold and no clause applies"


def _show_finding(finding: Finding, output: Console) -> None:
    word = finding.status if finding.key.isdigit() else CLAUSE_WORDS[finding.status]
    line = Text(f"{finding.name} ")
    line.append(word, STYLES[finding.status])
    line.append(f": {finding.title}")
    output.print(line, soft_wrap=True)
    for figure in finding.figures:
        output.print(f"    {figure}", highlight=False, markup=False, soft_wrap=True)
    for missing in _grouped(finding.missing):
        output.print(f"    missing: {missing}", highlight=False, markup=False, soft_wrap=True)


def _grouped(missing: Sequence[str]) -> list[str]:
    """One line for each reason, with all that is missing for it."""
    reasons: dict[str, list[str]] = {}
    for one in missing:
        name, _, reason = one.partition(": ")
        reasons.setdefault(reason, []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


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


def _explanations() -> list[str]:
    return [
        "limit, overlap: legacy / max(update, legacy - update), update being legacy's step on "
        "state that is on the device already. Overlap hides at most the shorter of transfer and "
        "update, so nothing that only overlaps what legacy does in turn can be faster.",
        "limit, link: legacy / (state bytes / bandwidth each way with both directions busy): what "
        "no copy of the state in and out can beat.",
        "*: published figures, which can fail a criterion but not pass it.",
    ]
