"""Transformers' `Trainer` on a GPU: an unmodified script, with and without `pageahead run`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers

import pageahead
from tests.trainers.pairs import both
from tests.trainers.scripts import train_transformers as script
from tests.trainers.support import assert_same, assert_streamed, forget_overrides, image

# Of several GPUs `Trainer` would take all, by DataParallel.
ONE_GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
STREAMED = {"PAGEAHEAD_HBM_BUDGET": "0"}
"""Such a small model would otherwise keep its state on the GPU."""


@pytest.mark.parametrize("optim", ["paged_adamw_8bit", "paged_adamw_32bit", "paged_lion_8bit"])
@pytest.mark.parametrize("precision", [(), ("--bf16",), ("--fp16",)], ids=["fp32", "bf16", "fp16"])
def test_an_unmodified_script_gives_the_same_bits_also_after_a_resume(
    optim: str, precision: tuple[str, ...], tmp_path: Path
) -> None:
    words = ("--deterministic", "--optim", optim, *precision)
    whole = both(tmp_path, "whole", *words, "--out", "{arm}", **ONE_GPU, **STREAMED)
    checkpoint = ("--resume", "{arm}/checkpoint-3")
    resumed = both(
        tmp_path, "resumed", *words, "--out", "{arm}2", *checkpoint, **ONE_GPU, **STREAMED
    )
    for pair in (whole, resumed):
        assert pair.said.count("pageahead: replaced") == 1
        assert pair.stock["paths"] is None
        assert pair.ours["paths"].count("streamed") == 4
        for key in ("losses", "parameters", "state"):
            assert_same(pair.ours[key], pair.stock[key], key)
    for key in ("losses", "parameters", "state"):
        assert_same(resumed.ours[key], whole.ours[key], key)


def test_with_state_that_stays_on_the_gpu(tmp_path: Path) -> None:
    """The default settings, under which this much fits."""
    pair = both(tmp_path, "auto", "--deterministic", "--out", "{arm}", **ONE_GPU)
    assert set(pair.ours["paths"]) == {"resident"}
    for key in ("losses", "parameters", "state"):
        assert_same(pair.ours[key], pair.stock[key], key)


@pytest.mark.parametrize("fp16", [False, True])
def test_our_class_gives_the_bits_of_bitsandbytes_class_of_that_name(
    fp16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(module: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        forget_overrides()
        settings = script.arguments(str(tmp_path), fp16=fp16, save_strategy="no")
        settings._n_gpu = 1
        trainer = transformers.Trainer(
            model=script.make_model(),
            args=settings,
            train_dataset=script.Tokens(),
            optimizer_cls_and_kwargs=(
                module.PagedAdamW,
                {"lr": 1e-3, "optim_bits": 8, **kwargs},
            ),
        )
        trainer.train()
        optimizer: Any = trainer.optimizer
        return optimizer.optimizer, image(optimizer)

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        _, expected = run(bitsandbytes.optim)
        optimizer, found = run(pageahead, paging=pageahead.Paging(hbm_budget=0))
    finally:
        torch.use_deterministic_algorithms(before)
    assert_streamed(optimizer)
    assert_same(found, expected)
