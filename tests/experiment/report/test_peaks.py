"""Peak memory on the page says what the gate says of it."""

from __future__ import annotations

import pytest

from pageahead.experiment.report.rows import PeakRow
from tests.experiment.support import MIB, peak

CELL = "adamw8/8x1Mi"
BEFORE = 512 * MIB


@pytest.mark.parametrize(
    ("changes", "within"),
    [
        ({}, True),
        ({"driver_peak": 4096 * MIB + 1}, False),
        ({"driver_peak": 4096 * MIB + 1, "driver_ready": 1}, True),
        ({"driver_ready": None}, None),
        ({"driver_before": BEFORE + 16 * MIB + 1}, None),
        ({"driver_before": BEFORE - 16 * MIB}, False),  # it took so much more
    ],
)
def test_whether_a_peak_is_within(changes, within) -> None:
    ours = peak(CELL, "streamed").model_copy(update=changes)
    assert PeakRow(CELL, peak(CELL, "legacy"), ours).within is within


def test_one_alone_is_not_known() -> None:
    assert PeakRow(CELL, None, peak(CELL, "streamed")).within is None
    assert PeakRow(CELL, peak(CELL, "legacy"), None).within is None
