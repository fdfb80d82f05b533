"""`install`: from then on bitsandbytes' paged optimizers are ours, without a change to the code.

What is replaced is ``__init__`` of bitsandbytes' two base classes. Each of its optimizers passes
through one of them and says there whether it is paged, whether a user asked for ``is_paged=True``,
took a `Paged*` class, or a subclass passed it on.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from pageahead._version import __version__
from pageahead.optim.compat import check_bitsandbytes
from pageahead.optim.paging import Paging

# Nothing here may import PyTorch or bitsandbytes when it is imported, and `install` no module of
# ours that does: it may run while bitsandbytes is being imported by just such a module.

__all__ = ["check_settings", "install", "replaced", "say", "uninstall"]

_originals: dict[type, Callable[..., None]] = {}
_said: set[str] = set()


def check_settings() -> None:
    """Raise now what making an optimizer would raise later.

    Raises:
        ImportError: bitsandbytes is missing or of a version that pageahead is not tested with.
        ValueError, TypeError: a ``PAGEAHEAD_*`` variable is wrong.
    """
    check_bitsandbytes(version("bitsandbytes"))
    Paging()


def install() -> None:
    """Make every paged bitsandbytes optimizer that is constructed from now on ours.

    That is each instance of Adam, AdamW, Lion or AdEMAMix, of any width, that is constructed with
    ``is_paged=True`` or is of one of the `Paged*` classes. Its class keeps its name and text, and
    is a subclass of the one it was. Subclasses from elsewhere are included unless they define a
    method that paging relies on; those, and other families, stay as they are, and a line on stderr
    says so. `Paging` is read from ``PAGEAHEAD_*``. Calling it again does nothing.

    Raises:
        ImportError: bitsandbytes is of a version that pageahead is not tested with.
        ValueError, TypeError: a ``PAGEAHEAD_*`` variable is wrong.
    """
    check_settings()
    from bitsandbytes.optim.optimizer import Optimizer1State, Optimizer2State

    for base in (Optimizer1State, Optimizer2State):
        if base not in _originals:
            _originals[base] = base.__init__
            base.__init__ = _replacement(base, base.__init__)  # type: ignore[method-assign]


def uninstall() -> None:
    """Undo `install`. Optimizers that are ours already stay so."""
    while _originals:
        base, original = _originals.popitem()
        base.__init__ = original  # type: ignore[misc]


def replaced() -> bool:
    """Whether any optimizer was made ours, or was left alone and that was said."""
    return bool(_said)


def say(line: str) -> None:
    """Write a line to stderr, in the first process of each host."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"pageahead: {line}", file=sys.stderr, flush=True)


def _replacement(base: type, original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            arguments = signature.bind(self, *args, **kwargs).arguments
        except TypeError:
            arguments = {}  # the original says what is wrong with them
        if arguments.get("is_paged") and _becomes_ours(self, base, arguments):
            from pageahead.optim import adopting

            adopting.adopt(self, arguments["optimizer_name"])
            original(self, *args, **kwargs)
            adopting.finish(self)
        else:
            original(self, *args, **kwargs)

    return __init__


def _becomes_ours(optimizer: Any, base: type, arguments: dict[str, Any]) -> bool:
    from pageahead.optim import adopting
    from pageahead.optim.paged import PagedOptimizer

    if isinstance(optimizer, PagedOptimizer):
        return False  # it is already
    kind = type(optimizer)
    text = f"{kind.__module__}.{kind.__qualname__}"
    reason = adopting.why_left_alone(kind, base, arguments["optimizer_name"])
    if reason is not None:
        _say_once(text, f"left alone: {text}: {reason}")
        return False
    _say_once(
        "replaced",
        f"replaced bitsandbytes' paged optimizer: {text}, {arguments.get('optim_bits', 32)}-bit, "
        f"is now paged by pageahead {__version__} ({Paging().strategy})",
    )
    return True


def _say_once(key: str, line: str) -> None:
    if key not in _said:
        _said.add(key)
        say(line)
