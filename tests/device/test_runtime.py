"""Calls into CUDA's runtime, against a library that does on the host what CUDA is asked to do."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from pageahead.device import pinning
from pageahead.device.cuda import CudaDevice
from pageahead.device.runtime import CudaRuntime, shared_runtime

STREAM = 0x7F12_3456_789A_0000
DEFAULT_DIRECTION = 4  # cudaMemcpyDefault


class Function:
    """A foreign function: takes attributes, and exactly the arguments it declares."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self.argtypes: list[type] = []

    def __call__(self, *arguments: int) -> int:
        assert len(arguments) == len(self.argtypes)
        return self._call(*arguments)


class Library:
    """As much of libcudart as is called."""

    def __init__(self) -> None:
        self.status = 0
        self.last_error = 0
        self.streams: list[int] = []
        self.made: list[tuple[int, int]] = []
        self.cudaMemcpyAsync = Function(self._copy)
        self.cudaMemcpy2DAsync = Function(self._copy_rows)
        # A real one: what it writes has the width of a pointer, whatever it is declared with.
        create = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)
        self.cudaStreamCreateWithPriority = create(self._create_stream)
        self.cudaGetLastError = Function(self._get_last_error)

    def _copy(self, to: int, start: int, nbytes: int, kind: int, stream: int) -> int:
        return self._copy_rows(to, nbytes, start, nbytes, nbytes, 1, kind, stream)

    def _copy_rows(
        self,
        to: int,
        to_pitch: int,
        start: int,
        pitch: int,
        width: int,
        height: int,
        kind: int,
        stream: int,
    ) -> int:
        assert kind == DEFAULT_DIRECTION
        assert width <= min(to_pitch, pitch)  # as CUDA insists
        if self.status:
            self.last_error = self.status
            return self.status
        for row in range(height):
            ctypes.memmove(to + row * to_pitch, start + row * pitch, width)
        self.streams.append(stream)
        return 0

    def _create_stream(self, place: int, flags: int, priority: int) -> int:
        if self.status:
            self.last_error = self.status
            return self.status
        ctypes.c_void_p.from_address(place).value = STREAM + len(self.made)
        self.made.append((flags, priority))
        return 0

    def _get_last_error(self) -> int:
        error, self.last_error = self.last_error, 0
        return error


class Stream:
    handle = STREAM


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def device(library: Library) -> CudaDevice:
    """A CUDA device of which only copies work."""
    device = CudaDevice.__new__(CudaDevice)
    device._runtime = CudaRuntime(library)  # type: ignore[arg-type]
    return device


def test_flat_copies(device: CudaDevice, library: Library) -> None:
    source = torch.arange(100, dtype=torch.uint8)
    destination = torch.zeros(120, dtype=torch.uint8)
    device.copy(destination[10:40], source[50:80], stream=Stream())
    assert torch.equal(destination[10:40], source[50:80])
    assert int((destination != 0).sum()) == 30
    assert library.streams == [STREAM]


def test_copies_of_rows(device: CudaDevice, library: Library) -> None:
    source = torch.arange(1, 101, dtype=torch.uint8)
    destination = torch.zeros(120, dtype=torch.uint8)
    rows = source[5:].as_strided((3, 7), (30, 1), 5)
    device.copy(destination.as_strided((3, 7), (10, 1), 2), rows, stream=Stream())
    for row in range(3):
        found = destination[2 + 10 * row : 9 + 10 * row]
        assert torch.equal(found, source[5 + 30 * row : 12 + 30 * row])
    assert int((destination != 0).sum()) == 21
    assert library.streams == [STREAM]


@pytest.mark.parametrize("rows", [False, True])
def test_a_refused_copy_raises_and_leaves_no_error(
    device: CudaDevice, library: Library, rows: bool
) -> None:
    """bitsandbytes would find it after its next kernel, and end the process."""
    library.status = 700
    source = torch.zeros(2, 8, dtype=torch.uint8)
    one, other = (source, source.clone()) if rows else (source[0], source[1])
    with pytest.raises(RuntimeError, match=r"refused to copy (8|16) bytes: error 700"):
        device.copy(one, other, stream=Stream())
    assert library.last_error == 0


def test_streams_are_not_of_pytorchs_pool(
    device: CudaDevice, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[torch.device] = []
    device.torch_device = torch.device("cuda", 1)
    device._streams, device._pool, device._making = {}, [], threading.Lock()
    monkeypatch.setattr(torch.cuda, "device", lambda one: nullcontext(entered.append(one)))
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda handle, on: SimpleNamespace(cuda_stream=handle, on=on)
    )
    fetch, home = device.stream("fetch"), device.stream("write-back")
    assert (fetch.handle, home.handle) == (STREAM, STREAM + 1)
    assert device.stream("fetch") is fetch
    assert fetch.raw.on == device.torch_device  # type: ignore[attr-defined]
    non_blocking, first = 1, -1
    assert library.made == [(non_blocking, first)] * 2
    assert entered == [device.torch_device] * 2


def test_a_refused_stream_raises_and_leaves_no_error(library: Library) -> None:
    library.status = 2
    with pytest.raises(RuntimeError, match=r"refused to make a stream: error 2"):
        CudaRuntime(library).create_stream(-1)  # type: ignore[arg-type]
    assert library.last_error == 0


class PinningRuntime:
    """What ``torch.cuda.cudart()`` gives, answering with one status."""

    def __init__(self, library: Library, status: int) -> None:
        self.library = library
        self.status = status
        self.calls: list[tuple[int, ...]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append((address, nbytes, flags))
        self.library.last_error = self.status
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append((address,))
        self.library.last_error = self.status
        return self.status


@pytest.fixture(params=[0, 2], ids=["granted", "refused"])
def runtime(
    request: pytest.FixtureRequest, library: Library, monkeypatch: pytest.MonkeyPatch
) -> PinningRuntime:
    runtime = PinningRuntime(library, request.param)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinning, "shared_runtime", lambda: CudaRuntime(library))  # type: ignore[arg-type]
    return runtime


@pytest.mark.parametrize(
    ("rates", "says"),
    [((5.04, 25.2), "at 5.0 instead of 25.2 GB/s here"), (None, "several times slower")],
)
def test_page_locking(
    runtime: PinningRuntime,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    rates: tuple[float, float] | None,
    says: str,
) -> None:
    monkeypatch.setattr(pinning, "pageable_and_locked", lambda device: rates)
    gpu = torch.device("cuda", 0)
    if runtime.status == 0:
        assert pinning.pin(4096, 8192, gpu)
    else:
        expected = rf"page-lock 8,192 bytes .*error 2.*{says}.*ulimit -l.*memlock=-1"
        with pytest.warns(RuntimeWarning, match=expected):
            assert not pinning.pin(4096, 8192, gpu)
    assert runtime.calls == [(4096, 8192, 1)]  # portable: for every context of the process
    assert library.last_error == 0


def test_unlocking(runtime: PinningRuntime, library: Library) -> None:
    pinning.unpin(4096)
    assert runtime.calls == [(4096,)]
    assert library.last_error == 0


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch brings a CUDA runtime")
def test_without_a_cuda_runtime_the_error_says_so() -> None:
    shared_runtime.cache_clear()
    with pytest.raises(RuntimeError, match=r"no libcudart .* needs a CUDA build of"):
        shared_runtime()
