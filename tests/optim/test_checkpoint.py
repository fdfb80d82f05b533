"""State dicts: ours and bitsandbytes' are one format, and what does not fit changes nothing."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bitsandbytes.optim.optimizer import MockArgs

from pageahead import Paging
from pageahead.memory import host
from pageahead.memory.host import HostMemoryError
from pageahead.optim.fitting import WRAPPED, CheckpointError
from pageahead.optim.paged import PagedOptimizer
from tests.support import (
    MIB,
    STRATEGIES,
    TINY_RING,
    Snapshot,
    assert_same_bits,
    bits,
    legacy,
    ours,
    parameters,
    paths,
    train,
    unique_parameters,
)

SIZES = (130_001, 5_000, 100_000, 300, 0)
NAMES = [
    f"Paged{family}{bits}" for family in ("AdamW", "Lion", "AdEMAMix") for bits in ("8bit", "32bit")
]


def trained(name: str = "PagedAdamW8bit", steps: int = 3, **kwargs: Any) -> PagedOptimizer:
    optimizer = ours(name, parameters(*SIZES), **kwargs)
    train(optimizer, range(steps))
    return optimizer


def with_weights_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(parameter.detach().clone()) for parameter in unique_parameters(optimizer)
    ]


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """As bitsandbytes wrote it before it kept tensors from FSDP."""
    state = {
        key: {**{k: v for k, v in entries.items() if k != WRAPPED}, **entries.get(WRAPPED, {})}
        for key, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_continues_like_the_uninterrupted_one(name: str, strategy: str) -> None:
    paging = Paging(strategy=strategy, staging=MIB)
    uninterrupted = trained(name, paging=paging)
    resumed = ours(name, with_weights_of(uninterrupted), paging=paging)
    resumed.load_state_dict(through_a_file(uninterrupted.state_dict()))
    assert_same_bits(resumed, uninterrupted)
    assert paths(resumed) == paths(uninterrupted)
    for optimizer in (uninterrupted, resumed):
        train(optimizer, range(3, 6))
    assert_same_bits(resumed, uninterrupted)


@pytest.mark.parametrize("name", NAMES)
def test_ours_and_legacy_load_each_other(name: str) -> None:
    mine, theirs = trained(name, paging=TINY_RING), legacy(name, parameters(*SIZES))
    train(theirs, range(3))
    from_theirs = ours(name, with_weights_of(theirs), paging=TINY_RING)
    from_theirs.load_state_dict(through_a_file(theirs.state_dict()))
    from_mine = legacy(name, with_weights_of(mine))
    from_mine.load_state_dict(through_a_file(mine.state_dict()))
    for optimizer in (mine, theirs, from_mine, from_theirs):
        train(optimizer, range(3, 5))
    for optimizer in (mine, from_mine, from_theirs):
        assert_same_bits(optimizer, theirs)


def test_state_dict_is_bitsandbytes_own_format() -> None:
    mine, theirs = trained("PagedAdamW8bit"), legacy("PagedAdamW8bit", parameters(*SIZES))
    train(theirs, range(3))
    one, other = mine.state_dict(), theirs.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for key, entries in other["state"].items():
        assert one["state"][key].keys() == entries.keys()
        assert one["state"][key][WRAPPED].keys() == entries[WRAPPED].keys()


def test_the_unwrapped_format_loads() -> None:
    before = trained()
    resumed = ours("PagedAdamW8bit", with_weights_of(before))
    resumed.load_state_dict(unwrapped(before.state_dict()))
    assert_same_bits(resumed, before)


def test_a_step_saved_as_a_tensor_loads() -> None:
    before = trained()
    saved = before.state_dict()
    for entries in saved["state"].values():
        entries["step"] = torch.tensor(float(entries["step"]))
    resumed = ours("PagedAdamW8bit", with_weights_of(before))
    resumed.load_state_dict(saved)
    assert_same_bits(resumed, before)


def test_hyperparameters_of_the_groups_load() -> None:
    before = trained(lr=3e-4)
    resumed = ours("PagedAdamW8bit", with_weights_of(before))
    parameters_before = resumed.param_groups[0]["params"]
    resumed.load_state_dict(before.state_dict())
    assert resumed.param_groups[0]["lr"] == 3e-4
    assert resumed.param_groups[0]["params"] is parameters_before


def test_state_of_some_parameters_only() -> None:
    before = ours("PagedAdamW", parameters(*SIZES))
    train(before, range(2), absent=[0, 3])
    resumed = ours("PagedAdamW", with_weights_of(before))
    resumed.load_state_dict(before.state_dict())
    assert_same_bits(resumed, before)
    for optimizer in (before, resumed):
        train(optimizer, range(2, 4))
    assert_same_bits(resumed, before)


def test_an_empty_state_dict_clears_state() -> None:
    optimizer = trained()
    optimizer.load_state_dict(ours("PagedAdamW8bit", parameters(*SIZES)).state_dict())
    assert not optimizer.state
    fresh = ours("PagedAdamW8bit", with_weights_of(optimizer))
    for one in (optimizer, fresh):
        train(one, range(2))
    assert_same_bits(optimizer, fresh)


def test_empty_entries_are_no_state() -> None:
    optimizer = ours("PagedAdamW", parameters(120_000))
    saved = optimizer.state_dict()
    saved["state"] = {0: {}}
    optimizer.load_state_dict(saved)
    assert not optimizer.state


def test_the_width_of_the_checkpoint_wins_as_with_bitsandbytes() -> None:
    before = trained("PagedAdamW", optim_bits=8)
    resumed = ours("PagedAdamW", with_weights_of(before), optim_bits=32)
    resumed.load_state_dict(before.state_dict())
    for optimizer in (before, resumed):
        train(optimizer, range(3, 5))
    assert_same_bits(resumed, before)


def test_a_parameter_listed_twice() -> None:
    found = parameters(120_000, 130_000)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        before = ours("PagedAdamW", [found[0], found[1], found[0]])
    train(before, range(2))
    one, two = with_weights_of(before)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        resumed = ours("PagedAdamW", [one, two, one])
    resumed.load_state_dict(through_a_file(before.state_dict()))
    for optimizer in (before, resumed):
        train(optimizer, range(2, 4))
    assert_same_bits(resumed, before)


@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
def test_loading_into_a_fitting_optimizer_keeps_its_tensors(write_back: str) -> None:
    paging = Paging(staging=MIB, write_back=write_back)
    optimizer = trained(paging=paging)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = with_weights_of(optimizer)
    tensors = {
        parameter: (entries["state1"], entries["state1"].data_ptr())
        for parameter, entries in optimizer.state.items()
    }
    arena = optimizer._engines[torch.device("cpu")].arena
    assert arena is not None
    held = arena.nbytes
    train(optimizer, range(10, 12))
    optimizer.load_state_dict(saved)
    for parameter, (tensor, address) in tensors.items():
        assert optimizer.state[parameter]["state1"] is tensor
        assert tensor.data_ptr() == address
    assert arena.nbytes == held
    # And the next steps use what was loaded, absmax included.
    reference = ours("PagedAdamW8bit", weights)
    reference.load_state_dict(saved)
    with torch.no_grad():
        for parameter, weight in zip(unique_parameters(optimizer), weights, strict=True):
            parameter.copy_(weight)
    for one in (optimizer, reference):
        train(one, range(3, 5))
    assert_same_bits(optimizer, reference)


def test_a_loaded_tensor_is_not_shared_with_the_state_dict() -> None:
    before = trained()
    saved = before.state_dict()
    resumed = ours("PagedAdamW8bit", with_weights_of(before))
    resumed.load_state_dict(saved)
    expected = copy.deepcopy(saved)
    train(resumed, range(3, 4))
    for key, entries in expected["state"].items():
        for name, tensor in entries[WRAPPED].items():
            assert bits(saved["state"][key][WRAPPED][name]) == bits(tensor)


def test_a_state_dict_of_a_strategy_loads_into_another() -> None:
    before = trained(paging=Paging(strategy="lookahead"))
    resumed = ours("PagedAdamW8bit", with_weights_of(before), paging=Paging(hbm_budget=1.0))
    resumed.load_state_dict(before.state_dict())
    assert set(paths(resumed)) == {"resident"}
    for optimizer in (before, resumed):
        train(optimizer, range(3, 5))
    assert_same_bits(resumed, before)


@pytest.mark.parametrize("width", [8, 32])
def test_limited_updates(width: int) -> None:
    """``max_unorm`` limits 32-bit updates only, and needs their whole state on the device."""
    args = MockArgs(
        {"optim_bits": width, "min_8bit_size": 4096, "max_unorm": 0.01, "skip_zeros": False}
    )
    paging = Paging(hbm_budget=1.0 if width == 32 else 0)
    before = trained("PagedAdamW", args=args, paging=paging)
    resumed = ours("PagedAdamW", with_weights_of(before), args=args, paging=paging)
    resumed.load_state_dict(through_a_file(before.state_dict()))
    for optimizer in (before, resumed):
        train(optimizer, range(3, 5))
    assert_same_bits(resumed, before)


def test_a_checkpoint_without_limits_resumes_with_them() -> None:
    """The parameter must not be streamed then: slices would each be limited by their own norm."""
    args = MockArgs(
        {"optim_bits": 32, "min_8bit_size": 4096, "max_unorm": 0.01, "skip_zeros": False}
    )
    before = trained("PagedAdamW", paging=TINY_RING)
    resumed = ours("PagedAdamW", with_weights_of(before), args=args)
    snapshot = Snapshot(resumed)
    with pytest.raises(ValueError, match="max_unorm > 0"):
        resumed.load_state_dict(before.state_dict())
    snapshot.assert_unchanged()
    resumed = ours("PagedAdamW", with_weights_of(before), args=args, paging=Paging(hbm_budget=1.0))
    resumed.load_state_dict(before.state_dict())
    assert set(paths(resumed)) == {"resident"}
    expected = legacy("PagedAdamW", with_weights_of(before), args=args)
    expected.load_state_dict(before.state_dict())
    for entries in expected.state.values():
        entries["unorm_vec"] = torch.zeros(1)
    for optimizer in (expected, resumed):
        train(optimizer, range(3, 5))
    assert_same_bits(resumed, expected)


def test_hooks_run() -> None:
    before = trained(lr=1e-3)
    saved = before.state_dict()
    resumed = ours("PagedAdamW8bit", with_weights_of(before))
    called: list[str] = []

    def change(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        called.append("pre, in place")
        group = {**state_dict["param_groups"][0], "lr": 0.5}
        state_dict["param_groups"] = [group]

    def replace(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        called.append("pre, replaced")
        group = {**state_dict["param_groups"][0], "weight_decay": 0.25}
        return {**state_dict, "param_groups": [group]}

    resumed.register_load_state_dict_pre_hook(change)
    resumed.register_load_state_dict_pre_hook(replace)
    resumed.register_load_state_dict_post_hook(lambda optimizer: called.append("post"))
    resumed.load_state_dict(saved)
    assert called == ["pre, in place", "pre, replaced", "post"]
    assert resumed.param_groups[0]["lr"] == 0.5
    assert resumed.param_groups[0]["weight_decay"] == 0.25
    assert saved["param_groups"][0]["lr"] == 1e-3  # the caller's is its own


def test_saving_takes_what_the_state_has() -> None:
    """Each state tensor has its own storage: the arena is not saved once per tensor."""
    optimizer = ours("PagedAdamW", parameters(*[100_000] * 8))
    train(optimizer, range(1))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    state = 8 * 2 * 4 * 100_000
    assert state < file.tell() < 1.02 * state


def file_bytes(saved: dict[str, Any]) -> int:
    file = io.BytesIO()
    torch.save(saved, file)
    return file.tell()


def assert_own_storages(optimizer: PagedOptimizer) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                assert value.untyped_storage().nbytes() == value.nbytes


def tensor_bytes(saved: dict[str, Any]) -> int:
    return sum(
        tensor.nbytes
        for entries in saved["state"].values()
        for name, tensor in entries[WRAPPED].items()
        if not name.startswith("qmap")  # one for all
    )


@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedAdEMAMix32bit"])
@pytest.mark.parametrize("loaded", [False, True], ids=["made here", "loaded"])
def test_a_file_is_as_large_as_its_tensors(name: str, loaded: bool) -> None:
    """Wherever state is: streamed, on the device, given back, and after loading."""
    optimizer = ours(name, parameters(*[100_000] * 8), paging=Paging(hbm_budget=0.5))
    train(optimizer, range(2))
    if loaded:
        saved = through_a_file(optimizer.state_dict())
        optimizer = ours(name, parameters(*[100_000] * 8), paging=Paging(hbm_budget=0.5))
        optimizer.load_state_dict(saved)
    expected = tensor_bytes(optimizer.state_dict())
    assert {"resident", "streamed"} == set(paths(optimizer))
    # Names, shapes, alignment and the two maps of the 8-bit values beside them.
    overhead = 64 << 10
    assert expected < file_bytes(optimizer.state_dict()) < expected + overhead
    assert_own_storages(optimizer)
    assert optimizer.release(300_000)
    assert paths(optimizer).count("streamed") > 4
    assert expected < file_bytes(optimizer.state_dict()) < expected + overhead
    assert_own_storages(optimizer)
    train(optimizer, range(2, 3))
    assert expected < file_bytes(optimizer.state_dict()) < expected + overhead


def test_a_checkpoint_of_views_loads() -> None:
    """Tensors that are slices of one large one, transposed, or no tensors of their own."""
    before = ours("PagedAdamW", parameters((300, 400), (400, 300)))
    train(before, range(2))
    saved = before.state_dict()
    for entries in saved["state"].values():
        state = entries[WRAPPED]
        state["state1"] = state["state1"].t().contiguous().t()
        joined = torch.zeros(2, *state["state2"].shape)
        joined[1] = state["state2"]
        state["state2"] = joined[1]
    resumed = ours("PagedAdamW", with_weights_of(before))
    resumed.load_state_dict(saved)
    assert_same_bits(resumed, before)
    for optimizer in (before, resumed):
        train(optimizer, range(2, 4))
    assert_same_bits(resumed, before)
    size = tensor_bytes(resumed.state_dict())
    assert size < file_bytes(resumed.state_dict()) < size + (16 << 10)


def test_no_state_tensor_is_deep_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes and PyTorch copy the whole dict first: twice the state in host memory."""
    before = trained()
    saved = before.state_dict()
    resumed = ours("PagedAdamW8bit", with_weights_of(before))

    def refuse(tensor: torch.Tensor, memo: dict[int, Any]) -> None:
        raise AssertionError(f"deep copy of {tuple(tensor.shape)}")

    monkeypatch.setattr(torch.Tensor, "__deepcopy__", refuse)
    with pytest.raises(AssertionError, match="deep copy"):
        legacy("PagedAdamW8bit", with_weights_of(before)).load_state_dict(saved)
    resumed.load_state_dict(saved)
    assert_same_bits(resumed, before)


def test_what_is_loaded_from_is_left_alone() -> None:
    """Also by hooks that change what they get, and by what happens to the optimizer later."""
    saved = copy.deepcopy(trained().state_dict())
    saved["param_groups"][0]["lr"] = torch.tensor(0.125)
    expected = copy.deepcopy(saved)
    resumed = ours("PagedAdamW8bit", parameters(*SIZES))
    resumed.load_state_dict(saved)
    resumed.param_groups[0]["lr"].mul_(2)
    resumed.param_groups[0]["new"] = 1
    train(resumed, range(2))
    assert saved["param_groups"] == expected["param_groups"]
    assert saved["state"].keys() == expected["state"].keys()
    for key, entries in expected["state"].items():
        assert saved["state"][key].keys() == entries.keys()
        for name, tensor in entries[WRAPPED].items():
            assert bits(saved["state"][key][WRAPPED][name]) == bits(tensor)


def test_hooks_of_saving_run() -> None:
    optimizer = trained()
    optimizer.register_state_dict_pre_hook(
        lambda one: one.state[one.param_groups[0]["params"][0]].update(step=7)
    )

    def add(one: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["more"] = "of mine"

    optimizer.register_state_dict_post_hook(add)
    saved = optimizer.state_dict()
    assert saved["more"] == "of mine"
    assert saved["state"][0]["step"] == 7
    ours("PagedAdamW8bit", parameters(*SIZES)).load_state_dict(saved)


@pytest.mark.parametrize("paging", [Paging(staging=MIB, hbm_budget=0), Paging(hbm_budget=0.5)])
@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedAdamW32bit"])
def test_state_of_fewer_parameters_over_a_stepped_optimizer(name: str, paging: Paging) -> None:
    """Those that it has none for start afresh, and nothing is made twice."""
    before = ours(name, parameters(*SIZES), paging=paging)
    train(before, range(2), absent=[2, 3])
    resumed = ours(name, with_weights_of(before), paging=paging)
    train(resumed, range(5))
    arena = resumed._engines[torch.device("cpu")].arena
    assert arena is not None
    held = arena.nbytes
    with torch.no_grad():
        for mine, its in zip(unique_parameters(resumed), unique_parameters(before), strict=True):
            mine.copy_(its)
    resumed.load_state_dict(through_a_file(before.state_dict()))
    assert_same_bits(resumed, before)
    for optimizer in (before, resumed):
        train(optimizer, range(2, 4), absent=[2])
        train(optimizer, range(4, 6))
    assert_same_bits(resumed, before)
    assert resumed._engines[torch.device("cpu")].arena is arena
    assert arena.nbytes == held


def test_state_of_more_parameters_over_a_stepped_optimizer() -> None:
    before = trained(paging=TINY_RING)
    resumed = ours("PagedAdamW8bit", with_weights_of(before), paging=TINY_RING)
    train(resumed, range(1), absent=[0, 1])
    kept = resumed.state[unique_parameters(resumed)[2]]["state1"]
    with torch.no_grad():
        for mine, its in zip(unique_parameters(resumed), unique_parameters(before), strict=True):
            mine.copy_(its)
    resumed.load_state_dict(before.state_dict())
    assert resumed.state[unique_parameters(resumed)[2]]["state1"] is kept
    for optimizer in (before, resumed):
        train(optimizer, range(3, 5))
    assert_same_bits(resumed, before)


def test_qmaps_stay_shared() -> None:
    """bitsandbytes makes one for all parameters; a checkpoint keeps that, and so does loading."""
    resumed = ours("PagedAdamW8bit", parameters(*SIZES))
    resumed.load_state_dict(through_a_file(trained().state_dict()))
    maps = {state["qmap1"].data_ptr() for state in resumed.state.values() if "qmap1" in state}
    assert len(maps) == 1


def test_a_failure_to_copy_small_state_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = copy.deepcopy(trained().state_dict())
    optimizer = trained(steps=5)
    snapshot = Snapshot(optimizer)
    original = torch.Tensor.to
    calls: list[int] = []

    def fail_late(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", fail_late)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.load_state_dict(saved)
    snapshot.assert_unchanged()


def test_state_that_was_sent_to_another_process_stays_the_live_one() -> None:
    """PyTorch shares a tensor by moving its storage: away from the arena, for good."""
    optimizer, twin = trained(), trained()
    for entries in optimizer.state_dict()["state"].values():
        entries[WRAPPED]["state1"].share_memory_()
    for one in (optimizer, twin):
        train(one, range(3, 5))
    assert_same_bits(optimizer, twin)
    saved, expected = optimizer.state_dict(), twin.state_dict()
    for key, entries in expected["state"].items():
        assert bits(saved["state"][key][WRAPPED]["state1"]) == bits(entries[WRAPPED]["state1"])
    for one in (optimizer, twin):
        train(one, range(5, 6))
    assert_same_bits(optimizer, twin)


def test_state_tensors_carry_no_attributes() -> None:
    """``is_paged`` would survive saving, and end stock bitsandbytes when it resumes."""
    for strategy in STRATEGIES:
        saved = through_a_file(trained(paging=Paging(strategy=strategy)).state_dict())
        for entries in saved["state"].values():
            for tensor in entries[WRAPPED].values():
                assert vars(tensor) == {}


# --- what does not fit ----------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


def tensors(saved: dict[str, Any]) -> dict[str, Any]:
    return saved["state"][0][WRAPPED]


def put(**entries: Any) -> Change:
    return lambda saved: tensors(saved).update(entries)


MALFORMED: dict[str, tuple[Change, str]] = {
    "no state": (lambda saved: saved.pop("state"), "it has no state"),
    "no groups": (lambda saved: saved.pop("param_groups"), "it has no param_groups"),
    "state is a list": (lambda saved: saved.update(state=[]), "state is a list, not a dict"),
    "groups are a dict": (lambda saved: saved.update(param_groups={}), "not a list of groups"),
    "group is a number": (lambda saved: saved.update(param_groups=[3]), "not a list of groups"),
    "group without parameters": (
        lambda saved: saved["param_groups"][0].pop("params"),
        "each with a list of 'params'",
    ),
    "fewer groups": (
        lambda saved: saved.update(param_groups=[]),
        r"has parameter groups of \[\] parameters, this optimizer of \[5\]",
    ),
    "fewer parameters": (
        lambda saved: saved["param_groups"][0]["params"].pop(),
        r"has parameter groups of \[4\] parameters, this optimizer of \[5\]",
    ),
    "unlisted parameter": (
        lambda saved: saved["state"].update({77: saved["state"][0]}),
        "state for a parameter 77 it never lists",
    ),
    "entries are a list": (
        lambda saved: saved["state"].update({0: [1]}),
        "state of parameter 0 is not a dict",
    ),
    "wrapped is a list": (
        lambda saved: saved["state"][0].update({WRAPPED: [1]}),
        "state of parameter 0 is not a dict",
    ),
    "no state1": (lambda saved: tensors(saved).pop("state1"), "no 'state1' among"),
    "no state2": (lambda saved: tensors(saved).pop("state2"), r"missing \['state2'\]"),
    "no absmax": (lambda saved: tensors(saved).pop("absmax2"), r"missing \['absmax2'\]"),
    "no step": (lambda saved: saved["state"][0].pop("step"), r"missing \['step'\]"),
    "unknown entry": (put(exp_avg=torch.zeros(1)), r"unknown \['exp_avg'\]"),
    "torch's own AdamW": (
        lambda saved: saved["state"].update(
            {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(130_001)}}
        ),
        r"no 'state1' among \['exp_avg', 'step'\]",
    ),
    "state1 too short": (
        put(state1=torch.zeros(8, dtype=torch.uint8)),
        r"state1 is torch.uint8 of shape \(8,\); torch.uint8 of shape \(130001,\) was expected",
    ),
    "state1 of another shape": (
        put(state1=torch.zeros(1, 130_001, dtype=torch.uint8)),
        r"state1 is torch.uint8 of shape \(1, 130001\)",
    ),
    "state1 of another dtype": (
        put(state1=torch.zeros(130_001, dtype=torch.float16)),
        "state1 is torch.float16; float32 or uint8 was expected",
    ),
    "state1 is a list": (put(state1=[0]), "state1 is list; float32 or uint8 was expected"),
    "state2 of another width": (put(state2=torch.zeros(130_001)), "state2 is torch.float32"),
    "state2 is a list": (put(state2=[0]), "state2 is a list, not a tensor"),
    "state1 without data": (
        put(state1=torch.zeros(130_001, dtype=torch.uint8, device="meta")),
        "state1 has layout torch.strided on meta; a dense tensor with data was expected",
    ),
    "state1 is sparse": (
        put(state1=torch.zeros(130_001, dtype=torch.uint8).to_sparse()),
        "state1 has layout torch.sparse_coo on cpu",
    ),
    "absmax of other blocks": (put(absmax1=torch.zeros(3)), r"absmax1 is .* of shape \(3,\)"),
    "qmap too short": (put(qmap1=torch.zeros(255)), r"qmap1 is .* of shape \(255,\)"),
    "state1 was freed": (
        lambda saved: tensors(saved)["state1"].untyped_storage().resize_(0),
        "state1 has layout torch.strided on cpu; a dense tensor with data was expected",
    ),
    "everything lost but step": (
        lambda saved: saved["state"][0].update({WRAPPED: {"state1": {}, "state2": {}}}),
        r"nothing is left of \['state1', 'state2'\]",
    ),
    "lr is text": (
        lambda saved: saved["param_groups"][0].update(lr="1e-3"),
        "lr of group 0 is '1e-3', not a number",
    ),
    "three betas": (
        lambda saved: saved["param_groups"][0].update(betas=(0.9, 0.99, 0.999)),
        r"betas of group 0 are \(0.9, 0.99, 0.999\); this optimizer has \(0.9, 0.999\)",
    ),
    "a parameter twice": (
        lambda saved: saved["param_groups"][0].update(params=[0, 1, 2, 3, 0]),
        r"lists parameter 0 twice, this optimizer has two parameters in these places",
    ),
    "parameters are lists": (
        lambda saved: saved["param_groups"][0].update(params=[[0], [1], [2], [3], [4]]),
        "'params' of the groups are not keys of its state",
    ),
    "limit of another shape": (put(unorm_vec=torch.zeros(2)), r"unorm_vec is .* of shape \(2,\)"),
    **{
        f"step is {step!r}": (
            lambda saved, step=step: saved["state"][0].update(step=step),
            "step is .*; a count was expected",
        )
        for step in ("x", None, -1, 1.5, float("nan"), float("inf"), torch.zeros(2), [1])
    },
}


@functools.cache
def good_state_dict() -> dict[str, Any]:
    return copy.deepcopy(trained().state_dict())


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "stepped"])
def test_what_does_not_fit_is_refused_and_changes_nothing(case: str, fresh: bool) -> None:
    change, message = MALFORMED[case]
    saved = copy.deepcopy(good_state_dict())
    change(saved)
    optimizer = ours("PagedAdamW8bit", parameters(*SIZES, seed=5), lr=0.25)
    if not fresh:
        train(optimizer, range(2))
    snapshot = Snapshot(optimizer)
    with pytest.raises(CheckpointError, match=message) as caught:
        optimizer.load_state_dict(saved)
    assert isinstance(caught.value, ValueError)
    snapshot.assert_unchanged()
    twin = ours("PagedAdamW8bit", parameters(*SIZES, seed=5), lr=0.25)
    train(twin, range(0 if fresh else 2))
    for one in (optimizer, twin):
        train(one, [2])
    assert_same_bits(optimizer, twin)


@pytest.mark.parametrize("nothing", [None, [], "state"])
def test_something_else_is_refused(nothing: Any) -> None:
    with pytest.raises(CheckpointError, match="not an optimizer state dict"):
        trained().load_state_dict(nothing)


def test_an_untouched_state_dict_loads() -> None:
    """So each of the cases above is refused for its change."""
    ours("PagedAdamW8bit", parameters(*SIZES)).load_state_dict(good_state_dict())


@pytest.mark.parametrize("shape", [(120_000,), (300, 400)])
def test_ademamix_with_one_moment_is_refused_by_name(shape: tuple[int, ...]) -> None:
    """bitsandbytes' ``AdEMAMix32bit`` makes such a `state1`, and writes past its end."""
    optimizer = ours("PagedAdEMAMix32bit", parameters(shape))
    saved = ours("PagedAdEMAMix32bit", parameters(shape)).state_dict()
    saved["state"][0] = {
        "step": 1,
        WRAPPED: {"state1": torch.zeros(shape), "state2": torch.zeros(shape)},
    }
    snapshot = Snapshot(optimizer)
    with pytest.raises(CheckpointError, match=r"PagedAdEMAMix32bit.*cannot be trusted.*instead"):
        optimizer.load_state_dict(saved)
    snapshot.assert_unchanged()


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "stepped"])
def test_too_little_host_memory_for_a_checkpoint(
    fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = trained("PagedAdamW", optim_bits=32).state_dict()
    optimizer = ours("PagedAdamW", parameters(*SIZES), optim_bits=8)
    if not fresh:
        train(optimizer, range(2))
    snapshot = Snapshot(optimizer)
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    with pytest.raises(HostMemoryError, match="only 1,000 bytes"):
        optimizer.load_state_dict(saved)
    snapshot.assert_unchanged()
    monkeypatch.undo()
    train(optimizer, range(2, 4))
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("fault", ["host memory", "tensor"])
def test_too_little_memory_for_what_a_checkpoint_adds(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some parameters have state already; the others cannot get theirs."""
    saved = trained(paging=TINY_RING).state_dict()
    optimizer, twin = (ours("PagedAdamW8bit", parameters(*SIZES), paging=TINY_RING) for _ in "ab")
    for one in (optimizer, twin):
        train(one, range(2), absent=[0, 1])
    snapshot = Snapshot(optimizer)
    with monkeypatch.context() as patched:
        if fault == "host memory":
            patched.setattr(host, "available_bytes", lambda: 1000)
        else:

            def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
                raise torch.OutOfMemoryError("CUDA out of memory")

            patched.setattr(torch, "empty", fail)  # the small state of parameter 1
        with pytest.raises((HostMemoryError, torch.OutOfMemoryError)):
            optimizer.load_state_dict(saved)
    snapshot.assert_unchanged()
    arena = optimizer._engines[torch.device("cpu")].arena
    other = twin._engines[torch.device("cpu")].arena
    assert arena is not None
    assert other is not None
    assert arena.nbytes == other.nbytes
    for one in (optimizer, twin):
        train(one, range(2, 4))
    assert_same_bits(optimizer, twin)
    optimizer.load_state_dict(saved)


def test_a_failing_hook_changes_nothing() -> None:
    optimizer = trained()

    def refuse(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        raise KeyError("not today")

    optimizer.register_load_state_dict_pre_hook(refuse)
    snapshot = Snapshot(optimizer)
    with pytest.raises(KeyError, match="not today"):
        optimizer.load_state_dict(trained(steps=5).state_dict())
    snapshot.assert_unchanged()
