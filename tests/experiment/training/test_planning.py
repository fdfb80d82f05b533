from __future__ import annotations

import psutil
import pytest

from pageahead.experiment.cells import UnknownCellError
from pageahead.experiment.training import planning
from pageahead.experiment.training.cells import ARMS, CELLS, TrainingCell, arms_of, select
from pageahead.experiment.training.cells import cell_named as named
from pageahead.experiment.training.gpt import DEFAULT
from pageahead.experiment.training.planning import DoesNotFitError, Memory, group, of_arm, shared

H200 = Memory(planning.MOST_HBM, planning.MOST_HOST)


def names(cell: TrainingCell, limit: Memory) -> tuple[list[list[str]], dict[str, str]]:
    grouping = group(arms_of(cell), DEFAULT, cell, cell.tokens, limit)
    return [[arm.name for arm in one] for one in grouping.groups], grouping.left_out


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_on_an_h200_every_way_fits_and_few_are_in_a_second_group(cell) -> None:
    groups, left_out = names(cell, H200)
    assert left_out == {}
    assert [one[0] for one in groups] == ["model"] * len(groups)
    expected = [arm.name for arm in arms_of(cell)]
    assert ["model", *[name for one in groups for name in one[1:]]] == expected
    assert len(groups) == (2 if cell.name == "adamw32/16384" else 1)
    for one in groups:
        needs = [of_arm(ARMS[name], DEFAULT, cell) for name in one]
        assert sum(needs, shared(DEFAULT, cell, cell.tokens)).within(H200)


def test_with_less_memory_there_are_more_groups_and_reasons() -> None:
    cell = named("adamw32/4096")
    base = shared(DEFAULT, cell, cell.tokens)
    groups, left_out = names(cell, Memory(base.hbm + 9 * 10**9, 12 * 10**9))
    # Host memory holds one optimizer of budget 0, not two; HBM not the largest residents.
    assert ["model", "after-0"] in groups
    assert ["model", "during-0"] in groups
    assert set(left_out) == set()
    groups, left_out = names(cell, Memory(base.hbm + 9 * 10**9, 6 * 10**9))
    assert "after-0" in left_out
    assert "GB of host memory; there are" in left_out["after-0"]
    assert groups[0] == ["model", "torch"]


def test_without_room_for_the_baseline_nothing_is_measured() -> None:
    cell = named("adamw8/4096")
    with pytest.raises(DoesNotFitError, match=r"the baseline needs about .* GB of HBM"):
        names(cell, Memory(10**9, 10**12))


def test_state_is_where_it_is_counted() -> None:
    cell = named("adamw32/4096")
    state = 8 * DEFAULT.parameters
    nothing, half = of_arm(ARMS["after-0"], DEFAULT, cell), of_arm(ARMS["after-0.5"], DEFAULT, cell)
    assert nothing.host == state
    assert half.host == state - state // 2
    assert half.hbm - nothing.hbm == state // 2


def test_what_is_available_is_less_than_there_is() -> None:
    import torch

    found = planning.available(torch.device("cpu"))
    assert 0 < found.hbm + found.host <= psutil.virtual_memory().total


def test_cells_are_chosen_by_pattern() -> None:
    assert select(None) == list(CELLS)
    assert [cell.name for cell in select("adamw8*")] == ["adamw8/4096", "adamw8/16384"]
    assert [cell.name for cell in select("adamw32/4096")] == ["adamw32/4096"]
    with pytest.raises(UnknownCellError, match="'training' matches 'lion'"):
        select("lion")
    with pytest.raises(UnknownCellError, match="adamw32/4096"):
        named("adamw16/4096")


def test_torch_has_no_8_bit_way() -> None:
    assert "torch" in [arm.name for arm in arms_of(named("adamw32/4096"))]
    assert "torch" not in [arm.name for arm in arms_of(named("adamw8/4096"))]
