"""GO, NO-GO or INCOMPLETE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pageahead.experiment.gate import clauses, criteria
from pageahead.experiment.gate.finding import Finding
from pageahead.experiment.gate.measured import Collection, collect
from pageahead.experiment.gate.reading import Evidence
from pageahead.experiment.gate.thresholds import THRESHOLDS, Thresholds

__all__ = ["Decision", "EvidenceError", "Verdict", "decide"]

Verdict = Literal["GO", "NO-GO", "INCOMPLETE"]


class EvidenceError(ValueError):
    """Evidence that is of no strategy, or of several, or of several devices."""


@dataclass(frozen=True)
class Decision:
    """The verdict and all it rests on.

    Attributes:
        verdict: any criterion failed, or clause that applies: NO-GO; else anything missing:
            INCOMPLETE; else GO.
        strategy: the candidate.
        device: on which it was measured.
        criteria, clauses: what each came to.
        collection: the cells behind them.
        notes: what a reader has to know about the evidence.
    """

    verdict: Verdict
    strategy: str
    device: str
    criteria: Sequence[Finding]
    clauses: Sequence[Finding]
    collection: Collection
    notes: Sequence[str]

    @property
    def findings(self) -> list[Finding]:
        return [*self.criteria, *self.clauses]


def decide(
    evidence: Evidence, strategy: str | None = None, thresholds: Thresholds = THRESHOLDS
) -> Decision:
    """Evaluate everything from the raw rounds.

    Args:
        evidence: of one device.
        strategy: the candidate; may be left out where there is only one.
        thresholds: the lines to compare with.

    Raises:
        EvidenceError: see there; says which strategies or devices there are.
    """
    chosen = _strategy(evidence, strategy)
    device = _device(evidence, chosen)
    collection = collect(evidence, chosen, thresholds)
    found = criteria.evaluate(evidence, collection, chosen, device, thresholds)
    against = clauses.evaluate(collection, thresholds)
    statuses = {finding.status for finding in (*found, *against)}
    verdict: Verdict = "GO"
    if "failed" in statuses:
        verdict = "NO-GO"
    elif "missing" in statuses:
        verdict = "INCOMPLETE"
    notes = _notes(evidence, collection)
    return Decision(verdict, chosen, device, found, against, collection, notes)


def _strategy(evidence: Evidence, wanted: str | None) -> str:
    there = [one.strategy for record in evidence.cells for one in record.candidates]
    there += [record.strategy for record in evidence.summaries]
    strategies = list(dict.fromkeys(there))
    if not strategies:
        raise EvidenceError(
            "no measured cell in this evidence; `pageahead bench --preset matrix --out FILE` "
            "makes some" + "".join(f"; {problem}" for problem in evidence.problems[:3])
        )
    if wanted is None and len(strategies) > 1:
        raise EvidenceError(
            f"evidence of several strategies; choose one with --strategy: {', '.join(strategies)}"
        )
    if wanted is not None and wanted not in strategies:
        raise EvidenceError(f"no evidence of {wanted}; there is: {', '.join(strategies)}")
    return wanted or strategies[0]


def _device(evidence: Evidence, strategy: str) -> str:
    there = [
        record.device_name
        for record in evidence.cells
        if any(one.strategy == strategy for one in record.candidates)
    ]
    there += [record.device_name for record in evidence.summaries if record.strategy == strategy]
    there += [record.device_name for record in evidence.peaks]
    devices = list(dict.fromkeys(there))
    if len(devices) > 1:
        raise EvidenceError(
            f"evidence of several devices ({', '.join(devices)}); a verdict is about one: pass the "
            f"files of one"
        )
    return devices[0]


def _notes(evidence: Evidence, collection: Collection) -> list[str]:
    notes = [f"not a record, and not counted: {problem}" for problem in evidence.problems]
    notes += [
        f"a run failed before it measured anything, and is no evidence: {setup.reason}"
        for setup in evidence.setups
    ]
    sources = list(dict.fromkeys(summary.source for summary in evidence.summaries))
    notes += [f"published figures, without rounds: {source}" for source in sources]
    notes += collection.refused
    if collection.others:
        notes.append(f"measured, but no part of the gate: {', '.join(collection.others)}")
    if collection.repeated:
        notes.append(f"measured again, the last counts: {', '.join(collection.repeated)}")
    peaks = Counter((one.cell, one.arm) for one in evidence.peaks if one.arm != "legacy")
    if again := [cell for (cell, _), count in peaks.items() if count > 1]:
        notes.append(f"peak memory measured again, the last counts: {', '.join(again)}")
    code = {
        environment.source_sha256[:12]: environment.commit
        for environment in evidence.environments.values()
    }
    if len(code) > 1:
        states = ", ".join(f"{digest} (commit {commit})" for digest, commit in code.items())
        notes.append(f"of several states of the code: {states}")
    if any(environment.dirty for environment in evidence.environments.values()):
        notes.append("a run was of a package that differed from its commit")
    if any(environment.dirty is None for environment in evidence.environments.values()):
        notes.append(
            "a run had no git to say whether its package differed from its commit; the digest tells"
        )
    return notes
