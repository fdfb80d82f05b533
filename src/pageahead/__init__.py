"""pageahead: paged optimizers that look ahead."""

from pageahead._version import __version__
from pageahead.optim.elastic import Residency
from pageahead.optim.families import (
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
    "Paging",
    "Residency",
    "Route",
    "__version__",
]
