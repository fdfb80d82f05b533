"""A device whose operation number so-and-so raises, and what a broken step must have left behind.

`Tripwire` wraps a real device of the package, CPU or CUDA, and counts what a step asks of it: each
record, wait, copy, prefetch, slot, managed allocation, page-lock and host wait, and each launch of
an update, which `Launches` adds. The one it is set to raises before anything is done, as an
operation does that a driver refuses, or during which the user presses Ctrl-C.

**What is promised after such a step.** The error comes out as it was; nothing is in flight; and
every update that was launched counts exactly once, none that was not counts at all: `replay` runs
just those over bitsandbytes' own tensors, slice by slice in the order in which they were launched,
takes the step counts, and from there on both optimizers agree bit for bit. A parameter that was cut
may so be updated in part; a parameter whose turn had come has its step counted, as in bitsandbytes,
even if its update was refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from pageahead.optim import update
from pageahead.optim.active import Active
from pageahead.optim.hyperparameters import Hyperparameters
from pageahead.optim.update import StateViews

__all__ = ["Launches", "Tripwire", "homeward", "replay"]


class _Event:
    def __init__(self, device: Tripwire, inner: Any, stream: str) -> None:
        self.device, self.inner, self.stream = device, inner, stream

    def synchronize(self) -> None:
        self.device.passes(f"host waits for {self.stream}")
        self.inner.synchronize()


class _Stream:
    def __init__(self, device: Tripwire, inner: Any, name: str) -> None:
        self.device, self.inner, self.name = device, inner, name

    def record(self) -> _Event:
        self.device.passes(f"{self.name} records")
        return _Event(self.device, self.inner.record(), self.name)

    def wait(self, event: _Event) -> None:
        self.device.passes(f"{self.name} waits for {event.stream}")
        self.inner.wait(event.inner)


class Tripwire:
    """See `pageahead.device.protocol.Device`.

    Attributes:
        operations: what was asked for since `arm`, in order; the last one is what raised.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.torch_device = inner.torch_device
        self.operations: list[str] = []
        self._at: int | None = None
        self._error: BaseException | None = None
        self._streams: dict[str, _Stream] = {}
        self._compute = _Stream(self, inner.compute_stream(), "compute")

    def arm(self, at: int | None, error: BaseException | None = None) -> None:
        """Count from 0 and let operation number `at` raise `error`, once."""
        self.operations, self._at, self._error = [], at, error

    def passes(self, operation: str) -> None:
        """Note an operation that is about to be done; raise if it is the one."""
        self.operations.append(operation)
        if self._at is not None and len(self.operations) > self._at:
            error, self._at, self._error = self._error, None, None
            assert error is not None
            raise error

    # --- counted --------------------------------------------------------------------------------

    def stream(self, role: str) -> _Stream:
        if role not in self._streams:
            self._streams[role] = _Stream(self, self.inner.stream(role), role)
        return self._streams[role]

    def compute_stream(self) -> _Stream:
        return self._compute

    def caller_stream(self) -> _Stream:
        return _Stream(self, self.inner.caller_stream(), "caller")

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, stream: _Stream) -> None:
        self.passes(f"copy on {stream.name}")
        self.inner.copy(destination, source, stream=stream.inner)

    def zero(self, tensor: torch.Tensor, *, stream: _Stream) -> None:
        self.passes(f"zero on {stream.name}")
        self.inner.zero(tensor, stream=stream.inner)

    def keep(self, tensor: torch.Tensor) -> None:
        self.inner.keep(tensor)

    def prefetch(self, tensor: torch.Tensor, *, stream: _Stream) -> None:
        self.passes(f"prefetch on {stream.name}")
        self.inner.prefetch(tensor, stream=stream.inner)

    def slot(self, nbytes: int) -> torch.Tensor:
        self.passes("slot")
        return self.inner.slot(nbytes)

    def near_cpus(self) -> frozenset[int]:
        return self.inner.near_cpus()

    def pin(self, address: int, nbytes: int) -> bool:
        self.passes("pin")
        return self.inner.pin(address, nbytes)

    def block(self) -> Any:
        self.passes("block")
        return self.inner.block()

    def managed(self, nbytes: int, *, allow_oversubscription: bool) -> torch.Tensor:
        self.passes("managed")
        return self.inner.managed(nbytes, allow_oversubscription=allow_oversubscription)

    def synchronize(self) -> None:
        self.passes("synchronize")
        self.inner.synchronize()

    # --- not counted: no operation of a step, or the way out of a broken one ----------------------

    def computing(self) -> AbstractContextManager[Any]:
        return self.inner.computing()

    def free_bytes(self) -> int:
        return self.inner.free_bytes()

    def memory(self) -> Any:
        return self.inner.memory()

    def unpin(self, address: int) -> None:
        self.inner.unpin(address)

    def lookahead_obstacle(self) -> str | None:
        return self.inner.lookahead_obstacle()

    def capturing(self) -> bool:
        return self.inner.capturing()

    def drain(self) -> None:
        self.inner.drain()


class Launches:
    """Stands for `pageahead.optim.engine.launch`: an operation of the step, remembered once done.

    Attributes:
        done: parameter, first and last element, and step number of each update.
    """

    def __init__(self, device: Tripwire) -> None:
        self.device = device
        self.done: list[tuple[torch.Tensor, int, int, int]] = []

    def __call__(self, name: str, active: Active, views: StateViews) -> None:
        self.device.passes("update")
        update.launch(name, active, views)
        self.done.append((active.parameter, views.start, views.stop, active.step))


def homeward(operations: Sequence[str]) -> set[int]:
    """Numbers of the operations between a chunk's update and the end of its copy home."""
    numbers: set[int] = set()
    for number, operation in enumerate(operations):
        if operation == "write_back waits for compute":
            numbers |= {number - 1, number}  # the event it waits for is recorded for it
        elif operation == "copy on write_back":
            numbers.add(number)
    return numbers


def replay(
    launches: Launches,
    optimizer: Any,
    parameters: Sequence[torch.Tensor],
    expected: Any,
    twins: Sequence[torch.Tensor],
) -> None:
    """Give `expected`, a bitsandbytes optimizer, exactly the updates that `optimizer` launched.

    Args:
        launches: those of the broken step.
        optimizer, parameters: ours, of one group, after the broken step.
        expected, twins: bitsandbytes', before that step, with the same gradients.
    """
    group = expected.param_groups[0]
    place = {parameter: number for number, parameter in enumerate(parameters)}

    def state_of(number: int) -> dict[str, Any]:
        if not expected.state.get(twins[number]):
            expected.init_state(group, twins[number], 0, number)
        return expected.state[twins[number]]

    for parameter, start, stop, step in launches.done:
        number = place[parameter]
        active = Active(twins[number], group, 0, number, state=state_of(number))
        active.config = Hyperparameters.of(expected.get_config(0, number, group))
        active.step = step
        with torch.no_grad():
            update.launch(expected.optimizer_name, active, _views(active, start, stop))
    for number, parameter in enumerate(parameters):
        count = optimizer.state[parameter]["step"] if parameter in optimizer.state else 0
        if count:
            state_of(number)["step"] = count


def _views(active: Active, start: int, stop: int) -> StateViews:
    """Elements ``[start, stop)`` of state that lies in tensors of its own, of one row each."""
    state = active.state
    whole = start == 0 and stop == active.parameter.numel()
    elements, blocks = slice(start, stop), slice(start // 256, -(-stop // 256))

    def part(key: str, of: slice) -> Any:
        tensor = state.get(key)
        return tensor if whole or tensor is None else tensor.view(-1)[of]

    return StateViews(
        start,
        stop,
        whole,
        part("state1", elements),
        part("state2", elements),
        part("absmax1", blocks),
        part("absmax2", blocks),
        state.get("qmap1"),
        state.get("qmap2"),
    )
