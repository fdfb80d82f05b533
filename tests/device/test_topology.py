"""CPUs near a GPU are found in Linux's own files."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pageahead.device.cpu import CpuDevice
from pageahead.device.topology import cpus_near, parse_cpu_list, pci_address
from pageahead.memory.arena import Arena

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,4-5", {0, 1, 4, 5})],
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.fixture
def gpu_at(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.usefixtures("gpu_at")
def test_cpus_near_a_gpu_that_this_process_may_use(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    folder = tmp_path / "0001:3b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text(f"{usable[0]},{max(usable) + 1}\n")
    assert pci_address(GPU) == "0001:3b:00.0"
    assert cpus_near(GPU, tmp_path) == {usable[0]}


@pytest.mark.usefixtures("gpu_at")
def test_nothing_is_known_without_the_file(tmp_path: Path) -> None:
    assert cpus_near(GPU, tmp_path) == frozenset()


def test_nothing_is_known_of_the_cpu_or_from_an_older_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cpus_near(torch.device("cpu")) == frozenset()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert pci_address(GPU) is None
    assert cpus_near(GPU) == frozenset()


def test_pages_are_touched_by_threads_on_those_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, set[int]]] = []
    monkeypatch.setattr(
        os,
        "sched_setaffinity",
        lambda pid, cpus: chosen.append((threading.current_thread().name, set(cpus))),
    )

    class Near(CpuDevice):
        def near_cpus(self) -> frozenset[int]:
            return frozenset({0})

    Arena(Near()).grow(1 << 20)
    assert [cpus for _, cpus in chosen] == [{0}]
    assert chosen[0][0] != threading.current_thread().name  # this thread's own stays as it was


def test_a_refused_affinity_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cpus: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)

    class Near(CpuDevice):
        def near_cpus(self) -> frozenset[int]:
            return frozenset({0})

    arena = Arena(Near())
    start = arena.grow(1 << 20)
    assert not arena.bytes_at(start, 1 << 20).any()
