"""The pipeline with one mistake in it, as many times as there are mistakes to make.

`edges` makes a fault of every wait and every record that is in ``pipeline.py``, whatever is in it:
each wait left out, each event taken too early. `tests.pipeline.planted` has the mistakes that a
hand would make. Both are applied to the source, so a fault differs from what ships in what its
name says and in nothing else.
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
from tests.pipeline.planted import PLANTED, first_copy_only

__all__ = ["Fault", "edges", "every_fault"]

WAITS = {"wait", "synchronize", "_complete", "drain"}
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
    return [*edges(source), *(Fault(one.name, one.plant(source)) for one in PLANTED)]


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
