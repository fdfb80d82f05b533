"""The page as a reader sees it: in Chromium, without a network, on a desk, a phone and paper."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from pageahead.experiment.report import page
from tests.experiment.report.chromium import DESKTOP, PHONE, executable, running
from tests.experiment.report.support import evidence

WIDER = """
[...document.querySelectorAll("body *")]
  .filter(one => one.getBoundingClientRect().right > innerWidth + 1)
  .filter(one => !one.closest(".table.wide"))
  .map(one => one.outerHTML.slice(0, 80))
"""

#: Contrast of every text with what is behind it, by WCAG 2: the least is 4.5.
FAINT = """
(() => {
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b]
    .map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = one => {
    for (; one; one = one.parentElement) {
      const colour = numbers(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = new Set();
  for (const one of document.querySelectorAll("body *")) {
    if (one.closest("svg") || one.closest(".skip")) continue;
    if (![...one.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue;
    const [a, b] = [light(numbers(getComputedStyle(one).color)), light(behind(one))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.add(`${contrast.toFixed(2)} ${one.outerHTML.slice(0, 80)}`);
  }
  return [...found];
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = executable()
    if program is None:
        pytest.skip("no Chromium on this machine (PAGEAHEAD_TEST_CHROMIUM names one)")
    with running(program, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, paths in evidence(folder).items():
        page.run(paths, folder / f"{name}.html")
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("kind", ["B300", "H200", "GO", "CPU"])
def test_a_page_opens_without_a_network_and_without_errors(
    kind, width, scheme, pages, browser
) -> None:
    path = pages / f"{kind}.html"
    browser.open(path, width=width, scheme=scheme)
    assert browser.errors == []
    assert browser.addresses == [path.as_uri()]
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(WIDER) == []
    assert browser.evaluate(FAINT) == []


def test_a_picture_of_it_shows_something(pages, browser) -> None:
    browser.open(pages / "H200.html", width=PHONE)
    picture = Image.open(io.BytesIO(browser.screenshot()))
    assert picture.width == PHONE
    assert picture.height > 5 * PHONE
    assert len(picture.convert("RGB").getcolors(1 << 20)) > 100


def test_dark_is_dark(pages, browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    browser.open(pages / "GO.html", width=DESKTOP, scheme="dark")
    assert max(browser.evaluate(background)) < 64
    browser.open(pages / "GO.html", width=DESKTOP, scheme="light")
    assert min(browser.evaluate(background)) > 192


def test_it_prints_dark_on_white_with_nothing_folded(pages, browser) -> None:
    browser.open(pages / "H200.html", width=DESKTOP, scheme="dark", media="print")
    assert (
        browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    folded = "getComputedStyle(document.querySelector('details'), '::details-content')"
    assert browser.evaluate(f"{folded}.contentVisibility") == "visible"
    assert browser.pdf().startswith(b"%PDF")


def test_an_error_or_a_request_would_be_seen(tmp_path, browser) -> None:
    """Or the tests above would pass whatever a page did."""
    path = tmp_path / "bad.html"
    path.write_text(
        "<!doctype html><script>console.error('one'); throw new Error('two')</script>"
        "<img src='http://127.0.0.1:9/three.png'><div style='width: 900px'>four</div>"
        "<p style='color: #999; background: #fff'>five</p>"
    )
    browser.open(path, width=500)  # not a phone's, which would zoom out
    said = " ".join(browser.errors)
    assert "one" in said
    assert "two" in said
    assert "http://127.0.0.1:9/three.png" in browser.addresses
    assert [one[:4] for one in browser.evaluate(WIDER)] == ["<div"]
    assert [one[:4] for one in browser.evaluate(FAINT)] == ["2.85"]
