"""Checking cases that share a reference: train, compare, and say what was seen."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import pageahead
from pageahead.device import device_for, managed
from pageahead.experiment.cells import DeviceType
from pageahead.experiment.identity import scrub
from pageahead.experiment.oracle.bits import Image, compare_images, nbytes_of
from pageahead.experiment.oracle.case import Case
from pageahead.experiment.oracle.forms import AsGiven
from pageahead.experiment.oracle.matrix import exclusion
from pageahead.experiment.oracle.problem import Problem, overridden
from pageahead.experiment.oracle.records import CellRecord, Difference, ReferenceRecord
from pageahead.experiment.oracle.reference import Expectation, Run, expectation
from pageahead.experiment.oracle.traffic import counted, path_problem, summary
from pageahead.experiment.planning import MANAGED_LIMIT_BYTES

__all__ = ["check", "check_group"]


@dataclass(frozen=True)
class Seen:
    """What a comparison after one or several steps found."""

    difference: Difference | None
    tensors: int
    nbytes: int


def check(case: Case, device: torch.device, *, run: str = "") -> CellRecord:
    """Check one case, bits compared after its last step."""
    (record,) = check_group([case], device, run=run)
    return record


def check_group(
    cases: Sequence[Case], device: torch.device, *, run: str = "", every_step: bool = False
) -> Iterator[CellRecord]:
    """Check cases that differ in their movement only, so that bitsandbytes runs once for all.

    Args:
        cases: with equal ``case.problem``.
        device: where parameters are.
        run: goes into the records.
        every_step: compare bits after each step; otherwise after the last. Never where write-backs
            go on after a step: to look would be to wait for them, which hides what is tested.
    """
    steps = cases[0].steps
    obstacle = exclusion(cases[0], _type(device)) or _too_large(cases[0], device)
    expected: Expectation | None = None
    if obstacle is None:
        try:
            problem = Problem(cases[0], device)
            compared = range(1, steps + 1) if every_step else (steps,)
            expected = expectation(problem, compared)
        except Exception as error:
            obstacle = f"bitsandbytes: {_reason(error)}"
    for case in cases:
        blank = CellRecord(
            run=run,
            case=str(case),
            family=case.family,
            bits=case.bits,
            movement=str(case.movement),
            device=_type(device),
            result="failed",
            steps=steps,
            problem=obstacle,
        )
        yield blank if expected is None else _check(case, problem, expected, blank, every_step)


def _check(
    case: Case, problem: Problem, expected: Expectation, blank: CellRecord, every_step: bool
) -> CellRecord:
    begun = time.perf_counter()
    found: dict[str, Any] = {
        "references": _references(expected),
        "legacy_managed_bytes": expected.managed_bytes,
    }
    try:
        found.update(_train(case, problem, expected, every_step))
    except Exception as error:
        found["problem"] = _reason(error)
    _release_managed(problem.device)
    return blank.model_copy(update={**found, "seconds": round(time.perf_counter() - begun, 4)})


def _train(case: Case, problem: Problem, expected: Expectation, every_step: bool) -> dict[str, Any]:
    overlapping = case.movement.write_back == "overlap"
    compared = range(1, case.steps + 1) if every_step and not overlapping else (case.steps,)
    kind = getattr(pageahead, case.class_name)
    bits = {} if case.named else {"optim_bits": case.bits}
    run = Run(
        problem,
        AsGiven(case.form),
        lambda groups: kind(groups, **bits, **problem.arguments(), paging=case.movement.paging()),
    )
    seen = Seen(None, 0, 0)
    done: list[int] = []
    with overridden(case, run.parameters), counted(device_for(problem.device)) as traffic:
        for step in range(case.steps):
            run.step(step)
            if step + 1 in compared:
                run.optimizer.state_dict()  # waits for write-backs
                done.append(step + 1)
                seen = _compare(expected, run.images(), step + 1)
                if seen.difference is not None:
                    break
        routes = run.optimizer.routes()
    wrong_path = None
    if seen.difference is None:
        wrong_path = path_problem(case, problem, routes, traffic)
    result = "different" if seen.difference is not None else "wrong_path" if wrong_path else "equal"
    return {
        "result": result,
        "problem": wrong_path,
        "difference": seen.difference,
        "compared_steps": done,
        "tensors": seen.tensors,
        "nbytes": seen.nbytes,
        "routes": summary(routes),
        "copies": traffic.copies,
        "copied_bytes": traffic.copied_bytes,
        "prefetched_bytes": traffic.prefetched_bytes,
    }


def _compare(expected: Expectation, found: list[Image], step: int) -> Seen:
    sides = zip(expected.references, expected.tolerances, found, strict=True)
    for number, (reference, tolerance, image) in enumerate(sides):
        wanted = reference.images[step][number]
        difference = (
            compare_images(wanted, image) if tolerance is None else tolerance.compare(wanted, image)
        )
        if difference is not None:
            placed = difference.model_copy(update={"step": step, "parameter": number})
            return Seen(placed, *nbytes_of(found))
    return Seen(None, *nbytes_of(found))


def _references(expected: Expectation) -> list[ReferenceRecord]:
    uses: dict[tuple[str, str, str | None], int] = {}
    for reference, tolerance in zip(expected.references, expected.tolerances, strict=True):
        key = (reference.name, reference.why, tolerance.said if tolerance else None)
        uses[key] = uses.get(key, 0) + 1
    return [
        ReferenceRecord(name=name, why=why, parameters=count, tolerance=tolerance)
        for (name, why, tolerance), count in uses.items()
    ]


def _type(device: torch.device) -> DeviceType:
    return "cuda" if device.type == "cuda" else "cpu"


def _too_large(case: Case, device: torch.device) -> str | None:
    """Managed memory is bounded: near a GPU's own, migration thrashes, beyond it a GPU may hang."""
    widest = replace(case, bits=32).state_bytes  # overrides may widen the state
    if device.type != "cuda" or widest <= MANAGED_LIMIT_BYTES:
        return None
    return (
        f"its state may take {widest / 2**30:.1f} GiB of managed memory; the limit of a process is "
        f"{MANAGED_LIMIT_BYTES / 2**30:g} GiB"
    )


def _release_managed(device: torch.device) -> None:
    """Managed memory goes with its last tensor; make sure that no cycle keeps one."""
    if device.type == "cuda" and managed.allocated_bytes(device):
        gc.collect()


def _reason(error: Exception) -> str:
    """One line, with where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return scrub(f"{type(error).__name__} in {place.filename}:{place.lineno}: {error}")
