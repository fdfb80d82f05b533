"""Knowing whether there was a backward yet, without any cost after the first."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["FirstBackward"]


class FirstBackward:
    """Watches parameters until the first of them gets a gradient from autograd.

    A gradient alone proves nothing: ``torch.distributed.checkpoint`` assigns zeros and calls
    ``step()`` before any forward has taken its memory.

    Args:
        began: called with the device of each gradient that comes.
    """

    def __init__(self, began: Callable[[torch.device], None]) -> None:
        self._began = began
        self.seen = False
        self._handles: dict[int, RemovableHandle] = {}
        # Hooks live as long as the parameters; they go with whoever wanted to know.
        weakref.finalize(self, _remove, self._handles).atexit = False

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch these parameters, too, those of them that autograd gives gradients."""
        reference = weakref.ref(self)

        # Hooks are removed by `stop`, not by the first that fires: FSDP2 calls a parameter's hooks
        # in a loop over the very dictionary that holds them.
        def hook(parameter: torch.Tensor) -> None:
            watcher = reference()
            if watcher is not None:
                watcher.seen = True
                watcher._began(parameter.device)

        for parameter in parameters:
            known = id(parameter) in self._handles
            if not known and parameter.requires_grad and parameter.is_leaf:
                self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(hook)

    def stop(self) -> None:
        """Remove the hooks: there was a backward, and nothing more to know."""
        _remove(self._handles)


def _remove(handles: dict[int, RemovableHandle]) -> None:
    while handles:
        handles.popitem()[1].remove()
