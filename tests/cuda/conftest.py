"""Tests that need a CUDA GPU; without one they are skipped with that reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and PyTorch sees none")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _free_legacy_managed_memory() -> Iterator[None]:
    """bitsandbytes never frees its managed memory; many tests in one process would pile it up."""
    yield
    if not torch.cuda.is_available():
        return
    import bitsandbytes.functional as functional

    from pageahead.device.prefetch import check, load_runtime

    torch.cuda.synchronize()
    runtime, _ = load_runtime()
    tensors = functional.GlobalPageManager.get_instance().paged_tensors
    for tensor in tensors:
        check(runtime.cudaFree(tensor.data_ptr()))
    tensors.clear()
