"""The table of training iterations, and the sentences under it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pageahead.experiment.evidence import FailedRecord, Record, TrainingArm, TrainingRecord
from pageahead.experiment.link import merged
from pageahead.experiment.training.cells import ARMS

__all__ = ["notes", "results"]

NONE = "-"
GB = 1e9
HEADERS = (
    "ms",
    "p10-p90",
    "ratio",
    "range by\nround",
    "state in\nHBM GB",
    "of it",
    "peak\nGB",
    "bound\nms",
)


def results(records: Sequence[Record]) -> Table:
    """One row for each way of training in each cell; the baseline's is its first group's."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)  # every column counts
    for header in ("cell", "way, budget"):
        table.add_column(header, no_wrap=True)
    for header in HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("bits\nequal")
    for record in records:
        if isinstance(record, TrainingRecord):
            for arm in shown(record):
                table.add_row(*_row(record, arm))
        elif isinstance(record, FailedRecord):
            failed = Text("failed", style="bold red")
            table.add_row(record.cell, "all", *[NONE] * len(HEADERS), failed)
    return table


def shown(record: TrainingRecord) -> Iterator[TrainingArm]:
    """Each way once, although baseline and model are in each group."""
    seen = set()
    for group in record.groups:
        for arm in group.arms:
            if arm.arm not in seen:
                seen.add(arm.arm)
                yield arm


def notes(records: Sequence[Record]) -> list[str]:
    """What a reader of the table has to know, one sentence or two each."""
    measured = [record for record in records if isinstance(record, TrainingRecord)]
    said = []
    if measured:
        said += [_how(measured), _columns()]
    if any(record.device == "cpu" for record in measured):
        said.append(
            "CPU: the model is small and an iteration has 64 times fewer tokens than the cell's "
            "name says. Bits and order are checked for real; CPU timings are NO evidence of "
            "transfer speed, as nothing crosses a link here."
        )
    links = [record.link for record in measured if record.link is not None]
    if links:
        said.append(
            f"Link: {merged(links).duplex_median:.1f} GB/s each way with both directions busy, "
            f"page-locked copies of 256 MiB, before and after in the same processes."
        )
    for record in records:
        if isinstance(record, FailedRecord):
            said.append(f"FAILED {record.cell}: {record.reason}")
        elif isinstance(record, TrainingRecord):
            said += _bounds(record)
            said += [
                f"{record.cell}: {arm} left out; {reason}."
                for arm, reason in record.left_out.items()
            ]
            said += _differences(record)
    return said


def _row(record: TrainingRecord, arm: TrainingArm) -> list[str | Text]:
    occupancy = arm.occupancy
    compared = arm.comparison
    equal = Text(NONE)
    if compared is not None:
        equal = Text("yes") if compared.equal else Text("NO", style="bold red")
    state = arm.state_bytes
    return [
        record.cell,
        ARMS[arm.arm].label + ("" if arm.budget is None else f" {arm.budget:.0%}"),
        _milliseconds(arm.wall.median),
        f"{_milliseconds(arm.wall.p10)}-{_milliseconds(arm.wall.p90)}",
        f"{arm.ratio.overall:.2f}",
        f"{arm.ratio.lowest:.2f}-{arm.ratio.highest:.2f}",
        f"{arm.hbm_state_bytes / GB:.2f}" if state else NONE,
        f"{arm.hbm_state_bytes / state:.0%}" if state else NONE,
        f"{occupancy.own_peak / GB:.1f}" if occupancy is not None else NONE,
        _milliseconds(arm.bound_ms) if arm.bound_ms is not None else NONE,
        equal,
    ]


def _milliseconds(value: float) -> str:
    return f"{value:.1f}"


def _how(measured: Sequence[TrainingRecord]) -> str:
    first = measured[0]
    models = dict.fromkeys(
        f"a GPT of {_count(record.parameters)} parameters ({record.layers} layers, width "
        f"{record.width}, vocabulary {record.vocabulary:,}) in BF16, sequences of {record.length:,}"
        for record in measured
    )
    protocol = first.protocol
    return (
        f"{first.device_name}. Whole iterations, forward, backward, update and zero_grad, of "
        f"{'; '.join(models)}. {protocol.warmups} warm-ups, then {protocol.rounds} rounds of "
        f"{protocol.repetitions} iterations, all ways in turn, round by round, in one process per "
        f"cell."
    )


def _count(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:.2f} billion"
    return f"{parameters / 1e6:.1f} million"


def _columns() -> str:
    return (
        "ms: median host wall time of an iteration, to the end of its last kernel; ratio: "
        "all state in HBM / this way, side by side, so that 1 is as fast: the median of the "
        "rounds, and their range; state in HBM: resident state and slots, and their share of the "
        "state's bytes; "
        "peak: what this way alone needs; bound: after backward, forward and backward and then the "
        "longer of update and transfer; during backward, the longer of all computation and the "
        "transfer."
    )


def _bounds(record: TrainingRecord) -> list[str]:
    """The two limits that no way of moving state gets below."""
    arms = {arm.arm: arm for arm in shown(record)}
    if "hbm" not in arms or "model" not in arms:
        return []
    whole, model = arms["hbm"].wall.median, arms["model"].wall.median
    said = (
        f"{record.cell}: forward and backward {model:.1f} ms, resident update "
        f"{max(0.0, whole - model):.1f} ms, together {whole:.1f} ms"
    )
    moving = [arm for arm in arms.values() if arm.link_bound_ms and arm.streamed_bytes]
    if moving:
        most = max(moving, key=lambda arm: arm.streamed_bytes)
        said += (
            f"; {most.streamed_bytes / GB:.2f} GB each way at the link's duplex bandwidth "
            f"{most.link_bound_ms:.1f} ms"
        )
    if not record.deterministic:
        said += f". NOT COMPARED: {record.nondeterminism}"
    return [f"{said}."]


def _differences(record: TrainingRecord) -> list[str]:
    return [
        f"NOT EQUAL {record.cell} ({arm.arm}): {arm.comparison.differences} of "
        f"{arm.comparison.tensors} tensors differ from all state in HBM; "
        f"{'; '.join(arm.comparison.examples)}"
        for arm in shown(record)
        if arm.comparison is not None and not arm.comparison.equal
    ]
