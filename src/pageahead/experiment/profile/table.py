"""A profile on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pageahead.experiment.profile.analysis import TOLERANCE, Figures, typical
from pageahead.experiment.profile.records import ProfileRecord
from pageahead.experiment.table import amount, milliseconds

__all__ = ["notes", "results"]

NONE = "-"
Row = tuple[str, Callable[[Figures], str]]

ROWS: tuple[Row, ...] = (
    ("step, wall time (traced), ms", lambda one: milliseconds(one.wall_ms)),
    ("to the device", lambda one: amount(one.to_device_bytes)),
    ("  of it managed", lambda one: amount(one.managed_to_device_bytes)),
    ("  bandwidth, GB/s", lambda one: _rate(one.to_device_rate)),
    ("to the host", lambda one: amount(one.to_host_bytes)),
    ("  of it managed", lambda one: amount(one.managed_to_host_bytes)),
    ("  bandwidth, GB/s", lambda one: _rate(one.to_host_rate)),
    ("transfer, ms", lambda one: milliseconds(one.transfer_ms)),
    ("  an update runs meanwhile", lambda one: f"{one.transfer_overlap:.1%}"),
    ("  in both directions, ms", lambda one: milliseconds(one.both_ways_ms)),
    ("update, ms", lambda one: milliseconds(one.update_ms)),
    ("  a transfer goes on meanwhile", lambda one: f"{one.update_overlap:.1%}"),
    ("other work of the device alone, ms", lambda one: milliseconds(one.other_ms)),
    ("device idle, ms", lambda one: milliseconds(one.idle_ms)),
    ("  host in a call of CUDA, ms", lambda one: milliseconds(one.host_ms)),
    (
        "transfer + update - both + other + idle, ms",
        lambda one: f"{milliseconds(one.accounted_ms)} ({one.error:+.1%})",
    ),
    ("device busy after the step returned, ms", lambda one: milliseconds(one.after_ms)),
    ("page faults of the GPU, of the CPU", lambda one: f"{one.gpu_faults}, {one.cpu_faults}"),
    ("migration requests", lambda one: str(one.prefetches)),
    ("device-wide synchronizations", lambda one: str(one.device_synchronizations)),
    (
        "synchronizations with a stream, an event",
        lambda one: f"{one.stream_synchronizations}, {one.event_synchronizations}",
    ),
    ("waits of streams for events", lambda one: str(one.waits)),
)


def results(records: Sequence[ProfileRecord]) -> Table:
    """One column for each arm: its typical step, and memory."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    table.add_column(records[0].cell, no_wrap=True)
    for record in records:
        table.add_column(record.arm, justify="right", no_wrap=True)
    steps = [typical(record) for record in records]
    for name, show in ROWS:
        table.add_row(name, *(show(one) for one in steps))
    untraced = [record.untraced_ms for record in records]
    table.add_row(
        "step without tracing, ms",
        *(milliseconds(median(times)) if times else NONE for times in untraced),
    )
    table.add_row("peak HBM, driver", *(_bytes(record.driver_peak) for record in records))
    table.add_row("peak HBM, PyTorch", *(_bytes(record.torch_peak) for record in records))
    return table


def notes(records: Sequence[ProfileRecord]) -> list[str]:
    """What a reader of the table has to know."""
    first = records[0]
    steps = min(len(record.steps) for record in records)
    said = [
        f"{first.device_name}, recorded by {first.source}: of {steps} steps that with the median "
        f"wall time, each arm in a process of its own; where state begins a step: "
        f"{first.residency}. "
        f"Traced steps take longer: what they took is no evidence of speed, and `bench` measures "
        f"that.",
        f"A sum has to be within {TOLERANCE:.0%} of the wall time.",
    ]
    if any(record.driver_peak is not None for record in records):
        said.append(
            "Peak HBM includes the profiler's buffers; `bench --preset matrix` measures it without."
        )
    if first.device == "cpu":
        said.append(
            "On the CPU copies go from host memory to host memory: what overlaps does, but "
            "bandwidths say nothing about a link, and legacy does not page."
        )
    return said


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"


def _bytes(value: int | None) -> str:
    return NONE if value is None else amount(value)
