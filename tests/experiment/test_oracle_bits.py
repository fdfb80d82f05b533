"""Bits, tolerances, forms and references: what a comparison is made of."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager

from pageahead.experiment.oracle import reference
from pageahead.experiment.oracle.bits import Bits, compare_images, take
from pageahead.experiment.oracle.case import FORMS, parse_case
from pageahead.experiment.oracle.forms import AsGiven, Contiguous
from pageahead.experiment.oracle.problem import Problem, effective_bits, overridden
from pageahead.experiment.oracle.tolerance import cpu_operator, limited_norm

CPU = torch.device("cpu")


def image(parameter, by_address=False, **state):
    (found,) = take([parameter], [state], by_address=by_address)
    return found


def test_the_first_differing_element_with_both_patterns() -> None:
    values = torch.arange(24, dtype=torch.float16).view(2, 3, 4)
    changed = values.clone()
    changed[1, 0, 2] = -14.0
    changed[1, 2, 3] = 0.0
    found = compare_images(image(values), image(changed))
    assert found.name == "parameter"
    assert found.index == [1, 0, 2]
    assert (found.expected, found.found) == ("14.0", "-14.0")
    assert (found.expected_bits, found.found_bits) == ("0x4b00", "0xcb00")
    assert (found.differing, found.elements) == (2, 24)


def test_bits_count_not_values() -> None:
    nan = torch.tensor([float("nan")])
    assert compare_images(image(nan), image(nan.clone())) is None
    found = compare_images(image(torch.tensor([0.0])), image(torch.tensor([-0.0])))
    assert (found.expected_bits, found.found_bits) == ("0x00000000", "0x80000000")


def test_what_is_missing_or_of_another_kind() -> None:
    one = image(torch.zeros(2), step=3, state1=torch.zeros(2))
    assert compare_images(one, image(torch.zeros(2), step=4, state1=torch.zeros(2))).found == "4"
    missing = compare_images(one, image(torch.zeros(2), step=3))
    assert (missing.name, missing.found) == ("state1", "nothing")
    other = compare_images(one, image(torch.zeros(2), step=3, state1=torch.zeros(1, 2)))
    assert other.index is None
    assert "of shape (1, 2)" in other.found
    assert compare_images(one, image(torch.zeros(2)), skip=("step", "state1")) is None


def test_an_image_is_a_copy() -> None:
    values = torch.zeros(3)
    before = image(values)
    values += 1
    assert before["parameter"].values().tolist() == [0, 0, 0]


def test_state_by_index_and_by_address() -> None:
    logical = torch.arange(16).view(1, 2, 2, 4).to(torch.uint8)
    state = logical.to(memory_format=torch.channels_last)
    assert image(state[0], state1=state)["state1"].values().tolist() == list(range(16))
    by_address = image(state[0], True, state1=state)["state1"]
    assert by_address.values().tolist() == [i for pair in range(8) for i in (pair, pair + 8)]
    assert by_address.shape == (1, 2, 2, 4)


def test_one_element_may_have_any_stride() -> None:
    assert image(torch.zeros(1, 2)[:, 0])["parameter"].raw.numel() == 4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(), (5,), (6, 4), (2, 3, 4, 5)])
def test_forms_hold_the_same_values_and_never_the_problems_memory(form, shape) -> None:
    values = torch.randn(shape)
    for number in range(3):
        given = AsGiven(form).parameter(number, values)
        assert torch.equal(given, values)
        assert given.data_ptr() != values.data_ptr()
        for step in range(3):
            one = AsGiven(form).gradient(number, step, values)
            other = Contiguous(form).gradient(number, step, values)
            assert torch.equal(one, other)
            assert other.is_contiguous()
            assert values.data_ptr() not in (one.data_ptr(), other.data_ptr())


def test_forms_are_what_they_say() -> None:
    values = torch.randn(8, 6, 4, 4)
    last = AsGiven("channels_last")
    assert last.parameter(0, values).is_contiguous(memory_format=torch.channels_last)
    assert not AsGiven("strided").parameter(0, values).is_contiguous()
    assert not AsGiven("strided").parameter(1, values).is_contiguous()
    strides = [AsGiven("strided").gradient(0, step, values).stride() for step in range(3)]
    assert len(set(strides)) == 3
    assert strides[2][0] == 0
    padded = Contiguous("contiguous", padded={1}).parameter(1, values)
    assert padded.shape == (768,)
    assert Contiguous("contiguous", padded={1}).parameter(1, torch.ones(257)).tolist() == [
        *[1.0] * 257,
        *[0.0] * 255,
    ]


def test_fewer_steps_are_the_beginning_of_more() -> None:
    long, short = (
        Problem(parse_case(f"adam/8/float32/streamed/7,scalar/steps={steps}"), CPU)
        for steps in (6, 2)
    )
    for step in range(2):
        for one, other in zip(long.gradients[step], short.gradients[step], strict=True):
            assert torch.equal(one, other)
    assert not torch.equal(long.gradients[0][0], long.gradients[1][0])


@pytest.mark.parametrize(("gradients", "steps"), [("absent", 6), ("empty", 5)])
def test_gradients_go_and_come_back(gradients, steps) -> None:
    problem = Problem(parse_case(f"adam/8/float32/streamed/7,8,9/steps={steps}/{gradients}"), CPU)
    there = [[problem.has_gradient(n, step) for n in range(3)] for step in range(steps)]
    assert any(not any(row) for row in there) == (gradients == "empty")
    for number in range(3):
        column = [row[number] for row in there]
        assert True in column[column.index(False) :]
    assert len(list(problem.listings_with_gradient())) == sum(map(sum, there))


def test_hyperparameters_change_and_differ_between_groups() -> None:
    problem = Problem(parse_case("ademamix/8/float32/streamed/7,8/changing"), CPU)
    run = reference.Run(
        problem, AsGiven("contiguous"), lambda groups: torch.optim.AdamW(groups, lr=1.0)
    )
    seen = []
    for step in range(5):
        problem.set_hyperparameters(run.optimizer.param_groups, step)
        groups = run.optimizer.param_groups
        seen.append(tuple(groups[0][key] for key in ("lr", "weight_decay", "betas", "t_alpha")))
        assert groups[0]["lr"] != groups[1]["lr"]
    assert len(set(seen)) == 5
    assert [one[3] for one in seen].count(None) == 1


def test_overrides_end_with_the_case() -> None:
    case = parse_case("adam/8/float32/streamed/200,200,200/overrides")
    parameters = [torch.nn.Parameter(torch.zeros(200)) for _ in range(3)]
    manager = GlobalOptimManager.get_instance()
    with overridden(case, parameters):
        assert manager.pid2config[id(parameters[0])] == {"optim_bits": 32}
        assert "lr" in manager.pid2config[id(parameters[1])]
    assert manager.pid2config == {}
    assert [effective_bits(case, number) for number in range(3)] == [32, 32, 8]


@pytest.mark.parametrize("form", FORMS)
def test_zeros_behind_it_do_not_change_a_parameter(form) -> None:
    """What is expected on a GPU where bitsandbytes races is, on the CPU, what it computes."""
    case = parse_case(f"ademamix/8/bfloat16/streamed/70x71,5x9x11x9,4096,5x9x10x10/changing/{form}")
    problem = Problem(case, CPU)
    racing = reference._racing(case)
    assert racing == {0, 1, 3}
    kind, arguments, why = reference.legacy_class(case, "cpu")
    plain = reference._run(problem, AsGiven(form), kind, arguments, why, (2, 5))
    padded = reference._run(problem, Contiguous(form, padded=racing), kind, arguments, why, (2, 5))
    for step in (2, 5):
        images = reference._unpadded(case, racing, padded.images[step])
        for expected, found in zip(plain.images[step], images, strict=True):
            assert compare_images(expected, found) is None


def test_reference_classes() -> None:
    named = parse_case("ademamix32bit/32/float32/streamed/one")
    assert reference.legacy_class(named, "cuda")[:2] == ("PagedAdEMAMix", {"optim_bits": 32})
    assert reference.legacy_class(named, "cpu")[:2] == ("AdEMAMix", {"optim_bits": 32})
    assert "no schedules" in reference.legacy_class(named, "cuda")[2]
    plain = parse_case("lion/8/float32/streamed/one")
    assert reference.legacy_class(plain, "cuda") == ("PagedLion", {"optim_bits": 8}, "")
    eight = parse_case("adamw8bit/8/float32/streamed/one")
    assert reference.legacy_class(eight, "cpu") == ("AdamW8bit", {}, "")


def ademamix_image(**changes):
    """An image as 8-bit AdEMAMix leaves it, for 1,000 elements."""
    case = parse_case("ademamix/8/float32/streamed/10x500")
    problem = Problem(case, CPU)
    kind, arguments, why = reference.legacy_class(case, "cpu")
    found = reference._run(problem, AsGiven("contiguous"), kind, arguments, why, (5,))
    return {**found.images[5][0], **changes}


def shifted(bits: Bits, by: int) -> Bits:
    return Bits(bits.dtype, bits.shape, bits.raw.roll(by * bits.dtype.itemsize))


def test_the_cpu_operator_may_round_to_a_neighbour() -> None:
    expected = ademamix_image()
    codes = expected["state1"].raw.clone()
    codes[::40] = (codes[::40].int() + 1).clamp(max=255).to(torch.uint8)
    found = {**expected, "state1": Bits(torch.uint8, expected["state1"].shape, codes)}
    rule = cpu_operator(1e-2, torch.float32)
    assert rule.compare(expected, expected) is None
    assert rule.compare(expected, found) is None
    assert compare_images(expected, found) is not None


@pytest.mark.parametrize("name", ["parameter", "state1", "state2", "absmax1", "absmax2"])
def test_the_cpu_operator_may_not_be_elsewhere(name) -> None:
    expected = ademamix_image()
    found = {**expected, name: shifted(expected[name], 1)}
    difference = cpu_operator(1e-2, torch.float32).compare(expected, found)
    assert difference is not None
    assert "beyond tolerance" in difference.remark


def test_one_bad_block_is_seen_and_nan_is_far_from_everything() -> None:
    expected = ademamix_image()
    values = expected["parameter"].values()
    values[512:768] = float("nan")
    found = {**expected, "parameter": Bits(torch.float32, (10, 500), values.view(torch.uint8))}
    difference = cpu_operator(1e-2, torch.float32).compare(expected, found)
    assert difference.name == "parameter"
    assert difference.index == [1, 12]


def test_what_has_no_rule_has_to_be_equal() -> None:
    expected = ademamix_image()
    rule = cpu_operator(1e-2, torch.float32)
    assert rule.compare(expected, {**expected, "step": 6}).name == "step"
    assert rule.compare(expected, {**expected, "state1": 6}).name == "state1"


def test_a_limited_norm_may_round_and_no_more() -> None:
    values = torch.tensor([1.0, 2.0]).half()
    near = torch.tensor([1.0, 2.002]).half()
    far = torch.tensor([1.0, 2.1]).half()
    one, norm = image(values, unorm_vec=torch.ones(1)), torch.full((1,), 1.00001)
    rule = limited_norm(5, torch.float16)
    assert rule.compare(one, image(near, unorm_vec=norm)) is None
    assert rule.compare(one, image(far, unorm_vec=norm)).index == [1]
    assert rule.compare(one, image(values, unorm_vec=norm * 1.1)).name == "unorm_vec"
    assert rule.compare(one, image(values)).name == "unorm_vec"
