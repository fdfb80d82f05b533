"""What a profile changes in a decision: clause A asks it, in the place of times."""

from __future__ import annotations

import pytest

from pageahead.experiment.cells import CELLS, MATRIX
from pageahead.experiment.evidence import CellRecord, LinkRecord, ProfileRecord
from pageahead.experiment.gate.finding import Finding
from tests.experiment.gate.support import GOOD, failed, finding, judged, missing
from tests.experiment.profile.support import kernel, profile, step, streaming_step

PRIMARY = [cell.name for cell in MATRIX.cells if cell.role == "primary"]
EIGHT = [name for name in PRIMARY if name.startswith("adamw8/")]


def profiled(cell: str, arm: str = "streamed", **changes: object) -> ProfileRecord:
    """Of a cell, with as many bytes as it has."""
    state = CELLS[cell].state_bytes("cuda")
    made = profile(arm, steps=1)
    moved = [
        one._replace(nbytes=-(-state // (128 if arm == "legacy" else 16))) if one.nbytes else one
        for one in made.steps[0].activities
    ]
    steps = [made.steps[0].model_copy(update={"activities": moved})]
    return made.model_copy(update={"cell": cell, "state_bytes": state, "steps": steps, **changes})


def in_turn(cell: str, update_us: int = 0) -> ProfileRecord:
    """A step that fetches everything, updates, and writes everything back; but for `update_us`."""
    one = profiled(cell)
    whole = streaming_step()
    half = whole.returned // 2
    moved = [
        activity._replace(
            start=activity.start // 2 + (half if activity.direction == "to_host" else 0),
            end=activity.end // 2 + (half if activity.direction == "to_host" else 0),
        )
        for activity in one.steps[0].activities
        if activity.kind == "copy"
    ]
    updates = [kernel(1000, 1000 + 1000 * update_us)] if update_us else []
    return one.model_copy(update={"steps": [step([*moved, *updates], whole.returned)]})


def slow_link() -> list[object]:
    """`GOOD`, measured on a link so fast that times prove no overlap."""
    link = LinkRecord(to_device=[500.0], to_host=[500.0], duplex=[500.0])
    return [
        one.model_copy(update={"link": link}) if isinstance(one, CellRecord) else one
        for one in GOOD
    ]


def clause(records: list[object]) -> Finding:
    return finding(judged(records), "A")


def test_times_alone_may_leave_it_open_and_say_which_profiles_are_needed() -> None:
    decision = judged(slow_link())
    assert (decision.verdict, missing(decision)) == ("INCOMPLETE", ["A"])
    assert finding(decision, "A").missing == [
        f"{name}: overlap, which times alone do not show" for name in sorted(PRIMARY, key=_bits)
    ]


def _bits(name: str) -> int:
    return int(name.partition("/")[0].removeprefix("adamw"))


def test_profiles_close_it_and_are_named() -> None:
    records = slow_link()
    for name in PRIMARY:
        records += [profiled(name, "legacy"), profiled(name)]
    decision = judged(records)
    assert decision.verdict == "GO"
    eight, thirty_two = finding(decision, "A").figures
    assert "8-bit: fetches, updates and write-backs overlap for certain in 6 of 6 FASTER" in eight
    assert "(6 by a profile)" in eight
    assert "4.525 of 5.125 ms of a step that cupti traced" in thirty_two
    assert "an update beside a transfer in 0.400, transfers both ways in 4.475" in thirty_two
    assert "(0 device-wide synchronizations, legacy 8)" in thirty_two


def test_profiles_of_some_cells_suffice_if_these_keep_the_gain() -> None:
    found = clause([*slow_link(), *(profiled(name) for name in (EIGHT[0], PRIMARY[-1]))])
    assert found.status == "passed"
    assert "in 1 of 6 FASTER cells (1 by a profile)" in found.figures[0]
    assert "legacy" not in found.figures[0].rpartition("(")[2]


def test_where_no_profile_shows_overlap_the_clause_applies() -> None:
    decision = judged([*slow_link(), *(in_turn(name) for name in PRIMARY)])
    assert (decision.verdict, failed(decision)) == ("NO-GO", ["A"])
    said = finding(decision, "A").figures[0]
    assert "of 6 that were profiled, at most 0.0% of a step overlaps" in said
    assert "2% are asked for" in said


def test_a_profile_is_asked_before_times() -> None:
    # In GOOD, times prove overlap of every cell; profiles say that there was none.
    assert clause(GOOD).status == "passed"
    decision = judged([*GOOD, *(in_turn(name) for name in EIGHT)])
    assert failed(decision) == ["A"]
    assert "overlap not shown" in finding(decision, "A").figures[0]
    assert "as its times prove" in finding(decision, "A").figures[1]


@pytest.mark.parametrize(("microseconds", "status"), [(101, "missing"), (104, "passed")])
def test_less_than_2_percent_of_a_step_is_no_overlap(microseconds, status) -> None:
    # Of 5.125 ms 2 % are 0.1025 ms.
    records = slow_link()
    records += [profiled(name) for name in PRIMARY if name not in EIGHT]
    assert clause([*records, in_turn(EIGHT[0], microseconds)]).status == status


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "cpu"}, "of the CPU, where nothing crosses a link"),
        ({"run": "another"}, "nothing says on what machine run another was"),
        ({"state_bytes": 1 << 60}, "the cell has"),
        ({"residency": "resident"}, "resident; the cell has"),
        ({"steps": [step([], 1000)]}, "bytes came to the device in a step"),
    ],
)
def test_a_profile_that_does_not_count_is_told(changes, why) -> None:
    decision = judged([*slow_link(), *(profiled(name, **changes) for name in PRIMARY)])
    assert missing(decision) == ["A"]
    assert [note.startswith("a profile that does not count, ") for note in decision.notes] == [
        True
    ] * len(PRIMARY)
    assert why in decision.notes[0]


def test_profiles_of_other_strategies_and_gpus_are_not_asked() -> None:
    others = [profiled(name, device_name="Another GPU") for name in PRIMARY]
    others += [profiled(name, arm="streamed").model_copy(update={"arm": "x"}) for name in PRIMARY]
    decision = judged([*slow_link(), *others])
    assert missing(decision) == ["A"]
    assert len(decision.notes) == len(PRIMARY)
    assert all(
        note.endswith("of Another GPU, where nothing was measured") for note in decision.notes
    )


def test_an_export_of_nsight_systems_counts_without_an_environment() -> None:
    records = slow_link()
    records += [profiled(name, source="nsys", run="its own") for name in PRIMARY]
    assert judged(records).verdict == "GO"
    assert "of a step that nsys traced" in clause(records).figures[1]


def test_the_last_of_several_profiles_counts() -> None:
    some = [profiled(name) for name in PRIMARY]
    none = [in_turn(name) for name in PRIMARY]
    assert clause([*slow_link(), *none, *some]).status == "passed"
    assert clause([*slow_link(), *some, *none]).status == "failed"


def test_profiled_times_are_no_timings() -> None:
    slow = [
        profiled(name, untraced_ms=[99.0]).model_copy(update={"warmups": 0}) for name in PRIMARY
    ]
    before, after = judged(GOOD), judged([*GOOD, *slow])
    assert [one.ratio for one in after.collection.cells.values()] == [
        one.ratio for one in before.collection.cells.values()
    ]
    assert after.verdict == "GO"
