from __future__ import annotations

import pytest

from pageahead.experiment.summary import Ratio, gigabytes_per_second, ratio, spread


def test_spread_is_over_all_rounds_together() -> None:
    summary = spread([[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]])
    assert summary.median == 6.0
    assert summary.p10 == pytest.approx(2.0)
    assert summary.p90 == pytest.approx(10.0)


def test_percentiles_interpolate() -> None:
    assert spread([[0.0, 10.0]]).p90 == pytest.approx(9.0)


def test_ratio_is_legacy_over_candidate_with_its_range_by_round() -> None:
    legacy = [[3.0, 3.0, 30.0], [4.0, 4.0, 4.0]]
    candidate = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    # By round: 3/1 and 4/2. Over all times together it would be 4/1.5.
    assert ratio(legacy, candidate) == Ratio(overall=2.5, lowest=2.0, highest=3.0)


def test_rounds_have_to_pair_up() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio([[1.0], [1.0]], [[1.0]])


def test_a_gigabyte_is_1e9_bytes() -> None:
    assert gigabytes_per_second(2_000_000_000, 40.0) == 50.0
