"""Runs a scenario on the GPU so that a missing edge shows as wrong bits, not once in a while.

Slots are filled with NaN (0xFF in every byte) before each fetch, on the fetch stream, and when they
are made, on the stream whose pool they come from. Gradients are NaN until the caller writes them
and again when its step has returned. And one stream at a time is late: the GPU sleeps before each
thing that it does there. Nothing reads or writes out of place: a faulty pipeline ends with wrong
values.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import pageahead.device
from pageahead.device.cuda import CudaDevice
from pageahead.memory.layout import Chunk
from pageahead.memory.ring import Slot
from pageahead.optim import engine
from pageahead.optim.backward import BackwardUpdates
from pageahead.optim.engine import Engine
from pageahead.optim.plan import StepPlan
from tests.pipeline.scenarios import (
    Load,
    Refused,
    Save,
    Scenario,
    Snapshot,
    Step,
    UpdateError,
    differences,
    failing,
    snapshot,
)

LATE = ("nobody", "write_back", "compute", "fetch", "caller")
"""Who is late, in turn."""

CYCLES = 1_000_000
"""How late a chunk is: half a millisecond. The host enqueues one in a fifth of that."""

CALLER_CYCLES = 10_000_000
"""How late a gradient is: five milliseconds. The host prepares a step in a tenth of that."""

POISON = 0xFF

Streams = dict[str, torch.cuda.Stream]
"""The caller's, by name."""


class PoisonedDevice(CudaDevice):
    """A GPU whose slots are poisoned and one of whose streams is late."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.late = "nobody"

    def delay(self, who: str, cycles: int = CYCLES) -> None:
        """Let the current stream sleep if `who` is late."""
        if who == self.late:
            torch.cuda._sleep(cycles)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, stream: Any) -> None:
        with torch.cuda.stream(stream.raw):
            self.delay("fetch" if destination.is_cuda else "write_back")
            if destination.is_cuda:
                destination.fill_(POISON)
        super().copy(destination, source, stream=stream)

    def zero(self, tensor: torch.Tensor, *, stream: Any) -> None:
        with torch.cuda.stream(stream.raw):
            self.delay("fetch")
            tensor.fill_(POISON)
        super().zero(tensor, stream=stream)

    def prefetch(self, tensor: torch.Tensor, *, stream: Any) -> None:
        with torch.cuda.stream(stream.raw):
            self.delay("fetch")
        super().prefetch(tensor, stream=stream)

    def slot(self, nbytes: int) -> torch.Tensor:
        memory = super().slot(nbytes)
        # As the allocator may do: this memory is free, but what used it last has not run yet.
        torch.cuda._sleep(CYCLES)
        return memory.fill_(POISON)


class PoisonedLoop:
    """A training loop on the GPU; like `tests.pipeline.recorded.Loop`, with real reads."""

    def __init__(self, scenario: Scenario, device: PoisonedDevice, streams: Streams) -> None:
        self._scenario = scenario
        self._device = device
        self._streams = streams
        self._parameters = scenario.make_parameters("cuda")
        self._optimizer = scenario.make_optimizer(self._parameters)
        self._gradients = [torch.full_like(one, float("nan")) for one in self._parameters]
        self._values = [
            [scenario.gradient(action, number).to("cuda") for number in range(len(self._gradients))]
            for action in range(len(scenario.actions))
        ]
        self._last = streams["caller"]
        self._saved: Any = None
        self.seen: list[list[Snapshot]] = []
        """For each action, what was read after it, by whoever may read then."""
        torch.cuda.synchronize()

    def run(self) -> None:
        for number, action in enumerate(self._scenario.actions):
            self.seen.append([])
            if isinstance(action, Step):
                self._step(number, action)
            elif isinstance(action, Save):
                with torch.cuda.stream(self._last):
                    # The arena is read right here by the host.
                    self._saved = copy.deepcopy(self._optimizer.state_dict())
                self.seen[-1].append(self._paged_state())
            elif isinstance(action, Load):
                with torch.cuda.stream(self._last):
                    self._optimizer.load_state_dict(copy.deepcopy(self._saved))
            else:
                self._refused(action)
        with torch.cuda.stream(self._last):
            self._optimizer.state_dict()
        self.seen[-1].append(self._paged_state())
        torch.cuda.synchronize()
        self.seen[-1].append(snapshot(self._optimizer, self._parameters))

    def _step(self, number: int, action: Step) -> None:
        stream = self._streams[action.stream]
        if stream is not self._last:
            stream.wait_stream(self._last)  # the caller's own duty towards its streams
            self._last = stream
        active = self._scenario.active(action)
        with torch.cuda.stream(stream):
            for parameter in self._parameters:
                parameter.grad = None
            if action.backward is not None:
                self._backward(number, action, stream)
            self._device.delay("caller", CALLER_CYCLES)
            for position in sorted(set(active) - set(action.backward or ())):
                self._give(number, position)
            with failing(action.fails_at):
                if action.abandoned:
                    self._optimizer.zero_grad()
                elif action.fails_at is None:
                    self._optimizer.step()
                else:
                    with pytest.raises(UpdateError):
                        self._optimizer.step()
            complete = self._scenario.write_back == "before_return" or action.fails_at is not None
            if complete:
                self.seen[-1].append(self._paged_state())
            self.seen[-1].append(self._read())
            for gradient in self._gradients:
                gradient.fill_(float("nan"))  # freed, and their memory is somebody else's now
        if complete:
            third = self._streams["third"]
            with torch.cuda.stream(third):
                self.seen[-1].append(self._read())
            stream.wait_stream(third)  # the caller's own duty towards its streams

    def _backward(self, number: int, action: Step, stream: torch.cuda.Stream) -> None:
        """Gradients come one by one, each late if the caller is."""
        hooks = self._optimizer._backward
        assert action.backward is not None
        assert hooks is not None
        theirs = stream if action.backward_on is None else self._streams[action.backward_on]
        theirs.wait_stream(stream)
        with torch.cuda.stream(theirs):
            for count, position in enumerate(action.backward):
                self._device.delay("caller", CALLER_CYCLES)
                self._give(number, position)
                hooks.arrive(self._parameters[position])
                if action.saves and 2 * count == len(action.backward):
                    self._optimizer.state_dict()
                    self.seen[-1].append(self._updated_state(hooks))
        stream.wait_stream(theirs)  # autograd's own duty

    def _give(self, number: int, position: int) -> None:
        gradient = self._parameters[position].grad = self._gradients[position]
        gradient.copy_(self._values[number][position])

    def _refused(self, action: Refused) -> None:
        first = self._parameters[0]
        first.grad = torch.zeros_like(first)
        with pytest.MonkeyPatch.context() as patch, torch.cuda.stream(self._last):
            if action.capturing:
                patch.setattr(self._device, "capturing", lambda: True)
            else:
                first.grad = first.grad.to_sparse()
            with pytest.raises((TypeError, RuntimeError)):
                self._optimizer.step()
        first.grad = None

    def _read(self) -> Snapshot:
        """Parameters, copied on the current stream."""
        return {
            f"parameter {number}": parameter.detach().clone()
            for number, parameter in enumerate(self._parameters)
        }

    def _updated_state(self, hooks: BackwardUpdates) -> Snapshot:
        """State of what backward has updated so far; what is on the device, by this stream."""
        wave = hooks._wave
        assert wave is not None
        done = [n for n, one in enumerate(self._parameters) if one in wave.updated]
        assert done
        return {
            f"{key} of {number}": value.detach().clone()
            for number in done
            for key, value in self._optimizer.state[self._parameters[number]].items()
            if isinstance(value, torch.Tensor)
        }

    def _paged_state(self) -> Snapshot:
        """State in the arena or in managed memory, copied by the host, now."""
        taken: Snapshot = {}
        for number, parameter in enumerate(self._parameters):
            home = self._optimizer._homes.get(parameter)
            if home is not None and home.paged:
                for key, tensor in zip(("state1", "state2"), home.tensors, strict=False):
                    taken[f"{key} of {number}"] = tensor.clone()
        return taken


class Poison:
    """Runs scenarios; one poisoned device and one set of the caller's streams for all of them."""

    def __init__(self) -> None:
        self._device = PoisonedDevice(torch.device("cuda", torch.cuda.current_device()))
        self._streams: Streams = {name: torch.cuda.Stream() for name in ("caller", "side", "third")}

    def run(self, scenario: Scenario, late: str, pipeline: Any, wanted: list[Snapshot]) -> str:
        """Run `scenario` with `pipeline` while one stream is late; say what shows, or nothing.

        Args:
            scenario: what to run.
            late: one of `LATE`.
            pipeline: a class like `pageahead.pipeline.Pipeline`.
            wanted: the results after each action.
        """
        self._device.late = late
        with self._installed(scenario, pipeline):
            loop = PoisonedLoop(scenario, self._device, self._streams)
            try:
                loop.run()
            except (NameError, SyntaxError):
                raise  # not what a fault is about
            except (Exception, pytest.fail.Exception) as error:
                return f"error: {type(error).__name__}"
            finally:
                self._device.late = "nobody"
                torch.cuda.synchronize()  # before anything is freed
            for number, (all_seen, right) in enumerate(zip(loop.seen, wanted, strict=True)):
                for seen in all_seen:
                    here = {key: tensor.cpu() for key, tensor in seen.items()}
                    for different in differences(here, right):
                        return f"bits: {different} after action {number}"
        return ""

    @contextmanager
    def _installed(self, scenario: Scenario, pipeline: Any) -> Iterator[None]:
        update = Engine._update

        def late_update(self: Engine, plan: StepPlan, chunk: Chunk, slot: Slot | None) -> None:
            assert isinstance(self._device, PoisonedDevice)
            self._device.delay("compute")  # the current stream is the compute stream here
            update(self, plan, chunk, slot)

        with (
            warnings.catch_warnings(),
            scenario.scaled_down(),
            pytest.MonkeyPatch.context() as patch,
        ):
            warnings.simplefilter("ignore")  # of parameters listed twice
            patch.setitem(pageahead.device._devices, self._device.torch_device, self._device)
            patch.setattr(engine, "Pipeline", pipeline)
            patch.setattr(Engine, "_update", late_update)
            yield
