from __future__ import annotations

import pytest
import torch

from pageahead import Route
from pageahead.experiment.arms import Arm, RouteError, Workload, check_routes
from pageahead.experiment.cells import CELLS
from pageahead.experiment.compare import compare

CPU = torch.device("cpu")
SHAPES = [(131_072,), (256,), (256, 512)]
LION8 = CELLS["lion8/8x1Mi"].optimizer


def workload(seed: int = 3) -> Workload:
    return Workload(SHAPES, CPU, seed, sets=2)


def test_the_same_seed_makes_the_same_values_and_another_one_others() -> None:
    one, same, other = workload(), workload(), workload(seed=4)
    assert torch.equal(one.parameters()[2], same.parameters()[2])
    assert torch.equal(one.gradients[1][0], same.gradients[1][0])
    assert not torch.equal(one.parameters()[2], other.parameters()[2])
    assert not torch.equal(one.gradients[0][0], one.gradients[1][0])
    assert one.parameters()[0].dtype == torch.float16


def test_arms_share_gradients_but_not_parameters() -> None:
    shared = workload()
    legacy = Arm.legacy(LION8, shared, "cpu")
    ours = Arm.candidate(LION8, "streamed", shared, "cpu")
    for turn in range(3):
        for arm in (legacy, ours):
            arm.prepare(turn)
            arm.step()
    theirs, mine = (arm.optimizer.param_groups[0]["params"] for arm in (legacy, ours))
    for left, right, gradient in zip(theirs, mine, shared.gradients[0], strict=True):
        assert left.grad is right.grad is gradient
        assert left.data_ptr() != right.data_ptr()
    assert compare(legacy.optimizer, ours.optimizer).equal
    assert not torch.equal(theirs[0], shared.parameters()[0])
    assert (legacy.class_name, ours.class_name) == (
        "bitsandbytes.PagedLion8bit",
        "pageahead.PagedLion8bit",
    )


def test_a_candidate_keeps_nothing_on_the_device_whatever_the_environment_says(
    monkeypatch,
) -> None:
    monkeypatch.setenv("PAGEAHEAD_HBM_BUDGET", "1.0")
    monkeypatch.setenv("PAGEAHEAD_WRITE_BACK", "overlap")
    monkeypatch.setenv("PAGEAHEAD_STRATEGY", "sequential")
    paging = Arm.candidate(LION8, "streamed", workload(), "cpu").optimizer.paging
    assert (paging.hbm_budget, paging.write_back) == (0, "before_return")
    assert (paging.strategy, paging.allow_oversubscription) == ("streamed", False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_managed_are_legacy_and_the_managed_strategies_on_a_gpu_only(device) -> None:
    arms = [
        Arm.legacy(LION8, workload(), device),
        *(
            Arm.candidate(LION8, strategy, workload(), device)
            for strategy in ("streamed", "lookahead", "sequential")
        ),
    ]
    on_gpu = device == "cuda"
    assert [arm.managed for arm in arms] == [on_gpu, False, on_gpu, on_gpu]


def test_managed_state_is_brought_home_before_each_step_but_the_first(monkeypatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronize"))
    monkeypatch.setattr(
        "pageahead.experiment.residency.HostResidency.restore", lambda self: order.append("touch")
    )
    arm = Arm.candidate(LION8, "lookahead", workload(), "cuda")
    arm.prepare(0)
    assert order == []
    arm.step()
    arm.prepare(1)
    assert order == ["synchronize", "touch", "synchronize"]
    # To the CPU device all state is on the CPU, the small parameter's too.
    assert arm.managed_bytes >= 2 * 131_072


def route(path: str, state_bytes: int, reason: str) -> Route:
    return Route(0, 0, (state_bytes,), state_bytes, "cpu", state_bytes, path, reason)


def test_routes_are_summed_up_by_path() -> None:
    summary = check_routes(
        [
            route("streamed", 100, "large"),
            route("resident", 1, "small"),
            route("streamed", 50, "large"),
        ],
        "streamed",
        150,
    )
    assert summary["streamed"].parameters == 2
    assert summary["streamed"].state_bytes == 150
    assert summary["streamed"].reasons == ["large"]
    assert summary["resident"].state_bytes == 1


@pytest.mark.parametrize("expected", [99, 101, 150])
def test_state_on_another_path_is_refused_with_that_path_and_its_reason(expected) -> None:
    routes = [route("lookahead", 100, "large"), route("sequential", 50, "only one is active")]
    with pytest.raises(RouteError, match=r"sequential: 50 bytes \(only one is active\)"):
        check_routes(routes, "lookahead", expected)


def test_none_on_the_path_is_refused() -> None:
    with pytest.raises(RouteError, match="150 bytes of state should be streamed, 0 are"):
        check_routes([route("resident", 150, "within budget")], "streamed", 150)
