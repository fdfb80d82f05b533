"""Counting what a device really moves, and checking that state took the path it should."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pageahead.device import Device
from pageahead.experiment.evidence import PathSummary
from pageahead.experiment.oracle.case import Case
from pageahead.experiment.oracle.problem import Problem
from pageahead.optim.routing import PAGED_NUMEL, Route

__all__ = ["Traffic", "counted", "path_problem", "summary"]


@dataclass
class Traffic:
    """Operations between host and device, and their bytes."""

    copies: int = 0
    copied_bytes: int = 0
    prefetched_bytes: int = 0


@contextmanager
def counted(device: Device) -> Iterator[Traffic]:
    """Count the copies and prefetches that go through `device`, which every engine shares."""
    traffic = Traffic()
    copy, prefetch = device.copy, device.prefetch

    def counting_copy(destination: torch.Tensor, source: torch.Tensor, *, stream: Any) -> None:
        traffic.copies += 1
        traffic.copied_bytes += source.nbytes
        copy(destination, source, stream=stream)

    def counting_prefetch(tensor: torch.Tensor, *, stream: Any) -> None:
        traffic.prefetched_bytes += tensor.nbytes
        prefetch(tensor, stream=stream)

    attributes = vars(device)
    attributes.update(copy=counting_copy, prefetch=counting_prefetch)
    try:
        yield traffic
    finally:
        del attributes["copy"], attributes["prefetch"]


def summary(routes: Sequence[Route]) -> dict[str, PathSummary]:
    """Routes by path."""
    paths: dict[str, list[Route]] = {}
    for route in routes:
        paths.setdefault(route.path, []).append(route)
    return {
        path: PathSummary(
            parameters=len(taken),
            state_bytes=sum(route.state_bytes for route in taken),
            reasons=list(dict.fromkeys(route.reason for route in taken)),
        )
        for path, taken in paths.items()
    }


def path_problem(
    case: Case, problem: Problem, routes: Sequence[Route], traffic: Traffic
) -> str | None:
    """What went another way than the case says; None if nothing did.

    Both what the optimizer says of itself and what the device has moved are looked at: each update
    of a paged parameter moves its state in, and if it is streamed, out again.
    """
    for route in routes:
        if not _as_intended(case, route):
            return (
                f"parameter {route.index} of group {route.group} ({route.numel:,} elements) is "
                f"{route.path}: {route.reason}"
            )
    by_number = dict(zip(case.layout.listing, routes, strict=True))
    paged = [
        by_number[number].state_bytes
        for number in problem.listings_with_gradient()
        if by_number[number].path != "resident"
    ]
    if case.movement.strategy == "streamed":
        # More than the state itself by the gaps between state tensors that lie side by side; less
        # where state that was never touched was zeroed in its slot.
        least = 2 * sum(paged)
        if case.movement.in_backward:
            least -= sum(route.state_bytes for route in routes if route.path != "resident")
        if traffic.copied_bytes < least or (not paged and traffic.copies):
            return (
                f"{traffic.copied_bytes:,} bytes were copied; updates of streamed parameters need "
                f"{least:,}"
            )
    elif traffic.prefetched_bytes != sum(paged) or traffic.copies:
        return (
            f"{traffic.prefetched_bytes:,} bytes were prefetched and {traffic.copies} copies made; "
            f"updates of paged parameters need {sum(paged):,} bytes and none"
        )
    return None


def _as_intended(case: Case, route: Route) -> bool:
    if route.numel < PAGED_NUMEL:
        return route.path == "resident"
    if route.path == "resident":
        return bool(case.movement.hbm_budget) and route.reason.startswith("within hbm_budget")
    if route.path == "sequential" and case.movement.strategy == "lookahead":
        return route.reason.startswith("one active parameter")
    return route.path == case.movement.strategy
