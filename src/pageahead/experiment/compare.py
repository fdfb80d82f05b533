"""Are two optimizers in the same state, bit for bit?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pageahead.experiment.evidence import Comparison
from pageahead.optim.paged import PagedOptimizer

__all__ = ["compare"]

EXAMPLES = 5  # differences spelt out; the rest are counted


def compare(legacy: torch.optim.Optimizer, candidate: torch.optim.Optimizer) -> Comparison:
    """Compare every parameter and everything in every parameter's state.

    Tensors are compared as raw bytes: two NaNs are equal when their bits are, 0.0 and -0.0 are not.
    """
    if isinstance(candidate, PagedOptimizer):
        candidate.synchronize()  # it may still be writing state back
    tensors = nbytes = 0
    differences: list[str] = []
    for number, (theirs, ours) in enumerate(
        zip(_parameters(legacy), _parameters(candidate), strict=True)
    ):
        pairs = [("parameter", theirs.detach(), ours.detach())]
        pairs += _state_pairs(legacy.state[theirs], candidate.state[ours])
        for name, expected, found in pairs:
            if isinstance(expected, torch.Tensor):
                tensors += 1
                nbytes += expected.nbytes
            difference = _difference(expected, found)
            if difference is not None:
                differences.append(f"parameter {number}, {name}: {difference}")
    return Comparison(
        tensors=tensors,
        nbytes=nbytes,
        differences=len(differences),
        examples=differences[:EXAMPLES],
    )


def _parameters(optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state_pairs(
    legacy: Mapping[str, Any], candidate: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*legacy, *candidate]):
        yield name, legacy.get(name), candidate.get(name)


def _difference(expected: Any, found: Any) -> str | None:
    """What sets `found` apart from `expected`; None if nothing does."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return (
            None
            if type(expected) is type(found) and expected == found
            else (f"{_kind(expected)} in legacy, {_kind(found)} here")
        )
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return (
            f"{expected.dtype} of shape {tuple(expected.shape)} in legacy, "
            f"{found.dtype} of shape {tuple(found.shape)} here"
        )
    theirs, ours = _raw(expected), _raw(found).to(expected.device)
    if torch.equal(theirs, ours):
        return None
    return f"{int((theirs != ours).sum()):,} of {theirs.numel():,} bytes differ"


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)
