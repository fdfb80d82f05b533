"""Making a failing case small: the first step, then whatever can go while it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from pageahead.experiment.cells import DeviceType
from pageahead.experiment.oracle.case import FORMS, GRADIENTS, HYPERS, OVERRIDES, Case
from pageahead.experiment.oracle.check import check
from pageahead.experiment.oracle.layouts import Layout
from pageahead.experiment.oracle.matrix import exclusion
from pageahead.experiment.oracle.records import CellRecord

__all__ = ["ATTEMPTS", "SECONDS", "Smallest", "shrink", "simpler"]

ATTEMPTS = 300
SECONDS = 60.0

#: Sizes at which something changes: below and above each limit of bitsandbytes and of the layout.
LANDMARKS = (1, 256, 257, 4_096, 4_097, 100_000, 100_001)

Check = Callable[[Case], CellRecord]


@dataclass(frozen=True)
class Smallest:
    """The smallest failing case found.

    Attributes:
        case: the case itself.
        record: what it came to when it failed; None if the case did not fail again at all.
        attempts: cases tried.
    """

    case: Case
    record: CellRecord | None
    attempts: int


def shrink(
    case: Case,
    result: str,
    device: torch.device,
    *,
    run: Check | None = None,
    attempts: int = ATTEMPTS,
    seconds: float | None = None,
) -> Smallest:
    """Make a case that failed with `result` as small as it gets while it fails with that.

    Args:
        case: that failed.
        result: in which way.
        device: where it is checked.
        run: checks a case; `check` on `device` if not given.
        attempts, seconds: after either it stops with what it has. By default `SECONDS`.
    """
    limit = SECONDS if seconds is None else seconds
    search = _Search(result, run or (lambda one: check(one, device)), attempts, limit)
    # The first step after which it fails is found from the front: later ones only carry it on.
    for steps in range(1, case.steps + 1):
        if search.fails(replace(case, steps=steps)):
            break
    if search.smallest is None:
        return Smallest(case, None, search.tried)
    kind: DeviceType = "cuda" if device.type == "cuda" else "cpu"
    while any(
        search.fails(one) for one in simpler(search.smallest) if exclusion(one, kind) is None
    ):
        pass
    return Smallest(search.smallest, search.record, search.tried)


class _Search:
    """Tries cases and keeps the last one that failed."""

    def __init__(self, result: str, run: Check, attempts: int, seconds: float) -> None:
        self._result = result
        self._run = run
        self._attempts = attempts
        self._end = time.monotonic() + seconds
        self._known: set[Case] = set()
        self.tried = 0
        self.smallest: Case | None = None
        self.record: CellRecord | None = None

    def fails(self, case: Case) -> bool:
        if case in self._known or self.tried >= self._attempts or time.monotonic() > self._end:
            return False
        self._known.add(case)
        self.tried += 1
        record = self._run(case)
        if record.result != self._result:
            return False
        self.smallest, self.record = case, record
        return True


def simpler(case: Case) -> Iterator[Case]:
    """Cases a little simpler than `case`, the boldest first."""
    for layout in _fewer(case.layout):
        yield replace(case, layout=layout)
    for steps in range(1, case.steps):
        yield replace(case, steps=steps)
    plain = {
        "gradients": GRADIENTS[0],
        "hyper": HYPERS[0],
        "overrides": OVERRIDES[0],
        "form": FORMS[0],
        "dtype": "float32",
    }
    for name, value in plain.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})  # type: ignore[arg-type]
    if case.named and case.family != "ademamix":
        yield replace(case, named=False)
    movement = case.movement
    if movement.hbm_budget:
        yield replace(case, movement=replace(movement, hbm_budget=0))
    if movement.write_back != "before_return":
        yield replace(case, movement=replace(movement, write_back="before_return"))
    if movement.staging is not None:
        yield replace(case, movement=replace(movement, staging=None))
    for layout in _smaller(case.layout):
        yield replace(case, layout=layout)


def _fewer(layout: Layout) -> Iterator[Layout]:
    """One parameter alone, half of them, all but one; and no repeats."""
    count = len(layout.shapes)
    everything = set(range(count))
    if layout.repeats:
        yield layout.once()
    if count == 1:
        return
    half = set(range(count // 2))
    yield layout.without(half)
    yield layout.without(everything - half)
    for number in range(count) if count <= 16 else ():
        yield layout.without(everything - {number})
    for number in range(count):
        yield layout.without({number})


def _smaller(layout: Layout) -> Iterator[Layout]:
    """One parameter flat, or with fewer elements: a landmark, or ever less is taken away."""
    for number, shape in enumerate(layout.shapes):
        numel = prod(shape)
        if len(shape) != 1:
            yield _with(layout, number, (numel,))
        else:
            fewer = [size for size in LANDMARKS if size < numel]
            taken = numel // 2
            while taken:
                fewer.append(numel - taken)
                taken //= 2
            for size in fewer:
                yield _with(layout, number, (size,))
        for place, size in enumerate(shape):
            if len(shape) > 1 and size > 1:
                halved = (*shape[:place], size // 2, *shape[place + 1 :])
                yield _with(layout, number, halved)


def _with(layout: Layout, number: int, shape: tuple[int, ...]) -> Layout:
    shapes = (*layout.shapes[:number], shape, *layout.shapes[number + 1 :])
    return Layout(shapes, layout.listing)
