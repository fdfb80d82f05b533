"""Accelerate: a real small run, resumed from its own checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pageahead
from tests.trainers.support import assert_same, assert_streamed, image, use_fp16_on_cpu


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """Accelerate's settings are those of the process; each test has its own."""
    yield
    forget()


def forget() -> None:
    for one in (AcceleratorState, GradientState, PartialState):
        one._reset_state()


def train(
    module: Any, name: str, folder: Path, *, precision: str, first: int = 0, last: int = 6
) -> tuple[Any, dict[str, Any]]:
    """Train from epoch `first`, whose checkpoint is in `folder`, to `last`.

    Returns:
        The prepared optimizer, and an image of the end.
    """
    forget()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        mixed_precision="bf16" if precision == "bf16" else "no",
    )
    scaler = use_fp16_on_cpu(accelerator) if precision == "fp16" else None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 256), nn.Linear(256, 500), nn.ReLU())
    tokens = torch.randint(500, (16, 8), generator=torch.Generator().manual_seed(1))
    optimizer = getattr(module, name)(model.parameters(), lr=1e-2)
    model, prepared, batches, schedule = accelerator.prepare(
        model,
        optimizer,
        DataLoader(TensorDataset(tokens), batch_size=4),
        torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    )
    if first:
        accelerator.load_state(str(folder / str(first)))
    losses = []
    for epoch in range(first, last):
        for (batch,) in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                prepared.step()
                schedule.step()
                prepared.zero_grad()
            losses.append(loss.item())
        accelerator.save_state(str(folder / str(epoch + 1)))
    found = {**image(prepared), "losses": losses, "scale": scaler.get_scale() if scaler else None}
    return prepared.optimizer, found


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedAdamW32bit"])
def test_a_run_and_its_resumption_equal_bitsandbytes(
    name: str, precision: str, tmp_path: Path
) -> None:
    stock, expected = train(bitsandbytes.optim, name, tmp_path / "stock", precision=precision)
    ours, found = train(pageahead, name, tmp_path / "ours", precision=precision)
    assert type(stock) is getattr(bitsandbytes.optim, name)
    assert_streamed(ours)
    assert_same(found, expected)
    if precision == "fp16":
        assert found["scale"] < 2.0**40
        assert 0 < found["state"][0]["step"] < 12  # some of the twelve were skipped

    again, resumed = train(pageahead, name, tmp_path / "ours", precision=precision, first=3)
    assert_streamed(again)
    assert_same(resumed["losses"], found["losses"][len(found["losses"]) // 2 :])
    assert_same({**resumed, "losses": found["losses"]}, found)
