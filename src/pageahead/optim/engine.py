"""One optimizer's state and pipeline on one device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pageahead.device import Device
from pageahead.memory.arena import Arena
from pageahead.memory.layout import Chunk, pack
from pageahead.memory.ring import Ring, Slot
from pageahead.memory.transfer import ManagedTransfer, StreamedTransfer
from pageahead.optim.active import Active, GetConfig
from pageahead.optim.homes import Home
from pageahead.optim.paging import Paging
from pageahead.optim.plan import SLOTS, StepPlan, backward_slots, chunk_bytes, early_chunks
from pageahead.optim.rates import TYPICAL, rates_of
from pageahead.optim.update import launch
from pageahead.pipeline import Pipeline, Plan

__all__ = ["Engine", "Mode", "StateSource"]

logger = logging.getLogger("pageahead")


@dataclass(frozen=True, slots=True)
class Mode:
    """How a step moves paged state: the strategy, or what it fell back to, and the reason.

    `in_backward`: chunks are updated in the order in which backward is done with them.
    """

    path: str
    reason: str = ""
    in_backward: bool = False


class StateSource:
    """Hands out a new parameter's state tensors in the order bitsandbytes asks for them."""

    def __init__(self, device: Device, arena: Arena | None, home: Home, paging: Paging) -> None:
        self._device = device
        self._arena = arena
        self._paging = paging
        self._offsets = iter(pack(home.shape, home.shape.numel, home.offset)[0])

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the next state tensor, zeroed."""
        offset = next(self._offsets)
        if self._arena is not None:
            return self._arena.tensor_at(offset, shape, dtype)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        memory = self._device.managed(
            nbytes, allow_oversubscription=self._paging.allow_oversubscription
        )
        return memory.view(dtype).view(shape)


class Engine:
    """Moves and updates the parameters of one optimizer on one device."""

    def __init__(self, device: Device, optimizer_name: str, paging: Paging) -> None:
        self._device = device
        self._name = optimizer_name
        self._paging = paging
        streamed = paging.strategy == "streamed"
        self.arena = Arena(device) if streamed else None
        self.ring: Ring | None = None
        self._pipeline = Pipeline(
            device,
            fetch="fetch" if streamed else "prefetch",
            overlap=paging.overlaps,
        )
        self.mode = Mode(paging.strategy)
        """How the last step moved paged state."""
        self._warned = False  # of an obstacle to lookahead, once
        self._plan: tuple[StepPlan, Plan, Mode] | None = None
        self._primed_versions: list[int] | None = None
        self._actives: Sequence[Active] = ()
        self._get_config: GetConfig | None = None

    @property
    def busy(self) -> bool:
        """Whether chunks of a step are on their way: nobody may move state now."""
        early = self._primed_versions is not None  # fetched, but for a step that is yet to come
        return self._pipeline.is_open and not early

    def reserve(self, homes: Sequence[Home]) -> None:
        """Make room in the arena for parameters that get state now, in step order.

        Raises:
            HostMemoryError: there is not enough host memory; nothing was allocated.
        """
        if self.arena is None or not homes:
            return
        end = 0
        for home in homes:
            home.offset = end
            end = pack(home.shape, home.shape.numel, end)[1]
        base = self.arena.grow(end)
        for home in homes:
            home.offset += base
            home.placed = True

    def release_last(self) -> None:
        """Give back what the last `reserve` took."""
        if self.arena is not None:
            self.arena.drop_last()

    def source(self, home: Home) -> StateSource:
        """Where a paged parameter's state tensors come from."""
        return StateSource(self._device, self.arena, home, self._paging)

    def forget_plan(self) -> None:
        """Drop prepared views, of state tensors that were replaced or for another set of them."""
        self._plan = None
        self._primed_versions = None
        self._pipeline.forget_plan()

    def drop_ring(self) -> int:
        """Let go of the slots until a step needs them again; return how many bytes they had."""
        nbytes = 0 if self.ring is None else self.ring.nbytes
        if nbytes:
            self._pipeline.abandon()  # slots that were filled early
            self.settle()
            self.forget_plan()
            self.ring = None
        return nbytes

    def settle(self) -> None:
        """Block the host until state in the arena is complete."""
        self._pipeline.settle()

    def anticipate(self) -> None:
        """Send for the first chunks of the last step's plan, which is likely to be the next's.

        Only copies: `lookahead` prefetches as its design says, exactly one parameter ahead.
        """
        if self._plan is None or self._device.capturing():
            return
        _, moves, _ = self._plan
        if moves.transfer.copies:
            self._pipeline.prime(moves)

    def abandon(self) -> None:
        """Take `anticipate` back: no step follows."""
        self._pipeline.abandon()

    def step(
        self,
        actives: Sequence[Active],
        states: Mapping[torch.Tensor, dict[str, Any]],
        get_config: GetConfig,
        *,
        several_devices: bool,
    ) -> None:
        """Update every active parameter. After an exception nothing is left in flight.

        Args:
            actives: in the order of their updates; state has been made for all.
            states: by parameter.
            get_config: bitsandbytes', for this step.
            several_devices: whether the step updates parameters on others, too.
        """
        self._actives, self._get_config = actives, get_config
        try:
            mode = self._mode_for(actives, several_devices)
            plan, moves = self._plan_for(actives, states, mode)
            self._pipeline.begin(moves, lambda chunk, slot: self._update(plan, chunk, slot))
            with self._device.computing():
                for chunk in plan.chunks:
                    self._pipeline.advance(chunk)
            self._pipeline.finish()
        except BaseException:
            self._pipeline.finish(failed=True)
            raise
        finally:
            self._actives, self._get_config = (), None

    # --- updates in backward ----------------------------------------------------------------------

    def open(
        self,
        actives: Sequence[Active],
        states: Mapping[torch.Tensor, dict[str, Any]],
        get_config: GetConfig,
    ) -> StepPlan:
        """Begin a step whose chunks are updated one by one, as `update` is called.

        Args:
            actives: in the order in which their gradients are expected. They have homes; their
                state need not be made before their chunk is updated.
            states: by parameter, looked up when a chunk is updated.
            get_config: bitsandbytes', for this step.
        """
        self._actives, self._get_config = actives, get_config
        if self._primed_versions is not None and self._primed_versions != self._versions():
            self._pipeline.abandon()  # state was changed in place after it was fetched
        self._primed_versions = None
        mode = Mode(self._paging.strategy, in_backward=True)
        plan, moves = self._plan_for(actives, states, mode)
        moves.fresh.update(
            chunk.index
            for chunk in plan.chunks
            if not any(states.get(plan.parameters[part.item]) for part in chunk.slices)
        )
        self._pipeline.begin(moves, lambda chunk, slot: self._update(plan, chunk, slot))
        return plan

    def update(self, chunk: Chunk) -> None:
        """Update one chunk of an open step; its gradients come from the current stream."""
        caller = self._device.caller_stream()
        # compute → compute: already in order.
        ready = None if caller is self._device.compute_stream() else caller.record()
        with self._device.computing():
            self._pipeline.advance(chunk, ready=ready)

    def keep(self, gradient: torch.Tensor) -> None:
        """Call before a gradient is let go of whose update is launched."""
        self._device.keep(gradient)

    def close(self, *, failed: bool = False) -> None:
        """Finish an open step; chunks that were not updated are as they were before."""
        if self._plan is not None:
            self._plan[1].fresh.clear()
        try:
            self._pipeline.finish(failed=failed)
        except BaseException:
            self._pipeline.finish(failed=True)  # half closed, something would be left in flight
            raise
        finally:
            self._actives, self._get_config = (), None

    def fetch_early(self) -> None:
        """Fill the ring for the next backward, while forward runs."""
        if self._plan is None or not self._plan[2].in_backward or self._device.capturing():
            return
        if self._primed_versions is not None:
            return  # full already: no backward came in between
        self._primed_versions = self._versions()
        try:
            self._pipeline.prime(self._plan[1], self._plan[1].depth)
        except BaseException:
            self._primed_versions = None
            self._pipeline.abandon()
            raise

    def _versions(self) -> list[int]:
        """Rise when somebody else changes state in place; our own copies leave them."""
        plan = self._plan
        if plan is None:
            return []
        return [tensor._version for home in plan[0].homes for tensor in home.tensors]

    # --- plans ------------------------------------------------------------------------------------

    def _update(self, plan: StepPlan, chunk: Chunk, slot: Slot | None) -> None:
        assert self._get_config is not None
        for number, launches in plan.views(chunk, slot):
            active = self._actives[number]
            for views in launches:
                if active.config is None:
                    active.open(self._get_config)
                launch(self._name, active, views)

    def _plan_for(
        self,
        actives: Sequence[Active],
        states: Mapping[torch.Tensor, dict[str, Any]],
        mode: Mode,
    ) -> tuple[StepPlan, Plan]:
        parameters = [active.parameter for active in actives]
        if self._plan is not None and self._plan[2] == mode and self._plan[0].is_for(parameters):
            return self._plan[:2]
        self.forget_plan()
        self.mode = mode
        plan, moves = self._build(parameters, _homes_of(actives), states, mode)
        self._plan = plan, moves, mode
        return plan, moves

    def _build(
        self,
        parameters: Sequence[torch.Tensor],
        homes: Sequence[Home],
        states: Mapping[torch.Tensor, dict[str, Any]],
        mode: Mode,
    ) -> tuple[StepPlan, Plan]:
        if self.arena is None:
            plan = StepPlan.build(parameters, homes, states, target=0, limit=0)
            transfer = ManagedTransfer(
                self._device,
                lambda chunk: [
                    tensor
                    for part in chunk.slices
                    if plan.homes[part.item].paged
                    for tensor in plan.homes[part.item].tensors
                ],
            )
            depth = 1 if mode.path == "lookahead" else 0
            return plan, Plan(plan.chunks, transfer, None, depth)
        moved = [home.shape for home in homes if home.paged]
        rates = rates_of(self._device, self._name) if moved else TYPICAL
        target, limit = chunk_bytes(
            moved, self._paging.staging, rates, in_backward=mode.in_backward
        )
        plan = StepPlan.build(
            parameters, homes, states, target=target, limit=limit, apart=mode.in_backward
        )
        slots = SLOTS
        if mode.in_backward:
            total = sum(shape.nbytes for shape in moved)
            slots = backward_slots(plan.slot_bytes, total, self._paging.staging)
        ring = self._ring_of(plan.slot_bytes, slots)
        # In backward one slot is left for a chunk that comes before it was expected.
        depth = slots - mode.in_backward if ring is not None else 1
        moves = Plan(
            plan.chunks,
            StreamedTransfer(self._device, self.arena),
            ring,
            depth,
            early=early_chunks(len(parameters), plan.slot_bytes, rates),
        )
        return plan, moves

    def _ring_of(self, slot_bytes: int, slots: int) -> Ring | None:
        known = self.ring
        if slot_bytes and (
            known is None or known.slot_bytes < slot_bytes or len(known.slots) < slots
        ):
            self.ring = known = None  # the old one goes first: both together would raise the peak
            self.ring = Ring(self._device, slots, slot_bytes)
        return self.ring

    def _mode_for(self, actives: Sequence[Active], several_devices: bool) -> Mode:
        strategy = self._paging.strategy
        if strategy != "lookahead":
            return Mode(strategy)
        if several_devices:
            return Mode("sequential", "parameters are on several devices")
        paged = sum(home.paged for home in _homes_of(actives))
        if paged == 1:
            return Mode("sequential", "one active parameter: there is no next one to look ahead to")
        obstacle = self._device.lookahead_obstacle() if paged else None
        if obstacle is not None:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"strategy='lookahead' runs as 'sequential': {obstacle}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return Mode("sequential", obstacle)
        return Mode("lookahead")


def _homes_of(actives: Sequence[Active]) -> list[Home]:
    return [active.home for active in actives if active.home is not None]
