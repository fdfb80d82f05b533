"""pageahead: paged optimizers that look ahead.

Names are imported when they are first used: `pageahead run` must not import PyTorch before the
script it runs has set the environment that PyTorch, CUDA and OpenMP read.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from pageahead._version import __version__

if TYPE_CHECKING:
    from pageahead.embeddings import keep_embeddings_32bit
    from pageahead.installing import install, uninstall
    from pageahead.optim.bitsandbytes_classes import (
        PagedAdam,
        PagedAdam8bit,
        PagedAdam32bit,
        PagedAdamW,
        PagedAdamW8bit,
        PagedAdamW32bit,
        PagedAdEMAMix,
        PagedAdEMAMix8bit,
        PagedAdEMAMix32bit,
        PagedLion,
        PagedLion8bit,
        PagedLion32bit,
    )
    from pageahead.optim.elastic import Residency
    from pageahead.optim.paged import PagedOptimizer
    from pageahead.optim.paging import Paging
    from pageahead.optim.routing import Route

__all__ = [
    "PagedAdEMAMix",
    "PagedAdEMAMix8bit",
    "PagedAdEMAMix32bit",
    "PagedAdam",
    "PagedAdam8bit",
    "PagedAdam32bit",
    "PagedAdamW",
    "PagedAdamW8bit",
    "PagedAdamW32bit",
    "PagedLion",
    "PagedLion8bit",
    "PagedLion32bit",
    "PagedOptimizer",
    "Paging",
    "Residency",
    "Route",
    "__version__",
    "install",
    "keep_embeddings_32bit",
    "uninstall",
]

_ELSEWHERE = {
    "PagedOptimizer": "pageahead.optim.paged",
    "Paging": "pageahead.optim.paging",
    "Residency": "pageahead.optim.elastic",
    "Route": "pageahead.optim.routing",
    "install": "pageahead.installing",
    "keep_embeddings_32bit": "pageahead.embeddings",
    "uninstall": "pageahead.installing",
}
"""Where names come from that are none of the twelve classes."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'pageahead' has no attribute {name!r}")
    module = import_module(_ELSEWHERE.get(name, "pageahead.optim.bitsandbytes_classes"))
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
