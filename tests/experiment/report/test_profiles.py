"""Profiles among the evidence: drawn, their figures those of `pageahead profile`."""

from __future__ import annotations

import pytest

from pageahead.experiment.profile.analysis import typical
from pageahead.experiment.profile.table import ROWS
from pageahead.experiment.report import rendering
from pageahead.experiment.report.model import build
from tests.experiment.gate.support import GOOD
from tests.experiment.profile.support import profile
from tests.experiment.report.support import parsed, table, written
from tests.experiment.support import environment

PROFILES = [profile("streamed"), profile("legacy")]


@pytest.fixture
def page(tmp_path):
    path = written(tmp_path / "run.jsonl", [*GOOD, *PROFILES])
    return parsed(rendering.html(build([path])))


def test_the_figures_are_those_of_the_command(page) -> None:
    (region,) = [
        one
        for one in page.all("div", role="region")
        if one.attributes["aria-label"] == "Figures of adamw32/8x4Mi on A GPU"
    ]
    heads, *lines = [
        [" ".join(cell.text.split()) for cell in row.all("th") + row.all("td")]
        for row in region.all("tr")
    ]
    assert heads == ["of that step", "legacy", "streamed"]
    legacy, streamed = (typical(one) for one in reversed(PROFILES))
    expected = [[name.strip(), show(legacy), show(streamed)] for name, show in ROWS]
    assert lines[: len(ROWS)] == expected
    assert lines[-1] == ["to be relied on", "yes", "yes"]


def test_lanes_are_as_long_as_what_they_show(page) -> None:
    (figure,) = page.all("figure")
    labels = [one.attributes["aria-label"] for one in figure.all("svg", role="img")]
    legacy, streamed = (typical(one) for one in reversed(PROFILES))
    assert f"{legacy.to_device_ms:.3f} ms in all" in labels[0]
    assert f"{streamed.to_device_ms:.3f} ms in all" in labels[4]
    assert f"{streamed.to_host_ms:.3f} ms in all" in labels[6]
    assert labels[3].endswith("8 waits for all work of the device")
    for lane in ("fetch", "update", "write-back"):
        assert figure.all("rect", class_=f"lane-{lane}")


def test_a_profile_alone_has_a_page_without_a_verdict(tmp_path) -> None:
    report = build([written(tmp_path / "run.jsonl", [environment(), *PROFILES])])
    page = parsed(rendering.html(report))
    assert page.all("h1")[0].text == "No cell was measured"
    assert len(page.all("figure")) == 1
    assert "| transfer, ms |" in rendering.markdown(report)


def test_of_several_profiles_of_a_cell_the_last_is_drawn(tmp_path) -> None:
    again = profile("streamed", driver_peak=5 << 30)
    path = written(tmp_path / "run.jsonl", [environment(), *PROFILES, again])
    rows = table(parsed(rendering.html(build([path]))), "Figures of adamw32/8x4Mi on A GPU")
    assert rows["peak HBM, driver"] == ["1 GiB", "5 GiB"]


def test_one_that_is_not_to_be_relied_on_says_so(tmp_path) -> None:
    path = written(tmp_path / "run.jsonl", [environment(), profile(state_bytes=1 << 40)])
    rows = table(parsed(rendering.html(build([path]))), "Figures of adamw32/8x4Mi on A GPU")
    assert rows["to be relied on"] == ["no"]
