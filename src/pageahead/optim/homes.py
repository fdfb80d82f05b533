"""Where each parameter's state lives: decided when it is made, checked at every step.

Under ``hbm_budget="auto"`` and after ``release()``, `pageahead.optim.elastic` changes it later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pageahead.device import Block, device_for
from pageahead.memory.layout import StateShape
from pageahead.optim.active import Active
from pageahead.optim.paging import Paging
from pageahead.optim.routing import Candidate, choose
from pageahead.optim.update import MAX_LAUNCH

__all__ = ["Home", "check_homes", "choose_homes", "refuse_capture"]


@dataclass(eq=False, slots=True)
class Home:
    """Where one parameter's state lives.

    Attributes:
        paged: whether it travels (or migrates) at each step; otherwise it stays on the device.
        reason: why, in words.
        shape: of its state tensors; of a sharded parameter those of this process.
        device: the parameter's, when state was made.
        large: whether the parameter is large enough for its state to be paged.
        movable: whether it may change between device and arena later on.
        offset: of its state in the arena, for the streamed strategy.
        placed: whether it has a place in the arena; it keeps it while its state is resident.
        block: the device memory that resident state, if it is movable, was made in.
        tensors: ``state1`` and, with two states, ``state2``.
        scales: ``absmax1`` and ``absmax2``, where there are.
    """

    paged: bool
    reason: str
    shape: StateShape
    device: torch.device
    large: bool = False
    movable: bool = False
    offset: int = 0
    placed: bool = False
    block: Block | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)


def choose_homes(
    candidates: Sequence[Candidate],
    paging: Paging,
    optimizer_name: str,
    known: Iterable[Home],
    pageable_bytes: int,
    auto_bytes: int | None = None,
) -> list[Home]:
    """Decide where state that is made now will live.

    Args:
        candidates: the parameters that get state, in step order.
        paging: the user's settings.
        optimizer_name: bitsandbytes': ``adam``, ``lion`` or ``ademamix``.
        known: homes decided earlier, which may have used the budget.
        pageable_bytes: state bytes of all parameters large enough to be paged.
        auto_bytes: what ``hbm_budget="auto"`` has for these candidates.

    Raises:
        ValueError: as `pageahead.optim.routing.choose`, or a parameter is too large for
            bitsandbytes' kernels in one piece.
    """
    resident = sum(home.shape.nbytes for home in known if not home.paged and home.large)
    homes = []
    for candidate, (path, reason) in zip(
        candidates, choose(candidates, paging, pageable_bytes, resident, auto_bytes), strict=True
    ):
        paged, numel = path == "paged", candidate.shape.numel
        whole = not paged or paging.strategy != "streamed"
        too_large = optimizer_name == "ademamix" and numel > MAX_LAUNCH
        if too_large and auto_bytes is not None and not candidate.limits_update_norm:
            paged, whole, reason = True, False, "too large for one launch: it has to be cut"
        if too_large and whole:
            raise ValueError(
                f"AdEMAMix counts the elements of both rows of state1 in an int32: {numel:,} "
                f"elements are too many for one launch. Use strategy='streamed' and no "
                f"hbm_budget, which cuts them. Nothing was updated."
            )
        movable = candidate.large and not candidate.limits_update_norm and not too_large
        homes.append(
            Home(
                paged,
                reason,
                candidate.shape,
                candidate.parameter.device,
                large=candidate.large,
                movable=movable and paging.strategy == "streamed",
            )
        )
    return homes


def check_homes(
    actives: Iterable[Active],
    homes: Mapping[torch.Tensor, Home],
    states: Mapping[torch.Tensor, dict[str, Any]],
) -> list[Active]:
    """Check that every parameter and its state are where they were put, and note where.

    The parameters' gradients have been checked: `pageahead.optim.active.check`.

    Returns:
        Those that have no state yet.

    Raises:
        RuntimeError: a parameter moved, or its state was replaced or made by somebody else.
    """
    new = []
    for active in actives:
        parameter = active.parameter
        home, state = homes.get(parameter), states.get(parameter)
        if home is None:
            new.append(active)
            if state:
                raise RuntimeError(
                    f"{_name(active)} has state that this optimizer did not make; load state "
                    f"with load_state_dict(). Nothing was updated."
                )
        elif home.device != active.device:
            raise RuntimeError(
                f"{_name(active)} was on {home.device} when its state was made and is on "
                f"{parameter.device} now. Move the model before making the optimizer, or save "
                f"state_dict(), make a new optimizer and load it. Nothing was updated."
            )
        elif (
            not state
            or (tensors := home.tensors)[0] is not state.get("state1")
            or state.get("state2") is not (tensors[1] if len(tensors) > 1 else None)
            or state.get("absmax1") is not (scales := home.scales)[0]
            or state.get("absmax2") is not scales[1]
        ):
            raise RuntimeError(
                f"the state of {_name(active)} was replaced in optimizer.state; change it in "
                f"place, or load it with load_state_dict(). Nothing was updated."
            )
        else:
            active.home, active.state = home, state
    return new


def refuse_capture(devices: Iterable[torch.device]) -> None:
    """Raise `RuntimeError` if the current stream of one of these devices is being captured."""
    for device in devices:
        if device_for(device).capturing():
            raise RuntimeError(
                "step() was called while a CUDA graph is being captured: transfers of paged "
                "state cannot be captured. Capture forward and backward only, and call step() "
                "outside. Nothing was updated."
            )


def _name(active: Active) -> str:
    shape = tuple(active.parameter.shape)
    return f"parameter {active.pindex} of group {active.gindex} (shape {shape})"
