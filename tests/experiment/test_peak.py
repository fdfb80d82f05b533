"""Peak memory, with the GPU's part played: what is taken, and who asks."""

from __future__ import annotations

import threading

import pytest
import torch

from pageahead.experiment import peak
from pageahead.experiment.identity import Identity
from pageahead.experiment.messages import PeakRequest
from pageahead.experiment.protocol import Protocol

MIB = 1 << 20


def request(arm: str, device: str = "cuda") -> PeakRequest:
    return PeakRequest(
        run="now",
        cell="lion8/8x1Mi",
        strategies=[arm],
        device=device,
        protocol=Protocol(warmups=3, rounds=1, repetitions=1),
    )


def test_a_watch_sees_what_is_taken_only_for_a_moment() -> None:
    taken, seen = [100], threading.Event()

    def used() -> int:
        if taken[0] == 300:
            seen.set()
        return taken[0]

    with peak.Watch(used, 0.001) as watch:
        taken[0] = 300
        assert seen.wait(10)
        taken[0] = 200
    assert watch.peak == 300
    assert watch.samples >= 3
    assert not any(thread.name == "pageahead-peak" for thread in threading.enumerate())


def test_a_watch_ends_with_an_error_too() -> None:
    with pytest.raises(RuntimeError, match="in between"), peak.Watch(lambda: 1, 0.001):
        raise RuntimeError("in between")
    assert not any(thread.name == "pageahead-peak" for thread in threading.enumerate())


def test_on_the_cpu_there_is_none() -> None:
    with pytest.raises(peak.PeakError, match=r"of one arm on a GPU, not of \['streamed'\] on cpu"):
        peak.measure_peak(request("streamed", "cpu"), lambda phase, steps: None)


class Batches:
    """A driver that takes memory for managed pages in batches, and never uses a page again."""

    def __init__(self, batch: int, left: int) -> None:
        self.batch, self.left = batch, left
        self.taken = 500 * MIB + left

    def take(self, nbytes: int) -> object:
        if self.left < nbytes:
            self.left += self.batch
            self.taken += self.batch
        self.left -= nbytes
        return object()


LEFT = [0, 2 * MIB, 40 * MIB, 126 * MIB]


@pytest.fixture(params=LEFT)
def played_gpu(monkeypatch, request):
    """An arm takes 80 MiB for a moment, 50 MiB then; legacy 16 MiB of managed memory as well."""
    driver = Batches(128 * MIB, request.param)
    own = [0]
    monkeypatch.setattr(peak.managed, "allocate", lambda nbytes, device, **_: driver.take(nbytes))
    monkeypatch.setattr(peak, "EVERY_SECONDS", 1000)  # whoever looks does so between steps
    cuda = Identity(torch.device("cpu"), "cuda", "A GPU", "libbitsandbytes_cuda130.so")
    monkeypatch.setattr(peak, "identify", lambda wanted: cuda)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 * MIB)
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda device: (9000 * MIB - driver.taken - own[0], 9000 * MIB),
    )
    step = peak.Arm.step

    def stepping(self) -> None:
        step(self)
        if self.name == "legacy" and not own[0]:
            for _ in range(8):
                driver.take(2 * MIB)
        own[0] = 50 * MIB if own[0] else 80 * MIB

    monkeypatch.setattr(peak.Arm, "step", stepping)
    return driver


def test_the_peak_of_a_candidate_and_its_ring(played_gpu) -> None:
    said: list[tuple[str, int]] = []
    record = peak.measure_peak(
        request("streamed"), lambda phase, steps: said.append((phase, steps))
    )
    assert record.driver_peak == record.driver_before + 80 * MIB
    assert (record.taken, record.driver_ready) == (80 * MIB, 0)
    assert (record.torch_peak, record.arm, record.steps) == (7 * MIB, "streamed", 3)
    assert record.staging > 0
    assert record.samples == 5  # at both ends and after each step
    assert said[-1] == ("watching memory", 3)


def test_the_peak_of_legacy_has_no_ring(played_gpu, monkeypatch) -> None:
    freed = []
    monkeypatch.setattr(peak, "free_managed_state", freed.append)
    record = peak.measure_peak(request("legacy"), lambda phase, steps: None)
    # The driver took a whole batch for the 16 MiB.
    assert record.driver_peak == record.driver_before + (128 + 80) * MIB
    assert (record.taken, record.staging) == ((16 + 80) * MIB, 0)
    assert len(freed) == 1


@pytest.mark.parametrize("left", LEFT)
def test_no_batch_of_managed_memory_is_left(left) -> None:
    driver = Batches(128 * MIB, left)
    assert peak.spend_batch(lambda: driver.taken, driver.take) == left
    assert driver.left == 0


def test_a_driver_without_batches_holds_nothing_ready() -> None:
    driver = Batches(2 * MIB, 0)
    assert peak.spend_batch(lambda: driver.taken, driver.take) == 0


def test_a_driver_that_shows_nothing_is_not_asked_for_ever() -> None:
    taken: list[int] = []
    assert peak.spend_batch(lambda: 500 * MIB, taken.append) == 0
    assert sum(taken) == peak.LARGEST_BATCH
