"""Host memory of streamed state: where it is, who keeps it, and when it goes."""

from __future__ import annotations

import gc
import io
import mmap
import os
import threading
import weakref
from collections.abc import Iterator

import psutil
import pytest
import torch

from pageahead.device.cpu import CpuDevice
from pageahead.memory import host
from pageahead.memory.arena import Arena
from tests.support import MIB

PAGE = mmap.PAGESIZE


class PinningDevice(CpuDevice):
    """Notes what is page-locked, and refuses if told to."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.pinned: dict[int, int] = {}
        self.calls: list[str] = []
        self.refuses = refuses

    def pin(self, address: int, nbytes: int) -> bool:
        self.calls.append("pin")
        if not self.refuses:
            self.pinned[address] = nbytes
        return not self.refuses

    def unpin(self, address: int) -> None:
        self.calls.append("unpin")
        del self.pinned[address]

    def drain(self) -> None:
        self.calls.append("drain")
        super().drain()


@pytest.fixture
def device() -> PinningDevice:
    return PinningDevice()


@pytest.fixture
def arena(device: PinningDevice) -> Arena:
    return Arena(device)


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What goes has to go without the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_segments_do_not_touch(arena: Arena) -> None:
    """A copy of adjacent bytes would otherwise run from one into the other."""
    sizes = [1000, PAGE, 3 * PAGE + 1, 7]
    bases = [arena.grow(nbytes) for nbytes in sizes]
    assert bases[0] == 0
    for base, nbytes, following in zip(bases, sizes, bases[1:], strict=False):
        assert following > base + nbytes
        assert following % PAGE == 0
    assert arena.nbytes == sum(sizes)


def test_each_segment_is_found_by_offset(arena: Arena) -> None:
    bases = [arena.grow(1024) for _ in range(3)]
    for number, base in enumerate(bases):
        arena.bytes_at(base, 1024).fill_(number + 1)
    for number, base in enumerate(bases):
        assert torch.all(arena.tensor_at(base + 256, (768,), torch.uint8) == number + 1)
        assert torch.all(arena.bytes_at(base + 1000, 24) == number + 1)


def test_tensors_are_views_of_the_arena(arena: Arena) -> None:
    base = arena.grow(4096)
    tensor = arena.tensor_at(base + 256, (2, 8), torch.float32)
    assert tensor.shape == (2, 8)
    assert not tensor.any()  # zeroed
    tensor.fill_(1.0)
    assert torch.all(arena.bytes_at(base + 256, 64).view(torch.float32) == 1.0)
    assert not arena.bytes_at(base, 256).any()
    assert not arena.bytes_at(base + 320, 4096 - 320).any()


def test_a_tensor_without_elements(arena: Arena) -> None:
    base = arena.grow(256)
    assert arena.tensor_at(base, (0, 3), torch.float32).shape == (0, 3)


def test_saving_a_tensor_saves_it_alone(arena: Arena) -> None:
    base = arena.grow(4 * MIB)
    tensor = arena.tensor_at(base + MIB, (1000,), torch.float32)
    assert tensor.untyped_storage().nbytes() == 4000
    file = io.BytesIO()
    torch.save(tensor, file)
    assert 4000 < file.tell() < 8000


def test_tensors_carry_no_attributes_of_ours(arena: Arena) -> None:
    """They would come along in a checkpoint and end stock bitsandbytes when it resumes."""
    tensor = arena.tensor_at(arena.grow(256), (64,), torch.float32)
    assert vars(tensor) == {}


@pytest.mark.usefixtures("no_gc")
def test_memory_is_unlocked_after_the_last_copy_and_returned(device: PinningDevice) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    arena = Arena(device)
    size = 128 * MIB
    tensor = arena.tensor_at(arena.grow(size), (64,), torch.float32)
    held = process.memory_info().rss
    assert held - before > 0.9 * size  # touched
    pages = weakref.ref(arena._pages[0])
    del arena
    assert pages() is not None  # the tensor is still there
    tensor.fill_(1.0)
    device.calls.clear()
    del tensor
    assert pages() is None
    assert device.calls == ["drain", "unpin"]
    assert device.pinned == {}
    assert held - process.memory_info().rss > 0.9 * size


@pytest.mark.usefixtures("no_gc")
def test_the_last_tensor_may_die_in_a_worker(device: PinningDevice) -> None:
    """As when an optimizer is deleted while its last write-back is on its way."""
    arena = Arena(device)
    tensor = arena.tensor_at(arena.grow(4096), (64,), torch.float32)
    stream = device.stream("write_back")
    started = threading.Event()
    stream.launch(lambda: started.wait(10))
    device.copy(tensor, torch.ones(64), stream=stream)
    done = stream.record()
    del arena, tensor
    started.set()
    waiter = threading.Thread(target=done.synchronize, daemon=True)
    waiter.start()
    waiter.join(10)
    assert not waiter.is_alive()
    assert device.pinned == {}


def test_refused_page_locking_is_remembered_and_not_undone() -> None:
    device = PinningDevice(refuses=True)
    arena = Arena(device)
    arena.grow(4096)
    assert not arena.pinned
    arena.bytes_at(0, 4096).fill_(1)
    del arena
    gc.collect()
    assert "unpin" not in device.calls


def test_pinned_until_refused(arena: Arena) -> None:
    arena.grow(4096)
    assert arena.pinned


def test_drop_last_takes_back_one_segment(arena: Arena) -> None:
    first = arena.grow(1000)
    pages = weakref.ref(arena._pages[0])
    second = arena.grow(2000)
    arena.drop_last()
    assert arena.nbytes == 1000
    assert pages() is not None
    assert arena.grow(3000) == second
    assert arena.bytes_at(first, 1000).numel() == 1000


def test_nothing_is_allocated_when_memory_is_short(
    arena: Arena, device: PinningDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.grow(1000)
    monkeypatch.setattr(host, "available_bytes", lambda: 4095)
    with pytest.raises(host.HostMemoryError, match="needs 4,096 bytes"):
        arena.grow(4096)
    assert arena.nbytes == 1000
    assert device.calls == ["pin"]
    arena.grow(4095)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="no /proc/self/smaps")
def test_pages_are_not_given_to_a_forked_child(arena: Arena) -> None:
    arena.grow(4096)
    address = arena.bytes_at(0, 1).data_ptr()
    assert "dc" in vm_flags(address)  # MADV_DONTFORK: "do not copy area on fork"


def vm_flags(address: int) -> list[str]:
    """Kernel's flags of the mapping at `address`, as ``/proc/self/smaps`` abbreviates them."""
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if "-" in first and not first.endswith(":"):
                start, stop = (int(bound, 16) for bound in first.split("-"))
                inside = start <= address < stop
            elif inside and first == "VmFlags:":
                return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_a_forked_child_leaves_memory_and_locks_alone(arena: Arena, device: PinningDevice) -> None:
    arena.grow(4096)
    pid = os.fork()
    if pid == 0:
        device.calls.clear()
        arena.drop_last()  # as when the child's copy of the optimizer is collected
        os._exit(len(device.calls))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.all(arena.bytes_at(0, 4096) == 0)


def test_large_segments_are_touched_whole(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pageahead.memory.arena._TOUCH_BYTES", PAGE)
    process = psutil.Process()
    before = process.memory_info().rss
    arena.grow(32 * MIB + 5)
    assert process.memory_info().rss - before > 28 * MIB
