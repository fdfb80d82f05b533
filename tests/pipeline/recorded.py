"""Runs a scenario on the recording device, with a caller and a host that use all they may."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pageahead.device.recording import RecordedStream, RecordingDevice
from pageahead.device.trace import Operation, ranges_of
from pageahead.optim import engine
from pageahead.pipeline import Pipeline
from pageahead.pipeline.ordering import Conflict, find_conflicts
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


@dataclass
class Outcome:
    """What a scenario left behind.

    Attributes:
        device: with the trace.
        snapshots: after each action.
        promises: what the schedule promised and did not keep, in words.
    """

    device: RecordingDevice
    snapshots: list[Snapshot] = field(default_factory=list)
    promises: list[str] = field(default_factory=list)

    def conflicts(self) -> list[Conflict]:
        return find_conflicts(self.device.trace)

    def differences(self, wanted: list[Snapshot]) -> list[str]:
        return [
            f"{name} after action {number}"
            for number, (mine, theirs) in enumerate(zip(self.snapshots, wanted, strict=True))
            for name in differences(mine, theirs)
        ]


class Loop:
    """A training loop around one optimizer.

    The caller writes gradients right before a step, on the stream that it steps on, and reads
    parameters right after it. Then it gives the gradients' memory to something else. Where
    everything is complete on return, another stream and the host read parameters and state without
    waiting for anything.
    """

    def __init__(self, scenario: Scenario, device: RecordingDevice, outcome: Outcome) -> None:
        self.scenario = scenario
        self.device = device
        self.parameters = scenario.make_parameters()
        self.optimizer = scenario.make_optimizer(self.parameters)
        self.outcome = outcome
        self._third = device.other_stream("third")
        self._last = device.caller
        self._kept: list[torch.Tensor] = []  # so that no address gets a second meaning
        self._saved: Any = None
        self._note_new_state()

    def run(self) -> None:
        for number, action in enumerate(self.scenario.actions):
            if isinstance(action, Step):
                self._step(number, action)
            elif isinstance(action, Save):
                self._save()
            elif isinstance(action, Load):
                self._load()
            else:
                self._refused(action)
            self.outcome.snapshots.append(snapshot(self.optimizer, self.parameters))

    def _note_new_state(self) -> None:
        """What bitsandbytes initializes on the device is written on the caller's stream."""
        make = self.optimizer.init_state

        def init_state(group: Any, p: torch.Tensor, gindex: int, pindex: int) -> None:
            make(group, p, gindex, pindex)
            self.device.caller_stream().writes(*self._on_device(p))

        self.optimizer.init_state = init_state  # type: ignore[method-assign]

    def _step(self, number: int, action: Step) -> None:
        stream = self._stream(action.stream)
        active = self.scenario.active(action)
        for position, parameter in enumerate(self.parameters):
            parameter.grad = None
            if position in active:
                parameter.grad = self.scenario.gradient(number, position)
        gradients = [parameter.grad for parameter in self.parameters]
        self._kept += [gradient for gradient in gradients if gradient is not None]
        stream.reads(*self.parameters)
        if action.backward is not None:
            self._backward(action, stream, gradients)
        late = set(active) - set(action.backward or ())
        stream.writes(*(gradients[position] for position in sorted(late)))
        started = len(self.device.trace)
        with self.device.using(stream), failing(action.fails_at):
            if action.abandoned:
                self.optimizer.zero_grad()
            elif action.fails_at is None:
                self.optimizer.step()
                self._check_schedule(self.device.trace[started:], active)
            else:
                with pytest.raises(UpdateError):
                    self.optimizer.step()
        stream.reads(*self.parameters, *self._resident())
        if self.scenario.write_back == "before_return" or action.fails_at is not None:
            self._third.reads(*self.parameters, *self._state())
            self.device.host_reads(*self.parameters, *self._state())
        stream.writes(*gradients)  # freed, and their memory is somebody else's now
        done = self._third.record()  # the caller's own duty towards its streams
        stream.wait(done)
        done.synchronize()

    def _backward(
        self, action: Step, stream: RecordedStream, gradients: list[torch.Tensor | None]
    ) -> None:
        """Gradients come one by one; what is freed is given to something else at once."""
        hooks = self.optimizer._backward
        assert action.backward is not None
        assert hooks is not None
        theirs = stream
        if action.backward_on is not None:
            theirs = self.device.other_stream(action.backward_on)
            theirs.wait(stream.record())
        for count, position in enumerate(action.backward):
            parameter, gradient = self.parameters[position], gradients[position]
            theirs.reads(parameter)
            theirs.writes(gradient)
            with self.device.using(theirs):
                hooks.arrive(parameter)
            if self.scenario.free_grads:
                self._reuse(theirs, gradients)
            if action.saves and 2 * count == len(action.backward):
                with self.device.using(theirs):
                    self.optimizer.state_dict()
                self.device.host_reads(*self._paged())
        if theirs is not stream:
            stream.wait(theirs.record())  # autograd's own duty

    def _reuse(self, stream: RecordedStream, gradients: list[torch.Tensor | None]) -> None:
        """The allocator gives `stream` what was freed, once those it is kept for are done."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and parameter.grad is not gradient:
                for kept, done in self.device.kept:
                    if kept in ranges_of([gradient]):
                        stream.wait(done)
                stream.writes(gradient)

    def _save(self) -> None:
        self._saved = copy.deepcopy(self.optimizer.state_dict())
        self.device.host_reads(*self._paged())
        self._last.reads(*self._resident())

    def _load(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self._saved))
        self.device.host_writes(*self._paged())
        self._last.writes(*self._resident())
        self._last.record().synchronize()  # copies that block the host

    def _refused(self, action: Refused) -> None:
        first = self.parameters[0]
        first.grad = torch.zeros(first.shape)
        with pytest.MonkeyPatch.context() as patch:
            if action.capturing:
                patch.setattr(self.device, "capturing", lambda: True)
            else:
                first.grad = first.grad.to_sparse()
            with pytest.raises((TypeError, RuntimeError)):
                self.optimizer.step()
        first.grad = None

    def _stream(self, name: str) -> RecordedStream:
        stream = self.device.caller if name == "caller" else self.device.other_stream(name)
        if stream is not self._last:
            stream.wait(self._last.record())  # the caller's own duty towards its streams
            self._last = stream
        return stream

    # --- which tensors are where ----------------------------------------------------------------

    def _entries(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        return {one: self.optimizer.state[one] for one in self.parameters if one in self._homes()}

    def _homes(self) -> Mapping[torch.Tensor, Any]:
        return self.optimizer._homes

    def _on_device(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        tensors = {
            key: one
            for key, one in self.optimizer.state[parameter].items()
            if isinstance(one, torch.Tensor)
        }
        paged = parameter in self._homes() and self._homes()[parameter].paged
        # While state is being made there is no home yet; the arena's tensors are not on the device.
        paged = paged or self.optimizer._source is not None
        return [one for key, one in tensors.items() if not (paged and key in ("state1", "state2"))]

    def _resident(self) -> list[torch.Tensor]:
        return [one for parameter in self._entries() for one in self._on_device(parameter)]

    def _paged(self) -> list[torch.Tensor]:
        homes = self._homes()
        return [one for p in self._entries() if homes[p].paged for one in homes[p].tensors]

    def _state(self) -> list[torch.Tensor]:
        return [*self._resident(), *self._paged()]

    # --- what the strategies over managed memory promise about their schedule ---------------------

    def _check_schedule(self, step: list[Operation], active: tuple[int, ...]) -> None:
        listed = [*range(len(self.parameters)), *self.scenario.twice]
        paged = [
            number
            for number in listed
            if number in active and self._homes()[self.parameters[number]].paged
        ]
        (one,) = self.optimizer._engines.values() if active else (None,)
        if one is None:
            return
        if one.mode.path == "sequential":
            synchronized = sum(operation.what == "synchronizes" for operation in step)
            if synchronized != len(paged):
                self.outcome.promises.append(
                    f"sequential synchronized {synchronized} times for {len(paged)} parameters"
                )
        if one.mode.path == "lookahead":
            sent = arrived = 0
            for operation in self.device.trace:
                if operation.agent == "prefetch" and operation.records is not None:
                    sent = _ordinal(operation.records)
                    if sent > arrived + 1:
                        self.outcome.promises.append(f"lookahead went {sent - arrived} ahead")
                elif operation.agent == "compute":
                    waited = [one for one in operation.waits if one.startswith("prefetch")]
                    arrived = max([arrived, *map(_ordinal, waited)])
                elif "prefetch" in operation.idles:
                    arrived = sent


def _ordinal(event: str) -> int:
    return int(event.rsplit(" ", 1)[1])


def record(
    scenario: Scenario, *, pipeline: Any = Pipeline, execute: bool = True
) -> tuple[Outcome, BaseException | None]:
    """Run `scenario` with `pipeline` in the engine's place, until its optimizer is gone.

    Args:
        scenario: what to run.
        pipeline: a class like `Pipeline`.
        execute: also compute; False where only the order is of interest.

    Returns:
        What was recorded, and the error that ended it early, if one did.
    """
    device = RecordingDevice(execute=execute)
    outcome, error = Outcome(device), None
    gc.freeze()  # so that the collection below looks only at what this run leaves
    with (
        warnings.catch_warnings(),
        scenario.scaled_down(),
        pytest.MonkeyPatch.context() as patch,
        device.installed(),
    ):
        warnings.simplefilter("ignore")  # of parameters listed twice
        patch.setattr(engine, "Pipeline", pipeline)
        loop = Loop(scenario, device, outcome)
        try:
            loop.run()
        except (Exception, pytest.fail.Exception) as caught:
            error = caught.with_traceback(None)
        del loop
        gc.collect()  # slots, arena and managed memory are given back
    gc.unfreeze()
    return outcome, error
