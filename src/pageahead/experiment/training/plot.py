"""The picture of training evidence: time of an iteration against HBM used for state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from pageahead.experiment.evidence import Environment, TrainingArm, TrainingRecord
from pageahead.experiment.gate.reading import Record, read_one
from pageahead.experiment.resume import same_conditions
from pageahead.experiment.training.cells import CELLS
from pageahead.experiment.training.table import shown
from pageahead.files import write_whole

__all__ = ["NothingToDrawError", "draw", "figure", "latest"]

GB = 1e9
PANEL_INCHES = (5.2, 4.0)
DOTS_PER_INCH = 150
# Okabe and Ito's: told apart by those who do not see red and green as different too.
WAYS = {
    "after": ("after backward", "#D55E00", "o"),
    "during": ("during backward", "#0072B2", "s"),
}


class NothingToDrawError(ValueError):
    """The evidence has no training iterations."""


def draw(source: Path, target: Path, log: Console) -> None:
    """Draw what `latest` finds in the evidence in `source`; `target`'s suffix says in what format.

    A line that is no record, as a run that was killed leaves it, is said to `log`.

    Raises:
        NothingToDrawError: there is no training record, or no such format.
        OSError: a file cannot be read or written.
    """
    records, problems = read_one(source)
    for problem in problems:
        log.print(
            f"not a record, and left out: {problem}", markup=False, highlight=False, soft_wrap=True
        )
    drawn = figure(latest(records))
    formats = drawn.canvas.get_supported_filetypes()
    suffix = target.suffix.removeprefix(".").lower()
    if suffix not in formats:
        raise NothingToDrawError(
            f"{target.name}: no such format of pictures; there are: {', '.join(sorted(formats))}"
        )
    # Text stays text, and the file is the same each time.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pageahead"}):
        metadata = {"Date": None} if suffix == "svg" else None
        write_whole(
            target,
            lambda beside: drawn.savefig(
                beside, dpi=DOTS_PER_INCH, format=suffix, metadata=metadata
            ),
        )


def latest(records: Sequence[Record]) -> list[TrainingRecord]:
    """Each cell's last record, as far as it is of the code, model and device of the last of all.

    In the order of the preset, as a run that was stopped and went on may have another.
    """
    measured = [record for record in records if isinstance(record, TrainingRecord)]
    runs = {record.run: record for record in records if isinstance(record, Environment)}
    if not measured:
        raise NothingToDrawError(
            f"no training iterations among {len(records)} records of {len(runs)} run(s); "
            f"`pageahead bench --preset training --out FILE.jsonl` leaves some"
        )
    last = measured[-1]
    cells = {
        record.cell: record
        for record in measured
        if record.parameters == last.parameters and _alike(record.run, last.run, runs)
    }
    order = [cell.name for cell in CELLS]
    return sorted(cells.values(), key=lambda record: order.index(record.cell))


def _alike(run: str, last: str, runs: Mapping[str, Environment]) -> bool:
    if run == last:
        return True
    return run in runs and last in runs and same_conditions(runs[run], runs[last])


def figure(measured: Sequence[TrainingRecord]) -> Figure:
    """One panel for each cell, a row for each width of state."""
    widths = list(dict.fromkeys(record.bits for record in measured))
    rows = [[record for record in measured if record.bits == bits] for bits in widths]
    columns = max(len(row) for row in rows)
    width, height = PANEL_INCHES
    drawn = Figure(figsize=(width * columns, height * len(rows) + 0.9), layout="constrained")
    panels = drawn.subplots(len(rows), columns, squeeze=False)
    for row, records in zip(panels, rows, strict=True):
        for axes, record in zip(row, records, strict=False):
            _panel(axes, record)
        for axes in row[len(records) :]:
            axes.set_axis_off()
    handles = {
        label: handle
        for row in panels
        for axes in row
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=2 if columns == 1 else 4,
        fontsize=9,
        frameon=False,
    )
    drawn.suptitle(_title(measured[0]), fontsize=11)
    return drawn


def _panel(axes: Axes, record: TrainingRecord) -> None:
    arms = list(shown(record))
    fixed = {arm.way: arm for arm in arms if arm.budget is None}
    for way, style, label in (("hbm", "-", "all state in HBM"), ("model", "--", "model alone")):
        if way in fixed:
            one = fixed[way]
            axes.axhline(one.wall.median, color="0.35", linestyle=style, linewidth=1.2, label=label)
            if one.hbm_state_bytes:  # the axis is ours, and far shorter
                axes.annotate(
                    f"{one.hbm_state_bytes / GB:.2f} GB",
                    (1, one.wall.median),
                    xycoords=("axes fraction", "data"),
                    textcoords="offset points",
                    xytext=(0, 2),
                    ha="right",
                    fontsize=7.5,
                    color="0.35",
                )
    if "torch" in fixed:
        one = fixed["torch"]
        axes.plot(
            one.hbm_state_bytes / GB,
            one.wall.median,
            "x",
            color="0.35",
            label="torch's fused AdamW",
        )
    for way, (label, colour, marker) in WAYS.items():
        ours = sorted((a for a in arms if a.way == way), key=lambda arm: arm.hbm_state_bytes)
        if ours:
            _line(axes, ours, label, colour, marker)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_title(f"AdamW, {record.bits}-bit state, {record.tokens:,} tokens", fontsize=10)
    axes.set_xlabel("HBM used for state, GB")
    axes.set_ylabel("iteration, ms")
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _line(axes: Axes, arms: Sequence[TrainingArm], label: str, colour: str, marker: str) -> None:
    """Medians with their 10th to 90th percentile; dotted, what the parts come to.

    Those are with bitsandbytes' update: ours may be faster.
    """
    used = [arm.hbm_state_bytes / GB for arm in arms]
    medians = [arm.wall.median for arm in arms]
    below = [arm.wall.median - arm.wall.p10 for arm in arms]
    above = [arm.wall.p90 - arm.wall.median for arm in arms]
    axes.errorbar(
        used,
        medians,
        yerr=[below, above],
        color=colour,
        marker=marker,
        markersize=5,
        capsize=2.5,
        linewidth=1.6,
        label=label,
    )
    bounds = [arm.bound_ms for arm in arms if arm.bound_ms is not None]
    if len(bounds) == len(arms):
        axes.plot(used, bounds, ":", color=colour, linewidth=1.2, label=f"expected {label}")


def _title(record: TrainingRecord) -> str:
    """What the model is, and on what; on the CPU, that its times are none of a link."""
    size = record.parameters
    count = f"{size / 1e9:.2f} billion" if size >= 1e9 else f"{size / 1e6:.1f} million"
    title = f"GPT of {count} parameters, BF16, {record.device_name}"
    if record.device == "cpu":
        title += "\nCPU timings are no evidence of transfer speed"
    return title
