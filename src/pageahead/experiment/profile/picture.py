"""The timeline of a step: fetch, update and write-back of each arm, on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pageahead.experiment.profile.activity import Lane, lane
from pageahead.experiment.profile.analysis import figures, synchronizations, typical_step
from pageahead.experiment.profile.collector import ProfileError
from pageahead.experiment.profile.records import ProfiledStep, ProfileRecord

__all__ = ["check", "draw", "figure"]

DOTS_PER_INCH = 150
MS = 1e6
WIDTH_INCHES, ARM_INCHES, REST_INCHES = 10.0, 1.5, 1.3
#: Okabe and Ito's: told apart by those who do not see red and green as different too.
COLOURS: dict[Lane, str] = {"fetch": "#0072B2", "update": "#D55E00", "write-back": "#009E73"}
BAR = 0.8  # of a row's height
ABOVE = -0.65  # the first row, where synchronizations are marked


def check(target: Path) -> None:
    """Raises `ProfileError` if `target`'s suffix is no format of pictures."""
    formats = FigureCanvasBase.get_supported_filetypes()
    if target.suffix.removeprefix(".").lower() not in formats:
        raise ProfileError(
            f"{target.name}: no such format of pictures; there are: {', '.join(sorted(formats))}"
        )


def draw(records: Sequence[ProfileRecord], target: Path) -> None:
    """Draw the typical step of each arm; `target`'s suffix says in what format.

    Raises:
        ProfileError: there is no such format.
        OSError: the file cannot be written.
    """
    check(target)
    # Text stays text, and the file is the same each time.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pageahead"}):
        metadata = {"Date": None} if target.suffix.lower() == ".svg" else None
        figure(records).savefig(target, dpi=DOTS_PER_INCH, metadata=metadata)


def figure(records: Sequence[ProfileRecord]) -> Figure:
    """A group of three rows for each arm; all share one axis, on which the step begins at 0."""
    height = ARM_INCHES * len(records) + REST_INCHES
    drawn = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    groups = drawn.subplots(len(records), 1, squeeze=False, sharex=True)[:, 0]
    for axes, record in zip(groups, records, strict=True):
        _arm(axes, record)
    groups[-1].set_xlabel("milliseconds since the step began (traced: longer than without)")
    groups[-1].set_xlim(left=0)
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    synchronized = Line2D([], [], color="black", marker="v", linestyle="", markersize=5)
    returned = Line2D([], [], color="0.35", linestyle="--", linewidth=1)
    drawn.legend(
        [*handles, synchronized, returned],
        [*COLOURS, "host begins to wait for the device", "step returned"],
        loc="outside lower center",
        ncols=5,
        fontsize=8,
        frameon=False,
    )
    drawn.suptitle(_title(records), fontsize=11)
    return drawn


def _arm(axes: Axes, record: ProfileRecord) -> None:
    step = typical_step(record)
    for row, (name, colour) in enumerate(COLOURS.items()):
        bars = [
            (one.start / MS, (one.end - one.start) / MS)
            for one in step.activities
            if lane(one) == name
        ]
        # The edge keeps a bar visible that is thinner than a pixel.
        axes.broken_barh(bars, (row - BAR / 2, BAR), color=colour, linewidth=0.4)
    starts = [one.start / MS for one in synchronizations(step, "device")]
    axes.plot(starts, [ABOVE] * len(starts), "v", color="black", markersize=4)
    axes.axvline(step.returned / MS, color="0.35", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(COLOURS)), list(COLOURS))
    axes.set_ylim(len(COLOURS) - 0.45, -0.9)
    axes.set_title(f"{record.arm}: {_summary(step)}", fontsize=9, loc="left")
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _summary(step: ProfiledStep) -> str:
    found = figures(step)
    moved = [nbytes / 2**20 for nbytes in (found.to_device_bytes, found.to_host_bytes)]
    return (
        f"{found.wall_ms:.2f} ms, {moved[0]:,.0f} MiB in, {moved[1]:,.0f} MiB out; an update runs "
        f"in {found.transfer_overlap:.0%} of the transfer time"
    )


def _title(records: Sequence[ProfileRecord]) -> str:
    cells = dict.fromkeys(record.cell for record in records)
    devices = dict.fromkeys(record.device_name for record in records)
    title = f"{', '.join(cells)}: one step on {', '.join(devices)}"
    if any(record.device == "cpu" for record in records):
        title += "\nCPU: copies within host memory, no evidence of transfer speed"
    return title
