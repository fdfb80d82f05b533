"""Lists of parameter shapes, as data: even ones, working sets, and those of public models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from math import prod
from typing import Literal

from pageahead.experiment.public_models import MODELS
from pageahead.optim.routing import PAGED_NUMEL

__all__ = [
    "CPU_MINIMUM_NUMEL",
    "WORKING_SETS",
    "DeviceType",
    "Layout",
    "Shape",
    "WorkingSet",
    "public",
    "uniform",
    "working_set",
]

DeviceType = Literal["cpu", "cuda"]
Shape = tuple[int, ...]

MI = 1 << 20
#: A parameter scaled down for the CPU keeps at least this many elements, so that it still streams.
CPU_MINIMUM_NUMEL = 1 << 17
#: Elements in a row of a working set's matrices: one block of 8-bit state.
ROW = 256
#: Vectors between the matrices of a working set, as a model's norms and biases: never paged.
VECTORS = (2048, 768, 4096, 1024)


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
class WorkingSet:
    """How one working set is divided among parameters.

    Attributes:
        mebibytes: of ``state1`` over all paged parameters, and as much of ``state2`` if there is
            one.
        shares: relative sizes of one group of paged parameters.
        groups: how often that group comes.
        vectors: how many small parameters, which are not paged, come after the groups in turn.
        cpu_divisor: see `Layout`.
    """

    mebibytes: int
    shares: tuple[int, ...]
    groups: int
    vectors: int
    cpu_divisor: int = 8

    @property
    def parameters(self) -> int:
        return len(self.shares) * self.groups + self.vectors


# Not even parameters: a real model's differ by an order of magnitude. The smallest has to have
# 100,000 elements or more to be paged, which with 32-bit state leaves 2 MiB only four of them.
UNEVEN = (8, 1, 2, 1, 4, 1, 2, 1)
WORKING_SETS = (
    WorkingSet(2, (2, 1, 1, 1), groups=1, vectors=4),
    WorkingSet(8, UNEVEN, groups=1, vectors=4),
    WorkingSet(32, UNEVEN, groups=2, vectors=8),
    WorkingSet(64, UNEVEN, groups=3, vectors=8),
    WorkingSet(256, UNEVEN, groups=6, vectors=16, cpu_divisor=16),
)


def uniform(count: int, mebi_elements: int) -> Layout:
    """`count` vectors of `mebi_elements` Mi elements each."""
    return Layout(f"{count}x{mebi_elements}Mi", ((mebi_elements * MI,),) * count)


def working_set(what: WorkingSet, bytes_per_state: int) -> Layout:
    """The parameters whose ``state1`` has exactly that many bytes.

    Args:
        what: the size and how it is divided.
        bytes_per_state: of one state tensor per element: 1 with 8-bit state, 4 with 32-bit.
    """
    rows = what.mebibytes * MI // bytes_per_state // ROW
    share = rows // (sum(what.shares) * what.groups)
    sizes = [part * share for part in what.shares * what.groups]
    sizes[0] += rows - sum(sizes)  # what does not divide evenly
    matrices = _split([(size, ROW) for size in sizes], what.groups)
    lengths = [(VECTORS[number % len(VECTORS)],) for number in range(what.vectors)]
    vectors = _split(lengths, what.groups)
    shapes = chain.from_iterable(chain(*pair) for pair in zip(matrices, vectors, strict=True))
    return Layout(f"{what.mebibytes}MiB", tuple(shapes), what.cpu_divisor)


def public(name: str, cpu_divisor: int) -> Layout:
    """The parameters of a public model, in the order of its modules; see `public_models`."""
    model = MODELS[name]
    blocks = chain.from_iterable(repeat(model.block, model.blocks))
    return Layout(name, (*model.before, *blocks, *model.after), cpu_divisor)


def _split(items: Sequence[Shape], parts: int) -> list[Sequence[Shape]]:
    """`items` in order, cut into `parts` runs as even as they get."""
    cuts = [len(items) * part // parts for part in range(parts + 1)]
    return [items[begin:end] for begin, end in pairwise(cuts)]
