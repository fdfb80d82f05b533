"""`pageahead gate`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from pageahead.experiment.gate.decision import EvidenceError, Verdict, decide
from pageahead.experiment.gate.reading import read
from pageahead.experiment.gate.report import show

__all__ = ["EXIT", "EvidenceError", "run"]

#: Exit status.
EXIT: dict[Verdict, int] = {"GO": 0, "NO-GO": 1, "INCOMPLETE": 2}


def run(paths: Sequence[Path], strategy: str | None, output: Console) -> Verdict:
    """Read evidence, print the decision to `output` and return the verdict.

    Raises:
        OSError: a file cannot be read.
        EvidenceError: the evidence is of no strategy or device, or of several.
    """
    decision = decide(read(paths), strategy)
    # Whoever reads the output may have seen enough, as `head` does; the verdict is the exit status.
    with suppress(SystemExit):  # rich's answer to a broken pipe
        show(decision, output)
    return decision.verdict
