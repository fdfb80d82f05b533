"""bitsandbytes' CUDA kernels, called at the C functions that its operators call.

Between two launches a step over many small parameters waits for the host. bitsandbytes' Python for
one launch takes about 10 microseconds, most of it in wrapping each argument and in choosing a GPU
that is current already. Here the argument types are declared once, so that ctypes converts plain
numbers itself, and addresses of state are kept. Source of functions and signatures: bitsandbytes
0.50.2, ``backends/cuda/ops.py``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import bitsandbytes
import torch

from pageahead.optim.compat import is_tested

if TYPE_CHECKING:
    from pageahead.optim.update import StateViews

__all__ = ["SIGNATURE_8BIT", "SIGNATURE_32BIT", "kernel", "launch_8bit", "launch_32bit"]

_address, _float, _int, _bool = ctypes.c_void_p, ctypes.c_float, ctypes.c_int32, ctypes.c_bool

SIGNATURE_32BIT = (*(_address,) * 5, *(_float,) * 8, _int, *(_float,) * 2, _bool, _int)
"""gradient, parameter, state1, state2, unorm; max_unorm, param_norm, beta1, beta2, beta3, alpha,
eps, weight_decay; step; lr, gnorm_scale; skip_zeros; elements."""

SIGNATURE_8BIT = (
    *(*(_address,) * 4, *(_float,) * 5, _int, _float),
    *(*(_address,) * 4, *(_float,) * 2, _bool, _int),
)
"""parameter, gradient, state1, state2; beta1, beta2, beta3, alpha, eps; step; lr; qmap1, qmap2,
absmax1, absmax2; weight_decay, gnorm_scale; skip_zeros; elements."""

_COLUMNS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Where bitsandbytes' tables keep the function for gradients of a dtype."""


@cache
def kernel(name: str, bits: int, dtype: torch.dtype) -> Callable[..., None] | None:
    """The C function of one kernel, or None where only bitsandbytes' operator may call it.

    Args:
        name: bitsandbytes' ``optimizer_name``.
        bits: of its state, 8 or 32.
        dtype: of gradients.
    """
    if not is_tested(bitsandbytes.__version__):
        return None  # its signature may be another one, and C would not say so
    from bitsandbytes.backends.cuda import ops

    table = ops.str2optimizer32bit if bits == 32 else ops.str2optimizer8bit_blockwise
    functions = table.get(name, ())
    column = _COLUMNS[dtype]
    if column >= len(functions):
        return None
    address = _address_of(functions[column])
    # A function object of our own: bitsandbytes' has no types, and must not get any.
    signature = SIGNATURE_32BIT if bits == 32 else SIGNATURE_8BIT
    return None if address is None else ctypes.CFUNCTYPE(None, *signature)(address)


def _address_of(function: Any) -> int | None:
    try:
        return ctypes.cast(function, ctypes.c_void_p).value
    except ctypes.ArgumentError:  # a Python function: this library lacks the kernel
        return None


def launch_32bit(
    function: Callable[..., None],
    gradient: torch.Tensor,
    parameter: torch.Tensor,
    views: StateViews,
    config: Mapping[str, Any],
    step: int,
    beta3: float,
    alpha: float,
) -> None:
    """Launch a 32-bit update without a limit on its norm, on the current GPU's default stream.

    Args:
        function: from `kernel`.
        gradient, parameter: whole; the slice is the one of `views`.
        views: its state.
        config: bitsandbytes' hyperparameters.
        step: the number of the update, from 1.
        beta3, alpha: AdEMAMix's; 0 for the others.
    """
    first, second = views.addresses[:2]
    start = views.start
    betas = config["betas"]
    function(
        gradient.data_ptr() + start * gradient.itemsize,
        parameter.data_ptr() + start * parameter.itemsize,
        first,
        second,
        None,
        config["max_unorm"],
        0.0,
        betas[0],
        betas[1],
        beta3,
        alpha,
        config["eps"],
        config["weight_decay"],
        step,
        config["lr"],
        1.0,
        config["skip_zeros"],
        views.stop - start,
    )


def launch_8bit(
    function: Callable[..., None],
    gradient: torch.Tensor,
    parameter: torch.Tensor,
    views: StateViews,
    config: Mapping[str, Any],
    step: int,
    beta3: float,
    alpha: float,
) -> None:
    """Launch an 8-bit update; see `launch_32bit` for the arguments."""
    first, second, qmap1, qmap2, absmax1, absmax2 = views.addresses
    start = views.start
    betas = config["betas"]
    function(
        parameter.data_ptr() + start * parameter.itemsize,
        gradient.data_ptr() + start * gradient.itemsize,
        first,
        second,
        betas[0],
        betas[1],
        beta3,
        alpha,
        config["eps"],
        step,
        config["lr"],
        qmap1,
        qmap2,
        absmax1,
        absmax2,
        config["weight_decay"],
        1.0,
        config["skip_zeros"],
        views.stop - start,
    )
