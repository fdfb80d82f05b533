"""One cell from beginning to end, in the process made for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from pageahead.experiment.arms import Arm, Workload, check_routes
from pageahead.experiment.cells import cell_named
from pageahead.experiment.compare import compare
from pageahead.experiment.evidence import (
    CandidateRecord,
    CellRecord,
    LegacyRecord,
    LinkRecord,
    PathSummary,
    Timings,
)
from pageahead.experiment.identity import Identity, identify
from pageahead.experiment.legacy import free_managed_state
from pageahead.experiment.link import measure_link, merged
from pageahead.experiment.messages import CellRequest
from pageahead.experiment.oversubscribe import leave_free
from pageahead.experiment.protocol import CpuClock, CudaClock, Interleaving
from pageahead.experiment.summary import ratio, spread

__all__ = ["GRADIENT_SETS", "SEED", "ManagedMemoryError", "Phases", "Report", "measure_cell"]

SEED = 1234
GRADIENT_SETS = 3

#: Told the phase and the number of steps done so far.
Report = Callable[[str, int], None]


class ManagedMemoryError(RuntimeError):
    """State that should be in managed memory is not, or legacy's did not come back from it."""


def measure_cell(request: CellRequest, report: Report) -> CellRecord:
    """Measure legacy and the requested strategies against each other.

    Raises:
        IdentityError: this is not the device that was asked for.
        RouteError: a strategy's state took another path.
        ManagedMemoryError: see there.
    """
    identity = identify(request.device)
    cell = cell_named(request.cell)
    shapes = cell.layout.shapes_on(identity.type)
    state_bytes = cell.state_bytes(identity.type)
    progress = Phases(report)
    links = _measure_link(identity, progress)
    progress.enter("making parameters and gradients")
    workload = Workload(shapes, identity.device, SEED, GRADIENT_SETS)
    legacy = Arm.legacy(cell.optimizer, workload, identity.type, cell.residency)
    candidates = [
        Arm.candidate(cell.optimizer, strategy, workload, identity.type, cell.residency)
        for strategy in request.strategies
    ]
    clock = CudaClock() if identity.type == "cuda" else CpuClock()
    arms = Interleaving([legacy, *candidates], clock, progress.stepped)
    progress.enter("warming up")
    warmups, ballast = request.protocol.warmups, None
    if cell.residency == "oversubscribed":
        arms.warm_up(1)
        warmups -= 1
        ballast = leave_free((legacy, *candidates), state_bytes // 2, identity.device)
    arms.warm_up(warmups)
    routes = [check_routes(arm.optimizer.routes(), arm.path, state_bytes) for arm in candidates]
    for arm in (legacy, *candidates):
        if arm.managed and arm.managed_bytes != state_bytes:
            raise ManagedMemoryError(
                f"{arm.name} has {arm.managed_bytes:,} bytes of managed state, not {state_bytes:,}"
            )
    progress.enter("measuring")
    timings = [
        Timings.of(rounds)
        for rounds in arms.measure(request.protocol.rounds, request.protocol.repetitions)
    ]
    resident = _resident_steps((legacy, *candidates), arms, request.protocol.repetitions, progress)
    del ballast
    links += _measure_link(identity, progress)
    progress.enter("comparing bits")
    candidate_records = [
        _candidate_record(arm, timing, taken, legacy, timings[0])
        for arm, timing, taken in zip(candidates, timings[1:], routes, strict=True)
    ]
    return CellRecord(
        run=request.run,
        cell=cell.name,
        optimizer=cell.optimizer.name,
        layout=cell.layout.name,
        residency=cell.residency,
        device=identity.type,
        device_name=identity.name,
        library=identity.library,
        parameters=len(shapes),
        elements=sum(torch.Size(shape).numel() for shape in shapes),
        state_bytes=state_bytes,
        cpu_divisor=cell.layout.cpu_divisor if identity.type == "cpu" else 1,
        protocol=request.protocol,
        seed=SEED,
        gradient_sets=GRADIENT_SETS,
        legacy=_legacy_record(legacy, timings[0], resident),
        candidates=candidate_records,
        link=merged(links) if links else None,
    )


class Phases:
    """What is being done and how many steps are, for whoever listens."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._phase = ""
        self._steps = 0
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        self._end()
        self._phase = phase
        self._report(phase, self._steps)

    def seconds(self) -> dict[str, float]:
        """What each phase took so far."""
        self._end()
        return {phase: round(taken, 2) for phase, taken in self._seconds.items()}

    def _end(self) -> None:
        now = time.perf_counter()
        if self._phase:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._since = now

    def stepped(self) -> None:
        self._steps += 1
        self._report(self._phase, self._steps)


def _measure_link(identity: Identity, progress: Phases) -> list[LinkRecord]:
    """One measurement on a GPU; none on the CPU, which has no link to itself."""
    if identity.type == "cpu":
        return []
    progress.enter("measuring the link")
    return [measure_link(identity.device)]


def _candidate_record(
    arm: Arm,
    timings: Timings,
    routes: dict[str, PathSummary],
    legacy: Arm,
    legacy_timings: Timings,
) -> CandidateRecord:
    return CandidateRecord(
        strategy=arm.name,
        optimizer_class=arm.class_name,
        paging=repr(arm.optimizer.paging),
        wall=spread(timings.wall_ms),
        ratio=ratio(legacy_timings.wall_ms, timings.wall_ms),
        timings=timings,
        managed_bytes=arm.managed_bytes,
        routes=routes,
        comparison=compare(legacy.optimizer, arm.optimizer),
    )


def _resident_steps(
    arms: Sequence[Arm], interleaving: Interleaving, repetitions: int, progress: Phases
) -> Timings | None:
    """Time legacy on state that is already there. All arms step, so that bits stay comparable."""
    if not arms[0].touching:
        return None
    progress.enter("measuring on resident state")
    for arm in arms:
        arm.touching = False
    return Timings.of(interleaving.measure(1, repetitions)[0])


def _legacy_record(arm: Arm, timings: Timings, resident: Timings | None) -> LegacyRecord:
    """Record legacy and, its last use being over, give back its managed memory."""
    managed_bytes = arm.managed_bytes
    freed_bytes = 0
    if arm.managed:
        torch.cuda.synchronize()
        freed_bytes = free_managed_state(arm.optimizer)
    if freed_bytes != managed_bytes:
        raise ManagedMemoryError(
            f"{freed_bytes:,} of legacy's {managed_bytes:,} managed bytes were freed"
        )
    return LegacyRecord(
        optimizer_class=arm.class_name,
        wall=spread(timings.wall_ms),
        timings=timings,
        managed_bytes=managed_bytes,
        freed_bytes=freed_bytes,
        resident=resident,
    )
