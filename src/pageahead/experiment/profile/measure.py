"""One arm of one cell, in the process made for it, with somebody listening."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from pageahead.experiment.arms import MANAGED_STRATEGIES, Arm, Workload, check_routes
from pageahead.experiment.cells import Cell, cell_named
from pageahead.experiment.identity import Identity, identify
from pageahead.experiment.legacy import free_managed_state
from pageahead.experiment.measure import (
    GRADIENT_SETS,
    SEED,
    ManagedMemoryError,
    Phases,
    Report,
)
from pageahead.experiment.messages import ProfileRequest
from pageahead.experiment.profile import cpu, cupti
from pageahead.experiment.profile.analysis import within
from pageahead.experiment.profile.collector import Collector, NullCollector, ProfileError
from pageahead.experiment.profile.nsys import settling, stepping
from pageahead.experiment.profile.records import ProfiledStep, ProfileRecord

__all__ = ["measure_profile"]


def measure_profile(request: ProfileRequest, report: Report) -> ProfileRecord:
    """Run the warm-ups, then profile as many steps as the protocol has repetitions.

    The state is where the cell says at the beginning of each step, as in a measurement.

    Raises:
        IdentityError: this is not the device that was asked for.
        ProfileError: nothing can be recorded here, or not of this request.
        RouteError: the strategy's state took another path.
        ManagedMemoryError: state that should be in managed memory is not.
    """
    identity = identify(request.device)
    cell = cell_named(request.cell)
    if len(request.strategies) != 1 or cell.residency == "oversubscribed":
        raise ProfileError(
            f"a profile is of one arm whose state fits in memory, not of {request.strategies} in "
            f"{cell.name}"
        )
    (name,) = request.strategies
    managed = identity.type == "cuda" and (
        cell.optimizer.legacy_pages if name == "legacy" else name in MANAGED_STRATEGIES
    )
    progress = Phases(report)
    progress.enter("making parameters and gradients")
    # Before anything else: counters of managed memory see what is allocated after them.
    collector = _collector(request, identity, managed=managed)
    try:
        return _profile(request, identity, cell, name, collector, progress)
    finally:
        collector.close()


def _collector(request: ProfileRequest, identity: Identity, *, managed: bool) -> Collector:
    if request.mark:
        return NullCollector()
    if identity.type == "cpu":
        return cpu.CpuCollector()
    return cupti.CuptiCollector(identity.device, managed=managed, cupti=cupti.load())


def _profile(
    request: ProfileRequest,
    identity: Identity,
    cell: Cell,
    name: str,
    collector: Collector,
    progress: Phases,
) -> ProfileRecord:
    state_bytes = cell.state_bytes(identity.type)
    shapes = cell.layout.shapes_on(identity.type)
    workload = Workload(shapes, identity.device, SEED, GRADIENT_SETS)
    if name == "legacy":
        arm = Arm.legacy(cell.optimizer, workload, identity.type, cell.residency)
    else:
        arm = Arm.candidate(cell.optimizer, name, workload, identity.type, cell.residency)
    stepper = _Stepper(request, arm, collector, identity, progress)
    progress.enter("warming up")
    for turn in range(request.protocol.warmups):
        arm.prepare(turn)
        arm.step()
        progress.stepped()
    if name != "legacy":
        check_routes(arm.optimizer.routes(), arm.path, state_bytes)
    if arm.managed and arm.managed_bytes != state_bytes:
        raise ManagedMemoryError(
            f"{name} has {arm.managed_bytes:,} bytes of managed state, not {state_bytes:,}"
        )
    progress.enter("profiling")
    steps = stepper.run()
    untraced: list[float] = []
    if not request.mark:
        progress.enter("timing steps without a profiler")
        collector.close()
        untraced = stepper.time(request.protocol.repetitions)
    record = ProfileRecord(
        run=request.run,
        cell=cell.name,
        arm=name,
        device=identity.type,
        device_name=identity.name,
        library=identity.library,
        source=collector.source,
        residency=cell.residency,
        state_bytes=state_bytes,
        managed=arm.managed,
        warmups=request.protocol.warmups,
        steps=steps,
        untraced_ms=untraced,
        driver_peak=stepper.driver_peak,
        torch_peak=int(torch.cuda.max_memory_allocated(identity.device))
        if identity.type == "cuda"
        else None,
    )
    if name == "legacy" and arm.managed:
        free_managed_state(arm.optimizer)
    return record


class _Stepper:
    """Steps of one arm, each from an idle device, and what was recorded of each."""

    def __init__(
        self,
        request: ProfileRequest,
        arm: Arm,
        collector: Collector,
        identity: Identity,
        progress: Phases,
    ) -> None:
        self._request = request
        self._arm = arm
        self._collector = collector
        self._device = identity.device
        self._progress = progress
        self._turn = request.protocol.warmups
        self.driver_peak: int | None = None

    def run(self) -> list[ProfiledStep]:
        self._collector.take()  # what the warm-ups left
        times = self._steps(self._request.protocol.repetitions)
        activities = self._collector.take()
        return [
            ProfiledStep(
                wall_ms=round(wall_ms, 4),
                returned=returned - begin,
                settled=settled - begin,
                activities=within(activities, begin, settled),
            )
            for begin, returned, settled, wall_ms in times
        ]

    def time(self, count: int) -> list[float]:
        """Wall times of `count` more steps, in milliseconds."""
        return [round(wall_ms, 4) for *_, wall_ms in self._steps(count)]

    def _steps(self, count: int) -> list[tuple[int, int, int, float]]:
        times = []
        gc.collect()
        gc.disable()
        try:
            for _ in range(count):
                times.append(self._step(self._turn))
                self._turn += 1
                self._look()
                self._progress.stepped()
        finally:
            gc.enable()
        return times

    def _step(self, turn: int) -> tuple[int, int, int, float]:
        """Begin, return and end on the collector's clock; milliseconds on the host's."""
        self._arm.prepare(turn)
        synchronize = _synchronizer(self._device)
        synchronize()
        names = (self._request.cell, self._arm.name, turn)
        with _range(stepping(*names), self._device):
            begin = self._collector.now()
            begun = time.perf_counter_ns()
            self._arm.step()
            ended = time.perf_counter_ns()
            returned = self._collector.now()
        with _range(settling(*names), self._device):
            synchronize()
            settled = self._collector.now()
        return begin, returned, settled, (ended - begun) / 1e6

    def _look(self) -> None:
        """Not by a thread beside the steps: it would be in their way."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self.driver_peak = max(self.driver_peak or 0, int(total - free))


def _synchronizer(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


class _range:
    """A named range for Nsight Systems, where there is CUDA."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._on = device.type == "cuda"

    def __enter__(self) -> None:
        if self._on:
            torch.cuda.nvtx.range_push(self._name)

    def __exit__(self, *error: object) -> None:
        if self._on:
            torch.cuda.nvtx.range_pop()
