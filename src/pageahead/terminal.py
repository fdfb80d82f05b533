"""Where the commands print."""

from __future__ import annotations

import os

from rich.console import Console

__all__ = ["console"]

PIPED_WIDTH = 100  # columns, where output goes to no terminal that has a width of its own


def console() -> Console:
    """Standard output, as wide as its terminal; where it goes to none, wide enough for tables."""
    made = Console()
    if not made.is_terminal and "COLUMNS" not in os.environ:
        return Console(width=PIPED_WIDTH)
    return made
