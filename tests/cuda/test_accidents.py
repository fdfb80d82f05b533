"""What goes wrong, or goes on, around a step on the GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import pageahead.device
from pageahead import Paging
from pageahead.device import device_for
from pageahead.optim import engine as engine_module

from ..accidents.tripwire import Launches, Tripwire, homeward, replay
from .support import candidate, differences, gradients, legacy, parameters

STRATEGIES = ("streamed", "lookahead", "sequential")
MODES = [(strategy, back) for strategy in STRATEGIES for back in ("before_return", "overlap")]
SPIN = 20_000_000  # clock cycles, about 10 ms: far longer than a step
WRAPPED = "__bnb_optimizer_quant_state__"

SHAPES = ((5_000,), (300_000,), (100_352,), (1_000_000,))

every_mode = pytest.mark.parametrize(("strategy", "write_back"), MODES)


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _assign(
    params: list[torch.nn.Parameter], seed: int, shapes: tuple[tuple[int, ...], ...] = SHAPES
) -> None:
    for p, gradient in zip(params, gradients(shapes, torch.float32, seed), strict=True):
        p.grad = gradient


def _paging(strategy: str, write_back: str) -> Paging:
    return Paging(strategy=strategy, write_back=write_back, staging=1 << 20)


@pytest.fixture(autouse=True)
def _idle() -> Iterator[None]:
    """Parameters made on the default stream are there for every stream; nothing is left running."""
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


# --- a step broken at each of its operations ------------------------------------------------------

BROKEN_SHAPES = ((5_000,), (300_001,), (100_352,))
"""The first is resident. With a ring of 1 MiB the second is cut."""


class Trial:
    """bitsandbytes' and ours, alike, and gradients for the step in which ours breaks."""

    def __init__(self, paging: Paging, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = _gpu()
        # Not what `device_for` knows: that may be the tripwire of the trial before.
        self.device = Tripwire(_REAL.setdefault(gpu, device_for(gpu)))
        self.launches = Launches(self.device)
        monkeypatch.setitem(pageahead.device._devices, gpu, self.device)
        monkeypatch.setattr(engine_module, "launch", self.launches)
        self.theirs = parameters(BROKEN_SHAPES, torch.float32)
        self.ours = parameters(BROKEN_SHAPES, torch.float32)
        self.expected = bnb.optim.AdamW8bit(self.theirs, lr=1e-3)
        self.optimizer = candidate("PagedAdamW", self.ours, 8, paging, lr=1e-3)
        self.train(range(0 if first else 2))
        for params in (self.theirs, self.ours):
            _assign(params, 50, BROKEN_SHAPES)
        self.launches.done.clear()

    def train(self, steps: range) -> None:
        for step in steps:
            for params, one in ((self.theirs, self.expected), (self.ours, self.optimizer)):
                _assign(params, step, BROKEN_SHAPES)
                one.step()


_REAL: dict[torch.device, Any] = {}


@pytest.mark.parametrize("first", [False, True], ids=["third", "first"])
@every_mode
def test_a_step_broken_at_each_operation(
    strategy: str, write_back: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before it reaches CUDA. What was launched counts once: `tripwire` says it in full."""
    paging = _paging(strategy, write_back)
    trial = Trial(paging, first, monkeypatch)
    trial.device.arm(None)
    trial.optimizer.step()
    operations = list(trial.device.operations)
    assert operations.count("update") >= 3
    found: list[str] = []
    for number, operation in enumerate(operations):
        trial = Trial(paging, first, monkeypatch)
        error = KeyboardInterrupt() if number % 2 else RuntimeError("bus")
        trial.device.arm(number, error)
        with pytest.raises(type(error)) as caught:
            trial.optimizer.step()
        assert caught.value is error
        assert trial.device.operations[number] == operation
        [engine] = trial.optimizer._engines.values()
        assert not engine._pipeline._flights
        for stream in trial.device._streams.values():
            assert stream.inner.raw.query(), f"{stream.name} is not idle after {operation}"
        replay(trial.launches, trial.optimizer, trial.ours, trial.expected, trial.theirs)
        trial.train(range(51, 53))
        trial.optimizer.state_dict()
        torch.cuda.synchronize()
        wrong = differences(trial.expected, trial.theirs, trial.optimizer, trial.ours)
        home = " (on the way home)" if number in homeward(operations) else ""
        if wrong:
            found.append(f"{number}, {operation}{home}: {wrong[0]}")
    assert found == []


# --- memory reused, state read --------------------------------------------------------------------


@every_mode
def test_memory_of_gradients_is_reused_at_once(strategy: str, write_back: str) -> None:
    """By the caller's stream, while updates wait behind a kernel that takes its time."""
    theirs, ours = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    one = legacy("PagedAdamW", theirs, 8)
    other = candidate("PagedAdamW", ours, 8, _paging(strategy, write_back))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    reused = 0
    for step in range(5):
        _assign(theirs, step)
        one.step()
        one.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            _assign(ours, step)
            freed = {p.grad.data_ptr() for p in ours if p.grad is not None}
            with torch.cuda.stream(torch.cuda.default_stream()):
                torch.cuda._sleep(SPIN)
            other.step()
            other.zero_grad(set_to_none=True)
            others = [torch.full_like(p, float("nan"), requires_grad=False) for p in ours]
            reused += sum(tensor.data_ptr() in freed for tensor in others)
        torch.cuda.synchronize()
        del others
    assert reused > 0
    other.state_dict()
    assert differences(one, theirs, other, ours) == []


@every_mode
def test_state_read_by_the_host_as_soon_as_it_may_be(strategy: str, write_back: str) -> None:
    """After `step`, or after `state_dict`, with updates and the way home both delayed."""
    theirs, ours = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    one = legacy("PagedAdamW", theirs, 32)
    other = candidate("PagedAdamW", ours, 32, _paging(strategy, write_back))
    streams = [torch.cuda.default_stream(), device_for(_gpu()).stream("write_back").raw]  # type: ignore[attr-defined]
    for step in range(4):
        for params in (theirs, ours):
            _assign(params, step)
        one.step()
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SPIN)
        other.step()
        if write_back == "overlap":
            saved = other.state_dict()["state"]
            read = [saved[number][WRAPPED] for number in range(1, len(ours))]
        else:
            read = [other.state[p] for p in ours[1:]]
        copies = [(state["state1"].clone(), state["state2"].clone()) for state in read]
        torch.cuda.synchronize()
        for p, (first, second) in zip(theirs[1:], copies, strict=True):
            assert not first.is_cuda
            assert torch.equal(one.state[p]["state1"].cpu(), first)
            assert torch.equal(one.state[p]["state2"].cpu(), second)


# --- several at once ------------------------------------------------------------------------------

FAMILIES = (("PagedAdamW", 8), ("PagedLion", 32))


def _serial(steps: int) -> list[tuple[Any, list[torch.nn.Parameter]]]:
    """bitsandbytes' optimizers, one after the other."""
    arms = []
    for number, (family, bits) in enumerate(FAMILIES):
        params = parameters(SHAPES, torch.float32, seed=number)
        one = legacy(family, params, bits)
        for step in range(steps):
            _assign(params, 100 * number + step)
            one.step()
        arms.append((one, params))
    torch.cuda.synchronize()
    return arms


def _candidates(paging: Paging) -> list[tuple[Any, list[torch.nn.Parameter]]]:
    arms = []
    for number, (family, bits) in enumerate(FAMILIES):
        params = parameters(SHAPES, torch.float32, seed=number)
        arms.append((candidate(family, params, bits, paging), params))
    torch.cuda.synchronize()
    return arms


def _assert_same(mine: list[Any], right: list[Any]) -> None:
    torch.cuda.synchronize()
    for (other, ours), (one, theirs) in zip(mine, right, strict=True):
        other.state_dict()
        assert differences(one, theirs, other, ours) == []


@every_mode
def test_two_optimizers_on_two_streams(strategy: str, write_back: str) -> None:
    right, mine = _serial(8), _candidates(_paging(strategy, write_back))
    streams = [torch.cuda.Stream() for _ in mine]
    for step in range(8):
        for number, ((other, ours), stream) in enumerate(zip(mine, streams, strict=True)):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SPIN // 10)
                _assign(ours, 100 * number + step)
                other.step()
    _assert_same(mine, right)


@every_mode
def test_two_optimizers_in_two_threads(strategy: str, write_back: str) -> None:
    right, mine = _serial(20), _candidates(_paging(strategy, write_back))
    start = threading.Barrier(len(mine))
    errors: list[BaseException] = []

    def train(number: int) -> None:
        try:
            other, ours = mine[number]
            start.wait(30)
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(20):
                    _assign(ours, 100 * number + step)
                    other.step()
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=[number]) for number in range(len(mine))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert errors == []
    _assert_same(mine, right)


# --- forks ----------------------------------------------------------------------------------------


class Asking(Dataset[str]):
    """Its items are what an optimizer says in the worker that loads them."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        self.calls = calls

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, number: int) -> str:
        try:
            self.calls[number]()
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
def test_data_loader_workers_of_every_epoch(write_back: str) -> None:
    """They fork with state page-locked and, under `overlap`, on its way home."""
    theirs, ours = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    one = legacy("PagedAdamW", theirs, 8)
    other = candidate("PagedAdamW", ours, 8, _paging("streamed", write_back))
    write_back_stream = device_for(_gpu()).stream("write_back").raw  # type: ignore[attr-defined]
    empty: dict[str, Any] = {}
    data = Asking(other.step, other.state_dict, lambda: other.load_state_dict(empty))
    for step in range(3):
        for params, optimizer in ((theirs, one), (ours, other)):
            _assign(params, step)
            if optimizer is other:
                with torch.cuda.stream(write_back_stream):
                    torch.cuda._sleep(SPIN)
            optimizer.step()
        loader = DataLoader(data, batch_size=1, num_workers=2, multiprocessing_context="fork")
        said = [text for [text] in loader]
        for text, what in zip(said, ("step", "state_dict", "load_state_dict"), strict=True):
            assert f"{what}() of a paged optimizer was called in a forked child" in text
    other.state_dict()
    torch.cuda.synchronize()
    assert differences(one, theirs, other, ours) == []
    assert other.state[ours[1]]["state1"].is_pinned()
