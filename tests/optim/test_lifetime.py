"""Memory: made once, the same from step to step, and gone with its last user."""

from __future__ import annotations

import gc
import os
import signal
import traceback
import weakref
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pageahead import Paging
from pageahead.memory.arena import Arena
from pageahead.memory.ring import Ring
from pageahead.optim import engine as engine_module
from pageahead.optim.paged import PagedOptimizer
from tests.support import CPU, MIB, STRATEGIES, ours, parameters, paths, train, unique_parameters


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What goes has to go without the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def arena_of(optimizer: PagedOptimizer) -> Arena:
    arena = optimizer._engines[CPU].arena
    assert arena is not None
    return arena


def ring_of(optimizer: PagedOptimizer) -> Ring:
    ring = optimizer._engines[CPU].ring
    assert ring is not None
    return ring


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
def test_twenty_optimizers_leave_nothing_behind(write_back: str) -> None:
    process = psutil.Process()
    references: list[weakref.ref[object]] = []

    def one() -> None:
        paging = Paging(staging=4 * MIB, write_back=write_back)
        optimizer = ours("PagedAdamW", parameters(1_000_000, 500_000), paging=paging)
        train(optimizer, range(2))
        references.extend(
            weakref.ref(thing)
            for thing in (
                optimizer,
                *arena_of(optimizer)._pages,
                ring_of(optimizer),
                *(slot.memory for slot in ring_of(optimizer).slots),
                *(state["state1"] for state in optimizer.state.values()),
            )
        )

    for _ in range(3):
        one()
    before = process.memory_info().rss
    for _ in range(20):
        one()
    assert not [reference for reference in references if reference() is not None]
    assert process.memory_info().rss - before < 12 * MIB  # one optimizer's state


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("strategy", ["lookahead", "sequential"])
def test_managed_state_goes_with_the_optimizer(strategy: str) -> None:
    optimizer = ours("PagedAdamW", parameters(*[120_000] * 2), paging=Paging(strategy=strategy))
    train(optimizer, range(2))
    references = [weakref.ref(state["state1"]) for state in optimizer.state.values()]
    del optimizer
    assert [reference() for reference in references] == [None, None]


@pytest.mark.usefixtures("no_gc")
def test_a_failed_step_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> list[weakref.ref[object]]:
        optimizer = ours("PagedAdamW", parameters(120_000, 130_000), paging=Paging(staging=MIB))

        def launch(*_: object) -> None:
            raise ValueError("no kernel")

        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "launch", launch)
            with pytest.raises(ValueError, match="no kernel"):
                train(optimizer, range(1))
        return [weakref.ref(optimizer), weakref.ref(arena_of(optimizer)._pages[0])]

    references = step()
    gc.collect()  # the error's traceback is in a cycle of pytest's
    assert [reference() for reference in references] == [None, None]


@pytest.mark.usefixtures("no_gc")
def test_state_outlives_its_optimizer() -> None:
    """As when a checkpoint is written after the optimizer is gone."""
    optimizer = ours("PagedAdamW", parameters(120_000, 130_000))
    train(optimizer, range(2))
    saved = optimizer.state_dict()
    tensor = saved["state"][0]["__bnb_optimizer_quant_state__"]["state1"]
    kept = tensor.clone()
    pages = weakref.ref(arena_of(optimizer)._pages[0])
    del optimizer, saved
    assert pages() is not None
    assert torch.equal(tensor, kept)
    del tensor
    assert pages() is None


@pytest.mark.usefixtures("no_gc")
def test_state_that_is_replaced_is_not_kept() -> None:
    """Not even for parameters that have no gradient from then on."""
    optimizer = ours("PagedAdamW", parameters(120_000, 130_000), optim_bits=32)
    narrow = ours("PagedAdamW", parameters(120_000, 130_000), optim_bits=8)
    for one in (optimizer, narrow):
        train(one, range(1))
    before = [weakref.ref(pages) for pages in arena_of(optimizer)._pages]
    optimizer.load_state_dict(narrow.state_dict())
    assert [one() for one in before] == [None]


def test_gradients_are_not_kept() -> None:
    """A closed step holds no gradient, which ``zero_grad`` is to free."""
    optimizer = ours("PagedAdamW", parameters(120_000, 130_000), paging=Paging(staging=MIB))
    train(optimizer, range(2))
    gradients = [weakref.ref(parameter.grad) for parameter in unique_parameters(optimizer)]
    optimizer.zero_grad()
    assert [gradient() for gradient in gradients] == [None, None]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_unchanged_step_prepares_nothing_again(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paging = Paging(strategy=strategy, staging=MIB)
    optimizer = ours("PagedAdamW", parameters(120_000, 130_000), paging=paging)
    train(optimizer, range(1))
    engine = optimizer._engines[CPU]
    plan, ring = engine._plan, engine.ring
    monkeypatch.setattr(engine, "_build", None)  # not called
    train(optimizer, range(1, 4))
    assert engine._plan is plan
    assert engine.ring is ring


def test_slots_are_reused_and_grow_when_needed() -> None:
    optimizer = ours("PagedAdamW8bit", parameters(100_000, 600_000))
    train(optimizer, range(1), absent=[1])
    small = ring_of(optimizer)
    train(optimizer, range(1, 2))
    large = ring_of(optimizer)
    assert large.slot_bytes > small.slot_bytes
    train(optimizer, range(2, 3), absent=[1])
    assert ring_of(optimizer) is large


@pytest.mark.usefixtures("no_gc")
def test_old_slots_go_before_new_ones_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both together would raise the peak of device memory."""
    optimizer = ours("PagedAdamW8bit", parameters(100_000, 600_000))
    train(optimizer, range(1), absent=[1])
    old = weakref.ref(ring_of(optimizer))
    alive: list[bool] = []

    class Watched(Ring):
        def __init__(self, *arguments: object) -> None:
            alive.append(old() is not None)
            super().__init__(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "Ring", Watched)
    train(optimizer, range(1, 2))
    assert alive == [False]


def test_the_ring_stays_within_staging() -> None:
    for staging in (MIB, 3 * MIB):
        optimizer = ours("PagedAdamW", parameters(900_000), paging=Paging(staging=staging))
        train(optimizer, range(1))
        assert 0 < ring_of(optimizer).nbytes <= staging


def test_the_arena_holds_state_and_little_else() -> None:
    optimizer = ours("PagedAdamW", parameters(*[100_001] * 6, 50))
    train(optimizer, range(1))
    state = 6 * 8 * 100_001
    assert state <= arena_of(optimizer).nbytes < state + 6 * 2 * 256


# --- forks ----------------------------------------------------------------------------------------


def exit_status_of_child(child: Callable[[], None], seconds: int = 60) -> int:
    """Run `child` in a forked process; 0 if it returns, 1 if it raises."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)  # ends a child that hangs
        try:
            child()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
class TestFork:
    @pytest.fixture
    def optimizer(self) -> PagedOptimizer:
        optimizer = ours("PagedAdamW", parameters(120_000, 130_000), paging=Paging(staging=MIB))
        train(optimizer, range(2))
        return optimizer

    def test_a_child_may_not_touch_the_state(self, optimizer: PagedOptimizer) -> None:
        saved = optimizer.state_dict()

        def child() -> None:
            for what, call in (
                ("step()", optimizer.step),
                ("state_dict()", optimizer.state_dict),
                ("load_state_dict()", lambda: optimizer.load_state_dict(saved)),
            ):
                with pytest.raises(RuntimeError) as caught:
                    call()
                assert f"{what} of a paged optimizer was called in a forked child" in str(
                    caught.value
                )
                assert "Make a new optimizer here, or call it in the parent" in str(caught.value)

        assert exit_status_of_child(child) == 0
        train(optimizer, range(2, 3))  # the parent goes on

    def test_a_child_may_drop_it_and_exit(self) -> None:
        held = [ours("PagedAdamW", parameters(120_000, 130_000), paging=Paging(staging=MIB))]
        train(held[0], range(2))
        pages = weakref.ref(arena_of(held[0])._pages[0])

        def child() -> None:
            held[0].zero_grad()
            assert paths(held[0]) == ["streamed", "streamed"]
            held.clear()
            gc.collect()
            assert pages() is None

        assert exit_status_of_child(child) == 0

    def test_a_child_may_make_its_own(self, optimizer: PagedOptimizer) -> None:
        def child() -> None:
            torch.set_num_threads(1)  # OpenMP's do not survive the fork
            own = ours("PagedAdamW", parameters(120_000, 130_000), paging=Paging(staging=MIB))
            train(own, range(2))
            assert paths(own) == ["streamed", "streamed"]

        assert exit_status_of_child(child) == 0

    def test_data_loader_workers(self, optimizer: PagedOptimizer) -> None:
        data = TensorDataset(torch.arange(8.0))
        for step in range(2):
            for _ in DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork"):
                train(optimizer, [step])
