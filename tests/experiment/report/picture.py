"""Makes the picture of the page that the docs show: ``python -m tests.experiment.report.picture``.

Three views of one page beside each other: a desk, a phone, and a phone at night.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from pageahead.experiment.report import page
from tests.experiment.report.chromium import DESKTOP, PHONE, Browser, executable, running
from tests.experiment.report.support import H200, ROOT

EVIDENCE = [
    H200 / f"{name}.jsonl"
    for name in ("streamed", "lookahead", "profile-streamed", "profile-lookahead")
]
TARGET = ROOT / "docs" / "report.png"
HEIGHT, GAP = 1500, 24
CHART = "document.querySelector('.chart').closest('section').querySelector('.legend')"


def main(paths: list[Path]) -> None:
    """Draw `TARGET` of evidence."""
    program = executable()
    if program is None:
        sys.exit("no Chromium on this machine")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "report.html"
        page.run(paths, made)
        with running(program, Path(folder) / "profile") as browser:
            views = [
                _view(browser, made, DESKTOP, "light"),
                _view(browser, made, PHONE, "light"),
                _view(browser, made, PHONE, "dark", CHART),
            ]
    width = sum(view.width for view in views) + GAP * (len(views) + 1)
    picture = Image.new("RGB", (width, HEIGHT + 2 * GAP), "#8a93a0")
    left = GAP
    for view in views:
        picture.paste(view, (left, GAP))
        left += view.width + GAP
    picture = picture.resize((width * 2 // 3, picture.height * 2 // 3), Image.Resampling.LANCZOS)
    picture.save(TARGET, optimize=True)  # no palette: it would lose the colours of a few words
    print(f"wrote {TARGET} ({TARGET.stat().st_size >> 10} KiB)")


def _view(browser: Browser, made: Path, width: int, scheme: str, below: str = "") -> Image.Image:
    browser.open(made, width=width, scheme=scheme)
    top = int(browser.evaluate(f"{below}.getBoundingClientRect().top")) - 60 if below else 0
    shot = Image.open(io.BytesIO(browser.screenshot())).convert("RGB")
    return shot.crop((0, top, width, top + HEIGHT))


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]] or EVIDENCE)
