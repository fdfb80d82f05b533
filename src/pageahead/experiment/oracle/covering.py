"""Choosing few combinations in which any few values of different dimensions meet. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

__all__ = ["Choice", "Dimensions", "covering", "everything", "tuples"]

Dimensions = Mapping[str, Sequence[str]]
Choice = dict[str, str]
#: Why a choice, of some or all dimensions, cannot be; None if it can.
Exclusion = Callable[[Mapping[str, str]], str | None]
Tuple = tuple[tuple[str, str], ...]


def everything(dimensions: Dimensions) -> Iterator[Choice]:
    """Every combination."""
    for values in product(*dimensions.values()):
        yield dict(zip(dimensions, values, strict=True))


def tuples(dimensions: Dimensions, exclusion: Exclusion, strength: int) -> list[Tuple]:
    """Every combination of values of `strength` different dimensions that is not excluded."""
    return [
        tuple(zip(names, values, strict=True))
        for names in combinations(dimensions, strength)
        for values in product(*(dimensions[name] for name in names))
        if exclusion(dict(zip(names, values, strict=True))) is None
    ]


def covering(dimensions: Dimensions, exclusion: Exclusion, strength: int) -> list[Choice]:
    """Choices in which each of `tuples` is met by at least one; the same at every call.

    Greedy: each choice starts from the first combination not met yet and takes, dimension by
    dimension, the value that meets most others.
    """
    waiting = dict.fromkeys(tuples(dimensions, exclusion, strength))
    used: Counter[tuple[str, str]] = Counter()
    choices = []
    while waiting:
        chosen = dict(next(iter(waiting)))
        for name in dimensions:
            if name not in chosen:
                chosen[name] = _best(chosen, name, dimensions, exclusion, waiting, used, strength)
        choice = {name: chosen[name] for name in dimensions}
        choices.append(choice)
        used.update(choice.items())
        for met in combinations(choice.items(), strength):
            waiting.pop(met, None)
    return choices


def _best(
    chosen: Choice,
    name: str,
    dimensions: Dimensions,
    exclusion: Exclusion,
    waiting: Mapping[Tuple, None],
    used: Mapping[tuple[str, str], int],
    strength: int,
) -> str:
    others = [one for one in dimensions if one in chosen]

    def met(value: str) -> int:
        with_value = {**chosen, name: value}
        count = 0
        for names in combinations(others, strength - 1):
            ordered = [one for one in dimensions if one in names or one == name]
            count += tuple((one, with_value[one]) for one in ordered) in waiting
        return count

    possible = [value for value in dimensions[name] if exclusion({**chosen, name: value}) is None]
    return max(possible, key=lambda value: (met(value), -used[name, value]))
