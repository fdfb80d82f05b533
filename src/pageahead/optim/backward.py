"""Updates issued from gradient hooks, while backward still runs.

A **wave** is one backward: it opens with the first gradient that arrives and closes with `step()`.
In between each chunk is updated as soon as the gradients of all its parameters are there. Whatever
did not get there by then (a parameter whose hook never fired, the rest of its chunk) is left to
`step()`, which updates it as if there had been no wave.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from pageahead.memory.layout import Chunk
from pageahead.optim.active import check, make_contiguous
from pageahead.optim.homes import check_homes, refuse_capture
from pageahead.optim.hyperparameters import OfOneStep
from pageahead.optim.misuse import changed_groups, groups_of, other_users, refuse_kept_shards
from pageahead.optim.sharded import local
from pageahead.optim.wave import (
    Expected,
    Lane,
    Mark,
    Wave,
    is_placeholder,
    order_free,
    placeholder,
)

if TYPE_CHECKING:
    from pageahead.optim.paged import PagedOptimizer

__all__ = ["BackwardUpdates"]

_hooked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""For each parameter a weak reference to whoever updates it in backward."""


class BackwardUpdates:
    """The gradient hooks of one optimizer, and the wave that is open."""

    def __init__(self, optimizer: PagedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        # Hooks run on autograd's threads, one for each device.
        self._lock = threading.RLock()
        self._handles: list[RemovableHandle] = []
        self._attached: set[int] = set()
        self._wave: Wave | None = None
        self._order: list[torch.Tensor] | None = None
        """Parameters as their gradients came last; before that is known, reverse registration."""
        self._accumulating = 0
        self._alone = False  # whether it was looked for others that use the gradients
        # A hook lives as long as its parameter: without this, longer than the optimizer.
        weakref.finalize(optimizer, _remove, self._handles).atexit = False

    # --- hooks ----------------------------------------------------------------------------------

    def refuse_second(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise `RuntimeError` if another optimizer updates one of these in backward."""
        for parameter in parameters:
            known = _hooked.get(parameter)
            other = None if known is None else known()
            if other is not None and other is not self and other._optimizer() is not None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} is already updated in backward "
                    f"by another optimizer ({type(other._optimizer()).__name__}); both would take "
                    f"the same gradient. Delete that optimizer first, or use in_backward=False."
                )

    def attach(self, parameters: Iterable[torch.Tensor]) -> None:
        """Hook every parameter that is not hooked yet and takes a gradient."""
        new = [
            parameter
            for parameter in dict.fromkeys(parameters)
            if parameter.requires_grad and id(parameter) not in self._attached
        ]
        self.refuse_second(new)
        optimizer = self._optimizer()
        if optimizer is not None:
            refuse_kept_shards(optimizer.paging, new)
        me = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            updates = me()
            if updates is not None:
                updates.arrive(parameter)

        for parameter in new:
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            self._attached.add(id(parameter))
            _hooked[parameter] = me
        if new:
            self._alone = False

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """See `PagedOptimizer.accumulate`."""
        if self._wave is not None:
            raise RuntimeError(
                "accumulate() was entered after a backward outside of it, which begins the "
                "updates; the micro-batches inside come first, the last one goes outside."
                + self._already(self._wave)
            )
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def arrive(self, parameter: torch.Tensor) -> None:
        """Called by autograd when the gradient of a parameter is complete."""
        optimizer = self._optimizer()
        if optimizer is None or self._accumulating:
            return
        if parameter.grad is None:
            return  # an earlier hook took it: nothing to update by
        optimizer._check_process("backward()")  # also where the fork came after the first gradient
        # Autograd has it off already, but for create_graph=True.
        mode = torch.no_grad() if torch.is_grad_enabled() else nullcontext()
        with self._lock, mode:
            wave = self._wave or self._open(optimizer)
            if wave.problem:
                return
            number = id(parameter)
            if number in wave.arrived:
                wave.problem = (
                    "backward ran a second time before step(). Wrap every backward but the last "
                    "in optimizer.accumulate(), and call step() and zero_grad() after that"
                )
                return
            wave.arrived[number] = parameter
            known = wave.expected.get(number)
            if known is None:
                return  # not expected: `step` updates it
            lane, expected = known
            try:
                self._prepare(optimizer, expected)
                for chunk in lane.ready(expected):
                    for member in lane.members[chunk.index]:
                        if member.active.parameter.grad is not member.gradient:
                            # A hook after ours replaced it while the chunk waited for others.
                            self._prepare(optimizer, member)
                    lane.engine.update(chunk)
                    self._done(optimizer, lane, chunk, wave)
            except BaseException as error:
                wave.problem = f"backward failed ({type(error).__name__}: {error})"
                wave.finished = True
                for other in wave.lanes.values():
                    other.engine.close(failed=True)
                self._reraise(wave, error)

    @staticmethod
    def _prepare(optimizer: PagedOptimizer, expected: Expected) -> None:
        """Check a parameter, and make its state if it has none."""
        active = expected.active
        parameter = active.parameter
        gradient = parameter.grad
        if gradient is None:
            raise RuntimeError(
                f"a hook took the gradient of parameter {active.pindex} of group {active.gindex} "
                f"away after it had come, and before its update. Register hooks that replace "
                f"gradients before the optimizer is made, or use in_backward=False."
            )
        check(parameter, gradient, active)
        if new := check_homes((active,), optimizer._homes, optimizer.state):
            optimizer._make_state(new)
        if not active.contiguous:
            make_contiguous((active,))
            gradient = parameter.grad
        expected.gradient = gradient

    @staticmethod
    def _done(optimizer: PagedOptimizer, lane: Lane, chunk: Chunk, wave: Wave) -> None:
        """Note which parameters are updated now that a chunk is."""
        done = list(lane.updated(chunk))
        # bitsandbytes' kernels do not tell autograd: a backward node that still needs the old
        # value would silently take the new one.
        torch.autograd.graph.increment_version(done)
        free = optimizer.paging.free_grads
        for parameter in done:
            gradient = parameter.grad
            assert gradient is not None
            if free and local(gradient).numel() > 1:
                # Of one element nothing is freed, and adding to a placeholder would not raise.
                lane.engine.keep(local(gradient))
                gradient = parameter.grad = placeholder(gradient)
            wave.updated[parameter] = Mark(gradient, gradient._version)

    # --- a wave ---------------------------------------------------------------------------------

    def _open(self, optimizer: PagedOptimizer) -> Wave:
        self._refuse_freed(None, "backward()")
        parameters = list(self._expected(optimizer))
        refuse_capture({parameter.device for parameter in parameters})
        if not self._alone:
            other_users(optimizer, parameters)
            self._alone = True
        listings = order_free(optimizer._listing.of(optimizer.param_groups), parameters)
        if not optimizer.initialized:
            optimizer.check_overrides()
            optimizer.initialized = True
        homes, _ = optimizer._reserve_homes(listings)
        lanes: dict[torch.device, Lane] = {}
        for active, home in zip(listings, homes, strict=True):
            active.config, active.home, device = None, home, home.device
            if device not in lanes:
                lanes[device] = Lane(optimizer._engine(device), [])
            lanes[device].actives.append(active)
        wave = Wave(lanes, groups_of(optimizer))
        hyperparameters = OfOneStep(optimizer)
        opened: list[Lane] = []
        try:
            for lane in lanes.values():
                opened.append(lane)
                plan = lane.engine.open(lane.actives, optimizer.state, hyperparameters)
                for one in lane.expect(plan.chunks):
                    wave.expected[id(one.active.parameter)] = lane, one
        except BaseException:
            for lane in opened:
                lane.engine.close(failed=True)
            raise
        self._wave = wave
        return wave

    def _expected(self, optimizer: PagedOptimizer) -> Iterable[torch.Tensor]:
        """Parameters that will have a gradient, in the order in which these will come."""
        listed = dict.fromkeys(
            parameter for _, _, parameter in optimizer._listed() if parameter.requires_grad
        )
        if self._order is None:
            return reversed(listed)
        return [parameter for parameter in self._order if parameter in listed]

    @contextmanager
    def closing(self) -> Iterator[Container[torch.Tensor]]:
        """Finish the wave that is open, if one is; the parameters that it updated.

        The step over the others goes inside. After an error the wave stays until `abandon`: a
        second `step` would use the gradients of this one once more.

        Raises:
            RuntimeError: what was done since the first update makes it wrong. Says what, and which
                parameters are updated already.
        """
        wave = self._close()
        self._refuse_freed(wave, "step()")
        if wave is None:
            yield ()
            return
        try:
            yield wave.updated
        except BaseException as error:
            if not wave.updated:
                self._wave = None
            wave.problem = f"step() failed ({type(error).__name__}: {error})"
            self._reraise(wave, error)
        self._wave = None

    def _close(self) -> Wave | None:
        with self._lock:
            wave, optimizer = self._wave, self._optimizer()
            if wave is None or optimizer is None:
                return None
            problem = wave.problem or self._edited(wave) or changed_groups(optimizer, wave.groups)
            self._finish(wave)
            if problem:
                wave.problem = problem
                raise RuntimeError(
                    f"step() after updates in backward: {problem}.{self._already(wave)} Call "
                    f"zero_grad() and go on; to undo them, load a checkpoint as well."
                )
            self._learn(wave)
            return wave

    def _refuse_freed(self, wave: Wave | None, what: str) -> None:
        """Raise `RuntimeError` if a parameter still has the placeholder of an earlier step."""
        optimizer = self._optimizer()
        if optimizer is None or not optimizer.paging.free_grads:
            return
        freed = [
            parameter
            for _, _, parameter in optimizer._listed()
            if parameter.grad is not None
            and is_placeholder(parameter.grad)
            and (wave is None or parameter not in wave.updated)
        ]
        if freed:
            problem = (
                f"the gradients of {_names(optimizer, freed)} were used by an earlier step and "
                f"freed; call zero_grad() after each step"
            )
            if wave is not None:
                wave.problem = problem
                problem += f".{self._already(wave)}"
            raise RuntimeError(f"{what} with free_grads=True: {problem}")

    def warn_of_updates(self) -> None:
        """Warn before gradients are thrown away that backward has used, unless an error said so."""
        wave = self._wave
        if wave is not None and wave.updated and not wave.problem:
            warnings.warn(
                f"zero_grad() without step() after a backward: its updates are not undone."
                f"{self._already(wave)} A backward whose gradients are not for this optimizer "
                f"(another network's loss, gradients of inputs) goes inside accumulate().",
                RuntimeWarning,
                stacklevel=3,
            )

    def abandon(self, *, zeros: bool = False) -> None:
        """Finish the wave without a step, and take placeholders away. Updates that ran stay.

        Args:
            zeros: put gradients of zeros in the placeholders' place.
        """
        with self._lock:
            self._let_go()
            optimizer = self._optimizer()
            if optimizer is not None and optimizer.paging.free_grads:
                for _, _, parameter in optimizer._listed():
                    if parameter.grad is not None and is_placeholder(parameter.grad):
                        parameter.grad = torch.zeros_like(parameter) if zeros else None

    def _let_go(self) -> None:
        """Finish the wave without a step. Gradients stay as they are."""
        wave, self._wave = self._wave, None
        optimizer = self._optimizer()
        forked = optimizer is not None and optimizer._process != os.getpid()
        if wave is not None and not forked:  # a child would wait for threads it has not
            self._finish(wave)

    def state_loaded(self) -> None:
        """Finish the wave before state is replaced. What it updated has been, by the old state."""
        with self._lock:
            wave = self._wave
            if wave is None or not wave.updated:
                self._let_go()
                return
            self._finish(wave)
            wave.problem = wave.problem or "load_state_dict() came between backward and step()"

    @staticmethod
    def _finish(wave: Wave) -> None:
        if not wave.finished:
            wave.finished = True
            with ExitStack() as each:  # also those after one that fails
                for lane in wave.lanes.values():
                    each.callback(lane.engine.close)

    def _reraise(self, wave: Wave, error: BaseException) -> NoReturn:
        """Raise `error`, which may not know that something was updated before it."""
        if wave.updated and isinstance(error, (TypeError, ValueError, RuntimeError)):
            said = str(error).removesuffix(" Nothing was updated.")
            raise type(error)(f"{said}{self._already(wave)}") from error
        raise error

    def _learn(self, wave: Wave) -> None:
        as_expected = (
            all(lane.in_order for lane in wave.lanes.values())
            and wave.expected.keys() == wave.arrived.keys()
        )
        if self._order is None or not as_expected:
            self._order = list(wave.arrived.values())

    def _edited(self, wave: Wave) -> str:
        edited = [
            parameter
            for parameter, mark in wave.updated.items()
            if parameter.grad is not mark.gradient or mark.gradient._version != mark.version
        ]
        if not edited:
            return ""
        return (
            f"the gradients of {_names(self._optimizer(), edited)} were changed or replaced after "
            f"their update; that has no effect. Clip or scale with in_backward=False"
        )

    def _already(self, wave: Wave) -> str:
        if not wave.updated:
            return " No parameter was updated."
        return f" Already updated: {_names(self._optimizer(), wave.updated)}."


def _names(optimizer: PagedOptimizer | None, parameters: Iterable[torch.Tensor]) -> str:
    wanted = dict.fromkeys(parameters)
    listed = [] if optimizer is None else optimizer._listed()
    names = [f"{pindex} of group {gindex}" for gindex, pindex, one in listed if one in wanted]
    shown = ", ".join(names[:NAMED])
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"parameter {shown}{more}"


NAMED = 20
"""Parameters that a message names one by one."""


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
