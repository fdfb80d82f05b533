"""Figures of steps made by hand, whose answers can be worked out on paper."""

from __future__ import annotations

import pytest

from pageahead.experiment.profile.activity import Activity
from pageahead.experiment.profile.analysis import figures, problems, typical, typical_step, within
from tests.experiment.profile.support import (
    MIB,
    MS,
    US,
    fetch,
    home,
    kernel,
    migration,
    paging_step,
    profile,
    step,
    streaming_step,
    synchronized,
)


def approx(value: float) -> float:
    return pytest.approx(value, abs=1e-9)


def test_paging_in_turn() -> None:
    found = figures(paging_step())
    assert found.to_device_bytes == found.managed_to_device_bytes == 256 * MIB
    assert found.to_host_bytes == 0
    assert found.to_host_rate is None
    assert found.transfer_ms == approx(8 * 0.6)
    assert found.to_device_rate == approx(256 * MIB / (4.8 * 1e6))
    assert found.update_ms == approx(8 * 0.05)
    assert (found.overlap_ms, found.transfer_overlap, found.update_overlap) == (0, 0, 0)
    assert found.idle_ms == approx(8 * 0.2)
    assert found.accounted_ms == found.wall_ms == approx(6.8)
    assert found.device_synchronizations == 8


def test_streaming_both_ways() -> None:
    found = figures(streaming_step())
    assert (found.to_device_bytes, found.to_host_bytes) == (256 * MIB, 256 * MIB)
    assert found.managed_to_device_bytes == found.managed_to_host_bytes == 0
    assert found.to_device_ms == found.to_host_ms == approx(4.8)
    # Fetches from 0 to 4.8; write-backs, back to back, from 0.325 to 5.125.
    assert found.transfer_ms == approx(5.125)
    assert found.both_ways_ms == approx(4.8 - 0.325)
    # Every update but the last runs beside a fetch, and that beside the write-back before it.
    assert found.overlap_ms == found.update_ms == approx(16 * 0.025)
    assert found.transfer_overlap == approx(0.4 / 5.125)
    assert found.update_overlap == approx(1)
    # The first update has only a fetch beside it.
    assert found.concurrent_ms == approx(4.8 - 0.325 + 0.025 + 0.025)
    assert found.accounted_ms == approx(5.125)
    assert (found.idle_ms, found.device_synchronizations) == (0, 0)


def test_every_part_of_a_step() -> None:
    found = figures(
        step(
            [
                fetch(10, 30, 100),
                fetch(20, 40, 100),  # overlaps the one before: counted once in time
                kernel(35, 50),
                kernel(45, 60, "fill_kernel"),  # other; 45 to 50 beside an update
                Activity("fill", 60, 65, nbytes=8),
                home(70, 90, 50),
                home(95, 120, 50),  # goes on after the step returned
                Activity("call", 0, 12, "cudaMemPrefetchAsync"),
                Activity("call", 62, 68, "cudaLaunchKernel"),
                synchronized(66, 69, "stream"),
                synchronized(90, 94, "event"),
                Activity("wait", 41, 42),
                Activity("fault", 30, 31, "gpu", faults=3),
                Activity("fault", 33, 34, "gpu", faults=2),
                Activity("fault", 33, 33, "cpu", faults=1),
            ],
            returned=100,
            settled=130,
        )
    )
    ns = 1e-6
    assert (found.to_device_bytes, found.to_host_bytes) == (200, 100)
    assert found.to_device_ms == approx(30 * ns)
    assert found.to_host_ms == approx(45 * ns)  # whole, as the bytes are
    assert found.transfer_ms == approx((30 + 20 + 5) * ns)  # until the step returned
    assert found.update_ms == approx(15 * ns)
    assert found.overlap_ms == approx(5 * ns)
    assert found.other_ms == approx((10 + 5) * ns)
    assert found.idle_ms == approx((10 + 5 + 5) * ns)
    assert found.host_ms == approx((10 + 4 + 4) * ns)
    assert found.accounted_ms == approx(100 * ns)
    assert found.after_ms == approx(20 * ns)
    assert (found.gpu_faults, found.cpu_faults) == (5, 1)
    assert (found.stream_synchronizations, found.event_synchronizations) == (1, 1)
    assert (found.waits, found.prefetches, found.launches, found.kernels) == (1, 1, 1, 2)


def test_nothing_at_all() -> None:
    found = figures(step([], MS))
    assert found.idle_ms == found.accounted_ms == approx(1)
    assert (found.transfer_overlap, found.update_overlap) == (0, 0)
    assert found.to_device_rate is None


def test_the_typical_step_is_that_of_median_wall_time() -> None:
    steps = [step([], length * MS) for length in (5, 1, 3, 2)]
    record = profile(steps=1).model_copy(update={"steps": steps})
    assert typical_step(record).wall_ms == typical(record).wall_ms == 2


def test_a_good_profile_has_no_problems() -> None:
    assert problems(profile("legacy")) == problems(profile("streamed")) == []


@pytest.mark.parametrize(("wall", "good"), [(7.1, True), (7.2, False), (6.5, True), (6.4, False)])
def test_parts_have_to_add_up_within_5_percent(wall, good) -> None:
    # The parts come to 6.8 ms: 4.2 % less than 7.1 and 5.6 % less than 7.2.
    bad = paging_step().model_copy(update={"wall_ms": wall})
    steps = [paging_step(), bad, paging_step()]
    found = problems(profile("legacy").model_copy(update={"steps": steps}))
    assert (found == []) == good
    if not good:
        assert f"6.800 ms of a step that took {wall:.3f}" in found[0]


def test_a_migration_that_is_missing_is_told_with_what_may_be_the_reason() -> None:
    short = paging_step()
    gone = short.model_copy(update={"activities": short.activities[1:]})
    (problem,) = problems(profile("legacy").model_copy(update={"steps": [short, gone]}))
    assert "266,338,304 bytes came to the device in a step, the state has 268,435,456" in problem
    assert "SYS_PTRACE" not in problem  # others are reported
    none = [one for one in short.activities if one.kind != "managed"]
    blind = short.model_copy(update={"activities": none})
    (problem,) = problems(profile("legacy").model_copy(update={"steps": [blind]}))
    assert "--cap-add=SYS_PTRACE" in problem


def test_state_that_does_not_go_home_is_told() -> None:
    whole = streaming_step()
    left = [one for one in whole.activities if one.direction != "to_host"]
    (problem,) = problems(
        profile().model_copy(update={"steps": [whole.model_copy(update={"activities": left})]})
    )
    assert "0 bytes went home in a step" in problem


def test_a_kernel_that_was_not_recorded_is_told() -> None:
    whole = streaming_step()
    calls = [Activity("call", 1, 2, "cudaLaunchKernelExC")] * 17
    more = whole.model_copy(update={"activities": [*whole.activities, *calls]})
    (problem,) = problems(profile().model_copy(update={"steps": [more]}))
    assert "17 kernels were launched in a step, 16 recorded" in problem


@pytest.mark.parametrize(
    "changes",
    [{"device": "cpu"}, {"residency": "resident"}, {"managed": False}],
    ids=["on the CPU", "resident", "not paged"],
)
def test_what_need_not_move_may_stay(changes) -> None:
    assert (
        problems(
            profile("legacy", **changes, steps=1).model_copy(
                update={"steps": [step([kernel(0, 5)], 10)]}
            )
        )
        == []
    )


def test_a_step_has_what_lies_mostly_within_it_counted_from_its_beginning() -> None:
    began = 100 * US
    found = within(
        [
            fetch(began + 50, began + 60),
            fetch(began - 4, began + 6),  # clocks differ a little
            fetch(began - 40, began + 6),  # not of this step
            migration(began + 999, began + 1001),
            migration(began + 990, began + 1004),
        ],
        began,
        began + 1000,
    )
    assert [(one.start, one.end) for one in found] == [(-4, 6), (50, 60), (990, 1004)]
