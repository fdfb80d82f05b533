"""Which cells there are, and that each is found again by its name."""

from __future__ import annotations

from itertools import combinations

import pytest

from pageahead.experiment.cells import UnknownCellError
from pageahead.experiment.oracle.case import PAGINGS, CaseError, Movement, parse_case
from pageahead.experiment.oracle.covering import covering, everything, tuples
from pageahead.experiment.oracle.layouts import LAYOUTS, Layout, parse_layout
from pageahead.experiment.oracle.matrix import (
    DIMENSIONS,
    STRENGTH,
    choice_exclusion,
    exclusion,
    full,
    selection,
)
from pageahead.optim.paging import STRATEGIES

CASE = "adamw/8/float16/streamed+staging=1MiB/300x1000,100001,@0/steps=3/absent/strided"


def values_of(case) -> dict[str, str]:
    """A case in the terms of `DIMENSIONS`, and its movement."""
    return {
        "family": case.family,
        "bits": str(case.bits),
        "dtype": case.dtype,
        "layout": str(case.layout),
        "gradients": case.gradients,
        "overrides": case.overrides,
        "form": case.form,
        "hyper": case.hyper,
        "naming": "named" if case.named else "plain",
        "movement": str(case.movement),
    }


@pytest.fixture(scope="module")
def selected():
    return selection("cpu")


def test_any_two_values_meet_in_the_selection(selected) -> None:
    dimensions = {**DIMENSIONS, "movement": [str(one) for one in PAGINGS]}
    met = {
        pair for case in selected.cases for pair in combinations(sorted(values_of(case).items()), 2)
    }
    wanted = {tuple(sorted(pair)) for pair in tuples(dimensions, choice_exclusion, 2)}
    assert wanted <= met
    impossible = {
        tuple(sorted(pair)) for pair in tuples(dimensions, lambda choice: None, 2)
    } - wanted
    assert impossible == {
        (("family", "ademamix"), ("overrides", "unorm")),
        (("layout", "giant"), ("overrides", "unorm")),
        (("layout", "one"), ("overrides", "unorm")),
    }


def test_any_three_meet_apart_from_the_movement(selected) -> None:
    assert STRENGTH == 3
    met = {
        group
        for case in selected.cases
        for group in combinations([(name, values_of(case)[name]) for name in DIMENSIONS], STRENGTH)
    }
    assert set(tuples(DIMENSIONS, choice_exclusion, STRENGTH)) <= met


def test_the_selection_is_the_same_each_time(selected) -> None:
    assert selection("cpu").cases == selected.cases


def test_every_movement_runs_beside_the_others(selected) -> None:
    for group in selected.groups():
        assert [case.movement for case in group] == list(PAGINGS)
        assert len({case.problem for case in group}) == 1
    assert {one.strategy for one in PAGINGS} == set(STRATEGIES)


def test_five_to_twenty_steps(selected) -> None:
    steps = {case.steps for case in selected.cases}
    assert min(steps) == 5
    assert max(steps) == 20


def test_full_is_the_product_without_what_is_excluded() -> None:
    matrix = full("cpu")
    combinations_of_free = 1
    for name, values in DIMENSIONS.items():
        combinations_of_free *= 1 if name in ("hyper", "naming") else len(values)
    excluded = sum(matrix.excluded.values())
    assert len(matrix.cases) == combinations_of_free * len(PAGINGS) - excluded
    assert len({str(case) for case in matrix.cases}) == len(matrix.cases)
    assert all(exclusion(case, "cpu") is None for case in matrix.cases)
    # What takes turns meets every pair of other values, too.
    met = {
        pair for case in matrix.cases for pair in combinations(sorted(values_of(case).items()), 2)
    }
    assert {tuple(sorted(pair)) for pair in tuples(DIMENSIONS, choice_exclusion, 2)} <= met


def test_on_a_gpu_the_racing_optimizer_is_checked_against_the_cpu_too() -> None:
    for make in (selection, full):
        extra = set(make("cuda").cases) - set(make("cpu").cases)
        assert {case.against for case in extra} == {"cpu"}
        assert {(case.family, case.bits) for case in extra} == {("ademamix", 8)}
        assert {case.dtype for case in extra} == set(DIMENSIONS["dtype"])
        assert all(exclusion(case, "cuda") is None for case in extra)
        assert all(exclusion(case, "cpu") is not None for case in extra)


def test_names_are_read_back() -> None:
    for case in full("cuda").cases[::97]:
        assert parse_case(str(case)) == case


def test_a_name_says_everything() -> None:
    case = parse_case(CASE)
    assert str(case) == CASE
    assert case.class_name == "PagedAdamW"
    assert case.movement == Movement(staging=1 << 20)
    assert case.layout == Layout(((300, 1000), (100_001,)), (0, 1, 0))
    assert (case.steps, case.gradients, case.form) == (3, "absent", "strided")
    assert parse_case("lion32bit/32/float32/sequential/one").class_name == "PagedLion32bit"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("adamw/8", ["2 words", "class/bits/dtype/movement/layout"]),
        ("adamx/8/float16/streamed/one", ["class 'adamx'", "ademamix", "Did you mean 'adam"]),
        ("adamw/16/float16/streamed/one", ["bits '16'", "8, 32"]),
        ("adamw8bit/32/float16/streamed/one", ["class 'adamw8bit'"]),
        ("adamw/8/half/streamed/one", ["dtype 'half'", "bfloat16"]),
        ("adamw/8/float16/steamed/one", ["'steamed'", "Did you mean 'streamed'"]),
        ("adamw/8/float16/streamed+ring=2/one", ["setting 'ring'", "hbm_budget"]),
        ("adamw/8/float16/streamed+staging=9/one", ["staging=9", "1048576"]),
        ("adamw/8/float16/streamed+staging=x/one", ["staging=x"]),
        ("adamw/8/float16/streamed+hbm_budget=1.5/one", ["hbm_budget=1.5", "0.0 to 1.0"]),
        ("adamw/8/float16/streamed/won", ["'won' is no layout", "heterogeneous"]),
        ("adamw/8/float16/streamed/5,@1", ["@1", "not yet there"]),
        ("adamw/8/float16/streamed/5x0", ["no elements"]),
        ("adamw/8/float16/streamed/one/apsent", ["option 'apsent'", "Did you mean 'absent'"]),
        ("adamw/8/float16/streamed/one/steps=0", ["option 'steps=0'", "steps=5"]),
    ],
)
def test_what_is_no_case_is_refused_with_what_could_stand_there(text, said) -> None:
    with pytest.raises(CaseError) as error:
        parse_case(text)
    for words in said:
        assert words in str(error.value)


@pytest.mark.parametrize("text", [*LAYOUTS, "5", "scalar,3x4", "8,9,@0,@1,@0"])
def test_layouts_are_read_back(text) -> None:
    assert str(parse_layout(text)) == text


def test_layouts_stand_on_both_sides_of_every_limit() -> None:
    numels = {name: layout.numels for name, layout in LAYOUTS.items()}
    assert {99_999, 100_000, 100_001, 4_095, 4_096} == set(numels["boundary"])
    assert all(numel % 256 for numel in numels["odd"])
    assert len(numels["one"]) == len(numels["giant"]) == 1
    assert len(numels["tiny"]) >= 200
    assert max(numels["tiny"]) < 100_000
    assert min(numels["mixed"]) < 100_000 <= max(numels["mixed"])
    # Some bits are compared where bitsandbytes' AdEMAMix does not race, too.
    assert all(numel % 256 == 0 or numel < 4_096 for numel in numels["mixed"])
    assert LAYOUTS["twice"].repeats
    assert all(
        any(len(shape) == 4 for shape in layout.shapes) or name == "odd"
        for name, layout in LAYOUTS.items()
    )


def test_matching(selected) -> None:
    chosen = selected.matching("LION*/giant*").cases
    assert chosen
    assert all(case.family == "lion" for case in chosen)
    assert all(case in selected.cases for case in selected.matching("lookahead").cases)
    assert selected.matching(None) is selected
    with pytest.raises(UnknownCellError, match="'sgd'"):
        selected.matching("sgd")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ademamix/32/float32/streamed/tiny/unorm", "KeyError"),
        ("adam/32/float32/streamed/100000/unorm", "every parameter is paged"),
        ("adam/32/float32/streamed/300x1000/channels_last", "four dimensions"),
        ("adam/8/float32/streamed/one/against=cpu", "the reference anyway"),
    ],
)
def test_what_cannot_be_compared_has_a_reason(text, said) -> None:
    assert said in (exclusion(parse_case(text), "cpu") or "")


def test_covering_leaves_nothing_out_and_is_small() -> None:
    dimensions = {"a": ("1", "2", "3"), "b": ("x", "y"), "c": ("p", "q")}

    def excluded(choice):
        return "no" if choice.get("a") == "3" and choice.get("b") == "y" else None

    chosen = covering(dimensions, excluded, 2)
    met = {pair for one in chosen for pair in combinations(one.items(), 2)}
    assert met >= set(tuples(dimensions, excluded, 2))
    assert all(excluded(one) is None for one in chosen)
    assert len(chosen) < len([one for one in everything(dimensions) if excluded(one) is None])
