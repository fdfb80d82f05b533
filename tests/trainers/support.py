"""What the trainers' tests share: optimizers to compare, and a scaler where there is no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from bitsandbytes.optim import GlobalOptimManager

from tests.support import bits

PAGED = 100_000


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested dicts, lists, numbers and tensors, bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert bits(found) == bits(expected), f"{where} differs"
    elif isinstance(expected, Mapping):
        assert set(found) == set(expected), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    else:
        assert found == expected, f"{where}: {found!r} {expected!r}"


def image(optimizer: Any) -> dict[str, Any]:
    """A copy of an optimizer's parameters and state, on the host."""
    while not hasattr(optimizer, "get_state_buffer"):  # a trainer's wrapper
        optimizer = optimizer.optimizer
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    listed = [one for group in optimizer.param_groups for one in group["params"]]
    return {
        "parameters": [one.detach().cpu().clone() for one in listed],
        "state": [
            {
                key: value.cpu().clone() if isinstance(value, torch.Tensor) else value
                for key, value in optimizer.state[one].items()
            }
            for one in listed
        ],
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


def assert_streamed(optimizer: Any) -> None:
    """Every parameter of 100,000 elements or more is streamed, and there are such."""
    routes = optimizer.routes()
    large = [route.path for route in routes if route.numel >= PAGED]
    assert large
    assert set(large) == {"streamed"}


def forget_overrides() -> None:
    """As in a new process: bitsandbytes keeps overrides by ``id(parameter)`` and by position."""
    GlobalOptimManager.get_instance().initialize()


def use_fp16_on_cpu(accelerator: Any) -> torch.amp.GradScaler:
    """Give an `accelerate.Accelerator` what it gives itself for fp16 on a GPU; it refuses a CPU.

    The first scale is so large that the first steps overflow and are skipped.
    """
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-13)
    return accelerator.scaler
