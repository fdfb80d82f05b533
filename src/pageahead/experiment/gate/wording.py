"""How a decision is said, on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Sequence

from pageahead.experiment.gate.decision import Decision
from pageahead.experiment.gate.finding import Finding

__all__ = ["EXPLANATIONS", "by_reason", "grouped", "why", "word"]

#: A clause says what must not be, so that the words of criteria would mislead.
CLAUSE_WORDS = {"passed": "does not apply", "failed": "APPLIES", "missing": "not decided"}

#: What has to be said under a table of cells.
EXPLANATIONS = (
    "limit, overlap: legacy / max(update, legacy - update), update being legacy's step on "
    "state that is on the device already. Overlap hides at most the shorter of transfer and "
    "update, so nothing that only overlaps what legacy does in turn can be faster.",
    "limit, link: legacy / (state bytes / bandwidth each way with both directions busy): what "
    "no copy of the state in and out can beat.",
    "*: published figures, which can fail a criterion but not pass it.",
)


def why(decision: Decision) -> str:
    """The reason for the verdict, in one line."""
    failed = [one.name for one in decision.findings if one.status == "failed"]
    missing = [one.name for one in decision.findings if one.status == "missing"]
    if failed:
        return f"failed: {', '.join(failed)}"
    if missing:
        return f"nothing failed, but something is missing for {', '.join(missing)}"
    return "all criteria hold and no clause applies"


def word(finding: Finding) -> str:
    """What a criterion or clause came to."""
    return finding.status if finding.key.isdigit() else CLAUSE_WORDS[finding.status]


def grouped(missing: Sequence[str]) -> list[str]:
    """One line for each reason, with all that is missing for it."""
    return [f"{', '.join(names)}: {reason}" for reason, names in by_reason(missing).items()]


def by_reason(missing: Sequence[str]) -> dict[str, list[str]]:
    """What is missing, as ``name: reason``, by the reason."""
    reasons: dict[str, list[str]] = {}
    for one in missing:
        name, _, reason = one.partition(": ")
        reasons.setdefault(reason, []).append(name)
    return reasons
