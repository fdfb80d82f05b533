"""From raw timings to the figures of the table: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

__all__ = ["Ratio", "Rounds", "Spread", "gigabytes_per_second", "ratio", "round_ratios", "spread"]

#: Milliseconds: a list of repetitions for each round.
Rounds = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile over all repetitions of all rounds, in milliseconds."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Ratio:
    """Legacy over candidate: above 1 the candidate is faster.

    Attributes:
        overall: median of the ratios of the rounds. The ratio of the medians over all rounds is
            another number where the machine's speed changed in the middle of a run, which both
            have in the same rounds.
        lowest, highest: range of the ratios of medians, round by round.
    """

    overall: float
    lowest: float
    highest: float


def spread(rounds: Rounds) -> Spread:
    """Summarize one optimizer's timings. Percentiles interpolate between neighbours."""
    values = [value for one in rounds for value in one]
    p10, p90 = (float(value) for value in np.percentile(values, [10, 90]))
    return Spread(median(values), p10, p90)


def ratio(legacy: Rounds, candidate: Rounds) -> Ratio:
    """Compare timings taken round by round beside each other."""
    by_round = round_ratios(legacy, candidate)
    return Ratio(median(by_round), min(by_round), max(by_round))


def round_ratios(legacy: Rounds, candidate: Rounds) -> list[float]:
    """Legacy over candidate, of the medians of each round."""
    return [median(theirs) / median(ours) for theirs, ours in zip(legacy, candidate, strict=True)]


def gigabytes_per_second(nbytes: int, milliseconds: float) -> float:
    """Bytes over time, in units of 1e9 bytes per second."""
    return nbytes / (milliseconds * 1e6)
