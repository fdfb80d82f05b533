"""Every number that the gate compares with, in one place."""

from __future__ import annotations

from dataclasses import dataclass

from pageahead.experiment.verdict import FEWEST_ROUNDS

__all__ = ["THRESHOLDS", "Thresholds"]


@dataclass(frozen=True)
class Thresholds:
    """The gate's lines. Those without another source are of docs/experiment.md.

    Attributes:
        improvement: geometric mean of legacy / candidate over the primary cells of a width; at
            least.
        primary_regression: by how much a primary or tiny cell's step may get longer, as a share.
        resident_regression: by how much a resident cell's step may.
        settle_ms: by how much longer than after legacy's the device may be busy after the
            candidate's step has returned, in the median. A completed step leaves nothing; asking
            costs 0.05 to 0.22 ms on an H200 (evidence/nvidia-h200/bench-source.jsonl), and one
            chunk of 16 MiB takes about 0.3.
        overlap_share: of a profiled step, during which at least two of fetch, update and write-back
            have to go on for it to count as overlapped. The update of 32-bit state takes 0.06 to
            0.09 of legacy's step in the source's cells, which is what overlap could hide there.
        warmups, timed_steps: of each arm, at least.
        rounds: for a verdict at all; see `verdict`.
        verified_cells: of each optimizer and width, compared by the oracle; at least. The
            smallest group of `pageahead verify` without ``--full`` has 13.
        taken_before: bytes by which what is taken of the GPU before the first step may differ
            between the two processes whose peaks are compared (see `pageahead.experiment.peak`).
        ring: times its state that a ring may have: four slots, each with at most all of it, and
            what alignment adds.
    """

    improvement: float = 1.15
    primary_regression: float = 0.05
    resident_regression: float = 0.03
    settle_ms: float = 0.25
    overlap_share: float = 0.02
    warmups: int = 10
    timed_steps: int = 50
    rounds: int = FEWEST_ROUNDS
    verified_cells: int = 12
    taken_before: int = 16 << 20
    ring: int = 5

    @property
    def primary_ratio(self) -> float:
        """Legacy / candidate at the allowed regression."""
        return 1 / (1 + self.primary_regression)

    @property
    def resident_ratio(self) -> float:
        return 1 / (1 + self.resident_regression)


THRESHOLDS = Thresholds()
