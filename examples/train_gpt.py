"""Train a small GPT, byte by byte, on the source text of Python's own standard library.

    python examples/train_gpt.py                                # state streamed by pageahead
    python examples/train_gpt.py --optimizer legacy --bits 8    # bitsandbytes' own paged AdamW

Everything is seeded and every kernel deterministic, so the losses depend on the settings and not
on the optimizer: run it twice with different ``--optimizer`` and compare the printed losses, which
carry all the digits a float32 has. `make_optimizer` is the only place where the choice matters.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

# cuBLAS reads this when it starts: without it, deterministic matrix products are refused.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pageahead

OPTIMIZERS = ("legacy", "streamed", "lookahead", "sequential")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VOCABULARY = 256  # every byte is a token
HEAD_WIDTH = 64
CORPUS_BYTES = 2 << 20
PAGED_ELEMENTS = 100_000  # smaller parameters keep their state on the device, as in bitsandbytes


@dataclass(frozen=True)
class Settings:
    """What one run is made of; `main` fills it from the command line."""

    optimizer: str = "streamed"
    bits: int = 32
    steps: int = 20
    batch: int = 16
    tokens: int = 128
    layers: int = 4
    width: int = 256
    learning_rate: float = 1e-3
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """What one step gave: its loss, and the seconds its two halves took."""

    loss: float
    model_seconds: float
    optimizer_seconds: float


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each behind a norm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x))
        # (batch, tokens, 3 * width) -> three of (batch, heads, tokens, width / heads)
        query, key, value = qkv.view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Token and position embedding, blocks, and a head that shares the token embedding."""

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token_embedding.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Logits (batch, tokens, 256) of the byte that follows each byte of `text`."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.token_embedding(text) + self.position_embedding(positions)
        return self.head(self.norm(self.blocks(x)))


def standard_library() -> Tensor:
    """The first 2 MiB of the standard library's top-level modules, in name order, as uint8."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


def sample(text: Tensor, batch: int, tokens: int, generator: torch.Generator) -> Tensor:
    """`batch` random windows of `tokens` + 1 bytes: what goes in, and the byte after it."""
    starts = torch.randint(len(text) - tokens, (batch, 1), generator=generator)
    return text[starts + torch.arange(tokens + 1)].long()


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer by name; all four do the same arithmetic and differ in where state lives."""
    if settings.optimizer != "legacy":
        return pageahead.PagedAdamW(
            model.parameters(),
            lr=settings.learning_rate,
            optim_bits=settings.bits,
            paging=pageahead.Paging(strategy=settings.optimizer),
        )
    # bitsandbytes pages through CUDA's managed memory; without CUDA it has no paged optimizer.
    legacy = bnb.optim.AdamW if settings.device == "cpu" else bnb.optim.PagedAdamW
    return legacy(model.parameters(), lr=settings.learning_rate, optim_bits=settings.bits)


def now(device: str) -> float:
    """Seconds on a clock, read once everything asked of `device` is done."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(settings: Settings, verbose: bool = True) -> list[Step]:
    """Train from scratch for `settings.steps` steps; returns what each step gave."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    batches = torch.Generator().manual_seed(settings.seed)
    text = standard_library()
    # Made on the CPU and moved, so that the same seed gives the same weights on every device.
    model = GPT(settings.layers, settings.width, settings.tokens)
    model.to(device=settings.device, dtype=settings.dtype)
    optimizer = make_optimizer(model, settings)
    if verbose:
        sizes = [parameter.numel() for parameter in model.parameters()]
        paged = [size for size in sizes if size >= PAGED_ELEMENTS]
        print(
            f"{sum(sizes) / 1e6:.1f} million parameters in {len(sizes)} tensors; "
            f"{len(paged)} tensors with {sum(paged) / sum(sizes):.0%} of them are paged"
        )

    steps = []
    for number in range(1, settings.steps + 1):
        windows = sample(text, settings.batch, settings.tokens, batches).to(settings.device)

        started = now(settings.device)
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        loss.backward()
        differentiated = now(settings.device)
        optimizer.step()
        optimizer.zero_grad()
        finished = now(settings.device)

        step = Step(loss.item(), differentiated - started, finished - differentiated)
        steps.append(step)
        if verbose:
            print(
                f"step {number:3d}   loss {step.loss:.9g}   "
                f"forward+backward {step.model_seconds * 1e3:7.1f} ms   "
                f"optimizer {step.optimizer_seconds * 1e3:7.1f} ms",
                flush=True,
            )
    return steps


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from the command line."""
    default = Settings()
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the text of Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--optimizer", choices=OPTIMIZERS, default=default.optimizer, help="who moves the state")
    add("--bits", type=int, choices=(8, 32), default=default.bits, help="bits per state element")
    add("--steps", type=int, default=default.steps, help="training steps")
    add("--batch", type=int, default=default.batch, help="sequences per step")
    add("--tokens", type=int, default=default.tokens, help="bytes per sequence")
    add("--layers", type=int, default=default.layers, help="transformer blocks")
    add("--width", type=int, default=default.width, help=f"a multiple of {HEAD_WIDTH}")
    add("--lr", type=float, default=default.learning_rate, help="learning rate")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if any")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="of parameters and gradients")
    add("--seed", type=int, default=default.seed, help="for weights and batches")
    chosen = parser.parse_args(arguments)
    for name in ("steps", "batch", "tokens", "layers"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(chosen, name)}")
    if chosen.width < HEAD_WIDTH or chosen.width % HEAD_WIDTH:
        parser.error(f"--width must be a multiple of {HEAD_WIDTH}, not {chosen.width}")
    if chosen.device == "auto":
        chosen.device = "cuda" if torch.cuda.is_available() else "cpu"
    return Settings(
        optimizer=chosen.optimizer,
        bits=chosen.bits,
        steps=chosen.steps,
        batch=chosen.batch,
        tokens=chosen.tokens,
        layers=chosen.layers,
        width=chosen.width,
        learning_rate=chosen.lr,
        device=chosen.device,
        dtype=DTYPES[chosen.dtype],
        seed=chosen.seed,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse(arguments)
    steps = train(settings)
    print(
        f"{settings.optimizer} AdamW, {settings.bits}-bit state, on {settings.device}: "
        f"loss {steps[0].loss:.9g} -> {steps[-1].loss:.9g}; "
        f"median forward+backward {median(s.model_seconds for s in steps) * 1e3:.1f} ms, "
        f"optimizer {median(s.optimizer_seconds for s in steps) * 1e3:.1f} ms"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
