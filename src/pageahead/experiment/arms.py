"""The optimizers of a cell, all over the same parameters and the same gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bitsandbytes
import torch

import pageahead
from pageahead.experiment.cells import DeviceType, Optimizer, Residency
from pageahead.experiment.evidence import PathSummary
from pageahead.experiment.legacy import managed_state
from pageahead.experiment.residency import HostResidency
from pageahead.optim.routing import PAGED_NUMEL, Route

__all__ = [
    "MANAGED_STRATEGIES",
    "Arm",
    "Gradients",
    "RouteError",
    "Workload",
    "by_path",
    "check_routes",
]

#: Strategies whose state is in managed memory, as legacy's is.
MANAGED_STRATEGIES = frozenset({"lookahead", "sequential"})

Gradients = Sequence[Sequence[torch.Tensor]]


class RouteError(RuntimeError):
    """State did not take the path that is being measured."""


class Workload:
    """Seeded FP16 parameters and gradients.

    Attributes:
        gradients: several sets; all optimizers take step ``i`` with the same one, which they read
            and do not change.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], device: torch.device, seed: int, sets: int
    ) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._initial = [self._normal(shape, scale=0.02) for shape in shapes]
        self.gradients: Gradients = [
            [self._normal(shape, scale=0.01) for shape in shapes] for _ in range(sets)
        ]

    def parameters(self) -> list[torch.nn.Parameter]:
        """The same initial values each time, in memory of their own."""
        return [torch.nn.Parameter(values.clone()) for values in self._initial]

    def _normal(self, shape: tuple[int, ...], scale: float) -> torch.Tensor:
        device = self._generator.device
        values = torch.randn(shape, generator=self._generator, device=device, dtype=torch.float16)
        return values.mul_(scale)


class Arm:
    """One optimizer of a cell: legacy or one of our strategies.

    Attributes:
        name: ``legacy`` or the strategy.
        optimizer: the optimizer itself.
        managed: whether its paged state is in CUDA managed memory.
        path: the route that its paged state has to have taken.
        touching: whether managed state is brought home to the host before each step.
    """

    def __init__(
        self,
        name: str,
        optimizer: Any,
        gradients: Gradients,
        *,
        managed: bool,
        residency: Residency = "host",
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self._parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._gradients = gradients
        self.managed = managed
        self.path = _path(name, residency)
        self.touching = managed and residency == "host"
        self._residency: HostResidency | None = None

    @classmethod
    def legacy(
        cls,
        optimizer: Optimizer,
        workload: Workload,
        device: DeviceType,
        residency: Residency = "host",
    ) -> Arm:
        """bitsandbytes' own class, as it is."""
        kind = getattr(bitsandbytes.optim, optimizer.legacy_on(device))
        managed = device == "cuda" and optimizer.legacy_pages
        return cls(
            "legacy",
            kind(workload.parameters()),
            workload.gradients,
            managed=managed,
            residency=residency,
        )

    @classmethod
    def candidate(
        cls,
        optimizer: Optimizer,
        strategy: str,
        workload: Workload,
        device: DeviceType,
        residency: Residency = "host",
    ) -> Arm:
        """Ours, with none of the state staying on the device.

        With the strategy ``resident``, and where `residency` is that, all of what is not managed.
        """
        kind = getattr(pageahead, optimizer.candidate)
        paging = pageahead.Paging(
            strategy="streamed" if strategy == "resident" else strategy,
            hbm_budget=1.0 if _path(strategy, residency) == "resident" else 0,
            write_back="before_return",
            allow_oversubscription=residency == "oversubscribed",
        )
        return cls(
            strategy,
            kind(workload.parameters(), paging=paging),
            workload.gradients,
            managed=device == "cuda" and strategy in MANAGED_STRATEGIES,
            residency=residency,
        )

    def prepare(self, turn: int) -> None:
        """Set this step's gradients and, if `touching`, bring managed state home to the host."""
        gradients = self._gradients[turn % len(self._gradients)]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        if self.touching:
            self.bring_home()

    def bring_home(self) -> None:
        """Have the CPU touch every page of managed state, if there is any."""
        if not self.managed or not self.optimizer.state:
            return
        if self._residency is None:
            self._residency = HostResidency(self._managed_tensors())
        torch.cuda.synchronize()
        self._residency.restore()
        torch.cuda.synchronize()

    def step(self) -> None:
        self.optimizer.step()

    @property
    def managed_bytes(self) -> int:
        """Bytes of managed memory that the state takes, once there is state."""
        return sum(tensor.nbytes for tensor in self._managed_tensors()) if self.managed else 0

    @property
    def class_name(self) -> str:
        kind = type(self.optimizer)
        return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"

    def _managed_tensors(self) -> list[torch.Tensor]:
        if self.name == "legacy":
            return managed_state(self.optimizer)
        # Managed memory looks like the CPU's to PyTorch, while the parameters are on the GPU.
        return [
            tensor
            for state in self.optimizer.state.values()
            for name, tensor in state.items()
            if name in ("state1", "state2") and tensor.device.type == "cpu"
        ]


def _path(strategy: str, residency: Residency) -> str:
    """The route that paged state takes: only what is streamed has another when it stays."""
    return "resident" if strategy == "streamed" and residency == "resident" else strategy


def check_routes(
    routes: Sequence[Route], strategy: str, expected_bytes: int
) -> dict[str, PathSummary]:
    """Summarize routes by path, having checked that the paged state took the path `strategy`.

    Raises:
        RouteError: another number of bytes than `expected_bytes` took it; says which path they took
            instead and why.
    """
    summary = by_path(routes)
    found = sum(
        route.state_bytes
        for route in routes
        # Small parameters are resident, whatever is measured.
        if route.path == strategy and (strategy != "resident" or route.numel >= PAGED_NUMEL)
    )
    if found != expected_bytes:
        taken_paths = "; ".join(
            f"{path}: {one.state_bytes:,} bytes ({', '.join(one.reasons)})"
            for path, one in summary.items()
        )
        raise RouteError(
            f"{expected_bytes:,} bytes of state should be {strategy}, {found:,} are. {taken_paths}"
        )
    return summary


def by_path(routes: Sequence[Route]) -> dict[str, PathSummary]:
    """Summarize routes by path."""
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
