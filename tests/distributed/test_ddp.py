"""DistributedDataParallel: each rank has all of the state, and all have the same."""

from __future__ import annotations

import pytest

from tests.distributed import work
from tests.distributed.ranks import Ranks
from tests.distributed.test_fsdp import STEPS, assert_equal_weights
from tests.distributed.test_sharded_checkpoint import assert_equal_state


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("family", ["AdamW", "Lion", "AdEMAMix"])
def test_ranks_equal_each_other_and_one_process(family: str, bits: int, ranks: Ranks) -> None:
    name = f"Paged{family}{bits}bit"
    expected, expected_state = ranks.run(1, work.alone, name, work.Mlp, STEPS, 2)[0]
    for found, state, paths in ranks.run(2, work.ddp, name, STEPS):
        assert_equal_weights(found, expected)
        assert_equal_state(state, expected_state)
        assert paths == ["streamed"] + ["resident"] * 5


def test_updates_in_backward_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(2, work.ddp_in_backward):
        assert "in_backward=True under DistributedDataParallel" in message
        assert "fully_shard" in message
