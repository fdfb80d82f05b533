"""How one cell is timed: all its optimizers interleaved in one process, step by step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol as Interface

import torch

__all__ = ["Clock", "CpuClock", "CudaClock", "Interleaving", "Protocol", "Sample", "Subject"]


@dataclass(frozen=True)
class Protocol:
    """Counts: warm-up steps, then `rounds` of `repetitions` timed steps, of each optimizer."""

    warmups: int
    rounds: int
    repetitions: int

    @property
    def steps(self) -> int:
        """Steps of each optimizer, warm-ups included."""
        return self.warmups + self.rounds * self.repetitions


@dataclass(frozen=True)
class Sample:
    """One timed step, in milliseconds.

    Attributes:
        wall_ms: on the host's clock, from an idle device until the step returned.
        event_ms: between CUDA events around it; None on the CPU.
        settle_ms: what the device still had to do after the step had returned. Both sides promise
            a completed step, so this is the cost of asking.
    """

    wall_ms: float
    event_ms: float | None
    settle_ms: float


class Clock(Interface):
    """Times one step."""

    def time(self, operation: Callable[[], None]) -> Sample:
        """Run `operation` and return how long it took."""


class CpuClock:
    """The host's clock alone."""

    def time(self, operation: Callable[[], None]) -> Sample:
        begun = time.perf_counter_ns()
        operation()
        return Sample(_ms(time.perf_counter_ns() - begun), None, 0.0)


class CudaClock:
    """The host's clock and two CUDA events on the current stream, from an idle device."""

    def __init__(self) -> None:
        self._first = torch.cuda.Event(enable_timing=True)
        self._last = torch.cuda.Event(enable_timing=True)

    def time(self, operation: Callable[[], None]) -> Sample:
        torch.cuda.synchronize()
        self._first.record()
        begun = time.perf_counter_ns()
        operation()
        returned = time.perf_counter_ns()
        self._last.record()
        torch.cuda.synchronize()
        settled = time.perf_counter_ns()
        return Sample(
            _ms(returned - begun), self._first.elapsed_time(self._last), _ms(settled - returned)
        )


class Subject(Interface):
    """Something whose steps are timed."""

    def prepare(self, turn: int) -> None:
        """Whatever has to be in place before step number `turn`; not timed."""

    def step(self) -> None:
        """One step; timed."""


class Interleaving:
    """Steps of several subjects in turn. Who begins changes from repetition to repetition."""

    def __init__(
        self, subjects: Sequence[Subject], clock: Clock, on_step: Callable[[], None]
    ) -> None:
        self._subjects = subjects
        self._clock = clock
        self._on_step = on_step
        self._turn = 0

    def warm_up(self, steps: int) -> None:
        """Run `steps` repetitions exactly as they will be timed, and forget the times."""
        for _ in range(steps):
            self._repetition()

    def measure(self, rounds: int, repetitions: int) -> list[list[list[Sample]]]:
        """Return, for each subject, `rounds` lists of `repetitions` samples.

        The garbage collector runs between rounds only.
        """
        measured: list[list[list[Sample]]] = [[] for _ in self._subjects]
        for _ in range(rounds):
            gc.collect()
            gc.disable()
            try:
                taken = [self._repetition() for _ in range(repetitions)]
            finally:
                gc.enable()
            for subject, samples in zip(measured, zip(*taken, strict=True), strict=True):
                subject.append(list(samples))
        return measured

    def _repetition(self) -> list[Sample]:
        count = len(self._subjects)
        samples: dict[int, Sample] = {}
        for place in range(count):
            number = (place + self._turn) % count
            subject = self._subjects[number]
            subject.prepare(self._turn)
            samples[number] = self._clock.time(subject.step)
            self._on_step()
        self._turn += 1
        return [samples[number] for number in range(count)]


def _ms(nanoseconds: int) -> float:
    return nanoseconds / 1e6
