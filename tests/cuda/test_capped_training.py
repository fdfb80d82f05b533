"""A model trained with ``hbm_budget="auto"`` in just enough memory, against one that has plenty."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

import pageahead
from pageahead import Paging
from pageahead.device import device_for
from pageahead.experiment.training.determinism import repeatable
from pageahead.experiment.training.gpt import GPT, Shape

MIB = 1 << 20
SHAPE = Shape(layers=8, width=2048, vocabulary=4096)
"""420 million parameters: 3.4 GB of AdamW's state in 32 bit."""
RESERVE = 512 * MIB
SEQUENCES = 2
SHORT, LONGER = 1024, 1152
"""Tokens of a sequence. What the second needs more is less than the reserve."""


@dataclass
class Run:
    """One training run, from the same values over the same tokens."""

    model: GPT
    optimizer: pageahead.PagedAdamW32bit
    step: int = 0

    @classmethod
    def new(cls, budget: int | str) -> Run:
        model = GPT(SHAPE, torch.device("cuda", torch.cuda.current_device()), 0)
        paging = Paging(hbm_budget=budget, hbm_reserve=RESERVE, staging=64 * MIB)
        optimizer = pageahead.PagedAdamW32bit(model.parameters(), lr=1e-4, paging=paging)
        return cls(model, optimizer)

    def backward(self, length: int) -> None:
        generator = torch.Generator().manual_seed(self.step)
        text = torch.randint(SHAPE.vocabulary, (SEQUENCES, length + 1), generator=generator)
        self.optimizer.zero_grad()
        self.model(text.to("cuda")).backward()

    def train(self, steps: int, length: int) -> None:
        for _ in range(steps):
            self.backward(length)
            self.optimizer.step()
            self.step += 1

    def image(self) -> list[torch.Tensor]:
        """Parameters and state, on the host."""
        self.optimizer.synchronize()
        parameters = list(self.model.parameters())
        state = [
            self.optimizer.state[one][key] for one in parameters for key in ("state1", "state2")
        ]
        return [one.detach().cpu().view(-1).view(torch.uint8).clone() for one in parameters + state]


def emptied() -> int:
    """Bytes that this process's tensors keep when everything that can go has gone."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.fixture
def _whole_gpu() -> Iterator[None]:
    """As before, afterwards."""
    emptied()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    emptied()


def fifty(run: Run) -> list[int]:
    """25 steps, one over longer texts, 24: resident bytes after the first and after the last."""
    run.train(25, SHORT)
    first = run.optimizer.residency().resident
    run.train(1, LONGER)
    run.train(24, SHORT)  # the first of these finds that the reserve does not hold
    return [first, run.optimizer.residency().resident]


@pytest.mark.usefixtures("_whole_gpu")
def test_fifty_steps_in_just_enough_memory_and_batches_that_grow() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    with repeatable(device):
        # Parameters, gradients, activations and slots: what training takes that keeps no state.
        streamed = Run.new(0)
        streamed.train(2, SHORT)
        state = streamed.optimizer.residency().host
        needed = torch.cuda.max_memory_reserved()
        peaks = []
        for length in (SHORT, LONGER):
            torch.cuda.reset_peak_memory_stats()
            streamed.train(1, length)
            peaks.append(torch.cuda.max_memory_allocated())
        for_each = (peaks[1] - peaks[0]) // (LONGER - SHORT)
        assert (LONGER - SHORT) * for_each < RESERVE
        del streamed
        emptied()

        cap = needed + RESERVE + state // 10
        torch.cuda.set_per_process_memory_fraction(cap / total)
        capped = Run.new("auto")
        resident = fifty(capped)
        print(f"state {state:,}, needed {needed:,}, cap {cap:,}, resident {resident}")
        assert 0 < resident[1] < resident[0] < state // 4

        longest = SHORT + (device_for(device).free_bytes() + resident[1] // 2) // for_each
        print(f"longest {longest}, of which each takes {for_each:,} bytes")
        with pytest.raises(torch.OutOfMemoryError):
            capped.backward(longest)
        capped.optimizer.zero_grad()
        assert capped.optimizer.release(resident[1]) >= resident[1]
        capped.train(1, longest)
        found = capped.image()
        del capped
        torch.cuda.set_per_process_memory_fraction(1.0)
        emptied()

        free = Run.new("auto")
        fifty(free)
        free.train(1, longest)
        assert free.optimizer.residency().host == 0
        expected = free.image()
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
