"""The few figures that stand beside a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pageahead.experiment.gate.finding import WIDTHS, Finding, beside
from pageahead.experiment.gate.measured import Measured
from pageahead.experiment.gate.thresholds import Thresholds
from pageahead.experiment.report.charts import Mean
from pageahead.experiment.report.rows import Row

__all__ = ["KeyFigure", "Tone", "headline"]

Tone = Literal["good", "bad", "open"]


@dataclass(frozen=True)
class KeyFigure:
    """One figure.

    Attributes:
        name: what it is.
        rule: the gate's line.
        value: the figure, or that there is none.
        tone: whether it keeps to the line; ``open`` if nobody knows.
    """

    name: str
    rule: str
    value: str
    tone: Tone


def headline(
    means: Sequence[Mean], rows: Sequence[Row], criteria: Sequence[Finding], thresholds: Thresholds
) -> list[KeyFigure]:
    """Of criteria 1 to 5, in the order in which people ask for them."""
    by_bits = {mean.bits: mean for mean in means}
    paging = _counted(rows, {"primary", "tiny"})
    resident = _counted(rows, {"resident"})
    counted = [row.measured for row in rows if row.counted and row.measured is not None]
    figures = [
        *(("2", _mean(bits, by_bits.get(bits), thresholds)) for bits in WIDTHS),
        ("3", _public(_counted(rows, {"public"}))),
        ("4", _lowest("primary and tiny", paging, thresholds.primary_ratio)),
        ("5", _lowest("state on the device", resident, thresholds.resident_ratio)),
        ("1", _equal(counted)),
    ]
    partial = {finding.key for finding in criteria if finding.missing}
    return [_so_far(figure) if key in partial else figure for key, figure in figures]


def _so_far(figure: KeyFigure) -> KeyFigure:
    """Good is not good enough where something is missing."""
    if figure.tone != "good":
        return figure
    return replace(figure, value=f"{figure.value} so far", tone="open")


def _counted(rows: Sequence[Row], roles: set[str]) -> list[Measured]:
    return [
        row.measured
        for row in rows
        if row.counted and row.role in roles and row.measured is not None
    ]


def _mean(bits: int, mean: Mean | None, thresholds: Thresholds) -> KeyFigure:
    name, rule = f"{bits}-bit AdamW, geometric mean", f"at least {thresholds.improvement:g}"
    if mean is None:
        return KeyFigure(name, rule, "missing", "open")
    return KeyFigure(name, rule, mean.said, "good" if mean.enough else "bad")


def _public(cells: Sequence[Measured]) -> KeyFigure:
    name, rule = "public models", "every one FASTER"
    if not cells:
        return KeyFigure(name, rule, "missing", "open")
    faster = sum(one.verdict.name == "FASTER" for one in cells)
    tone: Tone = "good" if faster == len(cells) else "bad"
    return KeyFigure(name, rule, f"{faster} of {len(cells)}", tone)


def _lowest(what: str, cells: Sequence[Measured], least: float) -> KeyFigure:
    name, rule = f"lowest ratio, {what}", f"at least {least:.4g}"
    if not cells:
        return KeyFigure(name, rule, "missing", "open")
    lowest = min(one.ratio for one in cells)
    return KeyFigure(name, rule, beside(lowest, least), "bad" if lowest < least else "good")


def _equal(cells: Sequence[Measured]) -> KeyFigure:
    name, rule = "cells equal to legacy, bit for bit", "all"
    if not cells:
        return KeyFigure(name, rule, "missing", "open")
    equal = sum(one.equal for one in cells)
    return KeyFigure(
        name, rule, f"{equal} of {len(cells)}", "good" if equal == len(cells) else "bad"
    )
