"""What is measured: named cells, each an optimizer over a list of FP16 parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal, TypeVar
from typing import Protocol as Interface

from pageahead.experiment.layouts import (
    WORKING_SETS,
    DeviceType,
    Layout,
    public,
    uniform,
    working_set,
)
from pageahead.experiment.protocol import Protocol
from pageahead.optim.routing import PAGED_NUMEL

__all__ = [
    "CELLS",
    "MATRIX",
    "PEAK_ROLES",
    "PRESETS",
    "Cell",
    "DeviceType",
    "Layout",
    "Optimizer",
    "Preset",
    "Residency",
    "Role",
    "UnknownCellError",
    "cell_named",
    "matching",
    "select",
]

#: Where managed state is when a step begins. ``host``: brought home by the CPU before each step.
#: ``resident``: left where the step before put it, on the device. ``oversubscribed``: as that, but
#: with less memory left on the device than the state takes.
Residency = Literal["host", "resident", "oversubscribed"]
#: What the gate takes a cell for; ``extra`` is measured and compared, but decides nothing else.
Role = Literal["primary", "tiny", "resident", "public", "one_state", "extra"]
#: Whose peak memory the gate compares, where state pages as it does in training.
PEAK_ROLES: frozenset[Role] = frozenset({"primary", "public"})


class UnknownCellError(ValueError):
    """A pattern that no cell matches; the message lists the cells there are."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of the comparison.

    Attributes:
        name: as in a cell's name; the number is the bits of its state.
        bytes_per_element: bytes of ``state1`` and ``state2`` per element of a paged parameter.
        candidate: the class in `pageahead`.
        legacy: the class in `bitsandbytes.optim` it is compared with on a GPU.
        legacy_on_cpu: the same on the CPU, where bitsandbytes cannot page AdEMAMix.
        legacy_pages: whether legacy's state is in managed memory on a GPU.
        states: state tensors of an element: two first moments of AdEMAMix count as two.
    """

    name: str
    bytes_per_element: int
    candidate: str
    legacy: str
    legacy_on_cpu: str
    legacy_pages: bool = True
    states: int = 2

    def legacy_on(self, device: DeviceType) -> str:
        """The class in `bitsandbytes.optim` to compare with on `device`."""
        return self.legacy if device == "cuda" else self.legacy_on_cpu


@dataclass(frozen=True)
class Cell:
    """One optimizer over one layout, its state in one place at the beginning of each step."""

    optimizer: Optimizer
    layout: Layout
    role: Role = "extra"
    residency: Residency = "host"

    @property
    def name(self) -> str:
        suffix = "" if self.residency == "host" else f"@{self.residency}"
        return f"{self.optimizer.name}/{self.layout.name}{suffix}"

    def state_bytes(self, device: DeviceType) -> int:
        """Bytes of paged state: ``state1`` and ``state2`` of all parameters that are paged."""
        numels = (prod(shape) for shape in self.layout.shapes_on(device))
        paged = sum(numel for numel in numels if numel >= PAGED_NUMEL)
        return paged * self.optimizer.bytes_per_element


@dataclass(frozen=True)
class Preset:
    """A named list of cells, how often each is measured, and which strategies by default.

    Attributes:
        evidence: for the gate: peak memory is measured as well, each arm in a process of its own,
            and the package has to be as committed.
    """

    name: str
    description: str
    cells: tuple[Cell, ...]
    protocol: Protocol
    strategies: tuple[str, ...] = ("streamed", "lookahead")
    evidence: bool = False


ADAMW32 = Optimizer("adamw32", 8, "PagedAdamW32bit", "PagedAdamW32bit", "PagedAdamW32bit")
ADAMW8 = Optimizer("adamw8", 2, "PagedAdamW8bit", "PagedAdamW8bit", "PagedAdamW8bit")
LION8 = Optimizer("lion8", 1, "PagedLion8bit", "PagedLion8bit", "PagedLion8bit", states=1)
# Two first moments and one second. Not PagedAdEMAMix32bit, whose first moments bitsandbytes makes
# half as large as its kernel takes them to be; PagedAdEMAMix has 32 bits by default.
ADEMAMIX32 = Optimizer("ademamix32", 12, "PagedAdEMAMix", "PagedAdEMAMix", "AdEMAMix", states=3)

# All of the state on the device: compared with the classes that do not page.
RESIDENT32 = Optimizer("resident32", 8, "PagedAdamW32bit", "AdamW32bit", "AdamW32bit", False)
RESIDENT8 = Optimizer("resident8", 2, "PagedAdamW8bit", "AdamW8bit", "AdamW8bit", False)

LLAMA = public("llama-3.2-1b", cpu_divisor=64)
QWEN = public("qwen2.5-0.5b", cpu_divisor=32)
GPT2 = public("gpt2", cpu_divisor=16)
#: Large and small parameters together: what is paged and what is not, in one step.
MIXED = Layout("mixed", ((4096, 512), (2048,), (1024, 1024), (99_999,), (1024, 1024), (2048,)))
#: As many elements as 32x8Mi (but for rounding), nine tenths of them in one parameter.
SKEWED = Layout("90%-in-one", ((241_591_808,), *((865_924,),) * 31), cpu_divisor=16)

# The cells of the experiment this project answers, which are also in the matrix.
ADAMW8_8X1 = Cell(ADAMW8, uniform(8, 1), "primary")
ADAMW8_8X4 = Cell(ADAMW8, uniform(8, 4), "primary")
ADAMW32_8X1 = Cell(ADAMW32, uniform(8, 1), "primary")
ADAMW32_8X4 = Cell(ADAMW32, uniform(8, 4), "primary")
LION8_8X4 = Cell(LION8, uniform(8, 4), "one_state")
ADEMAMIX32_8X1 = Cell(ADEMAMIX32, uniform(8, 1))
ADAMW8_LLAMA = Cell(ADAMW8, LLAMA, "public")

QUICK = Preset(
    "quick",
    "a few small cells, in under two minutes on a GPU or on two CPU cores",
    (
        ADAMW32_8X1,
        ADAMW8_8X1,
        Cell(LION8, uniform(8, 1)),
        Cell(ADEMAMIX32, uniform(4, 1)),
        Cell(ADAMW8, MIXED),
    ),
    Protocol(warmups=5, rounds=3, repetitions=4),
)
SOURCE = Preset(
    "source",
    "the six cells of the experiment this project answers, and the seven of its first H200 table",
    (
        ADAMW8_8X1,
        ADAMW8_8X4,
        ADAMW32_8X1,
        ADAMW32_8X4,
        LION8_8X4,
        ADEMAMIX32_8X1,
        Cell(ADAMW32, uniform(32, 8)),
        Cell(ADAMW8, uniform(32, 8)),
        ADAMW8_LLAMA,
    ),
    Protocol(warmups=10, rounds=7, repetitions=8),
)
SKEW = Preset(
    "skew",
    "as many elements in even parameters, and nine tenths of them in a single one",
    (Cell(ADAMW32, uniform(32, 8)), Cell(ADAMW32, SKEWED)),
    Protocol(warmups=3, rounds=3, repetitions=4),
)
RESIDENT = Preset(
    "resident",
    "all state on the device, and none, against bitsandbytes' optimizers that do not page",
    tuple(
        Cell(optimizer, layout)
        for optimizer in (RESIDENT32, RESIDENT8)
        for layout in (uniform(8, 1), uniform(8, 4), uniform(32, 8), LLAMA)
    ),
    Protocol(warmups=5, rounds=5, repetitions=6),
    strategies=("resident", "streamed"),
)


def _sets(optimizer: Optimizer, residency: Residency, role: Role, tiny: Role) -> tuple[Cell, ...]:
    """The cells of one optimizer over every working set; `tiny` is the role of the smallest."""
    return tuple(
        Cell(
            optimizer,
            working_set(what, optimizer.bytes_per_element // optimizer.states),
            tiny if what is WORKING_SETS[0] else role,
            residency,
        )
        for what in WORKING_SETS
    )


MATRIX = Preset(
    "matrix",
    "everything the gate asks for: working sets from 2 to 256 MiB, public models, controls",
    (
        ADAMW8_8X1,
        ADAMW8_8X4,
        ADAMW32_8X1,
        ADAMW32_8X4,
        LION8_8X4,
        ADEMAMIX32_8X1,
        *_sets(ADAMW8, "host", "primary", "tiny"),
        *_sets(ADAMW32, "host", "primary", "tiny"),
        *_sets(LION8, "host", "one_state", "one_state"),
        *_sets(ADAMW8, "resident", "resident", "resident"),
        *_sets(ADAMW32, "resident", "resident", "resident"),
        *_sets(LION8, "resident", "extra", "extra"),
        Cell(ADAMW8, GPT2, "public"),
        Cell(ADAMW32, GPT2, "public"),
        Cell(ADAMW8, QWEN, "public"),
        Cell(ADAMW32, QWEN, "public"),
        ADAMW8_LLAMA,
        Cell(ADAMW32, uniform(32, 8), residency="oversubscribed"),
    ),
    Protocol(warmups=10, rounds=7, repetitions=8),
    evidence=True,
)
PRESETS = {preset.name: preset for preset in (QUICK, SOURCE, SKEW, RESIDENT, MATRIX)}
CELLS = {cell.name: cell for preset in PRESETS.values() for cell in preset.cells}


def cell_named(name: str) -> Cell:
    """Return the cell called `name`. Raises `UnknownCellError` where there is none."""
    if name not in CELLS:
        raise UnknownCellError(f"no cell is called {name!r}; there are: {', '.join(CELLS)}")
    return CELLS[name]


def select(preset: Preset, pattern: str | None) -> list[Cell]:
    """The cells of `preset` whose name matches `pattern`: a shell pattern, or part of the name.

    Case does not matter. Raises `UnknownCellError` if none does.
    """
    return matching(preset.cells, preset.name, pattern)


class Named(Interface):
    """Something with a name to choose it by."""

    @property
    def name(self) -> str: ...


AnyNamed = TypeVar("AnyNamed", bound=Named)


def matching(cells: Sequence[AnyNamed], preset: str, pattern: str | None) -> list[AnyNamed]:
    """What `select` does, for cells of any kind."""
    if pattern is None:
        return list(cells)
    wanted = pattern.lower()
    chosen = [
        cell
        for cell in cells
        if wanted in cell.name.lower() or fnmatchcase(cell.name.lower(), wanted)
    ]
    if not chosen:
        raise UnknownCellError(
            f"no cell of preset {preset!r} matches {pattern!r}; it has: "
            f"{', '.join(cell.name for cell in cells)}"
        )
    return chosen
