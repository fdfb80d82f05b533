"""What is made of CUPTI's records: with the module's part played, and with its own classes."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch

from pageahead.experiment.profile import cupti
from pageahead.experiment.profile.activity import Activity
from pageahead.experiment.profile.collector import ProfileError

DEVICE = torch.device("cpu")


class Kinds(IntEnum):
    MEMCPY, MEMSET, KERNEL, RUNTIME, DEVICE = 1, 2, 3, 5, 8
    CONCURRENT_KERNEL, UNIFIED_MEMORY_COUNTER, SYNCHRONIZATION = 10, 25, 38


class Counters(IntEnum):
    BYTES_TRANSFER_HTOD, BYTES_TRANSFER_DTOH, CPU_PAGE_FAULT_COUNT, GPU_PAGE_FAULT = 1, 2, 3, 4
    THRASHING = 5


class Synchronizations(IntEnum):
    UNKNOWN, EVENT_SYNCHRONIZE, STREAM_WAIT_EVENT, STREAM_SYNCHRONIZE, CONTEXT_SYNCHRONIZE = range(
        5
    )


class Copies(IntEnum):
    HTOD, DTOH, DTOD = 1, 2, 8


class Causes(IntEnum):
    UNKNOWN, USER, COHERENCE, PREFETCH = range(4)


class Cupti:
    """The part of ``cupti.cupti`` that is used. What it was told is in `done`, in order."""

    ActivityKind = Kinds
    ActivityUnifiedMemoryCounterKind = Counters
    ActivitySynchronizationType = Synchronizations
    ActivityMemcpyKind = Copies
    ActivityUnifiedMemoryMigrationCause = Causes
    CallbackDomain = SimpleNamespace(RUNTIME_API=2)

    def __init__(self, refuse: str = "") -> None:
        self.done: list[object] = []
        self.pending: list[SimpleNamespace] = []
        self._refuse = refuse

    def activity_register_callbacks(self, requested, completed) -> None:
        self.requested, self.completed = requested, completed
        self.done.append("callbacks")

    def activity_configure_unified_memory_counter(self, address: int, count: int) -> None:
        if self._refuse:
            raise RuntimeError(self._refuse)
        numbers = (ctypes.c_uint32 * (4 * count)).from_address(address)
        self.done.append([tuple(numbers[4 * one : 4 * one + 4]) for one in range(count)])

    def activity_enable(self, kind: Kinds) -> None:
        self.done.append(f"+{kind.name}")

    def activity_disable(self, kind: Kinds) -> None:
        self.done.append(f"-{kind.name}")

    def activity_flush_all(self, flag: int) -> None:
        assert flag == 1
        records, self.pending = self.pending, []
        self.completed(records)

    def get_callback_name(self, domain: int, number: int) -> str:
        assert domain == 2
        return {7: "cudaMemPrefetchAsync_v8000", 8: "cudaLaunchKernel_ptsz_v7000"}[number]

    def get_timestamp(self) -> int:
        return 12345


@pytest.fixture(autouse=True)
def _played_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def collector(module: Cupti, managed: bool = True) -> cupti.CuptiCollector:
    return cupti.CuptiCollector(DEVICE, managed=managed, cupti=module)


def test_counters_are_configured_before_they_are_enabled_one_record_each() -> None:
    module = Cupti()
    collector(module)
    configured, enabled = module.done[1], module.done[2:]
    assert configured == [(1, 1, 0, 1), (1, 2, 0, 1), (1, 4, 0, 1), (1, 3, 0, 1)]
    assert enabled[-1] == "+UNIFIED_MEMORY_COUNTER"
    assert module.requested() == (8 << 20, 0)


def test_without_managed_memory_its_counters_are_left_alone() -> None:
    module = Cupti(refuse="not here")
    one = collector(module, managed=False)
    assert one.now() == 12345
    one.close()
    one.close()
    kinds = ["CONCURRENT_KERNEL", "MEMCPY", "MEMSET", "SYNCHRONIZATION", "RUNTIME"]
    assert module.done == ["callbacks", *(f"+{kind}" for kind in kinds), *(f"-{k}" for k in kinds)]


@pytest.mark.parametrize(
    ("refusal", "advice"),
    [
        ("UM_PROFILING_NOT_SUPPORTED_ON_NON_P2P_DEVICES", "CUDA_VISIBLE_DEVICES=0"),
        ("UM_PROFILING_NOT_SUPPORTED", "does not report migrations"),
        ("MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED", "Another profiler"),
        ("something else", "as new as cupti-python"),
    ],
)
def test_a_refusal_says_what_to_do(refusal, advice) -> None:
    with pytest.raises(ProfileError, match=f"{refusal}.*{advice}"):
        collector(Cupti(refuse=refusal))


def record(kind: Kinds, **fields: object) -> SimpleNamespace:
    return SimpleNamespace(kind=int(kind), **fields)


def counter(kind: Counters, value: int, flags: int = 3) -> SimpleNamespace:
    return record(
        Kinds.UNIFIED_MEMORY_COUNTER,
        counter_kind=int(kind),
        value=value,
        start=5,
        end=9,
        flags_=flags,
    )


RECORDS = [
    (
        record(
            Kinds.CONCURRENT_KERNEL, start=5, end=9, name="_Z21kOptimizer32bit2StateI", stream_id=7
        ),
        Activity("kernel", 5, 9, "kOptimizer32bit2State", "7"),
    ),
    (
        record(Kinds.MEMCPY, start=5, end=9, copy_kind=1, bytes=64, stream_id=13),
        Activity("copy", 5, 9, "", "13", "to_device", 64),
    ),
    (
        record(Kinds.MEMCPY, start=5, end=9, copy_kind=2, bytes=64, stream_id=14),
        Activity("copy", 5, 9, "", "14", "to_host", 64),
    ),
    (
        record(Kinds.MEMCPY, start=5, end=9, copy_kind=8, bytes=64, stream_id=7),
        Activity("copy", 5, 9, "", "7", "other", 64),
    ),
    (
        record(Kinds.MEMSET, start=5, end=9, bytes=64, stream_id=7),
        Activity("fill", 5, 9, "", "7", "other", 64),
    ),
    (
        record(Kinds.SYNCHRONIZATION, start=5, end=9, type=4, stream_id=0),
        Activity("synchronization", 5, 9, "device"),
    ),
    (
        record(Kinds.SYNCHRONIZATION, start=5, end=9, type=1, stream_id=0),
        Activity("synchronization", 5, 9, "event"),
    ),
    (
        record(Kinds.SYNCHRONIZATION, start=5, end=9, type=3, stream_id=0),
        Activity("synchronization", 5, 9, "stream"),
    ),
    (
        record(Kinds.SYNCHRONIZATION, start=5, end=9, type=2, stream_id=14),
        Activity("wait", 5, 9, "", "14"),
    ),
    (record(Kinds.SYNCHRONIZATION, start=5, end=9, type=0, stream_id=14), None),
    (
        record(Kinds.RUNTIME, start=5, end=9, cbid=7),
        Activity("call", 5, 9, "cudaMemPrefetchAsync"),
    ),
    (record(Kinds.RUNTIME, start=5, end=9, cbid=8), Activity("call", 5, 9, "cudaLaunchKernel")),
    (
        counter(Counters.BYTES_TRANSFER_HTOD, 4096),
        Activity("managed", 5, 9, "prefetch", "", "to_device", 4096),
    ),
    (
        counter(Counters.BYTES_TRANSFER_DTOH, 4096, flags=99),
        Activity("managed", 5, 9, "unknown", "", "to_host", 4096),
    ),
    (counter(Counters.GPU_PAGE_FAULT, 3), Activity("fault", 5, 9, "gpu", faults=3)),
    # Its value is a program counter, its end undefined.
    (counter(Counters.CPU_PAGE_FAULT_COUNT, 0xFFFF), Activity("fault", 5, 5, "cpu", faults=1)),
    (counter(Counters.THRASHING, 4096), None),
    (record(Kinds.DEVICE, start=0), None),
]


@pytest.mark.parametrize(("given", "expected"), RECORDS)
def test_records(given, expected) -> None:
    module = Cupti()
    one = collector(module)
    module.pending = [given]
    assert one.take() == ([] if expected is None else [expected])
    assert one.take() == []  # each is taken once


def test_a_record_that_is_not_understood_is_told_and_raises_nothing_into_cupti() -> None:
    module = Cupti()
    one = collector(module)
    module.completed([record(Kinds.MEMCPY, start=1)])
    with pytest.raises(ProfileError, match=r"not understood.*'end'"):
        one.take()


def test_without_cupti_python_the_error_says_what_to_install(monkeypatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(cupti.importlib, "import_module", missing)
    with pytest.raises(
        ProfileError, match=r"pip install 'pageahead\[profile\]'.*--nsys.*No module"
    ):
        cupti.load()


# --- the real module, where it is installed: it needs no GPU for its records ------------------

NEWEST = {
    "activity_kernel": ("CONCURRENT_KERNEL", {"name", "stream_id"}),
    "activity_memcpy": ("MEMCPY", {"copy_kind", "bytes", "stream_id"}),
    "activity_memset": ("MEMSET", {"bytes", "stream_id"}),
    "activity_synchronization": ("SYNCHRONIZATION", {"type", "stream_id"}),
    "activity_unified_memory_counter": (
        "UNIFIED_MEMORY_COUNTER",
        {"counter_kind", "value", "flags_"},
    ),
    "activity_api": ("RUNTIME", {"cbid"}),
}


def test_the_real_module_has_the_names_that_are_used() -> None:
    real = pytest.importorskip("cupti.cupti")
    for name in (*cupti.KINDS, cupti.MANAGED):
        assert int(getattr(real.ActivityKind, name)) == int(getattr(Kinds, name))
    for name in cupti.COUNTERS:
        theirs = getattr(real.ActivityUnifiedMemoryCounterKind, name)
        assert int(theirs) == int(getattr(Counters, name))
    for name in (*cupti.SYNCHRONIZATIONS, "STREAM_WAIT_EVENT"):
        theirs = getattr(real.ActivitySynchronizationType, name)
        assert int(theirs) == int(getattr(Synchronizations, name))
    for name in ("HTOD", "DTOH"):
        assert int(getattr(real.ActivityMemcpyKind, name)) == int(getattr(Copies, name))
    assert real.ActivityUnifiedMemoryMigrationCause(3).name == "PREFETCH"
    for name in (
        "activity_register_callbacks",
        "activity_configure_unified_memory_counter",
        "activity_enable",
        "activity_disable",
        "activity_flush_all",
        "get_callback_name",
        "get_timestamp",
    ):
        assert callable(getattr(real, name))
    assert hasattr(real.CallbackDomain, "RUNTIME_API")


@pytest.mark.parametrize("prefix", NEWEST)
def test_the_real_records_have_the_fields_that_are_used(prefix) -> None:
    real = pytest.importorskip("cupti.cupti")
    numbers = [""] + [str(number) for number in range(20)]
    dtypes = [name for number in numbers if hasattr(real, name := f"{prefix}{number}_dtype")]
    assert dtypes
    for name in dtypes:
        fields = set(getattr(real, name).names)
        wanted = {"kind", "start", "end"} | NEWEST[prefix][1]
        assert wanted <= fields | {"name"}, name
