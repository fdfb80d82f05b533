"""The best that a cell could reach: what overlap alone could hide, and what the link allows."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from pageahead.experiment.evidence import LinkRecord

__all__ = ["Limit", "limit", "shown_overlap_ms"]


@dataclass(frozen=True)
class Limit:
    """Bounds on legacy / candidate. None where what they are computed from was not measured.

    Attributes:
        update_ms: legacy's step when its state is on the device already: the update, its launches
            and synchronizations, which overlap does not remove.
        transfer_ms: the rest of legacy's step.
        overlap: legacy over the longer of the two. Overlap hides at most the shorter, so no
            candidate that only overlaps what legacy does in turn can be faster than that.
        link: legacy over the time that page-locked copies need for the state, in and out at once
            at the best rate seen, the update counted as nothing. No candidate that copies all of
            the state in and out can be faster.
    """

    update_ms: float | None
    transfer_ms: float | None
    overlap: float | None
    link: float | None


def limit(
    legacy_ms: float, update_ms: float | None, state_bytes: int, link: LinkRecord | None
) -> Limit:
    """Bounds for one cell whose state is on the host when a step begins."""
    at_link_speed = None
    if link is not None and state_bytes:
        at_link_speed = legacy_ms / _copy_ms(state_bytes, max(link.duplex))
    if update_ms is None:
        return Limit(None, None, None, at_link_speed)
    transfer_ms = max(0.0, legacy_ms - update_ms)
    overlap = legacy_ms / max(transfer_ms, update_ms)
    return Limit(update_ms, transfer_ms, max(1.0, overlap), at_link_speed)


def shown_overlap_ms(candidate_ms: float, moved_bytes: int, link: LinkRecord | None) -> float:
    """Milliseconds of a step in which copies must have gone both ways at once.

    A step that fetches and writes back `moved_bytes`, one after the other, takes no less than both
    copies at the link's speed one way. What it is faster than that, it overlapped. 0 says
    nothing: the step may have overlapped copies and updates, which only a profile shows.
    """
    if link is None:
        return 0.0
    in_turn = _copy_ms(moved_bytes, max(link.to_device)) + _copy_ms(moved_bytes, max(link.to_host))
    return max(0.0, in_turn - candidate_ms)


def host_floor_ms(state_bytes: int, link: LinkRecord) -> float:
    """The least time in which state on the host can reach the device."""
    return _copy_ms(state_bytes, max(link.to_device))


def middle(rounds: list[list[float]]) -> float:
    """The median over all repetitions of all rounds."""
    return median(value for one in rounds for value in one)


def _copy_ms(nbytes: int, gigabytes_per_second: float) -> float:
    return nbytes / (gigabytes_per_second * 1e6)
