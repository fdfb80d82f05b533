"""Lightning: a real small run, resumed from its own checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pageahead
from pageahead.optim.paged import PagedOptimizer
from tests.trainers.support import assert_same, assert_streamed, image

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision


class Model(lightning.LightningModule):
    """Next-token prediction with the optimizer that `make` makes."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(500, 256), nn.Linear(256, 500), nn.ReLU())
        self.make = make
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]).flatten(0, 1), batch[0].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(
    make: Any, folder: Path, precision: str, resume: Path | None = None
) -> tuple[Any, dict[str, Any]]:
    """Six steps of two batches each, with a checkpoint after each.

    Returns:
        The optimizer, and an image of the end.
    """
    plugins = []
    if precision == "16-mixed":
        # So large a scale that the first step overflows and is skipped.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-13)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    model = Model(make)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_epochs=1)],
        **({"plugins": plugins} if plugins else {"precision": precision}),
    )
    tokens = torch.randint(500, (16, 8), generator=torch.Generator().manual_seed(1))
    batches = DataLoader(TensorDataset(tokens), batch_size=4)
    trainer.fit(model, batches, ckpt_path=resume, weights_only=False)
    optimizer = trainer.optimizers[0]
    found = {**image(optimizer), "losses": model.losses}
    found["scale"] = scaler.get_scale() if plugins else None
    return optimizer, found


@pytest.mark.filterwarnings("ignore")  # its own, of few workers and of folders that exist
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedAdamW32bit"])
def test_a_run_and_its_resumption_equal_bitsandbytes(
    name: str, precision: str, tmp_path: Path
) -> None:
    _, expected = train(getattr(bitsandbytes.optim, name), tmp_path / "stock", precision)
    make = getattr(pageahead, name)
    ours, found = train(make, tmp_path / "ours", precision)
    assert type(ours) is make
    assert_streamed(ours)
    assert_same(found, expected)
    assert len(found["losses"]) == 12
    if precision == "16-mixed":
        assert found["scale"] < 2.0**40
        assert 0 < found["state"][0]["step"] < 6

    (checkpoint,) = (tmp_path / "ours").glob("step=4.ckpt")
    again, resumed = train(make, tmp_path / "again", precision, checkpoint)
    assert_streamed(again)
    assert_same(resumed["losses"], found["losses"][8:])
    assert_same({**resumed, "losses": found["losses"]}, found)


@pytest.mark.filterwarnings("ignore")
def test_installed(tmp_path: Path) -> None:
    """Lightning derives a class of its own from the optimizer's."""
    _, expected = train(bitsandbytes.optim.PagedAdamW8bit, tmp_path / "stock", "32-true")
    pageahead.install()
    try:
        ours, found = train(bitsandbytes.optim.PagedAdamW8bit, tmp_path / "ours", "32-true")
    finally:
        pageahead.uninstall()
    assert isinstance(ours, PagedOptimizer)
    assert_streamed(ours)
    assert_same(found, expected)
