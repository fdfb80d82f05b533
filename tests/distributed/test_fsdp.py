"""FSDP2 (`fully_shard`): each rank updates its shard, and the bits are those of one process."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pageahead import Paging
from tests.distributed import work
from tests.distributed.ranks import Ranks
from tests.support import FAMILIES, MIB, STRATEGIES

STEPS = 4


def assert_equal_weights(one: work.Weights, other: work.Weights) -> None:
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert mine.tobytes() == theirs.tobytes(), (
            f"parameter {number}: {np.count_nonzero(mine != theirs)} of {mine.size} differ"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_32_bit_equals_one_process_bit_for_bit(family: str, ranks: Ranks) -> None:
    name = f"Paged{family}32bit"
    results = ranks.run(2, work.fsdp, name, work.Mlp, STEPS)
    expected, expected_state = ranks.run(1, work.alone, name, work.Mlp, STEPS, 2)[0]
    for found, state, paths in results:
        assert_equal_weights(found, expected)
        assert paths == ["streamed"] + ["resident"] * 5
        for mine, theirs in zip(state, expected_state, strict=True):
            assert mine["step"] == STEPS
            for key in ("state1", "state2"):
                assert (key in mine) == (key in theirs)
                if key in mine:
                    assert mine[key].tobytes() == theirs[key].tobytes(), key


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("write_back", ["before_return", "overlap"])
def test_every_strategy_equals_one_process(strategy: str, write_back: str, ranks: Ranks) -> None:
    paging = Paging(strategy=strategy, write_back=write_back, staging=MIB)
    results = ranks.run(2, work.fsdp, "PagedAdamW", work.Mlp, STEPS, paging)
    expected, _ = ranks.run(1, work.alone, "PagedAdamW", work.Mlp, STEPS, 2)[0]
    for found, _, _ in results:
        assert_equal_weights(found, expected)


def test_state_within_a_budget_stays_on_the_device(ranks: Ranks) -> None:
    results = ranks.run(2, work.fsdp, "PagedAdamW", work.Mlp, STEPS, Paging(hbm_budget=1.0))
    expected, _ = ranks.run(1, work.alone, "PagedAdamW", work.Mlp, STEPS, 2)[0]
    for found, _, paths in results:
        assert_equal_weights(found, expected)
        assert paths == ["resident"] * 6


ALIGNED = ((256, 520), (257, 512), (16, 256), (131_072,), (5, 20, 1280), (7,))
"""At 2 ranks and at 4 each shard begins at a multiple of 256 elements."""


@pytest.mark.parametrize("family", ["AdamW", "Lion", "AdEMAMix"])
def test_8_bit_equals_one_process_where_shards_are_whole_blocks(family: str, ranks: Ranks) -> None:
    name = f"Paged{family}8bit"
    make = partial(work.Product, ALIGNED)
    expected, _ = ranks.run(1, work.alone, name, make, STEPS, 1)[0]
    for world in (2, 4):
        for found, state, _ in ranks.run(world, work.fsdp, name, make, STEPS):
            assert_equal_weights(found, expected)
            assert [str(one["state1"].dtype) for one in state] == ["uint8"] * 5 + ["float32"]


def test_8_bit_is_near_one_process_where_they_are_not(ranks: Ranks) -> None:
    make = partial(work.Product, [(333, 401), (16, 257)])
    expected, _ = ranks.run(1, work.alone, "PagedAdamW8bit", make, STEPS, 1)[0]
    for found, _, _ in ranks.run(2, work.fsdp, "PagedAdamW8bit", make, STEPS):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.tobytes() != theirs.tobytes()
            assert abs(mine - theirs).max() < 0.02  # of 4 steps of about 0.01 each


def test_the_size_of_the_whole_decides_width_and_paging(ranks: Ranks) -> None:
    """4,096 and 100,000 elements are counted over all ranks; 1 row is on the first only."""
    shapes = [(2, 2048), (2, 2047), (2, 50_000), (2, 49_999), (1, 100_000)]
    first, second = ranks.run(2, work.layouts, "PagedAdamW8bit", shapes)
    wide, narrow = "torch.float32", "torch.uint8"
    assert first == [
        ("resident", narrow, [1, 2048], 8, 1),
        ("resident", wide, [1, 2047], 0, 1),
        ("streamed", narrow, [1, 50_000], 196, 1),
        ("resident", narrow, [1, 49_999], 196, 1),
        ("streamed", narrow, [1, 100_000], 391, 1),
    ]
    assert second == [*first[:4], ("resident", narrow, [0, 100_000], 0, 1)]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_updates_in_backward_equal_updates_after_it(micro_batches: int, ranks: Ranks) -> None:
    for after, during, counts in ranks.run(2, work.backward_updates, micro_batches):
        assert_equal_weights(during, after)
        assert counts == [6] * 4


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (work.clip, "single memory location"),
        (work.scale, "single memory location"),
        (work.replace, "were changed or replaced after their update"),
    ],
)
def test_gradients_changed_after_their_update_are_refused(
    edit: object, words: str, ranks: Ranks
) -> None:
    for message in ranks.run(2, work.edits_gradients_after_updates, edit):
        assert words in message


def test_clipped_gradients_are_used(ranks: Ranks) -> None:
    results = zip(
        ranks.run(2, work.clipped, STEPS), ranks.run(2, work.torch_clipped, STEPS), strict=True
    )
    for found, expected in results:
        assert_equal_weights(found, expected)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("8-bit by columns", "not sharded by rows"),
        ("max_unorm", "limits the norm of a whole parameter's update"),
        ("placements", "redistribute"),
        ("kept gradients", "needs free_grads=True"),
    ],
)
def test_what_shards_cannot_do_is_refused(how: str, words: str, ranks: Ranks) -> None:
    for message in ranks.run(2, work.refusal, how):
        assert words in message


def test_copies_of_shards(ranks: Ranks) -> None:
    make = partial(work.Product, [(333, 401), (16, 256), (3,)])
    expected, _, _ = ranks.run(2, work.fsdp, "PagedAdamW8bit", make, STEPS)[0]
    for found in ranks.run(4, work.hybrid, STEPS):
        assert_equal_weights(found, expected)
