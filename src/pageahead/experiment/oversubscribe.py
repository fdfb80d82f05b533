"""Less device memory than the state takes: the rest of it is occupied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageahead.experiment.arms import Arm

__all__ = ["OversubscriptionError", "leave_free"]


class OversubscriptionError(RuntimeError):
    """There is too little device memory to begin with; nothing was occupied."""


def leave_free(arms: Sequence[Arm], nbytes: int, device: torch.device) -> torch.Tensor:
    """Occupy all of the device's free memory but `nbytes`; returns the tensor that does.

    Managed state is brought home first, so that none of it counts as taken. To be called after
    each arm has stepped once: kernels are loaded then, and everything but managed state is made.

    Raises:
        OversubscriptionError: less than `nbytes` is free.
    """
    for arm in arms:
        arm.bring_home()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free <= nbytes:
        raise OversubscriptionError(
            f"{free:,} bytes of device memory are free, which is no more than the {nbytes:,} that "
            f"were to be left; free some, or leave oversubscribed cells out"
        )
    return torch.empty(free - nbytes, dtype=torch.uint8, device=device)
