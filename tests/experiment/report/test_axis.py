from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageahead.experiment.report.axis import CLOSEST, linear, logarithmic

ratios = st.lists(st.floats(0.01, 100), min_size=1, max_size=20)


def test_a_ratio_and_its_inverse_are_equally_far_from_1() -> None:
    axis = logarithmic([0.5, 2.0])
    middle = axis.position(1.0)
    assert middle == 50.0
    assert axis.position(2.0) - middle == pytest.approx(middle - axis.position(0.5), abs=0.02)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.966, 1.202, 1.15, 0.952], [0.95, 1.0, 1.05, 1.1, 1.15, 1.2]),
        ([0.952, 2.81], [1.0, 1.25, 1.5, 1.75, 2.0, 2.5]),
        ([1.0], [0.95, 1.0, 1.05, 1.1]),
    ],
)
def test_ticks_of_ratios(values, ticks) -> None:
    assert logarithmic(values).ticks == pytest.approx(ticks)


def test_ticks_from_zero() -> None:
    assert linear([50.0]).ticks == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50]
    assert linear([7.3]).ticks[:2] == [0, 1]
    assert linear([]).ticks[0] == 0


@given(ratios)
def test_everything_lies_on_the_axis_in_order(values) -> None:
    axis = logarithmic(values)
    places = [axis.position(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 100 for place in places)
    assert not any(axis.beyond(value) for value in values)
    assert axis.beyond(2 * max(*values, 1.0))


@given(ratios)
def test_labels_do_not_touch(values) -> None:
    for axis in (logarithmic(values), linear(values)):
        places = [axis.position(tick) for tick in axis.ticks]
        assert places
        assert all(after - before >= CLOSEST for before, after in pairwise(places))
