"""Lists of parameters, named, and as text: ``300x1000,64,@0`` lists the first one again."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

__all__ = ["LAYOUTS", "Layout", "parse_layout"]

Shape = tuple[int, ...]

SCALAR = "scalar"


@dataclass(frozen=True)
class Layout:
    """Parameters and the order in which they are listed.

    Attributes:
        shapes: of the parameters.
        listing: positions in `shapes`; a parameter listed twice is in it twice.
    """

    shapes: tuple[Shape, ...]
    listing: tuple[int, ...]

    @classmethod
    def of(cls, *shapes: Shape) -> Layout:
        """Each parameter listed once, in order."""
        return cls(shapes, tuple(range(len(shapes))))

    @property
    def numels(self) -> list[int]:
        """Elements of each parameter."""
        return [prod(shape) for shape in self.shapes]

    @property
    def repeats(self) -> bool:
        """Whether a parameter is listed more than once."""
        return len(self.listing) > len(self.shapes)

    def without(self, numbers: set[int]) -> Layout:
        """The same list without some of its parameters."""
        kept = [number for number in range(len(self.shapes)) if number not in numbers]
        places = {number: place for place, number in enumerate(kept)}
        listing = tuple(places[number] for number in self.listing if number in places)
        return Layout(tuple(self.shapes[number] for number in kept), listing)

    def once(self) -> Layout:
        """The same parameters, each listed once."""
        return Layout.of(*self.shapes)

    def __str__(self) -> str:
        for name, known in LAYOUTS.items():
            if known == self:
                return name
        words = []
        for place, number in enumerate(self.listing):
            again = number in self.listing[:place]
            words.append(f"@{number}" if again else _shape_text(self.shapes[number]))
        return ",".join(words)


def parse_layout(text: str) -> Layout:
    """The inverse of ``str(layout)``: a name of `LAYOUTS` or a list of shapes.

    Raises:
        ValueError: it is neither; the message has the names.
    """
    if text in LAYOUTS:
        return LAYOUTS[text]
    shapes: list[Shape] = []
    listing: list[int] = []
    for word in text.split(","):
        number = len(shapes)
        if word.startswith("@"):
            number = _number(word[1:], text)
            if number >= len(shapes):
                raise ValueError(
                    f"{word} in layout {text!r} names a parameter that is not yet there"
                )
        else:
            sizes = () if word == SCALAR else tuple(_number(one, text) for one in word.split("x"))
            if 0 in sizes:
                raise ValueError(f"{word} in layout {text!r} has no elements: nothing to compare")
            shapes.append(sizes)
        listing.append(number)
    return Layout(tuple(shapes), tuple(listing))


def _number(word: str, text: str) -> int:
    if not word.isdecimal():
        raise ValueError(
            f"{text!r} is no layout: neither one of {', '.join(LAYOUTS)} nor shapes like "
            f"300x1000,64,{SCALAR},@0"
        )
    return int(word)


def _shape_text(shape: Shape) -> str:
    return "x".join(map(str, shape)) if shape else SCALAR


TINY = ((1,), (7,), (64,), (3, 4, 5, 2), (255,), (256,), (257,), (16, 17), (), (70, 70))

#: Small in bytes, so that many cells take little time, but on both sides of every limit there is:
#: 4,096 elements (8-bit state), 100,000 (paging), multiples of 256 (8-bit blocks), and what fits
#: into a chunk. All have a parameter of four dimensions, which can be channels_last.
LAYOUTS = {
    "heterogeneous": Layout.of((64,), (120, 900), (5_000,), (32, 64, 7, 8), (40, 2_600)),
    "boundary": Layout.of((41, 271, 3, 3), (100, 10, 10, 10), (11, 9_091), (4_095,), (4_096,)),
    "odd": Layout.of((333, 301), (5, 7, 59, 61), (4_097,), (101,), ()),
    "one": Layout.of((64, 32, 8, 8)),
    "giant": Layout.of((101, 61, 10, 10)),
    "tiny": Layout.of(*TINY * 20),
    "mixed": Layout.of((392, 256), (10,), (128, 800), (3, 3), (8, 50, 16, 16), (99_840,), (5_120,)),
    "twice": Layout(((8, 50, 16, 16), (300,), (128, 800)), (0, 1, 2, 0)),
}
