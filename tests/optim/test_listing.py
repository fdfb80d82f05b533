"""What an optimizer lists is looked up once, and again when it changed."""

from __future__ import annotations

import torch

from pageahead.optim.active import Listing, collect
from pageahead.optim.plan import early_chunks
from pageahead.pipeline.pipeline import EARLY


def group(*parameters: torch.nn.Parameter) -> dict[str, object]:
    return {"params": list(parameters)}


def places(listing: Listing, groups: list[dict[str, object]]) -> list[tuple[int, int, int]]:
    return [(id(one.parameter), one.gindex, one.pindex) for one in listing.of(groups)]


def test_entries_are_kept_while_nothing_changes_and_made_anew_otherwise() -> None:
    a, b, c = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    listing = Listing()
    groups = [group(a, b), group(c)]
    kept = listing.of(groups)
    assert places(listing, groups) == [(id(a), 0, 0), (id(b), 0, 1), (id(c), 1, 0)]
    assert listing.of(groups) is kept
    groups[0]["params"] = [b, a]  # the same ones in another order
    assert places(listing, groups) == [(id(b), 0, 0), (id(a), 0, 1), (id(c), 1, 0)]
    groups[0]["params"], groups[1]["params"] = [b], [a, c]  # the same ones, divided otherwise
    assert places(listing, groups) == [(id(b), 0, 0), (id(a), 1, 0), (id(c), 1, 1)]
    groups[1]["params"] = [a]
    assert places(listing, groups) == [(id(b), 0, 0), (id(a), 1, 0)]


def test_a_group_that_was_replaced_counts_with_its_new_hyperparameters() -> None:
    """As load_state_dict() does."""
    a = torch.nn.Parameter(torch.zeros(2))
    listing = Listing()
    listing.of([{**group(a), "lr": 1.0}])
    (entry,) = listing.of([{**group(a), "lr": 2.0}])
    assert entry.group["lr"] == 2.0


def test_an_entry_forgets_the_hyperparameters_of_the_step_before() -> None:
    a = torch.nn.Parameter(torch.zeros(2))
    a.grad = torch.zeros(2)
    listing = Listing()
    groups = [group(a)]
    (entry,) = collect(listing.of(groups))
    entry.config = {"lr": 1.0}
    (again,) = collect(listing.of(groups))
    assert again.config is None


def test_more_chunks_are_sent_for_early_when_there_is_more_to_prepare() -> None:
    assert early_chunks(8, 4 << 20) == EARLY
    assert early_chunks(300, 4 << 20) > early_chunks(100, 4 << 20) > EARLY
    assert early_chunks(300, 64 << 20) == EARLY
    assert early_chunks(300, 0) == EARLY
