"""Reading what Nsight Systems recorded, as ``nsys export --type sqlite`` writes it.

`measure` names each step in a range of NVTX; these names say which step of which arm is which.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageahead.experiment.arms import MANAGED_STRATEGIES
from pageahead.experiment.cells import Cell, cell_named
from pageahead.experiment.profile.activity import Activity, Direction, short_name
from pageahead.experiment.profile.analysis import within
from pageahead.experiment.profile.collector import ProfileError
from pageahead.experiment.profile.records import ProfiledStep, ProfileRecord

__all__ = ["read", "settling", "stepping"]

STEP = re.compile(r"pageahead (step|settle) \| (.+) \| (.+) \| (\d+)")
NS = 1e6
#: ``copyKind``, which has two more than CUPTI's: migrations by the driver.
COPIES: dict[int, Direction] = {1: "to_device", 2: "to_host"}
MIGRATIONS: dict[int, Direction] = {11: "to_device", 12: "to_host"}
#: Migration causes, as CUPTI numbers them.
CAUSES = {0: "unknown", 1: "user", 2: "coherence", 3: "prefetch", 4: "eviction"}
#: Synchronizations, as CUPTI numbers them; exports number them otherwise, and have a table.
SYNCHRONIZATIONS = {1: "event", 2: "wait", 3: "stream", 4: "device"}
PROCESS_BITS = 24  # a globalTid is a globalPid and the thread in its last 24 bits


def stepping(cell: str, arm: str, turn: int) -> str:
    """The name of the range that a step is in."""
    return f"pageahead step | {cell} | {arm} | {turn}"


def settling(cell: str, arm: str, turn: int) -> str:
    """Of the range between a step's return and an idle device."""
    return f"pageahead settle | {cell} | {arm} | {turn}"


def read(path: Path, run: str) -> list[ProfileRecord]:
    """The arms in an export, in the order in which they ran.

    Times are of the recorder's clock alone, wall times too: they are those of the ranges.

    Args:
        path: an SQLite file.
        run: what the records are to be of.

    Raises:
        ProfileError: it is no such file, or there is no step in it, or one of an unknown cell.
    """
    if not path.is_file():
        raise ProfileError(f"{path.name}: no such file")
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            return _records(_Export(connection), run)
        finally:
            connection.close()
    except (sqlite3.Error, ValueError) as error:
        raise ProfileError(
            f"{path.name} is not readable as an export of Nsight Systems: {error}. Make one with "
            f"`nsys export --type sqlite`."
        ) from error


@dataclass
class _Marks:
    """One step, as its ranges say."""

    turn: int
    process: int
    begin: int
    returned: int
    settled: int


class _Export:
    """The tables of an export; each may be missing where nothing of its kind happened."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        connection.row_factory = sqlite3.Row
        self._connection = connection
        self._tables = {
            row["name"]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        self._strings = {row["id"]: row["value"] for row in self.rows("StringIds")}

    def rows(self, table: str) -> Iterator[dict[str, Any]]:
        if table in self._tables:
            for row in self._connection.execute(f'SELECT * FROM "{table}"'):
                yield dict(row)

    def text(self, number: int | None) -> str:
        return str(self._strings.get(number, ""))

    def names(self, table: str) -> dict[int, str]:
        """A table of names, by number."""
        return {int(row["id"]): str(row["name"]) for row in self.rows(table)}


def _records(export: _Export, run: str) -> list[ProfileRecord]:
    arms = _arms(export)
    if not arms:
        raise ProfileError(
            "no step of pageahead is in this export: record with --trace=cuda,nvtx and run "
            "`pageahead profile CELL --mark`"
        )
    activities: dict[int | None, list[Activity]] = defaultdict(list)
    for process, activity in _activities(export):
        activities[process].append(activity)
    name = next((str(row["name"]) for row in export.rows("TARGET_INFO_GPU")), "unknown GPU")
    return [
        _record(run, cell_named(cell), arm, steps, activities, name)
        for (cell, arm), steps in arms.items()
    ]


def _arms(export: _Export) -> dict[tuple[str, str], list[_Marks]]:
    """Steps by cell and arm. Of a step that did not settle there is nothing to be had."""
    found: dict[tuple[str, str], dict[tuple[int, int], _Marks]] = {}
    rows = [row for row in export.rows("NVTX_EVENTS") if row.get("end") is not None]
    for row in sorted(rows, key=lambda row: int(row["start"])):
        match = STEP.fullmatch(row.get("text") or export.text(row.get("textId")))
        if match is None:
            continue
        what, cell, arm, turn = match.group(1), match.group(2), match.group(3), int(match.group(4))
        process = int(row.get("globalTid") or 0) >> PROCESS_BITS
        steps = found.setdefault((cell, arm), {})
        if what == "step":
            end = int(row["end"])
            steps[process, turn] = _Marks(turn, process, int(row["start"]), end, 0)
        elif (process, turn) in steps:
            steps[process, turn].settled = int(row["end"])
    settled = {
        names: [step for step in steps.values() if step.settled] for names, steps in found.items()
    }
    return {names: steps for names, steps in settled.items() if steps}


def _record(
    run: str,
    cell: Cell,
    arm: str,
    steps: list[_Marks],
    activities: dict[int | None, list[Activity]],
    device_name: str,
) -> ProfileRecord:
    return ProfileRecord(
        run=run,
        cell=cell.name,
        arm=arm,
        device="cuda",
        device_name=device_name,
        library="unknown",
        source="nsys",
        residency=cell.residency,
        state_bytes=cell.state_bytes("cuda"),
        managed=cell.optimizer.legacy_pages if arm == "legacy" else arm in MANAGED_STRATEGIES,
        warmups=min(step.turn for step in steps),  # turns are counted from the first warm-up
        steps=[
            ProfiledStep(
                wall_ms=(step.returned - step.begin) / NS,
                returned=step.returned - step.begin,
                settled=step.settled - step.begin,
                activities=within(
                    # Those that say no process are of the only one there is.
                    [*activities[step.process], *activities[None]],
                    step.begin,
                    step.settled,
                ),
            )
            for step in steps
        ],
        untraced_ms=[],
        driver_peak=None,
        torch_peak=None,
    )


def _activities(export: _Export) -> Iterator[tuple[int | None, Activity]]:
    """Everything that happened, with its process; None where the export does not say."""
    for row in export.rows("CUPTI_ACTIVITY_KIND_KERNEL"):
        name = export.text(row.get("shortName")) or short_name(export.text(row["demangledName"]))
        yield _of(row, Activity("kernel", row["start"], row["end"], name, _stream(row)))
    for row in export.rows("CUPTI_ACTIVITY_KIND_MEMCPY"):
        yield _of(row, _copy(row))
    for row in export.rows("CUPTI_ACTIVITY_KIND_MEMSET"):
        fill = Activity("fill", row["start"], row["end"], "", _stream(row), nbytes=row["bytes"])
        yield _of(row, fill)
    types = _synchronizations(export)
    for row in export.rows("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"):
        meant = types.get(row["syncType"])
        if meant == "wait":
            yield _of(row, Activity("wait", row["start"], row["end"], stream=_stream(row)))
        elif meant is not None:
            yield _of(row, Activity("synchronization", row["start"], row["end"], meant))
    for row in export.rows("CUPTI_ACTIVITY_KIND_RUNTIME"):
        name = re.sub(r"(_ptsz)?(_v\d+)?$", "", export.text(row["nameId"]))
        yield _of(row, Activity("call", row["start"], row["end"], name))
    for row in export.rows("CUDA_UM_GPU_PAGE_FAULT_EVENTS"):
        faults = row["numberOfPageFaults"]
        yield _of(row, Activity("fault", row["start"], row["end"], "gpu", faults=faults))
    for row in export.rows("CUDA_UM_CPU_PAGE_FAULT_EVENTS"):
        yield _of(row, Activity("fault", row["start"], row["start"], "cpu", faults=1))


def _of(row: dict[str, Any], activity: Activity) -> tuple[int | None, Activity]:
    whose = row.get("globalPid") or row.get("globalTid")
    return None if whose is None else int(whose) >> PROCESS_BITS, activity


def _copy(row: dict[str, Any]) -> Activity:
    migrated = MIGRATIONS.get(row["copyKind"])
    if migrated is None:
        return Activity(
            "copy",
            row["start"],
            row["end"],
            stream=_stream(row),
            direction=COPIES.get(row["copyKind"], "other"),
            nbytes=row["bytes"],
        )
    cause = CAUSES.get(row.get("migrationCause") or 0, "unknown")
    return Activity(
        "managed", row["start"], row["end"], cause, direction=migrated, nbytes=row["bytes"]
    )


def _synchronizations(export: _Export) -> dict[int, str]:
    """What a ``syncType`` means."""
    named = export.names("ENUM_CUPTI_SYNC_TYPE")
    if not named:
        return SYNCHRONIZATIONS
    words = {
        "STREAM_WAIT": "wait",
        "EVENT_SYNC": "event",
        "STREAM_SYNC": "stream",
        "CONTEXT_SYNC": "device",
    }
    return {
        number: meant
        for number, name in named.items()
        for word, meant in words.items()
        if word in name.upper()
    }


def _stream(row: dict[str, Any]) -> str:
    return str(row.get("streamId", ""))
