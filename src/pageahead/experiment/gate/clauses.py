"""The three ways in which a gain does not count. Any of them is NO-GO."""

from __future__ import annotations

from pageahead.experiment.cells import MATRIX
from pageahead.experiment.gate.finding import (
    WIDTHS,
    Finding,
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
    """Cells that certainly overlapped have to keep the gain by themselves."""
    present, absent = wanted(collection, MATRIX.cells, {"primary"})
    figures, missing, failed, behind = [], [], False, []
    for bits, optimizer in WIDTHS.items():
        gaining = [one for one in of_width(present, optimizer) if _faster(one)]
        shown = [one for one in gaining if one.overlap_ms > 0]
        behind += shown or gaining
        if not gaining:
            figures.append(f"{bits}-bit: no primary cell is FASTER")
        elif not shown:
            figures.append(f"{bits}-bit: {len(gaining)} primary cells FASTER, overlap not shown")
            missing += [f"{one.name}: overlap, which times alone do not show" for one in gaining]
        else:
            mean = mean_ratio(shown)
            # A gain that is too small with all cells is criterion 2's business.
            failed = failed or mean < thresholds.improvement <= mean_ratio(gaining)
            most = max(shown, key=lambda one: one.overlap_ms / one.candidate_ms)
            figures.append(
                f"{bits}-bit: copies in and out overlap for certain in {len(shown)} of "
                f"{len(gaining)} FASTER cells, which alone have geometric mean {mean:.4g} "
                f"({thresholds.improvement:g} is asked for); most in {most.name}: "
                f"{most.overlap_ms:.3f} of {most.candidate_ms:.3f} ms"
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


def _faster(one: Measured) -> bool:
    return one.verdict.name == "FASTER"
