"""The six criteria, each a function of what was measured. All of them have to pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pageahead.experiment.cells import CELLS, MATRIX, PEAK_ROLES
from pageahead.experiment.evidence import PeakRecord
from pageahead.experiment.gate.finding import (
    WIDTHS,
    Finding,
    beside,
    find,
    mean_ratio,
    needed_cells,
    of_width,
    wanted,
)
from pageahead.experiment.gate.measured import (
    Collection,
    Measured,
    last_environment,
    why_other_conditions,
)
from pageahead.experiment.gate.reading import Evidence
from pageahead.experiment.gate.thresholds import THRESHOLDS, Thresholds
from pageahead.experiment.gate.verified import Verification, verification
from pageahead.experiment.peaks import Pair, apart, excess, pairs
from pageahead.experiment.table import amount

__all__ = ["counted_peaks", "evaluate", "why_not_comparable"]


def evaluate(
    evidence: Evidence,
    collection: Collection,
    strategy: str,
    device: str,
    thresholds: Thresholds,
) -> list[Finding]:
    """All six, in order."""
    return [
        _correct(collection, verification(evidence, strategy, device, thresholds)),
        _improved(collection, thresholds),
        _public(collection),
        _no_regression(collection, thresholds),
        _resident(collection, thresholds),
        _memory_and_contract(evidence, collection, strategy, thresholds),
    ]


def _correct(collection: Collection, verified: Verification) -> Finding:
    cells = needed_cells()
    present, missing = wanted(collection, cells, {cell.role for cell in cells})
    checked = [*present, *(one for one in collection.cells.values() if one not in present)]
    unequal = [one for one in checked if one.name in collection.unequal]
    figures = [
        f"{len(checked) - len(unequal)} of {len(checked)} measured cells are equal to legacy"
    ]
    figures += [f"{name}: {count} tensors differ" for name, count in collection.unequal.items()]
    return find(
        "1",
        "every correctness and ordering check passes",
        failed=bool(collection.unequal) or verified.failed > 0,
        figures=[*figures, *verified.figures],
        cells=unequal or checked,
        missing=[*missing, *verified.missing],
    )


def _improved(collection: Collection, thresholds: Thresholds) -> Finding:
    present, missing = wanted(collection, MATRIX.cells, {"primary"})
    figures, failed = [], False
    for bits, optimizer in WIDTHS.items():
        cells = of_width(present, optimizer)
        if not cells:
            figures.append(f"{bits}-bit: no cell")
            continue
        mean = mean_ratio(cells)
        short = mean < thresholds.improvement
        failed = failed or short
        figures.append(
            f"{bits}-bit: geometric mean {beside(mean, thresholds.improvement)} of {len(cells)} "
            f"cells ({_ratios(cells)}), "
            f"{'less than' if short else 'at least'} {thresholds.improvement:g}{_limits(cells)}"
        )
    return find(
        "2",
        f"host-resident AdamW, 8-bit and 32-bit: legacy / candidate at least "
        f"{thresholds.improvement:g}, geometric mean over the primary cells of each width",
        failed=failed,
        figures=figures,
        cells=present,
        missing=missing,
    )


def _public(collection: Collection) -> Finding:
    present, missing = wanted(collection, MATRIX.cells, {"public"})
    not_faster = [one for one in present if one.verdict.name != "FASTER"]
    return find(
        "3",
        "public models keep a repeatable gain: every one FASTER",
        failed=bool(not_faster),
        figures=[_judged(one) for one in not_faster or present] or ["no cell"],
        cells=not_faster or present,
        missing=missing,
    )


def _no_regression(collection: Collection, thresholds: Thresholds) -> Finding:
    present, missing = wanted(collection, MATRIX.cells, {"primary", "tiny"})
    return _at_least(
        "4",
        f"no primary paging cell's step gets more than {thresholds.primary_regression:.0%} longer",
        present,
        missing,
        thresholds.primary_ratio,
    )


def _resident(collection: Collection, thresholds: Thresholds) -> Finding:
    present, missing = wanted(collection, MATRIX.cells, {"resident"})
    return _at_least(
        "5",
        f"with state on the device, no step gets more than {thresholds.resident_regression:.0%} "
        f"longer",
        present,
        missing,
        thresholds.resident_ratio,
    )


def _at_least(
    key: str, title: str, present: Sequence[Measured], missing: Sequence[str], least: float
) -> Finding:
    slower = [one for one in present if one.ratio < least]
    figures = [
        f"{one.name}: {beside(one.ratio, least)}, a step {1 / one.ratio - 1:.1%} longer"
        for one in slower
    ]
    if present and not slower:
        lowest = min(present, key=lambda one: one.ratio)
        figures = [
            f"lowest ratio of {len(present)}: {beside(lowest.ratio, least)} ({lowest.name}); "
            f"{least:.4g} is allowed"
        ]
    return find(
        key,
        title,
        failed=bool(slower),
        figures=figures or ["no cell"],
        cells=slower or present,
        missing=missing,
    )


def counted_peaks(evidence: Evidence, strategy: str) -> dict[str, Pair]:
    """Peak memory of legacy and of a strategy, by cell; of runs like the last one's cells."""
    last = last_environment(evidence, strategy)

    def counts(one: PeakRecord) -> bool:
        environment = evidence.environments.get(one.run)
        if one.device != "cuda" or environment is None or environment.gpu is None:
            return False
        if (one.device_name, one.library) != (environment.gpu.name, environment.library):
            return False
        return last is None or why_other_conditions(environment, last) is None

    return pairs(filter(counts, evidence.peaks), strategy)


def _memory_and_contract(
    evidence: Evidence, collection: Collection, strategy: str, thresholds: Thresholds
) -> Finding:
    peaks = counted_peaks(evidence, strategy)
    figures, missing, failed = [], [], False
    largest: tuple[int, str] | None = None
    for cell in MATRIX.cells:
        if cell.role not in PEAK_ROLES:
            continue
        legacy, ours = peaks.get(cell.name, (None, None))
        if legacy is None or ours is None:
            absent = " and ".join(
                name for name, one in (("legacy", legacy), (strategy, ours)) if one is None
            )
            missing.append(f"{cell.name}: no peak memory of {absent}")
            continue
        reason = why_not_comparable(legacy, ours, thresholds)
        if reason is not None:
            missing.append(f"{cell.name}: {reason}")
            continue
        beyond, said = excess(legacy, ours), _peaks(legacy, ours)
        if beyond > 0:
            failed = True
            figures.append(said)
        elif largest is None or beyond > largest[0]:
            largest = (beyond, said)
    if largest is not None:
        figures.append(f"nearest to its bound: {largest[1]}")
    late = [
        one
        for one in collection.cells.values()
        if one.settle_ms is not None and one.settle_ms > thresholds.settle_ms
    ]
    figures += [
        f"{one.name}: {one.settle_ms:.3f} ms of work are left when a step returns, more than "
        f"{thresholds.settle_ms:g}"
        for one in late
    ]
    timed = [one.settle_ms for one in collection.cells.values() if one.settle_ms is not None]
    if timed and not late:
        figures.append(
            f"steps are complete when they return: at most {max(timed):.3f} ms more than after "
            f"legacy's, {thresholds.settle_ms:g} are allowed"
        )
    if not timed:
        missing.append("any cell: nothing says what is left of a step when it returns")
    return find(
        "6",
        "peak memory, as the driver counts it, is at most legacy's and the staging ring, each in "
        "a fresh process; a step is complete when it returns",
        failed=failed or bool(late),
        figures=figures or ["no cell"],
        cells=late,
        missing=missing,
    )


def why_not_comparable(
    legacy: PeakRecord, ours: PeakRecord, thresholds: Thresholds = THRESHOLDS
) -> str | None:
    """Why two peaks of a cell say nothing about criterion 6; None if they do."""
    if min(legacy.samples, legacy.steps, ours.samples, ours.steps) <= 0:
        return "the driver was not asked during any step"
    if legacy.driver_ready is None or ours.driver_ready is None:
        return "how much the driver held ready for managed memory was not measured"
    if not (legacy.taken and ours.taken):
        return "an arm that took nothing at all was not measured"
    if apart(legacy, ours, thresholds.taken_before):
        return (
            f"{amount(legacy.driver_before)} of the GPU were taken before legacy's steps and "
            f"{amount(ours.driver_before)} before the candidate's; `bench` measures both again"
        )
    state_bytes = CELLS[ours.cell].state_bytes("cuda")
    if ours.staging > thresholds.ring * state_bytes:
        return f"a ring of {amount(ours.staging)} for {amount(state_bytes)} of state"
    return None


def _peaks(legacy: PeakRecord, ours: PeakRecord) -> str:
    return (
        f"{ours.cell}: {amount(ours.taken)} taken at most, legacy "
        f"{amount(legacy.taken)} and staging {amount(ours.staging)} (PyTorch's own peak: "
        f"{amount(ours.torch_peak)}, legacy {amount(legacy.torch_peak)}; taken before: "
        f"{amount(ours.driver_before)} and {amount(legacy.driver_before)})"
    )


def _ratios(cells: Sequence[Measured]) -> str:
    return ", ".join(f"{one.cell.layout.name} {one.ratio:.3f}" for one in cells)


def _limits(cells: Iterable[Measured]) -> str:
    """What overlap alone could have reached, where it was measured."""
    known = [(one.cell.layout.name, one.limit.overlap) for one in cells]
    said = ", ".join(f"{name} {value:.3f}" for name, value in known if value is not None)
    return f"; overlap alone could reach at most: {said}" if said else ""


def _judged(one: Measured) -> str:
    return (
        f"{one.name}: {one.verdict.name}, {one.ratio:.4g} "
        f"({one.verdict.low:.3f} to {one.verdict.high:.3f})"
    )
