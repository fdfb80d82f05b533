"""Updates during backward: the same bits as after it, and no use of it that would be wrong."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pageahead import Paging
from pageahead.optim import plan
from tests.support import CLASSES, UsesOldValue, assert_same_bits, bits, legacy, ours

WIDTH = 320  # a weight of 320 x 320 is paged


pytestmark = pytest.mark.filterwarnings("ignore:zero_grad\\(\\) without step")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks for each of these parameters."""
    monkeypatch.setattr(plan, "SMALLEST_CHUNK", 128 << 10)
    monkeypatch.setattr(plan, "LARGEST_CHUNK", 128 << 10)


class Net(nn.Module):
    """Layers of which one can be left out, and one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.optional = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 500)

    def forward(self, x: torch.Tensor, optional: bool = True, swapped: bool = False) -> Any:
        if swapped:
            x = self.shared(torch.tanh(self.first(x)))
        else:
            x = self.first(self.norm(torch.tanh(self.shared(x))))
        if optional:
            x = x + self.optional(x)
        return self.last(self.shared(torch.tanh(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_of(model: nn.Module, step: int, **how: bool) -> torch.Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    return (model(x, **how) ** 2).mean()


def in_backward(name: str, model: nn.Module, **settings: Any) -> Any:
    options = {"in_backward": True, "hbm_budget": 0, **settings}
    return ours(name, model.parameters(), lr=1e-2, paging=Paging(**options))


HOW: tuple[dict[str, bool], ...] = (
    {},
    {},
    {"optional": False},
    {},
    {"swapped": True},
    {"swapped": True},
    {},
)


def train(model: nn.Module, optimizer: Any, how: tuple[dict[str, bool], ...] = HOW) -> None:
    for step, one in enumerate(how):
        loss_of(model, step, **one).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(name: str, how: tuple[dict[str, bool], ...] = HOW, **settings: Any) -> Any:
    theirs, mine = net(), net()
    expected = legacy(name, theirs.parameters(), lr=1e-2)
    optimizer = in_backward(name, mine, **settings)
    train(theirs, expected, how)
    train(mine, optimizer, how)
    optimizer.state_dict()
    assert_same_bits(optimizer, expected)
    return optimizer


@pytest.mark.parametrize("free_grads", [False, True], ids=["grads kept", "grads freed"])
@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
@pytest.mark.parametrize("name", CLASSES)
def test_same_bits_as_bitsandbytes(name: str, write_back: str, free_grads: bool) -> None:
    compare(name, write_back=write_back, free_grads=free_grads)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_whose_graph_is_kept(name: str) -> None:
    """Autograd leaves gradients on while hooks run: updates must not become part of the graph."""
    theirs, mine = net(), net()
    expected = legacy(name, theirs.parameters(), lr=1e-2)
    optimizer = in_backward(name, mine, hbm_budget=0.3)
    for model, one in ((theirs, expected), (mine, optimizer)):
        for step in range(3):
            loss_of(model, step).backward(create_graph=True)
            one.step()
            one.zero_grad()
    assert_same_bits(optimizer, expected)
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert all(parameter.is_leaf for parameter in mine.parameters())
    assert not any(one.requires_grad for one in states if isinstance(one, torch.Tensor))


@pytest.mark.parametrize("budget", [0.3, 1.0])
def test_with_a_budget(budget: float) -> None:
    optimizer = compare("PagedAdamW8bit", hbm_budget=budget)
    assert {route.path for route in optimizer.routes() if route.numel > 100_000} == (
        {"resident"} if budget == 1.0 else {"resident", "streamed"}
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is updated, and where the loop is: appended in order."""
    from pageahead.optim import engine

    log: list[str] = []
    launch = engine.launch

    def logging(name: str, active: Any, views: Any) -> None:
        log.append(f"{active.pindex}")
        launch(name, active, views)

    monkeypatch.setattr(engine, "launch", logging)
    return log


def test_already_the_first_backward_updates(launched: list[str]) -> None:
    model = net()
    optimizer = in_backward("PagedAdamW32bit", model)
    loss_of(model, 0).backward()
    assert set(launched) == {str(number) for number in range(len(list(model.parameters())))}
    count = len(launched)
    optimizer.step()
    assert len(launched) == count


def test_what_was_never_touched_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    from pageahead.device.cpu import CpuDevice

    copied: list[int] = []
    copy = CpuDevice.copy
    monkeypatch.setattr(
        CpuDevice,
        "copy",
        lambda self, to, source, *, stream: (
            copied.append(source.nbytes),
            copy(self, to, source, stream=stream),
        ),
    )
    model = net()
    optimizer = in_backward("PagedAdamW32bit", model, write_back="overlap")
    streamed = 8 * sum(p.numel() for p in model.parameters() if p.numel() >= 100_000)
    loss_of(model, 0).backward()
    assert streamed <= sum(copied) <= streamed * 1.01  # home, but not there
    optimizer.zero_grad()


def test_the_first_guess_at_the_order_may_be_right() -> None:
    """The plan of the first backward is kept, but not that its state is all zeros."""
    made = []
    for kind, extra in ((legacy, {}), (ours, {"paging": Paging(in_backward=True)})):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        one = kind("PagedAdamW32bit", model.parameters(), lr=1e-2, **extra)
        train(model, one, ({}, {}))
        made.append(one)
    assert_same_bits(made[1], made[0])


def test_the_order_is_learned() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def order() -> list[str]:
        return [names[parameter] for parameter in optimizer._backward._order]

    train(model, optimizer, ({}, {}))
    usual = order()
    assert usual.index("norm.weight") > usual.index("first.weight")
    assert len(usual) == len(names)
    train(model, optimizer, ({"swapped": True, "optional": False},) * 2)
    assert set(names.values()) - set(order()) == {
        "norm.weight", "norm.bias", "optional.weight", "optional.bias"
    }  # fmt: skip


def test_a_kept_plan_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    train(model, optimizer, ({}, {}, {}))
    [engine] = optimizer._engines.values()
    before = engine._plan
    train(model, optimizer, ({}, {}))
    assert engine._plan is before


def test_gradients_without_backward_are_stepped_over() -> None:
    """`torch.distributed.checkpoint` makes state by a step over zero gradients."""
    theirs, mine = net(), net()
    expected = legacy("PagedAdamW8bit", theirs.parameters(), lr=1e-2)
    optimizer = in_backward("PagedAdamW8bit", mine)
    for model, one in ((theirs, expected), (mine, optimizer)):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        one.step()
        one.zero_grad()
        train(model, one, ({}, {}))
    assert_same_bits(optimizer, expected)


def test_micro_batches() -> None:
    theirs, mine = net(), net()
    expected = legacy("PagedAdamW8bit", theirs.parameters(), lr=1e-2)
    optimizer = in_backward("PagedAdamW8bit", mine)
    for step in range(3):
        for micro in range(3):
            loss_of(theirs, 3 * step + micro).backward()
            if micro < 2:
                with optimizer.accumulate():
                    loss_of(mine, 3 * step + micro).backward()
            else:
                loss_of(mine, 3 * step + micro).backward()
        for one in (expected, optimizer):
            one.step()
            one.zero_grad()
    assert_same_bits(optimizer, expected)


def test_a_closure() -> None:
    theirs, mine = net(), net()
    expected = legacy("PagedAdamW8bit", theirs.parameters(), lr=1e-2)
    optimizer = in_backward("PagedAdamW8bit", mine)
    for step in range(3):
        for model, one in ((theirs, expected), (mine, optimizer)):

            def closure(model: nn.Module = model, one: Any = one, step: int = step) -> Any:
                one.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            one.step(closure)
    assert_same_bits(optimizer, expected)


def test_learning_rate_changes_between_steps() -> None:
    theirs, mine = net(), net()
    expected = legacy("PagedAdamW8bit", theirs.parameters(), lr=1e-2)
    optimizer = in_backward("PagedAdamW8bit", mine)
    for model, one in ((theirs, expected), (mine, optimizer)):
        scheduler = torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.5**step)
        for step in range(4):
            loss_of(model, step).backward()
            one.step()
            scheduler.step()
            one.zero_grad()
    assert_same_bits(optimizer, expected)


def test_a_group_added_later() -> None:
    theirs, mine = net(), net()
    made = []
    for model in (theirs, mine):
        first = [p for name, p in model.named_parameters() if not name.startswith("last")]
        kind = legacy if model is theirs else ours
        extra = {} if model is theirs else {"paging": Paging(in_backward=True)}
        one = kind("PagedAdamW8bit", first, lr=1e-2, **extra)
        train(model, one, ({}, {}))
        one.add_param_group({"params": list(model.last.parameters()), "lr": 1e-3})
        train(model, one, ({}, {}))
        made.append(one)
    assert_same_bits(made[1], made[0])


def test_a_parameter_listed_twice_is_updated_twice() -> None:
    made = []
    for kind, extra in ((legacy, {}), (ours, {"paging": Paging(in_backward=True)})):
        model = net()
        with pytest.warns(UserWarning, match="duplicate"):
            one = kind(
                "PagedAdamW32bit", [*model.parameters(), model.first.weight], lr=1e-2, **extra
            )
        train(model, one, ({}, {}))
        made.append(one)
    assert_same_bits(made[1], made[0])


def test_parameters_over_the_same_memory() -> None:
    made = []
    for kind, extra in ((legacy, {}), (ours, {"paging": Paging(in_backward=True)})):
        model = net()
        model.optional.weight.data = model.first.weight.data
        one = kind("PagedAdamW32bit", model.parameters(), lr=1e-2, **extra)
        train(model, one, ({}, {}, {}))
        made.append(one)
    assert_same_bits(made[1], made[0])


def test_a_checkpoint_in_the_middle() -> None:
    theirs, mine = net(), net()
    expected = legacy("PagedAdamW8bit", theirs.parameters(), lr=1e-2)
    optimizer = in_backward("PagedAdamW8bit", mine)
    for model, one in ((theirs, expected), (mine, optimizer)):
        train(model, one, ({}, {}))
        saved = {
            key: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in entry.items()}
            for key, entry in one.state_dict()["state"].items()
        }
        train(model, one, ({},))
        one.load_state_dict({"state": saved, "param_groups": one.state_dict()["param_groups"]})
        train(model, one, ({}, {}))
    assert_same_bits(optimizer, expected)


def test_state_changed_in_place_between_steps() -> None:
    """It may have been fetched already."""
    theirs, mine = net(), net()
    expected = legacy("PagedAdamW32bit", theirs.parameters(), lr=1e-2)
    optimizer = in_backward("PagedAdamW32bit", mine)
    for model, one in ((theirs, expected), (mine, optimizer)):
        train(model, one, ({}, {}))
        for parameter in model.parameters():
            one.state[parameter]["state1"].mul_(0.5)
        train(model, one, ({},))
    assert_same_bits(optimizer, expected)


# --- gradients that are freed ---------------------------------------------------------------------


def test_freed_gradients_fail_loudly() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model, free_grads=True)
    loss_of(model, 0).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient.untyped_storage().nbytes() == 4 for gradient in gradients)
    assert torch.isnan(nn.utils.get_total_norm(gradients))
    with pytest.raises(RuntimeError, match="single memory location"):
        gradients[0].mul_(0.5)
    optimizer.step()
    with pytest.raises(RuntimeError, match="single memory location"):
        loss_of(model, 1).backward()  # zero_grad() was forgotten
    optimizer.zero_grad(set_to_none=False)
    train(model, optimizer, ({},))


def test_gradients_go_during_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from pageahead.optim.engine import Engine

    model = net()
    optimizer = in_backward("PagedAdamW8bit", model, free_grads=True)
    let_go: list[weakref.ref[torch.Tensor]] = []

    def keep(self: Engine, gradient: torch.Tensor) -> None:
        assert not any(one() is not None for one in let_go)
        let_go.append(weakref.ref(gradient))

    monkeypatch.setattr(Engine, "keep", keep)
    loss_of(model, 1).backward()
    assert len(let_go) == len(list(model.parameters()))
    assert all(one() is None for one in let_go)
    optimizer.zero_grad()


# --- what is refused ------------------------------------------------------------------------------


def bits_of(model: nn.Module) -> list[bytes]:
    return [bits(parameter) for parameter in model.parameters()]


def goes_on(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    train(model, optimizer, ({},))


def test_a_second_backward() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    for step in range(2):
        loss_of(model, step).backward()
    with pytest.raises(RuntimeError, match=r"second time before step\(\).*accumulate\(\).*updated"):
        optimizer.step()
    goes_on(model, optimizer)


def test_accumulate_after_the_update() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    loss_of(model, 0).backward()
    with (
        pytest.raises(RuntimeError, match="micro-batches inside come first"),
        optimizer.accumulate(),
    ):
        pass
    goes_on(model, optimizer)


def test_clipping_after_backward() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    loss_of(model, 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"gradients of parameter 0 of group 0, .* changed"):
        optimizer.step()
    goes_on(model, optimizer)


@pytest.mark.parametrize("value", [None, torch.zeros(WIDTH, WIDTH)])
def test_a_gradient_replaced(value: torch.Tensor | None) -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    loss_of(model, 0).backward()
    model.first.weight.grad = value
    with pytest.raises(RuntimeError, match=r"gradients of parameter 0 of group 0 were changed"):
        optimizer.step()
    goes_on(model, optimizer)


def test_a_learning_rate_set_too_late() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"lr of group 0 was 0.01 .* and is 0.5 now"):
        optimizer.step()
    goes_on(model, optimizer)


def test_a_second_set_of_hooks() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    with pytest.raises(RuntimeError, match=r"already updated in backward .*PagedAdamW8bit"):
        in_backward("PagedLion8bit", model)
    train(model, optimizer, ({},))
    del optimizer
    gc.collect()
    train(model, in_backward("PagedLion8bit", model), ({},))


def test_hooks_go_with_the_optimizer() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    train(model, optimizer, ({},))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    before = bits_of(model)
    loss_of(model, 0).backward()
    assert bits_of(model) == before
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_grad_scaler_is_seen_before_any_update() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    scaler = torch.amp.GradScaler("cpu")
    before = bits_of(model)
    with pytest.raises(RuntimeError, match=r"GradScaler in use.*Nothing was updated"):
        scaler.scale(loss_of(model, 0)).backward()
    assert bits_of(model) == before
    del scaler
    gc.collect()
    goes_on(model, optimizer)


def scaler_of_another_model() -> torch.amp.GradScaler:
    """One that has trained it: after `update` it knows no optimizer, so it could be anyone's."""
    other = net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(other, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler


def test_a_grad_scaler_of_another_model_is_to_be_deleted() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    scaler = scaler_of_another_model()
    with pytest.raises(RuntimeError, match="another model's, which it does not say, delete it"):
        loss_of(model, 0).backward()
    del scaler
    goes_on(model, optimizer)


def test_a_grad_scaler_that_nobody_can_reach_is_no_obstacle() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    gc.disable()
    try:
        trainer = {"scaler": scaler_of_another_model()}
        trainer["itself"] = trainer  # as trainers do, which know their parts, which know them
        del trainer
        train(model, optimizer, ({},))
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, nn.parallel.DistributedDataParallel])
def test_one_whose_making_failed_is_no_obstacle(kind: type) -> None:
    """Whoever caught the error has it, and so its traceback, and so what was half made."""
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    kept = kind.__new__(kind)
    train(model, optimizer, ({},))
    del kept


def test_a_learning_rate_that_is_no_number_is_not_one_that_changed() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    optimizer.param_groups[0]["lr"] = float("nan")
    train(model, optimizer, ({},))


def test_a_grad_scaler_that_comes_later_is_seen_at_its_step() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    train(model, optimizer, ({},))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 1)).backward()
    with pytest.raises(RuntimeError, match=r"scaler.step\(\) with in_backward=True"):
        scaler.step(optimizer)
    del scaler
    gc.collect()
    goes_on(model, optimizer)


def test_a_scaler_works_without_updates_in_backward() -> None:
    model = net()
    optimizer = ours("PagedAdamW8bit", model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    before = bits_of(model)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert bits_of(model) != before


def test_ddp(tmp_path: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = net()
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = in_backward("PagedAdamW8bit", model)
        before = bits_of(model)
        with pytest.raises(RuntimeError, match=r"DistributedDataParallel.*Nothing was updated"):
            loss_of(wrapped, 0).backward()
        assert bits_of(model) == before
        del wrapped
        gc.collect()
        goes_on(model, optimizer)
    finally:
        dist.destroy_process_group()


def test_an_exception_in_backward() -> None:
    """What was updated before it stays; zero_grad() makes the next step an ordinary one."""
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    train(model, optimizer, ({},))

    def fail(gradient: torch.Tensor) -> None:
        raise OSError("on purpose")

    handle = model.first.bias.register_hook(fail)
    with pytest.raises(OSError, match="on purpose"):
        loss_of(model, 1).backward()
    handle.remove()
    goes_on(model, optimizer)


def test_a_bad_gradient_names_what_was_updated() -> None:
    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    train(model, optimizer, ({},))
    model.norm.double()
    with pytest.raises((TypeError, RuntimeError)):
        loss_of(model, 1).backward()
    model.norm.float()
    goes_on(model, optimizer)


def test_an_update_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from pageahead.optim import engine

    model = net()
    optimizer = in_backward("PagedAdamW8bit", model)
    train(model, optimizer, ({},))
    launch, calls = engine.launch, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 4:
            raise RuntimeError("no")
        launch(*arguments)

    monkeypatch.setattr(engine, "launch", failing)
    with pytest.raises(RuntimeError, match=r"no Already updated: parameter 7 of group 0, 8"):
        loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match="backward failed"):
        optimizer.step()
    goes_on(model, optimizer)


def test_a_use_of_the_old_weight_after_its_update_raises() -> None:
    """bitsandbytes' kernels do not tell autograd."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    optimizer = ours("PagedAdamW32bit", [weight], paging=Paging(in_backward=True))
    x = torch.randn(WIDTH, requires_grad=True)

    early = UsesOldValue.apply(x, weight.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (weight * early).sum().backward()
    optimizer.zero_grad()
