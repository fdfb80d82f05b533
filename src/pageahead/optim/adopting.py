"""Turn an optimizer of bitsandbytes' classes into ours while it is being made.

Its class becomes one made for the purpose, `PagedOptimizer` before the class it had, so that every
``isinstance`` that held still holds. This happens before PyTorch's `Optimizer.__init__` has run:
nothing has seen the instance yet, no hook is registered and no method of it is kept anywhere.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from types import FunctionType
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.optim.ademamix import AdEMAMix
from bitsandbytes.optim.optimizer import Optimizer1State, Optimizer2State, Optimizer8bit

from pageahead.optim.compat import check_bitsandbytes
from pageahead.optim.copying import cloned
from pageahead.optim.paged import PagedOptimizer
from pageahead.optim.states import StatePlaces

__all__ = ["adopt", "finish", "why_left_alone"]

check_bitsandbytes(bitsandbytes.__version__)

SUPPORTED = {Optimizer1State: ("lion",), Optimizer2State: ("adam", "ademamix")}
"""The updates we can cut into chunks, by bitsandbytes' base class and name for them."""

RELIED_ON = {
    name
    for one in (PagedOptimizer, StatePlaces, AdEMAMix, *AdEMAMix.__mro__, Optimizer1State)
    if one is not object
    for name in vars(one)
    if not name.startswith("__")
}
"""Methods and attributes that another definition would break, or that would hide one of ours."""

STEP_HOOKS = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
"""PyTorch wraps `step` of every optimizer class in this, and leaves the wrapper in the class."""


_classes: dict[tuple[type, str], type] = {}


def why_left_alone(kind: type, base: type, name: str) -> str | None:
    """Say why optimizers of a class cannot be ours.

    Args:
        kind: the optimizer's class.
        base: `Optimizer1State` or `Optimizer2State`, whichever is making the optimizer.
        name: bitsandbytes' ``optimizer_name``.

    Returns:
        The reason, or None if they can.
    """
    if name not in SUPPORTED[base]:
        families = ", ".join(sorted(sum(SUPPORTED.values(), ())))
        return f"its update is {name!r}; pageahead has {families}"
    own = sorted({method for one in kind.__mro__ for method in _own_methods(one)})
    if own:
        return f"it has its own {', '.join(own)}"
    return None


def adopt(optimizer: Any, name: str) -> None:
    """Make `optimizer`, whose ``__init__`` has reached bitsandbytes' base class, ours."""
    key = type(optimizer), name
    if key not in _classes:
        _classes[key] = _paged_class(*key)
    optimizer.__class__ = _classes[key]
    optimizer._prepare_paging(None)


def finish(optimizer: Any) -> None:
    """Do what needs the parameters, when bitsandbytes' base class is done."""
    optimizer._watch_gradients()


def _own_methods(kind: type) -> list[str]:
    if kind.__module__.split(".")[0] in ("bitsandbytes", "torch", "builtins", "typing"):
        return []
    return [
        name for name, value in vars(kind).items() if name in RELIED_ON and not _is_hooked(value)
    ]


def _is_hooked(value: object) -> bool:
    """Whether this is bitsandbytes' `step`, wrapped by PyTorch."""
    return (
        isinstance(value, FunctionType)
        and value.__code__ is STEP_HOOKS
        and inspect.getattr_static(value, "__wrapped__") is Optimizer8bit.step
    )


def _paged_class(kind: type, name: str) -> type:
    """`kind` with its state moved by pageahead; its text is that of `kind`."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is paged:
            # ``type(optimizer)(...)`` does what `kind` does: it may well not be paged.
            self.__class__ = kind
            initialize(self, *args, **kwargs)
        else:
            PagedOptimizer.__init__(self, *args, **kwargs)

    initialize: Any = kind.__init__  # type: ignore[misc]

    body: dict[str, Any] = {
        "__init__": functools.wraps(initialize)(__init__),
        "__reduce_ex__": lambda self, protocol: _reduce(self, kind),
        "__signature__": inspect.signature(kind),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    if name == "ademamix":
        # AdEMAMix32bit lacks it: see `PagedAdEMAMix32bit`. For the others it is the same one.
        body["init_state"] = AdEMAMix.init_state
    paged = type(kind)(kind.__name__, (PagedOptimizer, kind), body)
    return paged


def _reduce(optimizer: PagedOptimizer, kind: type) -> tuple[Any, ...]:
    """As `kind` does: there is no importing a class that was made for the purpose."""
    optimizer.synchronize()
    state = optimizer.__getstate__()
    # The arena's own tensors must not go to shared memory, or leave their storage in a file.
    return (
        object.__new__,
        (kind,),
        {
            **state,
            "state": defaultdict(dict, cloned(state["state"])),
        },
    )
