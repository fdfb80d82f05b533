from __future__ import annotations

import bitsandbytes
import pytest
import torch
from bitsandbytes.cextension import lib
from bitsandbytes.functional import GlobalPageManager

from pageahead.experiment import legacy


@pytest.fixture
def optimizer():
    """bitsandbytes' optimizer with its large state marked as it marks managed memory."""
    pages = GlobalPageManager.get_instance()
    pages.initialize()
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (131_072, 64)]
    made = bitsandbytes.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    for name in ("state1", "state2"):
        tensor = made.state[parameters[0]][name]
        tensor.is_paged = True
        pages.paged_tensors.append(tensor)
    yield made
    pages.initialize()


def test_all_managed_memory_is_freed_once_and_counted(optimizer) -> None:
    expected = {tensor.data_ptr() for tensor in legacy.managed_state(optimizer)}
    freed: list[int] = []
    assert legacy.free_managed_state(optimizer, freed.append) == 2 * 131_072 * 4
    assert len(freed) == 2
    assert set(freed) == expected
    assert GlobalPageManager.get_instance().paged_tensors == []
    assert not optimizer.state


def test_memory_of_someone_else_is_not_overlooked(optimizer) -> None:
    GlobalPageManager.get_instance().paged_tensors.append(torch.zeros(4))
    freed: list[int] = []
    with pytest.raises(RuntimeError, match=r"lists 3 managed tensors.*has 2"):
        legacy.free_managed_state(optimizer, freed.append)
    assert freed == []
    assert len(legacy.managed_state(optimizer)) == 2


def test_a_refusal_of_cuda_is_an_error(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        lib, "cudaFree", lambda address: asked.append(address.value) or 1, raising=False
    )
    with pytest.raises(RuntimeError, match="error 1"):
        legacy.cuda_free(4096)
    assert asked == [4096]
