"""Raw bits of parameters and state, and the first place where two sides differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from pageahead.experiment.oracle.records import Difference

__all__ = ["Bits", "Entry", "Image", "compare_images", "first_difference", "nbytes_of", "take"]


@dataclass(frozen=True, eq=False)
class Bits:
    """A tensor's bytes on the host, in the order of its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    raw: torch.Tensor

    def values(self) -> torch.Tensor:
        """The tensor, flat."""
        return self.raw.clone().view(self.dtype)  # cloned: a view may begin at an odd byte


#: A tensor, or what else is in a state: the step count.
Entry = Bits | object
#: By name: ``parameter`` first, then what is in its state.
Image = Mapping[str, Entry]


def take(
    parameters: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, Any]],
    *,
    by_address: bool,
) -> list[Image]:
    """Copy the bits of every parameter and of everything in its state.

    Args:
        parameters: contiguous ones if they were ever updated.
        states: of each of them.
        by_address: take the elements of state as they follow each other in memory, whatever the
            strides say. CUDA kernels find them by address; CPU operators by index.
    """
    images: list[dict[str, Entry]] = []
    places: list[tuple[dict[str, Entry], str, torch.Tensor]] = []
    tensors: list[torch.Tensor] = []
    for parameter, state in zip(parameters, states, strict=True):
        image: dict[str, Entry] = {"parameter": None}
        images.append(image)
        places.append((image, "parameter", parameter))
        tensors.append(parameter.detach())
        for name in sorted(state):
            value = state[name]
            image[name] = value
            if isinstance(value, torch.Tensor):
                places.append((image, name, value))
                in_memory = by_address and not value.is_contiguous()
                tensors.append(value.as_strided((value.numel(),), (1,)) if in_memory else value)
    for (image, name, tensor), raw in zip(places, _to_host(tensors), strict=True):
        image[name] = Bits(tensor.dtype, tuple(tensor.shape), raw)
    return list(images)


def nbytes_of(images: Sequence[Image]) -> tuple[int, int]:
    """Number of tensors, and their bytes."""
    sizes = [one.raw.numel() for image in images for one in image.values() if isinstance(one, Bits)]
    return len(sizes), sum(sizes)


def compare_images(expected: Image, found: Image, *, skip: Sequence[str] = ()) -> Difference | None:
    """The first element of one parameter and its state that differs in any bit."""
    for name in dict.fromkeys([*expected, *found]):
        if name not in skip:
            difference = _compare(expected.get(name), found.get(name))
            if difference is not None:
                return difference.model_copy(update={"name": name})
    return None


def first_difference(expected: Bits, found: Bits, differs: torch.Tensor) -> Difference:
    """Describe the first of the elements that `differs`, one boolean per element, marks."""
    position = int(differs.nonzero()[0])
    size = expected.dtype.itemsize
    one, other = (bits.raw[position * size : (position + 1) * size] for bits in (expected, found))
    return Difference(
        index=_unravel(position, expected.shape),
        expected=_value(one, expected.dtype),
        found=_value(other, expected.dtype),
        expected_bits=_hex(one),
        found_bits=_hex(other),
        differing=int(differs.sum()),
        elements=prod(expected.shape),
    )


def _compare(expected: Entry, found: Entry) -> Difference | None:
    if not isinstance(expected, Bits) or not isinstance(found, Bits):
        if type(expected) is type(found) and expected == found:
            return None
        return Difference(expected=_said(expected), found=_said(found))
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return Difference(expected=_said(expected), found=_said(found))
    if torch.equal(expected.raw, found.raw):
        return None
    size = expected.dtype.itemsize
    differs = (expected.raw != found.raw).view(-1, size).any(dim=1)
    return first_difference(expected, found, differs)


def _to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bytes of each tensor; those on a GPU come in one copy."""
    # Not view(-1): a tensor of one element counts as contiguous with any stride.
    flat = [tensor.contiguous().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    raws = [tensor.view(torch.uint8) for tensor in flat]
    by_device: dict[torch.device, list[int]] = {}
    for number, raw in enumerate(raws):
        by_device.setdefault(raw.device, []).append(number)
    for numbers in by_device.values():
        joined = torch.cat([raws[number] for number in numbers]).cpu()
        sizes = [raws[number].numel() for number in numbers]
        for number, part in zip(numbers, joined.split(sizes), strict=True):
            raws[number] = part
    return raws


def _unravel(position: int, shape: tuple[int, ...]) -> list[int]:
    index = []
    for size in reversed(shape):
        position, place = divmod(position, size)
        index.append(place)
    return index[::-1]


def _value(raw: torch.Tensor, dtype: torch.dtype) -> str:
    return repr(raw.clone().view(dtype).item())


def _hex(raw: torch.Tensor) -> str:
    """Most significant byte first; memory is little-endian."""
    return "0x" + bytes(raw.flip(0).tolist()).hex()


def _said(entry: Entry) -> str:
    if isinstance(entry, Bits):
        return f"{entry.dtype} of shape {entry.shape}"
    return "nothing" if entry is None else repr(entry)
