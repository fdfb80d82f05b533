"""Profile records as timelines."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pageahead.experiment.profile.analysis import (
    NS,
    device_lanes,
    figures,
    problems,
    synchronizations,
    typical_step,
)
from pageahead.experiment.profile.records import ProfileRecord
from pageahead.experiment.profile.table import ROWS
from pageahead.experiment.report.timelines import Lane, StepTimeline
from pageahead.experiment.table import amount, milliseconds

__all__ = ["timelines"]

NONE = "-"


def timelines(records: Sequence[ProfileRecord]) -> list[StepTimeline]:
    """The typical step of each arm of each cell, legacy first; of several records the last."""
    last = {(one.device_name, one.cell, one.arm): one for one in records}
    return [_step(one) for one in sorted(last.values(), key=lambda one: one.arm != "legacy")]


def _step(record: ProfileRecord) -> StepTimeline:
    step = typical_step(record)
    lanes = [
        Lane(name, [(start / NS, end / NS) for start, end in spans])
        for name, spans in device_lanes(step.activities).items()
    ]
    waits = [one.start / NS for one in synchronizations(step, "device")]
    return StepTimeline(
        record.cell,
        record.arm,
        record.device_name,
        step.returned / NS,
        lanes,
        waits,
        _facts(record),
    )


def _facts(record: ProfileRecord) -> list[tuple[str, str]]:
    found = figures(typical_step(record))
    untraced = milliseconds(median(record.untraced_ms)) if record.untraced_ms else NONE
    return [
        *((name, show(found)) for name, show in ROWS),
        ("step without tracing, ms", untraced),
        ("peak HBM, driver", NONE if record.driver_peak is None else amount(record.driver_peak)),
        ("peak HBM, PyTorch", NONE if record.torch_peak is None else amount(record.torch_peak)),
        ("to be relied on", "no" if problems(record) else "yes"),
    ]
