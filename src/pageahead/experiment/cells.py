"""What is measured: named cells, each an optimizer over a list of FP16 parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal, TypeVar
from typing import Protocol as Interface

from pageahead.experiment.protocol import Protocol
from pageahead.optim.routing import PAGED_NUMEL

__all__ = [
    "CELLS",
    "PRESETS",
    "Cell",
    "DeviceType",
    "Layout",
    "Optimizer",
    "Preset",
    "UnknownCellError",
    "cell_named",
    "matching",
    "select",
]

DeviceType = Literal["cpu", "cuda"]
Shape = tuple[int, ...]

MI = 1 << 20
#: A parameter scaled down for the CPU keeps at least this many elements, so that it still streams.
CPU_MINIMUM_NUMEL = 1 << 17


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
    """

    name: str
    bytes_per_element: int
    candidate: str
    legacy: str
    legacy_on_cpu: str
    legacy_pages: bool = True

    def legacy_on(self, device: DeviceType) -> str:
        """The class in `bitsandbytes.optim` to compare with on `device`."""
        return self.legacy if device == "cuda" else self.legacy_on_cpu


@dataclass(frozen=True)
class Layout:
    """A list of parameter shapes.

    On the CPU large parameters have `cpu_divisor` times fewer rows, but at least 131,072 elements
    (or all they had); those too small to be paged keep their shape.
    """

    name: str
    shapes: tuple[Shape, ...]
    cpu_divisor: int = 8

    def shapes_on(self, device: DeviceType) -> tuple[Shape, ...]:
        """The shapes to make on `device`."""
        if device == "cuda":
            return self.shapes
        return tuple(self._scaled(shape) for shape in self.shapes)

    def _scaled(self, shape: Shape) -> Shape:
        if prod(shape) < PAGED_NUMEL:
            return shape
        rows, row = shape[0], prod(shape[1:])
        fewest = -(-CPU_MINIMUM_NUMEL // row)
        return (min(rows, max(rows // self.cpu_divisor, fewest)), *shape[1:])


@dataclass(frozen=True)
class Cell:
    """One optimizer over one layout."""

    optimizer: Optimizer
    layout: Layout

    @property
    def name(self) -> str:
        return f"{self.optimizer.name}/{self.layout.name}"

    def state_bytes(self, device: DeviceType) -> int:
        """Bytes of paged state: ``state1`` and ``state2`` of all parameters that are paged."""
        numels = (prod(shape) for shape in self.layout.shapes_on(device))
        paged = sum(numel for numel in numels if numel >= PAGED_NUMEL)
        return paged * self.optimizer.bytes_per_element


@dataclass(frozen=True)
class Preset:
    """A named list of cells, how often each is measured, and which strategies by default."""

    name: str
    description: str
    cells: tuple[Cell, ...]
    protocol: Protocol
    strategies: tuple[str, ...] = ("streamed", "lookahead")


def _uniform(count: int, mebi_elements: int) -> Layout:
    return Layout(f"{count}x{mebi_elements}Mi", ((mebi_elements * MI,),) * count)


def _llama(vocabulary: int, hidden: int, layers: int, intermediate: int, kv: int) -> Layout:
    """Llama's parameters in the order of its modules; tied embeddings, so no separate head."""
    block = (
        (hidden, hidden),
        (kv, hidden),
        (kv, hidden),
        (hidden, hidden),
        (intermediate, hidden),
        (intermediate, hidden),
        (hidden, intermediate),
        (hidden,),
        (hidden,),
    )
    return Layout(
        "llama-3.2-1b", ((vocabulary, hidden), *block * layers, (hidden,)), cpu_divisor=64
    )


ADAMW32 = Optimizer("adamw32", 8, "PagedAdamW32bit", "PagedAdamW32bit", "PagedAdamW32bit")
ADAMW8 = Optimizer("adamw8", 2, "PagedAdamW8bit", "PagedAdamW8bit", "PagedAdamW8bit")
LION8 = Optimizer("lion8", 1, "PagedLion8bit", "PagedLion8bit", "PagedLion8bit")
# Two first moments and one second. Not PagedAdEMAMix32bit, whose first moments bitsandbytes makes
# half as large as its kernel takes them to be; PagedAdEMAMix has 32 bits by default.
ADEMAMIX32 = Optimizer("ademamix32", 12, "PagedAdEMAMix", "PagedAdEMAMix", "AdEMAMix")

# All of the state on the device: compared with the classes that do not page.
RESIDENT32 = Optimizer("resident32", 8, "PagedAdamW32bit", "AdamW32bit", "AdamW32bit", False)
RESIDENT8 = Optimizer("resident8", 2, "PagedAdamW8bit", "AdamW8bit", "AdamW8bit", False)

LLAMA = _llama(vocabulary=128_256, hidden=2048, layers=16, intermediate=8192, kv=8 * 64)
#: Large and small parameters together: what is paged and what is not, in one step.
MIXED = Layout("mixed", ((4096, 512), (2048,), (1024, 1024), (99_999,), (1024, 1024), (2048,)))
#: As many elements as 32x8Mi (but for rounding), nine tenths of them in one parameter.
SKEWED = Layout("90%-in-one", ((241_591_808,), *((865_924,),) * 31), cpu_divisor=16)

QUICK = Preset(
    "quick",
    "a few small cells, in under two minutes on a GPU or on two CPU cores",
    (
        Cell(ADAMW32, _uniform(8, 1)),
        Cell(ADAMW8, _uniform(8, 1)),
        Cell(LION8, _uniform(8, 1)),
        Cell(ADEMAMIX32, _uniform(4, 1)),
        Cell(ADAMW8, MIXED),
    ),
    Protocol(warmups=5, rounds=3, repetitions=4),
)
SOURCE = Preset(
    "source",
    "the six cells of the experiment this project answers, and the seven of its first H200 table",
    (
        Cell(ADAMW8, _uniform(8, 1)),
        Cell(ADAMW8, _uniform(8, 4)),
        Cell(ADAMW32, _uniform(8, 1)),
        Cell(ADAMW32, _uniform(8, 4)),
        Cell(LION8, _uniform(8, 4)),
        Cell(ADEMAMIX32, _uniform(8, 1)),
        Cell(ADAMW32, _uniform(32, 8)),
        Cell(ADAMW8, _uniform(32, 8)),
        Cell(ADAMW8, LLAMA),
    ),
    Protocol(warmups=10, rounds=7, repetitions=8),
)
SKEW = Preset(
    "skew",
    "as many elements in even parameters, and nine tenths of them in a single one",
    (Cell(ADAMW32, _uniform(32, 8)), Cell(ADAMW32, SKEWED)),
    Protocol(warmups=3, rounds=3, repetitions=4),
)
RESIDENT = Preset(
    "resident",
    "all state on the device, and none, against bitsandbytes' optimizers that do not page",
    tuple(
        Cell(optimizer, layout)
        for optimizer in (RESIDENT32, RESIDENT8)
        for layout in (_uniform(8, 1), _uniform(8, 4), _uniform(32, 8), LLAMA)
    ),
    Protocol(warmups=5, rounds=5, repetitions=6),
    strategies=("resident", "streamed"),
)
PRESETS = {preset.name: preset for preset in (QUICK, SOURCE, SKEW, RESIDENT)}
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
