"""The three ways in which a gain does not count. Any of them is NO-GO."""

from __future__ import annotations

from pageahead.experiment.cells import MATRIX
from pageahead.experiment.gate.finding import (
    WIDTHS,
    Finding,
    beside,
    find,
    mean_ratio,
    of_width,
    wanted,
)
from pageahead.experiment.gate.measured import Collection, Measured
from pageahead.experiment.gate.thresholds import Thresholds

__all__ = ["evaluate"]


def evaluate(collection: Collection, thresholds: Thresholds) -> list[Finding]:
    """All three, in order. A clause ``failed`` if it applies."""
    return [
        _without_overlap(collection, thresholds),
        _tiny_only(collection),
        _not_in_public(collection),
    ]


def _without_overlap(collection: Collection, thresholds: Thresholds) -> Finding:
    """Cells that certainly overlapped have to keep the gain by themselves.

    A profile says whether a cell did; where there is none, its times may prove it.
    """
    present, absent = wanted(collection, MATRIX.cells, {"primary"})
    figures, missing, failed, behind = [], [], False, []
    for bits, optimizer in WIDTHS.items():
        gaining = [one for one in of_width(present, optimizer) if _faster(one)]
        shown = [one for one in gaining if _overlapped(one, thresholds)]
        profiled = [one for one in gaining if one.profile is not None]
        behind += shown or gaining
        if not gaining:
            figures.append(f"{bits}-bit: no primary cell is FASTER")
        elif not shown:
            figures.append(
                f"{bits}-bit: {len(gaining)} primary cells FASTER, overlap not shown"
                f"{_not_in_profiles(profiled, thresholds)}"
            )
            # Where every gain was profiled, there is nothing left to find.
            failed = failed or (
                len(profiled) == len(gaining) and mean_ratio(gaining) >= thresholds.improvement
            )
            missing += [_not_shown(one) for one in gaining if one.profile is None]
        else:
            mean = mean_ratio(shown)
            unknown = [one for one in gaining if one.profile is None and one not in shown]
            # A gain that is too small with all cells is criterion 2's business.
            if mean < thresholds.improvement <= mean_ratio(gaining):
                failed = failed or not unknown
                missing += [_not_shown(one) for one in unknown]
            most = max(shown, key=_share)
            figures.append(
                f"{bits}-bit: fetches, updates and write-backs overlap for certain in {len(shown)} "
                f"of {len(gaining)} FASTER cells{_by_whom(shown)}, which alone have geometric mean "
                f"{beside(mean, thresholds.improvement)} ({thresholds.improvement:g} is asked "
                f"for); most in {most.name}: {_overlap(most)}"
            )
    return find(
        "A",
        "the gain comes only from removed synchronization, without demonstrated overlap",
        failed=failed,
        figures=figures,
        cells=behind,
        missing=missing or absent,
    )


def _tiny_only(collection: Collection) -> Finding:
    primary, no_primary = wanted(collection, MATRIX.cells, {"primary"})
    tiny, no_tiny = wanted(collection, MATRIX.cells, {"tiny"})
    figures, failed = [], False
    for bits, optimizer in WIDTHS.items():
        large, small = of_width(primary, optimizer), of_width(tiny, optimizer)
        gaining = [one for one in large if _faster(one)]
        only = bool(large) and not gaining and any(_faster(one) for one in small)
        failed = failed or only
        figures.append(
            f"{bits}-bit: {len(gaining)} of {len(large)} primary cells FASTER, "
            f"{sum(_faster(one) for one in small)} of {len(small)} tiny ones"
        )
    return find(
        "B",
        "the gain comes only from tiny tensors",
        failed=failed,
        figures=figures,
        cells=[*primary, *tiny],
        missing=[*no_primary, *no_tiny],
    )


def _not_in_public(collection: Collection) -> Finding:
    primary, no_primary = wanted(collection, MATRIX.cells, {"primary"})
    public, no_public = wanted(collection, MATRIX.cells, {"public"})
    gaining = [one for one in primary if _faster(one)]
    kept = [one for one in public if _faster(one)]
    return find(
        "C",
        "the gain vanishes in the public workload",
        failed=bool(gaining and public and not kept),
        figures=[
            f"{len(gaining)} of {len(primary)} primary cells FASTER, {len(kept)} of {len(public)} "
            f"public ones"
        ],
        cells=[*primary, *public],
        missing=[*no_primary, *no_public],
    )


def _overlapped(one: Measured, thresholds: Thresholds) -> bool:
    if one.profile is not None:
        return one.profile.share >= thresholds.overlap_share
    return one.overlap_ms > 0


def _share(one: Measured) -> float:
    return one.overlap_ms / one.candidate_ms if one.profile is None else one.profile.share


def _overlap(one: Measured) -> str:
    """The overlap of a cell, and who says so."""
    seen = one.profile
    if seen is None:
        return f"{one.overlap_ms:.3f} of {one.candidate_ms:.3f} ms, as its times prove"
    synchronizations = f"{seen.synchronizations} device-wide synchronizations"
    if seen.legacy_synchronizations is not None:
        synchronizations += f", legacy {seen.legacy_synchronizations}"
    return (
        f"{seen.concurrent_ms:.3f} of {seen.wall_ms:.3f} ms of a step that {seen.source} traced, "
        f"an update beside a transfer in {seen.overlap_ms:.3f}, transfers both ways in "
        f"{seen.both_ways_ms:.3f} ({synchronizations})"
    )


def _by_whom(shown: list[Measured]) -> str:
    """Where profiles were asked: how many cells they showed it of."""
    by_profile = sum(one.profile is not None for one in shown)
    return f" ({by_profile} by a profile)" if by_profile else ""


def _not_in_profiles(profiled: list[Measured], thresholds: Thresholds) -> str:
    if not profiled:
        return ""
    most = max(profiled, key=_share)
    return (
        f": of {len(profiled)} that {'was' if len(profiled) == 1 else 'were'} profiled, at most "
        f"{_share(most):.1%} of a step overlaps "
        f"({most.name}); {thresholds.overlap_share:.0%} are asked for"
    )


def _not_shown(one: Measured) -> str:
    return f"{one.name}: overlap, which times alone do not show"


def _faster(one: Measured) -> bool:
    return one.verdict.name == "FASTER"
