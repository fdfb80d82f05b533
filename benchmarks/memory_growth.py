"""How much GPU memory training takes after its first step: what ``hbm_reserve`` has to hold.

    python benchmarks/memory_growth.py [--out FILE]

A GPT trains with all of bitsandbytes' 8-bit state on the GPU, over batches of equal length, and
over batches whose length is drawn anew for each step. ``hbm_budget="auto"`` decides after the first
backward; so what counts is by how much the driver's used bytes exceed, later on, what they were
after the first step. Printed in bytes and as a share of the first step's activations (its peak less
what stays allocated).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import bitsandbytes
import torch

from pageahead.experiment.environment import describe
from pageahead.experiment.identity import identify
from pageahead.experiment.training.gpt import GPT, Shape, shape_for

SEQUENCES = 4
LONGEST = 2048
STEPS = 12


def train(model: GPT, shape: Shape, shortest: int, seed: int) -> dict[str, Any]:
    """Train over lengths from `shortest` to `LONGEST`; return how much the memory in use grew."""
    gc.collect()
    torch.cuda.empty_cache()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-5)
    lengths = random.Random(seed)
    used = []
    activations = 0
    first = 0
    for step in range(STEPS):
        length = lengths.randint(shortest, LONGEST)
        text = torch.randint(shape.vocabulary, (SEQUENCES, length + 1), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(text).backward()
        if step == 0:
            first = length
            activations = torch.cuda.max_memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    growth = max(used) - used[0]
    return {
        "parameters": shape.parameters,
        "sequences": SEQUENCES,
        "lengths": [shortest, LONGEST],
        "first_length": first,
        "seed": seed,
        "steps": STEPS,
        "growth_bytes": growth,
        "activation_bytes": activations,
        "share_of_activations": growth / activations,
        "grew_last_at_step": 1 + used.index(max(used)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="append the rows to this file, as JSON lines")
    out = parser.parse_args().out
    rows = []
    for parameters in (350_000_000, 1_340_000_000):
        shape = shape_for(parameters)
        model = GPT(shape, torch.device("cuda", torch.cuda.current_device()), 0)
        runs = [
            (LONGEST, 0),
            *((shortest, seed) for shortest in (1792, 1024) for seed in (0, 1, 2)),
        ]
        for shortest, seed in runs:
            rows.append(train(model, shape, shortest, seed))
            print(json.dumps(rows[-1]), flush=True)
        del model
    if out is not None:
        run = datetime.now(timezone.utc).isoformat()
        environment = describe(identify("cuda"), run=run, argv=sys.argv[1:], link=None)
        with out.open("a", encoding="utf-8") as file:
            file.write(environment.model_dump_json() + "\n")
            file.writelines(json.dumps({"run": run, **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
