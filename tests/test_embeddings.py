"""Embeddings with 32-bit state, as `Trainer` has them."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager
from torch import nn

import pageahead
from tests.support import assert_same_bits, legacy, train


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(500, 256), nn.Linear(256, 512), nn.Embedding(100, 64))


def test_embeddings_have_32_bit_state_and_the_rest_8() -> None:
    model, other = make_model(), make_model()
    assert pageahead.keep_embeddings_32bit(model) == ["0", "2"]
    assert pageahead.keep_embeddings_32bit(other) == ["0", "2"]
    optimizer = pageahead.PagedAdamW8bit(model.parameters())
    expected = legacy("PagedAdamW8bit", other.parameters())
    for one in (optimizer, expected):
        train(one, range(3))
    widths = [optimizer.state[one]["state1"].dtype for one in model.parameters()]
    assert widths == [torch.float32, torch.uint8, torch.float32, torch.float32]
    assert_same_bits(optimizer, expected)


def test_calling_it_twice_registers_once() -> None:
    model = make_model()
    for _ in range(2):
        assert pageahead.keep_embeddings_32bit(model) == ["0", "2"]
    assert len(GlobalOptimManager.get_instance().module_weight_config_triple) == 2


def test_a_model_without_embeddings_has_none() -> None:
    assert pageahead.keep_embeddings_32bit(nn.Linear(2, 2)) == []


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, not \[\]"):
        pageahead.keep_embeddings_32bit([])  # type: ignore[arg-type]
