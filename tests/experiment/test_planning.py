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


def test_the_limit_does_not_grow_with_the_gpu() -> None:
    llama = CELLS["adamw8/llama-3.2-1b"]
    left_out = plan_cell(llama, ALL, "cuda", gpu_bytes=140 << 30).left_out
    assert "the limit is 4 GiB" in left_out["lookahead"]


@pytest.mark.parametrize(
    ("device", "asked", "gpu", "host", "said"),
    [
        ("cpu", True, None, 100, "only a GPU's"),
        ("cuda", False, 141, 100, "only with --oversubscribe"),
        ("cuda", True, 141, 9, "takes 10 GiB of host memory, and 9 GiB"),
        ("cuda", True, 7, 100, "takes a GPU of 8 GiB, and this has 7"),
        ("cuda", True, 141, 100, None),
    ],
)
def test_oversubscribed_only_where_asked_for_and_allowed(
    monkeypatch, device, asked, gpu, host, said
) -> None:
    monkeypatch.setattr("pageahead.experiment.planning.available_bytes", lambda: host << 30)
    plan = plan_cell(
        CELLS["adamw32/32x8Mi@oversubscribed"],
        ["streamed", "lookahead"],
        device,
        gpu_bytes=gpu and gpu << 30,
        oversubscribe=asked,
    )
    if said is None:
        assert plan.processes == [["streamed", "lookahead"]]
    else:
        assert plan.processes == []
        assert all(said in reason for reason in plan.left_out.values())
        assert set(plan.left_out) == {"streamed", "lookahead"}


@pytest.mark.parametrize("name", CELLS)
def test_no_process_exceeds_the_limit(name) -> None:
    cell = CELLS[name]
    for strategies in plan_cell(cell, ALL, "cuda").processes:
        managed = [strategy for strategy in strategies if strategy in MANAGED_STRATEGIES]
        assert len(managed) <= 1
        assert (cell.optimizer.legacy_pages + len(managed)) * cell.state_bytes(
            "cuda"
        ) <= MANAGED_LIMIT_BYTES
