"""What is measured: widths of AdamW's state by tokens in an iteration, and the ways of working."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pageahead.experiment.cells import DeviceType, UnknownCellError, matching
from pageahead.experiment.protocol import Protocol

__all__ = [
    "ARMS",
    "BASELINE",
    "BUDGETS",
    "CELLS",
    "CPU_PARAMETERS",
    "PARAMETERS",
    "PRESET",
    "PROTOCOL",
    "ArmSpec",
    "TrainingCell",
    "Way",
    "arms_of",
    "cell_named",
    "select",
]

Way = Literal["hbm", "model", "torch", "after", "during"]

PRESET = "training"
PARAMETERS = 1_340_000_000
#: A model for the CPU, where bits are compared and nothing is timed for real.
CPU_PARAMETERS = 2_000_000
PROTOCOL = Protocol(warmups=3, rounds=5, repetitions=3)
#: `int` 0 is no bytes; the others are shares of the state.
BUDGETS: tuple[int | float, ...] = (0, 0.20, 0.35, 0.50)

LABELS = {
    "hbm": "all in HBM",
    "model": "model alone",
    "torch": "torch fused",
    "after": "after backward",
    "during": "during backward",
}


@dataclass(frozen=True)
class ArmSpec:
    """One way of working.

    Attributes:
        way: ``hbm`` is bitsandbytes' own AdamW with all its state on the GPU, ``model`` the model
            alone without an optimizer, ``torch`` PyTorch's fused AdamW; ``after`` and ``during``
            are ours, streamed after or during the backward pass.
        budget: ours alone: `Paging.hbm_budget`.
    """

    way: Way
    budget: int | float | None = None

    @property
    def name(self) -> str:
        return self.way if self.budget is None else f"{self.way}-{self.budget:g}"

    @property
    def ours(self) -> bool:
        return self.way in ("after", "during")

    @property
    def label(self) -> str:
        """For people."""
        return LABELS[self.way]


BASELINE = ArmSpec("hbm")
_OURS = tuple(ArmSpec(way, budget) for budget in BUDGETS for way in ("after", "during"))
_ALL = (BASELINE, ArmSpec("model"), ArmSpec("torch"), *_OURS)
ARMS = {arm.name: arm for arm in _ALL}


@dataclass(frozen=True)
class TrainingCell:
    """AdamW with state of `bits` bits, and `tokens` tokens in each iteration.

    On the CPU an iteration has 64 times fewer tokens, in sequences of 32 instead of 2,048.
    """

    bits: Literal[8, 32]
    tokens: int

    @property
    def name(self) -> str:
        return f"adamw{self.bits}/{self.tokens}"

    def batch_on(self, device: DeviceType) -> tuple[int, int]:
        """Sequences of an iteration, and tokens of each."""
        length = 2048
        divisor = 1 if device == "cuda" else 64
        return self.tokens // length, length // divisor


CELLS = tuple(TrainingCell(bits, tokens) for bits in (32, 8) for tokens in (4096, 16_384))


def arms_of(cell: TrainingCell) -> list[ArmSpec]:
    """The ways in which `cell` is measured beside the baseline: PyTorch has no 8-bit AdamW."""
    return [arm for arm in _ALL[1:] if arm.way != "torch" or cell.bits == 32]


def cell_named(name: str) -> TrainingCell:
    """Return the cell called `name`. Raises `UnknownCellError` where there is none."""
    for cell in CELLS:
        if cell.name == name:
            return cell
    raise UnknownCellError(
        f"no cell is called {name!r}; there are: {', '.join(cell.name for cell in CELLS)}"
    )


def select(pattern: str | None) -> list[TrainingCell]:
    """The cells whose name matches `pattern`, as `pageahead.experiment.cells.select`."""
    return matching(CELLS, PRESET, pattern)
