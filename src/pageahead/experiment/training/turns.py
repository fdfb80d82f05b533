"""How ways of training take turns: a few iterations of one, then a few of the next.

Not iteration by iteration, as optimizers do in the other presets: what an optimizer leaves to be
done beside the next forward pass (slots filled for the next backward, say) would be done in the
others' time. Within a turn the host waits for the current stream at the end of an iteration, as a
loop that looks at its loss does, and not for the whole device.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import torch

from pageahead.experiment.protocol import Sample
from pageahead.experiment.training.arms import Arm

__all__ = ["Turns"]


class Turns:
    """Iterations of several arms. Who begins changes from round to round."""

    def __init__(
        self, arms: Sequence[Arm], device: torch.device, on_step: Callable[[], None]
    ) -> None:
        self._arms = arms
        self._on_step = on_step
        self._cuda = device.type == "cuda"
        self._round = 0
        self._iteration = 0

    def warm_up(self, iterations: int) -> None:
        """One round as it will be measured; the times are forgotten."""
        self._take(iterations)

    def measure(self, rounds: int, iterations: int) -> list[list[list[Sample]]]:
        """Return, for each arm, `rounds` lists of `iterations` samples.

        The garbage collector runs between rounds only.
        """
        measured: list[list[list[Sample]]] = [[] for _ in self._arms]
        for _ in range(rounds):
            gc.collect()
            gc.disable()
            try:
                for taken, samples in zip(measured, self._take(iterations), strict=True):
                    taken.append(samples)
            finally:
                gc.enable()
        return measured

    def _take(self, iterations: int) -> list[list[Sample]]:
        """One turn of each arm, all over the same batches."""
        count = len(self._arms)
        taken: dict[int, list[Sample]] = {}
        for place in range(count):
            number = (place + self._round) % count
            taken[number] = self._turn(self._arms[number], iterations)
        self._round += 1
        self._iteration += iterations
        return [taken[number] for number in range(count)]

    def _turn(self, arm: Arm, iterations: int) -> list[Sample]:
        """From an idle device to an idle device."""
        self._wait()
        samples = []
        for number in range(iterations):
            arm.prepare(self._iteration + number)
            samples.append(self._timed(arm, last=number == iterations - 1))
            arm.stepped()
            self._on_step()
        return samples

    def _timed(self, arm: Arm, *, last: bool) -> Sample:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._cuda else []
        if events:
            events[0].record()
        begun = time.perf_counter_ns()
        arm.step()
        returned = time.perf_counter_ns()
        between = None
        if events:
            events[1].record()
            events[1].synchronize()
            between = float(events[0].elapsed_time(events[1]))
        settle = 0
        if last:
            self._wait()
            settle = time.perf_counter_ns() - returned
        return Sample((returned - begun) / 1e6, between, settle / 1e6)

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
