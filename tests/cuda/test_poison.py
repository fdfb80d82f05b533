"""Faults of the pipeline show on a GPU, and the pipeline without one computes the same bits.

Each fault runs through the scenarios while one stream after the other is late, until a bit differs
from bitsandbytes' optimizer without paging. See `tests.cuda.poison` for how, and
`tests.pipeline.faults` for what.

``PAGEAHEAD_FAULTS_OUT`` names a file for a summary in JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from pageahead.pipeline import Pipeline
from tests.pipeline.faults import Fault, every_fault
from tests.pipeline.scenarios import SCENARIOS, Scenario, Snapshot, expected

from .poison import LATE, Poison

OUT = "PAGEAHEAD_FAULTS_OUT"

_IN_VAIN = "what was fetched in vain is in slots that nobody reads, whatever it holds"
_ONE_ORDER = "shows only where chunks are advanced in another order than the plan's"
HIDDEN = {
    "advance: self._device.synchronize() left out": (
        "prefetch and update are on one stream; that the host waits in between is bitsandbytes' "
        "schedule, not an order that results depend on"
    ),
    "lookahead looks two ahead": "a schedule; managed memory is coherent however it is prefetched",
    "_recall: self._compute.wait(self._fetch.record()) left out": _IN_VAIN,
    "_recall: self._fetch.record() of nothing": _IN_VAIN,
    "what was sent for in vain is forgotten": _IN_VAIN,
    "a slot is free as soon as it is filled": _ONE_ORDER,
    "the last write-back is known only until the plan changes": (
        "every step that follows another is primed, which waits for that write-back first"
    ),
}
"""Faults that cannot show here, and why. The checker catches what makes a difference at all."""

FAULTS = every_fault()
caught: dict[str, str] = {}


@cache
def wanted(scenario: Scenario) -> list[Snapshot]:
    return expected(scenario, "cuda")


@pytest.fixture(scope="module")
def poison() -> Iterator[Poison]:
    poison = Poison()
    for scenario in SCENARIOS:  # so that no later run has to ask CUDA for memory, which waits
        poison.run(scenario, "nobody", Pipeline, wanted(scenario))
    yield poison
    torch.cuda.synchronize()


@pytest.mark.parametrize("late", LATE)
def test_the_pipeline_is_right_whoever_is_late(poison: Poison, late: str) -> None:
    for scenario in SCENARIOS:
        found = poison.run(scenario, late, Pipeline, wanted(scenario))
        assert found == "", f"{scenario.name}: {found}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault(poison: Poison, fault: Fault) -> None:
    if fault.name in HIDDEN:
        pytest.skip(HIDDEN[fault.name])
    pipeline = fault.pipeline()
    for scenario in SCENARIOS:
        for late in LATE[1:]:  # what shows when nobody is late shows when somebody is
            found = poison.run(scenario, late, pipeline, wanted(scenario))
            if found:
                caught[fault.name] = f"{found} ({scenario.name}; late: {late})"
                return
    pytest.fail("nothing shows")


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what was planted and how it showed; needs the tests above."""
    assert set(HIDDEN) <= {fault.name for fault in FAULTS}, "a reason for no fault"
    if not caught:
        pytest.skip("no fault was run before this")
    name = torch.cuda.get_device_name()
    rows = [
        {
            "fault": fault.name,
            "caught": caught.get(fault.name),
            "hidden": HIDDEN.get(fault.name),
        }
        for fault in FAULTS
    ]
    with capsys.disabled():
        print(
            f"\n\nfaults on {name}: {len(caught)} caught / {len(FAULTS)} planted, "
            f"{len(HIDDEN)} cannot show"
        )
        for row in rows:
            hidden = f"cannot show: {row['hidden']}" if row["hidden"] else "MISSED"
            print(f"  {row['fault']}\n      {row['caught'] or hidden}")
    if OUT in os.environ:
        summary = {
            "device": name,
            "planted": len(FAULTS),
            "caught": len(caught),
            "hidden": len(HIDDEN),
            "scenarios": [scenario.name for scenario in SCENARIOS],
            "late": list(LATE),
            "faults": rows,
        }
        Path(os.environ[OUT]).write_text(json.dumps(summary, indent=1) + "\n")
