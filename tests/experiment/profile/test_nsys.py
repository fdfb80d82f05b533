from __future__ import annotations

import pytest

from pageahead.experiment.profile import nsys
from pageahead.experiment.profile.activity import Activity
from pageahead.experiment.profile.analysis import figures, problems
from pageahead.experiment.profile.collector import ProfileError
from tests.experiment.profile.exported import Export
from tests.experiment.profile.support import MIB, MS, UPDATE, paging_step, streaming_step

LEGACY, STREAMED, OTHER = 1001, 1002, 1003
CELL = "adamw32/8x4Mi"


@pytest.fixture
def export(tmp_path):
    """Two steps of legacy and of streamed, each arm in a process of its own."""
    made = Export(tmp_path / "report.sqlite")
    at = 50 * MS
    for process, arm, one in (
        (LEGACY, "legacy", paging_step()),
        (STREAMED, "streamed", streaming_step()),
    ):
        for turn in (5, 6):
            end = at + one.returned
            made.mark(nsys.stepping(CELL, arm, turn), at, end, process, by_id=turn == 5)
            made.mark(nsys.settling(CELL, arm, turn), end, end + 40, process)
            for activity in one.activities:
                start, stop = at + activity.start, at + activity.end
                if activity.kind == "kernel":
                    made.kernel(start, stop, process, UPDATE)
                elif activity.kind == "synchronization":
                    made.synchronization(start, stop, process, 2)
                elif activity.kind == "managed":
                    made.copy(start, stop, process, 11, activity.nbytes, cause=3)
                else:
                    kind = 1 if activity.direction == "to_device" else 2
                    made.copy(start, stop, process, kind, activity.nbytes)
            # Between steps the CPU brings state home, which is no part of any.
            made.copy(end + 1 * MS, end + 2 * MS, process, 12, 256 * MIB, cause=2)
            at = end + 3 * MS
    return made


def test_the_arms_steps_and_figures_of_an_export(export) -> None:
    legacy, streamed = nsys.read(export.close(), "now")
    assert (legacy.arm, legacy.managed, streamed.arm, streamed.managed) == (
        "legacy",
        True,
        "streamed",
        False,
    )
    for record in (legacy, streamed):
        assert (record.cell, record.source, record.device_name) == (CELL, "nsys", "A GPU")
        assert (record.warmups, len(record.steps), record.run) == (5, 2, "now")
        assert record.state_bytes == 256 * MIB
        assert problems(record) == []
    for record, one in ((legacy, paging_step()), (streamed, streaming_step())):
        for step in record.steps:
            assert figures(step) == figures(one)


def test_every_kind_of_row(tmp_path) -> None:
    made = Export(tmp_path / "report.sqlite")
    made.mark(nsys.stepping(CELL, "lookahead", 3), 1000, 2000, LEGACY)
    made.mark(nsys.settling(CELL, "lookahead", 3), 2000, 2100, LEGACY)
    made.mark("somebody else's", 1000, 2000, LEGACY)
    made.mark("a mark without an end", 1000, None, LEGACY)
    made.fill(1010, 1020, LEGACY, 64)
    made.copy(1020, 1030, LEGACY, 8, 32)
    made.copy(1030, 1040, LEGACY, 12, 16, cause=4)
    made.synchronization(1040, 1050, LEGACY, 1)
    made.synchronization(1050, 1060, LEGACY, 3)
    made.synchronization(1060, 1070, LEGACY, 4)
    made.synchronization(1070, 1080, LEGACY, 99)
    made.call(1080, 1090, LEGACY, "cudaMemPrefetchAsync_v8000")
    made.gpu_faults(1090, 1100, LEGACY, 5)
    made.cpu_fault(1100, LEGACY)
    made.kernel(1110, 1120, OTHER, "of_another_process")
    (record,) = nsys.read(made.close(), "now")
    (step,) = record.steps
    assert step.activities == [
        Activity("fill", 10, 20, "", "7", nbytes=64),
        Activity("copy", 20, 30, "", "7", nbytes=32),
        Activity("managed", 30, 40, "eviction", "", "to_host", 16),
        Activity("synchronization", 40, 50, "event"),
        Activity("wait", 50, 60, "", "7"),
        Activity("synchronization", 60, 70, "stream"),
        Activity("call", 80, 90, "cudaMemPrefetchAsync"),
        Activity("fault", 90, 100, "gpu", faults=5),
        Activity("fault", 100, 100, "cpu", faults=1),
    ]
    assert (step.wall_ms, step.returned, step.settled) == (0.001, 1000, 1100)


def test_tables_are_made_only_for_what_happened(export) -> None:
    absent = [
        "CUPTI_ACTIVITY_KIND_MEMSET",
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "CUDA_UM_CPU_PAGE_FAULT_EVENTS",
        "CUDA_UM_GPU_PAGE_FAULT_EVENTS",
        "TARGET_INFO_GPU",
    ]
    legacy, _ = nsys.read(export.close(without=absent), "now")
    assert legacy.device_name == "unknown GPU"
    assert figures(legacy.steps[0]) == figures(paging_step())


def test_without_a_table_of_synchronizations_they_have_cuptis_numbers(tmp_path) -> None:
    made = Export(tmp_path / "report.sqlite")
    made.mark(nsys.stepping(CELL, "legacy", 0), 1000, 2000, LEGACY)
    made.mark(nsys.settling(CELL, "legacy", 0), 2000, 2100, LEGACY)
    made.synchronization(1040, 1050, LEGACY, 4)
    (record,) = nsys.read(made.close(without=["ENUM_CUPTI_SYNC_TYPE"]), "now")
    assert record.steps[0].activities == [Activity("synchronization", 40, 50, "device")]


def test_a_step_that_was_cut_off_is_left_out(export) -> None:
    export.mark(nsys.stepping(CELL, "streamed", 7), 900 * MS, 901 * MS, STREAMED)
    _, streamed = nsys.read(export.close(), "now")
    assert len(streamed.steps) == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "report.sqlite: no such file"),
        (
            b"no database at all, but long enough to have a header " * 20,
            "nsys export --type sqlite",
        ),
        (b"", "no step of pageahead is in this export.*--mark"),
    ],
)
def test_what_is_no_export_is_refused(content, why, tmp_path) -> None:
    path = tmp_path / "report.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProfileError, match=why):
        nsys.read(path, "now")


def test_an_unknown_cell_is_named(tmp_path) -> None:
    made = Export(tmp_path / "report.sqlite")
    made.mark(nsys.stepping("adamw32/of-another-version", "legacy", 0), 1, 2, LEGACY)
    made.mark(nsys.settling("adamw32/of-another-version", "legacy", 0), 2, 3, LEGACY)
    with pytest.raises(ProfileError, match="no cell is called 'adamw32/of-another-version'"):
        nsys.read(made.close(), "now")
