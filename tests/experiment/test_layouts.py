from __future__ import annotations

from math import prod

import pytest
import torch

from pageahead.experiment.layouts import VECTORS, WORKING_SETS, public, uniform, working_set
from pageahead.experiment.public_models import MODELS
from pageahead.optim.routing import PAGED_NUMEL

MIB = 1 << 20


def test_working_sets_are_those_of_the_experiment() -> None:
    assert [what.mebibytes for what in WORKING_SETS] == [2, 8, 32, 64, 256]
    counts = [what.parameters for what in WORKING_SETS]
    assert (min(counts), max(counts)) == (8, 64)


@pytest.mark.parametrize("bytes_per_state", [1, 4])
@pytest.mark.parametrize("what", WORKING_SETS, ids=lambda what: f"{what.mebibytes}MiB")
def test_a_working_set_has_its_bytes_in_uneven_parameters(what, bytes_per_state) -> None:
    numels = [prod(shape) for shape in working_set(what, bytes_per_state).shapes]
    paged = [numel for numel in numels if numel >= PAGED_NUMEL]
    small = [numel for numel in numels if numel < PAGED_NUMEL]
    assert sum(paged) * bytes_per_state == what.mebibytes * MIB
    assert len(numels) == what.parameters
    assert len(small) == what.vectors
    assert set(small) <= set(VECTORS)
    assert max(paged) >= 1.9 * min(paged)
    # Small ones lie between large ones, as in a model, wherever there is more than one group.
    assert (numels[what.vectors :] != sorted(numels[what.vectors :], reverse=True)) or (
        what.groups == 1
    )


def test_even_parameters() -> None:
    assert uniform(3, 2).shapes == ((2 * MIB,),) * 3
    assert uniform(3, 2).name == "3x2Mi"


@pytest.mark.parametrize("name", MODELS)
def test_public_models_are_what_transformers_makes_of_their_configurations(name) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers, which shapes are compared with, is not installed"
    )
    model = MODELS[name]
    config = getattr(transformers, model.config_class)(**model.config)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    shapes = tuple(tuple(parameter.shape) for parameter in made.parameters())
    assert public(name, cpu_divisor=1).shapes == shapes


@pytest.mark.parametrize(
    ("name", "parameters", "elements"),
    [
        ("llama-3.2-1b", 146, 1_235_814_400),
        ("qwen2.5-0.5b", 290, 494_032_768),
        ("gpt2", 148, 124_439_808),
    ],
)
def test_public_models_have_their_published_sizes(name, parameters, elements) -> None:
    shapes = public(name, cpu_divisor=1).shapes
    assert len(shapes) == parameters
    assert sum(map(prod, shapes)) == elements
