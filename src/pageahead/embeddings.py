"""Embeddings with 32-bit state in an 8-bit optimizer, as Transformers' `Trainer` has them."""

from __future__ import annotations

from bitsandbytes.optim import GlobalOptimManager
from torch import nn

__all__ = ["keep_embeddings_32bit"]


def keep_embeddings_32bit(model: nn.Module) -> list[str]:
    """Keep the state of embeddings in 32 bit, whatever the optimizer's width.

    Does what `Trainer` does with ``optim="paged_adamw_8bit"``: it registers an override for the
    weight of each `torch.nn.Embedding` with bitsandbytes. An optimizer looks for overrides at its
    first step, so call this before it; state that exists already, or is loaded, keeps its width.
    The overrides hold for every bitsandbytes optimizer of this process and keep the modules alive.

    Args:
        model: with the modules whose weights the optimizer has (after any wrapper that replaces
            parameters).

    Returns:
        The names of the embeddings in `model`.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"keep_embeddings_32bit takes a torch.nn.Module, not {model!r}")
    manager = GlobalOptimManager.get_instance()
    known = {id(module) for module, _, _ in manager.module_weight_config_triple}
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            names.append(name)
            if id(module) not in known:
                manager.register_module_override(module, "weight", {"optim_bits": 32})
    return names
