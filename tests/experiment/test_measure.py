"""A whole cell: on the CPU for real, and as on a GPU with the GPU's part played by the CPU."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch
from bitsandbytes.cextension import lib
from bitsandbytes.functional import GlobalPageManager

from pageahead.experiment import measure
from pageahead.experiment.cells import CELLS, Cell, Layout
from pageahead.experiment.evidence import LinkRecord
from pageahead.experiment.identity import Identity
from pageahead.experiment.messages import CellRequest
from pageahead.experiment.oversubscribe import OversubscriptionError
from pageahead.experiment.protocol import CpuClock, Protocol

PROTOCOL = Protocol(warmups=2, rounds=2, repetitions=2)


def request(name: str, *strategies: str, device: str = "cpu") -> CellRequest:
    return CellRequest(
        run="now", cell=name, strategies=list(strategies), device=device, protocol=PROTOCOL
    )


@pytest.mark.parametrize("name", ["adamw32/8x1Mi", "lion8/8x1Mi", "adamw8/mixed"])
def test_a_cell_on_the_cpu(name) -> None:
    said: list[tuple[str, int]] = []
    record = measure.measure_cell(
        request(name, "streamed", "lookahead"), lambda phase, steps: said.append((phase, steps))
    )
    assert [one.strategy for one in record.candidates] == ["streamed", "lookahead"]
    for candidate in record.candidates:
        assert candidate.comparison.equal, candidate.comparison.examples
        assert candidate.comparison.tensors >= 2 * record.parameters
        assert candidate.routes[candidate.strategy].state_bytes == record.state_bytes
        assert [len(one) for one in candidate.timings.wall_ms] == [2, 2]
    assert record.state_bytes == CELLS[name].state_bytes("cpu")
    assert record.library.startswith("libbitsandbytes_")
    assert record.device == "cpu"
    assert record.link is None
    assert record.legacy.managed_bytes == record.legacy.freed_bytes == 0
    assert said[-1] == ("comparing bits", 3 * PROTOCOL.steps)


def test_a_planted_difference_is_in_the_record(monkeypatch) -> None:
    make = measure.Arm.candidate.__func__

    class Disturbed(measure.Arm):
        def step(self) -> None:
            super().step()
            parameter = self.optimizer.param_groups[0]["params"][5]
            self.optimizer.state[parameter]["state1"].view(torch.uint8)[77] ^= 4

    monkeypatch.setattr(
        measure.Arm, "candidate", classmethod(lambda cls, *arguments: make(Disturbed, *arguments))
    )
    record = measure.measure_cell(request("lion8/8x1Mi", "streamed"), lambda phase, steps: None)
    comparison = record.candidates[0].comparison
    assert not comparison.equal
    assert any(one.startswith("parameter 5, state1") for one in comparison.examples)


@pytest.fixture
def played_gpu(monkeypatch):
    """A GPU as far as the harness can tell: managed memory is ordinary memory that is counted."""
    pages = GlobalPageManager.get_instance()
    pages.initialize()
    freed: list[int] = []

    def get_paged_buffer(self, parameter, dtype=torch.float32):
        buffer = torch.zeros_like(parameter, dtype=dtype)
        buffer.is_paged = True
        pages.paged_tensors.append(buffer)
        return buffer

    monkeypatch.setattr(
        measure,
        "identify",
        lambda wanted: Identity(torch.device("cpu"), "cuda", "A GPU", "libbitsandbytes_cuda130.so"),
    )
    monkeypatch.setattr(measure, "CudaClock", CpuClock)
    monkeypatch.setattr(
        measure,
        "measure_link",
        lambda device: LinkRecord(to_device=[55.0], to_host=[54.0], duplex=[50.0]),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        bitsandbytes.optim.optimizer.Optimizer8bit, "get_state_buffer", get_paged_buffer
    )
    monkeypatch.setattr(bitsandbytes.functional, "prefetch_tensor", lambda tensor: None)
    monkeypatch.setattr(
        lib, "cudaFree", lambda address: freed.append(address.value) or 0, raising=False
    )
    yield freed
    pages.initialize()


def test_a_cell_on_a_gpu_touches_compares_and_frees(played_gpu, monkeypatch) -> None:
    touched: list[int] = []
    restore = measure.Arm.prepare.__globals__["HostResidency"].restore

    def count(self) -> None:
        touched.append(self.nbytes)
        restore(self)

    monkeypatch.setattr("pageahead.experiment.residency.HostResidency.restore", count)
    record = measure.measure_cell(
        request("lion8/8x1Mi", "streamed", "lookahead", device="cuda"), lambda phase, steps: None
    )
    state_bytes = 8 << 20
    assert record.state_bytes == state_bytes
    assert record.cpu_divisor == 1
    assert all(candidate.comparison.equal for candidate in record.candidates)
    # Legacy and lookahead, before every step but their first.
    assert touched == [state_bytes] * 2 * (PROTOCOL.steps - 1)
    assert record.legacy.managed_bytes == record.legacy.freed_bytes == state_bytes
    assert [one.managed_bytes for one in record.candidates] == [0, state_bytes]
    assert len(set(played_gpu)) == len(played_gpu) == 8
    assert record.link.duplex == [50.0, 50.0]  # before and after


def test_legacys_update_is_timed_on_resident_state_after_everything_else(played_gpu) -> None:
    record = measure.measure_cell(
        request("lion8/8x1Mi", "streamed", device="cuda"), lambda phase, steps: None
    )
    assert [len(one) for one in record.legacy.resident.wall_ms] == [PROTOCOL.repetitions]
    assert record.candidates[0].comparison.equal  # every arm took the further steps


@pytest.fixture
def small_cells(monkeypatch):
    """A cell for each residency, small enough for the CPU to play all of it."""
    layout = Layout("small", ((131_072,), (256, 1024)))
    cells = {
        cell.name: cell
        for cell in (
            Cell(CELLS["lion8/8x1Mi"].optimizer, layout, "extra", residency)
            for residency in ("resident", "oversubscribed")
        )
    }
    monkeypatch.setattr(measure, "cell_named", cells.__getitem__)


def test_a_resident_cell_is_never_touched_and_streamed_keeps_its_state(
    played_gpu, small_cells, monkeypatch
) -> None:
    touched: list[int] = []
    monkeypatch.setattr(
        "pageahead.experiment.residency.HostResidency.restore", lambda self: touched.append(1)
    )
    record = measure.measure_cell(
        request("lion8/small@resident", "streamed", "lookahead", device="cuda"),
        lambda phase, steps: None,
    )
    assert touched == []
    assert record.residency == "resident"
    assert record.legacy.resident is None
    streamed, lookahead = record.candidates
    assert "hbm_budget=1.0" in streamed.paging
    assert streamed.routes["resident"].state_bytes >= record.state_bytes
    assert "streamed" not in streamed.routes
    assert lookahead.routes["lookahead"].state_bytes == record.state_bytes
    assert streamed.comparison.equal
    assert lookahead.comparison.equal


def test_an_oversubscribed_cell_has_half_its_state_of_memory_left(
    played_gpu, small_cells, monkeypatch
) -> None:
    order: list[object] = []
    empty = torch.empty
    monkeypatch.setattr(
        "pageahead.experiment.residency.HostResidency.restore", lambda self: order.append("home")
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000_000, 20_000_000))

    def occupy(size, *arguments, **options):
        if size == 10_000_000 - state_bytes // 2:
            order.append("occupied")
        return empty(size, *arguments, **options)

    state_bytes = 131_072 + 256 * 1024
    monkeypatch.setattr("pageahead.experiment.oversubscribe.torch.empty", occupy)
    record = measure.measure_cell(
        request("lion8/small@oversubscribed", "lookahead", device="cuda"),
        lambda phase, steps: None,
    )
    assert order == ["home", "home", "occupied"]  # both arms', once
    assert record.state_bytes == state_bytes
    assert "allow_oversubscription=True" in record.candidates[0].paging
    assert record.candidates[0].comparison.equal


def test_too_little_memory_to_oversubscribe_is_said(played_gpu, small_cells, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 20_000_000))
    with pytest.raises(OversubscriptionError, match="1,000 bytes of device memory are free"):
        measure.measure_cell(
            request("lion8/small@oversubscribed", "streamed", device="cuda"),
            lambda phase, steps: None,
        )


def test_legacy_that_does_not_page_is_no_legacy(played_gpu, monkeypatch) -> None:
    monkeypatch.setattr(
        bitsandbytes.optim.optimizer.Optimizer8bit,
        "get_state_buffer",
        lambda self, parameter, dtype=torch.float32: torch.zeros_like(parameter, dtype=dtype),
    )
    with pytest.raises(measure.ManagedMemoryError, match="legacy has 0 bytes"):
        measure.measure_cell(
            request("lion8/8x1Mi", "streamed", device="cuda"), lambda phase, steps: None
        )
