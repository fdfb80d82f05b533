"""What the benchmarks of this folder append to a file: rows of figures after their environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pageahead.experiment.environment import describe
from pageahead.experiment.evidence import append
from pageahead.experiment.identity import Identity, IdentityError, identify

__all__ = ["append_rows", "machine"]


def machine(device: Literal["auto", "cpu", "cuda"]) -> Identity:
    """What is to be measured; ends the program with a sentence where there is no such device."""
    try:
        return identify(device)
    except IdentityError as error:
        raise SystemExit(f"Error: {error}") from None


def append_rows(path: Path, identity: Identity, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append the environment of this run, and each row as a JSON line that names the run."""
    run = datetime.now(timezone.utc).isoformat()
    append(path, describe(identity, run=run, argv=sys.argv[1:], link=None))
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"run": run, **row}) + "\n" for row in rows)
