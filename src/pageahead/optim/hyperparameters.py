"""bitsandbytes' hyperparameters as one step uses them."""

from __future__ import annotations

import ctypes
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
        for_c: ``max_unorm``, ``beta1``, ``beta2``, ``eps``, ``weight_decay``, ``lr`` and
            ``skip_zeros``, converted once: ctypes takes a microsecond for numbers at every call.
    """

    values: Mapping[str, Any]
    limited: bool
    for_c: tuple[Any, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Hyperparameters:
        """Take them from what ``get_config`` returned."""
        numbers = (
            values["max_unorm"],
            *values["betas"][:2],
            values["eps"],
            values["weight_decay"],
            values["lr"],
        )
        for_c = (*map(ctypes.c_float, numbers), ctypes.c_bool(values["skip_zeros"]))
        return cls(values, values["max_unorm"] > 0.0, for_c)


class OfOneStep:
    """Reads an optimizer's hyperparameters: once for a group, if no parameter has its own.

    Make one for each step: nothing is kept beyond.
    """

    def __init__(self, optimizer: BitsandbytesOptimizer) -> None:
        self._get_config = optimizer.get_config
        manager = optimizer.mng  # where `GlobalOptimManager.override_config` leaves them
        own = manager.index2config or manager.pid2config
        usual = getattr(self._get_config, "__func__", None) is Optimizer8bit.get_config
        self._alike = usual and not own
        self._of_group: dict[int, Hyperparameters] = {}

    def __call__(self, gindex: int, pindex: int, group: Mapping[str, Any]) -> Hyperparameters:
        """As ``get_config``."""
        known = self._of_group.get(gindex) if self._alike else None
        if known is None:
            known = Hyperparameters.of(self._get_config(gindex, pindex, group))
            self._of_group[gindex] = known
        return known
