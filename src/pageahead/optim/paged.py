"""`PagedOptimizer`: bitsandbytes' optimizers with their state moved by pageahead.

A mixin over bitsandbytes' base classes. It overrides how state is made, moved, saved and loaded,
never the arithmetic.
"""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from bitsandbytes.functional import GlobalPageManager
from bitsandbytes.optim import GlobalOptimManager

from pageahead.device import Block
from pageahead.optim import checkpoint, copying
from pageahead.optim.active import Active, Listing, collect, make_contiguous
from pageahead.optim.backward import BackwardUpdates
from pageahead.optim.elastic import Elastic, Residency
from pageahead.optim.engine import Engine, StateSource
from pageahead.optim.homes import Home, check_homes, refuse_capture
from pageahead.optim.hooks import observed
from pageahead.optim.hyperparameters import OfOneStep
from pageahead.optim.paging import Paging
from pageahead.optim.resharding import shared
from pageahead.optim.routing import Route
from pageahead.optim.states import StatePlaces

__all__ = ["PagedOptimizer"]


class PagedOptimizer(StatePlaces):
    """Mixin that moves the state of a bitsandbytes optimizer as `Paging` says."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__signature__" in vars(cls):
            return
        # What inspect and editors show: bitsandbytes' parameters and one more.
        for base in cls.__mro__[1:]:
            if base.__module__.startswith("bitsandbytes."):
                own = inspect.signature(base)
                paging = inspect.Parameter(
                    "paging",
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation="Paging | None",
                )
                cls.__signature__ = own.replace(  # type: ignore[attr-defined]
                    parameters=[*own.parameters.values(), paging]
                )
                return

    def __init__(self, *args: Any, paging: Paging | None = None, **kwargs: Any) -> None:
        if paging is not None and not isinstance(paging, Paging):
            raise TypeError(f"paging takes a pageahead.Paging, not {paging!r}")
        self._prepare_paging(paging)
        super().__init__(*args, **kwargs)
        self._watch_gradients()

    def _prepare_paging(self, paging: Paging | None) -> None:
        """What has to be there before PyTorch's `Optimizer` adds parameters."""
        self.paging = Paging() if paging is None else paging
        self._prepare_places()

    def _prepare_places(self) -> None:
        self._engines: dict[torch.device, Engine] = {}
        self._homes: dict[torch.Tensor, Home] = {}
        self._reserved: dict[torch.Tensor, Home] = {}
        """Homes with room but without state: a gradient was expected, or is about to come."""
        self._listing = Listing()
        self._elastic = Elastic(self.paging)
        self._backward: BackwardUpdates | None = None
        self._source: StateSource | Block | None = None
        self._process = os.getpid()

    def _watch_gradients(self) -> None:
        """What needs the parameters; last in making an optimizer."""
        self._elastic.watch(self)
        if self.paging.in_backward:
            self._backward = BackwardUpdates(self)
            self._backward.attach(parameter for _, _, parameter in self._listed())

    # --- the step -----------------------------------------------------------------------------

    @observed
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, as bitsandbytes does.

        When it returns, parameters and state are complete for any stream (with
        ``write_back="overlap"``: parameters, for the current stream).

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What `closure` returned.

        Raises:
            TypeError, ValueError, RuntimeError: a parameter or gradient cannot be updated; raised
                before anything is changed, and says which and why.
            MemoryError: there is not enough host (or, for managed memory, device) memory.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_process("step()")
        if not self.initialized:
            self.check_overrides()
            self.initialized = True
        if self._backward is not None:
            self._finish_backward(self._backward)
        else:
            self._elastic.before_step(self)
            self._step()
        return loss

    def _step(self) -> None:
        waiting = dict(self._engines)
        try:
            # Chunks start coming in while the host checks and prepares this step.
            for engine in waiting.values():
                engine.anticipate()
            by_device = self._prepare()
            for device in by_device:
                waiting.pop(device, None)
            self._update(by_device)
        finally:
            for engine in waiting.values():
                engine.abandon()

    def _finish_backward(self, backward: BackwardUpdates) -> None:
        """Close the wave of updates in backward, and update whatever it left."""
        with backward.closing() as updated:
            self._update(self._prepare(updated))
        backward.attach(parameter for _, _, parameter in self._listed())
        self._elastic.before_step(self)  # of the next one: now nothing is under way
        for engine in self._engines.values():
            engine.fetch_early()

    def _update(self, by_device: dict[torch.device, list[Active]]) -> None:
        hyperparameters = OfOneStep(self)
        for device, group in by_device.items():
            self._engine(device).step(
                group, self.state, hyperparameters, several_devices=len(by_device) > 1
            )

    def _prepare(self, done: Container[torch.Tensor] = ()) -> dict[torch.device, list[Active]]:
        """Collect and check this step's parameters, and make state for those that have none."""
        actives = collect(self._listing.of(self.param_groups), done)
        devices = list(dict.fromkeys(one.device for one in actives if one.device is not None))
        refuse_capture(devices)
        self._make_state(check_homes(actives, self._homes, self.state))
        make_contiguous(actives)
        if len(devices) == 1:
            return {devices[0]: actives}
        return {
            device: [active for active in actives if active.device == device] for device in devices
        }

    def _check_process(self, what: str) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{what} of a paged optimizer was called in a forked child process; its state "
                f"stays with the process that made the optimizer. Make a new optimizer here, or "
                f"call it in the parent."
            )

    # --- updates in backward --------------------------------------------------------------------

    def accumulate(self) -> AbstractContextManager[None]:
        """A context for backward passes whose gradients only accumulate.

        With ``in_backward``, every micro-batch but the last goes inside; without, it does nothing.

        Raises:
            RuntimeError: parameters were updated already since the last `step`.
        """
        return nullcontext() if self._backward is None else self._backward.accumulate()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and let go of a backward that no `step` follows.

        Its updates stay: state and parameters are as after a step over those parameters alone. A
        warning says so, if no error has.
        """
        if self._backward is not None:
            self._backward.warn_of_updates()
            self._backward.abandon(zeros=not set_to_none)
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.add_param_group`."""
        super().add_param_group(param_group)
        if getattr(self, "_backward", None) is not None:
            assert self._backward is not None
            try:
                self._backward.attach(parameter for _, _, parameter in self._listed())
            except BaseException:
                self.param_groups.pop()  # or `step` would update what another one does
                raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # A GradScaler asks this right before its step: the last chance to say it.
        if self._backward is not None:
            raise RuntimeError(
                "scaler.step() with in_backward=True: parameters were updated during backward, by "
                "gradients that were still scaled. Use in_backward=False with a GradScaler."
            )
        return False

    # --- what users ask -----------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """Say, parameter by parameter, where its state lives and why.

        For a parameter without state yet it is what would be decided now.
        """
        listed = list(self._listed())
        waiting = {
            parameter: self._candidate(parameter, gindex, pindex)
            for gindex, pindex, parameter in listed
            if parameter.requires_grad and parameter not in self._homes
        }
        planned = dict(zip(waiting, self._choose_homes(list(waiting.values())), strict=True))
        return [
            self._route(gindex, pindex, parameter, planned.get(parameter))
            for gindex, pindex, parameter in listed
        ]

    def residency(self) -> Residency:
        """Say how many bytes of state are on devices, on the host, and how large the rings are."""
        return self._elastic.residency(self)

    def release(self, nbytes: int) -> int:
        """Give back device memory, say after an out-of-memory error; then retry the forward.

        Resident state goes to the host first, then the ring, which the next step makes again.
        With ``hbm_budget="auto"`` state returns when there has been room for some steps, with a
        fixed budget it stays on the host.

        Args:
            nbytes: how much is wanted.

        Returns:
            Bytes given back: `nbytes` or more, or less where there was no more to give or the host
            has no room for it, or a step is under way.

        Raises:
            TypeError, ValueError: `nbytes` is not a number of bytes.
        """
        self._check_process("release()")
        return self._elastic.release(self, nbytes)

    def _route(
        self, gindex: int, pindex: int, parameter: torch.Tensor, planned: Home | None
    ) -> Route:
        home = self._homes.get(parameter, planned)
        path, reason = ("none", "frozen: no gradient, no state")
        if home is not None:
            path, reason = self._path_of(home)
            if home is planned:
                reason += " (planned: it has no state yet)"
        return Route(
            gindex,
            pindex,
            tuple(parameter.shape),
            parameter.numel(),
            str(parameter.device),
            home.shape.nbytes if home is not None else 0,
            path,
            reason,
        )

    def _path_of(self, home: Home) -> tuple[str, str]:
        if not home.paged:
            return "resident", home.reason
        engine = self._engines.get(home.device)
        if engine is None or not engine.mode.reason:
            return self.paging.strategy, home.reason
        return engine.mode.path, engine.mode.reason

    # --- checkpoints --------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until all state is complete where it lives.

        Call it before you read or change ``optimizer.state[...]`` itself, where write-backs go on
        after `step` (see `Paging`); `state_dict` does.
        """
        self._check_process("synchronize()")
        for engine in self._engines.values():
            engine.settle()
        self._leave_shared_memory()

    def state_dict(self) -> dict[str, Any]:
        """bitsandbytes' state dict. Waits for write-backs first; its tensors are the live state.

        To keep it across the next step, copy it. Where PyTorch's ``get_optimizer_state_dict`` is
        about to flatten it, no tensor is wrapped. Of sharded parameters (FSDP2) they are `DTensor`
        over the live state.
        """
        self._check_process("state_dict()")
        self.synchronize()
        state_dict: dict[str, Any] = super().state_dict()
        if checkpoint.will_be_flat():
            state_dict = checkpoint.unwrapped(state_dict)
        return shared(state_dict, (parameter for _, _, parameter in self._listed()))

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Copy a state dict, of this or a bitsandbytes optimizer, to where state lives here.

        Args:
            state_dict: from `state_dict`, whatever device its tensors were loaded to.
            move_to_device: accepted for bitsandbytes' sake; where state lives is `paging`'s.

        Raises:
            ValueError: it does not fit this optimizer; nothing was changed.
            MemoryError: there is not enough host memory; nothing was changed.
        """
        self._check_process("load_state_dict()")
        checkpoint.load(self, state_dict)

    def _adopt_state(
        self, saved: Sequence[checkpoint.Saved], groups: Sequence[dict[str, Any]]
    ) -> None:
        self.synchronize()
        if self._backward is not None:
            self._backward.state_loaded()
        super()._adopt_state(saved, groups)

    # --- copies of the optimizer --------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedOptimizer:
        return copying.deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return copying.reduced(self)

    def _take_over(self, attributes: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Become an optimizer like another one, without state; on a new object."""
        vars(self).update(attributes)
        self._prepare_places()
        self.mng = GlobalOptimManager.get_instance()
        self.page_mng = GlobalPageManager.get_instance()
        self.initialized = False  # overrides by module are found by the parameters' identity
        super().__setstate__({"state": defaultdict(dict), "param_groups": groups})
        self._watch_gradients()
