"""The messages that the troubleshooting page explains are messages that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
OTHERS = {
    "'AcceleratedOptimizer' object has no attribute 'routes'",
    "CUDA out of memory",
    "Failed to load CPU gemm_4bit_forward",
    "Method 'cget_managed_ptr' not available",
    "an illegal memory access was encountered",
    "more than one element of the written-to tensor refers to a single memory location",
    "Error … in file … ops.cu",
}
"""PyTorch's, CUDA's and bitsandbytes'."""
HOLE = "\0"
"""Where a value is put into a message."""


def explained() -> list[str]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def messages() -> list[str]:
    """Every string in the package, f-strings with holes in them."""
    found = []
    for path in (ROOT / "src" / "pageahead").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        part.value
                        if isinstance(part, ast.Constant) and isinstance(part.value, str)
                        else HOLE
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


MESSAGES = messages()


@pytest.mark.parametrize("text", explained())
def test_the_message_exists(text: str) -> None:
    if text in OTHERS:
        pytest.skip("not a message of ours")
    pattern = re.compile(".*".join(re.escape(part) for part in text.split("…")), re.DOTALL)
    assert any(pattern.search(message) for message in MESSAGES), f"no message says {text!r}"


def test_the_page_explains_enough() -> None:
    assert len(explained()) >= 20
