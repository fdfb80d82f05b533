"""FSDP2 (`fully_shard`): each rank updates its shard, and the bits are those of one process."""

from __future__ import annotations

from functools import partial

import numpy
import pytest

from pageahead import Paging
from tests.distributed import work
from tests.distributed.ranks import Ranks
from tests.support import FAMILIES, MIB, STRATEGIES

STEPS = 4


def assert_equal_weights(one: work.Weights, other: work.Weights) -> None:
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert mine.tobytes() == theirs.tobytes(), (
            f"parameter {number}: {numpy.count_nonzero(mine != theirs)} of {mine.size} differ"
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
