"""What cannot be updated is refused before anything changes, and the error says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from bitsandbytes.optim.optimizer import MockArgs

from pageahead import Paging
from pageahead.device.cpu import CpuDevice
from pageahead.memory import host
from pageahead.memory.host import HostMemoryError
from pageahead.optim import homes as homes_module
from pageahead.optim.active import Listing, collect
from pageahead.optim.compat import check_bitsandbytes
from pageahead.optim.paged import PagedOptimizer
from tests.support import (
    MIB,
    STRATEGIES,
    Snapshot,
    assert_same_bits,
    legacy,
    ours,
    parameters,
    paths,
    set_gradients,
    train,
    unique_parameters,
)

SHAPES = ((200, 600), 130_000, 50)


@pytest.fixture(params=STRATEGIES)
def paging(request: pytest.FixtureRequest) -> Paging:
    return Paging(strategy=request.param, staging=MIB)


@pytest.fixture(params=["fresh", "stepped"])
def optimizer(request: pytest.FixtureRequest, paging: Paging) -> PagedOptimizer:
    """An optimizer before its first step, and one after two; gradients are set."""
    made = ours("PagedAdamW8bit", parameters(*SHAPES), paging=paging)
    if request.param == "stepped":
        train(made, range(2))
    set_gradients(unique_parameters(made), 2)
    return made


def refuses(optimizer: PagedOptimizer, error: type[Exception], *says: str) -> Exception:
    """Assert that `step` raises `error`, whose message has every part of `says`."""
    snapshot = Snapshot(optimizer)
    with pytest.raises(error) as caught:
        optimizer.step()
    assert type(caught.value) is error
    for part in says:
        assert re.search(part, str(caught.value)), f"{part!r} is not in {str(caught.value)!r}"
    snapshot.assert_unchanged()
    return caught.value


def works_again(optimizer: PagedOptimizer) -> None:
    """Assert that a step now does what bitsandbytes does from here on."""
    expected = legacy(
        "PagedAdamW8bit",
        [
            torch.nn.Parameter(parameter.detach().clone())
            for parameter in unique_parameters(optimizer)
        ],
    )
    expected.load_state_dict(optimizer.state_dict())
    for one in (expected, optimizer):
        train(one, [9])
    assert_same_bits(optimizer, expected)


# --- gradients ------------------------------------------------------------------------------------


def make_half(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data.half()  # the gradient stays float32


def make_sparse(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.to_sparse()


def make_complex(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data.to(torch.complex64)
    parameter.grad = torch.ones(parameter.shape, dtype=torch.complex64)


def make_double(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data.double()
    parameter.grad = torch.ones(parameter.shape, dtype=torch.float64)


BAD_GRADIENTS: dict[str, tuple[Callable[[torch.Tensor], None], type[Exception], list[str]]] = {
    "another dtype": (
        make_half,
        TypeError,
        ["torch.float16, cpu", "a torch.float32 gradient", "wrong bytes", "Cast one"],
    ),
    "sparse": (make_sparse, TypeError, ["torch.sparse_coo gradient", "sparse=False"]),
    "complex": (
        make_complex,
        TypeError,
        ["a torch.complex64 gradient", "updates float16, bfloat16 and float32"],
    ),
    "float64": (
        make_double,
        TypeError,
        ["a torch.float64 gradient", "updates float16, bfloat16 and float32"],
    ),
}


@pytest.mark.parametrize("case", BAD_GRADIENTS)
@pytest.mark.parametrize("position", [0, 2])
def test_gradient_that_cannot_be_used(case: str, position: int, optimizer: PagedOptimizer) -> None:
    spoil, error, says = BAD_GRADIENTS[case]
    parameter = unique_parameters(optimizer)[position]
    good, gradient = parameter.data, parameter.grad
    spoil(parameter)
    where = rf"parameter {position} of group 0 \(shape \({parameter.shape[0]},"
    refuses(optimizer, error, where, *says, r"Nothing was updated\.$")
    parameter.grad = None
    parameter.data = good
    parameter.grad = gradient
    works_again(optimizer)


@pytest.mark.parametrize(
    ("gradient", "says"),
    [
        (torch.zeros(5), r"has a gradient of shape \(5,\)\. Nothing was updated\."),
        (
            torch.zeros(4, device="meta"),
            r"has its gradient on meta; both must be on one device\. Nothing was updated\.",
        ),
    ],
)
def test_gradient_that_does_not_belong_to_its_parameter(gradient: torch.Tensor, says: str) -> None:
    """PyTorch does not let one be assigned; a subclass of a tensor may still hand one out."""

    class Parameter(torch.Tensor):
        grad = gradient  # type: ignore[assignment]

    parameter = torch.zeros(4).as_subclass(Parameter)
    with pytest.raises(ValueError, match=rf"parameter 0 of group 0 \(shape \(4,\).* {says}"):
        collect(Listing().of([{"params": [parameter]}]))


def test_parameters_on_another_kind_of_device(paging: Paging) -> None:
    parameter = torch.nn.Parameter(torch.empty(120_000, device="meta"))
    parameter.grad = torch.empty(120_000, device="meta")
    optimizer = ours("PagedAdamW", [parameter], paging=paging)
    refuses(optimizer, ValueError, "for CUDA and CPU parameters", "on meta", "own optimizer there")


# --- parameters and state -------------------------------------------------------------------------


def test_parameter_that_moved(paging: Paging) -> None:
    optimizer = ours("PagedAdamW8bit", parameters(*SHAPES), paging=paging)
    train(optimizer, range(2))
    parameter = unique_parameters(optimizer)[1]
    home = optimizer._homes[parameter]
    home.device = torch.device("cuda", 0)  # where its state was made
    set_gradients(unique_parameters(optimizer), 2)
    refuses(
        optimizer,
        RuntimeError,
        r"parameter 1 of group 0 \(shape \(130000,\)\) was on cuda:0 .* and is on cpu now",
        "Move the model before making the optimizer",
        "Nothing was updated",
    )
    home.device = torch.device("cpu")
    works_again(optimizer)


@pytest.mark.parametrize(
    ("key", "position"),
    [
        ("state1", 0),
        ("state1", 2),
        ("state2", 0),
        ("state2", 2),
        ("absmax1", 0),
        ("absmax2", 1),
    ],
)
def test_replaced_state_tensor(key: str, position: int, paging: Paging) -> None:
    optimizer = ours("PagedAdamW8bit", parameters(*SHAPES), paging=paging)
    train(optimizer, range(2))
    state = optimizer.state[unique_parameters(optimizer)[position]]
    kept = state[key]
    state[key] = kept.clone()
    set_gradients(unique_parameters(optimizer), 2)
    refuses(
        optimizer,
        RuntimeError,
        f"state of parameter {position} of group 0 .* was replaced in optimizer.state",
        "change it in place, or load it with load_state_dict",
        "Nothing was updated",
    )
    state[key] = kept
    works_again(optimizer)


def test_state_changed_in_place_counts(paging: Paging) -> None:
    optimizer = ours("PagedAdamW8bit", parameters(*SHAPES), paging=paging)
    train(optimizer, range(2))
    for state in optimizer.state.values():
        state["state1"].zero_()
    works_again(optimizer)


def test_deleted_state(paging: Paging) -> None:
    optimizer = ours("PagedAdamW8bit", parameters(*SHAPES), paging=paging)
    train(optimizer, range(1))
    optimizer.state.clear()
    set_gradients(unique_parameters(optimizer), 1)
    refuses(optimizer, RuntimeError, "was replaced in optimizer.state")


def test_state_that_somebody_else_made(paging: Paging) -> None:
    optimizer = ours("PagedAdamW8bit", parameters(*SHAPES), paging=paging)
    optimizer.state[unique_parameters(optimizer)[0]]["state1"] = torch.zeros(200, 600)
    set_gradients(unique_parameters(optimizer), 0)
    refuses(
        optimizer,
        RuntimeError,
        "parameter 0 of group 0 .* has state that this optimizer did not make",
        "load_state_dict",
    )


# --- memory ---------------------------------------------------------------------------------------


def test_too_little_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = ours("PagedAdamW", parameters(120_000, 130_000, 10))
    set_gradients(unique_parameters(optimizer), 0)
    monkeypatch.setattr(host, "available_bytes", lambda: 2_000_000 - 1)
    error = refuses(
        optimizer,
        HostMemoryError,
        r"needs 2,000,384 bytes of host memory, but only 1,999,999 bytes are available",
        "Use 8-bit state, a larger machine",
    )
    assert isinstance(error, MemoryError)
    assert not optimizer.state
    monkeypatch.undo()
    expected = legacy("PagedAdamW", parameters(120_000, 130_000, 10))
    for one in (expected, optimizer):
        train(one, range(2))
    assert_same_bits(optimizer, expected)


def test_too_little_host_memory_for_parameters_that_appear_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = ours("PagedAdamW8bit", parameters(*SHAPES))
    train(optimizer, range(2), absent=[1])
    set_gradients(unique_parameters(optimizer), 2)
    monkeypatch.setattr(host, "available_bytes", lambda: 0)
    refuses(optimizer, HostMemoryError, "needs 260,096 bytes", "only 0 bytes are available")
    monkeypatch.undo()
    works_again(optimizer)


@pytest.mark.parametrize("strategy", ["lookahead", "sequential"])
def test_too_little_managed_memory(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by the device halfway through making state: what was made goes again."""
    real = CpuDevice.managed
    allocated: list[int] = []

    def managed(self: CpuDevice, nbytes: int, *, allow_oversubscription: bool) -> torch.Tensor:
        if len(allocated) == 3 and not allow_oversubscription:
            raise MemoryError("oversubscribing a GPU can hang it")
        allocated.append(nbytes)
        return real(self, nbytes, allow_oversubscription=allow_oversubscription)

    monkeypatch.setattr(CpuDevice, "managed", managed)
    optimizer = ours("PagedAdamW8bit", parameters(*SHAPES), paging=Paging(strategy=strategy))
    set_gradients(unique_parameters(optimizer), 0)
    refuses(optimizer, MemoryError, "can hang it")
    assert allocated == [120_000, 120_000, 130_000]
    assert not optimizer.state
    monkeypatch.undo()
    works_again(optimizer)


def test_oversubscription_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = CpuDevice.managed

    def managed(self: CpuDevice, nbytes: int, *, allow_oversubscription: bool) -> torch.Tensor:
        asked.append(allow_oversubscription)
        return real(self, nbytes, allow_oversubscription=allow_oversubscription)

    monkeypatch.setattr(CpuDevice, "managed", managed)
    for allow in (False, True):
        paging = Paging(strategy="lookahead", allow_oversubscription=allow)
        train(ours("PagedLion", parameters(120_000), paging=paging), range(1))
    assert asked == [False, True]


# --- what the kernels cannot do -------------------------------------------------------------------


def limited(width: int = 32) -> MockArgs:
    return MockArgs(
        {"optim_bits": width, "min_8bit_size": 4096, "max_unorm": 0.01, "skip_zeros": False}
    )


def test_limited_update_norm_without_a_budget(paging: Paging) -> None:
    optimizer = ours("PagedAdamW", parameters(*SHAPES), args=limited(), paging=paging)
    set_gradients(unique_parameters(optimizer), 0)
    refuses(
        optimizer,
        ValueError,
        "max_unorm > 0 limits the norm of a whole parameter's update",
        r"2 parameter\(s\), 2,000,000 bytes, has to stay on the device; the budget has 0 bytes",
        r"Paging\(hbm_budget=2000000\) or more, or set max_unorm=0",
    )


def test_limited_update_norm_within_the_budget_that_the_error_names() -> None:
    expected = legacy("PagedAdamW", parameters(*SHAPES), args=limited())
    optimizer = ours(
        "PagedAdamW", parameters(*SHAPES), args=limited(), paging=Paging(hbm_budget=2_000_000)
    )
    free = ours("PagedAdamW", parameters(*SHAPES))
    for one in (expected, optimizer, free):
        train(one, range(3))
    assert paths(optimizer) == ["resident"] * 3
    assert_same_bits(optimizer, expected)
    assert not torch.equal(unique_parameters(optimizer)[0], unique_parameters(free)[0])


def test_limited_update_norm_takes_its_part_of_the_budget_first() -> None:
    found = parameters(100_000, 100_000, 100_000)
    manager = GlobalOptimManager.get_instance()
    manager.override_config(found[2], "max_unorm", 0.01)
    optimizer = ours("PagedAdamW", found, paging=Paging(hbm_budget=800_000))
    train(optimizer, range(1))
    assert paths(optimizer) == ["streamed", "streamed", "resident"]


def test_8_bit_updates_are_not_limited_and_may_be_streamed(paging: Paging) -> None:
    expected = legacy("PagedAdamW", parameters(*SHAPES), args=limited(8))
    optimizer = ours("PagedAdamW", parameters(*SHAPES), args=limited(8), paging=paging)
    for one in (expected, optimizer):
        train(one, range(3))
    assert paths(optimizer)[:2] == [paging.strategy] * 2
    assert_same_bits(optimizer, expected)


def test_width_that_does_not_exist(paging: Paging) -> None:
    optimizer = ours("PagedAdamW", parameters(*SHAPES), optim_bits=4, paging=paging)
    set_gradients(unique_parameters(optimizer), 0)
    refuses(optimizer, ValueError, "optim_bits=4 is not supported; state has 8 or 32 bits")


@pytest.mark.parametrize("strategy", ["lookahead", "sequential"])
def test_managed_ademamix_beyond_an_int32(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes_module, "MAX_LAUNCH", 110_000)
    optimizer = ours("PagedAdEMAMix", parameters(*SHAPES), paging=Paging(strategy=strategy))
    set_gradients(unique_parameters(optimizer), 0)
    refuses(
        optimizer,
        ValueError,
        "int32: 120,000 elements are too many for one launch",
        "Use strategy='streamed'",
        "Nothing was updated",
    )


def test_capturing_stream(optimizer: PagedOptimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "capturing", lambda self: True)
    refuses(
        optimizer,
        RuntimeError,
        "while a CUDA graph is being captured",
        "Capture forward and backward only, and call step.. outside",
        "Nothing was updated",
    )
    monkeypatch.undo()
    works_again(optimizer)


# --- bitsandbytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.50.2", "0.50.9", "0.50.3.dev0"])
def test_tested_bitsandbytes(version: str) -> None:
    check_bitsandbytes(version)


@pytest.mark.parametrize("version", ["0.49.2", "0.50.1", "0.51.0", "1.0.0", "0.51.0.dev0"])
def test_untested_bitsandbytes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError) as caught:
        check_bitsandbytes(version)
    for part in (
        f"this is {version}.",
        "pip install 'bitsandbytes>=0.50.2,<0.51'",
        "set PAGEAHEAD_UNTESTED_BITSANDBYTES=1",
    ):
        assert part in str(caught.value)
    monkeypatch.setenv("PAGEAHEAD_UNTESTED_BITSANDBYTES", "1")
    check_bitsandbytes(version)
    monkeypatch.setenv("PAGEAHEAD_UNTESTED_BITSANDBYTES", "0")
    with pytest.raises(ImportError):
        check_bitsandbytes(version)
