"""GO, and what turns it into NO-GO or INCOMPLETE."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from pageahead.experiment.cells import CELLS
from pageahead.experiment.evidence import CellRecord, Environment, FailedRecord, PeakRecord
from pageahead.experiment.gate.decision import EvidenceError, decide
from pageahead.experiment.gate.finding import beside
from pageahead.experiment.gate.reading import gather
from pageahead.experiment.oracle.records import CellRecord as VerifiedCell
from pageahead.experiment.oracle.records import SummaryRecord as Verified
from pageahead.experiment.protocol import Protocol
from tests.experiment.gate.support import (
    GOOD,
    NEEDED,
    PROTOCOL,
    RATIOS,
    STAGING,
    failed,
    finding,
    judged,
    missing,
    moved,
    record,
    timings,
    verified,
    with_cell,
    without,
)
from tests.experiment.gate.test_profiled import in_turn
from tests.experiment.support import MIB, RUN, environment, peak

#: To one of six cells of 1.155, so that their geometric mean is just above and below 1.15.
ABOVE, BELOW = (1.155 * (mean / 1.155) ** 6 for mean in (1.1501, 1.1499))


def test_everything_well_is_go() -> None:
    decision = judged(GOOD)
    assert decision.verdict == "GO"
    assert {one.status for one in decision.findings} == {"passed"}
    assert [one.key for one in decision.findings] == [*"123456ABC"]
    assert (decision.strategy, decision.device, list(decision.notes)) == ("streamed", "A GPU", [])


@pytest.mark.parametrize("name", [cell.name for cell in NEEDED])
def test_without_any_needed_cell_it_is_incomplete_and_the_cell_is_named(name) -> None:
    decision = judged(without(lambda one: isinstance(one, CellRecord) and one.cell == name))
    assert decision.verdict == "INCOMPLETE"
    assert "1" in missing(decision)
    for key in missing(decision):
        assert finding(decision, key).missing == [f"{name}: not measured"]


@pytest.mark.parametrize("role", ["primary", "tiny", "public", "resident"])
def test_without_a_cell_the_criteria_of_its_role_are_incomplete(role) -> None:
    names = [cell.name for cell in NEEDED if cell.role == role]
    decision = judged(without(lambda one: isinstance(one, CellRecord) and one.cell == names[0]))
    expected = {"primary": "124ABC", "tiny": "14B", "public": "13C", "resident": "15"}
    assert missing(decision) == [*expected[role]]


def test_without_a_peak_it_is_incomplete() -> None:
    gone = ("adamw32/gpt2", "streamed")
    decision = judged(
        without(lambda one: isinstance(one, PeakRecord) and (one.cell, one.arm) == gone)
    )
    assert (decision.verdict, missing(decision)) == ("INCOMPLETE", ["6"])
    assert finding(decision, "6").missing == ["adamw32/gpt2: no peak memory of streamed"]


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("family", ["adam", "adamw", "lion", "ademamix"])
def test_without_the_oracles_cells_it_is_incomplete(family, bits) -> None:
    decision = judged(
        without(lambda one: isinstance(one, Verified) and (one.family, one.bits) == (family, bits))
    )
    assert (decision.verdict, missing(decision)) == ("INCOMPLETE", ["1"])
    assert finding(decision, "1").missing[0].startswith(f"{family} {bits}-bit: ")


@pytest.mark.parametrize(
    "changes", [{"movement": "lookahead"}, {"run": "another machine's"}], ids=["movement", "run"]
)
def test_the_oracles_cells_of_other_movements_or_machines_do_not_count(changes) -> None:
    records = [
        verified("lion", 8, **changes)
        if isinstance(one, Verified) and (one.family, one.bits) == ("lion", 8)
        else one
        for one in GOOD
    ]
    assert missing(judged(records)) == ["1"]


def test_single_cells_of_the_oracle_count_as_their_summary_does() -> None:
    def single(result: str, number: int = 0) -> VerifiedCell:
        return VerifiedCell(
            run=RUN,
            case=f"lion/8/{number}",
            family="lion",
            bits=8,
            movement="streamed",
            device="cuda",
            result=result,
            steps=5,
            compared_steps=[5],
            tensors=8,
        )

    rest = without(lambda one: isinstance(one, Verified) and (one.family, one.bits) == ("lion", 8))
    enough = [single("equal", number) for number in range(12)]
    assert judged([*rest, *enough]).verdict == "GO"
    assert missing(judged([*rest, *enough[:11], *enough[:11]])) == ["1"]
    few = judged([*rest, *enough[:11]])
    assert missing(few) == ["1"]
    assert "lion 8-bit: 11 cells of `pageahead verify`" in finding(few, "1").missing[0]
    decision = judged([*rest, *enough, single("different")])
    assert (decision.verdict, failed(decision)) == ("NO-GO", ["1"])
    # Beside the summary that it is part of, it is not counted twice.
    summary = verified("lion", 8, movement="streamed")
    both = finding(judged([*rest, summary, single("equal")]), "1")
    assert any("141 of 141 cells equal" in figure for figure in both.figures)

    # Nor does the same cell in other runs make more of them, or one that compared nothing.
    runs = [f"run {number}" for number in range(12)]
    again = [single("equal").model_copy(update={"run": run}) for run in runs]
    there = [environment().model_copy(update={"run": run}) for run in runs]
    assert missing(judged([*there, *rest, *again])) == ["1"]
    for nothing in ({"compared_steps": []}, {"tensors": 0}, {"device": "cpu"}):
        empty = [one.model_copy(update=nothing) for one in enough]
        assert missing(judged([*rest, *empty])) == ["1"]


@pytest.mark.parametrize("first", [True, False])
def test_what_failed_in_the_oracle_is_not_hidden_by_what_did_not(first) -> None:
    equal = verified("lion", 8)
    failing = verified("lion", 8, results={"equal": 16, "different": 4}, bit_for_bit=16)
    records = [failing, *GOOD] if first else [*GOOD, failing]
    decision = judged(records)
    assert (decision.verdict, failed(decision)) == ("NO-GO", ["1"])
    assert any("160 of 164 cells equal" in one for one in finding(decision, "1").figures)
    single = VerifiedCell(
        run=RUN,
        case="lion/8/1",
        family="lion",
        bits=8,
        movement=equal.movement,
        device="cuda",
        result="equal",
        steps=5,
        compared_steps=[5],
        tensors=8,
    )
    assert judged([*records, single]).verdict == "NO-GO"
    # Nor by a run whose environment is not there.
    lost = failing.model_copy(update={"run": "lost"})
    assert judged([*GOOD, lost]).verdict == "NO-GO"
    assert judged([*GOOD, equal.model_copy(update={"run": "lost"})]).verdict == "GO"


@pytest.mark.parametrize(
    "changes",
    [
        {"results": {"equal": 20, "different": -5}, "cells": 15},
        {"results": {"equal": 1000}},
        {"bit_for_bit": 21},
        {"compared_steps": -1},
        {"tensors": 10**4000},
    ],
)
def test_sums_that_do_not_add_up_are_no_records(changes) -> None:
    with pytest.raises(ValidationError):
        Verified.model_validate(verified("lion", 8).model_dump() | changes)


def test_without_the_environment_nothing_counts() -> None:
    decision = judged(without(lambda one: isinstance(one, Environment)))
    assert decision.verdict == "INCOMPLETE"
    assert "nothing says on what machine" in finding(decision, "2").missing[0]


@pytest.mark.parametrize("name", ["adamw8/8x4Mi", "adamw32/256MiB", "adamw32/8MiB"])
def test_criterion_2_flips_with_one_cell(name) -> None:
    assert judged(moved(name, ABOVE)).verdict == "GO"
    decision = judged(moved(name, BELOW))
    assert (decision.verdict, failed(decision)) == ("NO-GO", ["2"])
    width = "8-bit" if name.startswith("adamw8") else "32-bit"
    assert any(
        width in line and "less than 1.15" in line for line in finding(decision, "2").figures
    )


def test_criterion_3_flips_with_one_round_of_one_cell() -> None:
    name = "adamw32/qwen2.5-0.5b"
    assert judged(moved(name, 1.02)).verdict == "GO"
    old = record(CELLS[name], 1.02)
    rounds = old.candidates[0].timings.wall_ms
    slow = [*rounds[:6], [1.03 * one for one in rounds[6]]]
    ours = old.candidates[0].model_copy(
        update={"timings": old.candidates[0].timings.model_copy(update={"wall_ms": slow})}
    )
    decision = judged(with_cell(name, old.model_copy(update={"candidates": [ours]})))
    assert (decision.verdict, failed(decision)) == ("NO-GO", ["3"])
    assert "UNDECIDED" in finding(decision, "3").figures[0]
    assert list(finding(decision, "3").cells) == [name]


@pytest.mark.parametrize(
    ("key", "name", "kept", "broken"),
    [
        ("4", "adamw8/2MiB", 0.9525, 0.9522),
        ("5", "adamw32/64MiB@resident", 0.971, 0.9707),
    ],
)
def test_criteria_4_and_5_flip_with_one_cell(key, name, kept, broken) -> None:
    assert judged(moved(name, kept)).verdict == "GO"
    decision = judged(moved(name, broken))
    assert (decision.verdict, failed(decision)) == ("NO-GO", [key])
    assert list(finding(decision, key).cells) == [name]


def with_peak(ours: int) -> list:
    return [
        peak("adamw8/gpt2", "streamed", ours, STAGING)
        if isinstance(one, PeakRecord) and (one.cell, one.arm) == ("adamw8/gpt2", "streamed")
        else one
        for one in GOOD
    ]


def test_criterion_6_flips_with_one_byte() -> None:
    assert judged(with_peak(4096 * MIB + STAGING)).verdict == "GO"
    decision = judged(with_peak(4096 * MIB + STAGING + 1))
    assert (decision.verdict, failed(decision)) == ("NO-GO", ["6"])
    assert "PyTorch's own peak: 1 GiB" in finding(decision, "6").figures[0]


def test_a_peak_is_compared_with_legacy_beside_it() -> None:
    """Not with legacy beside another strategy, of another file; measured again, the last counts."""
    cell = "adamw8/gpt2"
    bound = 4096 * MIB + STAGING
    beside_another = [peak(cell, "legacy", 4000 * MIB), peak(cell, "lookahead", 3900 * MIB)]
    again = [peak(cell, "legacy", 4200 * MIB), peak(cell, "streamed", bound + 100 * MIB, STAGING)]
    records = with_peak(bound)
    for more, verdict in (
        (beside_another, "GO"),
        (again, "GO"),
        ([again[1]], "NO-GO"),
        ([*again, *beside_another], "GO"),
    ):
        found = gather([*records, *more])
        assert decide(found, strategy="streamed").verdict == verdict
    alone = without(lambda one: isinstance(one, PeakRecord) and one.cell == cell)
    assert missing(judged([*alone, again[1]])) == ["6"]
    later = [again[1], peak(cell, "legacy", bound + 100 * MIB)]
    assert judged([*alone, *later]).verdict == "GO"  # better beside one after it than beside none


@pytest.mark.parametrize(("settle", "verdict"), [(0.299, "GO"), (0.301, "NO-GO")])
def test_criterion_6_flips_with_what_is_left_of_a_step(settle, verdict) -> None:
    old = record(CELLS["adamw32/8x4Mi"], 1.155)  # after legacy's, 0.05 are left
    ours = old.candidates[0].timings.model_copy(
        update={"settle_ms": timings(1.0, settle=settle).settle_ms}
    )
    candidate = old.candidates[0].model_copy(update={"timings": ours})
    new = old.model_copy(update={"candidates": [candidate]})
    decision = judged(with_cell(new.cell, new))
    assert decision.verdict == verdict
    assert failed(decision) == (["6"] if verdict == "NO-GO" else [])


def test_criterion_1_fails_with_one_cell_that_differs() -> None:
    old = record(CELLS["lion8/64MiB"], 1.2)
    comparison = old.candidates[0].comparison.model_copy(update={"differences": 2})
    new = old.model_copy(
        update={"candidates": [old.candidates[0].model_copy(update={"comparison": comparison})]}
    )
    decision = judged(with_cell(new.cell, new))
    assert (decision.verdict, failed(decision)) == ("NO-GO", ["1"])
    assert "lion8/64MiB: 2 tensors differ" in finding(decision, "1").figures


def test_what_failed_is_no_go_whatever_is_missing() -> None:
    records = [one for one in moved("adamw8/8x4Mi", BELOW) if not isinstance(one, PeakRecord)]
    decision = judged(records)
    assert (decision.verdict, missing(decision)) == ("NO-GO", ["6"])


def slowed(cells: dict[str, float], factor: float) -> list:
    """Both arms that much slower, so that no overlap shows, at those ratios."""
    records = []
    for one in GOOD:
        if isinstance(one, CellRecord) and one.cell in cells:
            ours_ms = factor * one.candidates[0].wall.median
            ours = one.candidates[0].model_copy(update={"timings": timings(ours_ms)})
            legacy = one.legacy.model_copy(update={"timings": timings(ours_ms * cells[one.cell])})
            one = one.model_copy(update={"candidates": [ours], "legacy": legacy})
        records.append(one)
    return records


def primary(optimizer: str) -> list[str]:
    return [
        cell.name for cell in NEEDED if cell.role == "primary" and cell.optimizer.name == optimizer
    ]


def test_clause_a_is_open_where_no_overlap_shows() -> None:
    decision = judged(slowed(dict.fromkeys(primary("adamw8"), 1.2), 5))
    assert (decision.verdict, missing(decision)) == ("INCOMPLETE", ["A"])
    assert all("overlap" in one for one in finding(decision, "A").missing)


def test_clause_a_applies_where_the_gain_is_in_cells_without_overlap() -> None:
    name, *others = primary("adamw32")
    records = slowed(dict.fromkeys(others, 1.3), 5)
    weak = record(CELLS[name], 1.1)
    records = [weak if isinstance(one, CellRecord) and one.cell == name else one for one in records]
    decision = judged(records)
    # Nobody knows of the other cells: their times prove nothing, and there is no profile.
    assert (decision.verdict, missing(decision)) == ("INCOMPLETE", ["A"])
    assert finding(decision, "A").missing == [
        f"{one}: overlap, which times alone do not show" for one in others
    ]
    decision = judged([*records, *(in_turn(one) for one in others)])
    assert (decision.verdict, failed(decision)) == ("NO-GO", ["A"])


def all_at(role: str, value: float) -> list:
    return [
        record(CELLS[one.cell], value)
        if isinstance(one, CellRecord) and CELLS[one.cell].role == role
        else one
        for one in GOOD
    ]


def test_clause_b_applies_where_only_tiny_tensors_gain() -> None:
    decision = judged(all_at("primary", 1.0))
    assert (decision.verdict, failed(decision)) == ("NO-GO", ["2", "B"])


def test_clause_c_applies_where_no_public_model_gains() -> None:
    decision = judged(all_at("public", 1.0))
    assert (decision.verdict, failed(decision)) == ("NO-GO", ["3", "C"])


def with_timings(cell: CellRecord, arm: str, **values: object) -> CellRecord:
    if arm == "legacy":
        old = cell.legacy.timings
        legacy = cell.legacy.model_copy(update={"timings": old.model_copy(update=values)})
        return cell.model_copy(update={"legacy": legacy})
    candidate = cell.candidates[0]
    new = candidate.timings.model_copy(update=values)
    return cell.model_copy(update={"candidates": [candidate.model_copy(update={"timings": new})]})


CELL = record(CELLS["adamw32/32MiB"], RATIOS["primary"])
ROUNDS = CELL.legacy.timings.wall_ms


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (CELL.model_copy(update={"device": "cpu"}), "measured on the CPU"),
        (CELL.model_copy(update={"library": "other.so"}), "other.so, but its run began on A GPU"),
        (
            CELL.model_copy(update={"protocol": PROTOCOL.__class__(9, 7, 8)}),
            "9 warm-ups and 7 rounds of 8 steps; at least 10",
        ),
        (CELL.model_copy(update={"protocol": PROTOCOL.__class__(10, 5, 10)}), "at least 10"),
        (CELL.model_copy(update={"state_bytes": 5}), "of 5 bytes, host; the cell has 67,108,864"),
        (CELL.model_copy(update={"residency": "resident"}), "resident; the cell has"),
        (
            CELL.model_copy(update={"legacy": CELL.legacy.model_copy(update={"managed_bytes": 0})}),
            "legacy had 0 bytes of managed",
        ),
        (CELL.model_copy(update={"link": None}), "the link was not measured"),
        (with_timings(CELL, "legacy", wall_ms=ROUNDS[:6]), "has not 7 rounds of 8"),
        (with_timings(CELL, "ours", wall_ms=[*ROUNDS[:6], ROUNDS[6][:7]]), "has not 7 rounds"),
        (with_timings(CELL, "ours", event_ms=None), "candidate: no event_ms"),
        (with_timings(CELL, "ours", wall_ms=[*ROUNDS[:6], [0.0] * 8]), "is not positive"),
        (
            with_timings(CELL, "ours", wall_ms=[*ROUNDS[:6], [float("nan")] * 8]),
            "that is no number",
        ),
        (with_timings(CELL, "legacy", wall_ms=[[1.2] * 8] * 7), "it was not on the host"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cell_that_is_no_evidence_of_itself_is_missing_with_the_reason(new, said) -> None:
    decision = judged(with_cell(CELL.cell, new))
    assert (decision.verdict, failed(decision)) == ("INCOMPLETE", [])
    (reason,) = finding(decision, "2").missing
    assert reason.startswith(f"{CELL.cell}: ")
    assert said in reason


def test_a_cell_that_failed_and_then_did_not_is_complete() -> None:
    died = FailedRecord(run=RUN, cell=CELL.cell, strategies=["streamed"], reason="died")
    elsewhere = died.model_copy(update={"what": "peak memory"})
    assert judged([died, *GOOD]).verdict == "GO"
    decision = judged(
        [died, *without(lambda one: isinstance(one, CellRecord) and one.cell == CELL.cell)]
    )
    assert f"{CELL.cell}: failed: died" in finding(decision, "2").missing
    records = without(lambda one: isinstance(one, CellRecord) and one.cell == CELL.cell)
    assert f"{CELL.cell}: not measured" in finding(judged([elsewhere, *records]), "2").missing


def test_of_two_records_that_agree_the_last_counts_and_that_is_said() -> None:
    better = record(CELLS["adamw8/8x4Mi"], 1.16)
    decision = judged([*GOOD, better])
    assert decision.verdict == "GO"
    assert list(decision.notes) == ["measured again, the last counts: adamw8/8x4Mi"]
    assert decision.collection.cells["adamw8/8x4Mi"].ratio == pytest.approx(1.16, rel=1e-3)


def test_of_records_with_different_verdicts_none_counts_whatever_their_order() -> None:
    slow = record(CELLS["adamw8/8x4Mi"], 0.9)
    for records in ([slow, *GOOD], [*GOOD, slow]):
        decision = judged(records)
        assert decision.verdict == "INCOMPLETE"
        (said,) = (one for one in finding(decision, "2").missing if "8x4Mi" in one)
        assert "measured 2 times, and the verdicts differ" in said
    on_cpu = slow.model_copy(update={"device": "cpu"})
    assert judged([*GOOD, on_cpu]).verdict == "GO"


def differing(cell: CellRecord, tensors: int = 5) -> CellRecord:
    (ours,) = cell.candidates
    comparison = ours.comparison.model_copy(update={"differences": tensors})
    return cell.model_copy(
        update={"candidates": [ours.model_copy(update={"comparison": comparison})]}
    )


@pytest.mark.parametrize(
    "unequal",
    [
        differing(CELL),
        differing(CELL).model_copy(update={"protocol": Protocol(1, 1, 1)}),
        differing(CELL).model_copy(update={"run": "of a machine that nobody described"}),
        differing(record(CELLS["adamw8/32x8Mi"], 1.5)),
    ],
    ids=["complete", "short", "without environment", "outside the matrix"],
)
def test_bits_that_differed_once_are_not_taken_back_by_measuring_again(unequal) -> None:
    for records in ([unequal, *GOOD], [*GOOD, unequal]):
        decision = judged(records)
        assert failed(decision) == ["1"]
        assert f"{unequal.cell}: 5 tensors differ" in finding(decision, "1").figures


def host_cells_with(change) -> list:
    return [
        one.model_copy(update={"candidates": [change(one, one.candidates[0])]})
        if isinstance(one, CellRecord) and one.residency == "host"
        else one
        for one in GOOD
    ]


def without_streaming(cell, ours):
    return ours.model_copy(update={"routes": {"resident": ours.routes["streamed"]}})


def faster_than_the_link(cell, ours):
    return ours.model_copy(update={"timings": timings(cell.state_bytes / 60e6)})


def compared_with_nothing(cell, ours):
    nothing = ours.comparison.model_copy(update={"tensors": 0})
    return ours.model_copy(update={"comparison": nothing})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without_streaming, "streamed paged 0 of"),
        (faster_than_the_link, "candidate took"),
        (compared_with_nothing, "nothing was compared with legacy"),
    ],
)
def test_what_did_not_come_over_the_link_or_was_not_compared_does_not_count(change, why) -> None:
    decision = judged(host_cells_with(change))
    assert decision.verdict == "INCOMPLETE"
    said = finding(decision, "2").missing
    assert said
    assert all(why in one for one in said)


def test_an_oracle_that_compared_nothing_does_not_count() -> None:
    records = without(lambda one: isinstance(one, Verified) and one.family == "lion")
    nothing = [verified("lion", bits, compared_steps=0) for bits in (8, 32)]
    assert missing(judged([*records, *nothing])) == ["1"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"torch": "1.0"}, "other code, libraries or driver"),
        ({"source_sha256": "f" * 64}, "other code, libraries or driver"),
        ({"dirty": True}, "differed from its commit"),
    ],
)
def test_cells_of_another_state_than_the_last_run_do_not_count(changes, why) -> None:
    older = environment().model_copy(update={"run": "older", **changes})
    moved_there = [
        one.model_copy(update={"run": "older"})
        if isinstance(one, CellRecord) and one.cell == CELL.cell
        else one
        for one in GOOD
    ]
    # The last run decides which state counts.
    decision = judged([older, *moved_there])
    assert decision.verdict == "INCOMPLETE"
    (said,) = (one for one in finding(decision, "2").missing if CELL.cell in one)
    assert why in said


@pytest.mark.parametrize("changes", [{"torch": "1.0"}, {"dirty": True}, {"gpu": None}])
def test_peaks_of_another_state_than_the_last_run_do_not_count(changes) -> None:
    older = environment().model_copy(update={"run": "older", **changes})
    records = [
        one.model_copy(update={"run": "older"}) if isinstance(one, PeakRecord) else one
        for one in GOOD
    ]
    decision = judged([older, *records])
    assert (decision.verdict, missing(decision)) == ("INCOMPLETE", ["6"])


def test_peaks_that_were_measured_again_are_told() -> None:
    more = peak(CELL.cell, "streamed", staging=MIB)
    decision = judged([*GOOD, more])
    assert f"peak memory measured again, the last counts: {CELL.cell}" in decision.notes


@pytest.mark.parametrize(
    "changes", [{"optimizer": "adamw8"}, {"layout": "8x4Mi"}, {"cpu_divisor": 8}]
)
def test_a_record_by_the_name_of_another_cell_does_not_count(changes) -> None:
    decision = judged(with_cell(CELL.cell, CELL.model_copy(update=changes)))
    assert decision.verdict == "INCOMPLETE"
    assert any("whatever it is called" in one for one in finding(decision, "2").missing)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"samples": 0}, "the driver was not asked"),
        ({"driver_ready": 1 << 40}, "took nothing at all"),
        ({"driver_before": 3 << 30}, "were taken before legacy"),
        ({"driver_ready": None}, "held ready for managed memory was not measured"),
        ({"staging": 1 << 40}, "a ring of 1 TiB"),
        ({"staging": 5 * CELL.state_bytes + 1}, "for 64 MiB of state"),
    ],
)
def test_a_peak_that_cannot_be_compared_is_missing(changes, why) -> None:
    def changed(one):
        peak_of_ours = isinstance(one, PeakRecord) and (one.cell, one.arm) == (
            CELL.cell,
            "streamed",
        )
        return one.model_copy(update=changes) if peak_of_ours else one

    decision = judged([changed(one) for one in GOOD])
    assert missing(decision) == ["6"]
    assert why in finding(decision, "6").missing[0]


def test_a_ring_of_four_slots_with_all_of_the_state_and_padding_is_one() -> None:
    staging = 4 * CELL.state_bytes + MIB
    records = without(
        lambda one: isinstance(one, PeakRecord) and (one.cell, one.arm) == (CELL.cell, "streamed")
    )
    assert judged([*records, peak(CELL.cell, "streamed", staging=staging)]).verdict == "GO"


def test_the_ratio_is_that_of_the_rounds_and_not_of_all_times_together() -> None:
    """From the fourth or fifth round on the machine is slower, for both arms."""
    ours = [1.0, 1.0, 1.0, 1.0, 1.3, 1.3, 1.3]
    theirs = [1.05, 1.05, 1.05, 1.3, 1.365, 1.365, 1.365]  # medians over all: 1.3 against 1.0

    def shifted(cell: CellRecord) -> CellRecord:
        scale = cell.state_bytes / 40e6

        def of(rounds: list[float]) -> dict[str, list[list[float]]]:
            times = [[scale * one] * 8 for one in rounds]
            return {"wall_ms": times, "event_ms": times}

        return with_timings(with_timings(cell, "legacy", **of(theirs)), "streamed", **of(ours))

    records = [
        shifted(one) if isinstance(one, CellRecord) and CELLS[one.cell].role == "primary" else one
        for one in GOOD
    ]
    decision = judged(records)
    assert "2" in failed(decision)
    assert all("geometric mean 1.05 " in one for one in finding(decision, "2").figures)


def test_cells_outside_the_matrix_decide_nothing() -> None:
    other = record(CELLS["adamw8/32x8Mi"], 0.1)
    decision = judged([*GOOD, other])
    assert decision.verdict == "GO"
    assert list(decision.notes) == ["measured, but no part of the gate: adamw8/32x8Mi"]


@pytest.mark.parametrize(
    "legacy",
    [{"timings": timings(1e308)}, {"resident": timings(1.0, rounds=0)}],
    ids=["a ratio that is infinite", "no step on resident state"],
)
def test_a_cell_that_cannot_be_computed_with_is_missing(legacy) -> None:
    old = record(CELLS["adamw8/8x1Mi"], 1.155)
    broken = old.model_copy(update={"legacy": old.legacy.model_copy(update=legacy)})
    decision = judged(with_cell("adamw8/8x1Mi", broken))
    assert decision.verdict == "INCOMPLETE"
    assert any("its times cannot be used" in one for one in finding(decision, "2").missing)


def test_a_cell_of_more_rounds_than_there_can_be_is_missing() -> None:
    old = record(CELLS["adamw8/8x1Mi"], 1.155)
    broken = old.model_copy(update={"protocol": replace(old.protocol, rounds=10**30)})
    assert judged(with_cell("adamw8/8x1Mi", broken)).verdict == "INCOMPLETE"


def test_other_code_and_changed_code_are_said() -> None:
    other = environment(run="later", source_sha256="a" * 64, commit="b" * 40, dirty=True)
    said = " ".join(judged([*GOOD, other]).notes)
    assert "several states of the code" in said
    assert "aaaaaaaaaaaa (commit bbbb" in said
    assert "differed from its commit" in said


@pytest.mark.parametrize(
    ("records", "strategy", "said"),
    [
        ([environment()], None, "no measured cell"),
        (GOOD, "lookahead", "no evidence of lookahead; there is: streamed"),
        (
            [*GOOD, CELL.model_copy(update={"device_name": "Another"})],
            None,
            r"several devices \(A GPU, Another\)",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(records, strategy, said) -> None:
    with pytest.raises(EvidenceError, match=said):
        decide(gather(records), strategy)


def test_of_several_strategies_one_is_chosen() -> None:
    both = [
        one.model_copy(
            update={
                "candidates": [
                    *one.candidates,
                    one.candidates[0].model_copy(update={"strategy": "lookahead"}),
                ]
            }
        )
        if isinstance(one, CellRecord)
        else one
        for one in GOOD
    ]
    with pytest.raises(EvidenceError, match="choose one with --strategy: streamed, lookahead"):
        decide(gather(both))
    assert decide(gather(both), "streamed").verdict == "GO"
    assert decide(gather(both), "lookahead").verdict == "INCOMPLETE"


@pytest.mark.parametrize(
    ("value", "least", "said"),
    [
        (1.15, 1.15, "1.15"),
        (1.149996, 1.15, "1.149996"),
        (1.1502, 1.15, "1.15"),
        (1.1, 1.15, "1.1"),
        (0.9523809, 1 / 1.05, "0.95238"),
        (2.34567, 1.15, "2.346"),
    ],
)
def test_a_figure_is_said_on_its_side_of_the_line(value, least, said) -> None:
    assert beside(value, least) == said
    assert (float(said) < least) == (value < least)
