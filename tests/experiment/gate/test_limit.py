from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageahead.experiment.evidence import LinkRecord
from pageahead.experiment.gate.limit import host_floor_ms, limit, shown_overlap_ms

LINK = LinkRecord(to_device=[50.0, 40.0], to_host=[25.0], duplex=[20.0, 19.0])
times = st.floats(0.01, 1000)


def test_the_sources_own_example() -> None:
    """0.397 ms of update in a step of 6.766: at most 1.062, far from 1.15."""
    found = limit(6.766, 0.397, 256 << 20, None)
    assert found.overlap == pytest.approx(6.766 / (6.766 - 0.397))
    assert found.overlap == pytest.approx(1.0623, abs=1e-4)
    assert (found.transfer_ms, found.link) == (pytest.approx(6.369), None)


def test_equal_parts_could_double_the_speed_and_a_step_without_transfer_gain_nothing() -> None:
    assert limit(2.0, 1.0, 1, None).overlap == 2.0
    assert limit(2.0, 2.0, 1, None).overlap == 1.0
    assert limit(2.0, 2.5, 1, None).overlap == 1.0
    assert limit(2.0, None, 1, None).overlap is None


@given(times, times)
def test_no_schedule_of_the_two_parts_is_faster(update, transfer) -> None:
    """Whatever is overlapped, the longer part has to be done."""
    found = limit(update + transfer, update, 1, None)
    assert 1 <= found.overlap <= 2 + 1e-6
    best = max(update, transfer)
    assert (update + transfer) / best == pytest.approx(found.overlap, rel=1e-6)


def test_at_link_speed() -> None:
    # 20 MB each way at the best 20 GB/s take 1 ms.
    assert limit(5.0, None, 20_000_000, LINK).link == pytest.approx(5.0)


def test_overlap_that_a_step_must_have_had() -> None:
    # 50 MB: 1 ms in, 2 ms out.
    assert shown_overlap_ms(2.5, 50_000_000, LINK) == pytest.approx(0.5)
    assert shown_overlap_ms(3.5, 50_000_000, LINK) == 0.0
    assert shown_overlap_ms(0.1, 50_000_000, None) == 0.0
    assert host_floor_ms(50_000_000, LINK) == pytest.approx(1.0)
