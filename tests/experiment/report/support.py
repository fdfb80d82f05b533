"""Evidence to make pages of, and pages taken apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from pageahead.experiment.evidence import append
from pageahead.experiment.gate.reading import Record
from tests.experiment.gate.support import GOOD
from tests.experiment.profile.support import profile
from tests.experiment.support import cell, environment

ROOT = Path(__file__).parents[3]
B300 = ROOT / "evidence" / "source-b300.jsonl"
H200 = ROOT / "evidence" / "nvidia-h200"
CPU = "CPU (x86_64, 2 usable)"

VOID = {"meta", "br", "wbr", "img"}


def written(path: Path, records: Iterable[Record]) -> Path:
    for record in records:
        append(path, record)  # type: ignore[arg-type]  # the oracle's are written alike
    return path


def cpu_records() -> list[Record]:
    """As a run without a GPU leaves them."""
    return [
        environment(device="cpu", gpu=None, link=None),
        cell(device="cpu", divisor=8).model_copy(update={"device_name": CPU}),
    ]


def evidence(folder: Path) -> dict[str, list[Path]]:
    """Files of every kind: real ones, and written ones of what no real one has."""
    return {
        "B300": [B300],
        "H200": [H200 / "bench-source.jsonl", H200 / "verify.jsonl"],
        "GO": [written(folder / "go.jsonl", [*GOOD, profile("legacy"), profile("streamed")])],
        "CPU": [written(folder / "cpu.jsonl", cpu_records())],
    }


@dataclass
class Element:
    """One of a page."""

    tag: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        inner = (one if isinstance(one, str) else one.text for one in self.children)
        return " ".join(" ".join(inner).split())

    def all(self, tag: str = "", **wanted: str) -> list[Element]:
        """Descendants with this tag and, for each attribute, this word in it."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                if tag in ("", child.tag) and all(
                    word in (child.attributes.get(name.rstrip("_")) or "").split()
                    for name, word in wanted.items()
                ):
                    found.append(child)
                found += child.all(tag, **wanted)
        return found


class _Builder(HTMLParser):
    """Refuses what a browser would silently put right."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice: {tag} {attrs}"
        element = Element(tag, dict(attrs))
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> within <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)

    def close(self) -> None:
        super().close()
        assert self._open == [self.root], f"not closed: {self._open[-1].tag}"


def parsed(page: str) -> Element:
    """The page as a tree; fails where it is not well-formed."""
    builder = _Builder()
    builder.feed(page)
    builder.close()
    return builder.root


def table(page: Element, label: str) -> dict[str, list[str]]:
    """The rows of a table by the text of their first cell."""
    (region,) = [
        one for one in page.all("div", role="region") if one.attributes["aria-label"] == label
    ]
    (body,) = region.all("tbody")
    return {row.all("th")[0].text: [cell.text for cell in row.all("td")] for row in body.all("tr")}
