"""Where bits cannot be equal: how far apart values may be, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch

from pageahead.experiment.oracle.bits import Bits, Image, compare_images, first_difference
from pageahead.experiment.oracle.records import Difference
from pageahead.memory.layout import BLOCK

__all__ = ["Tolerance", "cpu_operator", "limited_norm"]

#: Elements that are too far apart, one boolean each; None if they are few enough.
Rule = Callable[[Image, Image], torch.Tensor | None]


@dataclass(frozen=True)
class Tolerance:
    """For some entries of a parameter; all others have to be equal bit for bit.

    Attributes:
        said: what may differ by how much, and why.
        rules: by the entry's name.
    """

    said: str
    rules: Mapping[str, Rule]

    def compare(self, expected: Image, found: Image) -> Difference | None:
        """The first difference that is not tolerated."""
        for name, rule in self.rules.items():
            one, other = expected.get(name), found.get(name)
            if not _comparable(one, other):
                return compare_images({name: one}, {name: other})
            outside = rule(expected, found)
            if outside is not None:
                difference = first_difference(cast(Bits, one), cast(Bits, other), outside)
                return difference.model_copy(
                    update={"name": name, "remark": f"beyond tolerance ({self.said})"}
                )
        return compare_images(expected, found, skip=tuple(self.rules))


def limited_norm(steps: int, dtype: torch.dtype) -> Tolerance:
    """For a parameter whose update's norm is limited, on a GPU.

    The norm is a sum of floats in the order in which thread blocks happen to end, so that legacy
    differs from legacy. It scales the update, and a parameter may round to its neighbour at each
    step. The moments do not depend on it.
    """
    spacing = torch.finfo(dtype).eps

    def parameter(expected: Image, found: Image) -> torch.Tensor | None:
        one, other = _floats(expected, "parameter"), _floats(found, "parameter")
        return _any(_apart(one, other, steps * (1e-6 + spacing * one.abs())))

    def unorm(expected: Image, found: Image) -> torch.Tensor | None:
        one, other = _floats(expected, "unorm_vec"), _floats(found, "unorm_vec")
        return _any(_apart(one, other, 1e-4 * one.abs()))

    return Tolerance(
        f"max_unorm: the norm is summed with float atomics, in no fixed order; {steps} roundings "
        f"of the parameter",
        {"parameter": parameter, "unorm_vec": unorm},
    )


def cpu_operator(lr: float, dtype: torch.dtype) -> Tolerance:
    """For 8-bit AdEMAMix on a GPU against the CPU operator, which rounds differently now and then.

    A moment may come to a neighbouring code, which is up to 1.5 % of its block's absmax away; where
    the second moment is tiny that moves an update. So nearly all elements of every block have to be
    near, not each. A mistake in slicing or in finding an absmax moves whole blocks.
    """
    spacing = torch.finfo(dtype).eps

    def parameter(expected: Image, found: Image) -> torch.Tensor | None:
        one, other = _floats(expected, "parameter"), _floats(found, "parameter")
        return _many(_apart(one, other, 0.5 * lr + 2 * spacing * one.abs()))

    def moment(number: int) -> Rule:
        def rule(expected: Image, found: Image) -> torch.Tensor | None:
            scale = _blockwise(expected, number)
            one, other = (_moment(image, number) for image in (expected, found))
            return _many(_apart(one, other, 0.03 * scale))

        return rule

    def absmax(number: int) -> Rule:
        name = f"absmax{number}"

        def rule(expected: Image, found: Image) -> torch.Tensor | None:
            one, other = _floats(expected, name), _floats(found, name)
            return _many(_apart(one, other, 0.05 * one))

        return rule

    return Tolerance(
        "the CPU operator rounds differently now and then: 95 % of all elements, and 75 % of each "
        "block, within half a learning rate, 3 % of the block's absmax, 5 % of the absmax itself",
        {
            "parameter": parameter,
            "absmax1": absmax(1),
            "state1": moment(1),
            "absmax2": absmax(2),
            "state2": moment(2),
        },
    )


def _comparable(one: object, other: object) -> bool:
    return (
        isinstance(one, Bits)
        and isinstance(other, Bits)
        and (one.dtype, one.shape) == (other.dtype, other.shape)
    )


def _floats(image: Image, name: str) -> torch.Tensor:
    return cast(Bits, image[name]).values().float()


def _blockwise(image: Image, number: int) -> torch.Tensor:
    """The absmax of each element of a state tensor, flat; of one row after the other."""
    state = cast(Bits, image[f"state{number}"])
    absmax = cast(Bits, image[f"absmax{number}"])
    rows = absmax.shape[0] if len(absmax.shape) == 2 else 1
    each = absmax.values().view(rows, -1).repeat_interleave(BLOCK, dim=1)
    return each[:, : state.raw.numel() // rows].reshape(-1)


def _moment(image: Image, number: int) -> torch.Tensor:
    codes = cast(Bits, image[f"state{number}"]).raw.long()
    return _floats(image, f"qmap{number}")[codes] * _blockwise(image, number)


def _apart(one: torch.Tensor, other: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Which values are further apart than `limit`; NaN is far from everything."""
    return ~((one - other).abs() <= limit)


def _any(outside: torch.Tensor) -> torch.Tensor | None:
    return outside if bool(outside.any()) else None


def _many(outside: torch.Tensor) -> torch.Tensor | None:
    """Those outside, if they are more than 5 % of all or 25 % (and 3) of a block's."""
    if float(outside.float().mean()) > 0.05:
        return outside
    padding = -outside.numel() % BLOCK
    blocks = torch.nn.functional.pad(outside, (0, padding)).view(-1, BLOCK)
    sizes = torch.full((len(blocks),), BLOCK)
    sizes[-1] -= padding
    counts = blocks.sum(dim=1)
    bad = (counts > sizes * 0.25) & (counts > 3)
    return outside & bad.repeat_interleave(BLOCK)[: outside.numel()] if bool(bad.any()) else None
