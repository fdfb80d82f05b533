"""Which parameters stay on the device: within the budget, spread over the step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageahead.memory.residency import spread

sizes = st.lists(st.integers(1, 10_000_000), max_size=40)


@given(sizes, st.integers(-1_000_000, 500_000_000))
def test_never_above_the_budget(found: list[int], budget: int) -> None:
    chosen = spread(found, budget)
    assert chosen <= set(range(len(found)))
    assert sum(found[position] for position in chosen) <= max(0, budget)


@given(sizes, st.integers(0, 1_000))
def test_all_when_the_budget_suffices(found: list[int], more: int) -> None:
    assert spread(found, sum(found) + more) == set(range(len(found)))


@given(sizes)
def test_none_without_a_budget(found: list[int]) -> None:
    assert spread(found, 0) == set()


@given(st.integers(1, 200), st.integers(1, 1_000_000), st.data())
def test_equal_sizes_are_spread_evenly_and_use_the_whole_budget(
    count: int, size: int, data: st.DataObject
) -> None:
    fit = data.draw(st.integers(1, count))
    chosen = sorted(spread([size] * count, fit * size))
    assert len(chosen) == fit
    gaps = [other - one for one, other in itertools.pairwise(chosen)]
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


@given(sizes, st.floats(0.0, 1.0))
def test_follows_the_line(found: list[int], share: float) -> None:
    """At every position about `share` of what was passed is taken, within one parameter."""
    budget = int(sum(found) * share)
    chosen = spread(found, budget)
    passed = taken = 0
    for position, size in enumerate(found):
        passed += size
        taken += size if position in chosen else 0
        assert taken <= passed * share + max(found)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(2, {0, 2}), (1, {1}), (3, {0, 1, 3})],
)
def test_examples(budget: int, expected: set[int]) -> None:
    assert spread([1, 1, 1, 1], budget) == expected


def test_a_parameter_larger_than_the_budget_leaves_room_for_others() -> None:
    assert spread([100, 10, 10], 20) == {1, 2}
