"""Training loops as data, and what bitsandbytes makes of them.

A scenario says what happens between an optimizer and its surroundings: steps from one stream or
another, with some gradients absent, an update that fails, a checkpoint saved or loaded. It is run
on the recording device (`tests.pipeline.recorded`) and on a GPU (`tests.cuda.test_poison`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pageahead import Paging
from pageahead.optim import engine, paging, plan, routing, states
from pageahead.optim.active import Active, GetConfig
from pageahead.optim.paged import PagedOptimizer
from tests.support import legacy, ours

PAGED_NUMEL = 512
"""From so many elements on state is paged here, instead of 100,000."""


@dataclass(frozen=True)
class Step:
    """A step over some parameters.

    Attributes:
        active: positions of the parameters that have a gradient; None for all.
        stream: the caller's stream that it is called on.
        fails_at: how many parameters are updated before the next update raises; None for all.
        backward: positions whose gradients come one by one, each announced by its hook, before
            ``step()``; None for a step without hooks.
        backward_on: the stream that they come on, if it is another.
        saves: after the first half of them ``state_dict()`` is called, and the host reads.
        abandoned: no ``step()`` follows, but ``zero_grad()``.
    """

    active: tuple[int, ...] | None = None
    stream: str = "caller"
    fails_at: int | None = None
    backward: tuple[int, ...] | None = None
    backward_on: str | None = None
    saves: bool = False
    abandoned: bool = False


@dataclass(frozen=True)
class Save:
    """``state_dict()`` right here, whose tensors the host then reads."""


@dataclass(frozen=True)
class Load:
    """``load_state_dict()`` of what was saved last."""


@dataclass(frozen=True)
class Refused:
    """A ``step()`` that raises before it changes anything.

    Attributes:
        capturing: because a graph is being captured; otherwise because a gradient is sparse.
    """

    capturing: bool = False


Action = Step | Save | Load | Refused


@dataclass(frozen=True)
class Scenario:
    """An optimizer and what happens to it.

    Attributes:
        name: for people.
        numels: the parameters; those under `PAGED_NUMEL` elements are resident.
        actions: what happens, in order.
        optimizer: one of the twelve classes.
        strategy, write_back, hbm_budget: of `Paging`.
        twice: positions of parameters that are listed a second time, at the end.
        chunk: bytes that a chunk is to have.
        staging: bytes of the ring, or None.
        slots: of the ring.
        in_backward, free_grads: of `Paging`.
    """

    name: str
    numels: tuple[int, ...]
    actions: tuple[Action, ...] = (Step(), Step(), Step())
    optimizer: str = "PagedAdamW8bit"
    strategy: str = "streamed"
    write_back: str = "before_return"
    hbm_budget: float = 0.0
    twice: tuple[int, ...] = ()
    chunk: int = 4096
    staging: int | None = None
    slots: int = 4
    in_backward: bool = False
    free_grads: bool = False

    @contextmanager
    def scaled_down(self) -> Iterator[None]:
        """Sizes a few hundred times smaller than pageahead's: the same plans, in less time."""
        with pytest.MonkeyPatch.context() as patch:
            for module in (routing, states):
                patch.setattr(module, "PAGED_NUMEL", PAGED_NUMEL)
            for module in (plan, engine):
                patch.setattr(module, "SLOTS", self.slots)
            patch.setattr(plan, "SMALLEST_CHUNK", self.chunk)
            patch.setattr(plan, "LARGEST_CHUNK", self.chunk)
            patch.setattr(paging, "MINIMUM_STAGING", 1)
            yield

    def make_parameters(self, device: str = "cpu") -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        return [
            torch.nn.Parameter(torch.randn(numel, generator=generator).to(device))
            for numel in self.numels
        ]

    def gradient(self, step: int, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1_000 * step + number)
        return torch.randn(self.numels[number], generator=generator)

    def active(self, step: Step) -> tuple[int, ...]:
        return tuple(range(len(self.numels))) if step.active is None else step.active

    def make_optimizer(self, parameters: list[torch.nn.Parameter]) -> PagedOptimizer:
        settings = Paging(
            strategy=self.strategy,
            write_back=self.write_back,
            hbm_budget=self.hbm_budget,
            staging=self.staging,
            in_backward=self.in_backward,
            free_grads=self.free_grads,
        )
        return ours(self.optimizer, self._listed(parameters), **self._kwargs(), paging=settings)

    def make_legacy(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """bitsandbytes' optimizer without paging."""
        return legacy(self.optimizer, self._listed(parameters), **self._kwargs())

    def _listed(self, parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        return [*parameters, *(parameters[number] for number in self.twice)]

    def _kwargs(self) -> dict[str, Any]:
        return {"lr": 1e-2, "min_8bit_size": 256} if "8bit" in self.optimizer else {"lr": 1e-2}


class UpdateError(Exception):
    """What a scenario's failing update raises."""


@contextmanager
def failing(count: int | None) -> Iterator[None]:
    """Let the update of the parameter after the first `count` raise, before it does anything."""
    opened = 0
    really = Active.open

    def open_(self: Active, get_config: GetConfig) -> None:
        nonlocal opened
        if opened == count:
            raise UpdateError
        opened += 1
        really(self, get_config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Active, "open", open_)
        yield


Snapshot = dict[str, torch.Tensor]
"""Parameters and state tensors by name, copied to ordinary memory."""


def snapshot(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> Snapshot:
    taken: Snapshot = {}
    for number, parameter in enumerate(parameters):
        taken[f"parameter {number}"] = parameter.detach().cpu().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                taken[f"{key} of {number}"] = value.detach().cpu().clone()
    return taken


def differences(one: Snapshot, other: Snapshot) -> list[str]:
    """Names of what differs in a bit; what only one of them has does not count."""
    return [
        key
        for key in sorted(one.keys() & other.keys())
        if not torch.equal(_bytes(one[key]), _bytes(other[key]))
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def expected(scenario: Scenario, device: str = "cpu") -> list[Snapshot]:
    """What bitsandbytes' optimizer without paging holds after each action."""
    parameters = scenario.make_parameters(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters listed twice
        optimizer = scenario.make_legacy(parameters)
    saved: Any = None
    taken = []
    for number, action in enumerate(scenario.actions):
        if isinstance(action, Step):
            active = scenario.active(action)
            # Parameters are updated in order, each completely: a failing step is a shorter one.
            updated = active[: action.fails_at]
            for position, parameter in enumerate(parameters):
                parameter.grad = None
                if position in updated:
                    parameter.grad = scenario.gradient(number, position).to(device)
            optimizer.step()
        elif isinstance(action, Save):
            saved = copy.deepcopy(optimizer.state_dict())
        elif isinstance(action, Load):
            optimizer.load_state_dict(copy.deepcopy(saved))
        taken.append(snapshot(optimizer, parameters))
    return taken


def _both(name: str, *actions: Action, **settings: Any) -> tuple[Scenario, Scenario]:
    """A scenario under both write-back modes."""
    numels = settings.pop("numels", (300, 1024, 4096, 768, 2048, 256))
    made = [
        Scenario(f"{name}, {mode}", numels, actions, write_back=mode, **settings)
        for mode in ("before_return", "overlap")
    ]
    return made[0], made[1]


_CHANGING = (Step(), Step((1, 2, 5)), Step((2, 3)), Step((0, 1, 2, 3, 5)), Step(), Step((4, 5)))
_WITH_CHECKPOINT = (Step(), Step(), Save(), Step(), Load(), Step((0, 2, 3)), Step())
_DOWN = (5, 4, 3, 2, 1, 0)
_RESIDENT = (4, 3, 2, 5, 1, 0)  # a resident one's update is the last before `saves`
_BACKWARD = (
    Step(backward=_DOWN),
    Step(backward=_DOWN),
    Step(backward=(4, 5, 1, 2, 3, 0)),
    Step(active=(1, 2, 5), backward=(5, 2, 1)),
    Step(backward=(5, 4, 2)),
    Step(active=(4, 5), backward=(5, 4), abandoned=True),
    Step(backward=_DOWN),
)
_WIDE = {"optimizer": "PagedAdamW32bit", "chunk": 8192}

SCENARIOS = (
    *_both("steps", Step(), Step(), Step(), **_WIDE),
    *_both("managed steps", Step(), Save(), Step((1, 2, 3)), Step(), strategy="lookahead",
           optimizer="PagedAdamW32bit"),
    *_both("one at a time", Step(), Save(), Step(), strategy="sequential",
           optimizer="PagedLion32bit"),
    *_both("one is left", Step(), Step((1,)), Save(), Step(), strategy="lookahead",
           optimizer="PagedLion32bit"),
    *_both("changing", *_CHANGING, **_WIDE),
    *_both("apart", Step(), Step((0, 2, 3)), numels=(768,) * 4, chunk=32_768,
           optimizer="PagedAdamW32bit"),
    *_both("in vain", Step(), Save(), Step((0, 5)), Load(), Step(), **_WIDE),
    *_both("twice", Step(), Step(), Step((0, 2, 3)), twice=(2, 1), **_WIDE),
    *_both("twice in a row", Step(), Step(), numels=(1024, 2048), twice=(1,), **_WIDE),
    *_both("failing", Step(), Step(fails_at=2), Step(), Step(fails_at=0), Step(), **_WIDE),
    *_both("failing in a chunk", Step(), Step(fails_at=1), Step(), numels=(768, 768, 2048),
           optimizer="PagedAdamW32bit", chunk=16_384),
    *_both("refused", Step(), Refused(capturing=True), Save(), Step(), Refused(), Step(),
           **_WIDE),
    *_both("wider slots", Step((3, 5)), Step(), Step((3, 5)), Step(), **_WIDE),
    *_both("checkpoint", *_WITH_CHECKPOINT, **_WIDE),
    *_both("two streams", Step(), Step(stream="side"), Step(), **_WIDE),
    *_both("resident", Step(), Step(), numels=(300, 200), optimizer="PagedLion32bit"),
    *_both("budget", Step(), Step(), hbm_budget=0.5, optimizer="PagedAdEMAMix32bit", chunk=16_384),
    *_both("backward", *_BACKWARD, in_backward=True, **_WIDE),
    *_both("backward, gradients freed", *_BACKWARD, in_backward=True, free_grads=True, **_WIDE),
    *_both("backward, small parameters", *_BACKWARD, in_backward=True, chunk=16_384,
           optimizer="PagedAdamW32bit"),
    *_both("backward elsewhere", Step(backward=_DOWN, backward_on="side"),
           Step(backward=_DOWN, backward_on="side"), Step(), in_backward=True, free_grads=True,
           **_WIDE),
    *_both("backward, checkpoint", Step(backward=_RESIDENT, saves=True), Save(),
           Step(backward=_RESIDENT, saves=True), Load(), Step(backward=_DOWN), in_backward=True,
           **_WIDE),
    *_both("backward, budget", Step(backward=_DOWN), Step(backward=_DOWN), Step(backward=_DOWN),
           in_backward=True, hbm_budget=0.5, optimizer="PagedAdEMAMix32bit", chunk=16_384),
    *_both("8 bits", Step(), Step(), numels=(1024, 6144), optimizer="PagedAdamW8bit"),
)  # fmt: skip
"""Enough that every fault of the pipeline shows in one of them. Sizes are whole 8-bit blocks."""
