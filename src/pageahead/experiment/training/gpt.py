"""A GPT of a wanted number of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DEFAULT", "GPT", "Shape", "shape_for"]

LARGE = 100_000_000  # parameters from which the vocabulary has its usual size
VOCABULARY = 32_000
SMALL_VOCABULARY = 1024  # it would be all there is of a small model otherwise
POSITIONS = 2048
WIDTHS = range(192, 8193, 64)  # 192: four square matrices of it reach 100,000 elements and page
WIDTH_PER_LAYER = 2048 / 24
INITIAL_SCALE = 0.02


@dataclass(frozen=True)
class Shape:
    """What a GPT is made of. Its head has a weight of its own; no layer has a bias."""

    layers: int
    width: int
    vocabulary: int
    positions: int = POSITIONS

    @property
    def heads(self) -> int:
        """Attention heads: 128 wide in models that are wide enough, 64 in others."""
        return self.width // (128 if self.width >= 1024 and self.width % 128 == 0 else 64)

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        outside = (2 * self.vocabulary + self.positions + 1) * self.width
        return outside + self.layers * (12 * self.width**2 + 2 * self.width)


DEFAULT = Shape(layers=24, width=2048, vocabulary=VOCABULARY)
"""1.34 billion parameters: 10.7 GB of AdamW's state in 32 bit."""


def shape_for(parameters: int) -> Shape:
    """The shape with about `parameters` elements whose proportions are nearest to `DEFAULT`'s.

    Raises:
        ValueError: there is none, not even roughly; the message says what the smallest has.
    """
    vocabulary = VOCABULARY if parameters >= LARGE else SMALL_VOCABULARY
    shapes = []
    for width in WIDTHS:
        empty = Shape(0, width, vocabulary)
        one = Shape(1, width, vocabulary).parameters - empty.parameters
        shapes.append(
            Shape(max(1, round((parameters - empty.parameters) / one)), width, vocabulary)
        )

    def distance(shape: Shape) -> float:
        proportions = abs(log(shape.width / shape.layers / WIDTH_PER_LAYER))
        return abs(log(shape.parameters / parameters)) + proportions / 10

    best = min(shapes, key=distance)
    smallest = Shape(1, WIDTHS[0], SMALL_VOCABULARY).parameters
    if not 0.75 < best.parameters / parameters < 1.33:
        raise ValueError(
            f"no GPT here has about {parameters:,} parameters; the smallest has {smallest:,}"
        )
    return best


class GPT(nn.Module):
    """Token and position embedding, blocks, and a head; made where it will be used, not moved."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        with torch.device("meta"):
            self.tokens = nn.Embedding(shape.vocabulary, width, dtype=torch.bfloat16)
            self.positions = nn.Parameter(torch.empty(shape.positions, width, dtype=torch.bfloat16))
            self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
            self.norm = nn.LayerNorm(width, bias=False, dtype=torch.bfloat16)
            self.head = nn.Linear(width, shape.vocabulary, bias=False, dtype=torch.bfloat16)
        self.to_empty(device=device)
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(std=INITIAL_SCALE, generator=generator)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each token of `text` (batch, length + 1) but the first."""
        x = self.tokens(text[:, :-1]) + self.positions[: text.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


class _Block(nn.Module):
    """Attention, then a two-layer perceptron, each behind a norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, dtype = shape.width, torch.bfloat16
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width, bias=False, dtype=dtype)
        self.qkv = nn.Linear(width, 3 * width, bias=False, dtype=dtype)
        self.projection = nn.Linear(width, width, bias=False, dtype=dtype)
        self.mlp_norm = nn.LayerNorm(width, bias=False, dtype=dtype)
        self.up = nn.Linear(width, 4 * width, bias=False, dtype=dtype)
        self.down = nn.Linear(4 * width, width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + cast(Tensor, self.down(F.gelu(self.up(self.mlp_norm(x)))))
