"""Parameter shapes of public models, as their configurations in transformers give them.

Committed as data, so that measuring needs no transformers; a test makes each model of its
configuration again, without weights, and compares. Tied embeddings are one parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MODELS", "PublicModel"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PublicModel:
    """A model's parameters in the order of its modules.

    Attributes:
        config_class: in transformers.
        config: what is passed to it; the published values.
        before, block, after: shapes before the blocks, of each block, and after them.
        blocks: how many there are.
    """

    config_class: str
    config: Mapping[str, Any]
    before: tuple[Shape, ...]
    block: tuple[Shape, ...]
    blocks: int
    after: tuple[Shape, ...]


MODELS = {
    "llama-3.2-1b": PublicModel(
        config_class="LlamaConfig",
        config={
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
        before=((128_256, 2048),),
        block=(
            (2048, 2048),
            (512, 2048),
            (512, 2048),
            (2048, 2048),
            (8192, 2048),
            (8192, 2048),
            (2048, 8192),
            (2048,),
            (2048,),
        ),
        blocks=16,
        after=((2048,),),
    ),
    "qwen2.5-0.5b": PublicModel(
        config_class="Qwen2Config",
        config={
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        before=((151_936, 896),),
        block=(
            (896, 896),
            (896,),
            (128, 896),
            (128,),
            (128, 896),
            (128,),
            (896, 896),
            (4864, 896),
            (4864, 896),
            (896, 4864),
            (896,),
            (896,),
        ),
        blocks=24,
        after=((896,),),
    ),
    "gpt2": PublicModel(
        config_class="GPT2Config",
        config={"vocab_size": 50_257, "n_positions": 1024, "n_embd": 768, "n_layer": 12},
        before=((50_257, 768), (1024, 768)),
        block=(
            (768,),
            (768,),
            (768, 2304),
            (2304,),
            (768, 768),
            (768,),
            (768,),
            (768,),
            (768, 3072),
            (3072,),
            (3072, 768),
            (768,),
        ),
        blocks=12,
        after=((768,), (768,)),
    ),
}
