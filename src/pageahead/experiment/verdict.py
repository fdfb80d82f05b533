"""Is a candidate faster? A rule over the ratios of the rounds, and nothing else.

Each round gives one ratio, legacy over candidate, of medians taken interleaved within a minute, so
that slow drift of the machine is in both. The rule makes a confidence interval for the median of
these ratios from their order statistics and compares it with 1:

* of n independent ratios, the interval from the k-th smallest to the k-th largest misses the median
  with probability ``2 · P(B < k)``, B binomial with n trials of chance one half, whatever the
  distribution of the ratios. k is the largest that keeps 95 % confidence: with 7 rounds the
  interval is their whole range, with a confidence of 98.4 %; with fewer than 6 there is none;
* ``SAME``: all of it within 1 % of 1, on either side (an equivalence test by inclusion of the
  interval); ``FASTER``: all of it above 1; ``SLOWER``: all of it below 1; ``UNDECIDED`` otherwise.

Sources: the interval, Conover, Practical Nonparametric Statistics (3rd edition, 1999), and Le
Boudec, Performance Evaluation of Computer and Communication Systems (2010); that such intervals and
not means decide about measured times, Hoefler and Belli, Scientific Benchmarking of Parallel
Computing Systems (SC 2015); equivalence by inclusion, Schuirmann (1987); and that a comparison may
end undecided, NVIDIA's nvbench.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

__all__ = [
    "CONFIDENCE",
    "FEWEST_ROUNDS",
    "SAME_WITHIN",
    "Name",
    "Verdict",
    "range_verdict",
    "verdict",
]

Name = Literal["FASTER", "SLOWER", "SAME", "UNDECIDED"]

CONFIDENCE = 0.95
SAME_WITHIN = 0.01
FEWEST_ROUNDS = 6
MANY_ROUNDS = 100  # more do not change the confidence of their range, to any digit


@dataclass(frozen=True)
class Verdict:
    """What the rounds say.

    Attributes:
        name: the verdict.
        low, high: the interval; the range of all rounds where there are too few for one.
        confidence: that the median is in it; 0 where there are too few.
    """

    name: Name
    low: float
    high: float
    confidence: float


def verdict(ratios: Sequence[float]) -> Verdict:
    """Judge ratios of legacy to candidate, one of each round.

    Raises:
        ValueError: there are none, or one is not a positive number.
    """
    if not ratios or not all(0 < ratio < float("inf") for ratio in ratios):
        raise ValueError(f"ratios of rounds are positive numbers, one or more, not {list(ratios)}")
    ordered = sorted(ratios)
    rank, confidence = _rank(len(ordered))
    if rank == 0:
        return Verdict("UNDECIDED", ordered[0], ordered[-1], 0.0)
    return judged(ordered[rank - 1], ordered[-rank], confidence)


def judged(low: float, high: float, confidence: float) -> Verdict:
    """The verdict of an interval."""
    name: Name = "UNDECIDED"
    if low >= 1 / (1 + SAME_WITHIN) and high <= 1 + SAME_WITHIN:
        name = "SAME"
    elif low > 1:
        name = "FASTER"
    elif high < 1:
        name = "SLOWER"
    return Verdict(name, low, high, confidence)


def range_verdict(rounds: int, low: float, high: float) -> Verdict:
    """The same of rounds of which only their number and range are known.

    With more than 8 rounds the range is wider than the interval would be, never narrower.
    """
    if rounds < FEWEST_ROUNDS:
        return Verdict("UNDECIDED", low, high, 0.0)
    return judged(low, high, 1 - 2 * _missed(min(rounds, MANY_ROUNDS), 1))


def _rank(count: int) -> tuple[int, float]:
    """The largest k that keeps the confidence, and what it is; 0 if none does."""
    best = (0, 0.0)
    for rank in range(1, count // 2 + 1):
        confidence = 1 - 2 * _missed(count, rank)
        if confidence < CONFIDENCE:
            break
        best = (rank, confidence)
    return best


def _missed(count: int, rank: int) -> float:
    """Chance that fewer than `rank` of `count` are below the median."""
    return sum(comb(count, below) for below in range(rank)) / (1 << count)
