"""An export of Nsight Systems, with the tables and columns that its documentation gives."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Export"]

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT);
CREATE TABLE ENUM_CUPTI_SYNC_TYPE (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER,
    textId INTEGER, domainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL,
    deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER, srcDeviceId INTEGER,
    srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER, migrationCause INTEGER,
    graphNodeId INTEGER, virtualAddress INTEGER, copyCount INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL, bytes INTEGER NOT NULL,
    graphNodeId INTEGER, memKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
    shortName INTEGER NOT NULL, mangledName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, deprecatedSyncType INTEGER,
    syncType INTEGER NOT NULL, eventId INTEGER NOT NULL, eventSyncId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,
    callchainId INTEGER);
CREATE TABLE CUDA_UM_CPU_PAGE_FAULT_EVENTS (
    start INTEGER NOT NULL, globalPid INTEGER NOT NULL, address INTEGER NOT NULL,
    originalFaultPc INTEGER, CpuInstruction INTEGER NOT NULL, module INTEGER NOT NULL,
    unresolvedFaultPc INTEGER, sourceFile INTEGER, sourceLine INTEGER);
CREATE TABLE CUDA_UM_GPU_PAGE_FAULT_EVENTS (
    start INTEGER NOT NULL, end INTEGER NOT NULL, globalPid INTEGER NOT NULL,
    deviceId INTEGER NOT NULL, address INTEGER NOT NULL, numberOfPageFaults INTEGER NOT NULL,
    faultAccessType INTEGER NOT NULL);
"""
#: Not CUPTI's numbers: exports have their own.
SYNCHRONIZATIONS = {
    1: ("CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE", "Event sync"),
    3: ("CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT", "Stream wait event"),
    4: ("CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE", "Stream sync"),
    2: ("CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE", "Context sync"),
}
PUSH_POP = 59  # NVTX_EVENTS.eventType


class Export:
    """A file in the making; `close` it before it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = sqlite3.connect(path)
        self._connection.executescript(SCHEMA)
        self._strings: dict[str, int] = {}
        self._insert("TARGET_INFO_GPU", vmId=1, id=0, name="A GPU")
        for number, (name, label) in SYNCHRONIZATIONS.items():
            self._insert("ENUM_CUPTI_SYNC_TYPE", id=number, name=name, label=label)

    def close(self, *, without: Sequence[str] = ()) -> Path:
        for table in without:
            self._connection.execute(f"DROP TABLE {table}")
        self._connection.commit()
        self._connection.close()
        return self.path

    def mark(self, text: str, start: int, end: int | None, process: int, *, by_id=False) -> None:
        named = {"textId": self._string(text)} if by_id else {"text": text}
        tid = process << 24 | 4711
        self._insert(
            "NVTX_EVENTS", start=start, end=end, eventType=PUSH_POP, globalTid=tid, **named
        )

    def copy(self, start: int, end: int, process: int, kind: int, nbytes: int, cause=None) -> None:
        self._device(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            start,
            end,
            process,
            bytes=nbytes,
            copyKind=kind,
            migrationCause=cause,
        )

    def kernel(self, start: int, end: int, process: int, name: str) -> None:
        self._device(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            start,
            end,
            process,
            demangledName=self._string(f"void {name}<__half, 1>(__half *)"),
            shortName=self._string(name),
        )

    def fill(self, start: int, end: int, process: int, nbytes: int) -> None:
        self._device("CUPTI_ACTIVITY_KIND_MEMSET", start, end, process, value=0, bytes=nbytes)

    def synchronization(self, start: int, end: int, process: int, kind: int) -> None:
        self._device(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", start, end, process, syncType=kind, eventId=0
        )

    def call(self, start: int, end: int, process: int, name: str) -> None:
        self._insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start,
            end=end,
            eventClass=0,
            globalTid=process << 24 | 4711,
            nameId=self._string(name),
            returnValue=0,
        )

    def gpu_faults(self, start: int, end: int, process: int, count: int) -> None:
        self._insert(
            "CUDA_UM_GPU_PAGE_FAULT_EVENTS",
            start=start,
            end=end,
            globalPid=process << 24,
            deviceId=0,
            address=4096,
            numberOfPageFaults=count,
            faultAccessType=1,
        )

    def cpu_fault(self, start: int, process: int) -> None:
        self._insert(
            "CUDA_UM_CPU_PAGE_FAULT_EVENTS",
            start=start,
            globalPid=process << 24,
            address=4096,
            CpuInstruction=self._string("memcpy"),
            module=self._string("libc.so.6"),
        )

    def _device(self, table: str, start: int, end: int, process: int, **fields: object) -> None:
        whose = {"globalPid": process << 24, "deviceId": 0, "contextId": 1, "streamId": 7}
        self._insert(table, start=start, end=end, **whose, **fields)

    def _string(self, value: str) -> int:
        if value not in self._strings:
            self._strings[value] = len(self._strings) + 1
            self._insert("StringIds", id=self._strings[value], value=value)
        return self._strings[value]

    def _insert(self, table: str, **fields: object) -> None:
        names, places = ", ".join(f'"{name}"' for name in fields), ", ".join("?" * len(fields))
        self._connection.execute(
            f"INSERT INTO {table} ({names}) VALUES ({places})", list(fields.values())
        )
