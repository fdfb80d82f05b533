"""A Trainer script as people write it: it knows of no paged optimizer but by its name in `optim`.

It ends by writing parameters and optimizer state to ``--dump``, for a test to compare.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self, count: int = 48, length: int = 16) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(1_000, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_model() -> GPT2LMHeadModel:
    """The embedding, both projections of an MLP and attention's have 100,000 elements or more."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=1_000,
            n_positions=16,
            n_embd=192,
            n_layer=1,
            n_head=4,
            attn_implementation="eager",
        )
    )


def arguments(out: str, **changed: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "learning_rate": 1e-3,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "save_steps": 3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(out, **(settings | changed))


def dump(trainer: Trainer, path: str) -> None:
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # Accelerate's wrapper
        optimizer = optimizer.optimizer
    assert optimizer is not None
    with contextlib.suppress(AttributeError):
        optimizer.synchronize()
    found = {
        "class": str(optimizer.__class__),
        "paths": [route.path for route in optimizer.routes()]
        if hasattr(optimizer, "routes")
        else None,
        "parameters": dict(trainer.model.state_dict()),
        "state": optimizer.state_dict()["state"],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    torch.save(found, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--dump", required=True)
    parser.add_argument("--optim", default="paged_adamw_8bit")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--use-cpu", action="store_true")
    parser.add_argument("--resume")
    options = parser.parse_args()
    settings = arguments(
        options.out,
        optim=options.optim,
        bf16=options.bf16,
        fp16=options.fp16,
        use_cpu=options.use_cpu,
        full_determinism=options.deterministic,
    )
    trainer = Trainer(model=make_model(), args=settings, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=options.resume)
    dump(trainer, f"{options.dump}.{trainer.args.process_index}")


if __name__ == "__main__":
    main()
