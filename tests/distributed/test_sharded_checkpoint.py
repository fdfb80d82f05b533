"""Checkpoints of sharded state through torch.distributed.checkpoint, on other numbers of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import saving
from tests.distributed.ranks import Ranks
from tests.distributed.test_fsdp import ALIGNED, assert_equal_weights
from tests.distributed.work import Product

STEPS, LATER = 3, 2
UNALIGNED = ((333, 401), (16, 257), (5000,), (3, 2000), (40, 5, 33), (7,))
"""At two ranks and at four most shards begin in the middle of a block, and some are empty."""


def assert_equal_state(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            if isinstance(value, np.ndarray):
                assert mine[key].tobytes() == value.tobytes(), f"{key} of parameter {number}"
            else:
                assert mine[key] == value, f"{key} of parameter {number}"


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("family", ["AdamW", "Lion", "AdEMAMix"])
def test_32_bit_state_is_the_same_on_any_number_of_ranks(
    family: str, flat: bool, ranks: Ranks, tmp_path: Path
) -> None:
    arguments = tmp_path / "saved", f"Paged{family}32bit", partial(Product, UNALIGNED), STEPS, LATER
    expected = ranks.run(2, saving.save, *arguments, flat)[0]
    for world in (1, 2, 4):
        for found in ranks.run(world, saving.load, *arguments, flat):
            assert_equal_weights(found[0], expected[0])
            assert_equal_state(found[1], expected[1])
            assert_equal_weights(found[3], expected[3])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("family", ["AdamW", "Lion", "AdEMAMix"])
def test_8_bit_state_is_the_same_where_shards_are_whole_blocks(
    family: str, flat: bool, ranks: Ranks, tmp_path: Path
) -> None:
    arguments = tmp_path / "saved", f"Paged{family}8bit", partial(Product, ALIGNED), STEPS, LATER
    expected = ranks.run(2, saving.save, *arguments, flat)[0]
    for world in (1, 2, 4):
        for found in ranks.run(world, saving.load, *arguments, flat):
            assert_equal_weights(found[0], expected[0])
            assert_equal_state(found[1], expected[1])
            assert_equal_state(found[2], expected[2])
            assert_equal_weights(found[3], expected[3])


TOLERANCE = {"state1": 0.008, "state2": 0.004}
"""As documented, in parts of the largest of the elements that share a block."""


@pytest.mark.parametrize("family", ["AdamW", "Lion", "AdEMAMix"])
def test_8_bit_state_that_is_cut_elsewhere_is_quantized_again(
    family: str, ranks: Ranks, tmp_path: Path
) -> None:
    arguments = tmp_path / "saved", f"Paged{family}8bit", partial(Product, UNALIGNED), STEPS, LATER
    expected = ranks.run(2, saving.save, *arguments, False)[0]
    same = ranks.run(2, saving.load, *arguments, False)[0]
    assert_equal_state(same[1], expected[1])  # cut as it was
    assert_equal_weights(same[3], expected[3])
    for world in (1, 4):
        for found in ranks.run(world, saving.load, *arguments, False):
            different = 0
            for mine, theirs in zip(found[2], expected[2], strict=True):
                for key, value in theirs.items():
                    bound = TOLERANCE[key] * neighbourhood_maximum(value)
                    assert (abs(mine[key] - value) <= bound).all(), key
                    different += int(np.count_nonzero(mine[key] != value))
            assert different, "nothing was quantized again"
            for mine, theirs in zip(found[3], expected[3], strict=True):
                assert abs(mine - theirs).mean() < 0.05 * 0.01 * LATER  # of what they moved


def neighbourhood_maximum(value: Any) -> Any:
    """For each element the largest magnitude within a block's length of it."""
    lines = value.reshape(2, -1) if value.ndim and value.shape[0] == 2 else value.reshape(1, -1)
    padded = np.pad(abs(lines), ((0, 0), (255, 255)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 511, axis=1)
    return windows.max(axis=-1).reshape(value.shape)


@pytest.mark.parametrize("bits", [8, 32])
def test_whole_tensors_load_where_nothing_is_sharded(
    bits: int, ranks: Ranks, tmp_path: Path
) -> None:
    name = f"PagedAdEMAMix{bits}bit"
    arguments = tmp_path / "saved", name, partial(Product, ALIGNED), STEPS, LATER
    expected = ranks.run(2, saving.save, *arguments, False)[0]
    found = ranks.run(1, saving.load_whole, *arguments)[0]
    assert_equal_weights(found[0], expected[0])
    assert_equal_state(found[2], expected[2])
    assert_equal_weights(found[3], expected[3])


@pytest.mark.parametrize("name", ["PagedAdamW32bit", "PagedAdamW8bit", "PagedAdEMAMix8bit"])
def test_gathered_state_loads_where_nothing_is_sharded(name: str, ranks: Ranks) -> None:
    for expected, found in ranks.run(2, saving.full, name, partial(Product, ALIGNED), STEPS, LATER):
        assert_equal_weights(found, expected)


@pytest.mark.parametrize("name", ["PagedAdamW32bit", "PagedAdamW8bit", "PagedAdEMAMix8bit"])
@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_takes_its_part_of_bitsandbytes_state(
    name: str, world: int, ranks: Ranks
) -> None:
    make = partial(Product, ALIGNED)
    for expected, found in ranks.run(world, saving.from_bitsandbytes, name, make, STEPS, LATER):
        assert_equal_weights(found, expected)


def test_saving_goes_on_beside_training(ranks: Ranks, tmp_path: Path) -> None:
    """The checkpoint has the state of when it was asked for."""
    arguments = tmp_path / "saved", "PagedAdamW8bit", partial(Product, ALIGNED), STEPS, LATER
    expected = ranks.run(2, saving.save, *arguments, False, False)[0]
    for found in ranks.run(2, saving.load, *arguments, False):
        assert_equal_state(found[1], expected[1])
        assert_equal_weights(found[3], expected[3])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (saving.replicate, "state1 was saved with placements"),
        (saving.shorten, "state1 is torch.uint8 of shape"),
        (saving.spoil_places, "does not say where in its block each row starts"),
        (saving.narrow_scales, "rows of"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(change: object, words: str, ranks: Ranks) -> None:
    make = partial(Product, ALIGNED)
    for message in ranks.run(2, saving.refused, "PagedAdamW8bit", make, change):
        assert message.startswith("CheckpointError: state of parameter 0 of group 0")
        assert words in message


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("name", ["PagedAdamW32bit", "PagedAdEMAMix8bit"])
def test_gathered_state_is_dealt_out_again(name: str, broadcast: bool, ranks: Ranks) -> None:
    arguments = name, partial(Product, ALIGNED), STEPS, LATER, broadcast
    for expected, found in ranks.run(2, saving.distribute, *arguments):
        assert_equal_weights(found, expected)
