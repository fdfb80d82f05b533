"""One comparison as a value, and as a line of text by which it can be run again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch

from pageahead.experiment.oracle.layouts import Layout, parse_layout
from pageahead.optim.paging import STRATEGIES, WRITE_BACKS, Paging
from pageahead.optim.routing import PAGED_NUMEL

__all__ = [
    "DTYPES",
    "FAMILIES",
    "FORMS",
    "GRADIENTS",
    "HYPERS",
    "OVERRIDES",
    "PAGINGS",
    "Case",
    "CaseError",
    "Movement",
    "parse_case",
]

#: By their name in a case: what bitsandbytes calls them.
FAMILIES = {"adam": "Adam", "adamw": "AdamW", "lion": "Lion", "ademamix": "AdEMAMix"}
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
#: Which parameters have a gradient: each at every step; some are absent and come back; at some
#: steps none has one.
GRADIENTS = ("all", "absent", "empty")
#: Hyperparameters stay as they are, or change between steps.
HYPERS = ("steady", "changing")
#: Overrides through `GlobalOptimManager`: none; state width, rates and 8-bit limit, one each for
#: every third parameter; a limited update norm for parameters that are not paged.
OVERRIDES = ("none", "overrides", "unorm")
#: Memory format of parameters and gradients.
FORMS = ("contiguous", "channels_last", "strided")
#: What is expected: bitsandbytes on the same device, or its CPU operators.
AGAINST = ("legacy", "cpu")

MIB = 1 << 20
DEFAULT_STEPS = 5


class CaseError(ValueError):
    """A text is no case; the message says which word is wrong and what could stand there."""


@dataclass(frozen=True)
class Movement:
    """How state moves: the fields of `Paging` that the matrix varies."""

    strategy: str = "streamed"
    staging: int | None = None
    write_back: str = "before_return"
    hbm_budget: int | float = 0
    in_backward: bool = False

    def paging(self) -> Paging:
        """With every field given, so that no environment variable changes a case."""
        return Paging(
            strategy=self.strategy,
            staging=self.staging,
            write_back=self.write_back,
            hbm_budget=self.hbm_budget,
            in_backward=self.in_backward,
            allow_oversubscription=False,
        )

    def __str__(self) -> str:
        words = [self.strategy]
        if self.staging is not None:
            mib, rest = divmod(self.staging, MIB)
            words.append(f"staging={self.staging if rest else f'{mib}MiB'}")
        if self.write_back != "before_return":
            words.append(f"write_back={self.write_back}")
        if self.hbm_budget:
            words.append(f"hbm_budget={self.hbm_budget}")
        if self.in_backward:
            words.append("in_backward")
        return "+".join(words)


#: Every strategy; and `streamed` so that parameters are cut into slices, so that write-backs go on
#: after a step, so that half of the state stays on the device, and so that hooks update parameters
#: before `step()`.
PAGINGS = (
    Movement(),
    Movement(staging=MIB),
    Movement(write_back="overlap"),
    Movement(hbm_budget=0.5),
    Movement(staging=MIB, in_backward=True),
    Movement("lookahead"),
    Movement("sequential"),
)


@dataclass(frozen=True)
class Case:
    """One comparison. ``str(case)`` is its name; `parse_case` makes it from that.

    Attributes:
        family: a key of `FAMILIES`.
        bits: of the state, 8 or 32.
        named: whether the class is the one with the bits in its name.
        dtype: of parameters and gradients, a key of `DTYPES`.
        movement: how the candidate's state moves.
        layout: the parameters.
        steps: how many.
        gradients, hyper, overrides, form, against: see `GRADIENTS` and those that follow it.
    """

    family: str
    bits: int
    named: bool
    dtype: str
    movement: Movement
    layout: Layout
    steps: int = DEFAULT_STEPS
    gradients: str = "all"
    hyper: str = "steady"
    overrides: str = "none"
    form: str = "contiguous"
    against: str = "legacy"

    @property
    def class_name(self) -> str:
        """The paged class's name, the same in `bitsandbytes.optim` and in `pageahead`."""
        return f"Paged{FAMILIES[self.family]}{f'{self.bits}bit' if self.named else ''}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def problem(self) -> Case:
        """The same case for any movement: cases with equal ones share a reference."""
        return replace(self, movement=Movement())

    @property
    def state_bytes(self) -> int:
        """Bytes of paged state if no parameter's width is overridden."""
        tensors = {"lion": 1, "ademamix": 3}.get(self.family, 2)
        paged = sum(numel for numel in self.layout.numels if numel >= PAGED_NUMEL)
        return paged * tensors * self.bits // 8

    def __str__(self) -> str:
        words = [
            f"{self.family}{f'{self.bits}bit' if self.named else ''}",
            str(self.bits),
            self.dtype,
            str(self.movement),
            str(self.layout),
        ]
        if self.steps != DEFAULT_STEPS:
            words.append(f"steps={self.steps}")
        chosen = (self.gradients, self.hyper, self.overrides, self.form)
        defaults = (GRADIENTS[0], HYPERS[0], OVERRIDES[0], FORMS[0])
        words += [one for one, usual in zip(chosen, defaults, strict=True) if one != usual]
        if self.against != AGAINST[0]:
            words.append(f"against={self.against}")
        return "/".join(words)


def parse_case(text: str) -> Case:
    """Return the case of a line like ``adamw/8/float16/streamed+staging=1MiB/300x1000,64/absent``.

    Five words are needed: class, bits, dtype, movement and layout. After them, in any order:
    ``steps=N``, ``against=cpu`` and the words of `GRADIENTS`, `HYPERS`, `OVERRIDES`, `FORMS`.

    Raises:
        CaseError: see there.
    """
    words = text.strip().split("/")
    if len(words) < 5:
        raise CaseError(
            f"case {text!r} has {len(words)} words; needed are class/bits/dtype/movement/layout, "
            f"as in adamw/8/float16/streamed/300x1000,64"
        )
    kind, bits_text, dtype, movement, layout, *rest = words
    bits = int(_one_of("bits", bits_text, ("8", "32")))
    named = kind.endswith(f"{bits}bit")
    try:
        parameters = parse_layout(layout)
    except ValueError as error:
        raise CaseError(str(error)) from None
    return Case(
        _one_of("class", kind.removesuffix(f"{bits}bit"), tuple(FAMILIES)),
        bits,
        named,
        _one_of("dtype", dtype, tuple(DTYPES)),
        _parse_movement(movement),
        parameters,
        **_parse_options(rest),
    )


def _parse_movement(text: str) -> Movement:
    strategy, *settings = text.split("+")
    movement = Movement(_one_of("strategy", strategy, STRATEGIES))
    for setting in settings:
        name, _, value = setting.partition("=")
        _one_of("setting", name, ("staging", "write_back", "hbm_budget", "in_backward"))
        try:
            if name == "staging":
                unit = MIB if value.endswith("MiB") else 1
                movement = replace(movement, staging=int(value.removesuffix("MiB")) * unit)
            elif name == "hbm_budget":
                budget = float(value) if "." in value else int(value)
                movement = replace(movement, hbm_budget=budget)
            elif name == "in_backward":
                movement = replace(movement, in_backward=True)
            else:
                movement = replace(movement, write_back=_one_of(name, value, WRITE_BACKS))
            movement.paging()
        except ValueError as error:
            raise CaseError(f"{setting}: {error}") from None
    return movement


def _parse_options(words: list[str]) -> dict[str, Any]:
    choices = {"gradients": GRADIENTS, "hyper": HYPERS, "overrides": OVERRIDES, "form": FORMS}
    known = {word: name for name, values in choices.items() for word in values}
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name == "steps" and value.isdecimal() and int(value) > 0:
            options["steps"] = int(value)
        elif name == "against" and equals:
            options["against"] = _one_of("against", value, AGAINST)
        elif word in known:
            options[known[word]] = word
        else:
            raise _unknown("option", word, (*known, "steps=5", "against=cpu"))
    return options


def _one_of(what: str, word: str, allowed: tuple[str, ...]) -> str:
    if word not in allowed:
        raise _unknown(what, word, allowed)
    return word


def _unknown(what: str, word: str, allowed: tuple[str, ...]) -> CaseError:
    close = get_close_matches(word, allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return CaseError(f"{what} {word!r} is unknown; there are: {', '.join(allowed)}.{hint}")
