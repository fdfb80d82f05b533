"""State dicts between ours and bitsandbytes', both ways, in both formats, bit for bit."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import bitsandbytes
import pytest
import torch

from pageahead import Paging
from pageahead.optim import plan
from pageahead.optim.checkpoint import unwrapped
from pageahead.optim.fitting import WRAPPED
from pageahead.optim.paged import PagedOptimizer
from tests.support import (
    CLASSES,
    FAMILIES,
    MIB,
    assert_same_bits,
    ours,
    parameters,
    paths,
    unique_parameters,
)

SIZES = (130_001, 5_000, 100_000, 300)

FORMATS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "wrapped": lambda saved: saved,
    "unwrapped": unwrapped,
}

SETTINGS = {
    "plain": Paging(staging=MIB, hbm_budget=0),
    "overlap": Paging(staging=MIB, hbm_budget=0, write_back="overlap"),
    "in backward": Paging(staging=MIB, hbm_budget=0, in_backward=True),
    "budget": Paging(staging=MIB, hbm_budget=0.5),
    "in backward, budget": Paging(staging=MIB, hbm_budget=0.5, in_backward=True),
}

THEIRS = [
    (family, kind)
    for family in FAMILIES
    for kind in ("paged", "non-paged")
    if (family, kind) != ("AdEMAMix", "paged")  # needs managed memory: tests/cuda has it
]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks for the large parameters."""
    monkeypatch.setattr(plan, "SMALLEST_CHUNK", 128 << 10)
    monkeypatch.setattr(plan, "LARGEST_CHUNK", 128 << 10)


def theirs(family: str, width: int, kind: str, found: list[torch.nn.Parameter]) -> Any:
    prefix = "Paged" if kind == "paged" else ""
    return getattr(bitsandbytes.optim, f"{prefix}{family}")(found, lr=1e-2, optim_bits=width)


def train(optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Step over seeded gradients that come by a backward."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
        for step in steps:
            loss = torch.zeros(())
            for number, parameter in enumerate(unique_parameters(optimizer)):
                generator = torch.Generator().manual_seed(1_000 * step + number)
                gradient = torch.randn(parameter.shape, generator=generator) * 10.0**-number
                loss = loss + (parameter * gradient).sum()  # its gradient is exactly that
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def same_weights(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(one.detach().clone()) for one in unique_parameters(optimizer)]


def through_a_file(saved: dict[str, Any], **how: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True, **how)
    return loaded


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize(("family", "kind"), THEIRS)
def test_interchange(family: str, width: int, kind: str, form: str, settings: str) -> None:
    paging, change = SETTINGS[settings], FORMATS[form]
    mine = ours(f"Paged{family}", parameters(*SIZES), lr=1e-2, optim_bits=width, paging=paging)
    expected = theirs(family, width, kind, parameters(*SIZES))
    for optimizer in (mine, expected):
        train(optimizer, range(3))
    assert_same_bits(mine, expected)

    from_theirs = ours(
        f"Paged{family}", same_weights(expected), lr=1.0, optim_bits=width, paging=paging
    )
    from_theirs.load_state_dict(through_a_file(change(expected.state_dict())))
    from_mine = theirs(family, width, kind, same_weights(mine))
    from_mine.load_state_dict(through_a_file(change(mine.state_dict())))
    assert_same_bits(from_theirs, expected)
    assert_same_bits(from_mine, expected)
    if settings != "in backward, budget":  # there places follow the order of the gradients
        assert paths(from_theirs) == paths(mine)
    assert ("resident" in paths(from_theirs)[::2]) == ("budget" in settings)
    for optimizer in (mine, expected, from_theirs, from_mine):
        train(optimizer, range(3, 6))
    for optimizer in (mine, from_theirs, from_mine):
        assert_same_bits(optimizer, expected)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", CLASSES)
def test_resume_equals_the_uninterrupted_run(name: str, settings: str) -> None:
    paging = SETTINGS[settings]
    uninterrupted = ours(name, parameters(*SIZES), lr=1e-2, paging=paging)
    train(uninterrupted, range(3))
    weights = same_weights(uninterrupted)
    saved = through_a_file(uninterrupted.state_dict())
    train(uninterrupted, range(3, 6))  # the run that saved goes on
    resumed = ours(name, weights, lr=1e-2, paging=paging)
    resumed.load_state_dict(saved)
    train(resumed, range(3, 6))
    assert_same_bits(resumed, uninterrupted)


@pytest.mark.parametrize("settings", SETTINGS)
def test_going_back_to_a_checkpoint_in_the_same_run(settings: str) -> None:
    """Whatever the ring, the plan or an early fetch still hold is not used any more."""
    optimizer = ours("PagedAdamW8bit", parameters(*SIZES), lr=1e-2, paging=SETTINGS[settings])
    train(optimizer, range(3))
    weights = same_weights(optimizer)
    saved = through_a_file(optimizer.state_dict())
    train(optimizer, range(3, 6))
    expected = same_weights(optimizer)
    train(optimizer, range(10, 12))
    with torch.no_grad():
        for parameter, weight in zip(unique_parameters(optimizer), weights, strict=True):
            parameter.copy_(weight)
    optimizer.load_state_dict(saved)
    train(optimizer, range(3, 6))
    for parameter, weight in zip(unique_parameters(optimizer), expected, strict=True):
        assert torch.equal(parameter, weight)


def test_flags_of_bitsandbytes_paged_tensors_are_lost() -> None:
    """They survive a file; here they would name a device's managed memory that is not there."""
    before = theirs("AdamW", 8, "non-paged", parameters(*SIZES))
    train(before, range(2))
    saved = before.state_dict()
    for entries in saved["state"].values():
        for key in ("state1", "state2"):
            entries[WRAPPED][key].is_paged = True
            entries[WRAPPED][key].page_deviceid = 0
    saved = through_a_file(saved)
    assert saved["state"][0][WRAPPED]["state1"].is_paged
    resumed = ours("PagedAdamW8bit", same_weights(before), lr=1e-2, paging=SETTINGS["plain"])
    resumed.load_state_dict(saved)
    for state in resumed.state.values():
        for value in state.values():
            assert not isinstance(value, torch.Tensor) or vars(value) == {}
    assert paths(resumed) == ["streamed", "resident", "streamed", "resident"]


def test_a_memory_mapped_checkpoint(tmp_path: Any) -> None:
    before = ours("PagedAdamW8bit", parameters(*SIZES), lr=1e-2, paging=SETTINGS["plain"])
    train(before, range(2))
    torch.save(before.state_dict(), tmp_path / "optimizer.pt")
    resumed: PagedOptimizer = ours("PagedAdamW8bit", same_weights(before))
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", mmap=True, weights_only=True))
    (tmp_path / "optimizer.pt").unlink()
    assert_same_bits(resumed, before)
