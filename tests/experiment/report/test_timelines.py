from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from pageahead.experiment.gate.decision import EvidenceError
from pageahead.experiment.report import rendering
from pageahead.experiment.report.model import build
from pageahead.experiment.report.timelines import Lane, StepTimeline, grouped, pictures
from tests.experiment.report.support import B300, parsed, table

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def step(arm: str, end: float) -> StepTimeline:
    lanes = [
        Lane("fetch", [(0.0, 1.0), (1.0, 2.0)]),
        Lane("update", [(1.0, 1.2), (2.0, end)]),
    ]
    return StepTimeline("adamw32/8x4Mi", arm, "A GPU", end, lanes, [1.2], [("overlap", "12 %")])


def test_steps_of_one_cell_share_an_axis() -> None:
    (group,) = grouped([step("legacy", 8.0), step("streamed", 4.0)])
    legacy, ours = (group.axis.position(one.returned_ms) for one in group.steps)
    assert legacy == pytest.approx(2 * ours, abs=0.02)
    assert len(grouped([step("legacy", 8.0), replace(step("legacy", 4.0), device="another")])) == 2


def test_spans_between_which_nobody_sees_a_gap_are_drawn_as_one() -> None:
    (group,) = grouped([step("legacy", 8.0)])
    fetch, update = (group.bars(lane) for lane in group.steps[0].lanes)
    assert len(fetch) == 1
    assert len(update) == 2
    start, width = fetch[0]
    assert start == 0
    assert width == group.axis.position(2.0)


def test_timelines_are_drawn_and_said() -> None:
    report = replace(build([B300]), timelines=grouped([step("legacy", 8.0)]))
    page = parsed(rendering.html(report))
    assert "Missing: there is no profile" not in page.text
    (figure,) = page.all("figure")
    assert "adamw32/8x4Mi on A GPU" in figure.text
    assert table(page, "Figures of adamw32/8x4Mi on A GPU") == {"overlap": ["12 %"]}
    assert "| overlap | 12 % |" in rendering.markdown(report)
    assert len(figure.all("path", class_="wait")) == 1
    labels = [one.attributes["aria-label"] for one in figure.all("svg", role="img")]
    assert labels[0] == "legacy, fetch: 2 spans, 2.000 ms in all"
    assert labels[1].endswith("; 1 waits for all work of the device")
    assert len(figure.all("rect", class_="lane-update")) == 2


@pytest.mark.parametrize(
    ("content", "kind"),
    [(PNG, "image/png"), (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml")],
)
def test_pictures_become_part_of_the_page(tmp_path, content, kind) -> None:
    path = tmp_path / "lanes <1>.png"
    path.write_bytes(content)
    page = parsed(rendering.html(build([B300], shown=[path])))
    (image,) = page.all("img")
    encoded = base64.b64encode(content).decode()
    assert image.attributes["src"] == f"data:{kind};base64,{encoded}"
    assert image.attributes["alt"] == "Timeline, as drawn in lanes <1>.png"
    assert "handed in beside the evidence, not computed from it" in page.text


def test_what_is_no_picture_is_refused(tmp_path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{}")
    with pytest.raises(EvidenceError, match=r"--timeline: trace\.json is no PNG"):
        pictures([path])
