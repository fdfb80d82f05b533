"""bitsandbytes' hyperparameters as one step uses them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bitsandbytes.optim.optimizer import Optimizer8bit

if TYPE_CHECKING:
    from pageahead.optim.base import BitsandbytesOptimizer

__all__ = ["Hyperparameters", "OfOneStep"]


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What bitsandbytes' ``get_config`` says.

    Attributes:
        values: that.
        limited: whether the norm of updates is limited.
        numbers: ``max_unorm``, ``beta1``, ``beta2``, ``eps``, ``weight_decay``, ``lr`` and
            ``skip_zeros`` as C takes them: ctypes needs a microsecond to convert them each time.
    """

    values: Mapping[str, Any]
    limited: bool
    numbers: tuple[Any, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Hyperparameters:
        """Take them from what ``get_config`` returned."""
        floats = (
            values["max_unorm"],
            *values["betas"][:2],
            values["eps"],
            values["weight_decay"],
            values["lr"],
        )
        numbers = (*map(ctypes.c_float, floats), ctypes.c_bool(values["skip_zeros"]))
        return cls(values, values["max_unorm"] > 0.0, numbers)


class OfOneStep:
    """Reads an optimizer's hyperparameters: once for a group, if no parameter can have its own.

    It remembers what it read: make one for each step.
    """

    def __init__(self, optimizer: BitsandbytesOptimizer) -> None:
        self._get_config = optimizer.get_config
        # `GlobalOptimManager.override_config` leaves parameters' own there, for all optimizers.
        tables = optimizer.mng.index2config, optimizer.mng.pid2config
        self._by_group = _is_bitsandbytes(self._get_config) and all(
            type(table) is dict and not table for table in tables
        )
        self._of_group: dict[int, Hyperparameters] = {}

    def __call__(self, gindex: int, pindex: int, group: Mapping[str, Any]) -> Hyperparameters:
        """As ``get_config``."""
        known = self._of_group.get(gindex) if self._by_group else None
        if known is None:
            known = Hyperparameters.of(self._get_config(gindex, pindex, group))
            self._of_group[gindex] = known
        return known


def _is_bitsandbytes(get_config: Any) -> bool:
    """Whether that is bitsandbytes' own: somebody's may say something else for each parameter."""
    code = getattr(getattr(get_config, "__func__", None), "__code__", None)
    return code is not None and code.co_filename == sys.modules[Optimizer8bit.__module__].__file__
