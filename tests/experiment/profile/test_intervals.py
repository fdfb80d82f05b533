from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pageahead.experiment.profile.intervals import clipped, gaps, intersection, length, union

MOMENTS = range(40)
INTERVALS = st.lists(st.tuples(st.integers(0, 39), st.integers(0, 39)), max_size=8)


def moments(intervals) -> set[int]:
    return {moment for moment in MOMENTS for start, end in intervals if start <= moment < end}


def test_by_hand() -> None:
    one, other = union([(5, 9), (0, 2), (2, 3), (8, 12), (4, 4)]), union([(1, 6), (11, 20)])
    assert one == [(0, 3), (5, 12)]
    assert intersection(one, other) == [(1, 3), (5, 6), (11, 12)]
    assert clipped(one, 2, 6) == [(2, 3), (5, 6)]
    assert gaps(one, 0, 15) == [(3, 5), (12, 15)]
    assert gaps([], 3, 7) == [(3, 7)]
    assert gaps(one, 6, 8) == []
    assert (length(one), length([])) == (10, 0)
    assert clipped(one, 6, 2) == []


@given(INTERVALS, INTERVALS, st.integers(0, 39), st.integers(0, 39))
def test_against_sets_of_moments(first, second, start, end) -> None:
    one, other = union(first), union(second)
    assert moments(one) == moments(first)
    assert length(one) == len(moments(first))
    assert all(a < b for a, b in one)
    assert all(one[i][1] < one[i + 1][0] for i in range(len(one) - 1))
    assert moments(intersection(one, other)) == moments(one) & moments(other)
    window = set(range(start, end))
    assert moments(clipped(one, start, end)) == moments(one) & window
    if start <= end:
        assert moments(gaps(one, start, end)) == window - moments(one)
