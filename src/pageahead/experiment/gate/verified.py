"""What `pageahead verify` found of a strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pageahead.experiment.gate.reading import Evidence
from pageahead.experiment.gate.thresholds import Thresholds
from pageahead.experiment.oracle.case import FAMILIES

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


def verification(
    evidence: Evidence, strategy: str, device: str, thresholds: Thresholds
) -> Verification:
    """Count the oracle's cells of `strategy` on `device`: every optimizer in both widths.

    Cells count and so do summaries of cells. Where the evidence has both, of one run and movement,
    the cells do. Nothing counts twice, whether in one file or in several.
    """
    runs = {
        run
        for run, environment in evidence.environments.items()
        if environment.gpu is not None and environment.gpu.name == device
    }
    results: Counter[tuple[str, int, str]] = Counter()
    seen = set()
    bitwise = 0
    once = {(cell.run, cell.case, cell.result): cell for cell in evidence.verified}
    for cell in once.values():
        if cell.run in runs and _of(cell.movement, strategy):
            seen.add((cell.run, cell.family, cell.bits, cell.movement))
            results[cell.family, cell.bits, cell.result] += 1
            bitwise += cell.result == "equal" and cell.bitwise
    for summary in evidence.verified_summaries:
        key = (summary.run, summary.family, summary.bits, summary.movement)
        compared = summary.compared_steps and summary.tensors
        counts = summary.run in runs and _of(summary.movement, strategy) and key not in seen
        if counts and (compared or set(summary.results) != {"equal"}):
            for result, cells in summary.results.items():
                results[summary.family, summary.bits, result] += cells
            bitwise += summary.bit_for_bit
            seen.add(key)
    equal = sum(count for (*_, result), count in results.items() if result == "equal")
    total = sum(results.values())
    missing = []
    for family in FAMILIES:
        for bits in BITS:
            cells = results[family, bits, "equal"]
            if cells < thresholds.verified_cells:
                some = f"{cells} cells" if cells else "no cell"
                missing.append(
                    f"{family} {bits}-bit: {some} of `pageahead verify` on this device; at least "
                    f"{thresholds.verified_cells} are asked for"
                )
    figures = []
    if total:
        figures.append(
            f"pageahead verify: {equal:,} of {total:,} cells equal, {bitwise:,} of them bit for "
            f"bit and the rest within what legacy itself varies by"
        )
    return Verification(total - equal, figures, missing)


def _of(movement: str, strategy: str) -> bool:
    """Movements are a strategy and its settings: ``streamed+staging=1MiB``."""
    return movement.partition("+")[0] == strategy
