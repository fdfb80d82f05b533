"""A report as HTML and as Markdown, through templates."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from datetime import datetime
from statistics import median

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from pageahead.experiment.gate.wording import EXPLANATIONS, by_reason, word
from pageahead.experiment.report.model import Report
from pageahead.experiment.table import amount, milliseconds
from pageahead.experiment.verdict import CONFIDENCE, SAME_WITHIN

__all__ = ["html", "markdown"]

PACKAGE = "pageahead.experiment.report"
TONES = {
    "GO": "good",
    "NO-GO": "bad",
    "INCOMPLETE": "open",
    "passed": "good",
    "failed": "bad",
    "missing": "open",
    "FASTER": "good",
    "SLOWER": "bad",
    "SAME": "plain",
    "UNDECIDED": "open",
}
ROLES = {"one_state": "one state"}
#: A word, not the name of a cell or a variable.
NAME_FREE = re.compile("[a-z]+(-[a-z]+)*")
#: What Markdown could take for markup, or GitHub for a mention, a reference or a tag.
MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~@&$])")


def html(report: Report) -> str:
    """The page: one file, nothing loaded from anywhere."""
    environment = _environment(autoescape=True)
    style = environment.get_template("style.css").render()
    # It is this package's own file; everything else is escaped.
    page = environment.get_template("page.html.j2")
    return page.render(report=report, style=Markup(style), **_constants()) + "\n"


def markdown(report: Report) -> str:
    """For a pull request."""
    environment = _environment(autoescape=False)
    return environment.get_template("page.md.j2").render(report=report, **_constants()) + "\n"


def _environment(*, autoescape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    return environment


def _constants() -> dict[str, object]:
    return {"confidence": CONFIDENCE, "same": SAME_WITHIN, "explanations": EXPLANATIONS}


def _fixed(value: float, digits: int) -> str:
    """Decimals; where there would be hundreds of digits before them, an exponent."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"


def _tone(name: str) -> str:
    return TONES[name]


def _sentence(text: str, end: str = ".") -> str:
    """Begins with a capital letter, unless with a name that has none, and ends."""
    first = text.partition(" ")[0].strip(",:;")
    begun = text[:1].upper() + text[1:] if NAME_FREE.fullmatch(first) else text
    return begun + ("" if text.endswith(".") else end)


def _heading(title: str) -> str:
    """The title without the name, which stands above it."""
    return _sentence(title.removeprefix("pageahead: "), "")


def _indented(name: str) -> str:
    """What belongs to the line above keeps its distance from the edge."""
    text = name.lstrip(" ")
    return "\N{NO-BREAK SPACE}" * 2 * (len(name) - len(text)) + text


def _moment(run: str) -> str:
    """A run's name, which is when it began, to a second."""
    try:
        begun = datetime.fromisoformat(run)
    except ValueError:
        return run
    return begun.strftime("%Y-%m-%d %H:%M:%S %Z").strip()


def _breakable(text: str) -> Markup:
    """A long digest, which may be broken every eight letters."""
    parts = [escape(text[at : at + 8]) for at in range(0, len(text), 8)]
    return Markup("<wbr>").join(parts)


def _escaped(text: object) -> str:
    """For a line or a table cell of Markdown."""
    return MARKUP.sub(r"\\\1", " ".join(str(text).split()))


def _code(text: object) -> str:
    """In a table cell a bar would end it even within code."""
    plain = " ".join(str(text).split())
    return f"`{plain}`" if not set(plain) & set("`|") else _escaped(plain)


def _fenced(lines: Sequence[str]) -> str:
    """A block of code whose fence is longer than any within."""
    text = "\n".join(" ".join(line.split()) for line in lines)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _command(argv: Sequence[str]) -> str:
    return shlex.join(["pageahead", *argv])


FILTERS: dict[str, Callable[..., object]] = {
    "amount": amount,
    "breakable": _breakable,
    "by_reason": by_reason,
    "code": _code,
    "command": _command,
    "fenced": _fenced,
    "heading": _heading,
    "indented": _indented,
    "md": _escaped,
    "median": median,
    "moment": _moment,
    "ms": milliseconds,
    "percent": lambda value: f"{_fixed(100 * value, 0)}%",
    "ratio": lambda value: _fixed(value, 3),
    "role": lambda role: ROLES.get(role, role),
    "sentence": _sentence,
    "speed": lambda value: _fixed(value, 1),
    "tick": "{:g}".format,
    "tone": _tone,
    "two": lambda value: _fixed(value, 2),
    "word": word,
}
