"""The seven-billion example at two million parameters: same code, same routes, same record."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import bitsandbytes as bnb
import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_7b.py"
TINY = [
    *("--layers=2", "--width=384", "--heads=6", "--mlp=512", "--vocabulary=1024", "--tokens=32"),
    *("--steps=3", "--device=cpu", "--lr=1e-3"),
]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("train_7b", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "train_7b", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


def tiny(example: ModuleType, *more: str):
    return example.parse([*TINY, *more])[0]


def test_by_default_it_has_llamas_shapes(example: ModuleType) -> None:
    settings, _ = example.parse(["--device=cuda"])
    with torch.device("meta"):
        model = example.Llama(settings)
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_738_415_616
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert settings.hbm_gib == 24


def test_losses_equal_bitsandbytes(example: ModuleType, monkeypatch) -> None:
    ours = example.train(tiny(example)).losses
    monkeypatch.setattr(example.pageahead, "PagedAdamW32bit", _Resident)
    assert example.train(tiny(example)).losses == ours
    assert example.train(tiny(example, "--seed=1")).losses != ours


class _Resident(bnb.optim.AdamW32bit):
    """bitsandbytes' own, as the example makes and asks ours."""

    def __init__(self, parameters, *, paging, **settings) -> None:
        super().__init__(parameters, **settings)

    def routes(self) -> list:
        return []


def test_one_line_is_written_and_the_summary_printed(example: ModuleType, tmp_path, capsys) -> None:
    out = tmp_path / "run.jsonl"
    assert example.main([*TINY, f"--out={out}"]) == 0
    (line,) = out.read_text().splitlines()
    written = json.loads(line)
    assert len(written["seconds"]) == len(written["losses"]) == 3
    assert written["host_bytes"] > 0.9 * 8 * written["parameters"]
    assert written["allocated_peak"] is None
    assert str(tmp_path) not in line
    said = capsys.readouterr().out.splitlines()
    assert "GB of optimizer state go to page-locked host memory, and 0.0" in said[1]
    assert [one.split()[:2] for one in said[2:5]] == [["step", "1"], ["step", "2"], ["step", "3"]]
    assert "billion parameters on cpu" in said[5]


def test_without_enough_host_memory_no_model_is_made(example: ModuleType, monkeypatch) -> None:
    settings = tiny(example)
    needed = 10 * sum(example.sizes_of(settings))  # state, and the weights of a model on the CPU
    monkeypatch.setattr(example, "make_model", lambda settings: pytest.fail("made"))
    monkeypatch.setattr(example, "available_bytes", lambda: needed - 1)
    with pytest.raises(SystemExit, match=r"not enough host memory: .* no GPU was found"):
        example.train(settings)
    monkeypatch.setattr(example, "available_bytes", lambda: needed)
    with pytest.raises(pytest.fail.Exception):
        example.train(settings)


def test_a_head_looks_at_how_far_tokens_are_apart(example: ModuleType) -> None:
    cos, sin = example.rotary(16, 64, torch.device("cpu"))
    query, key = torch.randn(64), torch.randn(64)
    turned = [
        [example.rotate(one, c, s) for c, s in zip(cos.float(), sin.float(), strict=True)]
        for one in (query, key)
    ]
    near, same = turned[0][5] @ turned[1][3], turned[0][12] @ turned[1][10]
    assert near.item() == pytest.approx(same.item(), abs=0.2)  # BF16 angles
    assert turned[0][0].allclose(query)


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("--steps=0", "--steps must be more than 0, not 0"),
        ("--hbm-gib=0", "--hbm-gib must be more than 0"),
        ("--heads=7", "--width must be a multiple of 14, not 4096"),
    ],
)
def test_wrong_arguments_are_named(example: ModuleType, capsys, argument, complaint) -> None:
    with pytest.raises(SystemExit):
        example.parse([argument])
    assert complaint in capsys.readouterr().err
