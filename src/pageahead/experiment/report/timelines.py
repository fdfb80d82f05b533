"""When what moved and what was updated: drawn from spans, or pictures that were handed in."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pageahead.experiment.gate.decision import EvidenceError
from pageahead.experiment.report.axis import Axis, linear

__all__ = ["Lane", "Picture", "StepTimeline", "TimelineGroup", "grouped", "pictures"]

#: How a file of each kind begins.
SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"<?xml": "image/svg+xml",
    b"<svg": "image/svg+xml",
}
#: Per cent of the width. Nobody sees a narrower gap, and thousands of them make a page slow.
NARROWEST = 0.1


@dataclass(frozen=True)
class Picture:
    """A picture, and what it is called.

    Attributes:
        name: of the file.
        address: the picture itself, as a ``data:`` address.
    """

    name: str
    address: str


@dataclass(frozen=True)
class Lane:
    """One kind of work of a step.

    Attributes:
        name: such as ``fetch``, ``update`` or ``write-back``.
        spans: when it began and ended, in milliseconds since the step began, in order.
    """

    name: str
    spans: Sequence[tuple[float, float]]

    @property
    def busy_ms(self) -> float:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True)
class StepTimeline:
    """One step of one arm of a cell.

    Attributes:
        cell, arm, device: of what.
        returned_ms: when the step returned.
        lanes: what it did.
        waits: when the host began to wait for all work of the device.
        facts: figures of it, each with its name; the same names for all steps of a cell.
    """

    cell: str
    arm: str
    device: str
    returned_ms: float
    lanes: Sequence[Lane]
    waits: Sequence[float]
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class TimelineGroup:
    """Steps of one cell on one device, on the same axis, so that their lengths can be compared."""

    cell: str
    device: str
    axis: Axis
    steps: Sequence[StepTimeline]

    @property
    def facts(self) -> list[tuple[str, list[str]]]:
        """Each figure's name, and its value for every step."""
        by_name = zip(*(step.facts for step in self.steps), strict=True)
        return [(values[0][0], [value for _, value in values]) for values in by_name]

    def bars(self, lane: Lane) -> list[tuple[float, float]]:
        """Where to draw a lane's spans: beginnings and widths, per cent."""
        found: list[tuple[float, float]] = []
        for start, end in lane.spans:
            first, last = self.axis.position(start), self.axis.position(end)
            if found and first - sum(found[-1]) < NARROWEST:
                first = found.pop()[0]
            found.append((first, round(max(last - first, NARROWEST), 2)))
        return found


def grouped(steps: Iterable[StepTimeline]) -> list[TimelineGroup]:
    """By cell and device, each with an axis from zero to the longest step."""
    by_cell: dict[tuple[str, str], list[StepTimeline]] = {}
    for step in steps:
        by_cell.setdefault((step.cell, step.device), []).append(step)
    return [
        TimelineGroup(cell, device, linear(map(_last, members)), members)
        for (cell, device), members in by_cell.items()
    ]


def pictures(paths: Sequence[Path]) -> list[Picture]:
    """Read pictures. In an image, an SVG can neither run anything nor load anything.

    Raises:
        OSError: a file cannot be read.
        EvidenceError: a file is no PNG, JPEG or SVG.
    """
    return [_picture(path) for path in paths]


def _picture(path: Path) -> Picture:
    content = path.read_bytes()
    for signature, kind in SIGNATURES.items():
        if content.startswith(signature):
            encoded = base64.b64encode(content).decode()
            return Picture(path.name, f"data:{kind};base64,{encoded}")
    raise EvidenceError(f"--timeline: {path.name} is no PNG, JPEG or SVG picture")


def _last(step: StepTimeline) -> float:
    ends = [end for lane in step.lanes for _, end in lane.spans]
    return max([step.returned_ms, *ends])
