"""What counts as free device memory, with the driver's and PyTorch's figures put in by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pageahead.device.cpu import CpuDevice
from pageahead.device.cuda import CudaDevice
from pageahead.device.protocol import Memory


@dataclass
class Figures:
    free: int = 60
    total: int = 100
    fraction: float = 1.0
    reserved: int = 30
    asked: int = 0


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Figures:
    figures = Figures()

    def reserved(device: torch.device) -> int:
        figures.asked += 1
        return figures.reserved

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (figures.free, figures.total))
    monkeypatch.setattr(
        torch.cuda,
        "get_per_process_memory_fraction",
        lambda device: figures.fraction,
        raising=False,
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", reserved)
    return figures


@pytest.fixture
def device() -> CudaDevice:
    made = CudaDevice.__new__(CudaDevice)  # without the driver that its streams need
    made.torch_device = torch.device("cuda", 0)
    made._free = None
    return made


def test_memory_is_what_pytorch_counts(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    stats: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert device.memory() == Memory(0, 0, 0)  # before CUDA is initialized
    stats.update(
        {
            "allocated_bytes.all.current": 30,
            "allocated_bytes.all.peak": 70,
            "reserved_bytes.all.current": 90,
        }
    )
    assert device.memory() == Memory(allocated=30, peak=70, kept=60)


@pytest.mark.parametrize(
    ("free", "fraction", "reserved", "expected"),
    [
        (60, 1.0, 30, 60),  # no cap: what the driver has
        (60, 0.5, 30, 20),  # the cap, of which PyTorch has reserved 30, used or not
        (10, 0.5, 30, 10),  # others left less than the cap allows
        (60, 0.5, 70, 0),  # a cap set too late
    ],
)
def test_both_limits_count(
    device: CudaDevice, figures: Figures, free: int, fraction: float, reserved: int, expected: int
) -> None:
    figures.free, figures.fraction, figures.reserved = free, fraction, reserved
    assert device.free_bytes() == expected


def test_pytorch_is_asked_only_when_something_changed(device: CudaDevice, figures: Figures) -> None:
    figures.fraction = 0.5
    assert [device.free_bytes() for _ in range(3)] == [20] * 3
    assert figures.asked == 1
    figures.free, figures.reserved = 55, 35
    assert device.free_bytes() == 15
    figures.fraction = 0.6
    assert device.free_bytes() == 25
    assert figures.asked == 3


def test_a_pytorch_that_does_not_tell_its_fraction(
    device: CudaDevice, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert device.free_bytes() == 60


def test_cpu_has_what_it_is_told() -> None:
    device = CpuDevice()
    assert device.free_bytes() == 0
    device.free = 5
    assert device.free_bytes() == 5
