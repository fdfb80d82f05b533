"""Which parameters' state stays on the device under a budget."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["spread"]


def spread(sizes: Sequence[int], budget: int) -> set[int]:
    """Choose positions whose sizes add up to at most `budget`, spread evenly over the order.

    Spread, because the update of a resident parameter is time in which transfers of its neighbours
    go on. Like drawing a line of slope ``budget / total`` over the order: a position is taken when
    what was taken so far has fallen behind the line and the position still fits.

    Args:
        sizes: bytes of each position, in step order.
        budget: bytes.
    """
    total = sum(sizes)
    chosen: set[int] = set()
    taken = passed = 0
    for position, size in enumerate(sizes):
        passed += size
        if taken + size <= budget and (taken + size / 2) * total <= passed * budget:
            chosen.add(position)
            taken += size
    return chosen
