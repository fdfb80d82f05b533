from __future__ import annotations

import pytest

from pageahead.experiment.arms import MANAGED_STRATEGIES
from pageahead.experiment.cells import CELLS
from pageahead.experiment.planning import MANAGED_LIMIT_BYTES, plan_cell

ALL = ["streamed", "lookahead", "sequential"]


def test_streamed_and_one_managed_strategy_share_a_process() -> None:
    plan = plan_cell(CELLS["adamw32/8x1Mi"], ["streamed", "lookahead"], "cuda")
    assert plan.processes == [["streamed", "lookahead"]]
    assert plan.left_out == {}


def test_two_managed_strategies_never_do() -> None:
    plan = plan_cell(CELLS["adamw32/8x1Mi"], ALL, "cuda")
    assert plan.processes == [["streamed", "lookahead"], ["sequential"]]


def test_a_strategy_named_twice_is_measured_once() -> None:
    assert plan_cell(CELLS["lion8/8x1Mi"], ["streamed"] * 2, "cpu").processes == [["streamed"]]


def test_exactly_the_limit_is_allowed() -> None:
    cell = CELLS["adamw32/32x8Mi"]
    assert 2 * cell.state_bytes("cuda") == MANAGED_LIMIT_BYTES
    assert plan_cell(cell, ALL, "cuda").left_out == {}


def test_above_the_limit_managed_strategies_are_left_out_with_the_reason() -> None:
    plan = plan_cell(CELLS["adamw8/llama-3.2-1b"], ALL, "cuda")
    assert plan.processes == [["streamed"]]
    assert set(plan.left_out) == {"lookahead", "sequential"}
    assert "4.60 GiB" in plan.left_out["lookahead"]
    assert plan_cell(CELLS["adamw8/llama-3.2-1b"], ["lookahead"], "cuda").processes == []
    assert plan_cell(CELLS["adamw8/llama-3.2-1b"], ALL, "cpu").left_out == {}


@pytest.mark.parametrize("name", CELLS)
def test_no_process_exceeds_the_limit(name) -> None:
    cell = CELLS[name]
    for strategies in plan_cell(cell, ALL, "cuda").processes:
        managed = [strategy for strategy in strategies if strategy in MANAGED_STRATEGIES]
        assert len(managed) <= 1
        assert (cell.optimizer.legacy_pages + len(managed)) * cell.state_bytes(
            "cuda"
        ) <= MANAGED_LIMIT_BYTES
