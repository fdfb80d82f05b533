from __future__ import annotations

import random
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageahead.experiment.verdict import CONFIDENCE, range_verdict, verdict

ratios = st.lists(st.floats(0.2, 5), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("rounds", "name"),
    [
        ([1.03, 1.2, 1.1, 1.15, 1.08, 1.3, 1.02], "FASTER"),
        ([0.97, 0.8, 0.9, 0.85, 0.92, 0.7, 0.98], "SLOWER"),
        ([1.004, 0.996, 1.0, 1.009, 0.991, 1.002, 1.001], "SAME"),
        # Never below 1, but nobody would notice: SAME goes first.
        ([1.001, 1.002, 1.003, 1.004, 1.005, 1.006, 1.009], "SAME"),
        ([1.03, 1.2, 1.1, 1.15, 1.08, 1.3, 0.999], "UNDECIDED"),
        ([1.5] * 5, "UNDECIDED"),
        ([1.5] * 6, "FASTER"),
        # 20 rounds: the interval leaves out the five at either end.
        ([0.9] * 5 + [1.1] * 15, "FASTER"),
        ([0.9] * 6 + [1.1] * 14, "UNDECIDED"),
    ],
)
def test_the_rule(rounds, name) -> None:
    assert verdict(rounds).name == name


def test_the_interval_and_its_confidence() -> None:
    seven = verdict([1.3, 1.1, 1.2, 1.7, 1.6, 1.5, 1.4])
    assert (seven.low, seven.high) == (1.1, 1.7)
    assert seven.confidence == 1 - 2 / 2**7
    nine = verdict([1.0 + number / 10 for number in range(1, 10)])
    assert (nine.low, nine.high) == pytest.approx((1.2, 1.8))
    assert nine.confidence == 1 - 2 * (1 + 9) / 2**9
    few = verdict([1.1, 1.2])
    assert (few.name, few.low, few.high, few.confidence) == ("UNDECIDED", 1.1, 1.2, 0.0)


def test_the_interval_contains_the_median_as_often_as_it_says() -> None:
    """Skewed ratios with median 1, of which FASTER and SLOWER are wrong."""
    chance = random.Random(5)
    for rounds in (7, 12):
        drawn = [
            verdict([exp(chance.expovariate(1) - 0.6931471805599453) for _ in range(rounds)])
            for _ in range(4000)
        ]
        contained = sum(one.low <= 1 <= one.high for one in drawn) / len(drawn)
        assert contained == pytest.approx(drawn[0].confidence, abs=0.01)
        assert drawn[0].confidence >= CONFIDENCE


@given(ratios)
def test_exchanging_the_two_exchanges_the_verdict(rounds) -> None:
    opposite = {"FASTER": "SLOWER", "SLOWER": "FASTER", "SAME": "SAME", "UNDECIDED": "UNDECIDED"}
    there, back = verdict(rounds), verdict([1 / ratio for ratio in rounds])
    assert back.low == pytest.approx(1 / there.high)
    if all(abs(edge - 1) > 0.02 for edge in (there.low, there.high)):
        assert back.name == opposite[there.name]


@given(ratios, st.randoms())
def test_the_order_of_rounds_does_not_matter(rounds, chance) -> None:
    shuffled = chance.sample(rounds, len(rounds))
    assert verdict(shuffled) == verdict(rounds)


@given(st.lists(st.floats(0.2, 5), min_size=6, max_size=8))
def test_up_to_eight_rounds_their_range_says_it_all(rounds) -> None:
    assert range_verdict(len(rounds), min(rounds), max(rounds)) == verdict(rounds)


def test_a_range_of_few_rounds_decides_nothing() -> None:
    assert range_verdict(5, 1.2, 1.4).name == "UNDECIDED"


def test_any_number_of_rounds_can_be_judged() -> None:
    many = verdict([1.1, 1.2] * 700)
    assert (many.name, many.low, many.high) == ("FASTER", 1.1, 1.2)
    assert many.confidence == pytest.approx(CONFIDENCE, abs=0.01)
    assert range_verdict(10**400, 1.1, 1.2).name == "FASTER"


@pytest.mark.parametrize("bad", [[], [1.0, 0.0], [float("nan")], [float("inf")], [-1.0]])
def test_what_is_no_ratio_is_refused(bad) -> None:
    with pytest.raises(ValueError, match="positive numbers"):
        verdict(bad)
