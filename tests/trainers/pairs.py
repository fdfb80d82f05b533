"""The same script twice: under bitsandbytes alone, and under `pageahead run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.processes import finished, python, torchrun

__all__ = ["Pair", "both"]

SCRIPT = str(Path(__file__).parent / "scripts" / "train_transformers.py")
ARMS = {"stock": (), "ours": ("-m", "pageahead", "run")}


@dataclass(frozen=True)
class Pair:
    """What the script left behind, and the stderr of the second run."""

    stock: dict[str, Any]
    ours: dict[str, Any]
    said: str


def both(folder: Path, name: str, *words: str, processes: int = 1, **environment: str) -> Pair:
    """Run the script under both at the same time, under torchrun if `processes` is more than one.

    Args:
        folder: in which they run, and which keeps what they leave.
        name: of this pair in the folder.
        words: arguments of the script; ``{arm}`` in them becomes ``stock`` or ``ours``.
        processes: of each of the two.
        environment: variables set for both.
    """
    runs = {}
    for arm, how in ARMS.items():
        launcher = torchrun(processes) if processes > 1 else []
        filled = [word.format(arm=arm) for word in words]
        dump = ["--dump", str(folder / f"{arm}-{name}")]
        # One thread: the two share the processors.
        variables = {"OMP_NUM_THREADS": "1", **environment}
        runs[arm] = python(*launcher, *how, SCRIPT, *dump, *filled, folder=folder, **variables)
    done = {arm: finished(run) for arm, run in runs.items()}
    for one in done.values():
        assert one.returncode == 0, one.stderr
    stock, ours = (torch.load(folder / f"{arm}-{name}.0", map_location="cpu") for arm in ARMS)
    return Pair(stock, ours, done["ours"].stderr)
