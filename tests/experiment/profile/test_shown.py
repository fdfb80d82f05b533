"""The trace and the picture of a profile."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from pageahead.experiment.profile import picture, trace
from pageahead.experiment.profile.activity import Activity
from pageahead.experiment.profile.collector import ProfileError
from tests.experiment.profile.support import (
    MIB,
    fetch,
    kernel,
    profile,
    step,
    synchronized,
)

BOTH = [profile("legacy"), profile("streamed")]


def of_phase(events, phase):
    return [event for event in events if event["ph"] == phase]


def test_a_trace_is_of_the_format_that_perfetto_reads(tmp_path) -> None:
    path = tmp_path / "trace.json"
    trace.write(path, BOTH)
    written = json.loads(path.read_text())
    assert written["displayTimeUnit"] == "ms"
    assert {event["ph"] for event in written["traceEvents"]} == {"X", "M"}
    for event in of_phase(written["traceEvents"], "X"):
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["ts"], float)
        assert event["dur"] >= 0
        assert {type(event["pid"]), type(event["tid"])} == {int}


def test_each_arm_is_a_process_and_each_lane_a_thread_with_its_name() -> None:
    events = trace.events(BOTH)
    names = {
        (event["pid"], event["tid"], event["name"]): event["args"].get("name")
        for event in of_phase(events, "M")
    }
    assert names[0, 0, "process_name"] == "adamw32/8x4Mi legacy (cupti, A GPU)"
    threads = defaultdict(set)
    for (process, thread, what), name in names.items():
        if what == "thread_name":
            threads[process].add(name)
            assert any((e["pid"], e["tid"]) == (process, thread) for e in of_phase(events, "X"))
    assert threads == {
        0: {"step", "host", "fetch", "update"},
        1: {"step", "fetch", "update", "write-back"},
    }


def test_all_activities_of_all_steps_are_in_it_and_steps_begin_together() -> None:
    events = of_phase(trace.events(BOTH), "X")
    steps = [event for event in events if event["cat"] == "step"]
    assert len(events) - len(steps) == sum(
        len(one.activities) for record in BOTH for one in record.steps
    )
    by_name = defaultdict(list)
    for event in steps:
        by_name[event["name"]].append(event["ts"])
    assert set(by_name) == {"step 0", "step 1", "step 2"}
    assert all(len(set(begins)) == 1 for begins in by_name.values())
    assert steps[1]["ts"] == 6805 + trace.PAUSE_US  # the longer of both
    moved = sum(event["args"].get("bytes", 0) for event in events if event["pid"] == 1)
    assert moved == 3 * 2 * 256 * MIB


def test_events_of_one_thread_never_overlap() -> None:
    crowded = step(
        [fetch(0, 100, 1), fetch(50, 150, 1), fetch(60, 70, 1), fetch(100, 120, 1), kernel(0, 9)],
        200,
    )
    events = trace.events([profile(steps=1).model_copy(update={"steps": [crowded]})])
    threads = defaultdict(list)
    for event in of_phase(events, "X"):
        threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    names = {e["args"]["name"] for e in of_phase(events, "M") if e["name"] == "thread_name"}
    assert {"fetch", "fetch (2)", "fetch (3)"} <= names


def test_what_an_event_says() -> None:
    one = step(
        [
            Activity("managed", 0, 5, "prefetch", "", "to_device", 64),
            Activity("fault", 5, 6, "gpu", faults=3),
            synchronized(6, 7),
            Activity("call", 7, 8, "cudaLaunchKernel"),
            Activity("wait", 8, 9, "", "13"),
        ],
        10,
    )
    events = trace.events([profile(steps=1).model_copy(update={"steps": [one]})])
    said = [(e["name"], e["args"]) for e in of_phase(events, "X") if e["cat"] != "step"]
    assert said == [
        ("managed to device", {"bytes": 64, "cause": "prefetch"}),
        ("gpu fault", {"faults": 3}),
        ("device synchronization", {}),
        ("cudaLaunchKernel", {}),
        ("wait", {"stream": "13"}),
    ]


def test_the_picture_has_three_lanes_for_each_arm_on_one_axis(tmp_path) -> None:
    drawn = picture.figure(BOTH)
    legacy, streamed = drawn.axes
    for axes in drawn.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == [
            "fetch",
            "update",
            "write-back",
        ]
    assert legacy.get_xlim() == streamed.get_xlim()
    assert legacy.get_xlim()[1] >= 6.8
    bars = [[len(lane.get_paths()) for lane in axes.collections] for axes in drawn.axes]
    assert bars == [[128, 8, 0], [16, 16, 16]]
    assert "256 MiB in, 0 MiB out" in legacy.get_title(loc="left")
    assert "an update runs in 8% of the transfer time" in streamed.get_title(loc="left")
    assert len(legacy.lines[0].get_xdata()) == 8  # device-wide synchronizations
    assert len(streamed.lines[0].get_xdata()) == 0


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_formats_of_pictures(suffix, tmp_path) -> None:
    path = tmp_path / f"timeline.{suffix}"
    picture.draw(BOTH, path)
    assert path.stat().st_size > 5000


def test_the_same_profile_gives_the_same_svg(tmp_path) -> None:
    for name in ("one.svg", "other.svg"):
        picture.draw(BOTH, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


def test_an_unknown_format_is_refused_with_those_there_are(tmp_path) -> None:
    with pytest.raises(ProfileError, match=r"timeline.bmpp: no such format.*png.*svg"):
        picture.draw(BOTH, tmp_path / "timeline.bmpp")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_of_the_cpu_says_what_it_is_not() -> None:
    drawn = picture.figure([profile(device="cpu", source="cpu")])
    assert "no evidence of transfer speed" in drawn._suptitle.get_text()
