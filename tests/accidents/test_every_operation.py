"""A step broken at every one of its operations in turn; `tripwire` says what is promised then."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import pageahead.device
from pageahead import Paging
from pageahead.optim import engine as engine_module
from pageahead.optim import paging as paging_module
from pageahead.optim import routing
from pageahead.optim.paged import PagedOptimizer
from tests.accidents.tripwire import Launches, Tripwire, homeward, replay
from tests.lazy import LazyDevice
from tests.support import (
    CPU,
    STRATEGIES,
    assert_same_bits,
    is_cut,
    legacy,
    ours,
    parameters,
    set_gradients,
    train,
)

SIZES = (1_000, 5, 5_001, 1_000, 1_100)
"""The third is cut, the second is resident."""

CHUNK = {"PagedAdamW": 16 << 10, "PagedAdamW8bit": 4 << 10}
"""Bytes, for slots of 2,000 elements."""

UNCHANGED, CHANGED, FIRST, TWICE = "unchanged", "another active set", "first", "listed twice"
"""The step that breaks: the third one; one that was anticipated in vain; the one that makes all
there is; one with a parameter whose second update depends on the way home of its first."""

MODES = [
    (kind, strategy, write_back)
    for strategy in STRATEGIES
    for write_back in ("before_return", "overlap")
    for kind in (UNCHANGED, CHANGED, FIRST, *([TWICE] if strategy == "streamed" else []))
]


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page 1,000 elements in chunks of a few KiB: what counts here is operations, not bytes."""
    monkeypatch.setattr(routing, "PAGED_NUMEL", 1_000)
    monkeypatch.setattr(paging_module, "MINIMUM_STAGING", 1_024)


@dataclass
class Trial:
    """bitsandbytes' and ours, alike, and their gradients for the step in which ours breaks."""

    name: str
    paging: Paging
    seed: int
    kind: str
    arms: list[Any] = field(default_factory=list)
    found: list[list[torch.nn.Parameter]] = field(default_factory=list)

    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lazy = LazyDevice(self.seed, host_computes=True)
        self.device = Tripwire(self.lazy)
        self.launches = Launches(self.device)
        monkeypatch.setitem(pageahead.device._devices, CPU, self.device)
        monkeypatch.setattr(engine_module, "launch", self.launches)
        for make, more in ((legacy, {}), (ours, {"paging": self.paging})):
            found = parameters(*SIZES)
            listed = [*found, found[2]] if self.kind == TWICE else found
            self.arms.append(make(self.name, listed, lr=0.01, min_8bit_size=500, **more))
            self.found.append(found)
            train(self.arms[-1], range(0 if self.kind == FIRST else 2))
            set_gradients(found, 50, {0, 3} if self.kind == CHANGED else ())
        self.launches.done.clear()

    @property
    def optimizer(self) -> PagedOptimizer:
        return self.arms[1]

    def break_at(self, number: int, operation: str, error: BaseException) -> None:
        self.device.arm(number, error)
        with pytest.raises(type(error)) as caught:
            self.optimizer.step()
        assert caught.value is error
        assert self.device.operations[number] == operation

    def assert_nothing_in_flight(self) -> None:
        assert [stream.name for stream in self.lazy._streams.values() if stream.queue] == []
        for engine in self.optimizer._engines.values():
            assert not engine._pipeline._flights
            assert not engine._pipeline._open
            assert not engine._actives

    def assert_replay(self) -> None:
        """What was launched counts, once, and from there on both go the same way."""
        expected, optimizer = self.arms
        replay(self.launches, optimizer, self.found[1], expected, self.found[0])
        for step in (51, 52):
            for one in self.arms:
                train(one, [step])
        optimizer.state_dict()
        assert_same_bits(optimizer, expected)


@dataclass
class Breaker:
    """Runs one kind of step as often as it has operations."""

    name: str
    paging: Paging
    kind: str
    monkeypatch: pytest.MonkeyPatch

    def trial(self, seed: int) -> Trial:
        trial = Trial(self.name, self.paging, seed, self.kind)
        trial.prepare(self.monkeypatch)
        return trial

    def operations(self) -> list[str]:
        """Those of a step that goes well."""
        trial = self.trial(0)
        trial.device.arm(None)
        trial.optimizer.step()
        assert is_cut(trial.optimizer) == (self.paging.strategy == "streamed")
        return trial.device.operations

    def error(self, number: int) -> BaseException:
        """One of two by turns; the 8-bit class gets at each operation the one the other does not.

        The way out tells apart only errors that are an `Exception` and those that are not.
        """
        odd = (number + (self.name == "PagedAdamW8bit")) % 2
        return KeyboardInterrupt() if odd else RuntimeError("bus")

    def break_each(self, *, on_the_way_home: bool) -> Counter[str]:
        """Return the operations at which a step was broken."""
        found = self.operations()
        home = homeward(found)
        broken: Counter[str] = Counter()
        for number, operation in enumerate(found):
            if (number in home) == on_the_way_home:
                trial = self.trial(number)
                trial.break_at(number, operation, self.error(number))
                trial.assert_nothing_in_flight()
                trial.assert_replay()
                broken[operation] += 1
        return broken


@pytest.fixture(params=["PagedAdamW", "PagedAdamW8bit"])
def breaker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(kind: str, strategy: str, write_back: str) -> Breaker:
        staging = 4 * CHUNK[request.param]
        paging = Paging(strategy=strategy, write_back=write_back, staging=staging)
        return Breaker(request.param, paging, kind, monkeypatch)

    return make


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize(("kind", "strategy", "write_back"), MODES)
def test_every_operation(kind: str, strategy: str, write_back: str, breaker: Any) -> None:
    broken = breaker(kind, strategy, write_back).break_each(on_the_way_home=False)
    streamed, moves = strategy == "streamed", strategy != "sequential"
    where = {"streamed": "fetch", "lookahead": "prefetch", "sequential": "compute"}[strategy]
    assert broken[f"{'copy' if streamed else 'prefetch'} on {where}"] >= (
        4 if kind != CHANGED else 2
    )
    assert broken[f"{where} records"] > 1
    assert broken["caller waits for compute"] == broken["compute waits for caller"] == 1
    assert (broken[f"compute waits for {where}"] > 1) or not moves
    assert (broken["synchronize"] > 0) == (not moves)
    assert (broken["write_back records"] > 1) == streamed
    assert (broken["pin"], broken["slot"]) == ((1, 4) if streamed and kind == FIRST else (0, 0))
    assert broken["managed"] == (8 if kind == FIRST and not streamed else 0)
    assert (broken["host waits for compute"] > 0) == (write_back == "before_return")


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("kind", [UNCHANGED, CHANGED, FIRST, TWICE])
@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
def test_every_operation_on_the_way_home(kind: str, write_back: str, breaker: Any) -> None:
    """The chunk was updated in its slot: that slot has the only copy of its new state."""
    broken = breaker(kind, "streamed", write_back).break_each(on_the_way_home=True)
    assert set(broken) == {"compute records", "write_back waits for compute", "copy on write_back"}
