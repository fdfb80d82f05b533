"""The twelve classes: bitsandbytes' class of the same name, with its state moved by pageahead.

This module's name is part of the text of the classes, in which Transformers' `Trainer` looks for
"bitsandbytes" to keep the state of embeddings in 32 bit, as with bitsandbytes' own classes.
"""

from __future__ import annotations

import bitsandbytes
from bitsandbytes import optim as bnb

from pageahead.optim.compat import check_bitsandbytes
from pageahead.optim.paged import PagedOptimizer

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
]

check_bitsandbytes(bitsandbytes.__version__)


class PagedAdam(PagedOptimizer, bnb.PagedAdam):
    """Adam, state of `optim_bits` bits."""


class PagedAdam8bit(PagedOptimizer, bnb.PagedAdam8bit):
    """Adam with 8-bit state."""


class PagedAdam32bit(PagedOptimizer, bnb.PagedAdam32bit):
    """Adam with 32-bit state."""


class PagedAdamW(PagedOptimizer, bnb.PagedAdamW):
    """AdamW, state of `optim_bits` bits."""


class PagedAdamW8bit(PagedOptimizer, bnb.PagedAdamW8bit):
    """AdamW with 8-bit state."""


class PagedAdamW32bit(PagedOptimizer, bnb.PagedAdamW32bit):
    """AdamW with 32-bit state."""


class PagedLion(PagedOptimizer, bnb.PagedLion):
    """Lion, state of `optim_bits` bits."""


class PagedLion8bit(PagedOptimizer, bnb.PagedLion8bit):
    """Lion with 8-bit state."""


class PagedLion32bit(PagedOptimizer, bnb.PagedLion32bit):
    """Lion with 32-bit state."""


class PagedAdEMAMix(PagedOptimizer, bnb.PagedAdEMAMix):
    """AdEMAMix, state of `optim_bits` bits."""


class PagedAdEMAMix8bit(PagedOptimizer, bnb.PagedAdEMAMix8bit):
    """AdEMAMix with 8-bit state."""


class PagedAdEMAMix32bit(PagedOptimizer, bnb.PagedAdEMAMix32bit):
    """AdEMAMix with 32-bit state; equals bitsandbytes' ``PagedAdEMAMix(optim_bits=32)``.

    bitsandbytes' class of this name gives `state1` one row where its kernel uses two, which
    writes out of bounds, and ignores `t_alpha` and `t_beta3`. This one has two rows and both
    schedules.
    """

    init_state = bnb.AdEMAMix.init_state
