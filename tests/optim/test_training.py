"""What training scripts do between steps: schedules, closures, groups, odd parameters."""

from __future__ import annotations

import warnings

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager

from pageahead import Paging
from tests.support import (
    MIB,
    STRATEGIES,
    TINY_RING,
    assert_same_bits,
    legacy,
    ours,
    parameters,
    paths,
    set_gradients,
    train,
    unique_parameters,
)

NAMES = ["PagedAdamW", "PagedAdamW8bit", "PagedLion8bit", "PagedAdEMAMix", "PagedAdEMAMix8bit"]


@pytest.fixture(params=STRATEGIES)
def paging(request: pytest.FixtureRequest) -> Paging:
    return Paging(strategy=request.param, staging=MIB)


def test_no_warnings(paging: Paging) -> None:
    """bitsandbytes' own paged classes warn on CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(ours("PagedAdamW8bit", parameters(120_000, 130_000), paging=paging), range(2))


@pytest.mark.parametrize("name", NAMES)
def test_learning_rate_changed_between_steps(name: str, paging: Paging) -> None:
    arms = [
        legacy(name, parameters(120_000, 300)),
        ours(name, parameters(120_000, 300), paging=paging),
    ]
    for optimizer in arms:
        for step, lr in enumerate((1e-3, 1e-1, 0.0, 1e-2)):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.param_groups[0]["weight_decay"] = lr
            train(optimizer, [step])
    assert_same_bits(arms[1], arms[0])


def test_learning_rate_schedule(paging: Paging) -> None:
    arms = [
        legacy("PagedAdamW", parameters(120_000, 300), lr=0.1),
        ours("PagedAdamW", parameters(120_000, 300), lr=0.1, paging=paging),
    ]
    rates = []
    for optimizer in arms:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(4):
            train(optimizer, [step])
            schedule.step()
        rates.append(schedule.get_last_lr())
    assert rates[0] == rates[1] == [0.1 * 0.5**4]
    assert_same_bits(arms[1], arms[0])


def test_step_hooks_run(paging: Paging) -> None:
    optimizer = ours("PagedAdamW", parameters(120_000), paging=paging)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    train(optimizer, [0])
    assert called == ["before", "after"]


def test_closure_runs_once_with_gradients_and_its_loss_is_returned(paging: Paging) -> None:
    arms = [
        legacy("PagedAdamW", parameters(120_000)),
        ours("PagedAdamW", parameters(120_000), paging=paging),
    ]
    losses: list[list[float]] = []
    for optimizer in arms:
        (parameter,) = unique_parameters(optimizer)
        seen: list[float] = []

        def closure(
            optimizer: torch.optim.Optimizer = optimizer,
            parameter: torch.Tensor = parameter,
            seen: list[float] = seen,
        ) -> torch.Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = (parameter**2).sum()
            loss.backward()
            seen.append(loss.item())
            return loss

        for _ in range(3):
            assert optimizer.step(closure).item() == seen[-1]
        losses.append(seen)
    assert losses[0] == losses[1]
    assert len(losses[1]) == 3
    assert losses[1][-1] < losses[1][0]
    assert_same_bits(arms[1], arms[0])


def test_without_closure_nothing_is_returned() -> None:
    optimizer = ours("PagedAdamW", parameters(120_000))
    assert optimizer.step() is None
    assert not optimizer.state  # no gradient, no state
    set_gradients(unique_parameters(optimizer), 0)
    assert optimizer.step() is None


def test_groups_with_settings_of_their_own(paging: Paging) -> None:
    arms = []
    for make in (legacy, ours):
        found = parameters(120_000, 300, 130_000, 100_000)
        groups = [
            {"params": found[:2], "lr": 1e-1},
            {"params": found[2:3], "betas": (0.5, 0.6), "weight_decay": 0.3},
            {"params": found[3:], "eps": 1e-2},
        ]
        more = {} if make is legacy else {"paging": paging}
        arms.append(make("PagedAdamW", groups, **more))
        train(arms[-1], range(3))
    assert_same_bits(arms[1], arms[0])


@pytest.mark.parametrize("name", NAMES)
def test_group_added_after_steps(name: str, paging: Paging) -> None:
    arms = [
        legacy(name, parameters(120_000, 300)),
        ours(name, parameters(120_000, 300), paging=paging),
    ]
    for optimizer in arms:
        train(optimizer, range(2))
        optimizer.add_param_group({"params": parameters(150_000, 100_000, 8, seed=7), "lr": 1e-2})
        train(optimizer, range(2, 5))
    assert_same_bits(arms[1], arms[0])
    assert paths(arms[1]) == [  # type: ignore[arg-type]
        paging.strategy,
        "resident",
        paging.strategy,
        paging.strategy,
        "resident",
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
def test_parameter_listed_twice_is_stepped_twice(
    name: str, write_back: str, paging: Paging
) -> None:
    paging = Paging(strategy=paging.strategy, staging=MIB, write_back=write_back)
    arms = []
    for make, more in ((legacy, {}), (ours, {"paging": paging})):
        large, small, other, tiny = parameters(120_001, 200, 100_000, 0)
        with pytest.warns(UserWarning, match="duplicate parameters"):
            arms.append(make(name, [large, small, large, other, small, tiny, large, tiny], **more))
        train(arms[-1], range(3))
    arms[1].state_dict()  # waits for write-backs
    assert_same_bits(arms[1], arms[0])
    steps = [state["step"] for state in arms[1].state.values()]
    assert steps == [9, 6, 3, 6]


def test_zero_size_parameters_count_steps(paging: Paging) -> None:
    arms = [
        make("PagedAdamW8bit", parameters(0, 120_000, (3, 0)), **more)
        for make, more in ((legacy, {}), (ours, {"paging": paging}))
    ]
    for optimizer in arms:
        train(optimizer, range(2))
    assert_same_bits(arms[1], arms[0])
    assert [state["step"] for state in arms[1].state.values()] == [2, 2, 2]


def test_only_zero_size_parameters(paging: Paging) -> None:
    optimizer = ours("PagedLion", parameters(0), paging=paging)
    train(optimizer, range(2))
    assert paths(optimizer) == ["resident"]


def test_frozen_parameters_are_left_alone(paging: Paging) -> None:
    arms = []
    for make, more in ((legacy, {}), (ours, {"paging": paging})):
        found = parameters(120_000, 110_000, 130_000)
        found[2].requires_grad_(False)
        optimizer = make("PagedAdamW", found, **more)
        for step in range(2):
            set_gradients(found[:2], step)
            optimizer.step()
        arms.append(optimizer)
        assert torch.equal(found[2], parameters(120_000, 110_000, 130_000)[2])
    assert_same_bits(arms[1], arms[0])
    assert paths(arms[1]) == [paging.strategy, paging.strategy, "none"]


def test_gradients_come_and_go(paging: Paging) -> None:
    """Parameters that appear later get state then; those that pause keep theirs."""
    arms = [
        legacy("PagedAdamW8bit", parameters(*[110_000] * 5)),
        ours("PagedAdamW8bit", parameters(*[110_000] * 5), paging=paging),
    ]
    schedule = ([1, 2, 3, 4], [0, 1, 2], [0, 1, 2, 3], [], [4], [0, 1, 2, 3, 4], [], [1, 3])
    for step, absent in enumerate(schedule):
        for optimizer in arms:
            train(optimizer, [step], absent)
        assert_same_bits(arms[1], arms[0])


def test_gradients_may_be_written_in_place_or_anew(paging: Paging) -> None:
    """Nothing of a gradient is kept from one step to the next."""
    arms = [
        legacy("PagedAdamW", parameters(120_000)),
        ours("PagedAdamW", parameters(120_000), paging=paging),
    ]
    for optimizer in arms:
        (parameter,) = unique_parameters(optimizer)
        parameter.grad = torch.ones(120_000)
        optimizer.step()
        parameter.grad.mul_(-3.0)
        optimizer.step()
        parameter.grad = torch.full((120_000,), 0.5)
        optimizer.step()
    assert_same_bits(arms[1], arms[0])


def test_parameters_may_be_given_new_memory(paging: Paging) -> None:
    """As when a model is loaded with ``assign`` or flattened between steps."""
    arms = [
        legacy("PagedAdamW", parameters(120_000)),
        ours("PagedAdamW", parameters(120_000), paging=paging),
    ]
    for optimizer in arms:
        (parameter,) = unique_parameters(optimizer)
        for step in range(3):
            parameter.data = parameter.data.clone() + step
            train(optimizer, [step])
    assert_same_bits(arms[1], arms[0])


@pytest.mark.parametrize("name", ["PagedAdamW", "PagedAdamW8bit", "PagedAdEMAMix8bit"])
@pytest.mark.parametrize("shape", [(20, 12, 5, 5), (64, 70, 6, 5)], ids=["small", "large"])
def test_channels_last(name: str, shape: tuple[int, ...], paging: Paging) -> None:
    """On CPU bitsandbytes' operators work in logical order, so blocks hold the same elements."""
    arms = []
    for make, more in ((legacy, {}), (ours, {"paging": paging})):
        (parameter,) = parameters(shape)
        parameter.data = parameter.data.to(memory_format=torch.channels_last)
        optimizer = make(name, [parameter], **more)
        for step in range(3):
            set_gradients([parameter], step)
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to(memory_format=torch.channels_last)
            optimizer.step()
        assert parameter.is_contiguous()  # replaced, as bitsandbytes does
        arms.append(optimizer)
    plain = legacy(name, parameters(shape))
    train(plain, range(3))
    assert_same_bits(arms[1], arms[0])
    assert_same_bits(arms[1], plain)


def test_state_of_a_channels_last_parameter_is_contiguous(paging: Paging) -> None:
    """Kernels run over its bytes as they run over those of the contiguous parameter."""
    (parameter,) = parameters((20, 12, 5, 5))
    parameter.data = parameter.data.to(memory_format=torch.channels_last)
    optimizer = ours("PagedAdamW", [parameter], paging=paging)
    train(optimizer, range(1))
    assert optimizer.state[parameter]["state1"].is_contiguous()


@pytest.mark.parametrize("name", ["PagedAdamW", "PagedLion8bit"])
def test_views_of_other_tensors(name: str, paging: Paging) -> None:
    """Transposed parameters, and gradients with strides of their own."""
    arms = []
    for make, more in ((legacy, {}), (ours, {"paging": paging})):
        (whole,) = parameters((500, 300))
        parameter = torch.nn.Parameter(whole.detach().t())
        optimizer = make(name, [parameter], **more)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            parameter.grad = torch.randn(500, 600, generator=generator)[:, ::2].t()
            optimizer.step()
        parameter.grad = torch.ones(1, 1).expand(300, 500)  # one element, stride 0
        optimizer.step()
        arms.append(optimizer)
    assert_same_bits(arms[1], arms[0])


# --- overrides ------------------------------------------------------------------------------------


def test_width_of_one_parameter_overridden(
    optim_manager: GlobalOptimManager, paging: Paging
) -> None:
    arms = []
    for make, more in ((legacy, {}), (ours, {"paging": paging})):
        optim_manager.initialize()
        found = parameters(120_000, 130_000)
        optim_manager.register_parameters(found)
        optim_manager.override_config(found[1], "optim_bits", 32)
        arms.append(make("PagedAdamW8bit", found, **more))
        train(arms[-1], range(3))
    assert_same_bits(arms[1], arms[0])
    widths = [state["state1"].dtype for state in arms[1].state.values()]
    assert widths == [torch.uint8, torch.float32]


def test_learning_rate_of_one_parameter_overridden(
    optim_manager: GlobalOptimManager, paging: Paging
) -> None:
    arms = []
    for make, more in ((legacy, {}), (ours, {"paging": paging})):
        optim_manager.initialize()
        found = parameters(120_000, 120_000)
        with torch.no_grad():
            found[1].copy_(found[0])
        optim_manager.override_config(found[1], key_value_dict={"lr": 0.5, "betas": (0.1, 0.2)})
        arms.append(make("PagedAdamW", found, **more))
        train(arms[-1], range(3))
        assert not torch.equal(found[0], found[1])
    assert_same_bits(arms[1], arms[0])


def test_module_overrides_are_applied_at_the_first_step(
    optim_manager: GlobalOptimManager, paging: Paging
) -> None:
    """Transformers' Trainer keeps embeddings at 32 bits this way."""
    arms = []
    for make, more in ((legacy, {}), (ours, {"paging": paging})):
        optim_manager.initialize()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(1_000, 120), torch.nn.Linear(400, 300))
        optim_manager.register_module_override(model[0], "weight", {"optim_bits": 32})
        arms.append(make("PagedAdamW8bit", model.parameters(), **more))
        train(arms[-1], range(3))
    assert_same_bits(arms[1], arms[0])
    widths = [state["state1"].dtype for state in arms[1].state.values()]
    assert widths == [torch.float32, torch.uint8, torch.float32]


def test_a_model_learns() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    optimizer = ours("PagedAdamW8bit", model.parameters(), lr=1e-3, paging=TINY_RING)
    data = torch.randn(64, 256)
    target = data[:, :1].sin()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert "streamed" in paths(optimizer)
    assert losses[-1] < 0.2 * losses[0]
