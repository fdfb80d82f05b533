"""`cudaMemPrefetchAsync` as CUDA 12 and CUDA 13 declare it, without a GPU."""

from __future__ import annotations

import builtins
import enum
from typing import Any

import pytest

from pageahead.device.prefetch import bindings_major, check, load_runtime, make_prefetch

ADDRESS, NBYTES, DEVICE, STREAM = 0x7F00_0000_0000, 4096, 3, 0x1234


class Status(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1


class LocationType(enum.IntEnum):
    cudaMemLocationTypeDevice = 1
    cudaMemLocationTypeHost = 2


class Location:
    """Like ``cudaMemLocation``: takes its two fields and no others."""

    __slots__ = ("id", "type")


class Runtime12:
    """Takes exactly what cuda-bindings 12 takes."""

    def __init__(self, status: Status = Status.cudaSuccess) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = status

    def cudaMemPrefetchAsync(
        self,
        devPtr: int,
        count: int,
        dstDevice: int,
        stream: int,
        /,
    ) -> tuple[Status]:
        assert all(type(one) is int for one in (devPtr, count, dstDevice, stream))
        self.calls.append((devPtr, count, dstDevice, stream))
        return (self.status,)


class Runtime13:
    """Takes exactly what cuda-bindings 13 takes."""

    cudaMemLocation = Location
    cudaMemLocationType = LocationType

    def __init__(self, status: Status = Status.cudaSuccess) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = status

    def cudaMemPrefetchAsync(
        self,
        devPtr: int,
        count: int,
        location: Location,
        flags: int,
        stream: int,
        /,
    ) -> tuple[Status]:
        assert isinstance(location, Location)
        assert all(type(one) is int for one in (devPtr, count, flags, stream))
        self.calls.append((devPtr, count, location.type, location.id, flags, stream))
        return (self.status,)


def test_cuda_12_takes_an_ordinal() -> None:
    runtime = Runtime12()
    make_prefetch(runtime, 12)(ADDRESS, NBYTES, DEVICE, STREAM)
    assert runtime.calls == [(ADDRESS, NBYTES, DEVICE, STREAM)]


def test_cuda_13_takes_a_location_and_flags() -> None:
    runtime = Runtime13()
    prefetch = make_prefetch(runtime, 13)
    prefetch(ADDRESS, NBYTES, DEVICE, STREAM)
    prefetch(ADDRESS, NBYTES, 0, STREAM)
    prefetch(ADDRESS, NBYTES, DEVICE, STREAM)
    on_device = LocationType.cudaMemLocationTypeDevice
    assert runtime.calls == [
        (ADDRESS, NBYTES, on_device, DEVICE, 0, STREAM),
        (ADDRESS, NBYTES, on_device, 0, 0, STREAM),
        (ADDRESS, NBYTES, on_device, DEVICE, 0, STREAM),
    ]


@pytest.mark.parametrize(("runtime", "major"), [(Runtime12, 13), (Runtime13, 12)])
def test_the_two_are_not_interchangeable(runtime: type, major: int) -> None:
    """So the two tests above tell the signatures apart."""
    with pytest.raises((TypeError, AttributeError)):
        make_prefetch(runtime(), major)(ADDRESS, NBYTES, DEVICE, STREAM)


@pytest.mark.parametrize(("runtime", "major"), [(Runtime12, 12), (Runtime13, 13)])
def test_a_status_other_than_success_raises(runtime: type, major: int) -> None:
    prefetch = make_prefetch(runtime(Status.cudaErrorInvalidValue), major)
    with pytest.raises(RuntimeError, match=r"CUDA refused: cudaErrorInvalidValue \(1\)"):
        prefetch(ADDRESS, NBYTES, DEVICE, STREAM)


def test_the_installed_bindings_take_the_call() -> None:
    """Without a driver they answer with an error status; a wrong signature is a `TypeError`."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    runtime, major = load_runtime()
    assert major in (12, 13)
    prefetch = make_prefetch(runtime, major)
    # An address that no CUDA call allocated is refused wherever this runs.
    with pytest.raises(RuntimeError, match="CUDA refused: cudaError"):
        prefetch(4096, 4096, 0, 0)


def test_check_hands_on_what_a_call_gave() -> None:
    assert check((Status.cudaSuccess,)) is None
    assert check((Status.cudaSuccess, 7)) == 7


@pytest.mark.parametrize(
    ("version", "major"), [("13.0.1", 13), ("12.9.0", 12), ("13.5.0.dev1", 13)]
)
def test_major_version_of_bindings(version: str, major: int) -> None:
    assert bindings_major(version) == major


def test_missing_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'pageahead\[cuda13\]'.*'streamed'"):
        load_runtime()
