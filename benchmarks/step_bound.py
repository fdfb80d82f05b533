"""Streamed steps against what bounds them: the same step's transfers alone, and its updates alone.

    python benchmarks/step_bound.py [--out FILE]
    python benchmarks/step_bound.py --device cpu --divide 64     # the same code, on the CPU

AdamW with 8- and 32-bit state over 32 parameters of 8 Mi elements and over Llama-3.2-1B's. Three
steps take turns, each to the end of its last copy and kernel: the streamed step; that step with its
kernels left out, so that only chunks go in and home; and a step over resident state, which moves
nothing. The ratio is the streamed step's time over the longer of the other two, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest import mock

import torch
from rows import append_rows, machine

import pageahead
from pageahead import Paging
from pageahead.experiment.cells import CELLS
from pageahead.optim import engine

EVEN, LLAMA = (CELLS[name].layout for name in ("adamw8/32x8Mi", "adamw8/llama-3.2-1b"))
TURNS = {(8, EVEN): 40, (32, EVEN): 16, (8, LLAMA): 14, (32, LLAMA): 6}


def timed(device: torch.device, step: Callable[[], object]) -> float:
    """Milliseconds until everything that `step` started is done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    step()
    wait()
    return (time.perf_counter() - begun) * 1e3


def no_kernels() -> AbstractContextManager[object]:
    return mock.patch.object(engine, "launch", return_value=None)


def optimizer_of(parameters: list[torch.nn.Parameter], bits: int, budget: float) -> Any:
    # Their updates go to the same parameters, whose values nobody looks at.
    optimizer = pageahead.PagedAdamW(
        parameters, lr=1e-6, optim_bits=bits, paging=Paging(hbm_budget=budget)
    )
    for _ in range(4):
        optimizer.step()
    return optimizer


def measure(
    device: torch.device, bits: int, name: str, shapes: list[tuple[int, ...]], turns: int
) -> dict[str, Any]:
    parameters = [torch.nn.Parameter(torch.randn(one, device=device).half()) for one in shapes]
    for one in parameters:
        one.grad = torch.randn_like(one)
    streamed = optimizer_of(parameters, bits, 0.0)
    resident = optimizer_of(parameters, bits, 1.0)
    ways: dict[str, tuple[Any, Callable[[], AbstractContextManager[object]]]] = {
        "streamed": (streamed, nullcontext),
        "transfers": (streamed, no_kernels),
        "updates": (resident, nullcontext),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, (optimizer, context) in ways.items():
            with context():
                times[way].append(timed(device, optimizer.step))
    ratios = [
        whole / max(transfers, updates)
        for whole, transfers, updates in zip(*times.values(), strict=True)
    ]
    deciles = quantiles(ratios, n=10, method="inclusive")
    return {
        "kind": "step_bound",
        "bits": bits,
        "parameters": name,
        "state_bytes": sum(one.state_bytes for one in streamed.routes() if one.path == "streamed"),
        "median_ms": {way: median(taken) for way, taken in times.items()},
        "ratio": median(ratios),
        "ratio_p10_p90": [deciles[0], deciles[-1]],
        "ms": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--divide", type=int, default=1, help="first dimensions by this number")
    parser.add_argument("--turns", type=int, help="instead of as many as a GPU needs")
    parser.add_argument("--out", type=Path, help="append the times to this file, as JSON lines")
    options = parser.parse_args()
    identity = machine(options.device)
    records = []
    for (bits, layout), turns in TURNS.items():
        shapes = [(max(1, first // options.divide), *rest) for first, *rest in layout.shapes]
        taken = measure(identity.device, bits, layout.name, shapes, options.turns or turns)
        print(json.dumps({key: value for key, value in taken.items() if key != "ms"}), flush=True)
        records.append(taken)
    if options.out is not None:
        append_rows(options.out, identity, records)


if __name__ == "__main__":
    main()
