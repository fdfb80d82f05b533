"""What happened on a device, as data: who did what, to which bytes, after which events.

`pageahead.device.recording` writes it, `pageahead.pipeline.ordering` checks it. Neither plans nor
chunks occur in it, only agents, byte ranges and events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["HOST", "Names", "Operation", "Range", "ranges_of"]

HOST = "host"
"""The agent that enqueues everything else. All other agents are streams."""


class Range(NamedTuple):
    """Bytes ``[start, stop)`` of the address space."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that one agent does.

    What a stream does starts after the point of the host program at which it was enqueued, which
    is where it stands in the trace; nothing else orders it but its stream and what it waits for.

    Attributes:
        number: position in the trace.
        agent: the stream it was enqueued on, or `HOST`.
        what: a verb, for people.
        reads, writes: bytes that it needs to itself, or shares with other readers.
        migrates: bytes that it moves between memories. The driver keeps them coherent, so earlier
            accesses may go on beside it; but an access enqueued later must not start before it.
        records: the event that is done once this operation is.
        waits: events that are done before this operation starts.
        idles: streams on which everything enqueued so far is done before this operation starts.
    """

    number: int
    agent: str
    what: str
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    migrates: tuple[Range, ...] = ()
    records: str | None = None
    waits: tuple[str, ...] = ()
    idles: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"operation {self.number}: {self.agent} {self.what}"


def ranges_of(tensors: Iterable[torch.Tensor | None]) -> tuple[Range, ...]:
    """The bytes of some tensors' elements, row by row where a tensor is not contiguous."""
    found: list[Range] = []
    for tensor in tensors:
        if tensor is None or tensor.numel() == 0:
            continue
        if tensor.is_contiguous():
            found.append(Range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        else:
            found += ranges_of(tensor.detach().unbind())
    return tuple(found)


class Names:
    """What to call bytes in a printed trace."""

    def __init__(self) -> None:
        self._known: dict[Range, str] = {}

    def give(self, tensor: torch.Tensor, name: str) -> None:
        """Call the bytes of `tensor` by `name` from now on; the newest name of a range counts."""
        for known in ranges_of([tensor]):
            self.give_range(known, name)

    def give_range(self, known: Range, name: str) -> None:
        self._known[known] = name

    def of(self, asked: Range) -> str:
        """The name of the smallest named range around `asked`, with the bytes of it meant."""
        around = [one for one in self._known if one.start <= asked.start and asked.stop <= one.stop]
        if around:
            best = min(around, key=lambda one: one.stop - one.start)
            start, stop = asked.start - best.start, asked.stop - best.start
            part = "" if asked == best else f"[{start:,}:{stop:,}]"
            return f"{self._known[best]}{part}"
        return f"{asked.stop - asked.start:,} bytes at {asked.start:#x}"

    def of_all(self, asked: Sequence[Range]) -> str:
        return ", ".join(dict.fromkeys(self.of(one) for one in asked))

    def describe(self, operation: Operation) -> str:
        """One line: who, what, which bytes, which event."""
        words = [f"{operation.number:5}  {operation.agent:<10}  {operation.what}"]
        if operation.migrates:
            words.append(self.of_all(operation.migrates))
        if operation.writes and operation.reads:
            words.append(f"{self.of_all(operation.reads)} → {self.of_all(operation.writes)}")
        elif operation.writes or operation.reads:
            words.append(self.of_all(operation.writes or operation.reads))
        words += [*operation.waits, ", ".join(operation.idles), operation.records or ""]
        return " ".join(word for word in words if word)
