from __future__ import annotations

import pytest
import torch

from pageahead.experiment.training.determinism import difference, repeatable
from pageahead.experiment.training.gpt import DEFAULT, GPT, Shape, shape_for
from pageahead.optim.routing import PAGED_NUMEL

CPU = torch.device("cpu")
TINY = Shape(layers=2, width=192, vocabulary=1024, positions=64)


def text(shape: Shape, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocabulary, (2, 33), generator=generator)


def test_the_default_has_1340_million_parameters() -> None:
    assert shape_for(1_340_000_000) == DEFAULT
    assert DEFAULT.parameters == pytest.approx(1.34e9, rel=0.005)
    assert 8 * DEFAULT.parameters == pytest.approx(10.7e9, rel=0.005)


@pytest.mark.parametrize("parameters", [2_000_000, 124_000_000, 350_000_000, 7_000_000_000])
def test_a_shape_is_about_as_large_as_wanted(parameters) -> None:
    shape = shape_for(parameters)
    assert shape.parameters == pytest.approx(parameters, rel=0.1)
    assert shape.width % shape.heads == 0


def test_a_size_that_no_shape_has_is_refused() -> None:
    with pytest.raises(ValueError, match="the smallest has"):
        shape_for(10_000)


def test_parameters_are_counted_right_seeded_and_paged() -> None:
    model = GPT(TINY, CPU, seed=1)
    assert sum(parameter.numel() for parameter in model.parameters()) == TINY.parameters
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sum(parameter.numel() >= PAGED_NUMEL for parameter in model.parameters()) >= 6
    again, other = GPT(TINY, CPU, seed=1), GPT(TINY, CPU, seed=2)
    assert torch.equal(model.head.weight, again.head.weight)
    assert not torch.equal(model.head.weight, other.head.weight)


def test_the_loss_is_that_of_a_guess_at_first_and_falls() -> None:
    model = GPT(TINY, CPU, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(text(TINY))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(1024.0).log().item(), abs=0.3)
    assert losses[-1] < losses[0] - 0.3


def test_a_model_looks_at_no_later_token() -> None:
    model = GPT(TINY, CPU, seed=1)
    first, second = text(TINY), text(TINY)
    second[:, -1] += 1
    second %= TINY.vocabulary
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(first)
    model(second)
    assert torch.equal(seen[0], seen[1])  # the last token is a target only


def test_gradients_are_the_same_twice_and_a_model_with_noise_is_found_out() -> None:
    model = GPT(TINY, CPU, seed=1)
    before = torch.are_deterministic_algorithms_enabled()
    with repeatable(CPU):
        assert torch.are_deterministic_algorithms_enabled()
        assert difference(model, text(TINY)) is None
        model.norm.register_forward_hook(
            lambda module, inputs, output: output * (1 + torch.rand(()))
        )
        said = difference(model, text(TINY))
    assert torch.are_deterministic_algorithms_enabled() == before
    assert said is not None
    assert "other gradients the second time" in said
    assert all(parameter.grad is None for parameter in model.parameters())
