"""Nothing is read before it is written: overlapped write-backs, and every order of transfers."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pageahead.device
from pageahead import Paging
from pageahead.device.cpu import CpuDevice
from tests.lazy import LazyDevice
from tests.support import (
    CPU,
    MIB,
    assert_same_bits,
    bits,
    cpu_device,
    legacy,
    ours,
    parameters,
    train,
)

OVERLAP = Paging(write_back="overlap", staging=MIB)
SIZES = (120_000, 5, 130_001, 100_000)


@pytest.fixture
def slow_write_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every copy home take a while."""
    real = CpuDevice.copy

    def copy(
        self: CpuDevice, destination: torch.Tensor, source: torch.Tensor, *, stream: Any
    ) -> None:
        if stream is self.stream("write_back"):
            stream.launch(lambda: time.sleep(0.01))
        real(self, destination, source, stream=stream)

    monkeypatch.setattr(CpuDevice, "copy", copy)


@pytest.mark.usefixtures("slow_write_back")
@pytest.mark.parametrize("name", ["PagedAdamW", "PagedAdEMAMix8bit"])
def test_results_are_the_same(name: str) -> None:
    expected = legacy(name, parameters(*SIZES))
    optimizer = ours(name, parameters(*SIZES), paging=OVERLAP)
    for step, absent in enumerate(([], [], [0], [0], [], [2, 3])):
        for one in (expected, optimizer):
            train(one, [step], absent)
    optimizer.state_dict()
    assert_same_bits(optimizer, expected)


@pytest.mark.usefixtures("slow_write_back")
def test_a_step_returns_before_its_state_is_home() -> None:
    optimizer = ours("PagedAdamW", parameters(*SIZES), paging=OVERLAP)
    train(optimizer, range(1))
    unfinished = optimizer._engines[CPU]._pipeline._last_written
    assert unfinished is not None
    assert not unfinished._done  # type: ignore[attr-defined]
    cpu_device().drain()


@pytest.mark.usefixtures("slow_write_back")
def test_a_completed_step_has_its_state_home() -> None:
    expected = legacy("PagedAdamW", parameters(*SIZES))
    optimizer = ours("PagedAdamW", parameters(*SIZES), paging=Paging(staging=MIB))
    for one in (expected, optimizer):
        train(one, range(1))
    assert_same_bits(optimizer, expected)  # without waiting for anything


@pytest.mark.usefixtures("slow_write_back")
def test_state_dict_waits_for_write_backs() -> None:
    expected = legacy("PagedAdamW8bit", parameters(*SIZES))
    optimizer = ours("PagedAdamW8bit", parameters(*SIZES), paging=OVERLAP)
    for step in range(3):
        for one in (expected, optimizer):
            train(one, [step])
        saved, right = optimizer.state_dict(), expected.state_dict()
        for key, entries in right["state"].items():
            for name, tensor in entries["__bnb_optimizer_quant_state__"].items():
                mine = saved["state"][key]["__bnb_optimizer_quant_state__"][name]
                assert bits(mine) == bits(tensor), f"{name} of {key}"


@pytest.mark.usefixtures("slow_write_back")
def test_loading_waits_for_write_backs() -> None:
    """Else the last chunk would come home over what was loaded."""
    saved = ours("PagedAdamW", parameters(*SIZES))
    train(saved, range(1))
    optimizer = ours("PagedAdamW", parameters(*SIZES), paging=OVERLAP)
    train(optimizer, range(5, 6))
    optimizer.load_state_dict(saved.state_dict())
    cpu_device().drain()
    for mine, theirs in zip(optimizer.state.values(), saved.state.values(), strict=True):
        assert bits(mine["state1"]) == bits(theirs["state1"])


@pytest.mark.usefixtures("slow_write_back")
def test_a_parameter_listed_twice() -> None:
    arms = []
    for make, more in ((legacy, {}), (ours, {"paging": OVERLAP})):
        first, *others = parameters(100_000, *[110_000] * 5)
        with pytest.warns(UserWarning, match="duplicate parameters"):
            arms.append(make("PagedAdamW8bit", [first, *others, first], **more))
        train(arms[-1], range(4))
    cpu_device().drain()
    assert_same_bits(arms[1], arms[0])


@given(
    seed=st.integers(0, 100_000),
    name=st.sampled_from(["PagedAdamW8bit", "PagedLion", "PagedAdEMAMix8bit"]),
    listed=st.lists(st.integers(0, 3), min_size=2, max_size=5),
    absent=st.lists(st.sets(st.integers(0, 3), max_size=3), min_size=2, max_size=3),
    strategy=st.sampled_from(["streamed", "streamed", "lookahead", "sequential"]),
    overlap=st.booleans(),
)
@settings(max_examples=30, deadline=None)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_every_order_of_transfers_gives_the_same_bits(
    seed: int,
    name: str,
    listed: list[int],
    absent: list[set[int]],
    strategy: str,
    overlap: bool,
) -> None:
    """The whole optimizer over a device that runs transfers as late, or as early, as it may."""
    paging = Paging(
        strategy=strategy, staging=MIB, write_back="overlap" if overlap else "before_return"
    )
    sizes = (100_000, 120_001, 40, 110_000)
    arms = []
    with pytest.MonkeyPatch.context() as patch:
        device = LazyDevice(seed, host_computes=True)
        patch.setitem(pageahead.device._devices, CPU, device)
        for make, more in ((legacy, {}), (ours, {"paging": paging})):
            found = parameters(*sizes)
            optimizer = make(name, [found[number] for number in listed], **more)
            for step, without in enumerate(absent):
                train(optimizer, [step], without)
            arms.append(optimizer)
        arms[1].state_dict()
        assert_same_bits(arms[1], arms[0])


@pytest.mark.parametrize(("strategy", "ahead"), [("lookahead", 1), ("sequential", 0)])
def test_managed_state_is_prefetched_as_far_ahead_as_promised(strategy: str, ahead: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = LazyDevice(0, host_computes=True)
        patch.setitem(pageahead.device._devices, CPU, device)
        optimizer = ours("PagedAdamW", parameters(*[100_000] * 4), paging=Paging(strategy=strategy))
        train(optimizer, range(1))
    stream = "prefetch" if ahead else "compute"
    one = [f"{stream}: prefetches memory"] * 2  # state1 and state2
    _, *log = (line for line in device.log if "prefetches" in line or "compute: waits" in line)
    arrived = [number for number, line in enumerate(log) if f"waits for {stream}" in line]
    for first, second in pairwise([-1, *arrived[:4]]):
        assert log[first + 1 : second] == one
