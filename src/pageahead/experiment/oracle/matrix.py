"""Which cases there are: a selection in which any three values meet, and the whole product.

Both compare every movement in each combination of the other dimensions, so that bitsandbytes runs
once for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from pageahead.experiment.cells import DeviceType, UnknownCellError
from pageahead.experiment.oracle.case import (
    DTYPES,
    FAMILIES,
    FORMS,
    GRADIENTS,
    HYPERS,
    OVERRIDES,
    PAGINGS,
    Case,
)
from pageahead.experiment.oracle.covering import Choice, Dimensions, covering, everything
from pageahead.experiment.oracle.layouts import LAYOUTS, Layout
from pageahead.optim.routing import PAGED_NUMEL

__all__ = ["DIMENSIONS", "STRENGTH", "Matrix", "choice_exclusion", "exclusion", "full", "selection"]

NAMINGS = ("plain", "named")

DIMENSIONS: Dimensions = {
    "layout": tuple(LAYOUTS),
    "family": tuple(FAMILIES),
    "bits": ("8", "32"),
    "dtype": tuple(DTYPES),
    "gradients": GRADIENTS,
    "overrides": OVERRIDES,
    "form": FORMS,
    "hyper": HYPERS,
    "naming": NAMINGS,
}
#: In the whole product these two take turns instead: which name a class has and which numbers
#: are in its groups do not change what moves.
ALTERNATING = ("hyper", "naming")
STRENGTH = 3

#: S6 asks for 5 to 20; other layouts have the default, 5.
STEPS = {"one": 20, "mixed": 8}

#: On a GPU, bitsandbytes' AdEMAMix with 8-bit state is compared with its CPU operators, too, where
#: sizes are no multiple of 256: an independent check of what is expected there otherwise.
CROSS_CHECKED = ("heterogeneous", "boundary", "odd", "giant")


@dataclass(frozen=True)
class Matrix:
    """Cases in the order in which they run.

    Attributes:
        cases: all of them.
        excluded: how many cases of the whole product cannot be compared, by reason.
    """

    cases: Sequence[Case]
    excluded: Mapping[str, int] = field(default_factory=dict)

    def groups(self) -> list[list[Case]]:
        """The cases that share a reference, together."""
        found: dict[Case, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.problem, []).append(case)
        return list(found.values())

    def matching(self, pattern: str | None) -> Matrix:
        """Only the cases whose name contains `pattern` or matches it as a shell pattern.

        Raises:
            UnknownCellError: there is none.
        """
        if pattern is None:
            return self
        wanted = pattern.lower()
        chosen = [
            case
            for case in self.cases
            if wanted in str(case).lower() or fnmatchcase(str(case).lower(), wanted)
        ]
        if not chosen:
            raise UnknownCellError(
                f"none of {len(self.cases)} cells matches {pattern!r}; `pageahead verify --list` "
                f"shows them, --full --list all there are"
            )
        return Matrix(chosen, self.excluded)


def selection(device: DeviceType) -> Matrix:
    """Combinations in which any three values that can meet do, each with every movement."""
    return _matrix(covering(DIMENSIONS, choice_exclusion, STRENGTH), device)


def full(device: DeviceType) -> Matrix:
    """The whole product; the dimensions in `ALTERNATING` take turns in it."""
    return _matrix([one for one in _product() if choice_exclusion(one) is None], device)


def exclusion(case: Case, device: DeviceType) -> str | None:
    """Why a case cannot be compared on `device`; None if it can."""
    if case.overrides == "unorm":
        reason = _unorm_obstacle(case.family, case.layout)
        if reason is not None:
            return reason
    if case.form == "channels_last" and all(len(shape) != 4 for shape in case.layout.shapes):
        return "channels_last: no parameter has four dimensions"
    if case.against == "cpu":
        if device == "cpu":
            return "against=cpu: on the CPU bitsandbytes' CPU operators are the reference anyway"
        if case.family != "ademamix" or case.bits != 8 or case.form != "contiguous":
            return "against=cpu: for contiguous AdEMAMix with 8-bit state only"
    return None


def choice_exclusion(choice: Mapping[str, str]) -> str | None:
    """`exclusion` for values of some or all `DIMENSIONS`."""
    if choice.get("overrides") == "unorm":
        layout = LAYOUTS[choice["layout"]] if "layout" in choice else None
        return _unorm_obstacle(choice.get("family"), layout)
    return None


def _unorm_obstacle(family: str | None, layout: Layout | None) -> str | None:
    if family == "ademamix":
        return (
            "max_unorm with AdEMAMix: bitsandbytes makes no unorm_vec for it and fails with a "
            "KeyError"
        )
    if layout is not None and min(layout.numels) >= PAGED_NUMEL:
        return (
            "max_unorm where every parameter is paged: pageahead refuses it unless the state stays "
            "on the device"
        )
    return None


def _matrix(choices: Iterable[Choice], device: DeviceType) -> Matrix:
    cases = [case for choice in choices for case in _cases(choice)]
    if device == "cuda":
        cases += _cross_checks()
    excluded = Counter(choice_exclusion(one) for one in _product())
    return Matrix(
        cases,
        {reason: n * len(PAGINGS) for reason, n in excluded.items() if reason is not None},
    )


def _product() -> Iterable[Choice]:
    free = {name: values for name, values in DIMENSIONS.items() if name not in ALTERNATING}
    for choice in everything(free):
        turn = sum(DIMENSIONS[name].index(value) for name, value in choice.items())
        yield {**choice, "hyper": HYPERS[turn % 2], "naming": NAMINGS[turn // 2 % 2]}


def _cases(choice: Choice) -> list[Case]:
    """One combination with every movement."""
    return [
        Case(
            choice["family"],
            int(choice["bits"]),
            choice["naming"] == "named",
            choice["dtype"],
            movement,
            LAYOUTS[choice["layout"]],
            steps=STEPS.get(choice["layout"], 5),
            gradients=choice["gradients"],
            hyper=choice["hyper"],
            overrides=choice["overrides"],
            form=choice["form"],
        )
        for movement in PAGINGS
    ]


def _cross_checks() -> list[Case]:
    return [
        Case("ademamix", 8, False, dtype, movement, LAYOUTS[layout], against="cpu")
        for layout in CROSS_CHECKED
        for dtype in DTYPES
        for movement in PAGINGS
    ]
