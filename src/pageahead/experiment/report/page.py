"""The page of files of evidence, made and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pageahead.experiment.gate.decision import EvidenceError
from pageahead.experiment.report import rendering
from pageahead.experiment.report.model import build
from pageahead.files import write_whole

__all__ = ["EvidenceError", "run"]


def run(
    paths: Sequence[Path],
    out: Path | None,
    markdown: bool = False,
    strategy: str | None = None,
    pictures: Sequence[Path] = (),
) -> str:
    """Make the page of files of evidence, and write it to `out` if there is one.

    Args:
        paths: the evidence.
        out: where to.
        markdown: whether it is Markdown, not HTML.
        strategy: the only one to judge; None for all.
        pictures: of timelines.

    Returns:
        What to say of it: the page itself, or that it was written and which verdicts it has.

    Raises:
        OSError: a file cannot be read or written.
        EvidenceError: there is nothing to report.
    """
    report = build(paths, strategy, pictures)
    text = rendering.markdown(report) if markdown else rendering.html(report)
    if out is None:
        return text.rstrip("\n")
    write_whole(out, lambda beside: beside.write_text(text, encoding="utf-8"))
    return f"wrote {out} ({report.title.removeprefix('pageahead: ')})"
