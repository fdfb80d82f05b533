"""Updates during backward, in programs that do something else than the plain loop."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from pageahead import Paging
from pageahead.optim import plan
from tests.optim.test_backward import WIDTH, bits_of, goes_on, in_backward, loss_of, net, train
from tests.support import assert_same_bits, legacy, ours


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks for each of these parameters."""
    monkeypatch.setattr(plan, "SMALLEST_CHUNK", 128 << 10)
    monkeypatch.setattr(plan, "LARGEST_CHUNK", 128 << 10)


# --- a step that is tried again -------------------------------------------------------------------


def test_a_refused_step_stays_refused() -> None:
    """It would use gradients a second time that backward has used."""
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    loss_of(model, 0).backward()
    before = bits_of(model)
    optimizer.param_groups[0]["lr"] = 0.5
    for lr in (0.5, 1e-2):
        optimizer.param_groups[0]["lr"] = lr
        with pytest.raises(RuntimeError, match=r"lr of group 0 was 0\.01"):
            optimizer.step()
    assert bits_of(model) == before
    goes_on(model, optimizer)


def test_a_step_that_failed_is_not_repeated() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    extra = nn.Parameter(torch.randn(WIDTH, WIDTH))
    optimizer.add_param_group({"params": [extra]})
    loss_of(model, 0).backward()
    before = bits_of(model)
    extra.grad = torch.randn(WIDTH, WIDTH).to_sparse()
    with pytest.raises(TypeError, match=r"parameter 0 of group 1 .* Already updated") as caught:
        optimizer.step()
    assert "Nothing was updated" not in str(caught.value)
    extra.grad = torch.randn(WIDTH, WIDTH)
    with pytest.raises(RuntimeError, match=r"step\(\) failed .*Already updated"):
        optimizer.step()
    assert bits_of(model) == before
    goes_on(model, optimizer)


def test_a_step_that_failed_before_any_update_is_repeated() -> None:
    one, other = (nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(2))
    optimizer = ours("PagedAdamW8bit", [one, other], paging=Paging(in_backward=True))
    one.grad = torch.ones(WIDTH, WIDTH).to_sparse()
    with pytest.raises(TypeError, match=r"Nothing was updated"):
        optimizer.step()
    one.grad = torch.ones(WIDTH, WIDTH)
    optimizer.step()
    assert not torch.equal(one, other)


def test_state_loaded_after_the_updates() -> None:
    """`step()` would update a second time, by the same gradients."""
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    train(model, optimizer, ({},))
    saved = copy.deepcopy(optimizer.state_dict())
    loss_of(model, 1).backward()
    before = bits_of(model)
    optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) came between .*Already updated"):
        optimizer.step()
    assert bits_of(model) == before
    goes_on(model, optimizer)


def test_state_loaded_before_any_update() -> None:
    """With gradients that only accumulated it is what bitsandbytes does."""
    theirs, mine = net(), net()
    expected = legacy("PagedAdamW8bit", theirs.parameters(), lr=1e-2)
    optimizer = in_backward("PagedAdamW8bit", mine)
    for model, one in ((theirs, expected), (mine, optimizer)):
        train(model, one, ({},))
        saved = copy.deepcopy(one.state_dict())
        train(model, one, ({},))
        with optimizer.accumulate():
            loss_of(model, 1).backward()
        one.load_state_dict(saved)
        one.step()
        one.zero_grad()
        train(model, one, ({},))
    assert_same_bits(optimizer, expected)


# --- gradients that are freed ---------------------------------------------------------------------


def test_freed_gradients_are_not_stepped_over() -> None:
    """They are NaN."""
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model, free_grads=True)
    train(model, optimizer, ({},))
    loss_of(model, 1).backward()
    optimizer.step()
    before = bits_of(model)
    with pytest.raises(RuntimeError, match="used by an earlier step and freed; call zero_grad"):
        optimizer.step()
    assert bits_of(model) == before
    goes_on(model, optimizer)


def test_freed_gradients_of_an_earlier_step() -> None:
    """Of parameters that the backward after it does not reach."""
    first, second = (nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(2))
    paging = Paging(in_backward=True, free_grads=True)
    optimizer = ours("PagedAdamW8bit", [first, second], paging=paging)
    (first**2).sum().backward()
    optimizer.step()
    before = first.detach().clone(), second.detach().clone()
    with pytest.raises(RuntimeError, match=r"backward\(\) .* parameter 0 of group 0 were .* freed"):
        (second**2).sum().backward()
    assert torch.equal(first, before[0])
    assert torch.equal(second, before[1])
    optimizer.zero_grad()
    (second**2).sum().backward()
    optimizer.step()


def test_freed_gradients_are_not_added_to_out_of_place() -> None:
    """As `create_graph` has autograd do: nothing raises there, and the sum is NaN."""
    model = net()
    optimizer = in_backward("PagedAdamW", model, free_grads=True)
    loss_of(model, 0).backward(create_graph=True)
    optimizer.step()
    before = bits_of(model)
    with pytest.raises(RuntimeError, match="used by an earlier step and freed; call zero_grad"):
        loss_of(model, 1).backward(create_graph=True)
    assert bits_of(model) == before
    goes_on(model, optimizer)


def test_loading_state_leaves_freed_gradients_to_zero_grad() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model, free_grads=True)
    train(model, optimizer, ({},))
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="used by an earlier step and freed"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(one.grad is not None and not one.grad.any() for one in model.parameters())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_freed_gradients_and_zeros(set_to_none: bool) -> None:
    """Gradients set to zero decay moments and weights of a parameter that is not used."""
    theirs, mine = net(), net()
    expected = legacy("PagedAdamW8bit", theirs.parameters(), lr=1e-2)
    optimizer = in_backward("PagedAdamW8bit", mine, free_grads=True)
    for model, one in ((theirs, expected), (mine, optimizer)):
        for step in range(4):
            loss_of(model, step, optional=step % 2 == 0).backward()
            one.step()
            one.zero_grad(set_to_none=set_to_none)
    assert_same_bits(optimizer, expected)


def test_one_element_is_not_freed() -> None:
    """Adding to its placeholder would not raise, and the next update would be NaN."""
    one = nn.Parameter(torch.ones(1))
    optimizer = ours("PagedAdamW", [one], paging=Paging(in_backward=True, free_grads=True))
    for _ in range(2):  # zero_grad() is forgotten
        (one**2).sum().backward()
        optimizer.step()
    assert torch.isfinite(one).all()


# --- hooks ----------------------------------------------------------------------------------------


def test_a_hook_that_takes_the_gradient_away() -> None:
    """bitsandbytes steps over a parameter without one."""
    theirs, mine = net(), net()
    for model in (theirs, mine):
        model.first.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    expected = legacy("PagedAdamW8bit", theirs.parameters(), lr=1e-2)
    optimizer = in_backward("PagedAdamW8bit", mine)
    train(theirs, expected, ({}, {}, {}))
    train(mine, optimizer, ({}, {}, {}))
    assert_same_bits(optimizer, expected)


def two_in_a_chunk(monkeypatch: pytest.MonkeyPatch) -> tuple[list[nn.Parameter], Any]:
    """The gradient of the first to come waits for the other's."""
    monkeypatch.setattr(plan, "SMALLEST_CHUNK", 8 << 20)
    monkeypatch.setattr(plan, "LARGEST_CHUNK", 8 << 20)
    two = [nn.Parameter(torch.full((WIDTH, WIDTH), value)) for value in (1.0, 2.0)]
    return two, ours("PagedAdamW8bit", two, paging=Paging(in_backward=True))


def both(two: list[nn.Parameter]) -> torch.Tensor:
    return (two[0] ** 2).sum() + (two[1] ** 3).sum()


def test_a_gradient_that_is_replaced_while_its_chunk_waits_is_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two, optimizer = two_in_a_chunk(monkeypatch)
    twins = [nn.Parameter(one.detach().clone()) for one in two]
    expected = legacy("PagedAdamW8bit", twins)

    def turned(one: torch.Tensor) -> None:
        assert one.grad is not None
        one.grad = torch.arange(one.numel()).float().view(WIDTH, WIDTH).t()

    for one in (two[1], twins[1]):  # the first to come
        one.register_post_accumulate_grad_hook(turned)
    for listed, stepped in ((two, optimizer), (twins, expected)):
        both(listed).backward()
        stepped.step()
    assert all(one.grad is not None and one.grad.is_contiguous() for one in two)
    assert_same_bits(optimizer, expected)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_gradient_that_is_taken_while_its_chunk_waits(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, optimizer = two_in_a_chunk(monkeypatch)

    def taken(one: torch.Tensor) -> None:
        gradient, one.grad = one.grad, None
        assert gradient is not None
        if dtype is not None:
            one.grad_dtype = dtype
            one.grad = gradient.to(dtype)

    handles = [one.register_post_accumulate_grad_hook(taken) for one in two]
    before = [one.detach().clone() for one in two]
    error, said = (
        (RuntimeError, "a hook took the gradient of parameter")
        if dtype is None
        else (TypeError, "has a torch.float64 gradient")
    )
    with pytest.raises(error, match=said):
        both(two).backward()
    assert all(map(torch.equal, two, before))
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()
    for one in two:
        if dtype is not None:
            one.grad_dtype = one.dtype
    both(two).backward()
    optimizer.step()
    assert not any(map(torch.equal, two, before))


def test_a_hyperparameter_changed_in_place_between_backward_and_step() -> None:
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    optimizer = ours("PagedAdamW8bit", [weight], paging=Paging(in_backward=True))
    optimizer.param_groups[0]["betas"] = [0.9, 0.999]
    (weight**2).sum().backward()
    optimizer.param_groups[0]["betas"][0] = 0.1
    with pytest.raises(RuntimeError, match=r"betas of group 0 was \[0.9, 0.999\] when backward"):
        optimizer.step()


@pytest.mark.parametrize("staging", [1 << 28, 1 << 60])
def test_a_ring_is_no_larger_than_what_it_moves(staging: int) -> None:
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    paging = Paging(in_backward=True, hbm_budget=0, staging=staging)
    optimizer = ours("PagedAdamW", [weight], paging=paging)
    (weight**2).sum().backward()
    optimizer.step()
    assert optimizer.residency().slots <= 4 * 2 * 4 * weight.numel()


def test_a_refused_group_is_not_added() -> None:
    model, other = net(), nn.Parameter(torch.ones(WIDTH, WIDTH))
    first = in_backward("PagedAdamW8bit", model)
    second = ours("PagedAdamW8bit", [other], paging=Paging(in_backward=True))
    with pytest.raises(RuntimeError, match="already updated in backward"):
        second.add_param_group({"params": list(model.first.parameters())})
    assert len(second.param_groups) == 1
    train(model, first, ({},))


# --- gradients that are not for this optimizer ----------------------------------------------------


def test_gradients_thrown_away_after_their_update() -> None:
    """What the loss of a generator does to the discriminator."""
    generator, discriminator = nn.Linear(8, WIDTH), net()
    optimizer = in_backward("PagedAdamW8bit", discriminator)
    x = torch.ones(4, 8)
    before = bits_of(discriminator)
    with optimizer.accumulate():
        discriminator(generator(x)).mean().backward()
    optimizer.zero_grad()
    assert bits_of(discriminator) == before
    discriminator(generator(x)).mean().backward()
    with pytest.warns(RuntimeWarning, match=r"not undone. Already updated: .*accumulate\(\)"):
        optimizer.zero_grad()


# --- forks ----------------------------------------------------------------------------------------


def test_a_child_forked_in_the_middle_of_a_backward() -> None:
    """It has neither the threads nor the memory that the open backward uses."""
    first, second = (nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(2))
    optimizer = ours("PagedAdamW32bit", [first, second], paging=Paging(in_backward=True))
    for _ in range(2):
        (first * second).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (first**2).sum().backward()
    second.grad = torch.ones_like(second)  # in the child, PyTorch itself may hang
    child = os.fork()
    if child == 0:  # pragma: no cover
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        status = 1
        try:
            for hook in second._post_accumulate_grad_hooks.values():
                hook(second)
        except RuntimeError as error:
            optimizer.zero_grad()
            status = 0 if "forked child" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    second.grad = None
    (second**2).sum().backward()
    optimizer.step()
