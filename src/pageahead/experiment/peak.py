"""Device memory of one arm, in a process that has nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import torch

from pageahead.device import managed
from pageahead.experiment.arms import Arm, Workload, check_routes
from pageahead.experiment.cells import cell_named
from pageahead.experiment.evidence import PeakRecord
from pageahead.experiment.identity import identify
from pageahead.experiment.legacy import free_managed_state
from pageahead.experiment.measure import GRADIENT_SETS, SEED, Phases, Report
from pageahead.experiment.messages import PeakRequest

__all__ = ["PeakError", "Watch", "measure_peak", "spend_batch"]

EVERY_SECONDS = 0.001
GRAIN = 2 << 20
"""The least that the driver takes for managed memory."""
LARGEST_BATCH = 256 << 20


class PeakError(RuntimeError):
    """Peak memory was asked for where there is no device memory, or of more than one arm."""


class Watch:
    """Asks again and again how much is taken, from a thread of its own, while it is entered.

    Args:
        used: the bytes taken now.
        every: seconds between two looks.

    Attributes:
        peak: the most that was seen.
        samples: how often was looked.
    """

    def __init__(self, used: Callable[[], int], every: float) -> None:
        self._used = used
        self._every = every
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pageahead-peak", daemon=True)
        self.peak = 0
        self.samples = 0

    def look(self) -> None:
        """Look now; from any thread."""
        with self._lock:
            self.peak = max(self.peak, self._used())
            self.samples += 1

    def __enter__(self) -> Watch:
        self.look()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self.look()

    def _run(self) -> None:
        while not self._done.wait(self._every):
            self.look()


def measure_peak(request: PeakRequest, report: Report) -> PeakRecord:
    """Run the protocol's warm-up steps of one arm and return the most that was taken.

    Steps are not timed: the thread that looks would be in their way.

    Raises:
        IdentityError: this is not the device that was asked for.
        PeakError: see there.
        RouteError: the strategy's state took another path.
    """
    identity = identify(request.device)
    if identity.type != "cuda" or len(request.strategies) != 1:
        raise PeakError(
            f"peak memory is of one arm on a GPU, not of {request.strategies} on {identity.type}"
        )
    (name,) = request.strategies
    cell = cell_named(request.cell)
    progress = Phases(report)
    progress.enter("making parameters and gradients")
    torch.cuda.init()

    def used() -> int:
        return _used(identity.device)

    def take(nbytes: int) -> object:
        return managed.allocate(nbytes, identity.device, allow_oversubscription=False)

    take(GRAIN)  # loads code, once
    spend_batch(used, take)
    before = used()
    torch.cuda.reset_peak_memory_stats(identity.device)
    with Watch(used, EVERY_SECONDS) as watch:
        workload = Workload(cell.layout.shapes_on("cuda"), identity.device, SEED, GRADIENT_SETS)
        if name == "legacy":
            arm = Arm.legacy(cell.optimizer, workload, "cuda", cell.residency)
        else:
            arm = Arm.candidate(cell.optimizer, name, workload, "cuda", cell.residency)
        progress.enter("watching memory")
        for turn in range(request.protocol.warmups):
            arm.prepare(turn)
            arm.step()
            torch.cuda.synchronize()
            watch.look()
            progress.stepped()
    ready = spend_batch(used, take)  # with the arm's own state still there
    staging = 0
    if name == "legacy":
        if arm.managed:
            free_managed_state(arm.optimizer)
    else:
        check_routes(arm.optimizer.routes(), arm.path, cell.state_bytes("cuda"))
        staging = arm.optimizer.residency().slots
    return PeakRecord(
        run=request.run,
        cell=cell.name,
        arm=name,
        device="cuda",
        device_name=identity.name,
        library=identity.library,
        steps=request.protocol.warmups,
        samples=watch.samples,
        driver_before=before,
        driver_peak=watch.peak,
        driver_ready=ready,
        torch_peak=int(torch.cuda.max_memory_allocated(identity.device)),
        staging=staging,
    )


def spend_batch(used: Callable[[], int], take: Callable[[int], object]) -> int:
    """Leave nothing of what the driver holds ready for managed memory; return how much that was.

    It takes memory for managed pages 128 MiB at a time (driver 580, H200), for all processes: what
    is left of the last batch counts as used, and the next process has it for nothing. So before an
    arm nothing may be left, and what is left after it, it did not need.

    Args:
        used: the bytes of the device that are taken now.
        take: makes so many bytes of managed memory on the device; they go with what it returns.
    """
    held = []
    before = used()
    for count in range(LARGEST_BATCH // GRAIN):
        held.append(take(GRAIN))
        grown = used() - before
        if grown > 0:
            held += [take(GRAIN) for _ in range(grown // GRAIN - 1)]
            return count * GRAIN
    return 0  # this driver does not show what managed memory takes


def _used(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)
