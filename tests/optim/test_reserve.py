"""The reserve that nobody set, with PyTorch's figures put in by hand."""

from __future__ import annotations

import gc

import pytest
import torch

from pageahead.device.protocol import Memory
from pageahead.optim import reserve
from pageahead.optim.reserve import Reserve
from pageahead.optim.wave import placeholder
from tests.support import CPU, cpu_device

LEAST = 100
GRADIENTS = 40
"""Bytes of the parameters' gradients."""


class Played:
    def __init__(self) -> None:
        self.now = Memory(0, 0, 0)
        self.asked = 0

    def memory(self) -> Memory:
        self.asked += 1
        return self.now


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr(cpu_device(), "memory", played.memory)
    monkeypatch.setattr(reserve, "LEAST", LEAST)
    gc.collect()  # reserves of other tests' optimizers
    return played


def parameters() -> list[torch.Tensor]:
    one = torch.nn.Parameter(torch.zeros(10))
    other = torch.nn.Parameter(torch.zeros(5))
    one.grad = torch.zeros(10)
    return [one, one, other]  # listed twice, it has one gradient all the same


def learned(
    played: Played, *, before: int, began: int, peak: int, allocated: int, kept: int = 0
) -> Reserve:
    """A first backward as seen by a reserve of its own."""
    found = Reserve(None)
    played.now = Memory(0, before, 0)
    found.watch(parameters())
    played.now = Memory(began, max(before, began), 0)
    found.backward_began(CPU)
    played.now = Memory(1, 1, 1)
    found.backward_began(CPU)  # of later gradients: not asked for
    played.now = Memory(allocated, peak, kept)
    found.learn(parameters())
    return found


@pytest.mark.parametrize(
    ("before", "began", "peak", "activations"),
    [
        (0, 900, 1000, 500),  # the loss takes more than there is at the first gradient
        (5000, 900, 5000, 400),  # loading took more: what there was at the first gradient
        (5000, 900, 950, 450),  # somebody reset PyTorch's count between forward and step
        (5000, 900, 700, 400),  # or after the first gradient
        (5000, 0, 600, LEAST),  # a peak next to nothing
        (0, 0, 0, LEAST),
    ],
)
def test_activations_are_what_is_gone_at_the_step(
    played: Played, before: int, began: int, peak: int, activations: int
) -> None:
    """500 bytes stay beside the gradients, which come after the peak and go before the next."""
    found = learned(played, before=before, began=began, peak=peak, allocated=500 + GRADIENTS)
    assert found.of(CPU, 10**6) == activations


def test_gradients_that_were_freed_take_nothing(played: Played) -> None:
    found = Reserve(None)
    found.watch(parameters())
    listed = parameters()
    listed[0].grad = placeholder(listed[0])
    played.now = Memory(500, 1000, 0)
    found.learn(listed)
    assert found.of(CPU, 10**6) == 500


def test_before_a_backward_it_is_the_least(played: Played) -> None:
    played.now = Memory(0, 10**6, 0)
    found = Reserve(None)
    found.watch(parameters())
    assert found.of(CPU, 10**6) == LEAST


def test_what_pytorch_keeps_of_a_longer_batch_need_not_be_free_as_well(played: Played) -> None:
    found = learned(played, before=0, began=0, peak=1500, allocated=500, kept=1100)
    reserve_then = 1000 + GRADIENTS
    assert found.of(CPU, 9000) == reserve_then
    played.now = Memory(500, 1900, 1500)
    assert found.of(CPU, 8600) == reserve_then - 400
    played.now = Memory(500, 4000, 3600)
    assert found.of(CPU, 6500) == LEAST
    played.now = Memory(500, 4000, 1000)  # somebody emptied the cache
    assert found.of(CPU, 9100) == reserve_then


def test_pytorch_is_asked_only_when_what_is_free_has_changed(played: Played) -> None:
    found = learned(played, before=0, began=0, peak=1500, allocated=500)
    asked = played.asked
    assert [found.of(CPU, 9000) for _ in range(3)] == [1000 + GRADIENTS] * 3
    assert played.asked == asked + 1


def test_optimizers_of_one_device_leave_the_same_room(played: Played) -> None:
    """The second steps when the first has made its state: to it, activations look smaller."""
    first = learned(played, before=0, began=0, peak=1500, allocated=500)
    second = learned(played, before=0, began=0, peak=1500, allocated=1400)
    assert first.of(CPU, 9000) == second.of(CPU, 9000) == 1000 + GRADIENTS
    del first
    gc.collect()
    assert second.of(CPU, 8000) == 100 + GRADIENTS


def test_a_reserve_that_is_set_asks_nobody(played: Played) -> None:
    found = Reserve(7)
    found.watch(parameters())
    found.backward_began(CPU)
    found.learn(parameters())
    assert found.of(CPU, 9000) == 7
    assert played.asked == 0


def test_parameters_of_another_kind_of_device_can_wait_for_their_refusal(played: Played) -> None:
    meta = torch.nn.Parameter(torch.zeros(10, device="meta"))
    found = Reserve(None)
    found.watch([meta])
    found.backward_began(meta.device)
    found.learn([meta])
    assert found.of(meta.device, 9000) == LEAST
