"""Managed memory is freed by the collector, whenever that comes."""

from __future__ import annotations

import threading

import torch

from pageahead.device import managed


def test_the_collector_may_free_while_the_same_thread_allocates(monkeypatch) -> None:
    """An optimizer that is part of a cycle goes in the middle of another's allocation."""
    gpu = torch.device("cuda", 0)
    freed: list[int] = []

    class Runtime:
        def cudaFree(self, address: int) -> tuple[int]:
            freed.append(address)
            return (0,)

    monkeypatch.setattr(managed, "_runtime", lambda: (Runtime(), None))
    monkeypatch.setattr(managed, "check", lambda result: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setitem(managed._allocated, gpu, 10)

    def collect() -> None:
        with managed._lock:
            managed._free(7, 4, gpu, managed.os.getpid())

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(5.0)
    assert freed == [7]
    assert managed.allocated_bytes(gpu) == 6
