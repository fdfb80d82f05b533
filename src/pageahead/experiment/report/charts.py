"""What is drawn: ratios beside the gate's lines, and bandwidth beside the link's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pageahead.experiment.gate.finding import WIDTHS, beside, mean_ratio, of_width
from pageahead.experiment.gate.thresholds import Thresholds
from pageahead.experiment.report.axis import Axis, linear, logarithmic
from pageahead.experiment.report.rows import Row

__all__ = [
    "BandwidthChart",
    "Group",
    "Mean",
    "RatioChart",
    "bandwidth_chart",
    "means",
    "ratio_chart",
]

FURTHEST = 1e6
"""A ratio or GB/s beyond it, or a ratio below its inverse, is of no machine: an axis on which it
had a place would have none for the others."""
TITLES = {
    "primary": "Primary: state on the host",
    "tiny": "Tiny: 2 MiB of state",
    "public": "Public models",
    "resident": "State on the device: control",
    "one_state": "One state tensor: control",
    "extra": "Others",
    "": "Measured, but not counted",
}


@dataclass(frozen=True)
class Mean:
    """A geometric mean over the counted primary cells of one width."""

    bits: int
    value: float
    cells: int
    least: float

    @property
    def enough(self) -> bool:
        return self.value >= self.least

    @property
    def said(self) -> str:
        """As the gate says it."""
        return beside(self.value, self.least)


@dataclass(frozen=True)
class Group:
    """Cells of one role.

    Attributes:
        title: of the role.
        line: the ratio that a cell may not be below; None where the gate has no such line.
        rule: what that line is, in words.
        rows: its cells.
        means: of primary cells.
    """

    title: str
    line: float | None
    rule: str
    rows: Sequence[Row]
    means: Sequence[Mean]


@dataclass(frozen=True)
class RatioChart:
    """Legacy over candidate of every cell, on one logarithmic axis.

    Attributes:
        axis: of all groups.
        groups: cells by role.
        beyond: cells that are not drawn, as no axis has room for them.
    """

    axis: Axis
    groups: Sequence[Group]
    beyond: Sequence[str]


@dataclass(frozen=True)
class BandwidthChart:
    """GB/s of every cell whose state crosses the link, on one axis from zero.

    Attributes:
        axis: of all cells.
        rows: the cells.
        beyond: cells that are not drawn, as no axis has room for them.
    """

    axis: Axis
    rows: Sequence[Row]
    beyond: Sequence[str]

    @property
    def both_ways(self) -> bool:
        """Whether the candidate copies in and out within a step."""
        return any(row.bandwidth is not None and row.bandwidth.both_ways for row in self.rows)

    @property
    def legacy_pages(self) -> bool:
        """Whether legacy's state crosses the link in any of them."""
        return any(
            row.bandwidth is not None and row.bandwidth.legacy is not None for row in self.rows
        )


def means(rows: Iterable[Row], thresholds: Thresholds) -> list[Mean]:
    """What criterion 2 compares."""
    primary = [
        row.measured
        for row in rows
        if row.counted and row.role == "primary" and row.measured is not None
    ]
    by_width = {bits: of_width(primary, optimizer) for bits, optimizer in WIDTHS.items()}
    return [
        Mean(bits, mean_ratio(cells), len(cells), thresholds.improvement)
        for bits, cells in by_width.items()
        if cells
    ]


def ratio_chart(rows: Sequence[Row], thresholds: Thresholds) -> RatioChart | None:
    """None where there is nothing to draw."""
    measured = [row for row in rows if row.measured is not None]
    if not measured:
        return None
    shown = [row for row in measured if all(map(_on_an_axis, _values(row)))]
    # As the gate has them; what one cell has taken beyond all measure cannot be drawn, either.
    of_primary = [mean for mean in means(rows, thresholds) if _on_an_axis(mean.value)]
    lines = {
        "primary": thresholds.primary_ratio,
        "tiny": thresholds.primary_ratio,
        "resident": thresholds.resident_ratio,
    }
    rules = {
        "primary": f"no step more than {thresholds.primary_regression:.0%} longer",
        "tiny": f"no step more than {thresholds.primary_regression:.0%} longer",
        "resident": f"no step more than {thresholds.resident_regression:.0%} longer",
        "public": "every one FASTER: the whole interval above 1",
    }
    groups = []
    for role, title in TITLES.items():
        members = [row for row in shown if (row.role if row.counted else "") == role]
        if members:
            groups.append(
                Group(
                    title,
                    lines.get(role),
                    rules.get(role, ""),
                    members,
                    of_primary if role == "primary" else [],
                )
            )
    values = [value for row in shown for value in _values(row)]
    values += [group.line for group in groups if group.line is not None]
    values += [value for mean in of_primary for value in (mean.value, mean.least)]
    return RatioChart(logarithmic(values), groups, _names_but(measured, shown))


def bandwidth_chart(rows: Sequence[Row]) -> BandwidthChart | None:
    """None where no cell's state crosses a link that was measured."""
    crossing = [row for row in rows if row.bandwidth is not None]
    if not crossing:
        return None
    shown = [row for row in crossing if max(_speeds(row)) <= FURTHEST]
    axis = linear(value for row in shown for value in _speeds(row))
    return BandwidthChart(axis, shown, _names_but(crossing, shown))


def _names_but(rows: Sequence[Row], shown: Sequence[Row]) -> list[str]:
    return [row.name for row in rows if row not in shown]


def _on_an_axis(ratio: float) -> bool:
    return 1 / FURTHEST <= ratio <= FURTHEST


def _speeds(row: Row) -> list[float]:
    one = row.bandwidth
    assert one is not None
    return [one.ours, one.link, *([] if one.legacy is None else [one.legacy])]


def _values(row: Row) -> list[float]:
    one = row.measured
    assert one is not None
    # Not the link's limit: small cells are far from it, and would press the rest together.
    limits = [] if one.limit.overlap is None else [one.limit.overlap]
    return [one.ratio, one.verdict.low, one.verdict.high, *one.ratios, *limits]
