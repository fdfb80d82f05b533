"""CUPTI's activity records, through cupti-python.

Migrations and faults of managed memory are reported for memory that is allocated after their
counters were configured and enabled, so a collector has to be made before the first managed
allocation of the process.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Iterable
from typing import Any

import torch

from pageahead.experiment.profile.activity import Activity, Direction, short_name
from pageahead.experiment.profile.collector import ProfileError
from pageahead.experiment.profile.records import Source

__all__ = ["CuptiCollector", "load"]

#: Names in ``cupti.ActivityKind``, but for the counters of managed memory.
KINDS = ("CONCURRENT_KERNEL", "MEMCPY", "MEMSET", "SYNCHRONIZATION", "RUNTIME")
MANAGED = "UNIFIED_MEMORY_COUNTER"
#: Names in ``cupti.ActivityUnifiedMemoryCounterKind``: one configuration record for each.
COUNTERS = ("BYTES_TRANSFER_HTOD", "BYTES_TRANSFER_DTOH", "GPU_PAGE_FAULT", "CPU_PAGE_FAULT_COUNT")
BUFFER_BYTES = 8 << 20
ALL_RECORDS = 0  # no limit to how many a buffer takes
FORCED = 1  # flush buffers that are not full, too
THIS_PROCESS = 1  # CUPTI_ACTIVITY_UNIFIED_MEMORY_COUNTER_SCOPE_PROCESS_SINGLE_DEVICE
SYNCHRONIZATIONS = {
    "EVENT_SYNCHRONIZE": "event",
    "STREAM_SYNCHRONIZE": "stream",
    "CONTEXT_SYNCHRONIZE": "device",
}
HOW_TO_INSTALL = (
    "profiling on a GPU needs cupti-python, which is not installed: pip install "
    "'pageahead[profile]'. Or let Nsight Systems record: see docs/profile.md, --mark and --nsys."
)


def load() -> Any:
    """Return the module ``cupti.cupti``. Raises `ProfileError` where it is not installed."""
    try:
        return importlib.import_module("cupti.cupti")
    except ImportError as error:
        # Its own message too: it may be there, and built for another Python.
        raise ProfileError(f"{HOW_TO_INSTALL} ({error})") from error


class _Counter(ctypes.Structure):
    """``CUpti_ActivityUnifiedMemoryCounterConfig``; cupti-python has arrays of it since 13.4."""

    _fields_ = (
        ("scope", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("device", ctypes.c_uint32),
        ("enable", ctypes.c_uint32),
    )


class CuptiCollector:
    """Records everything of this process on a GPU. See `collector.Collector`.

    Args:
        device: which GPU.
        managed: whether there will be managed memory, whose counters are then needed.
        cupti: the module.

    Raises:
        ProfileError: CUPTI refused.
    """

    source: Source = "cupti"

    def __init__(self, device: torch.device, *, managed: bool, cupti: Any) -> None:
        self._cupti = cupti
        self._found: list[Activity] = []
        self._failure: Exception | None = None
        self._enabled: list[Any] = []
        self._names: dict[int, str] = {}
        torch.cuda.init()
        torch.zeros(1, device=device)  # counters are configured once the driver is initialized
        try:
            cupti.activity_register_callbacks(_buffer, self._keep)
            if managed:
                self._count_managed(device.index or 0)
            for name in (*KINDS, *([MANAGED] if managed else [])):
                kind = getattr(cupti.ActivityKind, name)
                cupti.activity_enable(kind)
                self._enabled.append(kind)
        except Exception as error:
            self.close()
            raise ProfileError(f"CUPTI refused: {error}. {_advice(error)}") from error

    def now(self) -> int:
        return int(self._cupti.get_timestamp())

    def take(self) -> list[Activity]:
        torch.cuda.synchronize()
        self._cupti.activity_flush_all(FORCED)
        if self._failure is not None:
            raise ProfileError(f"a record of CUPTI was not understood: {self._failure}")
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        for kind in self._enabled:
            self._cupti.activity_disable(kind)
        self._enabled.clear()

    def _count_managed(self, device: int) -> None:
        kinds = self._cupti.ActivityUnifiedMemoryCounterKind
        wanted = [
            _Counter(THIS_PROCESS, int(getattr(kinds, name)), device, enable=1) for name in COUNTERS
        ]
        configuration = (_Counter * len(wanted))(*wanted)
        self._cupti.activity_configure_unified_memory_counter(
            ctypes.addressof(configuration), len(wanted)
        )

    def _keep(self, records: Iterable[Any]) -> None:
        """Called by CUPTI with a full buffer, whose records are gone when this returns."""
        try:
            for record in records:
                activity = self._activity(record)
                if activity is not None:
                    self._found.append(activity)
        except Exception as error:  # an exception must not go back into CUPTI
            self._failure = self._failure or error

    def _activity(self, record: Any) -> Activity | None:
        kinds = self._cupti.ActivityKind
        kind, start = record.kind, record.start
        if kind == kinds.RUNTIME:
            return Activity("call", start, record.end, self._call(record.cbid))
        if kind in (kinds.CONCURRENT_KERNEL, kinds.KERNEL):
            name = short_name(record.name)
            return Activity("kernel", start, record.end, name, str(record.stream_id))
        if kind == kinds.MEMCPY:
            return Activity(
                "copy",
                start,
                record.end,
                stream=str(record.stream_id),
                direction=self._direction(record.copy_kind),
                nbytes=record.bytes,
            )
        if kind == kinds.MEMSET:
            return Activity(
                "fill", start, record.end, stream=str(record.stream_id), nbytes=record.bytes
            )
        if kind == kinds.SYNCHRONIZATION:
            return self._synchronization(record)
        if kind == kinds.UNIFIED_MEMORY_COUNTER:
            return self._counter(record)
        return None

    def _synchronization(self, record: Any) -> Activity | None:
        types = self._cupti.ActivitySynchronizationType
        if record.type == types.STREAM_WAIT_EVENT:
            return Activity("wait", record.start, record.end, stream=str(record.stream_id))
        for name, meant in SYNCHRONIZATIONS.items():
            if record.type == getattr(types, name):
                return Activity("synchronization", record.start, record.end, meant)
        return None

    def _counter(self, record: Any) -> Activity | None:
        kinds = self._cupti.ActivityUnifiedMemoryCounterKind
        which, start = record.counter_kind, record.start
        if which == kinds.GPU_PAGE_FAULT:
            return Activity("fault", start, record.end, "gpu", faults=record.value)
        if which == kinds.CPU_PAGE_FAULT_COUNT:
            # One record for each; the value is where in the program it was, and there is no end.
            return Activity("fault", start, start, "cpu", faults=1)
        directions: dict[Any, Direction] = {
            kinds.BYTES_TRANSFER_HTOD: "to_device",
            kinds.BYTES_TRANSFER_DTOH: "to_host",
        }
        if which not in directions:
            return None
        return Activity(
            "managed",
            start,
            record.end,
            self._cause(record.flags_),
            direction=directions[which],
            nbytes=record.value,
        )

    def _direction(self, copy_kind: int) -> Direction:
        kinds = self._cupti.ActivityMemcpyKind
        if copy_kind == kinds.HTOD:
            return "to_device"
        return "to_host" if copy_kind == kinds.DTOH else "other"

    def _cause(self, flags: int) -> str:
        try:
            return str(self._cupti.ActivityUnifiedMemoryMigrationCause(flags).name).lower()
        except ValueError:
            return "unknown"

    def _call(self, number: int) -> str:
        """``cudaMemPrefetchAsync`` of ``cudaMemPrefetchAsync_v8000``."""
        if number not in self._names:
            domain = self._cupti.CallbackDomain.RUNTIME_API
            name = str(self._cupti.get_callback_name(domain, number))
            self._names[number] = re.sub(r"(_ptsz)?(_v\d+)?$", "", name)
        return self._names[number]


def _buffer() -> tuple[int, int]:
    return BUFFER_BYTES, ALL_RECORDS


def _advice(error: Exception) -> str:
    text = str(error)
    if "P2P" in text:
        return "Show this process one GPU only: CUDA_VISIBLE_DEVICES=0."
    if "UM_PROFILING" in text:
        return "This driver or container does not report migrations of managed memory."
    if "MULTIPLE_SUBSCRIBERS" in text:
        return "Another profiler has it: run without that, or use --mark under Nsight Systems."
    return "Is the driver as new as cupti-python, and no other profiler attached?"
