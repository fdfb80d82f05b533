"""Profiles that are really made, of the CPU device's own operations."""

from __future__ import annotations

import time

import pytest
import torch

import pageahead.device
from pageahead.experiment.messages import ProfileRequest
from pageahead.experiment.profile import cpu, measure
from pageahead.experiment.profile.analysis import figures, problems, typical
from pageahead.experiment.profile.collector import ProfileError
from pageahead.experiment.protocol import Protocol

CPU = torch.device("cpu")
SMALL = "lion8/8x1Mi"


def request(arm: str, cell: str = SMALL, **fields: object) -> ProfileRequest:
    return ProfileRequest(
        run="now",
        cell=cell,
        strategies=[arm],
        device="cpu",
        protocol=Protocol(2, 1, 3),
        **fields,
    )


def profiled(arm: str, cell: str = SMALL, **fields: object):
    return measure.measure_profile(request(arm, cell, **fields), lambda phase, steps: None)


def test_streamed_state_goes_in_and_out_while_updates_run() -> None:
    record = profiled("streamed", "adamw32/8x4Mi")
    assert (record.source, record.device, record.managed) == ("cpu", "cpu", False)
    assert problems(record) == []
    assert len(record.steps) == len(record.untraced_ms) == 3
    for step in record.steps:
        found = figures(step)
        assert found.to_device_bytes == found.to_host_bytes == record.state_bytes
        assert found.device_synchronizations == 0
        assert found.waits > 0
        assert sum(one.kind == "kernel" for one in step.activities) >= 8
    # Eight parameters: fetching the next needs less time than updating one.
    assert typical(record).transfer_overlap > 0.05


def test_sequential_synchronizes_the_device_for_each_parameter_and_nobody_else_does() -> None:
    counts = {arm: typical(profiled(arm)) for arm in ("legacy", "sequential", "lookahead")}
    assert counts["sequential"].device_synchronizations == 8
    assert counts["legacy"].device_synchronizations == 0
    assert counts["lookahead"].device_synchronizations == 0
    assert counts["lookahead"].prefetches == 8  # Lion has one state tensor
    for one in counts.values():
        assert (one.to_device_bytes, one.transfer_overlap) == (0, 0)
        assert one.update_ms > 0


def test_phases_are_reported_and_steps_counted() -> None:
    said: list[tuple[str, int]] = []
    asked = request("streamed")
    measure.measure_profile(asked, lambda phase, steps: said.append((phase, steps)))
    assert next(phase for phase, _ in said if phase) == "making parameters and gradients"
    assert said[-1] == ("timing steps without a profiler", asked.steps)


def test_the_devices_place_is_given_back_also_after_an_error(monkeypatch) -> None:
    before = pageahead.device.device_for(CPU)
    monkeypatch.setattr(measure, "check_routes", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        profiled("streamed")
    assert pageahead.device.device_for(CPU) is before


def test_marked_steps_are_run_and_nothing_is_recorded() -> None:
    record = profiled("streamed", mark=True)
    assert record.source == "marks"
    assert record.untraced_ms == []
    assert [step.activities for step in record.steps] == [[]] * 3


@pytest.mark.parametrize(
    "bad", [{"cell": "adamw32/32x8Mi@oversubscribed"}, {"strategies": ["legacy", "streamed"]}]
)
def test_of_several_arms_or_more_state_than_memory_there_is_no_profile(bad) -> None:
    asked = request("streamed").model_copy(update=bad)
    with pytest.raises(ProfileError, match="a profile is of one arm whose state fits in memory"):
        measure.measure_profile(asked, lambda phase, steps: None)


def test_copies_are_timed_where_they_run_and_not_where_they_are_launched() -> None:
    collector = cpu.CpuCollector()
    try:
        device = pageahead.device.device_for(CPU)
        fetch, home = device.stream("fetch"), device.stream("write_back")
        one, other, third = torch.zeros(1000), torch.ones(1000), torch.ones(10)
        launched = collector.now()
        fetch.launch(lambda: time.sleep(0.05))
        device.copy(one, other, stream=fetch)
        home.wait(fetch.record())
        device.copy(other, one, stream=home)
        device.zero(third, stream=fetch)
        device.synchronize()
        found = sorted(collector.take(), key=lambda activity: activity.start)
    finally:
        collector.close()
        collector.close()
    copies = [activity for activity in found if activity.kind == "copy"]
    assert [copy.direction for copy in copies] == ["to_device", "to_host"]
    assert copies[0].start - launched > 50_000_000
    assert copies[0].end <= copies[1].start
    assert {copy.nbytes for copy in copies} == {4000}
    assert [activity.kind for activity in found].count("fill") == 1
    assert [a.name for a in found if a.kind == "synchronization"] == ["device"]
    assert [a.stream for a in found if a.kind == "wait"] == ["write_back"]
    assert torch.equal(other, torch.ones(1000))
