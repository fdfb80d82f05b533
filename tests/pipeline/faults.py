"""The pipeline with one mistake in it, as many times as there are mistakes to make.

`edges` makes a fault of every wait and every record that is in ``pipeline.py``, whatever is in it:
each wait left out, each event taken too early. `PLANTED` has the mistakes a hand would make. Both
are applied to the source, so a fault differs from what ships in what its name says and nothing
else.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pageahead.pipeline import pipeline as shipped

__all__ = ["PLANTED", "Fault", "edges", "every_fault"]

WAITS = {"wait", "synchronize", "settle", "drain"}
RECORDS = {"record"}
QUIET = 'self._device.stream("quiet")'
"""A stream on which nothing happens: its events are done at once and order nothing."""


@dataclass(frozen=True)
class Fault:
    """A pipeline with one mistake.

    Attributes:
        name: what the mistake is.
        source: of the whole module.
    """

    name: str
    source: str

    def pipeline(self) -> Any:
        """The faulty `Pipeline` class."""
        module = types.ModuleType(shipped.__name__)
        module.__dict__.update(first_copy_only=first_copy_only)
        exec(compile(self.source, f"<{self.name}>", "exec"), module.__dict__)
        return module.Pipeline


def every_fault() -> list[Fault]:
    """All faults of the pipeline as it is now."""
    source = inspect.getsource(shipped)
    return [*edges(source), *(planted(source) for planted in PLANTED)]


# --- one fault per wait and per record ------------------------------------------------------------


def edges(source: str) -> Iterator[Fault]:
    """Leave out each wait of `source`, and take each of its events too early.

    Too early is, for every event, before anything that its stream does; and, where it directly
    follows a statement that enqueues something, before that.
    """
    for name, number in _calls(source, WAITS):
        yield Fault(f"{name} left out", _edited(source, number, _leave_out))
    for name, number in _calls(source, RECORDS):
        yield Fault(f"{name} of nothing", _edited(source, number, _record_nothing))
        hoisted = _hoisted(source, number)
        if hoisted is not None:
            before, text = hoisted
            yield Fault(f"{name} before {before}", text)


def _calls(source: str, attributes: set[str]) -> list[tuple[str, int]]:
    """Name and number, among all method calls in `source`, of those of these methods."""
    found: list[tuple[str, int]] = []
    for number, (function, call) in enumerate(_method_calls(ast.parse(source))):
        assert isinstance(call.func, ast.Attribute)
        if call.func.attr in attributes:
            name = f"{function}: {ast.unparse(call)}"
            same = sum(other.split(" #")[0] == name for other, _ in found)
            found.append((f"{name} #{same + 1}" if same else name, number))
    return found


def _method_calls(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """Every method call with the function it is in, in the order of the source."""
    found = [
        (function.name, node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    return sorted(found, key=lambda one: (one[1].lineno, one[1].col_offset, one[1].end_col_offset))


def _edited(source: str, number: int, edit: Callable[[ast.Call], ast.expr]) -> str:
    tree = ast.parse(source)
    return ast.unparse(_with(tree, _method_calls(tree)[number][1], edit))


def _leave_out(call: ast.Call) -> ast.expr:
    return ast.Constant(None)


def _record_nothing(call: ast.Call) -> ast.expr:
    return ast.parse(f"{QUIET}.record()", mode="eval").body


def _hoisted(source: str, number: int) -> tuple[str, str] | None:
    """The statement that is passed over, and the source; None if there is none to pass over."""
    tree = ast.parse(source)
    target = _method_calls(tree)[number][1]
    for block in _blocks(tree):
        for number, (before, statement) in enumerate(pairwise(block)):
            enqueues = isinstance(before, ast.Expr) and isinstance(before.value, ast.Call)
            simple = isinstance(statement, ast.Assign | ast.Expr | ast.Return)
            if enqueues and simple and any(node is target for node in ast.walk(statement)):
                early = ast.parse(f"_early = {ast.unparse(target)}").body[0]
                late = _with(statement, target, lambda call: ast.Name("_early"))
                block[number : number + 2] = [early, before, late]
                return ast.unparse(before), ast.unparse(ast.fix_missing_locations(tree))
    return None


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _with(tree: Any, target: ast.Call, edit: Callable[[ast.Call], ast.expr]) -> Any:
    """The tree with `target` replaced."""

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            return edit(node) if node is target else self.generic_visit(node)

    return Replace().visit(tree)


# --- mistakes made by hand ------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A mistake as edits of the source, each of a text that occurs once."""

    name: str
    edits: tuple[tuple[str, str], ...]

    def __call__(self, source: str) -> Fault:
        for old, new in self.edits:
            count = source.count(old)
            assert count == 1, f"{self.name}: {old!r} occurs {count} times in pipeline.py"
            source = source.replace(old, new)
        return Fault(self.name, source)


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
        (("wait(self._caller.record())", "wait(self._compute.record())"),),
    ),
    Planted(
        "the stream of the first step is taken for the caller's for ever",
        (
            (
                "self._caller = self._device.caller_stream()",
                "self._caller = self._first = "
                'getattr(self, "_first", None) or self._device.caller_stream()',
            ),
        ),
    ),
    Planted(
        "the caller goes on after the last fetch instead of the last update",
        (("updated = self._compute.record()", "updated = self._fetch.record()"),),
    ),
    Planted(
        "the host waits for the last update but not for the last write-back",
        (("            self.settle()\n", "            self._last_updated.synchronize()\n"),),
    ),
    Planted(
        "the host waits for the last write-back but not for the last update",
        (("        self._last_updated = updated\n", ""),),
    ),
    Planted(
        "an exception leaves behind what is in flight",
        (("        if self._open:\n", "        if False:\n"),),
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
        (("None if chunk.after is None else", "None if True else"),),
    ),
    Planted(
        "a parameter listed twice waits for the chunk before the right one",
        (("self._written.get(chunk.after)", "self._written.get(chunk.after - 1)"),),
    ),
    # The same slot.
    Planted(
        "one chunk more than there are slots is fetched ahead",
        (
            ("len(self._flights) < plan.depth", "len(self._flights) <= plan.depth"),
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
                "        try:\n            update(chunk, flight.slot)\n",
                "        self._send_home(chunk, flight.slot, plan)\n"
                "        try:\n            update(chunk, flight.slot)\n",
            ),
            (
                "            raise\n        self._send_home(chunk, flight.slot, plan)\n",
                "            raise\n",
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
                "len(self._flights) < plan.depth",
                "len(self._flights) < plan.depth + (plan.depth and not plan.transfer.copies)",
            ),
        ),
    ),
    Planted(
        "what was sent for in vain is forgotten",
        (("            if self._flights:\n", "            if False:\n"),),
    ),
    Planted(
        "new slots are filled while their memory is still in use",
        (("if plan.ring is not None and plan is not self._plan:", "if False:"),),
    ),
)
