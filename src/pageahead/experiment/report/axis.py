"""Where a value lies on a line, and which values are written below it: pure arithmetic.

Positions are per cent of the width, so that a page can be of any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, exp, floor, log

__all__ = ["Axis", "linear", "logarithmic"]

MARGIN = 0.05  # of the axis, on each side that does not begin at zero
CLOSEST = 9.0  # per cent between two ticks: their labels have to fit on a phone
NARROWEST = 0.2  # an axis of ratios, as a logarithm: from 0.9 to 1.1
MOST = 9  # more ticks of one step than that are not tried
STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)


@dataclass(frozen=True)
class Axis:
    """A range of values.

    Attributes:
        low, high: its ends.
        scale: the logarithm, or nothing.
        ticks: values to write below it, in order.
    """

    low: float
    high: float
    scale: Callable[[float], float]
    ticks: Sequence[float] = ()

    def position(self, value: float) -> float:
        """Per cent of the width, to a hundredth; what lies outside is put to the end."""
        first, last = self.scale(self.low), self.scale(self.high)
        within = min(max(value, self.low), self.high)
        return round(100 * (self.scale(within) - first) / (last - first), 2)

    def beyond(self, value: float) -> bool:
        """Whether it is too large to be on it."""
        return value > self.high

    def multiples(self, step: float) -> list[float]:
        """Those on the axis."""
        first, last = ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9)
        return [round(number * step, 2) for number in range(first, last + 1)]

    def apart(self, values: Sequence[float]) -> bool:
        """Whether the labels of these values, in order, do not touch."""
        places = [self.position(value) for value in values]
        return all(after - before >= CLOSEST for before, after in pairwise(places))


def logarithmic(values: Iterable[float]) -> Axis:
    """For ratios: twice as fast is as far from 1 as half as fast. 1 is always on it."""
    known = [*values, 1.0]
    low, high = log(min(known)), log(max(known))
    # Ratios that are all but the same are not to look far apart.
    margin = max(MARGIN * (high - low), (NARROWEST - high + low) / 2)
    axis = Axis(exp(low - margin), exp(high + margin), log)
    ticks = [1.0]
    # Round numbers first, then finer ones wherever there is room: the scale has more to the left.
    for step in reversed(STEPS):
        if (axis.high - axis.low) / step > MOST:
            break
        for value in axis.multiples(step):
            more = sorted({*ticks, value})
            if axis.apart(more):
                ticks = more
    return replace(axis, ticks=ticks)


def linear(values: Iterable[float]) -> Axis:
    """From zero."""
    axis = Axis(0.0, max(values, default=1.0) * (1 + MARGIN) or 1.0, float)
    fine = (axis.multiples(step) for step in STEPS if axis.high / step <= 5 * MOST)
    return replace(axis, ticks=next((ticks for ticks in fine if axis.apart(ticks)), [0.0]))
