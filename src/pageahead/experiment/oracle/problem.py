"""What both sides of a case are given: seeded values, and everything that changes on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from bitsandbytes.optim import GlobalOptimManager

from pageahead.experiment.oracle.case import Case
from pageahead.optim.routing import PAGED_NUMEL

__all__ = ["BASE", "Problem", "effective_bits", "overridden"]

SEED = 20_240

#: Hyperparameters every class takes. Large steps, so that low precision shows them.
BASE = {"lr": 1e-2, "weight_decay": 1e-2}
LIMIT = 0.1  # of an update's norm, in norms of the parameter; Adam's first update exceeds it
SMALLEST_8BIT = 64  # elements, where the limit is overridden


class Problem:
    """Parameters, gradients and hyperparameters of a case, whoever steps over them.

    Values depend on the position of a parameter and the number of a step alone, so a case with
    fewer steps is the beginning of one with more.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.device = device
        shapes = list(enumerate(case.layout.shapes))
        self.values = [self._random(-1, number, shape) * 0.1 for number, shape in shapes]
        self.gradients = [
            [self._random(step, number, shape) * 10.0 ** -(number % 3) for number, shape in shapes]
            for step in range(case.steps)
        ]

    def has_gradient(self, number: int, step: int) -> bool:
        """Whether a parameter has one at a step, from 0."""
        if self.case.gradients == "absent":
            return (number + step) % 3 != 1
        if self.case.gradients == "empty":
            return step % 3 != 1
        return True

    def listings_with_gradient(self) -> Iterator[int]:
        """The parameter of every update of all steps."""
        for step in range(self.case.steps):
            for number in self.case.layout.listing:
                if self.has_gradient(number, step):
                    yield number

    def groups(self, parameters: Sequence[torch.nn.Parameter]) -> list[dict[str, Any]]:
        """Parameter groups: two where hyperparameters change, so that they differ between them."""
        listed = [parameters[number] for number in self.case.layout.listing]
        # PyTorch refuses a parameter that is in two groups.
        if self.case.hyper == "steady" or self.case.layout.repeats or len(listed) < 2:
            return [{"params": listed}]
        half = (len(listed) + 1) // 2
        return [{"params": listed[:half]}, {"params": listed[half:]}]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of both optimizers, beside the bits."""
        schedules = self.case.family == "ademamix" and self.case.hyper == "changing"
        return {**BASE, **({"t_alpha": 4, "t_beta3": 4} if schedules else {})}

    def set_hyperparameters(self, groups: Sequence[dict[str, Any]], step: int) -> None:
        """Change them, before a step numbered from 0, as a scheduler would."""
        if self.case.hyper == "steady":
            return
        for place, group in enumerate(groups):
            group["lr"] = BASE["lr"] * (1 + place) / (1 + step)
            group["weight_decay"] = BASE["weight_decay"] * (step % 2)
            group["betas"] = (0.9 - 0.1 * (step % 3), *group["betas"][1:])
            group["eps"] *= (10.0, 0.1)[step % 2]
            if self.case.family == "ademamix":
                group["alpha"] = 5.0 - step % 2
                # bitsandbytes takes another way through its code without schedules.
                group["t_alpha"] = group["t_beta3"] = None if step == 3 else 4

    def _random(self, step: int, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        seed = SEED + 100_003 * (step + 1) + number
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(shape, generator=generator, device=self.device)
        return values.to(self.case.torch_dtype)


@contextmanager
def overridden(case: Case, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Register a case's overrides for these parameters, and for no others ever after.

    bitsandbytes keeps them for the whole process, by position and by ``id``: without a clean start
    and end, and a reference to each parameter in between, one optimizer's would change another's.
    """
    manager = GlobalOptimManager.get_instance()
    manager.initialize()
    try:
        manager.register_parameters(list(parameters))
        for number, parameter in enumerate(parameters):
            override = _override(case, number)
            if override:
                manager.override_config(parameter, key_value_dict=override)
        yield
    finally:
        manager.initialize()


def effective_bits(case: Case, number: int) -> int:
    """Bits of a parameter's state by bitsandbytes' rule, its overrides counted in."""
    config: dict[str, Any] = {"optim_bits": case.bits, "min_8bit_size": 4096}
    config.update(_override(case, number))
    wide = config["optim_bits"] == 32
    return 32 if wide or case.layout.numels[number] < config["min_8bit_size"] else 8


def _override(case: Case, number: int) -> dict[str, Any]:
    """What is overridden for a parameter; a new dict each time, which bitsandbytes may change."""
    if case.overrides == "unorm" and case.layout.numels[number] < PAGED_NUMEL:
        return {"max_unorm": LIMIT}
    if case.overrides == "overrides":
        third = (0.999,) if case.family == "ademamix" else ()
        return (
            {"optim_bits": 40 - case.bits},
            {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.8, 0.95, *third)},
            {"min_8bit_size": SMALLEST_8BIT},
        )[number % 3].copy()
    return {}
