"""How much GPU memory training takes after its first step: what ``hbm_reserve`` has to hold.

    python benchmarks/memory_growth.py [--out FILE]

A GPT trains over batches of equal length, and over batches whose length is drawn anew for each
step. ``hbm_budget="auto"`` decides after the first backward; so what counts is what comes later.

* ``growth``: with all of bitsandbytes' 8-bit state on the GPU and memory for everything, by how
  much the driver's used bytes exceed what they were after the first step; in bytes, and as a share
  of the first step's activations (its peak less what stays allocated). PyTorch's allocator keeps
  there what it would give back where memory is short.
* ``survival``: with ``hbm_budget="auto"`` over 32-bit state, and so much memory that half of it and
  the reserve fit after the first backward: the smallest reserve, as a share of the first batch's
  activations, with which no step runs out of memory, and how much state was resident after the
  first step and after the last. The same once more with the reserve that nobody sets, where memory
  for as much as activations took is left.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from rows import append_rows, machine

import pageahead
from pageahead import Paging
from pageahead.experiment.training.gpt import GPT, Shape, shape_for

SEQUENCES = 4
LONGEST = 2048
STEPS = 12
SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)
GROWING, SURVIVING = (350_000_000, 1_340_000_000), 350_000_000
"""Parameters of the models."""


def lengths(shortest: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randint(shortest, LONGEST) for _ in range(STEPS)]


def emptied() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def backward(model: GPT, shape: Shape, length: int) -> int:
    """Take one; return what activations took."""
    text = torch.randint(shape.vocabulary, (SEQUENCES, length + 1), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(text).backward()
    return torch.cuda.max_memory_allocated() - before


def growth(model: GPT, shape: Shape, shortest: int, seed: int) -> dict[str, Any]:
    emptied()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-5)
    found = lengths(shortest, seed)
    used = []
    activations = 0
    for length in found:
        taken = backward(model, shape, length)
        activations = activations or taken
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    grown = max(used) - used[0]
    return {
        "measured": "growth",
        **described(shape, shortest, seed, found),
        "growth_bytes": grown,
        "activation_bytes": activations,
        "share_of_activations": grown / activations,
        "grew_last_at_step": 1 + used.index(max(used)),
    }


def survival(model: GPT, shape: Shape, shortest: int, seed: int) -> dict[str, Any]:
    found = lengths(shortest, seed)
    emptied()
    activations = backward(model, shape, found[0])
    needed = torch.cuda.memory_reserved()
    model.zero_grad()
    tried = []
    for share in SHARES:
        reserve = int(share * activations)
        tried.append({"share": share, **capped(model, shape, found, needed, reserve, reserve)})
        if tried[-1]["steps"] == STEPS:
            break
    default = {"share": None, **capped(model, shape, found, needed, None, activations)}
    return {
        "measured": "survival",
        **described(shape, shortest, seed, found),
        "activation_bytes": activations,
        "tried": tried,
        "default": default,
    }


def capped(
    model: GPT, shape: Shape, found: list[int], needed: int, reserve: int | None, room: int
) -> dict[str, Any]:
    """Steps taken, and resident bytes after the first and the last of them.

    Args:
        reserve: the setting.
        room: bytes for it, beside the `needed` and half of the state.
    """
    emptied()
    state = 8 * shape.parameters
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    optimizer = pageahead.PagedAdamW32bit(
        model.parameters(), lr=1e-5, paging=Paging(hbm_budget="auto", hbm_reserve=reserve)
    )
    resident = []
    torch.cuda.set_per_process_memory_fraction((needed + room + state // 2) / total)
    try:
        for length in found:
            backward(model, shape, length)
            optimizer.step()
            optimizer.zero_grad()
            resident.append(optimizer.residency().resident)
    except torch.OutOfMemoryError:
        pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        optimizer.zero_grad()
    return {
        "reserve_bytes": reserve,
        "steps": len(resident),
        "resident_bytes": [resident[0], resident[-1]] if resident else [],
    }


def described(shape: Shape, shortest: int, seed: int, found: list[int]) -> dict[str, Any]:
    return {
        "parameters": shape.parameters,
        "sequences": SEQUENCES,
        "lengths": [shortest, LONGEST],
        "first_length": found[0],
        "seed": seed,
        "steps": STEPS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="append the rows to this file, as JSON lines")
    out = parser.parse_args().out
    identity = machine("cuda")
    rows = []
    runs = [(LONGEST, 0), *((shortest, seed) for shortest in (1792, 1024) for seed in (0, 1, 2))]
    for parameters in GROWING:
        shape = shape_for(parameters)
        model = GPT(shape, torch.device("cuda", torch.cuda.current_device()), 0)
        for shortest, seed in runs:
            for measure in (growth, survival)[: 2 if parameters == SURVIVING else 1]:
                rows.append(measure(model, shape, shortest, seed))
                print(json.dumps(rows[-1]), flush=True)
        del model
    if out is not None:
        append_rows(out, identity, rows)


if __name__ == "__main__":
    main()
