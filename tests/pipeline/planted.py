"""Mistakes that a hand would make in ``pipeline.py``, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["PLANTED", "Planted", "first_copy_only"]


@dataclass(frozen=True)
class Planted:
    """A mistake as edits of the source, each of a text that occurs once."""

    name: str
    edits: tuple[tuple[str, str], ...]

    def plant(self, source: str) -> str:
        """The source of ``pipeline.py`` with the mistake in it."""
        for old, new in self.edits:
            count = source.count(old)
            assert count == 1, f"{self.name}: {old!r} occurs {count} times in pipeline.py"
            source = source.replace(old, new)
        return source


def first_copy_only(device: Any, stream: Any, enqueue: Callable[[], None]) -> Any:
    """Call `enqueue`; return an event recorded after its first copy or prefetch on `stream`."""
    event: list[Any] = []
    kept = device.copy, device.prefetch

    def recording(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, stream: Any) -> None:
            method(*args, stream=stream)
            if not event:
                event.append(stream.record())

        return call

    device.copy, device.prefetch = map(recording, kept)
    try:
        enqueue()
    finally:
        del device.copy, device.prefetch
    return event[0] if event else stream.record()


PLANTED = (
    # Towards the caller and the host.
    Planted(
        "updates start after the compute stream's own work instead of the caller's",
        (("wait(self._device.caller_stream().record())", "wait(self._compute.record())"),),
    ),
    Planted(
        "the stream of the first step is taken for the caller's for ever",
        (
            (
                "self._compute.wait(self._device.caller_stream().record())",
                'self._first = getattr(self, "_first", None) or self._device.caller_stream()\n'
                "        self._compute.wait(self._first.record())",
            ),
        ),
    ),
    Planted(
        "the caller goes on after the last fetch instead of the last update",
        (("updated = self._compute.record()", "updated = self._fetch.record()"),),
    ),
    Planted(
        "the host waits for the last update but not for the last write-back",
        (("            self._complete()\n", "            self._last_updated.synchronize()\n"),),
    ),
    Planted(
        "the host waits for the last write-back but not for the last update",
        (("        self._last_updated = updated\n", ""),),
    ),
    Planted(
        "an exception leaves behind what is in flight",
        (
            (
                "        if self._open:\n            with suppress",
                "        if False:\n            with suppress",
            ),
        ),
    ),
    Planted(
        "a refused step forgets the write-backs of the one before",
        (
            (
                "        self._open = False\n        self._start()\n\n    def settle",
                "        self._open = False\n        self._last_written = None\n"
                "        self._start()\n\n    def settle",
            ),
        ),
    ),
    # The same bytes.
    Planted(
        "the last write-back is known only until the plan changes",
        (
            (
                "self._plan = self._primed = None",
                "self._plan = self._primed = self._last_written = None",
            ),
        ),
    ),
    Planted(
        "the first write-back of a step is taken for its last",
        (
            (
                "self._written[chunk.index] = self._last_written = written",
                "self._written[chunk.index] = written\n"
                "        if self._last_written is None or len(self._advanced) == 1:\n"
                "            self._last_written = written",
            ),
        ),
    ),
    Planted(
        "a parameter listed twice is fetched before its first update",
        (
            (
                "if chunk.after is not None and chunk.after not in self._advanced:",
                "if False:",
            ),
        ),
    ),
    Planted(
        "a parameter listed twice is fetched before it is home again",
        (("chunk.index if chunk.after is None else chunk.after", "chunk.index"),),
    ),
    Planted(
        "a parameter listed twice waits for the chunk before the right one",
        (("None else chunk.after)", "None else chunk.after - 1)"),),
    ),
    Planted(
        "a chunk is fetched before it is home from the step before",
        (("chunk.index if chunk.after is None else chunk.after", "chunk.after"),),
    ),
    Planted(
        "the second chunk of the same bytes is not waited for in the next step",
        (("(another or plan.repeats)", "another"),),
    ),
    # The same slot.
    Planted(
        "one chunk more than there are slots is fetched ahead",
        (
            ("len(self._flights) < depth", "len(self._flights) <= depth"),
            (
                "self._free.popleft() if",
                "plan.ring.slots[chunk.index % len(plan.ring.slots)] if",
            ),
        ),
    ),
    Planted(
        "a slot is free as soon as it is filled",
        (
            ("        self._free.append(slot)", "        pass"),
            (
                "        plan.transfer.fetch(chunk, slot, stream=stream)\n",
                "        plan.transfer.fetch(chunk, slot, stream=stream)\n"
                "        self._free.append(slot)\n",
            ),
        ),
    ),
    Planted(
        "nobody says that a slot was emptied",
        (("self._emptied[slot.index] = self._written", "self._written"),),
    ),
    Planted(
        "a slot counts as emptied once its update is done",
        (
            (
                "self._write_back.wait(self._compute.record())",
                "done = self._compute.record()\n        self._write_back.wait(done)",
            ),
            (
                "self._emptied[slot.index] = self._written[chunk.index] = ",
                "self._emptied[slot.index] = done\n        self._written[chunk.index] = ",
            ),
        ),
    ),
    Planted(
        "a slot counts as emptied after the first of its copies",
        (
            (
                "plan.transfer.write_back(chunk, slot, stream=self._write_back)\n"
                "        written = self._write_back.record()",
                "written = first_copy_only(self._device, self._write_back, lambda: "
                "plan.transfer.write_back(chunk, slot, stream=self._write_back))",
            ),
        ),
    ),
    Planted(
        "a slot waits for its neighbour to be emptied",
        (("self._emptied.get(slot.index)", "self._emptied.get(slot.index + 1)"),),
    ),
    # Between arrival and departure.
    Planted(
        "the update waits after it is launched",
        (
            ("        self._compute.wait(flight.fetched)\n", ""),
            (
                "            update(chunk, flight.slot)\n",
                "            update(chunk, flight.slot)\n"
                "            self._compute.wait(flight.fetched)\n",
            ),
        ),
    ),
    Planted(
        "a chunk counts as arrived after the first of its copies",
        (
            (
                "plan.transfer.fetch(chunk, slot, stream=stream)\n"
                "        return _Flight(slot, stream.record())",
                "fetched = first_copy_only(self._device, stream, lambda: "
                "plan.transfer.fetch(chunk, slot, stream=stream))\n"
                "        return _Flight(slot, fetched)",
            ),
        ),
    ),
    Planted(
        "an update waits for the chunk that arrived before",
        (
            (
                "        return _Flight(slot, stream.record())",
                "        now = stream.record()\n"
                '        before, self._before = getattr(self, "_before", now), now\n'
                "        return _Flight(slot, before)",
            ),
        ),
    ),
    Planted(
        "a chunk goes home before it is updated",
        (
            (
                "            update(chunk, flight.slot)\n"
                "            self._send_home(chunk, flight.slot, plan)\n",
                "            self._send_home(chunk, flight.slot, plan)\n"
                "            update(chunk, flight.slot)\n",
            ),
        ),
    ),
    Planted(
        "a write-back may start with the chunk's arrival",
        (
            (
                "        self._write_back.wait(self._compute.record())\n",
                "        self._write_back.wait(self._fetch.record())\n",
            ),
        ),
    ),
    Planted(
        "a chunk whose update fails stays where it is",
        (
            (
                "                self._send_home(chunk, flight.slot, plan)\n            raise",
                "                pass\n            raise",
            ),
        ),
    ),
    # The wrong thing at the right time.
    Planted(
        "a chunk goes home from the wrong slot",
        (
            (
                "plan.transfer.write_back(chunk, slot, stream",
                "plan.transfer.write_back(chunk, "
                "plan.ring.slots[(slot.index + 1) % len(plan.ring.slots)], stream",
            ),
        ),
    ),
    Planted(
        "another chunk is fetched than is updated",
        (
            (
                "plan.transfer.fetch(chunk, slot, stream",
                "plan.transfer.fetch(plan.chunks[chunk.index - 1], slot, stream",
            ),
        ),
    ),
    Planted(
        "the last chunk does not go home",
        (
            (
                "        if slot is None:\n            return\n",
                "        if slot is None or chunk is plan.chunks[-1]:\n            return\n",
            ),
        ),
    ),
    Planted(
        "lookahead looks two ahead",
        (
            (
                "len(self._flights) < depth",
                "len(self._flights) < depth + (depth and not plan.transfer.copies)",
            ),
        ),
    ),
    Planted(
        "what was sent for in vain is forgotten",
        (("        if self._flights:\n", "        if False:\n"),),
    ),
    Planted(
        "new slots are filled while their memory is still in use",
        (("if plan.ring is not None and another:", "if False:"),),
    ),
    Planted(
        "a step forgets which slots the one before has not emptied yet",
        (
            (
                "        self._start()\n        self._open = True\n        self._prime",
                "        self._start()\n        self._emptied.clear()\n"
                "        self._open = True\n        self._prime",
            ),
        ),
    ),
    Planted(
        "a step that ends forgets what it sent for in vain",
        (("        self._recall()\n        self._open = False", "        self._open = False"),),
    ),
    Planted(
        "slots that were filled in vain stay full",
        (("            self._free.extend(flown)\n", ""),),
    ),
    Planted(
        "slots of another plan's ring are taken for free ones",
        (
            (
                "if another:\n            self._all_free",
                "if not self._free:\n            self._all_free",
            ),
        ),
    ),
)
