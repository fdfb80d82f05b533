"""An error in the middle of a step: it is the one raised, nothing stays in flight, work goes on."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pageahead import Paging
from pageahead.device.cpu import CpuDevice
from pageahead.optim import engine as engine_module
from pageahead.optim.paged import PagedOptimizer
from tests.support import (
    CPU,
    MIB,
    STRATEGIES,
    assert_same_bits,
    bits,
    chunk_count,
    cpu_device,
    legacy,
    ours,
    parameters,
    set_gradients,
    train,
    unique_parameters,
)

SIZES = (120_000, 5, 130_001, 100_000, 110_000)


class KernelError(Exception):
    """Neither an error of ours nor a subclass of one."""


@pytest.fixture(autouse=True)
def _collected() -> None:
    """Errors keep optimizers alive; one that went here would drain the streams it shares."""
    gc.collect()


@pytest.fixture(params=["before_return", "overlap"])
def write_back(request: pytest.FixtureRequest) -> str:
    return request.param


def failing_launch(after: int, error: BaseException) -> Callable[..., None]:
    """A `launch` that works `after` times and raises from then on."""
    real = engine_module.launch
    done: list[int] = []

    def launch(*arguments: Any) -> None:
        if len(done) == after:
            raise error
        done.append(1)
        real(*arguments)

    return launch


def nothing_in_flight(optimizer: PagedOptimizer) -> bool:
    pipeline = optimizer._engines[CPU]._pipeline
    streams = cpu_device()._streams.values()
    return not pipeline._flights and all(stream._queue.empty() for stream in streams)


def assert_continues(optimizer: PagedOptimizer, name: str) -> None:
    """Whatever the failed step left behind, the next ones do what bitsandbytes does with it."""
    weights = [
        torch.nn.Parameter(parameter.detach().clone()) for parameter in unique_parameters(optimizer)
    ]
    expected = legacy(name, weights)
    expected.load_state_dict(optimizer.state_dict())
    for one in (expected, optimizer):
        train(one, range(20, 22))
    optimizer.state_dict()
    assert_same_bits(optimizer, expected)


@pytest.mark.parametrize(
    ("strategy", "write_back", "after", "error"),
    [
        *((strategy, "before_return", 3, KernelError("no kernel")) for strategy in STRATEGIES),
        ("streamed", "before_return", 0, KernelError("no kernel")),
        ("streamed", "overlap", 3, RuntimeError("CUDA")),
        ("streamed", "overlap", 0, KeyboardInterrupt()),
        ("lookahead", "before_return", 0, KeyboardInterrupt()),
    ],
)
def test_failing_update(
    strategy: str,
    write_back: str,
    after: int,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "PagedAdamW8bit"
    paging = Paging(strategy=strategy, staging=MIB, write_back=write_back)
    optimizer = ours(name, parameters(*SIZES), paging=paging)
    train(optimizer, range(2))
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "launch", failing_launch(after, error))
        with pytest.raises(type(error)) as caught:
            train(optimizer, [2])
    assert caught.value is error
    assert nothing_in_flight(optimizer)
    assert_continues(optimizer, name)


@pytest.mark.parametrize("name", ["PagedAdamW", "PagedAdamW8bit"])
def test_what_was_updated_keeps_its_state(
    name: str, write_back: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameter and state stay a pair on both sides of the failure, also within one chunk."""
    complete, untouched = (legacy(name, parameters(*SIZES)) for _ in range(2))
    train(complete, range(3))
    train(untouched, range(2))
    paging = Paging(staging=8 * MIB, write_back=write_back)
    optimizer = ours(name, parameters(*SIZES), paging=paging)
    train(optimizer, range(2))
    assert (chunk_count(optimizer) == 1) == (name == "PagedAdamW8bit")
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "launch", failing_launch(3, KernelError()))
        with pytest.raises(KernelError):
            train(optimizer, [2])
    optimizer.state_dict()
    for number, parameter in enumerate(unique_parameters(optimizer)):
        twin = complete if number < 3 else untouched
        expected = unique_parameters(twin)[number]
        assert bits(parameter) == bits(expected)
        for key, tensor in twin.state[expected].items():
            if key != "step":
                assert bits(optimizer.state[parameter][key]) == bits(tensor)


@pytest.mark.parametrize("role", ["fetch", "write_back"])
def test_failing_copy(role: str, write_back: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails in its stream, later than it was asked for."""
    name = "PagedAdamW8bit"
    optimizer = ours(name, parameters(*SIZES), paging=Paging(staging=MIB, write_back=write_back))
    train(optimizer, range(2))
    optimizer.state_dict()
    real = CpuDevice.copy
    copies: list[int] = []

    def copy(
        self: CpuDevice, destination: torch.Tensor, source: torch.Tensor, *, stream: Any
    ) -> None:
        if stream is self.stream(role):
            copies.append(1)
            if len(copies) == 3:

                def fail() -> None:
                    time.sleep(0.01)
                    raise KernelError("bus")

                stream.launch(fail)
                return
        real(self, destination, source, stream=stream)

    with monkeypatch.context() as patch:
        patch.setattr(CpuDevice, "copy", copy)
        with pytest.raises(KernelError, match="bus"):
            train(optimizer, range(2, 4))  # an overlapped write-back fails in the next step
    assert nothing_in_flight(optimizer)
    assert_continues(optimizer, name)


def test_failing_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where it is asked for, as CUDA does."""
    optimizer = ours("PagedAdamW", parameters(*SIZES), paging=Paging(strategy="lookahead"))
    train(optimizer, range(2))

    def prefetch(self: CpuDevice, tensor: torch.Tensor, *, stream: Any) -> None:
        raise RuntimeError("CUDA refused: cudaErrorInvalidValue (1)")

    with monkeypatch.context() as patch:
        patch.setattr(CpuDevice, "prefetch", prefetch)
        with pytest.raises(RuntimeError, match="CUDA refused"):
            train(optimizer, [2])
    assert nothing_in_flight(optimizer)
    assert_continues(optimizer, "PagedAdamW")


def test_failing_first_step_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """State was made; it is that of parameters that have not been updated yet."""
    optimizer = ours("PagedAdamW8bit", parameters(*SIZES))
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "launch", failing_launch(0, KernelError()))
        with pytest.raises(KernelError):
            train(optimizer, [0])
    assert_continues(optimizer, "PagedAdamW8bit")


def test_failing_state_initialization_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = legacy("PagedAdamW", parameters(*SIZES))
    optimizer = ours("PagedAdamW", parameters(*SIZES))
    set_gradients(unique_parameters(optimizer), 0)
    real = type(optimizer).init_state
    made: list[int] = []

    def init_state(self: PagedOptimizer, *arguments: Any) -> None:
        if len(made) == 2:
            raise KernelError
        made.append(1)
        real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(type(optimizer), "init_state", init_state)
        with pytest.raises(KernelError):
            optimizer.step()
    assert not optimizer.state
    assert not optimizer._homes
    arena = optimizer._engines[CPU].arena
    assert arena is not None
    assert arena.nbytes == 0
    for one in (expected, optimizer):
        train(one, range(2))
    assert_same_bits(optimizer, expected)


def test_failing_closure_changes_nothing() -> None:
    optimizer = ours("PagedAdamW", parameters(120_000))

    def closure() -> None:
        raise KernelError

    with pytest.raises(KernelError):
        optimizer.step(closure)
    assert not optimizer.state
