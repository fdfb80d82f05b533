"""`pageahead report`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pageahead.files import check_apart

__all__ = ["report"]


def report(
    evidence: Annotated[
        list[Path],
        typer.Argument(
            metavar="EVIDENCE...",
            exists=True,
            dir_okay=False,
            help="From bench, verify and profile --out; .jsonl or .jsonl.gz.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", dir_okay=False, help="The page."),
    ] = None,
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="For a pull request; printed where there is no -o."),
    ] = False,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this one. Default: all that there are."),
    ] = None,
    timeline: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.png",
            exists=True,
            dir_okay=False,
            help="A picture to show among the timelines; may be repeated.",
        ),
    ] = None,
) -> None:
    """Make one page of evidence: verdicts and why, ratios, bandwidth, environment, commands.

    The exit status is 0 if the page was made, whatever it says, and 2 if not.
    """
    if out is None and not markdown:
        raise typer.BadParameter("where to? -o report.html, or --markdown", param_hint="-o")
    check_apart({"--out": out}, [*evidence, *(timeline or [])])
    # No other command should wait for what this one needs.
    from pageahead.experiment.report import page

    try:
        said = page.run(evidence, out, markdown, strategy, timeline or [])
    except (OSError, page.EvidenceError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(said)
