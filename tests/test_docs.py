"""Every Python block of README and docs runs, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pageahead
from pageahead import Paging
from tests.support import assert_same_bits, ours, parameters, train, unique_parameters

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROOT = Path(__file__).parents[1]

MODEL = """
import contextlib
import torch
import pageahead

class Model(torch.nn.Linear):
    def forward(self, batch):
        return super().forward(batch).square().mean()

model = Model(512, 512)
parameters = list(model.parameters())
batches = micro_batches = list(torch.randn(3, 4, 512))
"""

PAGES = {
    "README.md": MODEL,
    "docs/checkpoints.md": "",
    "docs/design.md": MODEL,
    "docs/getting-started.md": "",
    "docs/in-backward.md": MODEL,
    "docs/profile.md": "",
    "docs/settings.md": "",
    "docs/trainers.md": "",
}
"""Pages whose blocks are one program that runs without a GPU and without a network, and what they
take for granted. ``docs/distributed.md`` has a test of its own."""

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(page: str) -> dict[str, Any]:
    """Run the blocks of a page in the current folder; what they have defined."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python"), "a block that is not closed, or is indented"
    assert blocks
    namespace: dict[str, Any] = {"__name__": page}
    exec(PAGES[page], namespace)
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        # So that a traceback names the line of the page.
        code = compile("\n" * line + block.group(1), str(ROOT / page), "exec")
        exec(code, namespace)
    return namespace


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        run(page)
    finally:
        pageahead.uninstall()


def test_every_page_with_a_program_is_run() -> None:
    elsewhere = {"docs/distributed.md"}
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        if "```python" in path.read_text(encoding="utf-8")
    }
    assert found == PAGES.keys() | elsewhere


@pytest.mark.parametrize("settings", [Paging(hbm_budget=0.5), Paging(in_backward=True)])
@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedLion32bit", "PagedAdEMAMix8bit"])
def test_the_recipe_for_safetensors(
    name: str, settings: Paging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = run("docs/checkpoints.md")
    sizes = (130_001, 5_000, (300, 400), ())
    before = ours(name, parameters(*sizes), lr=1e-2, paging=settings)
    train(before, range(3), absent=[1])
    recipe["save_safetensors"](before, "it.safetensors")
    found = [torch.nn.Parameter(one.detach().clone()) for one in unique_parameters(before)]
    resumed = ours(name, found, paging=settings)
    recipe["load_safetensors"](resumed, "it.safetensors")
    assert_same_bits(resumed, before)
    assert resumed.param_groups[0]["betas"] == before.param_groups[0]["betas"]
    for optimizer in (before, resumed):
        train(optimizer, range(3, 5))
    assert_same_bits(resumed, before)
