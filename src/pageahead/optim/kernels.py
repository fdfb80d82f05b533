"""bitsandbytes' CUDA kernels, called at the C functions that its operators call.

Between two launches a step over many small parameters waits for the host. bitsandbytes' Python for
one launch takes about 10 microseconds, most of it in wrapping each argument and in choosing a GPU
that is current already. Here argument types are declared once, and what is known before is
converted before: hyperparameters once for each group and step, addresses of state once for each
plan. Source of functions and signatures: bitsandbytes 0.50.2, ``backends/cuda/ops.py``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import bitsandbytes
import torch

from pageahead.optim.compat import is_tested

if TYPE_CHECKING:
    from pageahead.optim.hyperparameters import Hyperparameters
    from pageahead.optim.update import StateViews

__all__ = ["SIGNATURE_8BIT", "SIGNATURE_32BIT", "kernel", "launched"]

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

ZERO, ONE = ctypes.c_float(0.0), ctypes.c_float(1.0)

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


def launched(
    name: str,
    gradient: torch.Tensor,
    parameter: torch.Tensor,
    views: StateViews,
    config: Hyperparameters,
    step: int,
    third: tuple[float, float] | None,
) -> bool:
    """Launch an update on the current GPU's default stream, if it is one that takes only a call.

    Args:
        name: bitsandbytes' ``optimizer_name``.
        gradient, parameter: whole and contiguous; the slice is the one of `views`.
        views: its state.
        config: hyperparameters.
        step: the number of the update, from 1.
        third: AdEMAMix's `beta3` and `alpha`.

    Returns:
        Whether it was launched; if not, it is for bitsandbytes' operator.
    """
    wide = views.absmax1 is None
    # A limited norm is computed first, and AdEMAMix's 8-bit kernel wants whole blocks.
    if config.limited if wide else name == "ademamix":
        return False
    function = kernel(name, 32 if wide else 8, gradient.dtype)
    if function is None:
        return False
    g, p = gradient.data_ptr(), parameter.data_ptr()
    if start := views.start:
        g += start * gradient.itemsize
        p += start * parameter.itemsize
    state1, state2, qmap1, qmap2, absmax1, absmax2 = views.addresses
    count = views.count
    max_unorm, beta1, beta2, eps, decay, lr, skip_zeros = config.numbers
    beta3, alpha = third or (ZERO, ZERO)
    if wide:
        function(
            *(g, p, state1, state2, None, max_unorm, ZERO, beta1, beta2, beta3, alpha),
            *(eps, decay, step, lr, ONE, skip_zeros, count),
        )
    else:
        function(
            *(p, g, state1, state2, beta1, beta2, beta3, alpha, eps, step, lr),
            *(qmap1, qmap2, absmax1, absmax2, decay, ONE, skip_zeros, count),
        )
    return True
