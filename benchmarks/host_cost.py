"""What the host spends on a step of streamed state, on a GPU: microseconds per update launch.

    python benchmarks/host_cost.py [--out FILE]
    python benchmarks/host_cost.py --device cpu --tensors 12     # the same code, on the CPU

Three measurements, each a median over interleaved steps:

* the time that `step()` takes to return where it need not wait for the GPU
  (``write_back="overlap"``), how many update launches and chunks it had, and, step by step in turn,
  what bitsandbytes' optimizer that never pages takes, whose launches are as many: hosts differ, and
  the same one from minute to minute; for updates in backward, what the hooks add to a backward pass
  over the same parameters;
* the whole step, complete, over 300 tensors of one size, over Qwen2.5-0.5B's 290 and over 8 that
  hold the same number of bytes; the same over resident state; and, on a GPU, its kernels alone, one
  after the other with the host far ahead;
* what one look of ``hbm_budget="auto"`` at the device's memory costs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import bitsandbytes as bnb
import torch
from rows import append_rows, machine

import pageahead
from pageahead import Paging
from pageahead.experiment.cells import CELLS

MI = 1 << 20
AHEAD_CYCLES = 60_000_000
"""The GPU waits so long, some 30 ms, before the kernels that are measured alone."""

SMALL = 100_096
"""Elements of a parameter that has just enough of them to be paged."""


@dataclass(frozen=True)
class Where:
    device: torch.device
    tensors: int

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def parameters(self, count: int, numel: int) -> list[torch.nn.Parameter]:
        made = [
            torch.nn.Parameter(torch.randn(numel, device=self.device).to(torch.bfloat16))
            for _ in range(count)
        ]
        for one in made:
            one.grad = torch.randn_like(one)
        return made


def optimizer_of(made: list[torch.nn.Parameter], bits: int, **settings: Any) -> Any:
    paging = Paging(**{"hbm_budget": 0, **settings})
    optimizer = pageahead.PagedAdamW(made, optim_bits=bits, paging=paging)
    for _ in range(3):
        optimizer.step()
    return optimizer


def launches(optimizer: Any) -> tuple[int, int]:
    """Update launches and chunks of the last step."""
    plan = next(iter(optimizer._engines.values()))._plan[0]
    return sum(len(chunk.slices) for chunk in plan.chunks), len(plan.chunks)


def elapsed(where: Where, call: Callable[[], object], *, complete: bool) -> float:
    """Microseconds until `call` returns, or until the device is done with it."""
    where.wait()
    begun = time.perf_counter()
    call()
    if complete:
        where.wait()
    taken = time.perf_counter() - begun
    where.wait()
    return taken * 1e6


def interleaved(
    where: Where, calls: dict[str, Callable[[], object]], rounds: int, *, complete: bool
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        for name, call in calls.items():
            taken = elapsed(where, call, complete=complete)
            if number >= 3:
                times[name].append(taken)
    return {name: median(taken) for name, taken in times.items()}


def row(what: str, bits: int, listed: str, optimizer: Any, microseconds: float) -> dict[str, Any]:
    count, chunks = launches(optimizer)
    return {
        "measured": what,
        "bits": bits,
        "parameters": listed,
        "launches": count,
        "chunks": chunks,
        "launches_per_chunk": count / chunks,
        "us_per_step": microseconds,
        "us_per_launch": microseconds / count,
    }


def per_launch(where: Where, bits: int) -> list[dict[str, Any]]:
    """`step()` over small parameters: the GPU has next to nothing to do."""
    lists = ((where.tensors, SMALL), (64, SMALL), (8, MI))
    optimizers: dict[str, Any] = {}
    calls: dict[str, Callable[[], object]] = {}
    for count, numel in lists:
        name = f"{count} x {numel:,}"
        made = where.parameters(count, numel)
        optimizers[name] = optimizer_of(made, bits, write_back="overlap")
        calls[name] = optimizers[name].step
        calls[f"{name}, bitsandbytes"] = bnb.optim.AdamW(made, optim_bits=bits).step
    times = interleaved(where, calls, 30, complete=False)
    what = "step() until it returns"
    rows = []
    for name, one in optimizers.items():
        found = row(what, bits, name, one, times[name])
        theirs = times[f"{name}, bitsandbytes"]
        found["us_per_launch_bitsandbytes"] = theirs / found["launches"]
        found["ratio"] = theirs / times[name]
        rows.append(found)
    return rows


def in_hooks(where: Where, bits: int) -> dict[str, Any]:
    """What updates in backward add to a backward over the same parameters."""
    bare = where.parameters(where.tensors, SMALL)
    hooked = where.parameters(where.tensors, SMALL)
    optimizer = optimizer_of(hooked, bits, in_backward=True)

    def backward(made: list[torch.nn.Parameter]) -> None:
        for one in made:
            one.grad = None
        torch.stack([one.sum() for one in made]).sum().backward()

    def updated() -> None:
        backward(hooked)
        optimizer.step()

    updated()
    calls = {"bare": lambda: backward(bare), "updated": updated}
    times = interleaved(where, calls, 20, complete=False)
    what = "backward and step() with updates in backward, less that backward without"
    taken = times["updated"] - times["bare"]
    return row(what, bits, f"{where.tensors} x {SMALL:,}", optimizer, taken)


def kernels_alone(where: Where, optimizer: Any) -> float | None:
    """Microseconds on the GPU of a step over resident state whose launches have all been made."""
    if where.device.type != "cuda":
        return None
    times = []
    for _ in range(7):
        where.wait()
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        begun.record()
        optimizer.step()
        done.record()
        done.synchronize()
        times.append(begun.elapsed_time(done) * 1e3)
    return median(times)


def per_byte(where: Where, bits: int, name: str, sizes: list[int]) -> dict[str, Any]:
    """The same bytes in many tensors and in 8, streamed and, as a bound, resident."""
    many = [one for size in sizes for one in where.parameters(1, size)]
    few = where.parameters(8, sum(sizes) // 8 // 256 * 256)
    optimizers = {
        "many": optimizer_of(many, bits),
        "8": optimizer_of(few, bits),
        "many, resident": optimizer_of(many, bits, hbm_budget=1.0),
        "8, resident": optimizer_of(few, bits, hbm_budget=1.0),
    }
    calls = {name: one.step for name, one in optimizers.items()}
    times = interleaved(where, calls, 15, complete=True)
    moved = {
        name: sum(route.state_bytes for route in optimizers[name].routes())
        for name in ("many", "8")
    }
    rates = {name: nbytes / times[name] / 1e3 for name, nbytes in moved.items()}
    kernels = {
        name: kernels_alone(where, optimizers[f"{name}, resident"]) for name in ("many", "8")
    }
    return {
        "measured": f"complete steps over {len(sizes)} tensors and over 8 of the same bytes",
        "bits": bits,
        "parameters": name,
        "elements": sum(sizes),
        "us_per_step": times,
        "us_of_kernels": kernels,
        "gb_per_second_many": rates["many"],
        "gb_per_second_8": rates["8"],
        "ratio": rates["many"] / rates["8"],
    }


def look(where: Where) -> dict[str, Any]:
    """The look at free memory, with everything on the device and nothing to change."""
    made = where.parameters(8, MI)
    optimizer = pageahead.PagedAdamW(made, optim_bits=32, paging=Paging(hbm_budget="auto"))
    for _ in range(3):
        torch.stack([one.sum() for one in made]).sum().backward()
        optimizer.step()

    def one_look() -> None:
        optimizer._elastic.before_step(optimizer)

    times = [elapsed(where, one_look, complete=False) for _ in range(200)]
    return {"measured": 'a look of hbm_budget="auto" at free memory', "us": median(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tensors", type=int, default=300, help="of the long list")
    parser.add_argument("--out", type=Path, help="append the rows to this file, as JSON lines")
    options = parser.parse_args()
    identity = machine(options.device)
    where = Where(identity.device, options.tensors)
    rows: list[dict[str, Any]] = []
    layout = CELLS["adamw8/qwen2.5-0.5b"].layout
    lists = [
        *((f"{where.tensors} x {size:,}", [size] * where.tensors) for size in (MI, 419_328)),
        (layout.name, [math.prod(shape) for shape in layout.shapes_on(identity.type)]),
    ]
    for bits in (8, 32):
        rows += per_launch(where, bits)
        rows.append(in_hooks(where, bits))
        rows += [per_byte(where, bits, *one) for one in lists]
    rows.append(look(where))
    for one in rows:
        print(json.dumps(one))
    if options.out is not None:
        append_rows(options.out, identity, rows)


if __name__ == "__main__":
    main()
