"""The example users copy from: it learns, and its losses do not depend on who moves the state."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
# One block, just wide enough that some of its parameters reach 100,000 elements and are paged.
TINY = ["--layers=1", "--width=192", "--tokens=32", "--batch=4", "--steps=6", "--device=cpu"]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example as a module, and PyTorch's global settings as they were afterwards."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    deterministic = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        # The example sets this for itself; setting it here makes the context put it back.
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        patch.setitem(sys.modules, "train_gpt", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module", params=[8, 32], ids=["8-bit", "32-bit"])
def bits(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def legacy_losses(example: ModuleType, bits: int) -> list[float]:
    return losses(example, "legacy", bits)


def losses(example: ModuleType, optimizer: str, bits: int, *more: str) -> list[float]:
    settings = example.parse([*TINY, f"--optimizer={optimizer}", f"--bits={bits}", *more])
    return [step.loss for step in example.train(settings, verbose=False)]


def test_loss_falls(legacy_losses: list[float]) -> None:
    assert len(legacy_losses) == 6
    assert legacy_losses[-1] < legacy_losses[0] - 0.5


@pytest.mark.parametrize("optimizer", ["streamed", "lookahead", "sequential"])
def test_losses_equal_legacy_bit_for_bit(
    example: ModuleType, bits: int, legacy_losses: list[float], optimizer: str
) -> None:
    assert losses(example, optimizer, bits) == legacy_losses


def test_tiny_settings_page_something(example: ModuleType) -> None:
    settings = example.parse(TINY)
    model = example.GPT(settings.layers, settings.width, settings.tokens)
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert sum(size >= example.PAGED_ELEMENTS for size in sizes) >= 2


def test_seed_changes_the_run(example: ModuleType) -> None:
    first = losses(example, "legacy", 32, "--steps=1")
    assert losses(example, "legacy", 32, "--steps=1") == first
    assert losses(example, "legacy", 32, "--steps=1", "--seed=1") != first


def test_bfloat16(example: ModuleType) -> None:
    assert losses(example, "streamed", 8, "--dtype=bfloat16") == losses(
        example, "legacy", 8, "--dtype=bfloat16"
    )


def test_main_prints_steps_and_a_summary(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main([*TINY, "--steps=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "million parameters" in lines[0]
    assert [line.split()[:2] for line in lines[1:3]] == [["step", "1"], ["step", "2"]]
    assert lines[3].startswith("streamed AdamW, 32-bit state, on cpu: loss ")


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("--steps=0", "--steps must be at least 1, not 0"),
        ("--width=100", "--width must be a multiple of 64, not 100"),
        ("--optimizer=adam", "invalid choice: 'adam'"),
    ],
)
def test_wrong_arguments_are_named(
    example: ModuleType, capsys: pytest.CaptureFixture[str], argument: str, complaint: str
) -> None:
    with pytest.raises(SystemExit):
        example.parse([argument])
    assert complaint in capsys.readouterr().err
