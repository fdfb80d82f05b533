"""What `pageahead verify` found of a strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pageahead.experiment.gate.reading import Evidence
from pageahead.experiment.gate.thresholds import Thresholds
from pageahead.experiment.oracle.case import FAMILIES
from pageahead.experiment.oracle.records import CellRecord, SummaryRecord

__all__ = ["Verification", "verification"]

BITS = (8, 32)


@dataclass(frozen=True)
class Verification:
    """The oracle's part of criterion 1.

    Attributes:
        failed: cells that were not equal.
        figures: sentences.
        missing: optimizers and widths that were not compared.
    """

    failed: int
    figures: Sequence[str]
    missing: Sequence[str]


Key = tuple[str, str, int, str]
"""Run, family, bits and movement."""


@dataclass
class _Tally:
    """Cells of one key."""

    equal: int = 0
    bitwise: int = 0
    failed: Counter[str] = field(default_factory=Counter)


def verification(
    evidence: Evidence, strategy: str, device: str, thresholds: Thresholds
) -> Verification:
    """Count the oracle's cells of `strategy` on `device`: every optimizer in both widths.

    Cells count and so do summaries of cells. Where the evidence has both, of one run and movement,
    the cells do. Of one run nothing counts twice, whether in one file or in several; and what
    failed counts in whatever record it is.
    """
    tallies = _tallies(evidence, strategy, device)
    counted: Counter[tuple[str, int]] = Counter()
    for (family, bits, _), most in _of_one_run(tallies).items():
        counted[family, bits] += most
    missing = []
    for family in FAMILIES:
        for bits in BITS:
            cells = counted[family, bits]
            if cells < thresholds.verified_cells:
                some = f"{cells} cells" if cells else "no cell"
                missing.append(
                    f"{family} {bits}-bit: {some} of `pageahead verify` on this device; at least "
                    f"{thresholds.verified_cells} are asked for"
                )
    equal = sum(tally.equal for tally in tallies.values())
    bitwise = sum(tally.bitwise for tally in tallies.values())
    failed = sum(sum(tally.failed.values()) for tally in tallies.values())
    figures = []
    if equal or failed:
        figures.append(
            f"pageahead verify: {equal:,} of {equal + failed:,} cells equal, {bitwise:,} of them "
            f"bit for bit and the rest within what legacy itself varies by"
        )
    return Verification(failed, figures, missing)


def _tallies(evidence: Evidence, strategy: str, device: str) -> dict[Key, _Tally]:
    here = {
        run
        for run, environment in evidence.environments.items()
        if environment.gpu is not None and environment.gpu.name == device
    }
    found: dict[Key, _Tally] = {}

    def tally_of(one: CellRecord | SummaryRecord) -> tuple[Key, _Tally] | None:
        somewhere = one.run in here or one.run not in evidence.environments
        if one.device != "cuda" or not somewhere or not _of(one.movement, strategy):
            return None
        key = (one.run, one.family, one.bits, one.movement)
        return key, found.setdefault(key, _Tally())

    single = set()
    for cell in {(one.run, one.case, one.result): one for one in evidence.verified}.values():
        known = tally_of(cell)
        if known is None:
            continue
        key, tally = known
        if cell.result != "equal":
            tally.failed[cell.result] += 1
        elif cell.run in here and cell.compared_steps and cell.tensors > 0:
            single.add(key)
            tally.equal += 1
            tally.bitwise += cell.bitwise
    for summary in evidence.verified_summaries:
        known = tally_of(summary)
        if known is None:
            continue
        key, tally = known
        # The most of each kind, so that another summary of the same run cannot hide any.
        tally.failed |= Counter({k: n for k, n in summary.results.items() if k != "equal"})
        equal = summary.results.get("equal", 0)
        compared = summary.run in here and summary.compared_steps and summary.tensors
        if compared and key not in single and equal > tally.equal:
            tally.equal, tally.bitwise = equal, summary.bit_for_bit
    return found


def _of_one_run(tallies: dict[Key, _Tally]) -> dict[tuple[str, int, str], int]:
    """The most equal cells that a single run has: the same cell in another run is no other one."""
    found: dict[tuple[str, int, str], int] = {}
    for (_, family, bits, movement), tally in tallies.items():
        key = (family, bits, movement)
        found[key] = max(found.get(key, 0), tally.equal)
    return found


def _of(movement: str, strategy: str) -> bool:
    """Movements are a strategy and its settings: ``streamed+staging=1MiB``."""
    return movement.partition("+")[0] == strategy
