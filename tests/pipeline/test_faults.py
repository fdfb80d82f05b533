"""Every fault of the pipeline is caught, by the order of its accesses or by what it computes.

Each fault runs through `SCENARIOS` on the recording device until something shows: a conflict (two
accesses in no order), bits (other results than bitsandbytes'), schedule (a promise of `lookahead`
or `sequential`), or error (an exception). Faults that make no difference are named below with the
reason, and it is checked that they make none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from pageahead.device.recording import RecordingDevice
from pageahead.device.trace import Operation
from pageahead.memory.layout import StateShape
from pageahead.pipeline import Pipeline
from pageahead.pipeline.ordering import find_conflicts
from tests.pipeline.bare import Bare, BareScenario, BareStep
from tests.pipeline.faults import Fault, edges, every_fault
from tests.pipeline.recorded import record
from tests.pipeline.scenarios import SCENARIOS, Scenario, Snapshot, expected

SHAPES = (
    StateShape(1500, ((1, 1), (1, 1))),
    StateShape(700, ((1, 1),)),
    StateShape(5000, ((2, 1), (1, 1))),
    StateShape(300, ((1, 1),)),
)
PUSHED = tuple(
    BareScenario(
        SHAPES,
        (
            BareStep((0, 1, 2, 3)),
            BareStep((0, 1, 2, 3), swaps=((0, 7), (2, 5)), primed=True),
            BareStep((0, 1, 2, 3), swaps=((1, 6), (3, 4)), primed=True),
            BareStep((0, 2, 3), swaps=((0, 3),)),
        ),
        resident=(3,),
        overlap=overlap,
    )
    for overlap in (False, True)
)

FAULTS = every_fault()
caught: dict[str, str] = {}


@cache
def wanted(scenario: Scenario) -> list[Snapshot]:
    return expected(scenario)


def evidence(fault: Fault) -> Iterator[str]:
    """What shows that something is wrong, scenario by scenario."""
    pipeline = fault.pipeline()
    for scenario in SCENARIOS:
        outcome, error = record(scenario, pipeline=pipeline)
        found = (
            _raised(error)
            or _conflict(outcome.device.trace)
            or next((f"schedule: {promise}" for promise in outcome.promises), None)
            or next((f"bits: {one}" for one in outcome.differences(wanted(scenario))), None)
        )
        if found is not None:
            yield f"{found} ({scenario.name})"
    for pushed in PUSHED:
        bare = Bare(pushed, pipeline)
        try:
            bare.run()
        except Exception as error:
            found = _raised(error)
        else:
            found = _conflict(bare.device.trace)
            found = found or next((f"bits: {one}" for one in bare.wrong()), None)
        if found is not None:
            yield f"{found} (chunks in another order)"


def _raised(error: BaseException | None) -> str | None:
    if isinstance(error, NameError | SyntaxError):
        raise error  # not what the fault is about
    return None if error is None else f"error: {type(error).__name__}"


def _conflict(trace: list[Operation]) -> str | None:
    for one in find_conflicts(trace):
        return "conflict: " + ", ".join(
            f"{operation.agent} {operation.what}" for operation in (one.earlier, one.later)
        )
    return None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault(fault: Fault) -> None:
    found = next(evidence(fault), None)
    assert found is not None, "nothing shows"
    caught[fault.name] = found


def test_the_pipeline_without_a_fault_passes() -> None:
    shipped = Fault("none", "from pageahead.pipeline.pipeline import *")
    assert shipped.pipeline() is Pipeline
    assert list(evidence(shipped)) == []


def test_faults_have_a_name_each() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)


def test_every_wait_and_record_of_a_source_is_a_fault() -> None:
    source = """
class Pipeline:
    def step(self):
        self.a.wait(self.b.record())
        if self.c:
            self.copy(1)
            self.last = self.b.record()
        self.last.synchronize()
"""
    assert [fault.name for fault in edges(source)] == [
        "step: self.a.wait(self.b.record()) left out",
        "step: self.last.synchronize() left out",
        "step: self.b.record() of nothing",
        "step: self.b.record() #2 of nothing",
        "step: self.b.record() #2 before self.copy(1)",
    ]
    left_out, _, nothing, _, early = (fault.source for fault in edges(source))
    assert "        None\n        if self.c:" in left_out
    assert "        self.a.wait(self._device.stream('quiet').record())\n" in nothing
    assert (
        "            _early = self.b.record()\n"
        "            self.copy(1)\n"
        "            self.last = _early\n" in early
    )


def test_gradients_freed_in_backward_are_kept_until_their_update_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecordingDevice, "keep", lambda self, tensor: None)
    for scenario in SCENARIOS:
        if scenario.free_grads:
            outcome, _ = record(scenario)
            assert outcome.conflicts()


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what was planted and how it was caught; needs the tests above."""
    if not caught:
        pytest.skip("no fault was run before this")
    with capsys.disabled():
        print(f"\n\nfaults in the order of accesses: {len(caught)} caught / {len(FAULTS)} planted")
        for fault in FAULTS:
            print(f"  {fault.name}\n      {caught.get(fault.name, 'not run')}")
