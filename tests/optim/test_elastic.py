"""Residency that follows free memory: when it is decided, what moves, and never a changed bit."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pageahead.device
from pageahead import Paging, Residency
from pageahead.device.cpu import CpuBlock
from pageahead.device.protocol import Memory
from pageahead.memory import host
from pageahead.optim import elastic, moving, reserve
from pageahead.optim.paged import PagedOptimizer
from tests.lazy import LazyDevice
from tests.support import (
    CPU,
    MIB,
    assert_same_bits,
    bits,
    cpu_device,
    legacy,
    ours,
    parameters,
    paths,
    set_gradients,
    train,
    unique_parameters,
)

SIZES = (100_000, 120_000, 50, 150_000, 100_000, 110_000, 200_000)
LARGE = sum(size for size in SIZES if size >= 100_000)
STATE = 8 * LARGE
"""Bytes of AdamW's 32-bit state that can be paged."""
BESIDE = 8 * 50
"""Bytes of the state that stays on the device in any case."""
SMALLEST = 8 * 100_000
RESERVE = 4 * MIB
STAGING = MIB
NAMES = ("PagedAdam8bit", "PagedAdam32bit", "PagedLion8bit", "PagedAdEMAMix8bit", "PagedAdEMAMix")


class Gpu:
    """What a GPU would have free: room that the test sets, less what our optimizer holds."""

    def __init__(self) -> None:
        self.room = 0
        """Bytes beyond the reserve if the optimizer held nothing."""
        self.optimizer: Callable[[], PagedOptimizer | None] = lambda: None

    def of(self, optimizer: PagedOptimizer) -> PagedOptimizer:
        self.optimizer = weakref.ref(optimizer)
        return optimizer

    def free_bytes(self) -> int:
        optimizer = self.optimizer()
        held = 0
        if optimizer is not None:
            now = optimizer.residency()
            held = now.resident + now.slots
        return max(0, self.room + RESERVE - held)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(cpu_device(), "free_bytes", gpu.free_bytes)
    monkeypatch.setattr(moving, "GROUP_BYTES", 1)  # a block for each parameter
    return gpu


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "PATIENCE", 1)
    monkeypatch.setattr(elastic, "MOST_PATIENCE", 1)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    gc.collect()


def paging(**kwargs: Any) -> Paging:
    return Paging(**{"hbm_reserve": RESERVE, "staging": STAGING, **kwargs})


def adamw(gpu: Gpu, sizes: tuple[int, ...] = SIZES, **kwargs: Any) -> PagedOptimizer:
    return gpu.of(ours("PagedAdamW", parameters(*sizes), paging=paging(**kwargs)))


def backward(optimizer: torch.optim.Optimizer) -> None:
    """A real one, whose gradients are then replaced by seeded ones."""
    torch.stack([one.sum() for one in unique_parameters(optimizer)]).sum().backward()  # type: ignore[no-untyped-call]


def steps(optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        backward(optimizer)
        train(optimizer, [number])


def ring(optimizer: PagedOptimizer) -> Any:
    return optimizer._engines[CPU].ring


def arena_bytes(optimizer: PagedOptimizer) -> int:
    arena = optimizer._engines[CPU].arena
    assert arena is not None
    return arena.nbytes


def assert_state_is_where_it_is_said(optimizer: PagedOptimizer) -> None:
    arena = optimizer._engines[CPU].arena
    assert arena is not None
    for route, parameter in zip(optimizer.routes(), unique_parameters(optimizer), strict=True):
        for key in ("state1", "state2"):
            tensor = optimizer.state[parameter].get(key)
            if tensor is not None:
                inside = any(
                    one.data_ptr() <= tensor.data_ptr() < one.data_ptr() + one.nbytes
                    for one in arena._segments
                )
                assert inside == (route.path == "streamed"), route
                assert tensor.untyped_storage().nbytes() == tensor.nbytes or inside


# --- when it is decided -------------------------------------------------------------------------


def test_without_a_backward_nothing_is_decided(gpu: Gpu) -> None:
    """As when torch.distributed.checkpoint steps with zeros to have state made."""
    gpu.room = 2 * STATE
    optimizer = adamw(gpu)
    train(optimizer, range(3))
    assert optimizer.residency().resident == 0
    assert paths(optimizer).count("streamed") == 6


def test_the_first_backward_decides_before_state_is_made(gpu: Gpu) -> None:
    gpu.room = 2 * STATE
    optimizer = adamw(gpu)
    steps(optimizer, range(1))
    assert optimizer.residency() == Residency(STATE, 0, 0)
    assert ring(optimizer) is None
    assert arena_bytes(optimizer) == 0
    assert set(paths(optimizer)) == {"resident"}


def test_a_backward_after_state_was_made_decides_too(gpu: Gpu) -> None:
    gpu.room = 2 * STATE
    optimizer = adamw(gpu)
    train(optimizer, range(1))
    steps(optimizer, range(1, 2))
    assert optimizer.residency() == Residency(STATE, 0, 0)
    assert ring(optimizer) is None


def test_all_fits_to_the_byte(gpu: Gpu) -> None:
    for missing in (0, 1):
        gpu.room = STATE + BESIDE - missing
        optimizer = adamw(gpu)
        steps(optimizer, range(1))
        assert (optimizer.residency().host == 0) == (missing == 0)


def test_slots_and_small_state_count(gpu: Gpu) -> None:
    gpu.room = STATE // 2
    optimizer = adamw(gpu)
    steps(optimizer, range(1))
    now = optimizer.residency()
    assert 0 < now.slots <= STAGING
    assert now.resident + now.slots + BESIDE <= gpu.room
    assert now.resident > gpu.room - STAGING - 8 * max(SIZES)
    assert now.resident + now.host == STATE
    assert arena_bytes(optimizer) < now.host + 4096  # resident state never had a place there
    assert_state_is_where_it_is_said(optimizer)


def test_room_for_less_than_the_ring(gpu: Gpu) -> None:
    gpu.room = STAGING - 1
    optimizer = adamw(gpu)
    steps(optimizer, range(2))
    assert optimizer.residency().resident == 0


def test_absmax_counts(gpu: Gpu) -> None:
    state, absmax = 2 * 1_000_000, 2 * 4 * 3907
    for missing in (0, 1):
        gpu.room = state + absmax - missing
        found = parameters(1_000_000)
        optimizer = gpu.of(ours("PagedAdamW8bit", found, paging=paging()))
        steps(optimizer, range(1))
        assert optimizer.residency().resident == (0 if missing else state)


def test_a_reserve_that_nobody_set_is_what_activations_took(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserve, "LEAST", 1)
    took = 2 * RESERVE
    now = Memory(allocated=0, peak=0, kept=0)
    monkeypatch.setattr(cpu_device(), "memory", lambda: now)
    gpu.room = RESERVE + STATE // 2 + STAGING
    optimizer = adamw(gpu, hbm_reserve=None)
    gradients = 4 * (LARGE + 50)
    now = Memory(allocated=gradients, peak=took, kept=0)
    for _ in range(3):
        steps(optimizer, range(1))
        held = optimizer.residency()
        free = gpu.room + RESERVE - held.resident - held.slots
        assert took <= free - BESIDE < took + 8 * max(SIZES) + STAGING
    # A batch twice as long came: PyTorch keeps its room now, which is not free any more.
    gpu.room -= took
    now = Memory(allocated=gradients, peak=2 * took, kept=took)
    steps(optimizer, range(3))
    assert optimizer.residency() == held


def test_hooks_go_once_there_was_a_backward(gpu: Gpu) -> None:
    optimizer = adamw(gpu)
    found = unique_parameters(optimizer)
    assert all(one._post_accumulate_grad_hooks for one in found)
    handles = [one.register_post_accumulate_grad_hook(lambda _: None) for one in found]
    for one in found:
        # FSDP2 does this; a hook that removes itself would break it.
        for hook in (one._post_accumulate_grad_hooks or {}).values():
            hook(one)
    steps(optimizer, range(1))
    for handle in handles:
        handle.remove()
    assert not any(one._post_accumulate_grad_hooks for one in found)


def test_hooks_go_with_the_optimizer_and_do_not_keep_it(gpu: Gpu) -> None:
    optimizer = adamw(gpu)
    found = unique_parameters(optimizer)
    reference = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()
    assert not any(one._post_accumulate_grad_hooks for one in found)


@pytest.mark.parametrize("fixed", [{"hbm_budget": 0}, {"strategy": "lookahead"}])
def test_nobody_watches_who_need_not(gpu: Gpu, fixed: dict[str, Any]) -> None:
    gpu.room = 2 * STATE
    optimizer = adamw(gpu, **fixed)
    assert not any(one._post_accumulate_grad_hooks for one in unique_parameters(optimizer))
    steps(optimizer, range(3))
    assert optimizer.residency().resident == 0


def test_a_group_added_later_is_watched(gpu: Gpu) -> None:
    gpu.room = 2 * STATE
    optimizer = adamw(gpu)
    train(optimizer, range(1))
    added = parameters(100_000)[0]
    optimizer.add_param_group({"params": [added]})
    train(optimizer, range(1, 2))
    added.sum().backward()  # type: ignore[no-untyped-call]
    train(optimizer, range(2, 3))
    assert optimizer.residency().host == 0


def test_parameters_that_appear_later_get_what_is_left(gpu: Gpu) -> None:
    gpu.room = 2_000_000
    optimizer = adamw(gpu, (100_000,) * 5, staging=MIB)
    backward(optimizer)
    train(optimizer, range(1), absent=[0, 1, 2, 3])
    assert optimizer.residency() == Residency(SMALLEST, 0, 0)
    steps(optimizer, range(1, 2))
    now = optimizer.residency()
    assert now.resident + now.slots <= gpu.room
    assert now.resident + now.host == 5 * SMALLEST


def test_max_unorm_is_resident_where_there_is_room(gpu: Gpu) -> None:
    gpu.room = 2 * SMALLEST
    optimizer = adamw(gpu, (100_000,))
    optimizer.args.max_unorm = 0.5
    train(optimizer, range(2))  # no backward: but it has to be somewhere
    assert optimizer.residency().resident == SMALLEST
    assert optimizer.release(1) == 0  # and stays there
    gpu.room = 0
    refused = adamw(gpu, (100_000,))
    refused.args.max_unorm = 0.5
    with pytest.raises(ValueError, match="max_unorm > 0"):
        steps(refused, range(1))


def test_what_one_launch_cannot_update_stays_cut(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from pageahead.optim import homes

    monkeypatch.setattr(homes, "MAX_LAUNCH", 150_000)
    gpu.room = 2 * STATE * 2
    optimizer = gpu.of(ours("PagedAdEMAMix", parameters(*SIZES), paging=paging()))
    steps(optimizer, range(3))
    assert [route.path for route in optimizer.routes() if route.numel == 200_000] == ["streamed"]
    assert paths(optimizer).count("streamed") == 1
    assert "too large for one launch" in optimizer.routes()[-1].reason


# --- giving back and returning ------------------------------------------------------------------


def test_the_reserve_is_restored_and_room_is_taken_after_a_while(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pageahead")
    gpu.room = 2 * STATE
    optimizer = adamw(gpu)
    steps(optimizer, range(2))
    gpu.room = STATE // 2
    steps(optimizer, range(2, 3))
    now = optimizer.residency()
    assert 0 < now.resident <= STATE // 2 - now.slots
    assert gpu.free_bytes() >= RESERVE
    assert [one.levelname for one in caplog.records if "given back" in one.message] == ["WARNING"]
    gpu.room = 0
    steps(optimizer, range(3, 4))
    assert optimizer.residency().resident == 0
    assert len([one for one in caplog.records if "given back" in one.message]) == 1  # once

    gpu.room = 2 * STATE  # twice the patience for each time
    patience = 4 * elastic.PATIENCE
    for number in range(patience - 1):
        train(optimizer, [4 + number])
        assert optimizer.residency().resident == 0
    train(optimizer, [4 + patience])
    assert optimizer.residency() == Residency(STATE, 0, 0)
    assert_state_is_where_it_is_said(optimizer)


def test_room_that_comes_and_goes_is_not_taken(gpu: Gpu) -> None:
    optimizer = adamw(gpu)
    steps(optimizer, range(1))
    for number in range(1, 60):
        gpu.room = 0 if number % elastic.PATIENCE == 0 else 2 * STATE
        train(optimizer, [number])
        assert optimizer.residency().resident == 0


def test_no_more_is_taken_than_there_was_at_the_worst(gpu: Gpu) -> None:
    optimizer = adamw(gpu)
    steps(optimizer, range(1))
    worst = RESERVE // 4 + STAGING + STATE // 3
    for number in range(1, 1 + elastic.PATIENCE):
        gpu.room = worst if number == 3 else 2 * STATE
        train(optimizer, [number])
    assert 0 < optimizer.residency().resident <= STATE // 3


def test_room_within_a_quarter_of_the_reserve_is_left(gpu: Gpu) -> None:
    optimizer = adamw(gpu)
    steps(optimizer, range(1))
    gpu.room = optimizer.residency().slots + SMALLEST + RESERVE // 4 - 1
    train(optimizer, range(1, 4 * elastic.PATIENCE))
    assert optimizer.residency().resident == 0
    gpu.room += 1
    gpu_before = optimizer.residency()
    train(optimizer, range(40, 40 + elastic.PATIENCE))
    assert optimizer.residency().resident >= gpu_before.resident


def test_blocks_go_home_whole(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "GROUP_BYTES", 1_700_000)
    gpu.room = 2 * STATE
    optimizer = adamw(gpu)
    steps(optimizer, range(1))
    homes = [home for home in optimizer._homes.values() if home.movable]
    blocks = list(dict.fromkeys(home.block for home in homes))
    assert 1 < len(blocks) < len(homes)
    assert optimizer.release(1) > 8 * max(SIZES[:3])
    for block in blocks:
        assert len({home.paged for home in homes if home.block is block}) <= 1


def test_a_block_goes_at_once(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its last tensor: only then does its memory return to the driver."""
    blocks: list[weakref.ref[CpuBlock]] = []
    tensors: list[weakref.ref[torch.Tensor]] = []
    early: list[int] = []

    class Watched(CpuBlock):
        def tensor(self, *arguments: Any) -> torch.Tensor:
            made = super().tensor(*arguments)
            tensors.append(weakref.ref(made))
            mine.append(weakref.ref(made))
            return made

        def __init__(self) -> None:
            self.mine = mine

        def __del__(self) -> None:
            early.append(sum(one() is not None for one in self.mine))

    mine: list[weakref.ref[torch.Tensor]] = []

    def block() -> CpuBlock:
        nonlocal mine
        mine = []
        made = Watched()
        blocks.append(weakref.ref(made))
        return made

    monkeypatch.setattr(cpu_device(), "block", block)
    gpu.room = 2 * STATE
    optimizer = adamw(gpu, write_back="overlap")
    steps(optimizer, range(2))
    assert len(blocks) == 6
    assert len(tensors) == 12  # all state was made in them
    gc.collect()
    gc.disable()
    try:
        assert optimizer.release(STATE) == STATE
        assert [one() for one in blocks] == [None] * 6
        assert early == [0] * 6
    finally:
        gc.enable()


def test_state_returns_to_its_old_place(gpu: Gpu) -> None:
    optimizer = adamw(gpu)
    train(optimizer, range(1))
    held = arena_bytes(optimizer)
    gpu.room = 2 * STATE
    steps(optimizer, range(1, 2))
    assert optimizer.residency().host == 0
    gpu.room = 0
    steps(optimizer, range(2, 4))
    assert optimizer.residency().resident == 0
    assert arena_bytes(optimizer) == held


def test_without_room_on_the_host_state_stays(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.room = 2 * STATE
    optimizer = adamw(gpu)
    expected = legacy("PagedAdamW", parameters(*SIZES))
    for one in (optimizer, expected):
        steps(one, range(1))
    monkeypatch.setattr(host, "available_bytes", lambda: 0)
    gpu.room = 0
    for one in (optimizer, expected):
        steps(one, range(1, 1 + elastic.PATIENCE))
    assert optimizer.residency() == Residency(STATE, 0, 0)
    said = [one for one in caplog.records if "stays on" in one.message]
    assert len(said) == 1
    assert optimizer.release(1) == 0
    monkeypatch.undo()
    assert optimizer.release(1) > 0
    assert_same_bits(optimizer, expected)


def test_what_has_a_place_goes_home_though_the_host_is_full(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = adamw(gpu)
    train(optimizer, range(1), absent=range(3, 7))  # three have a place
    gpu.room = 2 * STATE
    steps(optimizer, range(1, 2))
    monkeypatch.setattr(host, "available_bytes", lambda: 0)
    assert optimizer.release(STATE) == 8 * 220_000
    assert paths(optimizer)[:2] == ["streamed"] * 2


# --- release ------------------------------------------------------------------------------------


def test_release_takes_resident_state_first_then_the_ring(gpu: Gpu) -> None:
    gpu.room = STATE // 2
    optimizer = adamw(gpu)
    steps(optimizer, range(1))
    before = optimizer.residency()
    freed = optimizer.release(SMALLEST)
    now = optimizer.residency()
    assert freed >= SMALLEST
    assert now == Residency(before.resident - freed, before.host + freed, before.slots)
    rest = optimizer.release(1 << 40)
    assert rest == now.resident + now.slots
    assert optimizer.residency() == Residency(0, STATE, 0)
    assert optimizer.release(1) == 0
    assert_state_is_where_it_is_said(optimizer)


@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
def test_release_changes_no_bits_and_is_not_undone_at_once(gpu: Gpu, write_back: str) -> None:
    gpu.room = STATE // 2
    optimizer = adamw(gpu, write_back=write_back)
    expected = legacy("PagedAdamW", parameters(*SIZES))
    for one in (optimizer, expected):
        steps(one, range(2))
    optimizer.release(STATE)
    gpu.room = 2 * STATE
    for one in (optimizer, expected):
        steps(one, range(2, 2 + elastic.PATIENCE))
    assert optimizer.residency().resident == 0
    for one in (optimizer, expected):
        steps(one, range(20, 20 + elastic.PATIENCE))
    assert optimizer.residency().host == 0
    optimizer.state_dict()
    assert_same_bits(optimizer, expected)


def test_release_makes_room_for_the_ring_that_is_then_needed(gpu: Gpu) -> None:
    gpu.room = STATE + BESIDE
    optimizer = adamw(gpu)
    steps(optimizer, range(1))
    assert ring(optimizer) is None
    optimizer.release(SMALLEST)
    train(optimizer, [1])
    now = optimizer.residency()
    assert now.slots > 0
    assert STATE - now.resident - now.slots >= SMALLEST


def test_nothing_moves_while_a_step_is_under_way(gpu: Gpu) -> None:
    gpu.room = STATE // 2
    optimizer = adamw(gpu)
    steps(optimizer, range(2))
    before = optimizer.residency()
    engine = optimizer._engines[CPU]
    engine.anticipate()
    gpu.room = 0
    assert optimizer.release(STATE) == 0
    optimizer._elastic.before_step(optimizer)
    assert optimizer.residency() == before
    engine.abandon()
    assert optimizer.release(STATE) == before.resident + before.slots


def test_release_starts_the_wait_anew(gpu: Gpu) -> None:
    optimizer = adamw(gpu)
    steps(optimizer, range(1))
    gpu.room = 2 * STATE
    train(optimizer, range(1, elastic.PATIENCE))
    assert optimizer.release(1) > 0  # the ring: nothing is resident yet
    train(optimizer, range(20, 20 + 2 * elastic.PATIENCE - 1))
    assert optimizer.residency().resident == 0
    train(optimizer, range(60, 61))
    assert optimizer.residency().resident == STATE


def test_release_before_anything_was_decided(gpu: Gpu) -> None:
    gpu.room = 2 * STATE
    optimizer = adamw(gpu)
    assert optimizer.release(100) == 0
    train(optimizer, range(1))
    held = optimizer.residency().slots
    assert optimizer.release(100) == held > 0
    steps(optimizer, range(1, 2))
    assert optimizer.residency().resident == 0


def test_new_parameters_do_not_take_what_was_released(gpu: Gpu) -> None:
    gpu.room = 2 * STATE
    optimizer = adamw(gpu)
    backward(optimizer)
    train(optimizer, range(1), absent=[6])
    optimizer.release(STATE)
    steps(optimizer, range(1, 2))
    assert optimizer.residency().resident == 0


def test_release_under_a_fixed_budget(gpu: Gpu) -> None:
    gpu.room = 2 * STATE
    optimizer = adamw(gpu, hbm_budget=0.5)
    expected = legacy("PagedAdamW", parameters(*SIZES))
    for one in (optimizer, expected):
        train(one, range(2))
    held = optimizer.residency().resident
    assert optimizer.release(held) == held
    assert "given back by release()" in {route.reason for route in optimizer.routes()}
    for one in (optimizer, expected):
        steps(one, range(2, 2 + 2 * elastic.PATIENCE))
    assert optimizer.residency().resident == 0
    assert_same_bits(optimizer, expected)


@pytest.mark.parametrize("strategy", ["lookahead", "sequential"])
def test_managed_memory_has_nothing_to_release(gpu: Gpu, strategy: str) -> None:
    optimizer = adamw(gpu, strategy=strategy, hbm_budget=0.5)
    train(optimizer, range(1))
    before = optimizer.residency()
    assert optimizer.release(MIB) == 0
    assert optimizer.residency() == before
    assert before.resident + before.host == STATE


@pytest.mark.parametrize(
    ("nbytes", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_release_takes_bytes(gpu: Gpu, nbytes: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        adamw(gpu).release(nbytes)


# --- errors in the middle -----------------------------------------------------------------------


class Broken(Exception):
    pass


@pytest.mark.parametrize("at", range(0, 8, 3))
@pytest.mark.parametrize("error", [Broken, torch.OutOfMemoryError])
@pytest.mark.parametrize("direction", ["to device", "to host"])
def test_all_or_nothing(
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    error: type[Exception],
    direction: str,
) -> None:
    real = moving._copies
    made: list[object] = []
    armed = False

    def copies(*arguments: Any) -> Any:
        if armed:
            if len(made) == at:
                raise error("no copy")
            made.append(1)
        return real(*arguments)

    monkeypatch.setattr(moving, "_copies", copies)
    sizes = (100_000,) * 10
    gpu.room = 8 * sum(sizes) if direction == "to host" else 0
    optimizer = adamw(gpu, sizes)
    expected = legacy("PagedAdamW", parameters(*sizes))
    if direction == "to host":
        steps(optimizer, range(1))
    else:
        train(optimizer, range(1))
    steps(expected, range(1))
    before = optimizer.residency()
    tensors = [tuple(home.tensors) for home in optimizer._homes.values()]
    held = arena_bytes(optimizer)
    gpu.room = 8 * sum(sizes) - gpu.room
    armed = True
    backward(optimizer)
    set_gradients(unique_parameters(optimizer), 1)
    if direction == "to device" and error is torch.OutOfMemoryError:
        optimizer.step()  # goes on without
    else:
        with pytest.raises(error):
            optimizer.step()
    assert optimizer.residency() == before
    assert arena_bytes(optimizer) == held
    for home, old in zip(optimizer._homes.values(), tensors, strict=True):
        assert all(one is other for one, other in zip(home.tensors, old, strict=True))
    assert not any(home.placed for home in optimizer._homes.values() if not home.paged)
    armed = False
    steps(expected, range(1, 3))
    done = 1 + optimizer.state[unique_parameters(optimizer)[0]]["step"] - 1
    steps(optimizer, range(done, 3))
    assert_same_bits(optimizer, expected)


def test_replaced_state_is_refused_not_moved(gpu: Gpu) -> None:
    optimizer = adamw(gpu)
    train(optimizer, range(1))
    state = optimizer.state[unique_parameters(optimizer)[0]]
    state["state1"] = state["state1"].clone()
    gpu.room = 2 * STATE
    backward(optimizer)
    with pytest.raises(RuntimeError, match="was replaced"):
        optimizer.step()


# --- bits ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
@pytest.mark.parametrize("name", NAMES)
def test_moves_at_every_step_change_no_bits(gpu: Gpu, name: str, write_back: str) -> None:
    expected = legacy(name, parameters(*SIZES))
    optimizer = gpu.of(ours(name, parameters(*SIZES), paging=paging(write_back=write_back)))
    choose = random.Random(name + write_back)
    seen = []
    total = optimizer._pageable_bytes()
    for number in range(14):
        # Down and up in turn, by less and more; not every parameter is active each time.
        low, high = choose.choice([0, 0.3]), choose.choice([0.6, 1.0, 2.0])
        gpu.room = int(total * (high if number % 2 else low)) + (RESERVE if number % 2 else 0)
        absent = [number % 7] if number % 5 == 4 else []
        for one in (expected, optimizer):
            backward(one)
            train(one, [number], absent)
        seen.append(optimizer.residency().resident)
        if number % 3 == 0:
            optimizer.state_dict()
            assert_same_bits(optimizer, expected)
            assert_state_is_where_it_is_said(optimizer)
    optimizer.state_dict()
    assert_same_bits(optimizer, expected)
    moves = sum(one != other for one, other in itertools.pairwise(seen))
    assert moves >= 8, seen


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
def test_moves_wait_for_transfers(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, write_back: str, seed: int
) -> None:
    """Copies run as late as what waits for them allows, so a move that does not wait sees it."""
    lazy = LazyDevice(seed, host_computes=True)
    monkeypatch.setattr(lazy, "free_bytes", gpu.free_bytes)
    monkeypatch.setitem(pageahead.device._devices, CPU, lazy)
    sizes = SIZES[:4]
    expected = legacy("PagedAdamW8bit", parameters(*sizes))
    found = parameters(*sizes)
    optimizer = gpu.of(ours("PagedAdamW8bit", found, paging=paging(write_back=write_back)))
    for number in range(10):
        gpu.room = (0, 0, STATE + RESERVE)[number % 3]
        for one in (expected, optimizer):
            backward(one)
            train(one, [number])
        assert (optimizer.residency().resident > 0) == (number % 3 == 2)
        if number == 5:
            optimizer.release(300_000)
    optimizer.state_dict()
    assert_same_bits(optimizer, expected)


def test_moves_wait_for_updates(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU runs them at once, so no bits can show it; on a GPU they may be on their way."""
    real = moving._copies
    open_ends: list[bool] = []

    def copies(*arguments: Any) -> Any:
        pipeline = optimizer._engines[CPU]._pipeline
        open_ends.append(pipeline._last_updated is not None or pipeline._last_written is not None)
        return real(*arguments)

    monkeypatch.setattr(moving, "_copies", copies)
    optimizer = adamw(gpu, write_back="overlap")
    train(optimizer, range(1))
    gpu.room = 2 * STATE
    steps(optimizer, range(1, 2))
    assert optimizer._engines[CPU]._pipeline._last_updated is not None
    optimizer.release(STATE)
    assert open_ends == [False] * 12


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", NAMES)
def test_release_between_steps_changes_no_bits(gpu: Gpu, name: str) -> None:
    expected = legacy(name, parameters(*SIZES))
    optimizer = gpu.of(ours(name, parameters(*SIZES), paging=paging(write_back="overlap")))
    gpu.room = optimizer._pageable_bytes()
    freed = 0
    for number in range(8):
        for one in (expected, optimizer):
            steps(one, range(number, number + 1))
        freed += optimizer.release(optimizer._pageable_bytes() // (1 + number % 3))
    assert freed > optimizer._pageable_bytes()
    assert_same_bits(optimizer, expected)


def test_a_parameter_listed_twice_moves_once(gpu: Gpu) -> None:
    found, twins = parameters(100_000, 120_000), parameters(100_000, 120_000)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = gpu.of(ours("PagedAdamW", [found[0], *found], paging=paging()))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        expected = legacy("PagedAdamW", [twins[0], *twins])
    gpu.room = STATE
    for one in (optimizer, expected):
        steps(one, range(1))
    assert optimizer.residency().resident == 8 * 220_000
    assert optimizer.release(STATE) == 8 * 220_000
    for one in (optimizer, expected):
        steps(one, range(1, 3))
    assert_same_bits(optimizer, expected)


# --- checkpoints, reasons, cost -----------------------------------------------------------------


@pytest.mark.parametrize("room", [0, STATE // 2, 2 * STATE])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_checkpoint_loads_whatever_is_resident(gpu: Gpu, room: int, stepped: bool) -> None:
    source = legacy("PagedAdamW", parameters(*SIZES))
    train(source, range(3))
    weights = [torch.nn.Parameter(one.detach().clone()) for one in unique_parameters(source)]
    optimizer = gpu.of(ours("PagedAdamW", weights, paging=paging()))
    gpu.room = room
    if stepped:
        before = [one.detach().clone() for one in weights]
        steps(optimizer, range(1))
        with torch.no_grad():
            for one, old in zip(weights, before, strict=True):
                one.copy_(old)
    optimizer.load_state_dict(source.state_dict())
    assert_same_bits(optimizer, source)
    for one in (optimizer, source):
        steps(one, range(3, 5))
    assert_same_bits(optimizer, source)
    assert_state_is_where_it_is_said(optimizer)
    assert (optimizer.residency().resident > 0) == (room > 0)
    saved = optimizer.state_dict()
    fresh = ours("PagedAdamW", parameters(*SIZES), paging=paging(hbm_budget=0))
    fresh.load_state_dict(saved)
    for mine, theirs in zip(unique_parameters(fresh), weights, strict=True):
        assert bits(fresh.state[mine]["state1"]) == bits(optimizer.state[theirs]["state1"])


def test_loaded_state_returns_when_there_is_room(gpu: Gpu) -> None:
    gpu.room = 2 * STATE
    optimizer = adamw(gpu)
    steps(optimizer, range(2))
    source = legacy("PagedAdamW8bit", parameters(*SIZES))
    train(source, range(1))
    gpu.room = 0  # the old state is there while new state is made beside it
    optimizer.load_state_dict(source.state_dict())
    assert optimizer.residency() == Residency(0, STATE // 4, 0)
    gpu.room = 2 * STATE
    train(optimizer, range(2, 2 + 2 * elastic.PATIENCE))
    assert optimizer.residency().host == 0


def test_reasons_stay_true(gpu: Gpu) -> None:
    optimizer = adamw(gpu)
    assert {route.reason.split(" (planned")[0] for route in optimizer.routes()} == {
        "100,000 elements or more",
        "under 100,000 elements, where paging would cost more than it saves",
    }
    gpu.room = STATE // 2
    steps(optimizer, range(1))
    budget = STATE // 2 - BESIDE - STAGING
    for route in optimizer.routes():
        if route.numel >= 100_000 and route.path == "resident":
            assert route.reason == f"within hbm_budget='auto' ({budget:,} bytes)"
        elif route.path == "streamed":
            assert route.reason.endswith(f"beyond hbm_budget='auto' ({budget:,} bytes)")
    optimizer.release(1)
    words = f"hbm_budget='auto' ({optimizer.residency().resident:,} bytes)"
    assert all(words in route.reason for route in optimizer.routes() if route.numel >= 100_000)


def test_where_nothing_changes_nothing_is_rebuilt(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.room = STATE // 2
    optimizer = adamw(gpu)
    steps(optimizer, range(2))
    plan = optimizer._engines[CPU]._plan
    monkeypatch.setattr(elastic, "_members", lambda *_: pytest.fail("looked at each parameter"))
    train(optimizer, range(2, 6))
    assert optimizer._engines[CPU]._plan is plan


def test_nothing_moves_while_a_graph_is_captured(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = adamw(gpu)
    train(optimizer, range(1))
    gpu.room = 2 * STATE
    backward(optimizer)
    monkeypatch.setattr(cpu_device(), "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured"):
        optimizer.step()
    assert optimizer.residency().resident == 0
