"""One strategy in one cell, recomputed from raw rounds, and whether that is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from pageahead.experiment.cells import CELLS, MATRIX, Cell, Role
from pageahead.experiment.evidence import (
    CandidateRecord,
    CellRecord,
    Environment,
    LinkRecord,
    SummaryRecord,
    Timings,
)
from pageahead.experiment.gate.limit import Limit, host_floor_ms, limit, middle, shown_overlap_ms
from pageahead.experiment.gate.profiled import Profiled, profiles
from pageahead.experiment.gate.reading import Evidence
from pageahead.experiment.gate.thresholds import Thresholds
from pageahead.experiment.resume import same_conditions
from pageahead.experiment.summary import round_ratios
from pageahead.experiment.verdict import Verdict, range_verdict, verdict

__all__ = ["Collection", "Measured", "collect", "of_rounds"]


@dataclass(frozen=True)
class Measured:
    """A candidate beside legacy in one cell.

    Attributes:
        cell: which.
        run: the run it is of; None of published figures.
        raw: whether there are rounds. Published figures without them can fail a criterion, but
            not pass it.
        legacy_ms, candidate_ms: medians over all repetitions.
        verdict: of the rounds.
        equal: whether the results were equal, bit for bit.
        settle_ms: how much longer than after legacy's the device was busy after the candidate's
            step; None of published figures.
        limit: see there; of cells whose state is on the host.
        overlap_ms: what copies overlapped for certain; see `shown_overlap_ms`.
        profile: what a profile of the cell on this device shows; it is asked before `overlap_ms`.
        ratios: legacy over candidate of each round; none of published figures.
        state_bytes: of the cell.
        streamed_bytes: of them, what the candidate copied in and out in each step.
        link: as measured in the same process.
    """

    cell: Cell
    run: str | None
    raw: bool
    legacy_ms: float
    candidate_ms: float
    verdict: Verdict
    equal: bool
    settle_ms: float | None
    limit: Limit
    overlap_ms: float
    ratios: Sequence[float]
    state_bytes: int
    streamed_bytes: int
    link: LinkRecord | None
    profile: Profiled | None = None

    @property
    def name(self) -> str:
        return self.cell.name

    @property
    def role(self) -> Role:
        return self.cell.role

    @property
    def ratio(self) -> float:
        """Legacy over candidate: above 1 the candidate is faster.

        The median of the rounds: what slows both arms in some rounds does not change it.
        """
        return median(self.ratios) if self.ratios else self.legacy_ms / self.candidate_ms


@dataclass(frozen=True)
class Collection:
    """What the evidence has of one strategy.

    Attributes:
        cells: complete cells of the matrix, by name.
        incomplete: why a cell of the matrix that is in the evidence does not count.
        others: cells outside the matrix.
        repeated: cells of which there are several complete records; the last one counts.
        refused: profiles that do not count, each with the reason.
        unequal: how many tensors differed in a cell, in any record of a GPU, complete or not: a
            measurement that is repeated does not take that back.
    """

    cells: dict[str, Measured]
    incomplete: dict[str, str]
    others: list[str]
    repeated: list[str]
    refused: list[str]
    unequal: dict[str, int]


def collect(evidence: Evidence, strategy: str, thresholds: Thresholds) -> Collection:
    """Every cell in which `strategy` was measured. Of several records the last complete one."""
    found: dict[str, Measured] = {}
    incomplete: dict[str, str] = {}
    others: list[str] = []
    repeated: list[str] = []
    profiled, refused = profiles(evidence, strategy)
    there = {record.device_name for record in evidence.cells}
    refused += [
        f"a profile that does not count, {name}: of {one.device_name}, where nothing was measured"
        for name, one in profiled.items()
        if one.device_name not in there
    ]
    for failed in evidence.failed:
        if strategy in failed.strategies and failed.what == "steps":
            incomplete[failed.cell] = f"failed: {failed.reason}"
    for left_out in evidence.left_out:
        if left_out.strategy == strategy:
            incomplete[left_out.cell] = f"left out: {left_out.reason}"
    needed = {cell.name for cell in MATRIX.cells}
    unequal: dict[str, int] = {}
    for summary in evidence.summaries:
        if summary.strategy == strategy and summary.cell in needed:
            found[summary.cell] = _of_summary(summary)
            if not summary.equal:
                unequal[summary.cell] = 1
    complete: dict[str, list[Measured]] = {}
    last = last_environment(evidence, strategy)
    for record in evidence.cells:
        for candidate in record.candidates:
            if candidate.strategy != strategy:
                continue
            if record.device == "cuda" and not candidate.comparison.equal:
                unequal[record.cell] = candidate.comparison.differences
            if record.cell not in needed:
                others.append(record.cell)
                continue
            environment = evidence.environments.get(record.run)
            reason = _why_incomplete(record, candidate, environment, thresholds)
            if reason is None and environment is not None and last is not None:
                reason = why_other_conditions(environment, last)
            if reason is not None:
                incomplete[record.cell] = reason
                continue
            try:
                measured = of_rounds(record, candidate, profiled.get(record.cell))
            except (ArithmeticError, ValueError) as error:
                incomplete[record.cell] = f"its times cannot be used: {error}"
                continue
            complete.setdefault(record.cell, []).append(measured)
    for name, several in complete.items():
        verdicts = dict.fromkeys(one.verdict.name for one in several)
        if len(verdicts) > 1:
            found.pop(name, None)
            incomplete[name] = (
                f"measured {len(several)} times, and the verdicts differ ({', '.join(verdicts)}); "
                f"which of them counts is not for whoever passes the files to choose"
            )
            continue
        found[name] = several[-1]
        if len(several) > 1:
            repeated.append(name)
    return Collection(
        found,
        {name: reason for name, reason in incomplete.items() if name not in found},
        list(dict.fromkeys(others)),
        repeated,
        refused,
        unequal,
    )


def last_environment(evidence: Evidence, strategy: str) -> Environment | None:
    """Of the run that measured `strategy` last on a GPU: the others have to be like it."""
    runs = [
        record.run
        for record in evidence.cells
        if record.device == "cuda"
        and record.run in evidence.environments
        and any(one.strategy == strategy for one in record.candidates)
    ]
    return evidence.environments[runs[-1]] if runs else None


def why_other_conditions(environment: Environment, last: Environment) -> str | None:
    """Why a run does not count beside the last one; None if it does."""
    if environment.dirty:
        return "of a package that differed from its commit"
    if not same_conditions(environment, last):
        return (
            "measured with other code, libraries or driver than the last run of this strategy; a "
            "verdict is about one state"
        )
    return None


def of_rounds(
    record: CellRecord, candidate: CandidateRecord, profile: Profiled | None = None
) -> Measured:
    """Compute everything from the raw rounds of a cell that has a name in `CELLS`.

    Raises:
        ValueError: there are no rounds, or a time is not a positive number.
        ArithmeticError: numbers are too large or too small to compute with.
    """
    cell = CELLS[record.cell]
    legacy, ours = record.legacy.timings, candidate.timings
    legacy_ms, candidate_ms = middle(legacy.wall_ms), middle(ours.wall_ms)
    resident = record.legacy.resident
    update_ms = middle(resident.wall_ms) if resident is not None else None
    on_host = record.residency == "host"
    streamed = candidate.routes.get("streamed")
    moved = streamed.state_bytes if streamed is not None and on_host else 0
    ratios = round_ratios(legacy.wall_ms, ours.wall_ms)
    return Measured(
        cell=cell,
        run=record.run,
        raw=True,
        legacy_ms=legacy_ms,
        candidate_ms=candidate_ms,
        verdict=verdict(ratios),
        equal=candidate.comparison.equal,
        settle_ms=middle(ours.settle_ms) - middle(legacy.settle_ms),
        limit=limit(legacy_ms, update_ms, record.state_bytes, record.link)
        if on_host
        else Limit(None, None, None, None),
        overlap_ms=shown_overlap_ms(candidate_ms, moved, record.link),
        profile=profile
        if profile is not None and profile.device_name == record.device_name
        else None,
        ratios=ratios,
        state_bytes=record.state_bytes,
        streamed_bytes=moved,
        link=record.link,
    )


def _of_summary(record: SummaryRecord) -> Measured:
    return Measured(
        cell=CELLS[record.cell],
        run=None,
        raw=False,
        legacy_ms=record.legacy_ms,
        candidate_ms=record.candidate_ms,
        verdict=range_verdict(record.rounds, record.lowest, record.highest),
        equal=record.equal,
        settle_ms=None,
        limit=limit(record.legacy_ms, record.update_ms, record.state_bytes, None),
        overlap_ms=0.0,
        ratios=[],
        state_bytes=record.state_bytes,
        streamed_bytes=0,
        link=None,
    )


def _why_incomplete(
    record: CellRecord,
    candidate: CandidateRecord,
    environment: Environment | None,
    thresholds: Thresholds,
) -> str | None:
    """Why a record is no evidence of its cell; None if it is."""
    cell, protocol = CELLS[record.cell], record.protocol
    if record.device != "cuda":
        return "measured on the CPU, where nothing crosses a link"
    if environment is None:
        return f"nothing says on what machine run {record.run} was"
    machine = environment.gpu.name if environment.gpu is not None else environment.device
    if (record.device_name, record.library) != (machine, environment.library):
        return (
            f"measured on {record.device_name} with {record.library}, but its run began on "
            f"{machine} with {environment.library}"
        )
    timed = protocol.rounds * protocol.repetitions
    if (
        protocol.warmups < thresholds.warmups
        or timed < thresholds.timed_steps
        or protocol.rounds < thresholds.rounds
    ):
        return (
            f"{protocol.warmups} warm-ups and {protocol.rounds} rounds of {protocol.repetitions} "
            f"steps; at least {thresholds.warmups} warm-ups, {thresholds.rounds} rounds and "
            f"{thresholds.timed_steps} steps are asked for"
        )
    there = (record.optimizer, record.layout, record.cpu_divisor)
    if there != (cell.optimizer.name, cell.layout.name, 1):
        return f"of {record.optimizer} over {record.layout}, whatever it is called"
    if record.state_bytes != cell.state_bytes("cuda") or record.residency != cell.residency:
        return (
            f"of {record.state_bytes:,} bytes, {record.residency}; the cell has "
            f"{cell.state_bytes('cuda'):,}, {cell.residency}"
        )
    if record.legacy.managed_bytes != record.state_bytes:
        return f"legacy had {record.legacy.managed_bytes:,} bytes of managed state"
    for name, timings in (("legacy", record.legacy.timings), ("candidate", candidate.timings)):
        reason = _why_untimed(timings, protocol.rounds, protocol.repetitions)
        if reason is not None:
            return f"{name}: {reason}"
    if not candidate.comparison.tensors:
        return "nothing was compared with legacy"
    return _why_not_on_host(record, candidate) if record.residency == "host" else None


def _why_not_on_host(record: CellRecord, candidate: CandidateRecord) -> str | None:
    """Why nothing shows that the state of both came over the link in each step."""
    if record.link is None:
        return "the link was not measured, so that nothing shows that state was on the host"
    path = candidate.routes.get(candidate.strategy)
    paged = 0 if path is None else path.state_bytes
    if paged != record.state_bytes:
        return f"{candidate.strategy} paged {paged:,} of {record.state_bytes:,} bytes of state"
    least = host_floor_ms(record.state_bytes, record.link)
    for name, timings in (("legacy", record.legacy.timings), ("candidate", candidate.timings)):
        taken = middle(timings.wall_ms)
        if taken < least:
            return (
                f"{name} took {taken:.3f} ms, less than the {least:.3f} in which its state can "
                f"come over the link: it was not on the host"
            )
    return None


def _why_untimed(timings: Timings, rounds: int, repetitions: int) -> str | None:
    for name in ("wall_ms", "event_ms", "settle_ms"):
        values: list[list[float]] | None = getattr(timings, name)
        if values is None:
            return f"no {name}"
        if len(values) != rounds or any(len(one) != repetitions for one in values):
            return f"{name} has not {rounds} rounds of {repetitions}"
        if not all(isfinite(value) for one in values for value in one):
            return f"{name} has a value that is no number"
    if not all(value > 0 for one in timings.wall_ms for value in one):
        return "wall_ms has a value that is not positive"
    return None
