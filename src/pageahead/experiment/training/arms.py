"""One way of training at work: its model, its optimizer, and the memory around it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import bitsandbytes
import torch

import pageahead
from pageahead.experiment.arms import RouteError, by_path
from pageahead.experiment.evidence import Occupancy, PathSummary
from pageahead.experiment.training.cells import ArmSpec, TrainingCell
from pageahead.experiment.training.gpt import GPT

__all__ = ["BATCHES", "LEARNING_RATE", "Arm", "MemoryWatch", "batches"]

BATCHES = 4
LEARNING_RATE = 1e-4


def batches(
    vocabulary: int, sequences: int, length: int, device: torch.device, seed: int
) -> list[torch.Tensor]:
    """Random tokens: what goes in, and the one that follows each."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(vocabulary, (sequences, length + 1), generator=generator).to(device)
        for _ in range(BATCHES)
    ]


class MemoryWatch:
    """What one arm's iterations do to the GPU's memory, as PyTorch and the driver count it."""

    def __init__(self, device: torch.device, parameter_bytes: int) -> None:
        self._device = device
        self._own = parameter_bytes
        self._before = 0
        self._highest: Occupancy | None = None

    def begin(self) -> None:
        """Before an iteration."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def end(self) -> None:
        """After it, when its own stream has nothing left to do."""
        process_peak = torch.cuda.max_memory_allocated(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        found = Occupancy(
            own_peak=process_peak - self._before + self._own,
            process_peak=process_peak,
            driver_used=total - free,
        )
        # The first iteration leaves state and slots behind.
        self._own += torch.cuda.memory_allocated(self._device) - self._before
        if self._highest is None:
            # State was made between blocks that the backward pass had just given back. Hand what is
            # whole of those to the driver, so that it can serve the ways that are yet to come.
            torch.cuda.empty_cache()
        known = self._highest or found
        self._highest = Occupancy(
            own_peak=max(known.own_peak, found.own_peak),
            process_peak=max(known.process_peak, found.process_peak),
            driver_used=max(known.driver_used, found.driver_used),
        )

    @property
    def occupancy(self) -> Occupancy | None:
        return self._highest


class Arm:
    """One way of training. Its step is an iteration: forward, backward, update, zero_grad.

    Attributes:
        spec: which.
        optimizer: None for the model alone.
    """

    def __init__(
        self,
        spec: ArmSpec,
        cell: TrainingCell,
        model: GPT,
        texts: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        """`model` is copied, unless `spec` is the baseline or does not change it."""
        self.spec = spec
        self._model = model if spec.way in ("hbm", "model") else copy.deepcopy(model)
        self._texts = texts
        self._text = texts[0]
        self._cuda = device.type == "cuda"
        parameters = list(self._model.parameters())
        self.optimizer = _optimizer(spec, cell, parameters)
        nbytes = sum(parameter.nbytes for parameter in parameters)
        self._watch = MemoryWatch(device, nbytes) if self._cuda else None

    def prepare(self, turn: int) -> None:
        self._text = self._texts[turn % len(self._texts)]
        if self._watch is not None:
            self._watch.begin()

    def step(self) -> None:
        self._model(self._text).backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self._model.zero_grad()  # the gradients go: the next backward pass makes new ones
        if self._cuda:
            torch.cuda.current_stream().synchronize()

    def stepped(self) -> None:
        """After `step`, outside of what is timed."""
        if self._watch is not None:
            self._watch.end()

    @property
    def occupancy(self) -> Occupancy | None:
        return self._watch.occupancy if self._watch is not None else None

    @property
    def class_name(self) -> str | None:
        if self.optimizer is None:
            return None
        kind = type(self.optimizer)
        return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"

    @property
    def paging(self) -> str | None:
        return repr(self.optimizer.paging) if self.spec.ours else None

    @property
    def state_bytes(self) -> int:
        """Bytes of both moments of every parameter, wherever they are."""
        if self.optimizer is None:
            return 0
        names = ("state1", "state2", "exp_avg", "exp_avg_sq")
        return sum(
            state[name].nbytes
            for state in self.optimizer.state.values()
            for name in names
            if name in state
        )

    @property
    def slot_bytes(self) -> int:
        """Device memory that streamed state passes through."""
        if not self.spec.ours:
            return 0
        if hasattr(self.optimizer, "residency"):
            return int(self.optimizer.residency().slots)
        rings = [engine.ring for engine in self.optimizer._engines.values()]
        return sum(ring.nbytes for ring in rings if ring is not None)

    def routes(self) -> dict[str, PathSummary]:
        """Which state took which path; empty for optimizers without any choice.

        Raises:
            RouteError: state of ours is neither streamed nor on the device.
        """
        if not self.spec.ours:
            return {}
        taken = by_path(self.optimizer.routes())
        if set(taken) - {"streamed", "resident"}:
            reasons = {path: one.reasons for path, one in taken.items()}
            raise RouteError(f"{self.spec.name}: state should be streamed or resident: {reasons}")
        return taken


def _optimizer(spec: ArmSpec, cell: TrainingCell, parameters: list[torch.nn.Parameter]) -> Any:
    if spec.way == "model":
        return None
    if spec.way == "torch":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    if spec.way == "hbm":
        return bitsandbytes.optim.AdamW(parameters, lr=LEARNING_RATE, optim_bits=cell.bits)
    assert spec.budget is not None
    paging = pageahead.Paging(
        strategy="streamed",
        hbm_budget=spec.budget,
        in_backward=spec.way == "during",
        free_grads=False,
    )
    return pageahead.PagedAdamW(parameters, lr=LEARNING_RATE, optim_bits=cell.bits, paging=paging)
