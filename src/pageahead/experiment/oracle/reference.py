"""What is to be expected: bitsandbytes' own optimizers over the same problem, step by step.

On the CPU bitsandbytes cannot page; there it is the class that is not paged. On a GPU it is the
paged class of the same name. The exceptions:

* ``PagedAdEMAMix32bit`` makes a `state1` of half the size its kernel uses and ignores the
  schedules; ``PagedAdEMAMix(optim_bits=32)`` stands for it.
* With 8-bit state AdEMAMix's kernel takes the second row's absmax from block ``(n + i) / 256``.
  Where ``n`` is no multiple of 256, two blocks share one and race: legacy is not deterministic.
  What is expected there is legacy's result for the same values with zeros up to a whole block
  behind them, which belong to no other block; or, within a tolerance, the CPU operator's.
* ``max_unorm``: on a GPU the norm is summed with float atomics, so legacy differs from legacy. On
  the CPU it is summed in the order of legacy's state in memory, which has the parameter's memory
  format; ours is contiguous, so legacy over contiguous copies is expected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import bitsandbytes
import torch

from pageahead.experiment.cells import DeviceType
from pageahead.experiment.legacy import free_managed_state
from pageahead.experiment.oracle.bits import Bits, Image, take
from pageahead.experiment.oracle.case import Case
from pageahead.experiment.oracle.forms import AsGiven, Contiguous, Form, OnCpu
from pageahead.experiment.oracle.problem import BASE, Problem, effective_bits, overridden
from pageahead.experiment.oracle.tolerance import Tolerance, cpu_operator, limited_norm
from pageahead.memory.layout import BLOCK
from pageahead.optim.routing import PAGED_NUMEL

__all__ = ["Expectation", "Reference", "Run", "expectation", "legacy_class"]

Images = Mapping[int, list[Image]]


class Run:
    """One optimizer stepping through a problem.

    Attributes:
        parameters: one for each of the layout.
        optimizer: over them.
    """

    def __init__(
        self, problem: Problem, form: Form, make: Callable[[list[dict[str, Any]]], Any]
    ) -> None:
        self._problem = problem
        self._form = form
        self.parameters = [
            torch.nn.Parameter(form.parameter(number, values))
            for number, values in enumerate(problem.values)
        ]
        with warnings.catch_warnings():
            # A parameter listed twice; and bitsandbytes, that it does not page on the CPU.
            warnings.simplefilter("ignore", UserWarning)
            self.optimizer = make(problem.groups(self.parameters))

    def step(self, step: int) -> None:
        """Take a step, numbered from 0, with gradients that are new tensors."""
        problem = self._problem
        problem.set_hyperparameters(self.optimizer.param_groups, step)
        for number, parameter in enumerate(self.parameters):
            parameter.grad = None
            if problem.has_gradient(number, step):
                values = problem.gradients[step][number]
                parameter.grad = self._form.gradient(number, step, values)
        self._announce()
        self.optimizer.step()

    def _announce(self) -> None:
        """Say that gradients are there, as autograd would, the last parameter's first."""
        updates = getattr(self.optimizer, "_backward", None)
        if updates is not None:
            for parameter in reversed(self.parameters):
                if parameter.grad is not None:
                    updates.arrive(parameter)

    def images(self) -> list[Image]:
        """The bits of everything there is now. Nothing may be on its way."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        by_address = any(parameter.is_cuda for parameter in self.parameters)
        return take(self.parameters, states, by_address=by_address)


@dataclass(frozen=True)
class Reference:
    """One run of bitsandbytes.

    Attributes:
        name: the class, and how it was used.
        why: it is not simply the class of the same name on the same device; empty if it is.
        images: after each compared step, numbered from 1.
        managed_bytes: of managed memory that it took and gave back.
    """

    name: str
    why: str
    images: Images
    managed_bytes: int = 0


@dataclass(frozen=True)
class Expectation:
    """For each parameter its reference, and what may differ from it; None is nothing."""

    references: list[Reference]
    tolerances: list[Tolerance | None]

    @property
    def managed_bytes(self) -> int:
        """Of all references together, which did not exist at the same time."""
        distinct = {id(one): one for one in self.references}
        return sum(one.managed_bytes for one in distinct.values())


def expectation(problem: Problem, compared: Collection[int]) -> Expectation:
    """Run what is needed of bitsandbytes.

    Args:
        problem: of the case, whatever its movement.
        compared: steps after which bits are needed, numbered from 1.
    """
    case = problem.case
    on_gpu = problem.device.type == "cuda"
    racing = _racing(case) if on_gpu else set()
    count = len(case.layout.shapes)
    device: DeviceType = "cuda" if on_gpu else "cpu"
    kind, arguments, why = legacy_class(case, device)
    legacy = _run(problem, AsGiven(case.form), kind, arguments, why, compared)
    references = [legacy] * count
    tolerances: list[Tolerance | None] = [None] * count
    if racing and case.against == "cpu":
        cpu_kind, cpu_arguments, _ = legacy_class(case, "cpu")
        why = "legacy races: numel is no multiple of 256"
        operator = _run(problem, OnCpu(), cpu_kind, cpu_arguments, why, compared)
        for number in racing:
            references[number] = operator
            tolerances[number] = cpu_operator(BASE["lr"], case.torch_dtype)
    elif racing:
        why = "legacy races: numel is no multiple of 256; padded with zeros to whole blocks"
        form = Contiguous(case.form, padded=racing)
        padded = _run(problem, form, kind, arguments, why, compared)
        images = {step: _unpadded(case, racing, after) for step, after in padded.images.items()}
        padded = Reference(padded.name, why, images, padded.managed_bytes)
        for number in racing:
            references[number] = padded
    limited = _limited(case)
    if limited and on_gpu:
        for number in limited:
            tolerances[number] = limited_norm(case.steps, case.torch_dtype)
    elif limited and case.form != "contiguous":
        why = "max_unorm: legacy sums the norm in the parameter's memory format; contiguous copies"
        copies = _run(problem, Contiguous(case.form), kind, arguments, why, compared)
        for number in limited:
            references[number] = copies
    return Expectation(references, tolerances)


def legacy_class(case: Case, device: DeviceType) -> tuple[str, dict[str, Any], str]:
    """Name in `bitsandbytes.optim`, arguments beside the problem's, and why another than ours."""
    name, arguments = case.class_name, {} if case.named else {"optim_bits": case.bits}
    why = ""
    if name == "PagedAdEMAMix32bit":
        name, arguments = "PagedAdEMAMix", {"optim_bits": 32}
        why = "bitsandbytes' AdEMAMix32bit has a state1 of half the size and no schedules"
    if device == "cpu":
        name = name.removeprefix("Paged")
    return name, arguments, why


def _racing(case: Case) -> set[int]:
    """Parameters whose result is not determined in bitsandbytes on a GPU."""
    if case.family != "ademamix":
        return set()
    return {
        number
        for number, numel in enumerate(case.layout.numels)
        if numel % BLOCK and effective_bits(case, number) == 8
    }


def _limited(case: Case) -> set[int]:
    """Parameters whose update's norm is limited, which their 8-bit state would ignore."""
    if case.overrides != "unorm":
        return set()
    return {
        number
        for number, numel in enumerate(case.layout.numels)
        if numel < PAGED_NUMEL and effective_bits(case, number) == 32
    }


def _run(
    problem: Problem,
    form: Form,
    kind: str,
    arguments: Mapping[str, Any],
    why: str,
    compared: Collection[int],
) -> Reference:
    make = getattr(bitsandbytes.optim, kind)
    run = Run(problem, form, lambda groups: make(groups, **arguments, **problem.arguments()))
    images: dict[int, list[Image]] = {}
    with overridden(problem.case, run.parameters), _freed(run.optimizer, problem.device) as freed:
        for step in range(problem.case.steps):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Paged optimizers are not supported")
                run.step(step)
            if step + 1 in compared:
                images[step + 1] = run.images()
    said = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return Reference(f"bitsandbytes.{kind}({said})", why, images, freed.get("bytes", 0))


@contextmanager
def _freed(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[dict[str, int]]:
    """Give back a bitsandbytes optimizer's managed memory at the end, and say how much it was."""
    freed: dict[str, int] = {}
    try:
        yield freed
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        freed["bytes"] = free_managed_state(optimizer)


def _unpadded(case: Case, numbers: Collection[int], images: list[Image]) -> list[Image]:
    """Images of the padded parameters as they would be without padding."""
    found = list(images)
    for number in numbers:
        shape, numel = case.layout.shapes[number], case.layout.numels[number]
        image = dict(images[number])
        for name, rows in (("parameter", 1), ("state1", 2), ("state2", 1)):
            entry = image.get(name)
            if isinstance(entry, Bits):
                size = entry.dtype.itemsize
                raw = entry.raw.view(rows, -1)[:, : numel * size].reshape(-1)
                full = (rows, *shape) if rows > 1 else shape
                image[name] = Bits(entry.dtype, full, raw)
        found[number] = image
    return found
