"""bitsandbytes' optimizer base class, as far as `PagedOptimizer` relies on it, with types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["WRAPPED", "BitsandbytesOptimizer"]

WRAPPED = "__bnb_optimizer_quant_state__"
"""Under this key bitsandbytes keeps the tensors that FSDP must not gather."""

if TYPE_CHECKING:

    class BitsandbytesOptimizer(torch.optim.Optimizer):
        """``bitsandbytes.optim.optimizer.Optimizer8bit`` with one or two states."""

        optimizer_name: str
        initialized: bool
        mng: Any

        def check_overrides(self) -> None: ...

        def get_config(
            self, gindex: int, pindex: int, group: Mapping[str, Any]
        ) -> dict[str, Any]: ...

        def init_state(
            self, group: Mapping[str, Any], p: torch.Tensor, gindex: int, pindex: int
        ) -> None: ...

else:
    # At run time the mixin stands before the bitsandbytes class that it is mixed into.
    BitsandbytesOptimizer = object
