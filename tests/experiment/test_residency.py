from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from pageahead.experiment import residency
from pageahead.experiment.residency import HostResidency


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_touching_leaves_every_byte_as_it_was(dtype) -> None:
    # More than one region, an odd end, and two moments in one tensor.
    memory = random_bytes(2 * (5 * mmap.PAGESIZE * 1024 + 12))
    tensor = memory.view(dtype).view(2, -1)
    before = memory.clone()
    home = HostResidency([tensor, random_bytes(1)])
    for _ in range(3):
        home.restore()
    assert torch.equal(memory, before)
    assert home.nbytes == memory.nbytes + 1


@pytest.mark.parametrize("misalignment", [0, 1, mmap.PAGESIZE - 1])
@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 1])
def test_every_page_is_written(tmp_path, misalignment, nbytes) -> None:
    """Pages are watched through the kernel: those of a private file mapping that are written are
    copied, and become this process's own."""
    pages = 6
    path = tmp_path / "pages"
    path.write_bytes(bytes(pages * mmap.PAGESIZE))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    memory = np.frombuffer(mapped, dtype=np.uint8)
    region = memory[misalignment : misalignment + nbytes]
    before = private_pages(memory)
    residency._touch(region)
    touched = private_pages(memory) - before
    first, last = misalignment, misalignment + nbytes - 1
    assert touched == last // mmap.PAGESIZE - first // mmap.PAGESIZE + 1


def private_pages(memory) -> int:
    """How many pages of the mapping at `memory` the kernel has given this process for itself."""
    address = memory.ctypes.data
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        for line in lines:
            start = line.split("-", 1)[0]
            if start.isalnum() and start == f"{address:x}":
                for detail in lines:
                    if detail.startswith("Anonymous:"):
                        return int(detail.split()[1]) * 1024 // mmap.PAGESIZE
    raise AssertionError("the mapping is not listed")
