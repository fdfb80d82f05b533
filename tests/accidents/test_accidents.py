"""What goes on around a step: threads, forks, memory reused at once, objects that go early."""

from __future__ import annotations

import gc
import io
import threading
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import pageahead.device
from pageahead import Paging
from pageahead.device import cpu as cpu_module
from pageahead.device.cpu import CpuDevice
from pageahead.optim import routing
from pageahead.optim.checkpoint import WRAPPED
from pageahead.optim.paged import PagedOptimizer
from tests.lazy import LazyDevice
from tests.support import (
    CPU,
    MIB,
    STRATEGIES,
    assert_same_bits,
    bits,
    legacy,
    ours,
    parameters,
    set_gradients,
    train,
)

SIZES = (120_000, 5, 130_001, 100_000)
NAME = "PagedAdamW8bit"

every_mode = pytest.mark.parametrize(
    ("strategy", "write_back"),
    [(strategy, back) for strategy in STRATEGIES for back in ("before_return", "overlap")],
)


@pytest.fixture
def paging(strategy: str, write_back: str) -> Paging:
    return Paging(strategy=strategy, write_back=write_back, staging=MIB)


def assert_same_state_dict(mine: dict[str, Any], right: dict[str, Any]) -> None:
    assert set(mine["state"]) == set(right["state"])
    for key, entries in right["state"].items():
        found = mine["state"][key]
        assert found["step"] == entries["step"]
        assert set(found[WRAPPED]) == set(entries[WRAPPED])
        for name, tensor in entries[WRAPPED].items():
            assert bits(found[WRAPPED][name]) == bits(tensor), f"{name} of {key}"


# --- right after step() ---------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("seed", range(2))
def test_state_dict_right_after_step(
    seed: int, paging: Paging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when no transfer runs before somebody waits for it, and however streams compete."""
    expected = legacy(NAME, parameters(*SIZES))
    monkeypatch.setitem(pageahead.device._devices, CPU, LazyDevice(seed, host_computes=True))
    optimizer = ours(NAME, parameters(*SIZES), paging=paging)
    for step in range(3):
        for one in (expected, optimizer):
            train(one, [step], absent=[[], [0], []][step])
        assert_same_state_dict(optimizer.state_dict(), expected.state_dict())


@every_mode
def test_memory_of_gradients_is_reused_at_once(paging: Paging) -> None:
    arms = []
    for make, more in ((legacy, {}), (ours, {"paging": paging})):
        found = parameters(*SIZES)
        arms.append(make(NAME, found, **more))
        for step in range(3):
            set_gradients(found, step)
            freed = [parameter.grad.detach() for parameter in found if parameter.grad is not None]
            arms[-1].step()
            arms[-1].zero_grad(set_to_none=True)
            for memory in freed:  # whoever gets it next
                memory.fill_(float("nan"))
    arms[1].state_dict()
    assert_same_bits(arms[1], arms[0])


# --- threads --------------------------------------------------------------------------------------


@every_mode
def test_two_threads_step_at_once(paging: Paging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with an optimizer of its own; the streams and the device are the process's."""
    monkeypatch.setattr(routing, "PAGED_NUMEL", 1_000)
    names, sizes, steps = ("PagedAdamW", "PagedLion8bit"), (3_000, 5, 2_001, 50_000), range(40)
    expected = [legacy(name, parameters(*sizes)) for name in names]
    for one in expected:
        train(one, steps)
    monkeypatch.setitem(pageahead.device._devices, CPU, CpuDevice())
    optimizers = [ours(name, parameters(*sizes), paging=paging) for name in names]
    errors = in_threads(*(lambda one=one: train(one, steps) for one in optimizers))
    assert errors == []
    for optimizer, right in zip(optimizers, expected, strict=True):
        optimizer.state_dict()
        assert_same_bits(optimizer, right)


def in_threads(*calls: Callable[[], object]) -> list[BaseException]:
    """Run calls at once; return what they raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        try:
            start.wait(30)
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return errors


def test_two_threads_get_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `drain` would know of one of two, and memory would go while the other still copies."""
    both = threading.Barrier(2)
    real = cpu_module.WorkerStream

    def make(role: str) -> Any:
        with suppress(threading.BrokenBarrierError):  # the other thread is kept out
            both.wait(0.3)  # until it, too, has found that there is none
        return real(role)

    monkeypatch.setattr(cpu_module, "WorkerStream", make)
    device, got = CpuDevice(), []
    errors = in_threads(*[lambda: got.append(device.stream("fetch"))] * 2)
    assert errors == []
    assert got[0] is got[1] is device.stream("fetch")


# --- forks ----------------------------------------------------------------------------------------


class Asking(Dataset[str]):
    """Its items are what an optimizer says in the worker that loads them."""

    def __init__(self, optimizer: PagedOptimizer, saved: dict[str, Any]) -> None:
        self.calls: list[Callable[[], object]] = [
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(saved),
        ]

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, number: int) -> str:
        try:
            self.calls[number]()
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("strategy", "write_back"), [("streamed", "overlap"), ("lookahead", "before_return")]
)
def test_data_loader_workers_of_every_epoch(paging: Paging) -> None:
    """They fork between steps, with write-backs on their way, and are told what they may not do."""
    expected = legacy(NAME, parameters(*SIZES))
    optimizer = ours(NAME, parameters(*SIZES), paging=paging)
    train(optimizer, [0])
    data = Asking(optimizer, optimizer.state_dict())
    for epoch in range(3):
        train(optimizer, [1 + 2 * epoch])
        loader = DataLoader(data, batch_size=1, num_workers=2, multiprocessing_context="fork")
        said = [text for [text] in loader]
        for text, what in zip(said, ("step", "state_dict", "load_state_dict"), strict=True):
            assert f"{what}() of a paged optimizer was called in a forked child" in text
        train(optimizer, [2 + 2 * epoch])
    train(expected, range(7))
    assert_same_state_dict(optimizer.state_dict(), expected.state_dict())


# --- who goes first -------------------------------------------------------------------------------


@every_mode
def test_the_model_outlives_the_optimizer(paging: Paging) -> None:
    """Dropped with transfers on their way; another one goes on with the same parameters."""
    arms = []
    for make, more in ((legacy, {}), (ours, {"paging": paging})):
        model = parameters(*SIZES)
        first = make(NAME, model, **more)
        train(first, range(2))
        del first
        gc.collect()
        arms.append(make("PagedLion8bit", model, **more))
        train(arms[-1], range(2, 4))
    arms[1].state_dict()
    assert_same_bits(arms[1], arms[0])


@every_mode
def test_the_optimizer_outlives_the_model(paging: Paging) -> None:
    arms = []
    for make, more in ((legacy, {}), (ours, {"paging": paging})):
        model = torch.nn.Sequential(torch.nn.Linear(400, 300), torch.nn.Linear(300, 2))
        with torch.no_grad():
            for parameter, value in zip(
                model.parameters(), parameters((300, 400), 300, (2, 300), 2), strict=True
            ):
                parameter.copy_(value)
        arms.append(make(NAME, model.parameters(), **more))
        train(arms[-1], [0])
        del model
        gc.collect()
        train(arms[-1], [1])
    assert_same_state_dict(arms[1].state_dict(), arms[0].state_dict())
    assert_same_bits(arms[1], arms[0])


@every_mode
def test_a_state_dict_outlives_both(paging: Paging) -> None:
    expected = legacy(NAME, parameters(*SIZES))
    train(expected, range(2))

    def saved() -> dict[str, Any]:
        optimizer = ours(NAME, parameters(*SIZES), paging=paging)
        train(optimizer, range(2))
        return optimizer.state_dict()

    kept = saved()
    gc.collect()
    others = [ours(NAME, parameters(*SIZES), paging=paging) for _ in range(3)]
    for other in others:  # would get the memory if it had been given back
        train(other, range(7, 9))
    assert_same_state_dict(kept, expected.state_dict())


# --- inputs that broke others ---------------------------------------------------------------------


@every_mode
def test_a_rate_that_halves_moves_a_parameter_by_the_series(paging: Paging) -> None:
    """With values worked out by hand: Lion moves by the rate in the direction of the gradient."""
    trained, frozen = torch.nn.Parameter(torch.zeros(120_000)), torch.nn.Parameter(torch.ones(9))
    large_frozen = torch.nn.Parameter(torch.ones(110_000), requires_grad=False)
    frozen.requires_grad_(False)
    optimizer = ours(
        "PagedLion", [frozen, trained, large_frozen], lr=1.0, weight_decay=0.0, paging=paging
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(4):
        trained.grad = torch.full_like(trained, -1.0)
        trained.grad[60_000:] = 3.0
        optimizer.step()
        schedule.step()
        moved = 2.0 - 0.5**step
        assert torch.all(trained[:60_000] == moved)
        assert torch.all(trained[60_000:] == -moved)
    assert schedule.get_last_lr() == [0.5**4]
    assert torch.all(frozen == 1)
    assert torch.all(large_frozen == 1)
    assert list(optimizer.state) == [trained]


def file_of(saved: dict[str, Any], device: str = "cpu") -> io.BytesIO:
    """A checkpoint as it would have been written had every tensor been on `device`."""
    written, moved = io.BytesIO(), io.BytesIO()
    torch.save(saved, written)
    name = device.encode()
    with zipfile.ZipFile(written) as source, zipfile.ZipFile(moved, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith("data.pkl"):
                content = content.replace(
                    b"X\x03\x00\x00\x00cpu", b"X" + len(name).to_bytes(4, "little") + name
                )
            target.writestr(entry, content)
    moved.seek(0)
    return moved


@every_mode
@pytest.mark.parametrize("written_on", ["cpu", "cuda:1"])
def test_resumed_from_a_file_mapped_to_the_cpu(written_on: str, paging: Paging) -> None:
    uninterrupted = ours(NAME, parameters(*SIZES), paging=paging)
    schedule = torch.optim.lr_scheduler.LambdaLR(uninterrupted, lambda step: 0.5**step)
    for step in range(3):
        train(uninterrupted, [step])
        schedule.step()
    weights = [parameter.detach().clone() for parameter in uninterrupted.state]
    file = file_of({"weights": weights, "optimizer": uninterrupted.state_dict()}, written_on)
    if written_on != "cpu":
        with pytest.raises(RuntimeError, match="deserialize"):
            torch.load(file, weights_only=True)
        file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    model = [torch.nn.Parameter(weight) for weight in loaded["weights"]]
    resumed = ours(NAME, model, paging=paging)
    resumed.load_state_dict(loaded["optimizer"])
    again = torch.optim.lr_scheduler.LambdaLR(resumed, lambda step: 0.5**step, last_epoch=2)
    for one, following in ((uninterrupted, schedule), (resumed, again)):
        for step in (3, 4):
            train(one, [step])
            following.step()
        one.state_dict()
    assert_same_bits(resumed, uninterrupted)
    assert resumed.param_groups[0]["lr"] == uninterrupted.param_groups[0]["lr"] == 1e-3 * 0.5**5


def test_more_host_memory_than_exists() -> None:
    """Asked of this machine as it is, for parameters that take no memory themselves."""
    numel = 1 << 43
    parameter = torch.nn.Parameter(torch.zeros(1).expand(numel))
    parameter.grad = torch.zeros(1).expand(numel)
    optimizer = ours(NAME, [parameter])
    with pytest.raises(MemoryError, match=f"needs {2 * numel:,} bytes of host memory, but only"):
        optimizer.step()
    assert not optimizer.state


def test_no_concurrent_managed_access_warns_once_per_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when parameters come and go, which decides anew how to move state."""
    obstacle = "pages cannot move"
    monkeypatch.setattr(CpuDevice, "lookahead_obstacle", lambda self: obstacle)
    arms = [
        legacy(NAME, parameters(*SIZES)),
        ours(NAME, parameters(*SIZES), paging=Paging(strategy="lookahead")),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, absent in enumerate(([], [0], [0, 2], [], [0, 2, 3], [])):
            for one in arms:
                train(one, [step], absent)
    assert_same_bits(arms[1], arms[0])
    said = [str(warning.message) for warning in caught]
    assert said == [f"strategy='lookahead' runs as 'sequential': {obstacle}"]
