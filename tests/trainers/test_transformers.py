"""Transformers' `Trainer`, real and small: `optim=` under `pageahead run`, and our classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers

import pageahead
from tests.trainers.pairs import Pair, both
from tests.trainers.scripts import train_transformers as script
from tests.trainers.support import (
    assert_same,
    assert_streamed,
    forget_overrides,
    image,
    use_fp16_on_cpu,
)

CPU = ("--use-cpu",)


# --- an unmodified script, with and without pageahead run -----------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Pair:
    """Six steps, with a checkpoint after the third."""
    return both(folder, "whole", *CPU, "--out", "{arm}")


@pytest.fixture(scope="module")
def resumed(folder: Path, whole: Pair) -> Pair:
    return both(folder, "resumed", *CPU, "--out", "{arm}-again", "--resume", "{arm}/checkpoint-3")


def test_an_unmodified_script_gives_the_same_bits(whole: Pair) -> None:
    assert whole.said.count("pageahead: replaced") == 1
    for run in (whole.stock, whole.ours):
        assert run["class"] == "<class 'bitsandbytes.optim.adamw.AdamW'>"
    assert len(whole.ours["losses"]) == 6
    for key in ("losses", "parameters", "state"):
        assert_same(whole.ours[key], whole.stock[key], key)


def test_it_was_ours(whole: Pair, resumed: Pair) -> None:
    for pair in (whole, resumed):
        assert pair.stock["paths"] is None
        assert pair.ours["paths"].count("streamed") == 4


def test_its_embeddings_have_32_bit_state_and_its_linear_layers_8(whole: Pair) -> None:
    states = [
        one["__bnb_optimizer_quant_state__"]["state1"] for one in whole.ours["state"].values()
    ]
    embedding, attention = states[0], states[2]
    assert (tuple(embedding.shape), embedding.dtype) == ((1_000, 192), torch.float32)
    assert (tuple(attention.shape), attention.dtype) == ((192, 576), torch.uint8)


def test_a_resumed_run_equals_stock_and_the_uninterrupted_run(whole: Pair, resumed: Pair) -> None:
    for key in ("losses", "parameters", "state"):
        assert_same(resumed.ours[key], resumed.stock[key], key)
        assert_same(resumed.ours[key], whole.ours[key], key)


def test_two_processes_under_torchrun(folder: Path) -> None:
    pair = both(folder, "two", *CPU, "--out", "{arm}-two", processes=2)
    assert pair.said.count("pageahead: replaced") == 1
    assert pair.ours["paths"].count("streamed") == 4
    second = torch.load(folder / "ours-two.1")
    for key in ("losses", "parameters", "state"):
        assert_same(pair.ours[key], pair.stock[key], key)
    assert_same(second["parameters"], pair.ours["parameters"])
    assert_same(second["state"], pair.ours["state"])


# --- our classes, through optimizer_cls_and_kwargs ------------------------------------------------


def run(
    module: Any,
    name: str,
    folder: Path,
    *,
    kwargs: dict[str, Any] | None = None,
    resume: Path | None = None,
    fp16: bool = False,
    keep: bool = False,
    **changed: Any,
) -> tuple[Any, dict[str, Any]]:
    """Train with ``module.name``. Returns the trainer's optimizer and an image of the end."""
    forget_overrides()
    model = script.make_model()
    if keep:
        pageahead.keep_embeddings_32bit(model)
    trainer = transformers.Trainer(
        model=model,
        args=script.arguments(str(folder), use_cpu=True, **changed),
        train_dataset=script.Tokens(),
        optimizer_cls_and_kwargs=(getattr(module, name), {"lr": 1e-3, **(kwargs or {})}),
    )
    scaler = use_fp16_on_cpu(trainer.accelerator) if fp16 else None
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    optimizer: Any = trainer.optimizer
    found = image(optimizer)
    found["losses"] = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    found["scale"] = scaler.get_scale() if scaler else None
    return optimizer.optimizer, found


CASES = {
    "embeddings as Trainer keeps them": ("PagedAdamW", {"kwargs": {"optim_bits": 8}}),
    "8-bit": ("PagedAdamW8bit", {}),
    "32-bit, bfloat16 autocast": ("PagedLion32bit", {"bf16": True}),
    "8-bit, float16 autocast and a scaler": ("PagedLion8bit", {"fp16": True}),
}


@pytest.mark.parametrize(("name", "settings"), CASES.values(), ids=CASES)
def test_our_class_gives_the_bits_of_bitsandbytes_class_of_that_name(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    _, expected = run(bitsandbytes.optim, name, tmp_path / "stock", **settings)
    optimizer, found = run(pageahead, name, tmp_path / "ours", **settings)
    assert type(optimizer) is getattr(pageahead, name)
    assert_streamed(optimizer)
    assert_same(found, expected)
    if settings.get("fp16"):
        assert found["scale"] < 2.0**40  # steps were skipped
        assert 0 < found["state"][0]["step"] < 6
    again, resumed = run(
        pageahead, name, tmp_path / "again", resume=tmp_path / "ours" / "checkpoint-3", **settings
    )
    assert_streamed(again)
    assert_same(resumed, found)


def test_which_embeddings_are_32_bit(tmp_path: Path) -> None:
    """Trainer asks for ``optim_bits=8`` in the arguments; `keep_embeddings_32bit` needs none."""
    widths = {}
    for name, kwargs, keep in (
        ("PagedAdamW", {"optim_bits": 8}, False),
        ("PagedAdamW8bit", {}, False),
        ("PagedAdamW8bit", {}, True),
    ):
        _, found = run(pageahead, name, tmp_path, kwargs=kwargs, keep=keep, save_strategy="no")
        widths[name, keep] = found
    dtype = {key: found["state"][0]["state1"].dtype for key, found in widths.items()}
    assert dtype == {
        ("PagedAdamW", False): torch.float32,
        ("PagedAdamW8bit", False): torch.uint8,
        ("PagedAdamW8bit", True): torch.float32,
    }
    assert_same(widths["PagedAdamW8bit", True], widths["PagedAdamW", False])


@pytest.mark.parametrize("limit", [0.5, 0.0])
def test_updates_in_backward_are_refused(limit: float, tmp_path: Path) -> None:
    """`Trainer` clips every gradient before the step; without a limit, to infinity."""
    with pytest.raises(RuntimeError, match=r"changed or replaced after their update"):
        run(
            pageahead,
            "PagedAdamW8bit",
            tmp_path,
            kwargs={"paging": pageahead.Paging(in_backward=True)},
            gradient_accumulation_steps=1,
            max_grad_norm=limit,
        )
