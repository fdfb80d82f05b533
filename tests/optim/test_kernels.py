"""What reaches bitsandbytes' C functions is what its own operators would pass, bit for bit."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from pageahead.optim import compat, kernels, update
from pageahead.optim.hyperparameters import Hyperparameters
from pageahead.optim.kernels import SIGNATURE_8BIT, SIGNATURE_32BIT, kernel
from pageahead.optim.update import StateViews

NUMEL = 1024
CONFIG = {
    "betas": (0.9, 0.999, 0.9999),
    "alpha": 5.0,
    "t_alpha": 100,
    "t_beta3": 100,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "lr": 3e-4,
    "max_unorm": 0.0,
    "skip_zeros": False,
}


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bitsandbytes' operators for CUDA, which a build without CUDA imports with some help."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    from bitsandbytes.backends.cuda import ops

    kernel.cache_clear()
    yield ops
    kernel.cache_clear()


class Recorder:
    """Stands where a kernel is, in three places of its table; keeps what it is called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ops: Any, name: str, bits: int) -> None:
        self.calls: list[tuple[int, tuple[Any, ...]]] = []
        signature = SIGNATURE_32BIT if bits == 32 else SIGNATURE_8BIT
        make = ctypes.CFUNCTYPE(None, *signature)
        functions = tuple(make(self._recording(column)) for column in range(3))
        table = ops.str2optimizer32bit if bits == 32 else ops.str2optimizer8bit_blockwise
        monkeypatch.setitem(table, name, functions)

    def _recording(self, column: int) -> Any:
        return lambda *arguments: self.calls.append((column, arguments))


def views_of(name: str, bits: int, start: int, stop: int) -> StateViews:
    whole = (start, stop) == (0, NUMEL)
    count, rows = stop - start, 2 if name == "ademamix" else 1
    dtype = torch.float32 if bits == 32 else torch.uint8
    state1 = torch.zeros(rows, count, dtype=dtype)
    state2 = None if name == "lion" else torch.zeros(count, dtype=dtype)
    if bits == 32:
        return StateViews(start, stop, whole, state1, state2)
    absmax2, qmap2 = (None, None) if state2 is None else (torch.zeros(count), torch.zeros(256))
    return StateViews(
        start, stop, whole, state1, state2, torch.zeros(count), absmax2, torch.zeros(256), qmap2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("part", [(0, NUMEL), (256, 768)], ids=["whole", "slice"])
@pytest.mark.parametrize(
    ("name", "bits"), [("adam", 8), ("adam", 32), ("lion", 8), ("lion", 32), ("ademamix", 32)]
)
def test_the_arguments_are_those_of_the_operator(
    name: str,
    bits: int,
    part: tuple[int, int],
    dtype: torch.dtype,
    operators: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(monkeypatch, operators, name, bits)
    parameter, gradient = (torch.zeros(NUMEL, dtype=dtype) for _ in range(2))
    views = views_of(name, bits, *part)
    third = update._third_moment(CONFIG, 7) if name == "ademamix" else None
    config = Hyperparameters.of(CONFIG)
    assert kernels.launched(name, gradient, parameter, views, config, 7, third)

    monkeypatch.setattr(
        update,
        "_operators",
        lambda _: (
            operators._optimizer_update_32bit_impl,
            operators._optimizer_update_8bit_blockwise_impl,
        ),
    )
    through = update._update_32bit if bits == 32 else update._update_8bit
    start, stop = part
    parts = gradient[start:stop], parameter[start:stop]
    through(name, *parts, views, CONFIG, 7, *(third or (0.0, 0.0)))
    ours, theirs = recorder.calls
    assert ours == theirs
    assert ours[0] == kernels._COLUMNS[dtype]


def test_what_needs_more_than_a_call_is_left_to_the_operator(
    operators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders = [
        Recorder(monkeypatch, operators, name, bits) for name, bits in (("adam", 32), ("lion", 8))
    ]
    tensors = torch.zeros(NUMEL), torch.zeros(NUMEL)
    limited = {**CONFIG, "max_unorm": 1.0}
    for name, bits, config in (("adam", 32, limited), ("ademamix", 8, CONFIG)):
        views = views_of(name, bits, 0, NUMEL)
        hyperparameters = Hyperparameters.of(config)
        assert not kernels.launched(name, *tensors, views, hyperparameters, 1, None)
    assert not any(recorder.calls for recorder in recorders)


@pytest.mark.parametrize("bits", [8, 32])
def test_a_function_that_the_library_lacks_or_whose_version_is_untested_is_not_called(
    bits: int, operators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = operators.str2optimizer32bit if bits == 32 else operators.str2optimizer8bit_blockwise
    # A library without CUDA has Python functions in their place, which raise.
    monkeypatch.setitem(table, "adam", (lambda *_: None,) * 3)
    assert kernel("adam", bits, torch.float16) is None
    kernel.cache_clear()
    Recorder(monkeypatch, operators, "adam", bits)
    assert kernel("adam", bits, torch.float16) is not None
    kernel.cache_clear()
    monkeypatch.setattr(kernels.bitsandbytes, "__version__", "0.51.0")
    assert not compat.is_tested("0.51.0")
    assert kernel("adam", bits, torch.float16) is None


def test_a_learning_rate_may_be_a_tensor(operators: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, operators, "lion", 8)
    config = Hyperparameters.of({**CONFIG, "lr": torch.tensor(0.25)})
    views = views_of("lion", 8, 0, NUMEL)
    assert kernels.launched("lion", *(torch.zeros(NUMEL),) * 2, views, config, 1, None)
    ((_, arguments),) = recorder.calls
    assert 0.25 in arguments
