"""The page of files of evidence, made and written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pageahead.experiment.gate.decision import EvidenceError
from pageahead.experiment.report import rendering
from pageahead.experiment.report.model import build

__all__ = ["EvidenceError", "run", "write"]


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
    write(out, text)
    return f"wrote {out} ({report.title.removeprefix('pageahead: ')})"


def write(path: Path, text: str) -> None:
    """All of it or nothing: a file that was there stays until the new one is complete."""
    target = path.resolve()  # a link keeps pointing to it
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
