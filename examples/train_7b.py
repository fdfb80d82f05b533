"""Train seven billion parameters with 32-bit AdamW in 24 GiB of GPU memory.

    python examples/train_7b.py                       # Llama-2-7B's shapes, 5 steps, one GPU
    python examples/train_7b.py --device cpu --layers 2 --width 192 --mlp 512 --heads 3 \\
        --vocabulary 1024 --tokens 32                 # the same code, small, on the CPU

Weights in BF16 are 13.5 GB, and so would be the gradients: together they do not fit. AdamW's state
is another 54 GB. Three things make it fit:

* state lives in page-locked host memory and is streamed through the GPU (`pageahead`),
* each parameter is updated during the backward pass, as soon as its gradient is there, and the
  gradient is freed at once: ``Paging(in_backward=True, free_grads=True)``,
* activations are computed a second time in the backward pass (checkpointing), block by block.

Weights and text are random: this shows that it fits and how long it takes, not that it learns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pageahead
from pageahead.memory.host import available_bytes

GIB = 1 << 30
DTYPE = torch.bfloat16
STATE_BYTES = 8
"""Of one element: two moments in float32."""
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Settings:
    """What one run is made of; `main` fills it from the command line."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    mlp: int = 11_008
    vocabulary: int = 32_000
    tokens: int = 2048
    steps: int = 5
    hbm_gib: float = 24.0
    learning_rate: float = 1e-5
    device: str = "cuda"
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """What a run took. Bytes on the GPU are None on the CPU.

    Attributes:
        parameters: elements of all of them.
        state_bytes: AdamW's two moments, wherever they are.
        host_bytes: those of them that are in page-locked host memory.
        seconds: of each step.
        losses: of each step.
        allocated_peak, reserved_peak: PyTorch's tensors, and what its allocator took for them.
        driver_used: what the driver says is taken of the GPU after the last step, by anybody.
    """

    parameters: int
    state_bytes: int
    host_bytes: int
    seconds: list[float]
    losses: list[float]
    allocated_peak: int | None
    reserved_peak: int | None
    driver_used: int | None


class Block(nn.Module):
    """Llama's: attention with rotary positions, then SwiGLU, each behind an RMS norm."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, mlp = settings.width, settings.mlp
        self.heads = settings.heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5, dtype=DTYPE)
        self.query = nn.Linear(width, width, bias=False, dtype=DTYPE)
        self.key = nn.Linear(width, width, bias=False, dtype=DTYPE)
        self.value = nn.Linear(width, width, bias=False, dtype=DTYPE)
        self.output = nn.Linear(width, width, bias=False, dtype=DTYPE)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5, dtype=DTYPE)
        self.gate = nn.Linear(width, mlp, bias=False, dtype=DTYPE)
        self.up = nn.Linear(width, mlp, bias=False, dtype=DTYPE)
        self.down = nn.Linear(mlp, width, bias=False, dtype=DTYPE)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            project(normed).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, tokens, width))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Token embedding, blocks that are computed twice, and a head of its own."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(settings.vocabulary, settings.width, dtype=DTYPE)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width, eps=1e-5, dtype=DTYPE)
        self.head = nn.Linear(settings.width, settings.vocabulary, bias=False, dtype=DTYPE)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each token of `text` (batch, tokens + 1) but the first."""
        x = self.embedding(text[:, :-1])
        cos, sin = rotary(x.shape[1], x.shape[2] // self.blocks[0].heads, text.device)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


def rotary(tokens: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angle of each position and pair of a head, (tokens, width)."""
    pairs = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    positions = torch.arange(tokens, device=device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE ** (-pairs / width)).repeat(1, 2)
    return angles.cos().to(DTYPE), angles.sin().to(DTYPE)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of a head (its first half with its second) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def make_model(settings: Settings) -> Llama:
    """Random weights, drawn where they stay: at no time are they in host memory."""
    with torch.device("meta"):
        model = Llama(settings)
    device = torch.device(settings.device)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(settings.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02, generator=generator)
    return model


def make_optimizer(model: nn.Module, settings: Settings) -> pageahead.PagedAdamW32bit:
    """All state in host memory; updates run, and gradients go, while backward runs."""
    return pageahead.PagedAdamW32bit(
        model.parameters(),
        lr=settings.learning_rate,
        paging=pageahead.Paging(hbm_budget=0, in_backward=True, free_grads=True),
    )


def sizes_of(settings: Settings) -> list[int]:
    """Elements of each parameter."""
    with torch.device("meta"):
        return [parameter.numel() for parameter in Llama(settings).parameters()]


def check_host_memory(settings: Settings, sizes: Sequence[int]) -> None:
    """Say what the host will hold, and end here if it has not that much."""
    state = STATE_BYTES * sum(sizes)
    weights = 0 if settings.device != "cpu" else DTYPE.itemsize * sum(sizes)
    available = available_bytes()
    beside = f", and {weights / 1e9:.2f} GB of weights to ordinary memory" if weights else ""
    print(
        f"{state / 1e9:.2f} GB of optimizer state go to page-locked host memory{beside}; "
        f"{available / 1e9:.2f} GB are available",
        flush=True,
    )
    if state + weights > available:
        no_gpu = " This is the CPU: no GPU was found or asked for." if weights else ""
        raise SystemExit(
            f"not enough host memory: {(state + weights) / 1e9:.2f} GB are needed. Use fewer "
            f"--layers, or a machine or container with more.{no_gpu}"
        )


def cap_device_memory(settings: Settings) -> None:
    """Let PyTorch have `settings.hbm_gib` of this GPU, and fail beyond as on a smaller one."""
    total = torch.cuda.get_device_properties(0).total_memory
    if settings.hbm_gib * GIB < total:
        torch.cuda.set_per_process_memory_fraction(settings.hbm_gib * GIB / total)


def train(settings: Settings) -> Result:
    """Train from scratch for `settings.steps` steps; returns what they took."""
    cuda = settings.device != "cpu"
    sizes = sizes_of(settings)
    print(f"{sum(sizes) / 1e9:.3f} billion parameters in {len(sizes)} tensors", flush=True)
    check_host_memory(settings, sizes)
    if cuda:
        cap_device_memory(settings)
    model = make_model(settings)
    optimizer = make_optimizer(model, settings)
    routes = optimizer.routes()
    streamed = sum(route.state_bytes for route in routes if route.path == "streamed")

    text = torch.Generator().manual_seed(settings.seed)
    seconds, losses = [], []
    for number in range(1, settings.steps + 1):
        shape = (1, settings.tokens + 1)
        batch = torch.randint(settings.vocabulary, shape, generator=text).to(settings.device)
        started = time.perf_counter()
        loss = model(batch)
        loss.backward()  # updates each parameter, too
        optimizer.step()  # waits for the last of them
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for this step's kernels
        seconds.append(time.perf_counter() - started)
        peak = f"   peak {torch.cuda.max_memory_allocated() / GIB:.2f} GiB" if cuda else ""
        print(
            f"step {number:3d}   loss {losses[-1]:.6g}   {seconds[-1] * 1e3:9.1f} ms{peak}",
            flush=True,
        )

    used = None
    if cuda:
        free, total = torch.cuda.mem_get_info()
        used = total - free
    return Result(
        parameters=sum(sizes),
        state_bytes=sum(route.state_bytes for route in routes),
        host_bytes=streamed,
        seconds=seconds,
        losses=losses,
        allocated_peak=torch.cuda.max_memory_allocated() if cuda else None,
        reserved_peak=torch.cuda.max_memory_reserved() if cuda else None,
        driver_used=used,
    )


def record(settings: Settings, result: Result) -> dict[str, object]:
    """What goes into the file: settings, versions, result; no path and no host's name."""
    cuda = settings.device != "cpu"
    return {
        "kind": "train_7b",
        "settings": asdict(settings),
        "gpu": torch.cuda.get_device_name(0) if cuda else None,
        "torch": torch.__version__,
        "pageahead": pageahead.__version__,
        **asdict(result),
    }


def parse(arguments: Sequence[str] | None = None) -> tuple[Settings, Path | None]:
    """Settings from the command line, and where to write the result."""
    default = Settings()
    parser = argparse.ArgumentParser(
        description="Train Llama-2-7B's shapes with 32-bit AdamW in 24 GiB of GPU memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=default.layers, help="transformer blocks")
    add("--width", type=int, default=default.width, help="a multiple of twice --heads")
    add("--heads", type=int, default=default.heads, help="attention heads")
    add("--mlp", type=int, default=default.mlp, help="width inside the perceptron")
    add("--vocabulary", type=int, default=default.vocabulary, help="different tokens")
    add("--tokens", type=int, default=default.tokens, help="tokens per step, in one sequence")
    add("--steps", type=int, default=default.steps, help="training steps")
    add("--hbm-gib", type=float, default=default.hbm_gib, help="GiB that PyTorch may take")
    add("--lr", type=float, default=default.learning_rate, help="learning rate")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if any")
    add("--seed", type=int, default=default.seed, help="for weights and text")
    add("--out", type=Path, default=None, help="append one JSON line to this file")
    chosen = parser.parse_args(arguments)
    for name in ("layers", "width", "heads", "mlp", "vocabulary", "tokens", "steps", "hbm_gib"):
        if getattr(chosen, name) <= 0:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be more than 0, not {getattr(chosen, name)}")
    if chosen.width % (2 * chosen.heads):
        parser.error(f"--width must be a multiple of {2 * chosen.heads}, not {chosen.width}")
    if chosen.device == "auto":
        chosen.device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = Settings(
        layers=chosen.layers,
        width=chosen.width,
        heads=chosen.heads,
        mlp=chosen.mlp,
        vocabulary=chosen.vocabulary,
        tokens=chosen.tokens,
        steps=chosen.steps,
        hbm_gib=chosen.hbm_gib,
        learning_rate=chosen.lr,
        device=chosen.device,
        seed=chosen.seed,
    )
    return settings, chosen.out


def main(arguments: Sequence[str] | None = None) -> int:
    settings, out = parse(arguments)
    result = train(settings)
    peak = ""
    if result.allocated_peak is not None:
        peak = f"peak {result.allocated_peak / GIB:.2f} of {settings.hbm_gib:g} GiB, "
    print(
        f"{result.parameters / 1e9:.3f} billion parameters on {settings.device}: {peak}"
        f"{result.host_bytes / 1e9:.2f} GB of state on the host, "
        f"median step {median(result.seconds) * 1e3:.1f} ms"
    )
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record(settings, result)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
